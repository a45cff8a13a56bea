"""The 1 % of the kernel tables that is committed for tests: whole shapes, in all GPUs and data types of their builds.

    python experiments/costs/sample.py [--tables DIR]

Writes tests/data/costs/<table>.parquet and the parameters fitted from them (forests.json, a hash per forest): a fit
on another machine must give the same bytes. Tables: NVIDIA aiconfigurator performance tables (Apache-2.0).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pandas as pd

from tesserasim.costs.learn import REFERENCE, fit_gpu, problem
from tesserasim.costs.shipped import forest_document
from tesserasim.costs.tables import BUILDS, OTHER_BUILD, SHAPES, read_tables

REPO = Path(__file__).resolve().parents[2]
OUT = REPO / "tests" / "data" / "costs"
TABLES = ("gemm", "attention_prefill", "attention_decode", "moe", "elementwise_quant")
#: One GPU, with rows of every kind and with a sibling: refitting takes seconds.
GPUS = ("B200",)
LEAST_SHAPES = 60


def sample(frame: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Rows of the evaluated builds whose shape hashes to 0 modulo 100 (a smaller modulus for small tables)."""
    build = frame["framework"].astype(str) + " " + frame["version"].astype(str)
    frame = frame[build.isin([BUILDS[kind], OTHER_BUILD])]
    shape = frame[list(SHAPES[kind])].astype(np.int64)
    key = shape.apply(lambda r: zlib.crc32(" ".join(map(str, r)).encode()), axis=1).to_numpy(np.int64)
    shapes = len(np.unique(key))
    found: pd.DataFrame = frame[key % max(1, min(100, shapes // LEAST_SHAPES)) == 0]
    return found.reset_index(drop=True)


def forest_hashes(paths: list[Path]) -> dict[str, str]:
    """`kind GPU` -> SHA-256 of the forest's document, with the H200's time known."""
    found = {}
    for path in paths:
        for kind, rows in read_tables([path], REFERENCE).items():
            p = problem(rows, REFERENCE)
            for gpu in GPUS:
                forest = fit_gpu(p, np.ones(len(p.rows), dtype=bool), gpu)
                text = json.dumps(forest_document(forest), sort_keys=True)
                found[f"{kind} {gpu}"] = hashlib.sha256(text.encode()).hexdigest()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shared = Path(os.environ.get("TESSERASIM_SHARED", REPO.parent / "shared"))
    parser.add_argument("--tables", type=Path, default=shared / "data" / "kernels")
    tables = parser.parse_args().tables
    OUT.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        frame = pd.read_parquet(tables / f"{name}.parquet")
        part = sample(frame, str(frame["kernel_kind"].iloc[0]))
        part.to_parquet(OUT / f"{name}.parquet", index=False)
        print(name, len(frame), "->", len(part))
    hashes = forest_hashes([OUT / f"{n}.parquet" for n in TABLES])
    (OUT / "forests.json").write_text(json.dumps(hashes, indent=1) + "\n")


if __name__ == "__main__":
    main()
