"""How long a trace of 2,500 kernels takes from its file to its dependency graph.

    python experiments/bench/deps_speed.py [TRACE.parquet ...] [--kernels 2500] [--repeats 3] [--json]

Every trace given (default: a decode step, a prefill and a denoising step as captured, where they are there, and a
synthetic decoder) is repeated, with its activations and workspaces anew in every round and its weights and state
shared, until it has the wanted number of kernels; then it is written once and timed: read, graph, hazards, and all
of what `deps` prints. The bar: file to graph in 2 s, the median of the repeats. Exit code 1 above it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tesserasim.deps.graph import storage_hazards, unit_flow
from tesserasim.deps.summary import dependencies
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import read_trace, write_trace
from tesserasim.trace.synthetic import DecoderShape, decoder_unit

BAR_S = 2.0
ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("llama-3-8b/decode-b32-c2048", "llama-3-8b/prefill-b1-t512", "sd3.5-medium/denoise-b1")
FLOWING = ("activation", "workspace")


def repeated(trace: Trace, kernels: int) -> Trace:
    """`trace` again and again, cut at `kernels` kernels: storages are shared, values inside a round are its own."""
    rows, buffers = [], []
    shared: dict[int, int] = {}
    for turn in range(-(-kernels // len(trace.kernels))):
        place = {}
        for b in trace.buffers:
            if b.role in FLOWING or turn == 0:
                place[b.id] = len(buffers)
                buffers.append(dataclasses.replace(b, id=len(buffers), name=f"{b.name}~{turn}", first_use=-1,
                                                   last_use=-1))  # fmt: skip
                if b.role not in FLOWING:
                    shared[b.id] = place[b.id]
            else:
                place[b.id] = shared[b.id]
        for k in trace.kernels:
            moved = tuple(dataclasses.replace(a, buffer=place[a.buffer]) for a in k.accesses)
            rows.append(dataclasses.replace(k, id=len(rows), site=f"{k.site}~{turn}", accesses=moved))
    return dataclasses.replace(trace, kernels=tuple(rows[:kernels]), buffers=tuple(buffers))


def measure(path: Path) -> dict[str, float]:
    """Seconds of each step, on a trace that nothing has been kept of."""
    times = [time.perf_counter()]
    trace = read_trace(path)
    times.append(time.perf_counter())
    flow = unit_flow(trace)
    times.append(time.perf_counter())
    storage_hazards(trace)
    times.append(time.perf_counter())
    dependencies(trace)
    times.append(time.perf_counter())
    read, graph, hazards, rest = (b - a for a, b in itertools.pairwise(times))
    return {"read_s": read, "graph_s": graph, "file_to_graph_s": read + graph, "hazards_s": hazards,
            "document_s": rest, "edges": float(len(flow.edges))}  # fmt: skip


def traces(paths: list[Path]) -> dict[str, Trace]:
    """By name: those given, else the shipped ones that are there and a synthetic decoder."""
    found = paths or [p for p in (ROOT / "traces" / f"{s}.parquet" for s in SHIPPED) if p.is_file()]
    named = {str(p.relative_to(ROOT) if p.is_relative_to(ROOT) else p): read_trace(p) for p in found}
    if not paths:
        named["synthetic decoder"] = decoder_unit(
            DecoderShape(layers=220, hidden=64, heads=4, kv_heads=1, ffn=128, vocab=64), "decode", 8, 1, 64
        )
    return named


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--kernels", type=int, default=2500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, trace in traces(options.traces).items():
            path = Path(folder) / "trace.parquet"
            write_trace(repeated(trace, options.kernels), path)
            runs = [measure(path) for _ in range(options.repeats)]
            rows.append({"trace": name, **{key: statistics.median(r[key] for r in runs) for key in runs[0]}})
            if not options.json:
                times = ", ".join(f"{key[:-2]} {value:.3f} s" for key, value in rows[-1].items() if key.endswith("_s"))
                print(f"{name}, {options.kernels} kernels, {rows[-1]['edges']:.0f} edges: {times}", flush=True)
    passed = all(row["file_to_graph_s"] <= BAR_S for row in rows)
    if options.json:
        print(json.dumps({"bar_s": BAR_S, "passed": passed, "rows": rows}, indent=1))
    else:
        print(f"file to graph within {BAR_S} s: {'yes' if passed else 'NO'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
