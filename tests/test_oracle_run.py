"""The oracle's parent: what the end of a child means, going on behind it, and the report. No GPU is needed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from hw.oracle import run
from hw.oracle.report import fragile_kernels, read_journal, write_report

#: A child that plays the part of the worker: kernels 0..3 of one input; what kernel 2 does on its first try is argv[1].
CHILD = """
import json, os, sys, time
how, model, out, deadline, blocks, trace = sys.argv[1:]
journal = os.path.join(out, model, os.path.splitext(os.path.basename(trace))[0] + ".journal")
lines = [json.loads(x) for x in open(journal)] if os.path.exists(journal) else []
done = {x["node"] for x in lines if x["kind"] == "kernel"}
f = open(journal, "a")
def line(**x):
    f.write(json.dumps(x) + chr(10))
    f.flush()
line(kind="unit", model="m", inputs=1, kernels=[{"node": n, "accesses": []} for n in range(4)])
for n in range(4):
    if n in done:
        continue
    at = {"input": 0, "node": n}
    for phase in ("A", "B", "true", "again"):
        line(kind="phase", phase=phase, **at)
        if n == 2 and how == f"fault in {phase}":
            os._exit(4)
        if n == 2 and how == f"hang in {phase}":
            time.sleep(600)
        if n == 2 and how == "bug":
            raise KeyError("bug")
    found = {"status": "ok", "reason": "", "writes": [{"access": 0, "bytes": 8}], "reads": []}
    line(kind="judged", **at, **found)
    line(kind="phase", phase="perturb 0 0", **at)
    if n == 2 and how == "fault in perturb":
        os._exit(4)
    if n == 2 and how == "late":
        sys.exit(3)
    line(kind="kernel", **at, **found)
"""


def watch(tmp_path: Path, how: str, limit_s: float = 100.0) -> tuple[bool, dict[str, Any]]:
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    job = run.Job("m", (tmp_path / "unit.parquet",), tmp_path, (), time.monotonic() + limit_s)
    finished = run._watch(job, (sys.executable, str(child), how))
    report = tmp_path / "unit.json"
    good = write_report(tmp_path / "unit.parquet", tmp_path / "m" / "unit.journal", report)
    return finished and good, json.loads(report.read_text())


def statuses(report: dict[str, Any]) -> list[str]:
    return [k["status"] for k in report["kernels"]]


def test_all_well(tmp_path: Path) -> None:
    good, report = watch(tmp_path, "well")
    assert good and statuses(report) == ["ok"] * 4


@pytest.mark.parametrize(
    "how, status, words",
    [
        ("fault in A", "missed_read", "the process ended with 4 on poisoned memory"),
        ("fault in B", "missed_read", "pattern B"),
        ("fault in true", "skipped", "true state"),
        ("fault in perturb", "ok", ""),
    ],
)
def test_the_child_dies_and_another_goes_on(tmp_path: Path, how: str, status: str, words: str) -> None:
    good, report = watch(tmp_path, how)
    assert statuses(report) == ["ok", "ok", status, "ok"]
    assert words in report["kernels"][2]["reason"]
    assert good == (status != "missed_read")


def test_a_hang_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HANG_S", 1.5)
    good, report = watch(tmp_path, "hang in A")
    assert not good and statuses(report) == ["ok", "ok", "missed_read", "ok"]
    assert report["kernels"][2]["reason"].startswith("hang on poisoned memory")


def test_an_error_of_the_check_blames_no_kernel(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good, report = watch(tmp_path, "bug")
    assert not good and statuses(report) == ["ok", "ok", "not reached", "not reached"]
    assert "outside any kernel" in capfd.readouterr().err


def test_out_of_time_goes_on_with_the_same_command(tmp_path: Path) -> None:
    good, report = watch(tmp_path, "late")
    assert not good and statuses(report) == ["ok", "ok", "not reached", "not reached"]
    good, report = watch(tmp_path, "well")
    assert good and statuses(report) == ["ok"] * 4


def test_a_line_cut_short_is_none(tmp_path: Path) -> None:
    journal = tmp_path / "x.journal"
    journal.write_text('{"kind": "note"}\n{"kind": "ker')
    assert [x["kind"] for x in read_journal(journal)] == ["note"]


def test_inputs_are_merged_worst_first(tmp_path: Path) -> None:
    def line(**content: Any) -> str:
        return json.dumps(content) + "\n"

    seen = [{"access": 0, "seen": "observed", "tries": 1}], [{"access": 0, "seen": "not observed", "tries": 3}]
    unit = line(kind="unit", model="m", inputs=2, kernels=[{"node": 5, "accesses": []}])
    first = line(kind="kernel", input=0, node=5, status="ok", reason="", writes=[{"bytes": 4}], reads=seen[0])
    wrong = [{"buffer": "y", "offset": 2, "nbytes": 2}]
    second = line(
        kind="kernel", input=1, node=5, status="missed_read", reason="why", writes=[{"bytes": 6}], reads=seen[1],
        wrong=wrong, outside=[],
    )  # fmt: skip
    journal, out = tmp_path / "u.journal", tmp_path / "u.json"
    journal.write_text(unit + first)
    assert not write_report(tmp_path / "u", journal, out)
    assert json.loads(out.read_text())["kernels"][0]["status"] == "not reached"
    journal.write_text(unit + first + second)
    assert not write_report(tmp_path / "u", journal, out)
    kernel = json.loads(out.read_text())["kernels"][0]
    assert (kernel["status"], kernel["reason"], kernel["wrong"]) == ("missed_read", "why", wrong)
    assert kernel["writes"] == [{"bytes": 6}] and kernel["reads"][0]["seen"] == "observed"


def test_findings_about_other_sets_do_not_count(tmp_path: Path) -> None:
    journal = tmp_path / "u.journal"
    unit = {"kind": "unit", "model": "m", "inputs": 1, "kernels": [{"node": 5, "accesses": []}]}
    found = {"kind": "kernel", "input": 0, "node": 5, "status": "missed_read", "reason": "", "writes": [], "reads": []}
    changed = {**unit, "kernels": [{"node": 5, "accesses": [{"buffer": 1}]}]}
    for lines, status in (
        ([unit, found, unit], "missed_read"),
        ([unit, found, changed], "not reached"),
        ([unit, found, changed, {**found, "status": "ok"}], "ok"),
    ):
        journal.write_text("".join(json.dumps(x) + "\n" for x in lines))
        assert write_report(tmp_path / "u", journal, tmp_path / "u.json") == (status == "ok")
        assert json.loads((tmp_path / "u.json").read_text())["kernels"][0]["status"] == status


def test_a_kernel_that_died_on_other_values_is_fragile_in_all_units_of_its_model(tmp_path: Path) -> None:
    """Its name, from any journal of the folder. Mutation tried: every finding counts, with or without a note."""
    finding = {"kind": "kernel", "input": 0, "status": "ok", "reason": "", "writes": [], "reads": []}
    kernels = [{"node": 3, "name": "gather"}, {"node": 4, "name": "add"}]
    lines = [
        {"kind": "unit", "inputs": 1, "kernels": kernels}, finding | {"node": 3, "note": "the process ended with -6"},
        finding | {"node": 4}, finding | {"node": 9, "note": "of no kernel that was announced"},
    ]  # fmt: skip
    (tmp_path / "decode.journal").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (tmp_path / "prefill.journal").write_text("")
    assert fragile_kernels(tmp_path) == {"gather"}
