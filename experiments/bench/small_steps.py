"""Steps that run many times in a sweep or a command: milliseconds each, the best of a few.

    python experiments/bench/small_steps.py

`workload`: one cohort of a 32-layer model on one GPU, once its mix is known. `columns`: the checks of a trace file
with 500 kernels. The last column is what each was meant to take on an idle machine.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tesserasim.cluster.parse import parse_cluster
from tesserasim.costs.roofline import RooflineRatio
from tesserasim.trace.filecheck import check_columns
from tesserasim.trace.parquet import SCHEMA, write_trace
from tesserasim.trace.synthetic import DecoderShape, synthetic_mix
from tesserasim.workload import build_workload

REPEATS = 7


def best_ms(call: Callable[[], object]) -> float:
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return 1e3 * min(took)


def main() -> int:
    mix = synthetic_mix(layers=32, shape=DecoderShape(layers=32))
    cluster, costs = parse_cluster("H200-SXM"), RooflineRatio()
    build_workload(mix, cluster, costs, 8)
    batches = iter((16, 32, 48, 64, 96, 128, 256))
    rows = [("workload", best_ms(lambda: build_workload(mix, cluster, costs, next(batches))), 50.0)]
    with tempfile.TemporaryDirectory() as folder:
        trace = mix.traces["decode"][0]
        write_trace(trace, Path(folder) / "t.parquet")
        table = pq.read_table(Path(folder) / "t.parquet")
    table = pa.concat_tables([table] * (500 // len(trace) + 1))
    rows.append(("columns", best_ms(lambda: check_columns(table, SCHEMA, "t")), 20.0))
    for name, took, meant in rows:
        print(f"{name:<10} {took:7.1f} ms   meant {meant:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
