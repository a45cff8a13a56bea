"""Are the read and write sets of the traces sound? The oracle's reports, one line per unit.

Bars: nothing missed; at most 2 % of the kernels skipped, not reached or without evidence. Reads that were not
observed are reads that changed nothing when their bytes changed: they cost bytes, never soundness.

    python experiments/validation/oracle_summary.py [FOLDER]      (default: experiments/validation/oracle)
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "oracle"
BAR = 0.02
MISSED = ("missed_read", "missed_write")


def state(kernel: dict[str, Any]) -> str:
    """A kernel's place in the table: missed beats unknown, unknown beats the rest."""
    if kernel["status"] in MISSED:
        return str(kernel["status"])
    return "unknown" if kernel["unknown"] else str(kernel["status"])


def reads(kernels: list[dict[str, Any]]) -> Counter[str]:
    return Counter(r["seen"] for k in kernels for r in k["reads"])


def main(folder: Path) -> int:
    paths = sorted(folder.glob("*/*.json"))
    if not paths:
        print(f"error: no reports in {folder}", file=sys.stderr)
        return 2
    total: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    details: list[str] = []
    names = ("ok", *MISSED, "skipped", "unknown", "not reached")
    print(f"{'unit':<40} {'kernels':>7} " + " ".join(f"{n:>12}" for n in names) + f" {'reads observed':>16}")
    for path in paths:
        report = json.loads(path.read_text(encoding="utf-8"))
        kernels = report["kernels"]
        count = Counter(state(k) for k in kernels)
        observed = reads(kernels)
        total += count
        seen += observed
        unit = f"{path.parent.name}/{path.stem}"
        row = " ".join(f"{count[n]:>12}" for n in names)
        print(f"{unit:<40} {len(kernels):>7} {row} {observed['observed']:>8}/{sum(observed.values()):<7}")
        if not report["same_kernels_as_trace"]:
            details.append(f"{unit}: this run's kernels differ from the trace's; its own sets were checked")
        details += [f"{unit}: {state(k)} {k['site']}: {k['reason']}" for k in kernels if state(k) != "ok"]
    for text in details:
        print(f"  {text[:220]}")
    missed = sum(total[n] for n in MISSED)
    open_share = sum(total[n] for n in ("skipped", "unknown", "not reached")) / total.total()
    print(
        f"{len(paths)} units, {total.total()} kernels, {missed} missed, {100 * open_share:.2f} % skipped or unknown "
        f"(bar: 0 and {100 * BAR:.0f} %); reads: {dict(seen)}"
    )
    good = not missed and open_share <= BAR
    print("all within the bars" if good else "SOME OUTSIDE THE BARS")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
