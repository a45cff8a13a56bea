"""The errors of the kernel cost models beside their bars, as Markdown.

    python experiments/validation/costs_table.py [--run] [--tables DIR] [--results FILE]

Prints experiments/validation/costs_cross_validation.json; `--run` computes it anew (40 minutes on one core): every
kind with groups of shapes held out, with the H200's time known and without, for GPUs with rows (calibrated), without
(unseen) and without siblings too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tesserasim.costs.validate import HeldOut

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "experiments" / "validation" / "costs_cross_validation.json"
TABLES = ("gemm", "attention_prefill", "attention_decode", "moe", "elementwise_quant")
#: MAPE, median over GPUs: (calibrated, unseen), with the H200's time known.
BARS = {
    "gemm": (0.09, 0.16), "attention_prefill": (0.07, 0.22), "attention_decode": (0.07, 0.22), "moe": (0.14, 0.23),
    "elementwise": (0.05, 0.10),
}  # fmt: skip
#: Where the coverage of a cell, a GPU and a kind, is to lie.
CELLS = (0.65, 0.92)
COLUMNS = (
    "n", "mape", "median_ape", "weighted_ape", "spearman", "spearman_h100", "coverage80", "width80", "mape_unseen",
    "mape_unseen_no_sibling", "spearman_unseen", "coverage80_unseen", "width80_unseen", "coverage80_unseen_no_sibling",
)  # fmt: skip
#: Spearman of the ratio of two GPUs.
RANK_BARS = {"gemm": 0.9, "attention_prefill": 0.9, "attention_decode": 0.9, "moe": 0.8, "elementwise": 0.8}
REFERENCES = {"H200": "H200-SXM", "none": None}

Results = dict[str, dict[str, list[dict[str, Any]]]]


def run(tables: Path) -> Results:
    """Reference ("H200", "none") -> "gpus": rows of `costs evaluate --cross-validate`, "pairs": ranks of ratios."""
    from tesserasim.costs.learn import problem
    from tesserasim.costs.tables import read_tables
    from tesserasim.costs.validate import hold_out

    found: Results = {name: {"gpus": [], "pairs": []} for name in REFERENCES}
    for name, reference in REFERENCES.items():
        for table in TABLES:
            print(f"reference {name}: {table}", file=sys.stderr)
            for rows in read_tables([tables / f"{table}.parquet"]).values():
                add(found[name], hold_out(problem(rows, reference)))
    return found


def add(found: dict[str, list[dict[str, Any]]], held: HeldOut) -> None:
    from tesserasim.costs.validate import held_metrics, pair_ranks

    found["gpus"] += held_metrics(held)
    found["pairs"] += pair_ranks(held)


def counted(row: dict[str, Any]) -> bool:
    """Rows whose GPU counts in the medians: not the reference, and the B300 only where it has the common build."""
    return row["gpu"] != "H200-SXM" and (row["gpu"] != "B300" or row["kind"] == "elementwise")


def cell(value: Any) -> str:
    return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def print_reference(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n### Reference {name}\n\n| kind | GPU | " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * (len(COLUMNS) + 2))
    for row in rows:
        star = "" if counted(row) else " *"
        print(f"| {row['kind']} | {row['gpu']}{star} | " + " | ".join(cell(row.get(c)) for c in COLUMNS) + " |")
    print("\n| kind (median over GPUs without *) | calibrated | bar | unseen | bar | no sibling |")
    print("|---|---|---|---|---|---|")
    for kind, bars in BARS.items():
        part = [r for r in rows if r["kind"] == kind and counted(r)]
        found = [float(np.median([r[c] for r in part])) for c in ("mape", "mape_unseen", "mape_unseen_no_sibling")]
        shown = [f"{bars[0]:.2f}", f"{bars[1]:.2f}"] if name == "H200" else ["–", "–"]
        print(f"| {kind} | {found[0]:.4f} | {shown[0]} | {found[1]:.4f} | {shown[1]} | {found[2]:.4f} |")
    for way, suffix in (("calibrated", ""), ("unseen", "_unseen"), ("unseen, no sibling", "_unseen_no_sibling")):
        n = np.array([r["n"] for r in rows], dtype=float)
        covered = np.array([r[f"coverage80{suffix}"] for r in rows])
        width = np.array([r[f"width80{suffix}"] for r in rows])
        large = n > 500
        inside = (covered[large] >= CELLS[0]) & (covered[large] <= CELLS[1])
        print(
            f"\n{way} 80 % interval: covers {np.average(covered, weights=n):.3f} of all rows (cells counting alike: "
            f"{covered.mean():.3f}); (GPU, kind) cells of more than 500 rows: {covered[large].min():.3f} to "
            f"{covered[large].max():.3f}, {inside.sum()} of {large.sum()} in {CELLS[0]:.2f}-{CELLS[1]:.2f}; mean width "
            f"{np.average(width, weights=n):.3f} of the prediction"
        )


def print_pairs(pairs: list[dict[str, Any]]) -> None:
    """Ranks of ratios over the pairs of GPUs, the reference apart, whose ratio varies."""
    print("\n| kind | pairs | bar | calibrated: median | least | unseen: median | least | no sibling: median |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, bar in RANK_BARS.items():
        mine = [r for r in pairs if r["kind"] == kind]
        known, unseen, alone = (
            [r[c] for r in mine] for c in ("spearman", "spearman_unseen", "spearman_unseen_no_sibling")
        )
        if mine:
            shown = (np.median(known), min(known), np.median(unseen), min(unseen), np.median(alone))
            print(f"| {kind} | {len(mine)} | {bar} | " + " | ".join(f"{v:.3f}" for v in shown) + " |")
        else:
            print(f"| {kind} | 0 | {bar} | – | – | – | – | – |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shared = Path(os.environ.get("TESSERASIM_SHARED", REPO.parent / "shared"))
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--tables", type=Path, default=shared / "data" / "kernels")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.run:
        options.results.write_text(json.dumps(run(options.tables), indent=1) + "\n")
    for name, found in json.loads(options.results.read_text()).items():
        print_reference(name, found["gpus"])
        print_pairs(found["pairs"])


if __name__ == "__main__":
    main()
