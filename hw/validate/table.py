"""The table of `python -m hw validate --out`: rows as Parquet and CSV, and what a run before has left there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hw.validate.rows import COLUMNS, Row
from hw.validate.runs import read_paths
from tesserasim.errors import InputError
from tesserasim.files import check_regular, path_text
from tesserasim.writing import check_directory, check_output, write_whole

#: A run that is killed loses at most what it has computed in this time.
SAVE_S = 30.0


class Table:
    """Rows as they are computed, written whole now and then, so that the next run has only the rest to do."""

    def __init__(self, out: Path, runs: Path) -> None:
        """InputError, before anything is computed, unless both files can be written and are no inputs of `runs`."""
        self.paths = table_paths(out)
        self.rows: list[dict[str, Any]] = []
        self._left: dict[str, Row] = {}  # of the run before, and not computed yet
        self._saved = time.monotonic()
        _check(out, runs, self.paths)
        for row in _kept(self.paths[0]):
            self._left[row["inputs"]] = row

    @property
    def kept(self) -> Mapping[str, Row]:
        """Rows of the run before, by their inputs."""
        return self._left

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._left.pop(row["inputs"], None)
        if time.monotonic() - self._saved > SAVE_S:
            self.save()

    def save(self, done: bool = False) -> None:
        """Write the rows so far; until all is `done`, also those of the run before that have not been asked for."""
        found = self.rows if done else [*self.rows, *self._left.values()]
        if found:
            _write(found, self.paths)
        self._saved = time.monotonic()


def table_paths(out: Path) -> tuple[Path, Path]:
    """The two files of `--out`: as .parquet and as .csv."""
    stem = out.with_suffix("") if out.suffix in (".parquet", ".csv") else out
    return stem.with_name(stem.name + ".parquet"), stem.with_name(stem.name + ".csv")


def read_table(path: Path) -> list[dict[str, Any]]:
    """Rows of a table of `python -m hw validate --out`; InputError for any other file."""
    import pyarrow as pa
    import pyarrow.parquet

    check_regular(path, "table of python -m hw validate")
    try:
        table = pyarrow.parquet.read_table(path)
    except (pa.ArrowException, OSError, ValueError):
        raise InputError(f"{path_text(path)}: not a Parquet file; make it with python -m hw validate --out") from None
    if not table.schema.equals(_schema()):
        raise InputError(f"{path_text(path)}: not a table of this version; make it anew with python -m hw validate")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _kept(path: Path) -> list[dict[str, Any]]:
    """Rows of a run before; none if another version wrote them, or something else."""
    try:
        return [r for r in read_table(path) if r["inputs"]] if path.exists() else []
    except InputError:
        return []


def _check(out: Path, runs: Path, paths: Sequence[Path]) -> None:
    try:
        none = not out.name or out.is_dir() or (out.exists() and not out.is_file())
    except (OSError, ValueError) as error:
        raise InputError(f"{path_text(out)}: cannot be written ({getattr(error, 'strerror', error)})") from None
    if none:
        raise InputError(f"{path_text(out)}: name a file to write, without its ending")
    read = read_paths(runs)
    for path in paths:
        check_directory(path.parent)
        if path.parent.is_dir():
            check_output(path, *read)


def _schema() -> Any:
    import pyarrow as pa

    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    return pa.schema([(name, types[kind]) for name, kind in COLUMNS.items()])


def _write(found: Sequence[Row], paths: Sequence[Path]) -> None:
    """Both tables, each whole or not at all; the same columns and types whatever is known."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    table = pa.Table.from_pylist([dict(r) for r in found], schema=_schema())
    for path, write in zip(paths, (pyarrow.parquet.write_table, pyarrow.csv.write_csv), strict=True):
        content = pa.BufferOutputStream()
        write(table, content)
        write_whole(path, content.getvalue().to_pybytes())
