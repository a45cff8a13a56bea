"""What `python -m hw validate` prints and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hw.validate.plans import policy_plans
from hw.validate.rows import summary, unit_rows
from hw.validate.runs import Entry, read_runs
from hw.validate.table import Table
from tesserasim.errors import InputError
from tesserasim.files import path_text
from tesserasim.plans import write_plan
from tesserasim.terminal import BAD_INPUT, DONE, SOME_FAILED, put, say
from tesserasim.writing import check_directory

PROGRAM = "hw"


def write_policy_plans(runs: Path, out: Path, depths: Sequence[int]) -> int:
    """Plan files of all units for `python -m hw replay --plan`, as `out`/<journal's name>/<policy>-<depth>.json.

    A unit whose files are not as they should be is passed over; 1 if there was one, 2 if there is no other.
    """
    check_directory(out)

    def plan(entry: Entry) -> None:
        for name, found in policy_plans(entry.unit(), depths).items():
            path = out / entry.journal.stem / f"{name}.json"
            write_plan(found, path)
            put(f"{path}: {found.status}, gap {found.gap}, {found.switches} switches")

    return _each(read_runs(runs).entries, plan)


def validate(runs: Path, out: Path | None, device_model: str = "serial") -> int:
    """Print the table and its summary; with `out` also write it as Parquet and CSV, unit by unit.

    A unit whose files are not as they should be is passed over. 1 if there was one, or a row without a prediction;
    2 if there is no other unit. What an interrupted run has written is not simulated again.
    """
    table = Table(out, runs) if out is not None else None
    read = read_runs(runs)
    found: list[dict[str, Any]] = []

    def compare(entry: Entry) -> None:
        unit, journal = entry.read()
        if not journal.measured:
            say(PROGRAM, f"{path_text(entry.journal)}: holds no timed plan yet")
        for row in unit_rows(entry.journal, unit, journal, read.split, device_model, table.kept if table else None):
            put(_line(row))
            found.append(row)
            if table is not None:
                table.add(row)

    put(f"{'model':<20} {'unit':<18} {'plan':<16} {'d':>2} switches  measured/s simulated    error latency  part")
    try:
        code = _each(read.entries, compare)
    except BaseException:
        if table is not None:
            table.save()
        raise
    if table is not None:
        table.save(done=True)
    for s in summary(found):
        late = "" if s["latency_median"] is None else f", latency median {100 * s['latency_median']:.2f} %"
        put(f"{s['part']:<12} {s['model']:<20} n {s['n']:>4}  |error| median {100 * s['median']:.2f} %, p95 "
              f"{100 * s['p95']:.2f} %, inside 80 % interval {100 * s['inside80']:.0f} %{late}")  # fmt: skip
    missing = sum(r["error"] is None for r in found)
    if code == DONE and (missing or not found):
        said = f"{missing} of {len(found)} combinations could not be predicted" if found else "there is no timed plan"
        say(PROGRAM, f"{path_text(runs)}: {said}")
        return SOME_FAILED
    return code


def _each(entries: Sequence[Entry], do: Callable[[Entry], None]) -> int:
    """`do` for every unit. One that fails is one line on standard error; 1 if some failed, 2 if all did."""
    failed = 0
    for entry in entries:
        try:
            do(entry)
        except InputError as error:
            failed += 1
            say(PROGRAM, str(error))
    return DONE if not failed else SOME_FAILED if failed < len(entries) else BAD_INPUT


def _line(r: Mapping[str, Any]) -> str:
    said = f"{'-':>9} {'-':>8}"
    if r["error"] is not None:
        said = f"{r['simulated_per_s']:9.2f} {100 * r['error']:+7.2f}%"
    late = f"{'-':>7}" if r["latency_error"] is None else f"{100 * r['latency_error']:+6.1f}%"
    return (
        f"{r['model']:<20} {r['unit']:<18} {r['lane'][:16]:<16} {r['depth']:>2} {r['switches']:>8} "
        f"{r['measured_per_s']:11.2f} {said} {late}  {r['part']}" + f"  {r['why']}" * bool(r["why"])
    )
