"""Profiles of several steps: what counts as an iteration, and importing one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from kineto_cases import SHARED, call, document, event, kernel, needs_shared, write
from nsys_cases import KERNEL, PROCESS, export, nvtx
from nsys_cases import call as nsys_call
from nsys_cases import kernel as nsys_kernel

from tesserasim.cli import main
from tesserasim.trace.importer import import_profile
from tesserasim.trace.inspect import inspect_file
from tesserasim.trace.parquet import read_trace

pytestmark = pytest.mark.quick
SCHEMA = json.loads((Path(__file__).parents[1] / "tesserasim" / "schemas" / "import.json").read_text())


def note(name: str, start: float, duration: float, cat: str = "user_annotation") -> dict[str, Any]:
    return event(cat, name, start, duration, pid=4242)


def found(tmp_path: Path, events: list[Any]) -> dict[str, Any] | None:
    extra = import_profile(write(tmp_path / "p.json", document(events))).meta.extra
    return extra.get("iterations")


def steps(count: int, late: float = 0) -> list[Any]:
    """`count` profiler steps of three kernels each, launched inside the step and run `late` µs later."""
    events = []
    for i in range(count):
        events.append(note(f"ProfilerStep#{i + 3}", 100 * i, 99))
        for j, name in enumerate(("embed", f"gemm{i}", "head")):
            events.append(call("cudaLaunchKernel", 100 * i + 10 * j, 10 * i + j + 1))
            events.append(kernel(name, 100 * i + 10 * j + late, 5, correlation=10 * i + j + 1))
    return events


def test_rows_belong_to_the_step_that_launched_them(tmp_path: Path) -> None:
    """The GPU lags most of a step behind.

    Mutation tried: `_assign` asks for the row's own start instead of the launch's → rows move to the next step, fails.
    """
    got = found(tmp_path, [kernel("before", -500, 5), *steps(3, late=85)])
    assert got is not None
    assert got["names"] == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]
    assert got["runs"] == [[-1, 1], [0, 3], [1, 3], [2, 3]]


def test_rows_without_a_launch_go_by_the_gpu_annotation(tmp_path: Path) -> None:
    events = [e for e in steps(2) if e["cat"] != "cuda_runtime"]
    twins = [note(f"ProfilerStep#{i + 3}", 100 * i, 99, "gpu_user_annotation") for i in range(2)]
    alone = [e for e in events if e["cat"] == "kernel"] + twins
    for chosen in (events + twins, alone):
        got = found(tmp_path, chosen)
        assert got is not None and got["runs"] == [[0, 3], [1, 3]]


def test_outermost_family_of_annotations(tmp_path: Path) -> None:
    """Steps hold layers hold kernels: the steps are meant.

    Mutation tried: the family with the most ranges is taken first → layers, fails.
    """
    events: list[Any] = []
    for i in range(2):
        events.append(note(f"decode step {i}", 100 * i, 90))
        for j in range(4):
            at, correlation = 100 * i + 20 * j, 10 * i + j + 1
            events += [note(f"layer {j}", at, 15), call("cudaLaunchKernel", at + 5, correlation)]
            events.append(kernel(f"k{i}{j}", at + 6, 5, correlation=correlation))
    got = found(tmp_path, events)
    assert got is not None and got["names"] == ["decode step 0", "decode step 1"]


def test_repeated_names_where_nothing_is_annotated(tmp_path: Path) -> None:
    """Layers inside of steps: the period that covers most.

    Mutation tried: the shortest period is taken → 2 kernels, fails.
    """
    names = ["warmup", *(["embed", *["gemm", "norm"] * 6, "head"] * 3), "tail"]
    got = found(tmp_path, [kernel(name, 10 * i, 5) for i, name in enumerate(names)])
    assert got is not None
    assert got["runs"] == [[-1, 1], [0, 14], [1, 14], [2, 14], [-1, 1]]
    assert "the same 14 kernel names 3 times over" in got["found_by"]
    assert found(tmp_path, [kernel(f"k{i}", 10 * i, 5) for i in range(20)]) is None


def test_nvtx_ranges_of_two_processes(tmp_path: Path) -> None:
    """Step 1 of one rank and step 1 of the other are the same iteration."""
    other = PROCESS + (1 << 24)
    rows, calls, notes = [], [], []
    for process in (PROCESS, other):
        for i in range(2):
            notes.append(nvtx(100 * i, 100 * i + 90, f"iteration {i}", process))
            calls.append(nsys_call(100 * i + 5, i + 1, 3, process))
            rows.append(nsys_kernel(500 + 100 * i, 560 + 100 * i, i + 1, globalPid=process))
    tables = {KERNEL: rows, "CUPTI_ACTIVITY_KIND_RUNTIME": calls, "NVTX_EVENTS": notes}
    got = import_profile(export(tmp_path / "e.sqlite", tables)).meta.extra["iterations"]
    assert (got["names"], got["runs"]) == (["iteration 0", "iteration 1"], [[0, 2], [1, 2]])


def imported(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    code = main(["import", *(str(word) for word in words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_import_of_one_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation tried: `_part` keeps the gaps of the whole profile → the first gap is to the step before, fails."""
    path, out = write(tmp_path / "p.json", document(steps(3))), tmp_path / "t.parquet"
    code, printed, _ = imported(capsys, path, "--out", out, "--iteration", 1, "--json")
    facts = json.loads(printed)
    jsonschema.validate(facts, SCHEMA)
    assert (code, facts["kernels"], facts["iterations"]["chosen"]) == (0, 3, 1)
    trace = read_trace(out)
    assert [k.name for k in trace] == ["embed", "gemm1", "head"]
    assert [k.gap_ns for k in trace] == [0, 5000, 5000]
    _, printed, _ = imported(capsys, path, "--out", out, "--iteration", 1)
    assert "iterations: 3, ProfilerStep#3 to ProfilerStep#5, found by annotations" in printed
    assert "imported: only ProfilerStep#4" in printed


def test_a_part_counts_its_own_graph_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy, three kernels of a graph, one that is launched alone. Mutation: a part of both has none from graphs."""
    calls = [call("cudaGraphLaunch", 5, 5), call("cudaLaunchKernel", 6, 6)]
    rows = [event("gpu_memcpy", "Memcpy HtoD", 10, 5, device=0, stream=7)]
    rows += [kernel(name, 20 + 10 * i, 5, correlation=5) for i, name in enumerate("abc")]
    path, out = write(tmp_path / "p.json", document([*calls, *rows, kernel("d", 60, 5, correlation=6)])), tmp_path / "t"
    for stretch, kernels, graph in (("0:5", 4, 3), ("0:2", 1, 1), ("2:5", 3, 2), ("3:5", 2, 1), ("4:5", 1, 0)):
        code, printed, _ = imported(capsys, path, "--out", out, "--range", stretch, "--json")
        facts = json.loads(printed)
        assert (code, facts["kernels"], facts["graph_kernels"]) == (0, kernels, graph)
        assert inspect_file(out)["graph_kernels"] == graph
    code, _, said = imported(capsys, path, "--out", out, "--range", "0:6")
    assert (code, said) == (2, f"tesserasim: {path}: --range ends at 6, the profile has 5 kernels, copies and sets\n")


@pytest.mark.parametrize(("said", "warned"), [("NVIDIA L40S", True), ("a prototype", True), ("", False), (None, False),
                                              ("NVIDIA H100 80GB HBM3", False)])  # fmt: skip
def test_a_gpu_that_the_profile_contradicts_is_said(
    said: str | None, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutation: `--gpu` replaces what the profile says without a word."""
    devices = [] if said is None else [{"id": 0, "name": said}]
    path = write(tmp_path / "p.json", document([kernel("k", 1, 1)], deviceProperties=devices))
    code, printed, _ = imported(capsys, path, "--out", tmp_path / "t", "--gpu", "h100 sxm", "--json")
    facts = json.loads(printed)
    assert (code, facts["gpu"]) == (0, "H100-SXM")
    assert any(f"ran on {said}; it is taken as one of H100-SXM" in w for w in facts["warnings"]) is warned
    assert any("taken as" in w for w in facts["warnings"]) is warned


@pytest.mark.parametrize(
    ("device", "words"), [(0, "kernels of 2 streams: "), (1, "kernels of 2 streams of 2 devices: ")]
)
def test_kernels_side_by_side_are_said_with_the_time_that_a_simulation_makes_of_them(
    device: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0-10 and 40-50 us on one stream, 5-45 us on another: 90 us in a row. Mutation: nothing is said."""
    rows = [kernel("a", 0, 10), kernel("b", 5, 40, stream=8, device=device), kernel("c", 40, 10)]
    path, out = write(tmp_path / "p.json", document(rows)), tmp_path / "t.parquet"
    code, printed, _ = imported(capsys, path, "--out", out, "--gpu", "H100-SXM", "--json")
    (said,) = (w for w in json.loads(printed)["warnings"] if "one after another" in w)
    assert code == 0 and said.startswith(words) and said.endswith("in 0.090 ms, where the profile took 0.050 ms")
    mix = tmp_path / "m.toml"
    assert main(["mix", "new", str(out), "--out", str(mix)]) == 0
    case = ["--mix", str(mix), "--cluster", "H100-SXM", "--policy", "single", "--batch", "1", "--depth", "1", "--json"]
    capsys.readouterr()
    assert main(["simulate", *case]) == 0
    assert json.loads(capsys.readouterr().out)["latency_ms"]["mean"] == pytest.approx(0.090, rel=1e-3)
    code, printed, _ = imported(capsys, path, "--out", out, "--range", "0:1", "--json")
    assert not any("one after another" in w for w in json.loads(printed)["warnings"])


@pytest.mark.parametrize(("devices", "words"), [([], "names no GPU; import --gpu NAME"), ([{"id": 0}], "names no GPU"),
                         ([{"id": 0, "name": "a prototype"}], "unknown GPU 'a prototype'")])  # fmt: skip
def test_a_mix_of_an_unknown_gpu_says_how_to_name_it(
    devices: list[Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutation: `unknown GPU '': the catalogue has` and all of the catalogue."""
    out = tmp_path / "t.parquet"
    path = write(tmp_path / "p.json", document([kernel("k", 1, 1)], deviceProperties=devices))
    assert imported(capsys, path, "--out", out)[0] == 0
    assert main(["mix", "new", str(out), "--out", str(tmp_path / "m.toml")]) == 0
    capsys.readouterr()
    assert main(["simulate", "--mix", str(tmp_path / "m.toml"), "--cluster", "H100-SXM", "--policy", "single"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_errors_say_which_iterations_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write(tmp_path / "p.json", document(steps(3))), tmp_path / "t.parquet"
    code, _, said = imported(capsys, path, "--out", out, "--iteration", 3)
    assert code == 2 and "no iteration 3; the profile has 3, numbered from 0: ProfilerStep#3 to" in said
    alone = write(tmp_path / "one.json", document([kernel("k", 1, 1)]))
    code, _, said = imported(capsys, alone, "--out", out, "--iteration", 0)
    assert code == 2 and "no iterations found" in said and "--range" in said
    for words in (("--iteration", "-1"), ("--iteration", "x"), ("--iteration", "1", "--range", "0:1")):
        with pytest.raises(SystemExit):
            main(["import", str(path), "--out", str(out), *words])
    assert not out.exists()


@needs_shared
@pytest.mark.parametrize(
    ("name", "count", "first"),
    [("hta-ns-resolution", 5, "ProfilerStep#101"), ("hta-nccl-parser", 3, "ProfilerStep#4"),
     ("kineto-resnet50-nw0-1", 6, "ProfilerStep#5")],
)  # fmt: skip
def test_real_profiles(name: str, count: int, first: str) -> None:
    got = import_profile(SHARED / "data" / "traces" / f"{name}.json.gz").meta.extra["iterations"]
    assert (len(got["names"]), got["names"][0]) == (count, first)
