"""The errors of the kernel cost models beside their bars, as Markdown.

    python experiments/validation/costs_table.py [--run] [--tables DIR] [--results FILE]

Prints experiments/validation/costs_cross_validation.json; `--run` computes it anew (half an hour on two cores): every
kind with groups of shapes held out, with the H200's time known and without, for GPUs with rows (calibrated), without
(unseen) and without siblings too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "experiments" / "validation" / "costs_cross_validation.json"
TABLES = ("gemm", "attention_prefill", "attention_decode", "moe", "elementwise_quant")
#: MAPE, median over GPUs: (calibrated, unseen), with the H200's time known.
BARS = {
    "gemm": (0.09, 0.16), "attention_prefill": (0.07, 0.22), "attention_decode": (0.07, 0.22), "moe": (0.14, 0.23),
    "elementwise": (0.05, 0.10),
}  # fmt: skip
COLUMNS = (
    "n", "mape", "median_ape", "weighted_ape", "spearman", "spearman_h100", "coverage80", "width80", "mape_unseen",
    "mape_unseen_no_sibling", "spearman_unseen", "coverage80_unseen",
)  # fmt: skip


def run(tables: Path) -> dict[str, list[dict[str, Any]]]:
    """Reference ("H200", "none") -> rows of `costs evaluate --cross-validate`."""
    from tesserasim.costs.fitting import evaluate

    paths = [tables / f"{t}.parquet" for t in TABLES]
    references = {"H200": "H200-SXM", "none": None}
    return {
        name: evaluate(paths, "cross-validate", reference, lambda x: print(x, file=sys.stderr))
        for name, reference in references.items()
    }


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
    n = np.array([r["n"] for r in rows], dtype=float)
    covered, width = np.array([r["coverage80"] for r in rows]), np.array([r["width80"] for r in rows])
    large = covered[n > 500]
    print(
        f"\ncalibrated 80 % interval: covers {np.average(covered, weights=n):.3f} of all rows, "
        f"{large.min():.3f} to {large.max():.3f} over (GPU, kind) cells of more than 500 rows; "
        f"mean width {np.average(width, weights=n):.3f} of the prediction"
    )
    unseen = np.array([r["coverage80_unseen"] for r in rows])
    print(
        f"unseen 80 % interval: covers {np.average(unseen, weights=n):.3f}, "
        f"cells {unseen.min():.3f} to {unseen.max():.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shared = Path(os.environ.get("TESSERASIM_SHARED", REPO.parent / "shared"))
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--tables", type=Path, default=shared / "data" / "kernels")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.run:
        options.results.write_text(json.dumps(run(options.tables), indent=1) + "\n")
    for name, rows in json.loads(options.results.read_text()).items():
        print_reference(name, rows)


if __name__ == "__main__":
    main()
