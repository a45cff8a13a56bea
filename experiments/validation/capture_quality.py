"""Is what was captured serving-grade, and do sites line up over the grid?

1. Every captured unit: measured end-to-end time over its limit, the sum over sites of
   max(bytes / copy bandwidth, FLOPs / 790 TFLOP/s, 2.5 us). Every site counts as one kernel, though some need
   two; of a site's kernels the one that moves most bytes counts, so that partial sums do not raise the limit.
   Bar for units of language models: 90 % of them within 1.5, none above 2. Encoders, denoising and VAE are
   reported.
2. Llama-3-8B decode at batch 32, context 2048: measured time over the time that its bytes need at the bandwidth
   of a 4 GiB device copy (weights without the embedding table + KV of 32 x 2048). Bar: 1.5.
3. Share of decode sites that match by name over all batches and contexts, per model. Bar: 95 %.
4. Kernels without accesses, and the evidence of the accesses there are.

    python experiments/validation/capture_quality.py [--sites UNIT]

`--sites gpt-oss-20b/decode-b32-c2048` lists where a unit loses most time against its limit.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from tesserasim.errors import InputError, TesserasimError
from tesserasim.files import did_you_mean
from tesserasim.terminal import BAD_INPUT, outcome, say
from tesserasim.trace.model import Kernel, Trace
from tesserasim.trace.parquet import read_trace

TRACES = Path(__file__).resolve().parents[2] / "traces"
TENSOR_FLOPS_PER_NS = 790e3  # bf16 GEMM of 8192 x 8192 x 8192, as measured on an H200
KERNEL_NS = 2500.0
APART = ("fit", "fit-paused", "left-out")


def load_traces(folder: Path) -> tuple[dict[str, Trace], list[str]]:
    """The captured units, and why others cannot be judged."""
    traces, problems = {}, []
    for path in sorted(folder.glob("*/*.parquet")):
        if path.parent.name in APART:
            continue
        try:
            trace = read_trace(path)
            rate, e2e = trace.meta.extra.get("copy_gbs"), trace.meta.e2e_ns
            if not trace.kernels or not e2e or type(rate) not in (int, float) or not 0 < rate < math.inf:
                raise InputError(f"{path}: no kernels, end-to-end time or copy bandwidth; capture it again")
            traces[f"{path.parent.name}/{path.stem}"] = trace
        except TesserasimError as error:  # the others are judged all the same
            problems.append(str(error))
    return traces, problems


def site_limits(trace: Trace) -> dict[str, float]:
    """Least ns of every site."""
    sites: dict[str, list[Kernel]] = defaultdict(list)
    for k in trace.kernels:
        sites[k.site].append(k)
    rate = float(trace.meta.extra["copy_gbs"])
    return {
        site: max(
            max(k.read_bytes + k.write_bytes for k in kernels) / rate,
            sum(k.flops for k in kernels) / TENSOR_FLOPS_PER_NS,
            KERNEL_NS,
        )
        for site, kernels in sites.items()
    }


def against_limits(traces: dict[str, Trace]) -> bool:
    print(f"{'unit':<44} {'e2e ms':>9} {'limit ms':>9} {'ratio':>6}")
    ratios = {}
    for name, t in traces.items():
        assert t.meta.e2e_ns is not None
        limit = sum(site_limits(t).values())
        ratio = t.meta.e2e_ns["median"] / limit
        if t.unit in ("prefill", "decode"):
            ratios[name] = ratio
        print(f"{name:<44} {t.meta.e2e_ns['median'] / 1e6:9.3f} {limit / 1e6:9.3f} {ratio:6.2f}")
    if not ratios:
        print("language models: no unit")
        return False
    within = sum(r <= 1.5 for r in ratios.values())
    worst = max(ratios, key=lambda n: ratios[n])
    print(
        f"language models: {within} of {len(ratios)} units within 1.5 x their limit "
        f"({100 * within / len(ratios):.1f} %, bar 90 %); largest {ratios[worst]:.2f} ({worst}; bar 2)"
    )
    return within >= 0.9 * len(ratios) and ratios[worst] <= 2


def bytes_needed(trace: Trace) -> int:
    """Weights except the embedding table, and the whole KV cache, each read once."""
    tables = ("embed", "rope.cos", "rope.sin")  # looked up, not read as a whole
    weights = sum(b.nbytes for b in trace.buffers if b.role == "weight" and b.name not in tables)
    kv = sum(b.nbytes for b in trace.buffers if b.role == "state" and b.bytes_per_token)
    return weights + kv


def llama_decode(trace: Trace | None) -> bool:
    if trace is None or not bytes_needed(trace):
        print("llama-3-8b decode b32 c2048: not captured")
        return False
    assert trace.meta.e2e_ns is not None
    ratio = trace.meta.e2e_ns["median"] * float(trace.meta.extra["copy_gbs"]) / bytes_needed(trace)
    print(f"llama-3-8b decode b32 c2048: {ratio:.2f} x its bytes (bar 1.5)")
    return ratio <= 1.5


def matching_sites(traces: dict[str, Trace]) -> bool:
    decode: dict[str, list[set[str]]] = defaultdict(list)
    for name, t in traces.items():
        if t.unit == "decode":
            decode[name.split("/")[0]].append(set(t.sites))
    good = True
    for model, names in decode.items():
        share = len(set.intersection(*names)) / len(set.union(*names))
        good &= share >= 0.95
        print(f"{model}: decode sites that match by name over {len(names)} units: {100 * share:.1f} % (bar: 95 %)")
    return good


def evidence(traces: dict[str, Trace]) -> bool:
    good = True
    for name, t in traces.items():
        bare = sum(not k.accesses for k in t.kernels)
        found = Counter(a.evidence for k in t.kernels for a in k.accesses)
        good &= bare == 0
        print(f"{name:<44} {len(t):4d} kernels {len(t.sites):4d} sites, {bare} without accesses, {dict(found)}")
    return good


def worst_sites(trace: Trace) -> None:
    """Sites by time lost against the limit, alike sites of all layers taken together."""
    limits = site_limits(trace)
    lost: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for k in trace.kernels:
        key = k.site.split("/", 1)[-1]
        lost[key][1] += k.duration_ns + max(0, k.gap_ns or 0)
        lost[key][0] += 1
    for site, limit in limits.items():
        lost[site.split("/", 1)[-1]][2] += limit
    for key, (n, time, limit) in sorted(lost.items(), key=lambda kv: kv[1][2] - kv[1][1])[:20]:
        print(f"{time / 1e3:9.1f} us, limit {limit / 1e3:9.1f} us, {n:4d} kernels  {key[:90]}")


def main(arguments: Sequence[str] = (), folder: Path = TRACES) -> int:
    if arguments and (len(arguments) != 2 or arguments[0] != "--sites"):
        raise InputError(f"{' '.join(arguments)}: the only option is --sites UNIT")
    traces, problems = load_traces(folder)
    if arguments:
        if arguments[1] not in traces:
            why = "; ".join(problems) or f"no such unit in {folder}{did_you_mean(arguments[1], list(traces))}"
            raise InputError(f"{arguments[1]}: {why}")
        worst_sites(traces[arguments[1]])
        return 0
    if not traces and not problems:
        raise InputError(f"{folder}: holds no captured units")
    good = against_limits(traces)
    good &= llama_decode(traces.get("llama-3-8b/decode-b32-c2048"))
    good &= matching_sites(traces)
    good &= evidence(traces)
    for problem in problems:
        say("error", problem)
    if problems:
        return BAD_INPUT
    print("all within the bars" if good else "SOME OUTSIDE THE BARS")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(outcome("error", lambda: main(sys.argv[1:])))
