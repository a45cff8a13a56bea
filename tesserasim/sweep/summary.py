"""What the experiments of a sweep say together: rows per link, P(win), and the summary files.

A result file holds what one policy did, with its draws; how policies compare is worked out here, from the
stored results alone, so it is the same however and whenever they were computed.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tesserasim.errors import InputError
from tesserasim.metrics.uncertainty import p_win
from tesserasim.policies import policies
from tesserasim.sweep.spec import Experiment
from tesserasim.writing import write_whole

Row = dict[str, Any]
#: Columns that come first in the summary files; everything else follows by name.
FIRST = (
    "mix", "cluster", "link", "table", "policy", "status", "reason", "batch", "depth", "limited_by",
    "throughput_per_s", "throughput_unit", "median_per_s", "interval80_low", "interval80_high", "rel_error", "p_win",
    "steady_throughput_per_s", "usd_per_hour", "per_usd", "bound_per_s", "bound_batch", "replicas_per_s",
    "best_single_per_s", "best_single_int_per_s",
)  # fmt: skip


def rows_of(
    experiments: Sequence[Experiment], results: Mapping[Experiment, Mapping[str, Any]], links: Sequence[str]
) -> list[Row]:
    """A row per experiment and link, case by case in the order of the spec, with P(win).

    Results that hold for all links appear under each.
    """
    rank = {name: i for i, name in enumerate(policies())}
    rows: list[tuple[tuple[str, ...], Row]] = []
    for experiment in experiments:
        result = results[experiment]
        for link in [experiment.link] if experiment.link is not None else links:
            row = {**result["row"], "draws": result["draws"]}
            row.update(cluster=experiment.cluster, link=link, table=experiment.table, policy=experiment.policy)
            rows.append(((experiment.mix, experiment.cluster, link, experiment.table), row))
    cases: dict[tuple[str, ...], list[Row]] = {}
    for e in experiments:  # a case is listed when it is first asked for, links in their own order
        for link in links:
            cases.setdefault((e.mix, e.cluster, link, e.table), [])
    for key, row in rows:
        cases[key].append(row)
    for case in cases.values():
        case.sort(key=lambda r: rank[r["policy"]])
        set_p_win(case)
    return [row for case in cases.values() for row in case]


def set_p_win(rows: Sequence[Row]) -> None:
    """Set `p_win`: the share of draws in which a policy is the fastest; a tie is split. Drops the draws.

    The policies of one case share their draws' random numbers, so draw i of one compares with draw i of all.
    """
    draws = {str(row["policy"]): d for row in rows if (d := row.pop("draws", None))}
    shares = p_win(draws)
    for row in rows:
        if row["policy"] in shares:
            row["p_win"] = shares[row["policy"]]


def flat(row: Mapping[str, Any]) -> Row:
    """One level: `latency_ms{p50}` -> `latency_ms_p50`, intervals as low and high, other lists as JSON text."""
    out: Row = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            if key == "latency_ms":
                out.update({f"{key}_{inner}": v for inner, v in value.items()})
            else:  # keyed by device, so not a fixed set of columns
                out[key] = json.dumps(value, sort_keys=True)
        elif key.startswith("interval") and (value is None or len(value) == 2):
            out[f"{key}_low"], out[f"{key}_high"] = value or (None, None)
        elif isinstance(value, list | tuple):
            plain = all(isinstance(v, str) for v in value)
            out[key] = ";".join(value) if plain else json.dumps(value, sort_keys=True)
        else:
            out[key] = value
    return out


def write_summary(rows: Sequence[Row], directory: Path) -> list[Path]:
    """summary.csv and summary.parquet: a line per row, columns in a fixed order."""
    return [path for write in summary_writers(rows, directory) for path in write()]


def summary_writers(rows: Sequence[Row], directory: Path) -> list[Callable[[], list[Path]]]:
    """A call for each file of `write_summary`: one that fails leaves the other."""
    table = [flat(row) for row in rows]
    names = {key for row in table for key in row}
    columns = [c for c in FIRST if c in names] + sorted(names - set(FIRST))

    def write(name: str, content: Callable[[Sequence[Row], Sequence[str]], bytes]) -> list[Path]:
        write_whole(directory / name, content(table, columns))
        return [directory / name]

    return [partial(write, "summary.csv", _csv), partial(write, "summary.parquet", _parquet)]


def read_summary(directory: Path) -> list[Row]:
    """The rows of summary.parquet as tables and figures take them: intervals and lists of names restored."""
    import pyarrow.parquet as pq

    path = directory / "summary.parquet"
    if not path.is_file():
        raise InputError(f"{path}: no such file; run the command 'sweep' with --out {directory} first")
    rows: list[Row] = pq.read_table(path).to_pylist()
    for row in rows:
        low, high = row.pop("interval80_low", None), row.pop("interval80_high", None)
        row["interval80"] = None if low is None else [low, high]
        for name in ("origins", "incomplete", "extrapolated"):
            row[name] = [word for word in (row.get(name) or "").split(";") if word]
    return rows


def _csv(table: Sequence[Row], columns: Sequence[str]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([[row.get(c) for c in columns] for row in table])
    return text.getvalue().encode()


def _parquet(table: Sequence[Row], columns: Sequence[str]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {}
    for column in columns:
        values = [row.get(column) for row in table]
        kinds = {type(v) for v in values if v is not None}
        if kinds <= {int, float} and float in kinds:
            values = [None if v is None else float(v) for v in values]
        elif len(kinds) > 1:
            values = [None if v is None else str(v) for v in values]
        arrays[column] = pa.array(values, type=None if kinds else pa.string())
    buffer = io.BytesIO()
    pq.write_table(pa.table(arrays), buffer, compression="zstd")
    return buffer.getvalue()
