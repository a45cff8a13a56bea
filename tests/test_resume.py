"""Stopped at any moment and started again: nothing finished is lost, nothing is computed twice."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sweep_cases import SPEC, write_tiny_mixes, write_tiny_sweep
from test_determinism import hashes

import tesserasim
from tesserasim.cli import main
from tesserasim.errors import InputError
from tesserasim.sweep.store import JOURNAL, Store, digest
from tesserasim.writing import write_whole

KILLS = 20


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_sweep(tmp_path_factory.mktemp("spec"))


def start(spec: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tesserasim", "sweep", str(spec), "--out", str(out), "--jobs", "2", *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def events(out: Path, event: str) -> Counter[str]:
    """Key -> how often the journal has the event; the last line may be cut."""
    found: Counter[str] = Counter()
    path = out / JOURNAL
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found[entry["key"]] += entry["event"] == event
    return +found


def finished(out: Path) -> set[str]:
    """Keys with a whole result."""
    store = Store(out)
    return {p.stem for p in store.results.glob("*.json") if store.load(p.stem) is not None}


def test_killed_at_random_moments_and_run_again(spec: Path, tmp_path: Path) -> None:
    """kill -9 at 20 random moments.

    Mutation: `store.load` replaced by None in `run_sweep`: finished results are computed again.
    """
    whole = start(spec, tmp_path / "whole")
    assert whole.wait(120) == 0
    expected = hashes(tmp_path / "whole")
    out, chance = tmp_path / "killed", random.Random(20)
    kills = done_before = 0
    while kills < KILLS:
        before, starts = finished(out), events(out, "start")
        assert len(before) >= done_before  # nothing finished is lost
        done_before = len(before)
        if len(before) >= 60:  # nearly done: begin again with what a damaged disk might leave
            for key in sorted(before)[: chance.randrange(30, 60)]:
                (out / "experiments" / f"{key}.json").write_bytes(b'{"key": ')
            (out / JOURNAL).unlink()
            done_before = 0
            continue
        process = start(spec, out)
        try:
            process.wait(chance.uniform(0.3, 3.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        kills += 1
        again = {key for key in before if events(out, "start")[key] > starts[key]}
        assert not again  # nothing finished is computed twice
        assert set(events(out, "done").values()) <= {1}
    last = start(spec, out)
    assert last.wait(120) == 0
    assert hashes(out) == expected
    kept = start(spec, out)
    assert kept.wait(120) == 0
    assert kept.stderr is not None
    assert "0 experiments computed, 72 kept from before" in kept.stderr.read()
    assert hashes(out) == expected


def test_the_next_sweep_waits_for_workers_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: `_wait_for_workers` emptied: the directory is taken while a worker may still write there."""
    store = Store(tmp_path)
    monkeypatch.setattr("tesserasim.sweep.store._WORKERS_GONE_S", 0.2)
    gate = store.join_workers()
    with pytest.raises(InputError, match="earlier sweep"), store.locked():
        pass
    os.close(gate)
    with store.locked():
        pass


def test_damaged_results_are_computed_again(spec: Path, tmp_path: Path) -> None:
    """Mutation: the checksum is not compared in `Store.load`: the edited number stays.

    Mutation: nor is the key: a result is taken for another experiment's.
    """
    arguments = ["sweep", str(spec), "--quick", "--out", str(tmp_path), "--jobs", "1", "--json"]
    assert main(arguments) == 0
    expected = hashes(tmp_path)
    files = sorted((tmp_path / "experiments").glob("*.json"))
    damage: list[Callable[[bytes], bytes]] = [
        lambda whole: b"",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole.replace(b'"seed": 0', b'"seed": 1'),
        lambda whole: b"[" * 100_000,
        lambda whole: b"null",
        lambda whole: b"\xff\xfe" + whole,
        lambda whole: b'{"store_version": 1}',
        lambda whole: whole.replace(b'"store_version": 1', b'"store_version": 99'),
        lambda whole: files[-1].read_bytes(),  # a whole file under another's name
    ]
    for change, path in zip(damage, files, strict=False):
        path.write_bytes(change(path.read_bytes()))
    assert main(arguments) == 0
    assert hashes(tmp_path) == expected


def rewritten(whole: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A result file with another result and the checksum that goes with it."""
    document = json.loads(whole)
    del document["check"]
    change(document)
    document["check"] = digest(document)
    return json.dumps(document).encode()


def test_a_whole_file_of_another_shape_is_computed_again(spec: Path, tmp_path: Path) -> None:
    """Mutation: `is_result` is True for every object: the sweep ends with KeyError, again and again.

    Mutation: the number of draws is not compared: P(win) cannot be worked out.
    """
    arguments = ["sweep", str(spec), "--quick", "--out", str(tmp_path), "--jobs", "1", "--json"]
    assert main(arguments) == 0
    expected = hashes(tmp_path)
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda d: d.update(result={}),
        lambda d: d["result"].update(row={}),
        lambda d: d["result"].update(row=5),
        lambda d: d["result"].update(draws=None),
        lambda d: d["result"]["draws"].append(1.0),
        lambda d: d["result"]["draws"].append("x"),
        lambda d: d["result"]["row"].update(throughput_per_s="x", status="ok"),
        lambda d: d["result"]["row"].update(status="zz"),
        lambda d: d["result"]["row"].update(interval80=[1.0], status="ok"),
        lambda d: d["result"]["row"].update(origins=None),
    ]
    files = sorted((tmp_path / "experiments").glob("*.json"))
    done = [path for path in files if json.loads(path.read_bytes())["result"]["row"]["status"] == "ok"]
    for path, change in zip(done, changes, strict=False):
        path.write_bytes(rewritten(path.read_bytes(), change))
    assert main(arguments) == 0
    assert hashes(tmp_path) == expected


def test_a_directory_in_place_of_a_result(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutation: `wipe` does not pass over directories: `--fresh` ends at once and computes nothing.

    Mutation: `write_whole` does not turn errors into InputErrors: the hidden file is named.
    """
    arguments = ["sweep", str(spec), "--quick", "--out", str(tmp_path), "--jobs", "1", "--json"]
    assert main(arguments) == 0
    first = sorted((tmp_path / "experiments").glob("*.json"))[0]
    first.unlink()
    first.mkdir()
    for more in ([], ["--fresh"]):
        capsys.readouterr()
        assert main([*arguments, *more]) == 1
        streams = capsys.readouterr()
        document = json.loads(streams.out)
        assert (document["failed"], len(document["rows"])) == (1, 24)
        assert document["failures"][0]["error"] == f"{first}: is a directory; name a file to write"
    first.rmdir()
    os.mkfifo(first)  # neither waited for nor replaced
    assert main(arguments) == 1


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped")]
)
def test_an_interrupt_is_quiet_and_keeps_what_is_finished(
    number: signal.Signals, code: int, word: str, spec: Path, tmp_path: Path
) -> None:
    """Mutation: SIGTERM keeps its default action: no line, and code -15."""
    process = start(spec, tmp_path)
    deadline = time.monotonic() + 60
    while not finished(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert word in errors.splitlines()[-1]
    assert finished(tmp_path)
    gate = os.open(tmp_path / ".workers", os.O_RDWR)
    fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no worker is left
    os.close(gate)


def test_two_sweeps_in_one_directory(tmp_path: Path) -> None:
    with Store(tmp_path).locked(), pytest.raises(InputError, match="another sweep"), Store(tmp_path).locked():
        pass
    with Store(tmp_path).locked():  # free again
        pass


def test_fresh_computes_everything_again(spec: Path, tmp_path: Path) -> None:
    arguments = ["sweep", str(spec), "--quick", "--out", str(tmp_path), "--jobs", "1", "--json"]
    assert main(arguments) == 0
    assert set(events(tmp_path, "done").values()) == {1}
    assert main([*arguments, "--fresh"]) == 0
    assert set(events(tmp_path, "done").values()) == {2}


@pytest.mark.parametrize("change", ["seed = 1\n", 'prices = "min"\n', "max_seqs = 7\n"])
def test_a_changed_input_is_another_experiment(change: str, spec: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(change + SPEC)
    write_tiny_mixes(tmp_path)
    out = tmp_path / "out"
    for one in (spec, other):
        assert main(["sweep", str(one), "--quick", "--out", str(out), "--jobs", "1", "--json"]) == 0
    assert set(events(out, "done").values()) == {1}
    assert len(events(out, "done")) == 48


EDITING = """
import sys
from pathlib import Path
import tesserasim
from tesserasim import api
from tesserasim.sweep import executor
when, spec, out = sys.argv[1:]
source = Path(tesserasim.__file__).parent / "policies" / "af.py"
assert str(source).startswith(str(Path.cwd().resolve()))

def edit():
    source.write_text(source.read_text() + "# changed\\n")

if __name__ == "__main__":
    start = executor._Worker.__post_init__
    if when == "during":
        executor._Worker.__post_init__ = lambda self: (edit(), start(self))[1]
    for again in range(2):
        result = api.sweep(spec, out, jobs=1, quick=True, progress=False)
        print(result.computed, result.reused, len(result.failures), {f["error"][:40] for f in result.failures})
        if when == "between":
            edit()
        executor._Worker.__post_init__ = start
"""


@pytest.mark.parametrize(
    ("when", "lines"),
    [
        ("between", ["24 0 0 set()", "24 0 0 set()"]),
        ("during", ["0 0 24 {\"tesserasim's own files were changed whil\"}", "24 0 0 set()"]),
    ],
)
def test_source_that_changes_under_a_sweep(when: str, lines: list[str], spec: Path, tmp_path: Path) -> None:
    """In one process, which has read the old source; the workers run the new one.

    Mutation: `code_version` keeps its first answer: the second sweep is answered from old results.
    Mutation: workers do not compare: results of the new source lie under the key of the old one.
    """
    shutil.copytree(Path(tesserasim.__file__).parent, tmp_path / "tesserasim")
    (tmp_path / "edit.py").write_text(EDITING)
    command = [sys.executable, "edit.py", when, str(spec), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == lines, done.stderr


@pytest.mark.parametrize("trace", ["pipe.parquet", "/dev/zero", "*.pipe"])
def test_a_mix_of_what_is_no_file(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: files are hashed before they are checked: the pipe is waited for without end."""
    spec = write_tiny_sweep(tmp_path)
    os.mkfifo(tmp_path / "pipe.parquet")
    os.mkfifo(tmp_path / "a.pipe")
    mix = tmp_path / "pixels.toml"
    mix.write_text(mix.read_text().replace('"pixels-denoise-2.parquet"', json.dumps(trace)))
    assert main(["sweep", str(spec), "--quick", "--out", str(tmp_path / "out"), "--json"]) == 2
    assert "name a regular file" in capsys.readouterr().err


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: `write_whole` writes to the path itself: the old content is gone."""
    path = tmp_path / "result.json"
    write_whole(path, b"old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(InputError, match=r"result\.json: cannot be written \(No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_an_output_directory_that_cannot_be_written(spec: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["sweep", str(spec), "--quick", "--out", str(blocked), "--json"]) == 2
