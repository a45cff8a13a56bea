"""Would other GPUs have led to the same mechanisms? The choices inside the GEMM model, each made without one die.

    python experiments/validation/costs_choices.py [--tables DIR]

Two figures of the GEMM's mechanisms (tesserasim.costs.mechanisms) were chosen: the part of the L2's rate that it
reaches, and how far whole tiles count for 8-bit operands (0: not, 1: fully, 0.5: the geometric mean). For every die the
choice with the least error on all *other* dies is made, and what it gives on the one left out stands beside what
ships; the time on the H200 is known, nothing is fitted. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

import numpy as np

from tesserasim.costs import mechanisms
from tesserasim.costs.learn import DIES, REFERENCE, problem
from tesserasim.costs.tables import Rows, read_tables

REPO = Path(__file__).resolve().parents[2]
L2_SHARES = (0.4, 0.6, 0.8, 1.0)
TILE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SHIPPED = (mechanisms.GEMM_L2, 0.5)
ROWS = 6000  # of a GPU: they count alike


def thinned(rows: Rows) -> Rows:
    keep = np.zeros(len(rows), dtype=bool)
    for gpu in rows.gpus:
        where = np.flatnonzero(rows.is_gpu(gpu) & np.isfinite(rows.reference_us))
        keep[where[:: max(1, len(where) // ROWS)]] = gpu != REFERENCE
    return rows.take(keep)


def errors(rows: Rows, choice: tuple[float, float]) -> dict[str, float]:
    """GPU -> MAPE of the mechanisms alone."""
    mechanisms.GEMM_L2, share = choice
    mechanisms.between_tiles = lambda smooth, whole: smooth ** (1.0 - share) * whole**share
    p = problem(rows, REFERENCE)
    mine = {g: p.rows.is_gpu(g) for g in p.rows.gpus if g != REFERENCE}
    return {g: float(np.abs(np.expm1(-p.y[m])).mean()) for g, m in mine.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shared = Path(os.environ.get("TESSERASIM_SHARED", REPO.parent / "shared"))
    parser.add_argument("--tables", type=Path, default=shared / "data" / "kernels")
    rows = thinned(read_tables([parser.parse_args().tables / "gemm.parquet"], REFERENCE)["gemm"])
    found = {choice: errors(rows, choice) for choice in itertools.product(L2_SHARES, TILE_SHARES)}
    gpus = list(found[SHIPPED])
    dies = sorted({frozenset(g for g in gpus if g in die) for die in DIES} - {frozenset()}, key=min)
    print("| left out | L2 share | tiles | MAPE there, so chosen | as shipped | over all choices |")
    print("|---|---|---|---|---|---|")
    for left in dies:
        score = {c: np.mean([np.mean([e[g] for g in die]) for die in dies if die != left]) for c, e in found.items()}
        best = min(score, key=lambda c: float(score[c]))
        for gpu in sorted(left):
            every = [e[gpu] for e in found.values()]
            print(
                f"| {gpu} | {best[0]} | {best[1]} | {found[best][gpu]:.3f} | {found[SHIPPED][gpu]:.3f} | "
                f"{min(every):.3f}, {max(every):.3f} |"
            )


if __name__ == "__main__":
    main()
