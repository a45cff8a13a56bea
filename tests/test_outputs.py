"""Outputs: what cannot be written is refused before anything is computed, and no result is lost to a file."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sweep_cases import write_tiny_sweep
from test_cli import PROFILE

from tesserasim.cli import main
from tesserasim.errors import InputError
from tesserasim.files import read_text
from tesserasim.writing import check_output, write_whole

PAIR = "A100-80GB-PCIe+L40S@25Gbps"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("outputs")
    write_tiny_sweep(directory)
    (directory / "profile.json").write_text(json.dumps(PROFILE))
    return directory


def commands(files: Path, out: Path) -> dict[str, list[str]]:
    case = ["--mix", str(files / "tiny.toml"), "--cluster", PAIR, "--batch", "1", "--depth", "1"]
    return {
        "plan": ["plan", *case, "--pick", "--out", str(out)],
        "simulate": ["simulate", *case, "--policy", "single", "--timeline", str(out)],
        "import": ["import", str(files / "profile.json"), "--out", str(out)],
        "mix new": ["mix", "new", str(files / "pixels-denoise-0.parquet"), "--out", str(out)],
    }


PLACES: dict[str, Callable[[Path], object]] = {
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/full"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nowhere": lambda path: path.symlink_to(path.parent / "none" / "file"),
}


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("computed before the output was checked")


@pytest.mark.parametrize("command", ["plan", "simulate", "import", "mix new"])
@pytest.mark.parametrize("place", PLACES)
def test_a_bad_output_is_refused_before_computing(
    place: str, command: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Mutation: `check_output` takes anything that is no directory: the pipe or device node is replaced.

    Mutation: `check_output` removed from `import_profile`, `simulation`, `_plan` or `new_mix`: `never` is called.
    """
    out = tmp_path / "out.toml"
    PLACES[place](out)
    before = out.lstat().st_mode, sorted(tmp_path.iterdir())
    for name in ("tesserasim.api.run_case", "tesserasim.api.run_policy", "tesserasim.trace.importer.import_profile",
                 "tesserasim.sweep.mixfile.read_trace"):  # fmt: skip
        monkeypatch.setattr(name, never)
    assert main(commands(files, out)[command]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith(f"tesserasim: {out}: ")
    assert streams.err.count("\n") == 1
    assert ".tmp" not in streams.err
    assert (out.lstat().st_mode, sorted(tmp_path.iterdir())) == before


@pytest.mark.parametrize("command", ["plan", "simulate", "import"])
@pytest.mark.parametrize("name", ["x" * 300, "none/file", "", "/dev/null"])
def test_a_bad_name_is_refused(
    command: str, name: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Mutation: nothing is asked about the directory: the results come first."""
    monkeypatch.chdir(tmp_path)
    assert main([*commands(files, tmp_path)[command][:-1], name]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.count("\n") == 1
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_results_are_printed_before_a_late_failure(
    command: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up between the check and the writing.

    Mutation: `write_plan` before `_print`: nothing is printed. Mutation: `partial.unlink` left out of `write_whole`.
    """
    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    out = tmp_path / "out.json"
    assert main([*commands(files, out)[command], "--json"]) == 2
    streams = capsys.readouterr()
    assert json.loads(streams.out)["policy"]
    assert streams.err == f"tesserasim: {out}: cannot be written (No space left on device)\n"
    assert list(tmp_path.iterdir()) == []


BLOCKED = ["summary.csv", "summary.parquet", "figure.png", "verdicts.txt", "journal.jsonl", ".lock"]


@pytest.mark.parametrize("name", BLOCKED)
def test_a_sweep_refuses_a_blocked_summary(
    name: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutation: `store.check` is not called by `run_sweep`: everything is computed and some of it is lost."""
    command = ["sweep", str(files / "tiny-sweep.toml"), "--quick", "--jobs", "1", "--out", str(tmp_path)]
    for block in (Path.mkdir, os.mkfifo):
        block(tmp_path / name)
        assert main(command) == 2
        assert capsys.readouterr().err.startswith(f"tesserasim: {tmp_path / name}: is ")
        assert not (tmp_path / "experiments").exists()
        (tmp_path / name).rmdir() if block is Path.mkdir else (tmp_path / name).unlink()


def test_a_sweep_reports_its_rows_whatever_happens_to_its_files(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: `_write` lets an error through: no row is printed. Mutation: it stops at the first."""
    def broken(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tesserasim.sweep.summary._csv", broken)
    monkeypatch.setattr("tesserasim.report.figure._pictures", broken)
    command = ["sweep", str(files / "tiny-sweep.toml"), "--quick", "--jobs", "1", "--out", str(tmp_path), "--json"]
    assert main(command) == 2
    streams = capsys.readouterr()
    assert len(json.loads(streams.out)["rows"]) == 24
    assert streams.err.splitlines()[-1].count("No space") == 2
    assert (tmp_path / "summary.parquet").is_file() and (tmp_path / "verdicts.txt").is_file()


@pytest.mark.parametrize("out", ["file", "file/below", "pipe", "/dev/null", "/dev/null/x"])
def test_a_sweep_into_what_is_no_directory(
    out: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutation: `check_directory` looks at `path` only: a file above it is a failure later."""
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    assert main(["sweep", str(files / "tiny-sweep.toml"), "--quick", "--out", str(tmp_path / out)]) == 2
    streams = capsys.readouterr()
    assert "is not a directory" in streams.err and streams.err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "kept"


def test_what_is_read_is_not_replaced(files: Path, tmp_path: Path) -> None:
    """Mutation: the inputs are not compared in `check_output`: the profile is gone."""
    profile = files / "profile.json"
    before = profile.read_bytes()
    assert main(["import", str(profile), "--out", str(profile)]) == 2
    assert profile.read_bytes() == before
    link = tmp_path / "link"
    link.symlink_to(profile)
    with pytest.raises(InputError, match="is read by this command"):
        check_output(link, profile)


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    """Mutation: `write_whole` replaces `path` instead of what it leads to."""
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_only_so_much_is_read(tmp_path: Path) -> None:
    """Mutation: the limit is not compared: a file of any size is read into memory."""
    (tmp_path / "file").write_bytes(b"x" * 11)
    assert read_text(tmp_path / "file", "plan file", 11) == "x" * 11
    with pytest.raises(InputError, match="larger than"):
        read_text(tmp_path / "file", "plan file", 10)
