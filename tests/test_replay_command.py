"""`python -m hw replay --backend aten` on a model of one's own, and what the command refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from hw.__main__ import _parser, main
from hw.journals import read_journal
from hw.replay.run import Journal
from tesserasim.errors import InputError
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

def nameless(device="cpu"):
    model = tiny()
    model.name = "../up"
    return model

def unitless(device="cpu"):
    model = tiny()
    model.units = lambda: []
    return model

def numbers(device="cpu"):
    model = tiny()
    model.units = lambda: [1]
    return model

def empty(device="cpu"):
    model = tiny()
    model.units = lambda: [UnitSpec("decode", "decode", 0, 1, 9)]
    return model

def idle(device="cpu"):
    model = tiny()
    model.prepare = lambda unit: lambda: None
    return model

def broken(device="cpu"):
    model = tiny()
    def step():
        raise RuntimeError("no luck\\nat all")
    model.prepare = lambda unit: step
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
    ["--on", "meta,cpu"], ["--on", ",".join(["cpu"] * 9)], ["--units", "decode-b2-c9,decode-b2-c8"],
    ["--random", "10001"], ["--profile"], ["--links"], ["--pairs"], ["--timelines"], ["--sms", "64,68"],
    ["--mutations", "1"], ["--depth", "2"], ["--copies", "kernel"], ["--copies", "me"], ["--devices", "0:64,0:68"],
    ["--devices", "gpu0"], ["--backend", "cudagraph", "--sms", "64,68", "--devices", "0:64"],
    ["--backend", "cudagraph", "--on", "cpu,cuda:0"], ["--plan", "nowhere.json"], ["--depth", "1,257"],
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
    assert "internal" not in err and not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.quick
@pytest.mark.parametrize("factory", ["nameless", "unitless", "numbers", "empty", "idle", "broken"])
def test_a_model_that_cannot_be_replayed_is_one_line(
    factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    model = f"{tmp_path / 'mine.py'}:{factory}"
    assert main(["replay", "--backend", "aten", "--model", model, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "internal" not in err, err
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.quick
@pytest.mark.parametrize("placed", [{"*": "q"}, {"layers.0/mm#0": "a"}])
def test_a_plan_for_other_devices_or_sites_is_one_line(
    placed: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    plan = tmp_path / "plan.json"
    write_plan(Plan("m", "c", "p", (Lane("mine", 2, 1, {"decode": placed}),)), plan)
    line = ["replay", "--backend", "aten", "--model", f"{tmp_path / 'mine.py'}:tiny", "--plan", str(plan)]
    assert main([*line, "--random", "0", "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "plan.json: lane mine" in err, err


FACTS = {"model": "toy", "unit": {"batch": 2}, "devices": {"a": "cpu", "b": "cpu"}}


@pytest.mark.quick
def test_half_a_line_is_cut_off_before_the_next(tmp_path: Path) -> None:
    """A run that was killed while it wrote goes on in a journal that validate reads."""
    path = tmp_path / "u.jsonl"
    placed = {"lane": "random-0-1", "device_of": [["a", 2], ["b", 1]]}
    Journal(path, FACTS).add({"kind": "check", "plan": "p", "equal": False, **placed})
    for half in (b'{"kind": "che', b'{"kind": "check", "plan": "q"}', b'{"kind": "caf\xc3'):
        path.write_bytes(path.read_bytes() + half)
        again = Journal(path, FACTS)
        assert again.has("check", "p") and not again.has("check", "q") and again.unequal == {"p"}
    assert [json.loads(x)["kind"] for x in path.read_text().splitlines()] == ["session", "check", *["session"] * 3]
    assert read_journal(path) == []


@pytest.mark.quick
def test_a_journal_of_other_devices_and_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "u.jsonl"
    Journal(path, FACTS)
    for other in ({"devices": {"a": "cpu", "b": "cuda:0"}}, {"unit": {"batch": 3}}, {"model": "other"}):
        with pytest.raises(InputError, match="give another --out"):
            Journal(path, {**FACTS, **other})
    for raw in (b"mine\n", b"mine", b"[1]\n", "a,b\n".encode("utf-16")):
        path.write_bytes(raw)
        with pytest.raises(InputError, match="give another --out"):
            Journal(path, FACTS)
        assert path.read_bytes() == raw
    path.write_text('{"kind": "check", "plan": ["p"], "equal": true}\n' + "[" * 100_000 + "\n")
    assert not Journal(path, FACTS).has("check", "p")


def test_what_was_unequal_stays_so_and_the_limit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    line = ["replay", "--backend", "aten", "--model", f"{tmp_path / 'mine.py'}:tiny", "--units", "decode-b2-c9",
            "--random", "1", "--out", str(tmp_path / "out")]  # fmt: skip
    assert main([*line, "--limit-s", "0"]) == 0
    assert "not reached" in capsys.readouterr().err and not list(tmp_path.rglob("*.jsonl"))
    assert main(line) == 0
    (path,) = tmp_path.rglob("*.jsonl")
    path.write_text(path.read_text().replace('"equal": true', '"equal": false', 1))
    assert main(line) == 1


MATRIX = TESTS.parent / "experiments/validation/replay_matrix.py"


def matrix(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(MATRIX), *options]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.quick
def test_the_steps_of_the_matrix_are_commands_of_hw(tmp_path: Path) -> None:
    """What --dry-run prints a shell takes word for word, also with a space in the folder and several plans."""
    out = tmp_path / "o u t"
    plans = out / "plans/sd3.5-medium/denoise-b1"
    plans.mkdir(parents=True)
    for name in ("af-1", "kernel-1"):
        (plans / f"{name}.json").write_text("{}")
    said = matrix(tmp_path, "--dry-run", "--out", "o u t", "--only", "sd3.5-medium").stdout.splitlines()
    assert len(said) == 4
    for line in said:
        command = line.replace(sys.executable, "printf '%s\\n'", 1)
        words = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
        args = _parser().parse_args(words[2:])
        assert args.plans if args.command == "validate" else args.out == "o u t"
    assert args.plan == [f"o u t/plans/sd3.5-medium/denoise-b1/{n}.json" for n in ("af-1", "kernel-1")]
    assert matrix(tmp_path, "--dry-run").returncode == 0 and not (tmp_path / "replay").exists()


@pytest.mark.quick
@pytest.mark.parametrize("bad", [
    ["--only", "nope"], ["--sms", "64,x"], ["--sms", "64"], ["--sms", "1,2,3"], ["--random", "-1"],
    ["--limit-s", "nan"], ["--mutations", "99999999"], ["--out", "/dev/full"],
])  # fmt: skip
def test_the_matrix_refuses_in_one_line(bad: list[str], tmp_path: Path) -> None:
    ran = matrix(tmp_path, *bad)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr and "error:" in ran.stderr.splitlines()[-1]


@pytest.mark.quick
def test_a_plan_of_other_units_and_a_factory_that_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    plan = tmp_path / "plan.json"
    write_plan(Plan("m", "c", "p", (Lane("l", 2, 1, {"denoise": {"*": "b"}}),)), plan)
    line = ["replay", "--backend", "aten", "--out", str(tmp_path), "--random", "1"]
    assert main([*line, "--model", f"{tmp_path / 'mine.py'}:tiny", "--plan", str(plan)]) == 2
    assert "places none of the units to run (decode, prefill)" in capsys.readouterr().err
    (tmp_path / "exits.py").write_text("import sys\n\ndef make(device):\n    sys.exit(0)\n")
    assert main([*line, "--model", f"{tmp_path / 'exits.py'}:make"]) == 2
    assert "exits.py:4: SystemExit" in capsys.readouterr().err
