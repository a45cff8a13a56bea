"""`python -m hw`: bad input is one line and exit code 2, and a manifest is whole or as it was. No GPU is needed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hw.__main__ import main
from tesserasim.trace.parquet import read_trace, write_trace

ROOT = Path(__file__).resolve().parents[1]
TRACES = ROOT / "traces" / "fit" / "llama-3-8b"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One trace, and the manifest of it."""
    place = tmp_path / "traces"
    (place / "m").mkdir(parents=True)
    shutil.copy(min(TRACES.glob("*.parquet")), place / "m" / "u.parquet")
    assert main(["manifest", str(place)]) == 0
    return place


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that is refused."""
    try:
        code: object = main(arguments)
    except SystemExit as end:
        code = end.code
    streams = capsys.readouterr()
    assert (code, streams.out) == (2, "")
    assert streams.err.count("\n") == 1 and streams.err.rstrip("\n").isprintable()
    return streams.err


@pytest.mark.parametrize(
    "line",
    [
        "", "nothing", "oracle", "oracle x.parquet --limit-s nan", "oracle x.parquet --limit-s -1", "capture",
        "oracle x.parquet --limit-s soon", "capture --model llama-3-8b --limit-s nan", "manifest a b",
        "oracle /nonexistent/llama-3-8b/u.parquet", "oracle x.parquet --lim 5", "manifest /nonexistent",
        "manifest \x1b[2J",
    ],
)  # fmt: skip
def test_bad_lines(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutations: argparse's own parser (usage over several lines); `float` for a limit (NaN is none)."""
    refused(capsys, *line.split())


def test_a_manifest_says_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: an imported trace is said to have been captured with random weights."""
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert [row["file"] for row in manifest["traces"]] == ["m/u.parquet"]
    assert manifest["how"].startswith("python -m hw capture (")
    trace = read_trace(folder / "m" / "u.parquet")
    write_trace(replace(trace, meta=replace(trace.meta, origin="imported")), folder / "m" / "v.parquet")
    capsys.readouterr()
    assert main(["manifest", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}/MANIFEST.json: 2 traces\n"
    assert json.loads((folder / "MANIFEST.json").read_text())["how"].endswith("not captured: those of origin imported")


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"null"])
def test_a_damaged_manifest_is_made_again(folder: Path, damage: bytes) -> None:
    whole = (folder / "MANIFEST.json").read_bytes()
    (folder / "MANIFEST.json").write_bytes(damage)
    assert main(["manifest", str(folder)]) == 0
    assert (folder / "MANIFEST.json").read_bytes() == whole


def test_a_manifest_that_cannot_be_made_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: a folder without traces gets an empty manifest, which forgets what there was."""
    whole = (folder / "MANIFEST.json").read_bytes()
    trace = folder / "m" / "u.parquet"
    good = trace.read_bytes()
    for content in (b"", b"PAR1", good[:-9], b"PAR1" + bytes(5000)):
        trace.write_bytes(content)
        assert "u.parquet" in refused(capsys, "manifest", str(folder))
    trace.unlink()
    assert "holds no traces" in refused(capsys, "manifest", str(folder))
    trace.mkdir()
    refused(capsys, "manifest", str(folder))
    assert (folder / "MANIFEST.json").read_bytes() == whole
    assert sorted(p.name for p in folder.iterdir()) == ["MANIFEST.json", "m"]


def test_what_lies_in_place_of_a_manifest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = folder / "MANIFEST.json"
    place.unlink()
    place.mkdir()
    assert "is a directory" in refused(capsys, "manifest", str(folder))
    place.rmdir()
    os.mkfifo(place)
    assert "not a regular file" in refused(capsys, "manifest", str(folder))  # neither waited for nor replaced
    place.unlink()
    place.symlink_to(place)
    assert "symbolic links" in refused(capsys, "manifest", str(folder))
    assert "no such folder" in refused(capsys, "manifest", str(folder / "m" / "u.parquet"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_is_one_line(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Mutation: SIGTERM keeps its default action: a child would live on."""
    script = (
        "import sys, time, hw.capture.manifest as m\n"
        "m.write_manifest = lambda root: (print('here', flush=True), time.sleep(60))\n"
        "from hw.__main__ import main\nsys.exit(main(['manifest']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert errors.count("\n") == 1 and "Traceback" not in errors
