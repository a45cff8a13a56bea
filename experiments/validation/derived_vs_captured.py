"""Derived units against captured ones on an H200: how far is a model of the configuration alone from the machine?

    python experiments/validation/derived_vs_captured.py [--parts] [--plain] [--csv FILE]
        [--unpack TABLE] [--collectives TABLE]

Llama-3-8B (bf16) and gpt-oss-20b (MXFP4 experts) are derived at every captured point of their grids (prompts without a
past, decode steps). Compared is the time of a unit, durations and gaps as a replay without the profiler has them, on
both sides; launch cost and residual are left out on both. The bar is 15 % for every unit.

`--parts` splits the difference by what kernels do, `--plain` leaves the benchmarks their floors (what the errors were
before that rule). `--unpack` fits again, to published rows alone, what unpacking a
4-bit weight costs (tesserasim.derive.times), and `--collectives` compares the all-reduce with published NCCL rows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs.mechanisms import specs
from tesserasim.derive.collectives import all_reduce_us, group_link
from tesserasim.derive.run import Options, derive
from tesserasim.derive.times import UNPACK, UNPACK_SIGMA, mxfp4_us
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import read_trace

ROOT = Path(__file__).resolve().parents[2]
BAR = 0.15
#: The published configurations, as far as they decide shapes (meta-llama/Meta-Llama-3-8B, openai/gpt-oss-20b).
CONFIGS = {
    "llama-3-8b": """{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "tie_word_embeddings": false}""",
    "gpt-oss-20b": """{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 201088, "max_position_embeddings": 131072, "sliding_window": 128, "num_local_experts": 32,
        "num_experts_per_tok": 4, "attention_bias": true, "tie_word_embeddings": false,
        "quantization_config": {"quant_method": "mxfp4"}}""",
}


def captured(model: str) -> dict[tuple[str, int, int], Trace]:
    """(unit, batch, tokens or context) -> trace, of units that start without a past or decode."""
    found = {}
    for path in sorted((ROOT / "traces" / model).glob("*.parquet")):
        trace = read_trace(path)
        if trace.unit == "decode" or trace.meta.unit["tokens"] == trace.meta.unit["context"]:
            found[_point(trace)] = trace
    return found


def _point(t: Trace) -> tuple[str, int, int]:
    u = t.meta.unit
    return t.unit, int(u["batch"]), int(u["tokens"] if t.unit == "prefill" else u["context"])


def derived(
    model: str, wanted: dict[tuple[str, int, int], Trace], floors: bool = True
) -> dict[tuple[str, int, int], Trace]:
    """The same points from the configuration."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / f"{model}.json"
        config.write_text(CONFIGS[model])
        options = Options(
            prefill=tuple(sorted({x for unit, _, x in wanted if unit == "prefill"})) or (256,),
            batches=tuple(sorted({b for unit, b, _ in wanted if unit == "decode"})),
            contexts=tuple(sorted({x for unit, _, x in wanted if unit == "decode"})),
            floors=floors,
            most_cached=max(b * x for unit, b, x in wanted if unit == "decode"),
        )
        made = {_point(t): t for t in derive(config, options).traces}
    return {point: made[point] for point in wanted if point in made}


def unit_us(t: Trace) -> float:
    """Durations and gaps of a replay, without launch cost."""
    return (t.busy_ns + sum(t.replay_gaps_ns)) / 1e3


def role(t: Trace, kernel: int) -> str:
    """What a kernel does, in words that both kinds of trace share."""
    k = t.kernels[kernel]
    op = k.site.rsplit("/", 1)[-1].split("#")[0]
    name = op.split(".")[-1]
    if name in ("wqkv", "wo", "w13", "w2", "lm_head", "router"):
        return f"gemm {name}"
    if k.kind.startswith("attention") or "attention" in op:
        return "attention"
    if op.startswith("moe") or op == "fused__to_copy_add_sum":
        return "experts, routing, sum"
    return "norms, rope, SwiGLU, sampling"


def by_role(t: Trace) -> dict[str, float]:
    """Role -> us of durations and gaps."""
    found: dict[str, float] = {}
    for i, (k, gap) in enumerate(zip(t.kernels, t.replay_gaps_ns, strict=True)):
        found[role(t, i)] = found.get(role(t, i), 0.0) + (k.duration_ns + gap) / 1e3
    return found


def compare(model: str, parts: bool, floors: bool = True) -> Iterator[tuple[str, str, int, int, float, float, float]]:
    """Prints a row per unit and yields (model, unit, batch, x, captured us, derived us, error)."""
    known = captured(model)
    made = derived(model, known, floors)
    for point, trace in sorted(made.items()):
        real, modelled = unit_us(known[point]), unit_us(trace)
        error = modelled / real - 1.0
        mark = "" if abs(error) <= BAR else "  beyond the bar"
        print(f"{model:<12} {point[0]:<8} batch {point[1]:>3}  {point[2]:>5}  captured {real:>9.1f} us  "
              f"derived {modelled:>9.1f} us  {error:>+7.1%}{mark}")  # fmt: skip
        if parts:
            a, b = by_role(known[point]), by_role(trace)
            for name in sorted(set(a) | set(b), key=lambda n: -abs(b.get(n, 0.0) - a.get(n, 0.0)))[:5]:
                x, y = a.get(name, 0.0), b.get(name, 0.0)
                print(f"      {name:<32} {x:>9.1f} {y:>9.1f}  {(y - x) / real:>+7.1%} of the unit")
        yield (model, *point, real, modelled, error)


def unpacking(table: Path) -> None:
    """The fit behind UNPACK: one number, to rows of vLLM 0.24.0 on an H200, balanced and not sharded."""
    import pandas as pd

    rows = pd.read_parquet(table)
    rows = rows[rows.gpu.str.startswith("H200") & (rows.dtype == "w4a16_mxfp4") & (rows.distribution == "balanced")]
    rows = rows[(rows.hidden_size == 2880) & (rows.moe_tp_size == 1) & (rows.moe_ep_size == 1)]
    names = {"num_tokens": "tokens", "hidden_size": "hidden", "inter_size": "inter", "topk": "topk",
             "num_experts": "experts"}  # fmt: skip
    x = {new: rows[old].to_numpy(np.float64) for old, new in names.items()}
    active = np.minimum(x["experts"], x["tokens"] * x["topk"])  # balanced rows wake as many as they can
    figures, measured = specs([find_gpu("H200-SXM")]), rows.time_us.to_numpy(np.float64)

    def left(c: float) -> float:
        return float(np.sqrt(np.mean(np.log(mxfp4_us(x, figures, active, c) / measured) ** 2)))

    best = min(np.arange(0.0, 20.0, 0.25), key=left)
    print(f"{len(rows)} published rows: {best:.2f} instructions per weight (used: {UNPACK}), "
          f"log-sd left {left(best):.3f} (used: {UNPACK_SIGMA})")  # fmt: skip


def collectives(table: Path) -> None:
    """The all-reduce formula against NCCL on H200: median and worst error by group size."""
    import pandas as pd

    rows = pd.read_parquet(table)
    rows = rows[rows.gpu.str.startswith("H200") & (rows["op"] == "all_reduce") & (rows.dtype == "half")]
    link = group_link(find_gpu("H200-SXM"))
    for ranks, part in rows.groupby("num_gpus"):
        us = np.array([all_reduce_us(2.0 * n, int(ranks), link) for n in part.message_size])  # sizes are elements
        error = us / part.time_us.to_numpy(np.float64) - 1.0
        worst = error[np.argmax(abs(error))]
        print(f"all-reduce, {ranks} H200: {len(part)} rows, median error {np.median(error):+.0%}, worst {worst:+.0%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", action="store_true", help="split the difference by what kernels do")
    parser.add_argument("--plain", action="store_true", help="with the floors of the benchmarks")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--unpack", type=Path, metavar="TABLE", help="fit UNPACK again to this MoE table")
    parser.add_argument("--collectives", type=Path, metavar="TABLE", help="compare with this NCCL table")
    options = parser.parse_args()
    if options.unpack:
        unpacking(options.unpack)
    if options.collectives:
        collectives(options.collectives)
    rows = [row for model in CONFIGS for row in compare(model, options.parts, not options.plain)]
    for model in (*CONFIGS, ""):
        errors = np.array([row[-1] for row in rows if model in ("", row[0])])
        missed = int((abs(errors) > BAR).sum())
        worst = errors[np.argmax(abs(errors))]
        verdict = "met" if not missed else f"MISSED by {missed} of {len(errors)} units"
        print(f"{model or 'all':<12} {len(errors)} units: median |error| {np.median(abs(errors)):.1%}, "
              f"worst {worst:+.1%}; bar {BAR:.0%}: {verdict}")  # fmt: skip
    if options.csv:
        lines = ["model,unit,batch,tokens_or_context,captured_us,derived_us,error"]
        lines += [f"{m},{u},{b},{x},{real:.1f},{made:.1f},{e:.4f}" for m, u, b, x, real, made, e in rows]
        options.csv.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
