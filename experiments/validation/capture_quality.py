"""Is what was captured serving-grade, and do sites line up over the grid?

1. Llama-3-8B decode at batch 32, context 2048: measured end-to-end time over the time that its bytes need at
   the bandwidth of a 4 GiB device copy (weights without the embedding table + KV of 32 x 2048). Bar: 1.5.
2. Share of decode sites that match by name over all batches and contexts. Bar: 95 %.
3. Kernels without accesses, and the evidence of the accesses there are.

    python experiments/validation/capture_quality.py
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import read_trace

TRACES = Path(__file__).resolve().parents[2] / "traces"


def bytes_needed(trace: Trace) -> int:
    """Weights except the embedding table, and the whole KV cache, each read once."""
    tables = ("embed", "rope.cos", "rope.sin")  # looked up, not read as a whole
    weights = sum(b.nbytes for b in trace.buffers if b.role == "weight" and b.name not in tables)
    kv = sum(b.nbytes for b in trace.buffers if b.role == "state" and b.bytes_per_token)
    return weights + kv


def main() -> int:
    decode = [read_trace(p) for p in sorted((TRACES / "llama-3-8b").glob("decode-*.parquet"))]
    good = True
    print(f"{'decode unit':<16} {'e2e ms':>8} {'floor ms':>9} {'ratio':>6}")
    for t in decode:
        assert t.meta.e2e_ns is not None
        floor = bytes_needed(t) / float(t.meta.extra["copy_gbs"])
        ratio = t.meta.e2e_ns["median"] / floor
        point = (t.meta.unit["batch"], t.meta.unit["context"])
        print(f"b{point[0]:<4} c{point[1]:<9} {t.meta.e2e_ns['median'] / 1e6:8.3f} {floor / 1e6:9.3f} {ratio:6.2f}")
        if point == (32, 2048):
            good &= ratio <= 1.5
            print(f"  ^ bar: <= 1.5 at {t.meta.extra['copy_gbs']} GB/s device copy (bytes read + written)")
    names = [set(t.sites) for t in decode]
    share = len(set.intersection(*names)) / len(set.union(*names))
    good &= share >= 0.95
    print(f"decode sites that match by name over {len(decode)} units: {100 * share:.1f} % (bar: 95 %)")
    for path in sorted(TRACES.glob("*/*.parquet")):
        t = read_trace(path)
        bare = sum(not k.accesses for k in t.kernels)
        evidence = Counter(a.evidence for k in t.kernels for a in k.accesses)
        good &= bare == 0
        print(f"{path.stem:<18} {len(t):4d} kernels {len(t.sites):4d} sites, {bare} without accesses, {dict(evidence)}")
    print("all within the bars" if good else "SOME OUTSIDE THE BARS")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
