"""What holds for any file given to the import: a trace that survives being written, or one of our errors."""

from __future__ import annotations

from pathlib import Path

from tesserasim.errors import TesserasimError
from tesserasim.trace.importer import import_profile
from tesserasim.trace.inspect import facts, inspect_file
from tesserasim.trace.parquet import read_trace, write_trace


def import_and_check(path: Path, through_parquet: bool = True) -> None:
    try:
        trace = import_profile(path)
    except TesserasimError as error:
        assert str(error) and "\n" not in str(error)
        trace = None
    try:
        seen = inspect_file(path)
        assert trace is None or seen == facts(trace)
    except TesserasimError:
        assert trace is None
    if trace is not None:
        trace.validate()
        if through_parquet:
            write_trace(trace, path.parent / "t.parquet")
            assert read_trace(path.parent / "t.parquet") == trace
