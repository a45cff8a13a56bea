"""What `python -m hw validate` prints and writes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hw.validate.bench import policy_plans
from hw.validate.rows import COLUMNS, rows, summary
from hw.validate.runs import read_paths, read_runs
from tesserasim.errors import InputError
from tesserasim.files import path_text
from tesserasim.plans import write_plan
from tesserasim.terminal import put
from tesserasim.writing import check_directory, check_output, write_whole


def write_policy_plans(runs: Path, out: Path, depths: Sequence[int]) -> int:
    """Plan files of all units for `python -m hw replay --plan`, as `out`/<journal's name>/<policy>-<depth>.json."""
    check_directory(out)
    for journal, unit in read_runs(runs).units:
        for name, plan in policy_plans(unit, depths).items():
            path = out / journal.stem / f"{name}.json"
            write_plan(plan, path)
            put(f"{path}: {plan.status}, gap {plan.gap}, {plan.switches} switches")
    return 0


def validate(runs: Path, out: Path | None, device_model: str = "serial") -> int:
    """Print the table and its summary; with `out` also write it as Parquet and CSV. 1 if nothing was predicted."""
    if out is not None:
        _check_table(out, runs)
    found = rows(runs, device_model)
    put(f"{'model':<20} {'unit':<18} {'plan':<16} {'d':>2} switches  measured/s simulated    error latency  part")
    for r in found:
        put(_line(r))
    for s in summary(found):
        late = "" if s["latency_median"] is None else f", latency median {100 * s['latency_median']:.2f} %"
        put(f"{s['part']:<12} {s['model']:<20} n {s['n']:>4}  |error| median {100 * s['median']:.2f} %, p95 "
              f"{100 * s['p95']:.2f} %, inside 80 % interval {100 * s['inside80']:.0f} %{late}")  # fmt: skip
    if out is not None:
        _write(found, out)
    if not any(r["error"] is not None for r in found):
        print("hw: nothing could be predicted", file=sys.stderr)
        return 1
    return 0


def _line(r: Mapping[str, Any]) -> str:
    said = f"{'-':>9} {'-':>8}"
    if r["error"] is not None:
        said = f"{r['simulated_per_s']:9.2f} {100 * r['error']:+7.2f}%"
    late = f"{'-':>7}" if r["latency_error"] is None else f"{100 * r['latency_error']:+6.1f}%"
    return (
        f"{r['model']:<20} {r['unit']:<18} {r['lane'][:16]:<16} {r['depth']:>2} {r['switches']:>8} "
        f"{r['measured_per_s']:11.2f} {said} {late}  {r['part']}" + f"  {r['why']}" * bool(r["why"])
    )


def _tables(out: Path) -> tuple[Path, Path]:
    """The two files of `--out`: as .parquet and as .csv."""
    stem = out.with_suffix("") if out.suffix in (".parquet", ".csv") else out
    return stem.with_name(stem.name + ".parquet"), stem.with_name(stem.name + ".csv")


def _check_table(out: Path, runs: Path) -> None:
    """InputError, before anything is computed, unless both files can be written and are no inputs."""
    try:
        none = not out.name or out.is_dir() or (out.exists() and not out.is_file())
    except (OSError, ValueError) as error:
        raise InputError(f"{path_text(out)}: cannot be written ({getattr(error, 'strerror', error)})") from None
    if none:
        raise InputError(f"{path_text(out)}: name a file to write, without its ending")
    read = read_paths(runs)
    for path in _tables(out):
        check_directory(path.parent)
        if path.parent.is_dir():
            check_output(path, *read)


def _write(found: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Both tables, each whole or not at all; the same columns and types whatever is known."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    table = pa.Table.from_pylist([dict(r) for r in found], schema=schema)
    for path, write in zip(_tables(out), (pyarrow.parquet.write_table, pyarrow.csv.write_csv), strict=True):
        content = pa.BufferOutputStream()
        write(table, content)
        write_whole(path, content.getvalue().to_pybytes())
