"""`python -m hw calibrate` without a GPU: the list of shapes, the journal, the table, and what is refused.

What touches the GPU is put in its place by `Tools`: times come from a formula, and the clock goes on as it is told.
"""

from __future__ import annotations

import csv
import errno
import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from hw.__main__ import main  # noqa: E402
from hw.calibrate import run, shapes  # noqa: E402
from hw.calibrate.cases import Case, NotHere  # noqa: E402
from hw.calibrate.run import Job, Tools, calibrate  # noqa: E402
from hw.calibrate.shapes import Shape  # noqa: E402
from hw.calibrate.timing import Measured, Timing, cold_turns, launches  # noqa: E402
from hw.errors import HardwareError  # noqa: E402
from tesserasim.errors import InputError  # noqa: E402

MACHINE = {
    "device": "NVIDIA H200", "gpus": 1, "torch": "2.11.0+cu130", "sms": 132, "l2_bytes": 50 << 20, "max_sm_mhz": 1980,
    "memory_bytes": 141 << 30, "capability": "9.0", "driver": "580.1", "date": "2026-01-01T00:00:00+00:00",
}  # fmt: skip


class Bench:
    """A GPU of the tests: a shape takes 1 us and what its work takes at 1 TFLOP/s; each takes `seconds` to measure."""

    def __init__(self, seconds: float = 0.0, fail: Callable[[Shape], Exception | None] = lambda s: None) -> None:
        self.now, self.seconds, self.fail = 0.0, seconds, fail
        self.seen: list[Shape] = []

    def build(self, shape: Shape) -> Case:
        error = self.fail(shape)
        if error:
            raise error
        self.seen.append(shape)
        cold = shape.kind in ("gemm", "attention_decode", "moe")
        return Case("a test", lambda: None, lambda x: shape.work, 1, cold, 1, 1, 1)

    def measure(self, case: Case) -> Measured:
        self.now += self.seconds
        us = 1.0 + float(case.launch(None)) / 1e6  # type: ignore[arg-type]
        cold = Timing(2 * us, 1.9 * us, 2.2 * us, 5) if case.cold else None
        return Measured(Timing(us, 0.9 * us, 1.1 * us, 1), cold, ("kernel", "kernel", "reduce"))

    def tools(self, **other: Any) -> Tools:
        machine = {**MACHINE, **other}
        return Tools(lambda: machine, self.build, self.measure, lambda s: None, list, lambda: True, lambda: self.now)


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_the_list_is_the_same_whenever_it_is_made() -> None:
    one, two = shapes.shapes(), shapes.shapes()
    assert [s.key for s in one] == [s.key for s in two]
    assert 280 <= len(one) <= 340 and len({s.key for s in one}) == len(one)
    assert {s.kind for s in one} == set(shapes.KINDS)
    assert [s.key for s in shapes.shapes(["moe"])] == [s.key for s in one if s.kind == "moe"]


@pytest.mark.parametrize("n", [20, 40, 80, 160])
def test_any_beginning_is_spread_over_kinds_and_sizes(n: int) -> None:
    """Mutation: shapes in order of their work (a run cut short has no large ones)."""
    every, first = shapes.shapes(), shapes.shapes()[:n]
    share = Counter(s.kind for s in every)
    for kind, count in Counter(s.kind for s in first).items():
        assert abs(count - n * share[kind] / len(every)) <= 2.0
        all_work = np.log([s.work for s in every if s.kind == kind])
        work = np.log([s.work for s in first if s.kind == kind])
        if count >= 4:
            reach = np.quantile(all_work, 0.8) - np.quantile(all_work, 0.2)
            assert work.max() - work.min() > 0.7 * reach
            assert abs(np.median(work) - np.median(all_work)) < 0.5 * reach


def test_gemm_widths_and_rows_span_their_ranges() -> None:
    gemms = [s for s in shapes.shapes() if s.kind == "gemm" and s.dtype == "bfloat16"]
    assert {(s.sizes["n"], s.sizes["k"]) for s in gemms} == set(shapes.WEIGHTS)
    rows = Counter(s.sizes["m"] for s in gemms)
    assert set(rows) == set(shapes.ROWS) and max(rows.values()) <= 2 * min(rows.values())
    for n, k in shapes.WEIGHTS:  # each pair has few and many rows
        m = [s.sizes["m"] for s in gemms if (s.sizes["n"], s.sizes["k"]) == (n, k)]
        assert len(m) == 3 and max(m) >= 16 * min(m)


def test_a_whole_run_writes_the_table_and_its_sidecar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench()
    assert calibrate(Job(tmp_path), bench.tools()) == 0
    assert capsys.readouterr().out == f"{tmp_path}/H200-SXM.csv: {len(shapes.shapes())} rows\n"
    rows, about = table(tmp_path / "H200-SXM.csv"), json.loads((tmp_path / "H200-SXM.json").read_text())
    assert len(rows) == about["rows"] == len(bench.seen)
    assert {"gpu": "H200-SXM", **MACHINE}.items() <= about.items() and about["skipped"] == {}
    for shape, row in zip(bench.seen, rows, strict=True):
        assert float(row["time_us"]) == pytest.approx(1 + shape.work / 1e6, abs=1e-3)
        assert {k: str(v) for k, v in shape.sizes.items()}.items() <= row.items()
        assert (row["gpu"], row["framework"], row["version"]) == ("H200-SXM", "torch", "2.11.0+cu130")
        assert float(row["p10_us"]) <= float(row["time_us"]) <= float(row["p90_us"])
        assert bool(row["cold_us"]) == (shape.kind in ("gemm", "attention_decode", "moe"))
        assert row["kernels"] == "kernel + reduce"
    kinds = Counter(r["kernel_kind"] for r in rows)
    assert set(kinds) == {*shapes.KINDS, "rmsnorm", "silu_mul", "add", "rope"}
    assert {r["op"] for r in rows if r["kernel_kind"] == "elementwise"} == {"scale_matrix"}


def test_the_model_reads_the_table_as_it_reads_the_shipped_ones(tmp_path: Path) -> None:
    """Its shape columns are those that the fit asks for, kind by kind, and none of them is empty."""
    from tesserasim.costs.tables import DTYPES, SHAPES

    calibrate(Job(tmp_path), Bench().tools())
    for row in table(tmp_path / "H200-SXM.csv"):
        if row["kernel_kind"] in SHAPES:
            assert all(row[c].isdecimal() for c in SHAPES[row["kernel_kind"]])
            assert row["dtype"] in DTYPES
        assert (row["kv_cache_dtype"] == "bfloat16") == row["kernel_kind"].startswith("attention")
        assert (row["distribution"] == "balanced") == (row["kernel_kind"] == "moe")


def test_a_run_cut_short_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Mutations: the journal is not read; the limit is looked at only once."""
    first = Bench(seconds=1.0)
    assert calibrate(Job(tmp_path, limit_s=59.5), first.tools()) == 1
    assert len(first.seen) == 60 == len(table(tmp_path / "H200-SXM.csv"))
    second = Bench()
    assert calibrate(Job(tmp_path), second.tools()) == 0
    assert [*first.seen, *second.seen] == shapes.shapes()
    assert len(table(tmp_path / "H200-SXM.csv")) == len(shapes.shapes())
    third = Bench()
    assert calibrate(Job(tmp_path), third.tools()) == 0 and not third.seen


def test_half_a_line_of_a_killed_run_is_cut_off(tmp_path: Path) -> None:
    calibrate(Job(tmp_path, limit_s=9.5), Bench(seconds=1.0).tools())
    journal = tmp_path / "H200-SXM.jsonl"
    whole = journal.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    journal.write_bytes(whole[: last + 40])
    bench = Bench()
    assert calibrate(Job(tmp_path), bench.tools()) == 0
    assert bench.seen == shapes.shapes()[9:]
    assert all(isinstance(json.loads(line), dict) for line in journal.read_text().splitlines())


def test_every_line_is_on_disk_before_the_next_shape(tmp_path: Path) -> None:
    lines: list[int] = []
    bench = Bench()
    measure = bench.measure

    def watch(case: Case) -> Measured:
        lines.append((tmp_path / "H200-SXM.jsonl").read_text().count("\n"))
        return measure(case)

    calibrate(Job(tmp_path, ("moe",)), replace(bench.tools(), measure=watch))
    assert lines == list(range(1, len(bench.seen) + 1))


@pytest.mark.parametrize("key,other", [("device", "NVIDIA H200"), ("torch", "2.12.0+cu130")])
def test_a_journal_of_another_gpu_or_torch_is_refused(tmp_path: Path, key: str, other: str) -> None:
    here = {"device": "NVIDIA L40S"}
    calibrate(Job(tmp_path, ("moe",)), Bench().tools(**here))
    (tmp_path / "H200-SXM.jsonl").write_bytes((tmp_path / "L40S.jsonl").read_bytes())
    before = (tmp_path / "H200-SXM.jsonl").read_bytes(), (tmp_path / "L40S.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"measured with (gpu 'L40S'|torch '2.11.0.cu130'), here it is .*--out"):
        calibrate(Job(tmp_path, ("moe",)), Bench().tools(**{**here, key: other}))
    assert before == ((tmp_path / "H200-SXM.jsonl").read_bytes(), (tmp_path / "L40S.jsonl").read_bytes())


@pytest.mark.parametrize(
    "content",
    [
        '{"kind": "session", "model": "llama"}\n', "hello\n", '[1]\n{"kind": "session"}\n', '"x"\n',
        '{"kind": "session", "calibration": true, "gpu": "H200-SXM", "torch": "2.11.0+cu130"}\n{"kind": "shape", '
        '"plan": "x", "time_us": -1, "p10_us": 1, "p90_us": 1}\n{}\n',
    ],
)  # fmt: skip
def test_what_is_no_journal_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "H200-SXM.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=r"H200-SXM.jsonl: (not a|line \d+ is no line of a) calibration's journal"):
        calibrate(Job(tmp_path), Bench().tools())
    assert path.read_text() == content


def test_shapes_that_do_not_fit_or_do_not_exist_are_skipped_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(shape: Shape) -> Exception | None:
        if shape.kind == "moe":
            return torch.OutOfMemoryError("tried to allocate 3 GiB")
        return NotHere("no FP8 tensor cores") if shape.kind == "gemm" and shape.dtype == "fp8" else None

    bench = Bench(fail=fail)
    assert calibrate(Job(tmp_path), bench.tools()) == 0
    err = capsys.readouterr().err
    skipped = json.loads((tmp_path / "H200-SXM.json").read_text())["skipped"]
    lost = [s for s in shapes.shapes() if fail(s)]
    assert set(skipped) == {s.key for s in lost}
    moe = sum(s.kind == "moe" for s in lost)
    assert f"skipped {moe} shapes: out of memory" in err
    assert f"skipped {len(lost) - moe} shapes: no FP8 tensor cores" in err
    again = Bench()
    calibrate(Job(tmp_path), again.tools())  # there may be more room now
    assert again.seen == lost


def test_a_gpu_that_failed_ends_the_run_and_keeps_what_is_there(tmp_path: Path) -> None:
    def fail(shape: Shape) -> Exception | None:
        return torch.AcceleratorError("an illegal memory access was encountered") if shape.kind == "moe" else None

    bench = Bench(fail=fail)
    with pytest.raises(HardwareError, match=r"the GPU failed at moe .*illegal memory access.*saved"):
        calibrate(Job(tmp_path), replace(bench.tools(), alive=lambda: False))
    assert len(table(tmp_path / "H200-SXM.csv")) == len(bench.seen) > 0
    assert calibrate(Job(tmp_path), bench.tools()) == 0  # alive: only those shapes are left out


def test_nothing_measured_is_an_error(tmp_path: Path) -> None:
    bench = Bench(fail=lambda s: torch.OutOfMemoryError("none"))
    with pytest.raises(HardwareError, match="nothing could be measured"):
        calibrate(Job(tmp_path), bench.tools())
    assert not (tmp_path / "H200-SXM.csv").exists()


def test_a_gpu_that_the_catalogue_does_not_know_is_measured_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(Job(tmp_path, ("moe",)), Bench().tools(device="Frobnicator 9 / x")) == 0
    assert "Frobnicator 9 / x is not in the catalogue" in capsys.readouterr().err
    assert {r["gpu"] for r in table(tmp_path / "Frobnicator-9-x.csv")} == {"Frobnicator 9 / x"}


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, row: Any) -> None:
        raise InputError("x.jsonl: cannot be written (No space left on device)")

    monkeypatch.setattr(run.Journal, "add", full)
    with pytest.raises(InputError, match="No space left"):
        calibrate(Job(tmp_path), Bench().tools())


def test_a_full_disk_is_seen_by_the_journal_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def full(self: Path, mode: str = "r", **options: Any) -> Any:
        if mode == "a":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(self, mode, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(InputError, match=r"H200-SXM.jsonl: cannot be written .No space left on device"):
        calibrate(Job(tmp_path), Bench().tools())


def test_links_need_two_gpus_and_are_kept(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="--link: one GPU alone"):
        calibrate(Job(tmp_path, link=True), Bench().tools())
    link = {"kind": "link", "devices": ["gpu0", "gpu1"], "link": {"latency_ns": 9e3, "gbs": 300.0}}
    tools = replace(Bench().tools(gpus=2), links=lambda: [link])
    assert calibrate(Job(tmp_path, ("moe",), link=True), tools) == 0
    assert json.loads((tmp_path / "H200-SXM.json").read_text())["links"] == [link]
    from hw.journals import read_hop

    assert (read_hop(tmp_path / "H200-SXM.jsonl").latency_ns, read_hop(tmp_path / "H200-SXM.jsonl").gbs) == (9e3, 300)


def test_a_shape_that_hangs_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog rings in the middle of the third shape."""
    import signal

    monkeypatch.setattr(run, "GRACE_S", 30.0)
    bench = Bench()
    measure = bench.measure

    def hang(case: Case) -> Measured:
        if len(bench.seen) == 3:
            signal.raise_signal(signal.SIGALRM)
        return measure(case)

    before = signal.getsignal(signal.SIGALRM)
    assert calibrate(Job(tmp_path), replace(bench.tools(), measure=hang)) == 1
    assert len(table(tmp_path / "H200-SXM.csv")) == 2
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "line,said",
    [
        ("calibrate", "no CUDA device"), ("calibrate --kinds gem", "did you mean 'gemm'"),
        ("calibrate --limit-s soon", "not a number of seconds"), ("calibrate --out /dev/null/x", "/dev/null"),
    ],
)  # fmt: skip
def test_bad_lines(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(line.split())
    except SystemExit as end:
        code = end.code
    streams = capsys.readouterr()
    assert (code, streams.out) == (2, "") and streams.err.count("\n") == 1 and said in streams.err


def test_turns_of_cold_operands() -> None:
    """So many that the L2 holds none until its turn; none if memory or the graph is too small for that."""
    case = Case("", lambda: None, lambda x: None, 6, True, 10 << 20, 20 << 20, 1 << 20)
    turns = cold_turns(case, 50 << 20, 100 << 30)
    assert turns is not None and (turns - 1) * case.turn_bytes > 50 << 20
    assert turns * case.turn_bytes < 4 * (50 << 20)
    assert cold_turns(case, 50 << 20, (1 << 30) + (60 << 20)) is None
    assert cold_turns(replace(case, turn_bytes=1 << 10), 50 << 20, 100 << 30) is None
    assert cold_turns(replace(case, cold=False), 50 << 20, 100 << 30) is None
    assert cold_turns(replace(case, turn_bytes=1 << 30), 50 << 20, 100 << 30) == 1


@pytest.mark.parametrize("turns", [1, 6, 13])
@pytest.mark.parametrize("each", [10.0, 2_000.0, 90_000.0, 5e7])
def test_launches_are_whole_turns(turns: int, each: float) -> None:
    count = launches(turns, each)
    assert count % turns == 0 and turns <= count <= 128 + turns
    assert count * each >= 400_000 or count >= 128


class FakeGraph:
    """A graph on a GPU of the tests: its start costs 8 us, a launch takes `each_us`, the first ones 3 % more."""

    now_us, replays = 0.0, 0

    def __init__(self, each_us: float, count: int) -> None:
        self.us = 8.0 + each_us * count

    def replay(self) -> None:
        FakeGraph.replays += 1
        FakeGraph.now_us += self.us * (1.03 if FakeGraph.replays < 4 else 1.0)


@pytest.mark.parametrize("turns", [1, 6])
@pytest.mark.parametrize("each", [1.7, 30.0, 9_000.0])
def test_the_start_of_a_graph_does_not_count(each: float, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutations: graphs of one turn only (+470 % at 1.7 us); the samples are not divided by the replays."""
    from hw.calibrate import timing

    counts: list[int] = []

    def graph(case: Case, operands: list[int], count: int) -> FakeGraph:
        counts.append(count)
        return FakeGraph(each, count)

    def timed(replay: Callable[[], None], repeats: int) -> list[int]:
        found = []
        for _ in range(repeats):
            before = FakeGraph.now_us
            replay()
            found.append(round((FakeGraph.now_us - before) * 1e3))
        return found

    FakeGraph.replays = 0
    monkeypatch.setattr(timing, "_graph", graph)
    monkeypatch.setattr(timing, "end_to_end_ns", timed)
    monkeypatch.setattr(timing, "warm_up", lambda replay, seconds: replay())
    case = Case("", lambda: 0, lambda x: None, turns, True, 1, 1, 1)
    found = timing._time(case, list(range(turns)))
    assert found.us == pytest.approx(each, rel=0.04) and found.turns == turns
    assert found.low_us <= found.us <= found.high_us
    assert all(c % turns == 0 for c in counts) and max(counts) <= 128 + turns and len(counts) <= timing.GRAPHS
