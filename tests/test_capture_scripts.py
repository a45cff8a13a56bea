"""The tables over captured traces: damaged ones are named, the others are judged all the same."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_oracle_scripts import FOLDER, load

from tesserasim.errors import InputError
from tesserasim.trace.parquet import read_trace, write_trace

TRACES = FOLDER.parents[1] / "traces"
UNIT = "llama-3-8b/decode-b32-c2048"
Main = Callable[[Path], int]


def quality(folder: Path) -> int:
    return int(load("capture_quality").main((), folder))


def single(folder: Path) -> int:
    return int(load("single_h200").main(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One good unit."""
    (tmp_path / "llama-3-8b").mkdir()
    shutil.copy(TRACES / f"{UNIT}.parquet", tmp_path / "llama-3-8b")
    return tmp_path


@pytest.mark.parametrize("main", [quality, single])
def test_a_good_unit(main: Main, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(folder) == 0
    assert UNIT in capsys.readouterr().out


@pytest.mark.parametrize("main", [quality, single])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\xff" * 4000, None])
def test_a_damaged_trace_is_named(
    main: Main, content: bytes | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutation: the first error ends the table."""
    bad = folder / "llama-3-8b" / "a.parquet"  # before the good one
    bad.mkdir() if content is None else bad.write_bytes(content)
    assert main(folder) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith(f"error: {bad}: ") and streams.err.count("\n") == 1
    assert UNIT in streams.out


@pytest.mark.parametrize(
    ("main", "change"),
    [
        *((quality, {"extra": extra}) for extra in ({}, *({"copy_gbs": x} for x in (0, "4", float("nan"))))),
        (quality, {"e2e_ns": None}), (single, {"e2e_ns": None}),
        (single, {"e2e_ns": {"median": 0, "p10": 0, "p90": 0}}), (single, {"unit": {"name": "decode"}}),
    ],
)  # fmt: skip
def test_a_trace_that_lacks_what_is_compared(
    main: Main, change: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = read_trace(folder / f"{UNIT}.parquet")
    bad = folder / "llama-3-8b" / "a.parquet"
    write_trace(dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, **change)), bad)
    assert main(folder) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith(f"error: {bad}: ") and streams.err.count("\n") == 1
    assert UNIT in streams.out


def test_a_left_out_point_without_its_mix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "left-out").mkdir()
    shutil.copytree(folder / "llama-3-8b", folder / "left-out" / "llama-3-8b")
    assert single(folder) == 2
    assert "llama-3-8b.toml" in capsys.readouterr().err
    (folder / "llama-3-8b.toml").write_bytes(b"\xff")
    assert single(folder) == 2


@pytest.mark.parametrize("main", [quality, single])
def test_no_traces(main: Main, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no"):
        main(tmp_path)


def test_arguments_of_capture_quality(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = load("capture_quality").main
    assert main(("--sites", UNIT), folder) == 0
    assert "us, limit" in capsys.readouterr().out
    for arguments in (("--sites",), ("--site", UNIT), ("--sites", "nothing"), ("--sites", "a", "b"), ("-h",)):
        with pytest.raises(InputError):
            main(arguments, folder)


def test_units_of_no_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: the largest of no ratios."""
    (tmp_path / "sd3.5-medium").mkdir()
    shutil.copy(min((TRACES / "sd3.5-medium").glob("*.parquet")), tmp_path / "sd3.5-medium")
    assert quality(tmp_path) == 1
    assert "language models: no unit" in capsys.readouterr().out
