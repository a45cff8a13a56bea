"""Workers: what they return, that a death is tried once more and then fails one task only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tesserasim.errors import InputError
from tesserasim.sweep.executor import Task, executor, run_local


@dataclass
class Scripted:
    """Does what the payload says; counts its calls in a file, so that calls of dead processes count too."""

    log: str

    def start(self) -> None:
        self.calls = 0

    def stop(self) -> None:
        pass

    def __call__(self, payload: str) -> str:
        self.calls += 1
        with Path(self.log).open("a") as file:
            file.write(payload + "\n")
        if payload.startswith("die-always"):
            os.kill(os.getpid(), signal.SIGKILL)
        if payload.startswith("die-once") and Path(self.log).read_text().count(payload) == 1:
            os._exit(7)
        if payload.startswith("bad"):
            raise InputError("two\nlines")
        if payload.startswith("bug"):
            raise ZeroDivisionError("oops")
        return payload.upper()


def tasks(*payloads: str) -> list[Task]:
    return [Task(p, p.split("-")[-1], p) for p in payloads]


def test_a_dead_worker_is_tried_once_more_and_the_others_are_kept(tmp_path: Path) -> None:
    """Mutation: ATTEMPTS = 1: die-once fails."""
    log = tmp_path / "log"
    work = tasks("a", "die-once", "die-always", "bad", "bug", "b", "c")
    done = {d.key: d for d in run_local(work, Scripted(str(log)), jobs=2)}
    assert set(done) == {t.key for t in work}
    for key in ("a", "b", "c", "die-once"):
        assert done[key].answer == key.upper()
        assert done[key].error is None
    assert done["die-always"].error == "worker process died 2 times (signal SIGKILL)"
    assert done["bad"].error == "two lines"
    assert done["bug"].error == "ZeroDivisionError: oops"
    lines = log.read_text().split()
    assert lines.count("die-always") == 2
    assert lines.count("die-once") == 2
    assert lines.count("bad") == 1


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_sweep_executor import Sleeper, tasks
from tesserasim.sweep.executor import run_local
if __name__ == "__main__":
    list(run_local(tasks("a", "b"), Sleeper(sys.argv[1]), jobs=2))
"""


@dataclass
class Sleeper:
    """Says that it runs, and takes its time."""

    directory: str

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def __call__(self, payload: str) -> None:
        (Path(self.directory) / f"{payload}.pid").write_text(str(os.getpid()))
        time.sleep(60)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's death signal is Linux's")
def test_workers_die_with_a_killed_sweep(tmp_path: Path) -> None:
    """Mutation: `_die_with` emptied: both workers sleep on."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(tests=str(Path(__file__).parent)))
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    files = [tmp_path / "a.pid", tmp_path / "b.pid"]
    deadline = time.monotonic() + 60
    while not all(f.exists() and f.read_text() for f in files) and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = [int(f.read_text()) for f in files]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in workers)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # a zombie is dead, whoever should have waited for it


def test_more_jobs_than_tasks_and_no_tasks(tmp_path: Path) -> None:
    assert list(run_local([], Scripted(str(tmp_path / "log")), jobs=4)) == []
    assert [d.answer for d in run_local(tasks("x"), Scripted(str(tmp_path / "log")), jobs=4)] == ["X"]


def test_executors_that_are_not_there_say_what_to_install() -> None:
    assert executor("local") is run_local
    with pytest.raises(InputError, match="known: local, dask, ray"):
        executor("slurm")
    for name, package in (("dask", "distributed"), ("ray", "ray")):
        try:
            __import__(package)
        except ImportError:
            with pytest.raises(InputError, match=f"pip install '{name}"):
                executor(name)
