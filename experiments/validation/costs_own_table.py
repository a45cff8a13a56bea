"""What a table of one's own brings: another library's rows of a measured GPU, some as the table, the rest as the truth.

    python experiments/validation/costs_own_table.py [--tables DIR] [--rows N]

vLLM 0.24's rows were never fitted for GPUs that have SGLang 0.5.10 rows: its kernels are another library's. N rows of
half of the groups of shapes are the own table (`costs fit`), as many as a calibration measures; rows of the other half
are predicted with it and without. Prints a Markdown table: MAPE (and share inside the stated 80 % interval) as shipped,
with the own table, and with that of the H200 in the same build and the H200's times known.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs.learn import REFERENCE, regime
from tesserasim.costs.own import OwnCosts, read_own
from tesserasim.costs.owntable import fit_own
from tesserasim.costs.shipped import shipped, shipped_hash
from tesserasim.costs.tables import GROUPS, OTHER_BUILD, SHAPES, canonical
from tesserasim.costs.times import FloatArray

REPO = Path(__file__).resolve().parents[2]
KINDS = ("gemm", "attention_prefill", "attention_decode", "moe")
GPUS = ("L40S", "RTX-PRO-6000", "H100-SXM")
MOST_TESTED = 5000


def rows_of(path: Path, kind: str) -> pd.DataFrame:
    """Rows of the other build on the tested GPUs and the reference, times of a shape on the same GPU once."""
    frame = pd.read_parquet(path)
    build = frame["framework"].astype(str) + " " + frame["version"].astype(str)
    frame = frame[(build == OTHER_BUILD) & (frame["dtype"].astype(str) != "fp8_block")]
    names = {str(g): find_gpu(str(g)).name for g in frame["gpu"].unique()}
    frame = frame.assign(gpu=frame["gpu"].astype(str).map(names))
    frame = frame[frame["gpu"].isin([*GPUS, REFERENCE])]
    words = ["dtype", *(["kv_cache_dtype"] if kind.startswith("attention") else [])]
    words += ["distribution"] if kind == "moe" else []
    if kind.startswith("attention"):
        frame = frame[frame["dtype"].astype(str).isin(["bfloat16", "float16"])]
    key = ["kernel_kind", "gpu", "framework", "version", *words, *SHAPES[kind]]
    found: pd.DataFrame = frame.groupby(key, as_index=False, observed=True)["time_us"].median()
    return found


def judge(kind: str, gpu: str, frame: pd.DataFrame, known: str | None, own: OwnCosts) -> tuple[float, float]:
    """(MAPE, share inside the stated 80 % interval) of the rows of `frame`; `known`: with the times in reference_us."""
    rows = canonical(frame, kind, "own")
    shape = {c: rows[c].to_numpy(np.float64) for c in rows.columns if c not in ("gpu", "build", "dtype", "time_us")}
    known_us: FloatArray | None = frame.loc[rows.index, "reference_us"].to_numpy(np.float64) if known else None
    model = shipped(kind, known)
    base, x = model.base(shape, find_gpu(gpu), model.known_side(shape, known_us))
    mine = own.get((gpu, kind, known))
    factor = model.log_factor(gpu, x) + (mine.forest.predict(x) if mine else 0.0)
    error = np.log(rows["time_us"].to_numpy(np.float64) / base) - factor
    spread, where = mine.spread if mine else model.spread(gpu), regime(kind, base)
    inside = (error >= spread.low[where]) & (error <= spread.high[where])
    return float(np.mean(np.abs(np.expm1(-error)))), float(np.mean(inside))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shared = Path(os.environ.get("TESSERASIM_SHARED", REPO.parent / "shared"))
    parser.add_argument("--tables", type=Path, default=shared / "data" / "kernels")
    parser.add_argument("--rows", type=int, default=60)
    options = parser.parse_args()
    print("| kind | GPU | rows of the table | tested | as shipped | own table | H200 known: as shipped | own tables |")
    print("|" + "---|" * 8)
    for kind in KINDS:
        frame = rows_of(options.tables / f"{kind}.parquet", kind)
        columns = {word or column: column for column, word in SHAPES[kind].items()}
        group = frame.groupby([columns[g] for g in GROUPS[kind]]).ngroup().to_numpy()
        inside = np.random.default_rng(0).permutation(int(group.max()) + 1)[group] % 2 == 0
        key = [c for c in frame.columns if c not in ("gpu", "time_us")]
        there = frame[frame["gpu"] == REFERENCE].drop(columns="gpu").rename(columns={"time_us": "reference_us"})
        for gpu in GPUS:
            mine = frame["gpu"] == gpu
            if not mine.any():
                continue
            part = frame[mine & inside].sample(options.rows, random_state=0)
            tested = frame[mine & ~inside].merge(there, on=key)
            tested = tested.sample(min(MOST_TESTED, len(tested)), random_state=0).reset_index(drop=True)
            with tempfile.TemporaryDirectory() as folder:
                tables = [Path(folder) / "own.csv", Path(folder) / "reference.csv"]
                part.to_csv(tables[0], index=False)
                part[key].merge(frame[frame["gpu"] == REFERENCE], on=key).to_csv(tables[1], index=False)
                files = fit_own(tables, lambda _: None)
                (Path(folder) / "own.json").write_text(files[f"{gpu}.json"], encoding="utf-8")
                own = read_own(Path(folder) / "own.json", shipped_hash())
            cells = [judge(kind, gpu, tested, known, o) for known in (None, REFERENCE) for o in ({}, own)]
            words = " | ".join(f"{error:.3f} ({inside:.0%})" for error, inside in cells)
            print(f"| {kind} | {gpu} | {len(part)} | {len(tested)} | {words} |")


if __name__ == "__main__":
    main()
