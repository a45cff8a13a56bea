"""Bars and tables over replayed plans: were they right to the bit, and was the simulator right about them?

    python experiments/validation/replay_tables.py [RUNS.toml] [--out FOLDER] [--device-model shared] [--table FILE]

RUNS.toml is what `replay_matrix.py` leaves (default: experiments/validation/replay/runs.toml). Every bar is a line that
ends with "holds" or "MISSED"; a bar without data is missed. FOLDER (default: tables beside RUNS.toml) gets tables.md,
and every table as CSV. `--table` takes the rows that `python -m hw validate --out` wrote instead of simulating anew.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations as pairs_of
from pathlib import Path
from typing import Any

import numpy as np

from hw.journals import Journal
from hw.validate.rows import COLUMNS, unit_rows
from hw.validate.runs import journal_of, read_runs
from tesserasim.errors import InputError
from tesserasim.files import check_regular, path_text
from tesserasim.terminal import outcome, put
from tesserasim.writing import check_directory, write_whole

HERE = Path(__file__).resolve().parent
Row = Mapping[str, Any]

MANY, LESSER, APART = 8, 0.10, 0.05  # switches; share of the lesser device; difference of rates worth ranking
RELATIVE = (1, 10, 100)  # switches of the random placements whose cost is shown
_RANDOM = re.compile(r"^random-\d+-(\d+)$")


@dataclass(frozen=True)
class Bar:
    """A claim about one figure: it lies within [low, high]. `value` None: nothing to judge by."""

    name: str
    value: float | None
    low: float
    high: float
    n: int

    @property
    def holds(self) -> bool:
        return self.value is not None and self.low <= self.value <= self.high

    @property
    def limit(self) -> str:
        if self.low <= 0:
            return f"at most {100 * self.high:g} %"
        return f"at least {100 * self.low:g} %" if self.high >= 1 else f"{100 * self.low:g} to {100 * self.high:g} %"

    @property
    def verdict(self) -> str:
        return "holds" if self.holds else "MISSED"

    def line(self) -> str:
        said = "no data" if self.value is None else f"{100 * self.value:.2f} %"
        return f"{self.name}: {said} (n {self.n}; {self.limit}) {self.verdict}"


# Were the plans right?


def by_model(journals: Sequence[Journal]) -> Iterator[tuple[str, list[Journal]]]:
    for model in sorted({j.model for j in journals}):
        yield model, [j for j in journals if j.model == model]


def checks(journals: Sequence[Journal]) -> list[dict[str, Any]]:
    """Per model: distinct plans whose outputs were compared, and how many were equal. Void checks count apart."""
    found = []
    for model, own in by_model(journals):
        every = [c for j in own for c in j.checks]  # a plan once per unit
        tested = [c for c in every if c.equal is not None]
        many = sum(c.switches >= MANY for c in tested)
        found.append({
            "model": model, "plans": len(tested), "many_switches": many,
            "many_share": many / len(tested) if tested else None, "equal": sum(bool(c.equal) for c in tested),
            "void": len(every) - len(tested),
        })  # fmt: skip
    return found


def mutations(journals: Sequence[Journal]) -> list[dict[str, Any]]:
    """Per model: lost moves and lost waits that showed, and controls in which nothing was lost and nothing showed."""
    found = []
    for model, own in by_model(journals):
        row: dict[str, Any] = {"model": model}
        for name in ("lost_moves", "lost_waits", "controls"):
            flags = [x for j in own for m in j.mutations for x in getattr(m, name)]
            row |= {name: len(flags), f"{name}_{'unchanged' if name == 'controls' else 'shown'}": sum(flags)}
        found.append(row)
    return found


def right(journals: Sequence[Journal]) -> list[Bar]:
    """Every plan equal to the bit, and every control unchanged."""
    bars = [
        Bar(f"plans equal to the bit, {c['model']}", c["equal"] / c["plans"] if c["plans"] else None, 1, 1, c["plans"])
        for c in checks(journals)
    ]
    found = mutations(journals)
    total, kept = sum(m["controls"] for m in found), sum(m["controls_unchanged"] for m in found)
    return [*bars, Bar("controls of the mutations unchanged", kept / total if total else None, 1, 1, total)]


# What does splitting cost?


def rebuilt(journals: Sequence[Journal]) -> list[dict[str, Any]]:
    """Per unit: the captured graph itself, the same placement made again, and random placements, as rates.

    All on one slot. Random placements relative to the captured graph, by the switches that were asked for (median).
    """
    found = []
    for j in journals:
        for device, plain in j.plain.items():
            once = [m for m in j.measured if m.depth == 1]
            same = next((m.units_per_s for m in once if set(m.device_of) == {device}), None)
            row = {"model": j.model, "unit": j.unit, "device": device, "plain_per_s": plain, "rebuilt_per_s": same,
                   "rebuilt": same / plain if same else None}  # fmt: skip
            for n in RELATIVE:
                rates = [m.units_per_s / plain for m in once if (s := _RANDOM.match(m.lane)) and int(s[1]) == n]
                row[f"switches_{n}"] = float(np.median(rates)) if rates else None
            found.append(row)
    return found


def combinations(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Per model, then all: combinations of plan and depth that were timed."""
    found = []
    for model in [*sorted({r["model"] for r in rows}), "all"]:
        own = [r for r in rows if model in (r["model"], "all")]
        known = [r for r in own if r["lesser_share"] is not None]
        spread = sum(r["lesser_share"] >= LESSER for r in known)
        found.append({
            "model": model, "combinations": len(own), "depths": " ".join(map(str, sorted({r["depth"] for r in own}))),
            "held_out": sum(r["part"] == "held-out" for r in own), "predicted": len(predicted(own)),
            "split": spread, "split_share": spread / len(known) if known else None,
        })  # fmt: skip
    return found


# Was the simulator right?


def predicted(rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r["error"] is not None]


def hard(r: Row) -> bool:
    """Co-running and memory-bound: kernels compete for the DRAM."""
    return bool(r["corun"] and r["memory_bound"])


def figure(values: Sequence[float], of: Callable[..., Any], *more: Any) -> float | None:
    return float(of(values, *more)) if len(values) else None


def ranked(rows: Sequence[Row]) -> tuple[int, int]:
    """(pairs ranked right, pairs): lanes of one unit and depth whose measured rates differ by more than 5 %."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for r in rows:
        groups.setdefault((r["model"], r["unit"], r["depth"]), []).append(r)
    right = total = 0
    for group in groups.values():
        for a, b in pairs_of(group, 2):
            x, y = a["measured_per_s"], b["measured_per_s"]
            if max(x, y) > min(x, y) * (1 + APART):
                total += 1
                right += (x - y) * (a["simulated_per_s"] - b["simulated_per_s"]) > 0
    return right, total


def accuracy(rows: Sequence[Row], part: str) -> list[Bar]:
    """The bars of one part of the split."""
    own = [r for r in predicted(rows) if r["part"] == part]
    bars = []
    for name, chosen, median, p95 in (
        ("not co-running or compute-bound", [r for r in own if not hard(r)], 0.03, 0.08),
        ("co-running and memory-bound", [r for r in own if hard(r)], 0.06, 0.15),
    ):
        errors = [abs(r["error"]) for r in chosen]
        bars += [
            Bar(f"{part}: throughput, {name}, |error| median", figure(errors, np.median), 0, median, len(errors)),
            Bar(f"{part}: throughput, {name}, |error| p95", figure(errors, np.percentile, 95), 0, p95, len(errors)),
        ]
    for model in sorted({r["model"] for r in rows if r["part"] == part}):
        errors = [abs(r["error"]) for r in own if r["model"] == model]
        bars.append(
            Bar(f"{part}: throughput, {model}, |error| median", figure(errors, np.median), 0, 0.05, len(errors))
        )
    late = [abs(r["latency_error"]) for r in own if r["latency_error"] is not None]
    bars.append(Bar(f"{part}: latency, |error| median", figure(late, np.median), 0, 0.05, len(late)))
    inside = [r["low80"] <= r["measured_per_s"] <= r["high80"] for r in own]
    bars.append(Bar(f"{part}: inside the 80 % interval", figure(inside, np.mean), 0.7, 0.9, len(inside)))
    good, total = ranked(own)
    name = f"{part}: pairs of lanes more than {100 * APART:g} % apart ranked right"
    return [*bars, Bar(name, good / total if total else None, 0.95, 1, total)]


def errors(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """log(simulated / measured) by part, class and model: its mean and root mean square, beside the |error|s."""
    found = []
    for part in ("calibration", "held-out"):
        for name, of in (("co-running and memory-bound", hard), ("other", lambda r: not hard(r))):
            for model in [*sorted({r["model"] for r in rows}), "all"]:
                own = [r for r in predicted(rows) if r["part"] == part and of(r) and model in (r["model"], "all")]
                if not own:
                    continue
                log = np.log([r["simulated_per_s"] / r["measured_per_s"] for r in own])
                size = np.abs([r["error"] for r in own])
                found.append({
                    "part": part, "class": name, "model": model, "n": len(own), "median": float(np.median(size)),
                    "p95": float(np.percentile(size, 95)), "log_mean": float(log.mean()),
                    "log_rms": float(np.sqrt((log**2).mean())),
                })  # fmt: skip
    return found


# Reading and writing


def collect(runs: Path, device_model: str, table: Path | None) -> tuple[list[Journal], list[Row]]:
    """Journals and rows of a runs file; with `table` the rows that were written before, of the same combinations."""
    read = read_runs(runs)
    journals = [journal_of(path, unit) for path, unit in read.units]
    if table is not None:
        rows = read_table(table)
        have = {(r["unit"], r["plan"], r["depth"], r["measured_per_s"]) for r in rows}
        if have != {(m.unit, m.plan, m.depth, m.units_per_s) for j in journals for m in j.measured}:
            raise InputError(f"{path_text(table)}: rows of other runs than {path_text(runs)}")
        return journals, rows
    rows = []
    for (path, unit), journal in zip(read.units, journals, strict=True):
        rows += unit_rows(path, unit, journal, read.split, device_model)
    return journals, rows


def read_table(path: Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet

    check_regular(path, "table of python -m hw validate")
    try:
        table = pyarrow.parquet.read_table(path)
    except (pa.ArrowException, OSError):
        raise InputError(f"{path_text(path)}: not a Parquet file") from None
    if table.column_names != list(COLUMNS):
        raise InputError(f"{path_text(path)}: not a table of python -m hw validate --out of this version")
    rows: list[Row] = table.to_pylist()
    return rows


def as_csv(rows: Sequence[Row], columns: Sequence[str]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_markdown(title: str, rows: Sequence[Row], columns: Sequence[str]) -> str:
    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")

    lines = [f"## {title}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(cell(r[c]) for c in columns)} |" for r in rows]
    return "\n".join([*lines, ""])


def tables(runs: Path, out: Path, device_model: str, table: Path | None) -> int:
    """Print the bars and write everything; 0 whatever the bars say, they are read in the tables."""
    check_directory(out)
    journals, rows = collect(runs, device_model, table)
    bars = [*right(journals), *accuracy(rows, "held-out"), *accuracy(rows, "calibration")]
    judged = [
        {"bar": b.name, "value": b.value, "n": b.n, "limit": b.limit, "verdict": b.verdict} for b in bars
    ]  # fmt: skip
    made: dict[str, Sequence[Row]] = {
        "bars": judged, "checks": checks(journals), "mutations": mutations(journals), "rebuilt": rebuilt(journals),
        "combinations": combinations(rows), "errors": errors(rows),
    }  # fmt: skip
    for name, found in made.items():
        for r in found if name not in ("bars", "errors") else ():
            put(f"{name}: " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in r.items()))
    put("\n".join(b.line() for b in bars))
    text = "# Replayed plans\n\nMade by `experiments/validation/replay_tables.py`; shares and errors are fractions.\n\n"
    for name, found in made.items():
        columns = list(found[0]) if found else ["nothing"]
        text += as_markdown(name, found, columns) + "\n"
        write_whole(out / f"{name}.csv", as_csv(found, columns))
    write_whole(out / "rows.csv", as_csv(rows, list(COLUMNS)))
    write_whole(out / "tables.md", text.encode())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="?", default=HERE / "replay/runs.toml")
    parser.add_argument("--out", type=Path, help="folder of the tables (default: tables, beside RUNS.toml)")
    parser.add_argument("--device-model", choices=("serial", "shared"), default="shared")
    parser.add_argument("--table", type=Path, help="rows that python -m hw validate --out wrote (.parquet)")
    options = parser.parse_args(argv)
    out = options.out or options.runs.parent / "tables"
    return outcome("replay_tables", lambda: tables(options.runs, out, options.device_model, options.table))


if __name__ == "__main__":
    sys.exit(main())
