"""Traces and profiles as Chrome trace events: integers kept, tracks without overlap, and back again."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from kineto_cases import SHARED, SMALL, document, kernel, needs_shared, write

from tesserasim.cli import main
from tesserasim.trace.chrome import us
from tesserasim.trace.importer import import_profile
from tesserasim.trace.inspect import facts, inspect_file
from tesserasim.trace.parquet import read_trace, write_trace
from tesserasim.trace.perfetto import export_perfetto

ROOT = Path(__file__).resolve().parents[1]
TRACES = ["llama-3-8b/prefill-b1-t512", "gpt-oss-20b/decode-b1-c512", "sd3.5-medium/denoise-b1"]


def slices(path: Path) -> list[dict[str, Any]]:
    return [e for e in json.loads(path.read_text("utf-8"))["traceEvents"] if e["ph"] == "X"]


def check_tracks(path: Path) -> None:
    """No two slices of a track overlap, and the first starts at 0."""
    tracks = defaultdict(list)
    text = path.read_text("utf-8")
    for e in json.loads(text, parse_float=Decimal)["traceEvents"]:
        if e["ph"] == "X":
            start, length = (int(Decimal(e[k]) * 1000) for k in ("ts", "dur"))
            tracks[e["pid"], e["tid"]].append((start, start + length))
    for spans in tracks.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert min(s[0] for spans in tracks.values() for s in spans) == 0


@pytest.mark.quick
def test_three_decimals_from_integers() -> None:
    assert [us(n) for n in (0, 1, 999, 1000, 1234567, -1)] == ["0.000", "0.001", "0.999", "1.000", "1234.567", "-0.001"]


@pytest.mark.parametrize("name", TRACES)
def test_a_captured_trace_comes_back_with_its_facts(name: str, tmp_path: Path) -> None:
    trace = read_trace(ROOT / f"traces/{name}.parquet")
    export_perfetto(ROOT / f"traces/{name}.parquet", tmp_path / "out.json")
    assert inspect_file(tmp_path / "out.json") == facts(trace)
    back = import_profile(tmp_path / "out.json")
    assert [(k.name, k.duration_ns, k.grid, k.block) for k in back.kernels if k.kind != "memset"] == [
        (k.name or k.site, k.duration_ns, k.grid, k.block) for k in trace.kernels if k.kind != "memset"
    ]
    check_tracks(tmp_path / "out.json")


@pytest.mark.quick
def test_overlapping_kernels_of_one_stream_get_tracks_of_their_own(tmp_path: Path) -> None:
    events = [kernel("a", 10, 100), kernel("b", 60, 100), kernel("c", 120, 100), kernel("d", 30, 5, stream=20)]
    profile = write(tmp_path / "in.json", document(events))
    made = export_perfetto(profile, tmp_path / "out.json")
    assert made["tracks"] == 3 and made["slices"] == 4
    check_tracks(tmp_path / "out.json")
    assert inspect_file(tmp_path / "out.json") == inspect_file(profile)
    assert [e["args"]["stream"] for e in slices(tmp_path / "out.json") if e["name"] == "b"] == [7]


@needs_shared
@pytest.mark.parametrize("name", ["tracelens-h100-bert-small", "hta-nccl-parser", "tracelens-mi210-gpu-only"])
def test_real_profiles_come_back(name: str, tmp_path: Path) -> None:
    profile = SHARED / f"data/traces/{name}.json.gz"
    export_perfetto(profile, tmp_path / "out.json")
    got, want = inspect_file(tmp_path / "out.json"), inspect_file(profile)
    assert {k: v for k, v in got.items() if k != "warnings"} == {k: v for k, v in want.items() if k != "warnings"}
    check_tracks(tmp_path / "out.json")


@pytest.mark.quick
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(SMALL), "--perfetto", str(tmp_path / "x.json"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    jsonschema.validate(made, json.loads((ROOT / "tesserasim/schemas/export.json").read_text("utf-8")))
    write_trace(import_profile(SMALL), tmp_path / "small.parquet")
    assert main(["export", str(tmp_path / "small.parquet"), "--perfetto", str(tmp_path / "y.json")]) == 0
    capsys.readouterr()
    for bad in (["export", str(tmp_path / "none"), "--perfetto", str(tmp_path / "z")], ["export", str(SMALL)],
                ["export", str(SMALL), "--perfetto", str(SMALL)]):  # fmt: skip
        try:
            assert main(bad) == 2
        except SystemExit as stop:
            assert stop.code == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
