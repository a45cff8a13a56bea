"""The command line: exit codes, one line per error, JSON that its schema accepts, quiet ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from sweep_cases import write_tiny_sweep

from tesserasim.cli import main
from tesserasim.errors import InputError
from tesserasim.trace.parquet import read_trace

PROFILE = {
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
    "traceEvents": [
        {"ph": "X", "cat": "kernel", "name": f"k{i}", "pid": 0, "tid": 7, "ts": 100 + 10 * i, "dur": 5,
         "args": {"device": 0, "stream": 7, "correlation": i + 1, "grid": [1, 1, 1], "block": [32, 1, 1]}}
        for i in range(4)
    ],
}  # fmt: skip


def schema(name: str) -> Any:
    text = resources.files("tesserasim").joinpath("schemas", f"{name}.json").read_text(encoding="utf-8")
    document = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(document)
    return document


def check(document: Any, name: str) -> None:
    jsonschema.validate(document, schema(name), cls=jsonschema.Draft202012Validator)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    return path


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main(list(arguments)) == code
    return json.loads(capsys.readouterr().out)


def test_every_schema_is_a_schema() -> None:
    names = sorted(p.name for p in resources.files("tesserasim").joinpath("schemas").iterdir())
    assert names
    for name in names:
        if name.endswith(".json"):
            schema(name[:-5])


def test_catalogue_and_policies(capsys: pytest.CaptureFixture[str]) -> None:
    check(output(capsys, "gpus", "--json"), "gpus")
    names = output(capsys, "policies", "--json")
    check(names, "policies")
    assert {"single", "replicas-lo", "replicas-static", "pd", "af", "kernel"} <= {p["name"] for p in names}
    assert main(["gpus"]) == main(["policies"]) == 0
    assert "H100-SXM" in capsys.readouterr().out


def test_from_profile_to_mix(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: `_stretch` keeps ids as they were: writing the trace fails."""
    check(output(capsys, "inspect", str(profile), "--json"), "inspect")
    trace, mix = tmp_path / "t.parquet", tmp_path / "m.toml"
    facts = output(capsys, "import", str(profile), "--out", str(trace), "--unit", "step", "--range", "1:3",
                   "--phase", "decode", "--gpu", "h100 sxm", "--json")  # fmt: skip
    check(facts, "import")
    assert facts["kernels"] == 2
    read = read_trace(trace)
    assert [k.name for k in read] == ["k1", "k2"]
    assert [k.gap_ns for k in read] == [0, 5000]
    assert {k.phase for k in read} == {"decode"}
    assert (read.unit, read.meta.gpu) == ("step", "H100-SXM")
    made = output(capsys, "mix", "new", str(trace), "--out", str(mix), "--launches", "step=3", "--json")
    check(made, "mix-new")
    assert made["stages"] == [["step", 3]]


BAD_LINES = {
    "no command": [],
    "unknown command": ["swepp"],
    "unknown option": ["gpus", "--jsn"],
    "abbreviated option": ["policies", "--js"],
    "no such file": ["inspect", "/nonexistent/x.json"],
    "a directory": ["inspect", "."],
    "jobs zero": ["sweep", "--jobs", "0"],
    "jobs text": ["sweep", "--jobs", "two"],
    "no such spec": ["sweep", "/nonexistent/spec.toml"],
    "range backwards": ["import", "x", "--out", "y", "--range", "5:2"],
    "simulate without a policy": ["simulate", "--mix", "a", "--cluster", "b"],
    "policy and plan": ["simulate", "--mix", "a", "--cluster", "b", "--policy", "single", "--plan", "p"],
    "unknown mix": ["simulate", "--mix", "nope", "--cluster", "L40S", "--policy", "single"],
    "mix file missing": ["simulate", "--mix", "/nonexistent.toml", "--cluster", "L40S", "--policy", "single"],
    "seed negative": ["simulate", "--mix", "a", "--cluster", "b", "--policy", "single", "--seed", "-1"],
    "prices missing": ["gpus", "--prices", "/nonexistent.csv"],
    "mix from nothing": ["mix", "new", "/nonexistent.parquet", "--out", "/tmp/never.toml"],
    "launches": ["mix", "new", "x", "--out", "y.toml", "--launches", "step=0"],
    "out in no directory": ["plan", "--mix", "a.toml", "--cluster", "b", "--policy", "c", "--out", "/none/x"],
    "new lines in a name": ["inspect", "a\nb\nc.json"],
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_input_is_one_line_and_exit_code_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: `_Parser.error` removed: argparse prints its usage over several lines."""
    try:
        code = main(BAD_LINES[case])
    except SystemExit as end:
        assert isinstance(end.code, int)
        code = end.code
    streams = capsys.readouterr()
    assert code == 2
    assert streams.out == ""
    assert streams.err.count("\n") == 1
    assert streams.err.startswith("tesserasim")
    assert "Traceback" not in streams.err


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (InputError("what, where\nand what to do"), 2, "what, where and what to do"),
        (MemoryError(), 2, "not enough memory"),
        (ZeroDivisionError("a\nb"), 3, "internal error: ZeroDivisionError: a b (set TESSERASIM_DEBUG=1"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_escapes_a_command_is_one_line(
    error: BaseException, code: int, word: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.delenv("TESSERASIM_DEBUG", raising=False)
    monkeypatch.setattr("tesserasim.cluster.catalogue.describe_gpus", fail)
    assert main(["gpus"]) == code
    message = capsys.readouterr().err
    assert word in message
    assert message.count("\n") == 1
    monkeypatch.setenv("TESSERASIM_DEBUG", "1")
    assert main(["gpus"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_help_of_every_command_names_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["sweep"], ["simulate"], ["plan"], ["import"], ["inspect"], ["mix", "new"], ["gpus"]):
        with pytest.raises(SystemExit) as end:
            main([*words, "--help"])
        assert end.value.code == 0
        assert "--json" in capsys.readouterr().out


def test_a_closed_pipe_is_quiet() -> None:
    """Mutation: the BrokenPipeError branch of `main` removed: an internal error is reported."""
    command = f"{sys.executable} -m tesserasim gpus --json | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ended.stderr == ""
    assert ended.returncode in (0, 141)  # 0: everything fitted into the pipe before it closed


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    line = command.replace("tesserasim", f"{sys.executable} -m tesserasim")
    environment = {**os.environ, **variables}
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, env=environment, timeout=120
    )  # fmt: skip


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    """Mutation: `reconfigure` left out of `prepared`: the table's "·" is an internal error.

    Mutation: `ensure_ascii=False` in `_print`: the name in the JSON is another one.
    """
    write_tiny_sweep(tmp_path)
    case = f"tesserasim simulate --mix {tmp_path}/tiny.toml --cluster L40S --policy single --batch 1 --depth 1"
    ended = shell(case, **ASCII)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "tiny on L40S" in ended.stdout
    (tmp_path / "tiny.toml").write_text((tmp_path / "tiny.toml").read_text().replace('"tiny"', '"tïny"'))
    ended = shell(f"{case} --json", **ASCII)
    assert json.loads(ended.stdout)["mix"] == "tïny"


@pytest.mark.parametrize("command", ["policies", "policies --json", "--help", "gpus --jsn", "inspect /none"])
@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", "<&- >&-", "2>/dev/full"])
def test_closed_streams_are_quiet(command: str, streams: str) -> None:
    """Mutation: `_open_streams` is not called: AttributeError of None.

    Mutation: `say` lets OSError through: a traceback where standard error is full.
    """
    ended = shell(f"tesserasim {command} {streams}")
    assert ended.returncode == (2 if "jsn" in command or "none" in command else 0)
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr
    assert ended.stderr.count("\n") <= 1


@pytest.mark.parametrize("command", ["policies", "gpus --json", "--help"])
def test_full_standard_output_is_said(command: str) -> None:
    """Mutation: `drop_output` left out for OutputError: Python complains once more at exit, with code 120."""
    ended = shell(f"tesserasim {command} >/dev/full", PYTHONUNBUFFERED="")
    assert ended.returncode == 2
    assert ended.stderr == "tesserasim: standard output: cannot be written (No space left on device)\n"


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, tesserasim.cli as c; c.parser(); print(sorted(m for m in sys.modules if '.' not in m))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "pandas", "pyarrow", "scipy", "matplotlib", "simpy", "tqdm"} & set(eval(ended.stdout))


