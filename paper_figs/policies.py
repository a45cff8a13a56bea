"""The policies side by side: throughput with 80 % intervals, the bound and the replicas, per mix and cluster.

    python paper_figs/policies.py [RESULTS] [STEM]

reads RESULTS/summary.parquet (default: results/default, what the default sweep leaves) and writes STEM.png,
STEM.pdf and STEM.csv (default: docs/img/policies, the picture of the README).
"""

from __future__ import annotations

import sys
from pathlib import Path

from tesserasim.report.figure import draw
from tesserasim.sweep.summary import read_summary

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    results = Path(arguments[0]) if arguments else ROOT / "results" / "default"
    stem = Path(arguments[1]) if len(arguments) > 1 else ROOT / "docs" / "img" / "policies"
    for path in draw(read_summary(results), stem):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
