"""`python -m hw replay --backend aten` on a model of one's own, and what the command refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from hw.__main__ import main
from tesserasim.plans import Lane, Plan, write_plan

TESTS = Path(__file__).resolve().parent
MODEL = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from replay_cases import _mamba2
from hw.workloads.base import UnitSpec

def tiny(device="cpu"):
    model = _mamba2("cpu")
    model.units = lambda: [UnitSpec("decode", "decode", 2, 1, 9), UnitSpec("prefill", "prefill", 1, 24, 24)]
    return model
"""


def test_random_placements_and_a_plan_file_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    plan = tmp_path / "plan.json"
    write_plan(Plan("m", "c", "p", (Lane("mine", 2, 1, {"decode": {"*": "b"}}),)), plan)
    line = ["replay", "--backend", "aten", "--model", f"{tmp_path / 'mine.py'}:tiny", "--random", "4",
            "--plan", str(plan), "--out", str(tmp_path / "out")]  # fmt: skip
    assert main(line) == 0, capsys.readouterr().err
    (path,) = (tmp_path / "out").rglob("decode*.aten.jsonl")
    rows = [json.loads(x) for x in path.read_text().splitlines()]
    checks = [r for r in rows if r["kind"] == "check"]
    assert [r["lane"] for r in checks][:3] == ["single-a", "single-b", "random-0-1"]
    assert all(r["equal"] for r in checks) and max(r["switches"] for r in checks) >= 8
    # the plan of the file is single-b's: equal plans run once, and none runs again
    assert "mine" not in [r["lane"] for r in checks]
    assert main(line) == 0
    again = [json.loads(x) for x in path.read_text().splitlines()]
    assert [r["kind"] for r in again] == [*(r["kind"] for r in rows), "session"]


@pytest.mark.quick
@pytest.mark.parametrize("bad", [
    ["--on", "cpu"], ["--on", "cpu,nowhere"], ["--sms", "0,4"], ["--sms", "x"], ["--depth", ""], ["--random", "-1"],
])  # fmt: skip
def test_bad_input_is_one_line(bad: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    line = ["replay", "--backend", "aten", "--model", f"{tmp_path / 'mine.py'}:tiny", "--out", str(tmp_path), *bad]
    try:
        code = main(line)
    except SystemExit as stop:
        code = int(stop.code or 0)
    err = capsys.readouterr().err
    assert code == 2 and len(err.strip().splitlines()) == 1, err
