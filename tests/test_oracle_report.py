"""Journals and reports of the oracle: deaths in each phase, merged inputs, hostile lines. No GPU is needed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from hw.errors import DriverError, HardwareError
from hw.oracle import run
from hw.oracle.report import append_line, done_of, last_state, read_journal, write_report
from tesserasim.errors import InputError

UNIT = {"kind": "unit", "model": "m", "inputs": 2, "kernels": [{"node": n, "accesses": []} for n in (3, 4)]}
GARBAGE = [
    "", "null", "7", '"kernel"', "[]", "{}", '{"kind": 5}', '{"kind": ["kernel"]}', '{"kind": "kernel"}', "\x00\x01",
    '{"kind": "kernel", "node": 3, "input": 0}', '{"kind": "phase"}', '{"kind": "unit", "inputs": 2}', "]" * 50,
    '{"kind": "verdict", "node": 3, "input": 0, "status": "missed_read"}', '{"kind": "kernel", "node": 3, "inp',
    "[" * 100_000, '{"kind": "unit", "inputs": 2, "kernels": 5}', '{"kind": "unit", "inputs": 2, "kernels": [{}]}',
    '{"kind": "unit", "inputs": "2", "kernels": []}', '{"kind": "phase", "input": 0, "node": 3, "phase": 7}',
    '{"kind": "unit", "inputs": 2, "kernels": [{"node": 3}, {"node": 3}]}', '{"kind": "refused", "reason": 7}',
    *(
        json.dumps({"kind": kind, "input": 0, "node": 3, "status": "missed_read", "reason": "", "writes": [],
                    "reads": [], **change})
        for kind in ("kernel", "judged")
        for change in (
            {"node": [3]}, {"node": True}, {"input": -1}, {"input": 1e300}, {"status": "fine"}, {"status": ["ok"]},
            {"reason": None}, {"writes": [7]}, {"writes": [{"bytes": "8"}]}, {"writes": {}}, {"reads": [{"access": 0}]},
            {"reads": [{"access": [], "seen": "observed"}]}, {"seconds": float("nan")}, {"seconds": "1"}, {"note": 5},
            {"outside": 3}, {"wrong": [[0, 4]]}, {"node": 1 << 70},
        )
    ),
]  # fmt: skip


def phase(name: str, node: int = 3, number: int = 0) -> dict[str, Any]:
    return {"kind": "phase", "input": number, "node": node, "phase": name}


def finding(status: str = "ok", node: int = 3, number: int = 0, kind: str = "kernel", **more: Any) -> dict[str, Any]:
    plain = {"reason": "" if status == "ok" else f"why {status}", "writes": [], "reads": []}
    return {"kind": kind, "input": number, "node": node, "status": status, **plain, **more}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    """A journal of these lines; a last line that is text is left without its end."""
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    path.write_text(text.removesuffix("\n") if lines and isinstance(lines[-1], str) else text)
    return path


def reported(tmp_path: Path, *lines: dict[str, Any] | str) -> tuple[bool, list[dict[str, Any]]]:
    out = tmp_path / "u.json"
    good = write_report(tmp_path / "u.parquet", write(tmp_path / "u.journal", *lines), out)
    return good, json.loads(out.read_text())["kernels"]


def explained(tmp_path: Path, *lines: dict[str, Any] | str, grown: bool = True) -> dict[str, Any] | None:
    """The finding that closes the kernel which these lines leave open."""
    journal = write(tmp_path / "u.journal", *lines)
    before = len(list(read_journal(journal)))
    sizes = {} if grown else {journal: journal.stat().st_size}
    closed = run._explain(tmp_path, [tmp_path / "u.parquet"], "the process ended with 4", sizes)
    added = list(read_journal(journal))[before:]
    assert len(added) == closed
    return added[0] if added else None


@pytest.mark.parametrize(
    "name, status",
    [
        ("A", "missed_read"), ("B", "missed_read"), ("narrow", "missed_read"), ("true", "skipped"),
        ("again", "skipped"), ("perturb 2 1", "skipped"), ("advance", "skipped"), ("no such phase", "skipped"),
    ],
)  # fmt: skip
def test_what_a_death_means_depends_on_the_phase(tmp_path: Path, name: str, status: str) -> None:
    closing = explained(tmp_path, UNIT, phase("A", node=4), finding(node=4), phase(name, number=1))
    assert closing is not None
    assert (closing["kind"], closing["input"], closing["node"], closing["status"]) == ("kernel", 1, 3, status)
    assert closing["reason"].startswith("the process ended with 4 ")


@pytest.mark.parametrize("status", ["ok", "missed_write", "skipped"])
def test_what_was_judged_before_a_death_stands(tmp_path: Path, status: str) -> None:
    judged = finding(status, kind="judged", writes=[{"access": 1, "bytes": 9}])
    closing = explained(tmp_path, UNIT, phase("again"), judged, phase("perturb 0 0"))
    assert closing is not None and (closing["status"], closing["writes"]) == (status, judged["writes"])
    assert "other values" in closing["note"]
    # Judged was another kernel: nothing is known about this one.
    closing = explained(tmp_path, UNIT, finding(status, node=4, kind="judged"), phase("perturb 0 0"))
    assert closing is not None and closing["status"] == "skipped" and not closing["writes"]


def test_no_kernel_is_blamed_for_what_happens_outside_it(tmp_path: Path) -> None:
    assert explained(tmp_path) is None
    assert explained(tmp_path, UNIT, phase("A"), finding()) is None
    note = {"kind": "note", "text": "capturing"}
    assert explained(tmp_path, UNIT, phase("A"), note) is None  # another child, which died while it captured
    assert explained(tmp_path, UNIT, phase("A"), UNIT) is None
    assert explained(tmp_path, UNIT, phase("A"), grown=False) is None  # it died before it wrote anything


def test_a_finding_behind_a_line_cut_short_is_read(tmp_path: Path) -> None:
    closing = explained(tmp_path, UNIT, phase("A"), '{"kind": "phase", "inp')
    assert closing is not None and closing["status"] == "missed_read"
    _, found = last_state(tmp_path / "u.journal")
    assert done_of(found) == {(0, 3)}


def test_garbage_lines_change_nothing(tmp_path: Path) -> None:
    good = [finding(node=n, number=i) for n in (3, 4) for i in (0, 1)]
    plain = reported(tmp_path, UNIT, *good)
    mixed: list[dict[str, Any] | str] = []
    for line in [UNIT, *good]:
        mixed += [*GARBAGE, line]
    assert reported(tmp_path, *mixed) == plain == (True, plain[1])
    journal = tmp_path / "u.journal"
    journal.write_bytes(b"\xff\xfe\n" + journal.read_bytes() + b"\n\x80{")
    assert [x["kind"] for x in read_journal(journal)] == ["unit"] + ["kernel"] * 4
    assert explained(tmp_path, UNIT, phase("B"), *GARBAGE) is not None


def test_a_journal_of_garbage_alone_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for lines in (GARBAGE, []):
        assert not write_report(tmp_path / "u.parquet", write(tmp_path / "u.journal", *lines), tmp_path / "u.json")
        assert capsys.readouterr().err.strip().endswith("u.parquet: not reached")
    assert not write_report(tmp_path / "u.parquet", tmp_path / "none.journal", tmp_path / "u.json")
    refused = {"kind": "refused", "reason": "needs\x1b[2J\n9 MiB"}
    assert not write_report(tmp_path / "u.parquet", write(tmp_path / "u.journal", refused), tmp_path / "u.json")
    assert "needs?[2J 9 MiB" in capsys.readouterr().err
    assert not (tmp_path / "u.json").exists()


@pytest.mark.parametrize(
    "one, other, want",
    [
        ("ok", "ok", "ok"), ("ok", "skipped", "skipped"), ("skipped", "missed_write", "missed_write"),
        ("missed_write", "missed_read", "missed_read"), ("ok", "missed_read", "missed_read"),
    ],
)  # fmt: skip
def test_the_worst_input_counts(tmp_path: Path, one: str, other: str, want: str) -> None:
    for first, second in ((one, other), (other, one)):
        lines = [finding(first), finding(second, number=1), *(finding(node=4, number=i) for i in (0, 1))]
        good, kernels = reported(tmp_path, UNIT, *lines)
        assert [k["status"] for k in kernels] == [want, "ok"]
        assert good == (want in ("ok", "skipped"))
        assert kernels[0]["reason"] == ("" if want == "ok" else f"why {want}")


def test_a_read_is_observed_if_any_input_shows_it(tmp_path: Path) -> None:
    def reads(*seen: str) -> list[dict[str, Any]]:
        return [{"access": a, "seen": s, "tries": 1} for a, s in enumerate(seen)]

    lines = [
        finding(reads=reads("observed", "not observed", "not observed")),
        finding(number=1, reads=reads("not observed", "observed", "not observed")),
    ]
    _, kernels = reported(tmp_path, UNIT, *lines)
    assert [r["seen"] for r in kernels[0]["reads"]] == ["observed", "observed", "not observed"]
    assert kernels[1]["status"] == "not reached"


def test_of_two_findings_the_later_counts(tmp_path: Path) -> None:
    lines = [finding(number=i, node=n) for n in (3, 4) for i in (0, 1)]
    good, kernels = reported(tmp_path, UNIT, finding("missed_read"), *lines)
    assert good and kernels[0]["status"] == "ok"


#: A child that notes how it was called, opens a kernel and sleeps or ends, or finds both kernels at once (argv[1]).
CHILD = """
import json, os, sys, time
how, model, out, deadline, blocks, *traces = sys.argv[1:]
with open(os.path.join(out, "calls"), "a") as f:
    f.write(json.dumps([how, model, blocks, traces]) + chr(10))
if how.startswith("exit "):
    os._exit(int(how[5:]))
slow, end = how in ("sleep", "slow"), how.split()[0] in ("end", "report")
unit, found, phase = UNIT
with open(os.path.join(out, model, "u.journal"), "a") as f:
    for x in [unit, phase] if how == "sleep" or end else [unit, *found, phase] if slow else [unit, *found]:
        f.write(json.dumps(x) + chr(10))
if slow:
    time.sleep(600 if how == "sleep" else 3)
if how.startswith("end "):
    os.kill(os.getpid(), int(how[4:]))
if how.startswith("report "):
    os._exit(int(how[7:]))
"""


def watch(tmp_path: Path, how: str, limit_s: float = 100.0) -> tuple[bool, int]:
    """(finished, number of children that were started)."""
    found = [finding(node=n, number=i) for n in (3, 4) for i in (0, 1)]
    script = tmp_path / "child.py"
    script.write_text(CHILD.replace("UNIT", repr((UNIT, found, phase("A"))), 1))
    job = run.Job("m", (tmp_path / "u.parquet",), tmp_path, ("head", "layers.1"), time.monotonic() + limit_s)
    finished = run._watch(job, (sys.executable, str(script), how))
    calls = tmp_path / "calls"
    return finished, len(calls.read_text().splitlines()) if calls.exists() else 0


def test_the_child_is_told_model_blocks_and_traces(tmp_path: Path) -> None:
    assert watch(tmp_path, "find") == (True, 1)
    call = json.loads((tmp_path / "calls").read_text())
    assert call == ["find", "m", "head,layers.1", [str(tmp_path / "u.parquet")]]


def test_no_child_starts_when_time_is_up(tmp_path: Path) -> None:
    assert watch(tmp_path, "find", limit_s=-1.0) == (False, 0)


def test_time_is_up_says_how_to_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert watch(tmp_path, "exit 3") == (False, 1)
    assert "out of time; the same command goes on" in capfd.readouterr().err


def test_a_child_that_dies_early_is_not_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m").mkdir()
    # An earlier call was ended while it ran a kernel: this child never came to it.
    journal = write(tmp_path / "m" / "u.journal", UNIT, phase("A"))
    assert watch(tmp_path, "exit 4") == (False, 1)
    assert "outside any kernel" in capfd.readouterr().err
    assert [x["kind"] for x in read_journal(journal)] == ["unit", "phase"]


def test_a_child_that_ignores_the_deadline_is_ended_and_nothing_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "GRACE_S", 0.5)
    finished, children = watch(tmp_path, "sleep", limit_s=1.5)
    assert not finished and children == 1
    assert [x["kind"] for x in read_journal(tmp_path / "m" / "u.journal")] == ["unit", "phase"]


def test_hangs_do_not_go_on_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HANG_S", 0.3)
    monkeypatch.setattr(run, "RESTARTS", 2)
    assert watch(tmp_path, "sleep") == (False, 2)
    closed = [x for x in read_journal(tmp_path / "m" / "u.journal") if x["kind"] == "kernel"]
    assert [x["status"] for x in closed] == ["missed_read"] * 2
    assert closed[0]["reason"].startswith("hang on poisoned memory")


def test_findings_of_other_blocks_and_inputs(tmp_path: Path) -> None:
    """Going on with other blocks and back again loses nothing. Mutation: findings are cleared at every unit line.

    Mutation: a finding of an input that there is not counts as one: a kernel counts as reached.
    """
    other = {**UNIT, "kernels": [{"node": 9, "accesses": []}]}
    found = [finding(node=n, number=i) for n in (3, 4) for i in (0, 1)]
    journal = write(tmp_path / "u.journal", UNIT, *found, other, finding(node=9))
    assert done_of(last_state(journal)[1]) == {(0, 9)}
    append_line(journal, UNIT)
    assert done_of(last_state(journal)[1]) == {(i, n) for n in (3, 4) for i in (0, 1)}
    good, kernels = reported(tmp_path, UNIT, *found[1:], finding(node=3, number=2))
    assert not good and [k["status"] for k in kernels] == ["not reached", "ok"]


def test_a_line_behind_one_cut_short(tmp_path: Path) -> None:
    """Mutation: the line is appended as it is: both are lost."""
    journal = write(tmp_path / "u.journal", UNIT, '{"kind": "phase", "inp')
    append_line(journal, {"kind": "note"})
    append_line(journal, {"kind": "note"})
    assert [x["kind"] for x in read_journal(journal)] == ["unit", "note", "note"]
    assert journal.read_bytes().count(b"\n") == 4
    append_line(tmp_path / "new.journal", {"kind": "note"})
    assert (tmp_path / "new.journal").read_text() == '{"kind": "note"}\n'


def test_what_lies_in_place_of_a_journal(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InputError, match="not a journal"):
            list(read_journal(place))


def test_a_report_that_cannot_be_written_leaves_the_others(tmp_path: Path) -> None:
    """Mutation: the first error ends the writing."""
    for name in "abc":
        write(tmp_path / f"{name}.journal", UNIT, *(finding(node=n, number=i) for n in (3, 4) for i in (0, 1)))
    (tmp_path / "a.json").mkdir()
    problems: list[str] = []
    assert run._write_reports(tmp_path, [Path(f"{name}.parquet") for name in "abc"], problems)
    assert problems == [f"{tmp_path / 'a.json'}: is a directory; name a file to write"]
    assert (tmp_path / "b.json").is_file() and (tmp_path / "c.json").is_file()


@pytest.mark.parametrize("how", ["end 9", "end 15", "end 2", "report 1", "report 2", "report 130"])
def test_an_end_from_outside_blames_no_kernel(tmp_path: Path, how: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Mutation: only code 1 is told apart: a worker ended for its memory is a missed read."""
    assert watch(tmp_path, how) == (False, 1)
    err = capfd.readouterr().err
    assert ("the same command goes on" if how.startswith("end") else "outside any kernel") in err
    assert [x["kind"] for x in read_journal(tmp_path / "m" / "u.journal")] == ["unit", "phase"]
    assert watch(tmp_path, "find")[0]


def test_a_clock_that_jumps_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: silence is measured from the last sign to now: a good kernel is ended and blamed."""

    class Jumping:
        """An hour passes at every tenth look."""

        looks = 0
        sleep = staticmethod(time.sleep)

        def monotonic(self) -> float:
            self.looks += 1
            return time.monotonic() + self.looks // 10 * 3600

        time = monotonic

    monkeypatch.setattr(run, "time", Jumping())
    assert watch(tmp_path, "slow", limit_s=1e9) == (True, 1)


def test_a_folder_is_one_oracles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while only a child of a killed parent is left. Mutation: the lock is not handed to the child."""
    (tmp_path / "m").mkdir()
    with run._locked(tmp_path / "m"), pytest.raises(HardwareError, match="another oracle runs here"):
        watch(tmp_path, "find")
    held = tmp_path / "held"

    def end(child: Any, job: Any) -> str:
        """The parent dies: its descriptor is closed, the child lives."""
        while not (tmp_path / "m" / "u.journal").exists():
            time.sleep(0.02)
        held.write_text(str(child.pid))
        child.returncode = 3
        return ""

    monkeypatch.setattr(run, "_wait", end)
    watch(tmp_path, "sleep")
    try:
        with pytest.raises(HardwareError, match="another oracle"):
            watch(tmp_path, "find")
    finally:
        os.kill(int(held.read_text()), signal.SIGKILL)
        os.waitpid(int(held.read_text()), 0)


TRACES = Path(__file__).resolve().parents[1] / "traces" / "llama-3-8b"


def test_traces_that_would_share_a_report(tmp_path: Path) -> None:
    """Mutation: traces are told apart by their paths alone: one report, written twice."""
    paths = [tmp_path / part / "llama-3-8b" / "u.parquet" for part in "ab"]
    for path in paths:
        path.parent.mkdir(parents=True)
        shutil.copy(min(TRACES.glob("decode*.parquet")), path)
    assert run._by_model([paths[0], paths[0], tmp_path / "b/../a/llama-3-8b/u.parquet"], tmp_path) == {
        "llama-3-8b": [paths[0]]
    }
    with pytest.raises(HardwareError, match="would share the report"):
        run._by_model(paths, tmp_path / "out")
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    with pytest.raises(InputError, match="is not a directory"):
        run._by_model(paths[:1], blocked)
    (tmp_path / "out" / "llama-3-8b" / "u.json").mkdir(parents=True)
    with pytest.raises(InputError, match="is a directory"):
        run._by_model(paths[:1], tmp_path / "out")


def test_a_journal_of_another_trace_or_other_blocks_is_not_complete(tmp_path: Path) -> None:
    """Mutation: a complete journal is complete for whatever is asked: the new trace is never looked at."""
    worker = pytest.importorskip("hw.oracle.worker")
    about = {"asked": ["head"], "trace_sha256": "one"}
    found = [finding(node=n, number=i) for n in (3, 4) for i in (0, 1)]
    journal = write(tmp_path / "u.journal", {**UNIT, **about}, *found)
    assert worker._is_done(journal, about)
    assert not worker._is_done(journal, {**about, "trace_sha256": "two"})
    assert not worker._is_done(journal, {**about, "asked": []})
    assert not worker._is_done(write(journal, UNIT, *found), about)
    assert not worker._is_done(write(journal, {**UNIT, **about}, *found[1:]), about)


def test_what_a_worker_ends_with(capsys: pytest.CaptureFixture[str]) -> None:
    """A driver call that fails may be the kernel's doing, as an error of the device is; a full disk is not.

    Mutation: DriverError is told as any HardwareError: a kernel that makes its launch fail is never closed.
    """
    worker = pytest.importorskip("hw.oracle.worker")

    def raising(error: BaseException) -> Any:
        def run() -> int:
            raise error

        return run

    for error, code in (
        (DriverError("cuGraphLaunch failed: CUDA_ERROR_ILLEGAL_ADDRESS"), 4), (HardwareError("no module 'x'"), 2),
        (InputError("x.parquet: damaged"), 2), (OSError(28, "No space left on device"), 2), (KeyError("bug"), 1),
        (KeyboardInterrupt(), 130), (worker.torch.AcceleratorError("CUDA error\nmore"), 4),
    ):  # fmt: skip
        assert worker.code_of(raising(error)) == code
        err = capsys.readouterr().err
        assert "Traceback" not in err and err.count("\n") == (code != 130)
    assert worker.code_of(lambda: 3) == 3
    assert 4 not in run._REPORTED
