"""Simulated against measured: predictions by closed forms, journals as they come, the split as it was fixed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from validate_cases import BASE, HOP, SESSION, bench_files, journal, timing, trace

from hw.__main__ import main
from hw.journals import Hop, Measured, Split, read_hop, read_journal, read_split
from hw.validate import Unit, bench, policy_plans, predict, rows, summary
from tesserasim.errors import InputError
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import write_trace

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("devices", "depth", "period_ns"),
    [
        ("aaa", 1, 6000),
        ("bbb", 1, 9000),
        ("aaa", 2, 6000),  # a serial device gains nothing from depth
        ("aab", 1, 3000 + 2500 + 4000),
        ("aab", 3, 4000),  # bound by b
        ("aba", 1, 1000 + 2500 + 3000 + 2500 + 3000),
    ],
)
def test_rates_by_closed_form(devices: str, depth: int, period_ns: int) -> None:
    unit = Unit("toy", {"a": trace((1000, 2000, 3000)), "b": trace((2000, 3000, 4000))}, HOP)
    assert predict(unit, list(devices), depth) == pytest.approx(1e9 / period_ns, rel=1e-6)


@pytest.mark.quick
def test_partitions_share_the_dram_and_have_their_own_multiprocessors() -> None:
    """Kernels of one block leave room on 64 multiprocessors: two slots take no longer than one."""
    parts = {d: trace((1000, 2000, 3000)) for d in "ab"}
    for d, n in (("a", 64), ("b", 68)):
        meta = dataclasses.replace(parts[d].meta, gpu=f"H200-SXM/{n}sm")
        parts[d] = dataclasses.replace(parts[d], meta=meta)
    unit = Unit("toy", parts, HOP)
    cluster = bench(unit)[1]
    assert [d.sm_count for d in cluster.devices] == [64, 68] and cluster.dram_of == (0, 0)
    assert predict(unit, list("aaa"), 1, "shared") == pytest.approx(1e9 / 6000, rel=1e-6)
    assert predict(unit, list("aaa"), 2, "shared") == pytest.approx(2e9 / 6000, rel=1e-3)
    assert predict(unit, list("aaa"), 2, "serial") == pytest.approx(1e9 / 6000, rel=1e-3)


@pytest.mark.quick
def test_what_cannot_be_predicted_says_why() -> None:
    two = {"a": trace((1000, 2000, 3000)), "b": trace((2000, 3000, 4000))}
    with pytest.raises(InputError, match="no hop was measured"):
        predict(Unit("toy", two, None), list("aab"), 1)
    assert predict(Unit("toy", two, None), list("bbb"), 1) > 0
    with pytest.raises(InputError, match="3 kernels, devices for 2"):
        predict(Unit("toy", two, HOP), list("aa"), 1)
    with pytest.raises(InputError, match="device model"):
        predict(Unit("toy", two, HOP), list("aaa"), 1, "magic")
    other = Trace(two["b"].meta, buffers=two["b"].buffers, kernels=two["b"].kernels[:2])
    with pytest.raises(InputError, match="runs other kernels"):
        Unit("toy", {"a": two["a"], "b": other}, HOP)


@pytest.mark.quick
def test_plans_of_policies_from_measured_times() -> None:
    """Two kernels are ten times faster on one device each, and the hop is short: kernel placement splits them."""
    slow = {"a": trace((1000, 100_000, 3000)), "b": trace((10_000, 10_000, 40_000))}
    made = policy_plans(Unit("toy", slow, HOP), (1, 2), ("single", "kernel"))
    assert set(made) == {"single-1", "single-2", "kernel-1", "kernel-2"}
    lane = made["kernel-2"].lanes[0]
    assert [lane.device_of("step", f"m/k{i}#0") for i in range(3)] == list("aba") and lane.depth == 2
    assert set(made["single-1"].lanes[0].devices) == {"b"}
    with pytest.raises(InputError, match="no hop"):
        policy_plans(Unit("toy", slow, None), (1,))


@pytest.mark.quick
def test_journals_with_half_a_last_line_and_with_damage(tmp_path: Path) -> None:
    good = journal(tmp_path, [SESSION, timing("p", "aab", 1, 100.0), timing("p", "aab", 1, 90.0), '{"kind": "tim'])
    (m,) = read_journal(good)
    assert (m.units_per_s, m.device_of, m.key, m.unit) == (90.0, ("a", "a", "b"), "p:1", "step-b4")
    for bad in ('{"kind": "timing", "plan": "p"}', "[1]", "nonsense"):
        with pytest.raises(InputError, match="line 2 is no line of a replay's journal"):
            read_journal(journal(tmp_path, [SESSION, bad, timing("p", "aab", 1, 90.0)]))
    with pytest.raises(InputError, match="no such replay's journal"):
        read_journal(tmp_path / "none.jsonl")
    (tmp_path / "links").mkdir()
    links = journal(tmp_path / "links", [{"kind": "link", "link": {"latency_ns": 5000, "gbs": 300}}])
    assert read_hop(links) == Hop(5000.0, 300.0)
    with pytest.raises(InputError, match="no measured link"):
        read_hop(journal(tmp_path, [SESSION, timing("p", "aab", 1, 90.0)]))


@pytest.mark.quick
def test_the_split_is_the_one_that_was_fixed() -> None:
    """Half of the combinations, and a whole model; the same ones for ever."""
    split = read_split(ROOT / "experiments/validation/split.json")
    assert split == Split(("gpt-oss-20b",))

    def part(model: str, plan: str, depth: int) -> bool:
        return split.held_out(Measured(model, "u", plan, "l", (), depth, 1.0, (1.0,), None))

    found = [part("llama-3-8b", f"{i:016x}", d) for i in range(50) for d in (1, 2, 4, 8)]
    assert 70 < sum(found) < 130
    assert [part("llama-3-8b", "0d91cd8bbfe12644", d) for d in (1, 2)] == [True, False]
    assert all(part("gpt-oss-20b", f"{i}", 1) for i in range(9))


@pytest.mark.quick
def test_rows_summary_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for d, times in (("a", (1000, 2000, 3000)), ("b", (2000, 3000, 4000))):
        write_trace(trace(times), tmp_path / f"{d}.parquet")
    (tmp_path / "split.json").write_text('{"held_out_models": []}')
    right, wrong = 1e9 / 9500, 1e9 / 4000 * 0.8
    journal(tmp_path, [SESSION, timing("p", "aab", 1, right), timing("q", "aab", 3, wrong)])
    links = tmp_path / "links.jsonl"
    links.write_text(json.dumps({"kind": "link", "link": {"latency_ns": 500, "gbs": 0.5}}) + "\n")
    text = 'split = "split.json"\n[[unit]]\njournal = "step-b4.jsonl"\nlinks = "links.jsonl"\n'
    text += '[unit.traces]\na = "a.parquet"\nb = "b.parquet"\n'
    (tmp_path / "runs.toml").write_text(text)
    found = rows(tmp_path / "runs.toml")
    assert [r["error"] for r in found] == [pytest.approx(0, abs=1e-6), pytest.approx(0.25, abs=1e-6)]
    assert found[0]["switches"] == 1 and found[0]["lesser_share"] == pytest.approx(3 / 7, abs=1e-4)
    inside = {s["model"]: s["inside80"] for s in summary(found) if s["n"] == 2}
    assert all(x == 0.5 for x in inside.values())
    line = ["validate", str(tmp_path / "runs.toml"), "--out", str(tmp_path / "out/table"), "--device-model", "serial"]
    assert main(line) == 0
    assert "+25.00%" in capsys.readouterr().out
    assert (tmp_path / "out/table.parquet").exists() and (tmp_path / "out/table.csv").read_text().count("\n") == 3
    (tmp_path / "runs.toml").write_text('split = "split.json"\n')
    assert main(["validate", str(tmp_path / "runs.toml")]) == 2
    assert "at least one [[unit]]" in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.parametrize("wrong", [
    {"depth": 0}, {"depth": -3}, {"depth": 10**9}, {"depth": 1.5}, {"depth": float("inf")}, {"depth": "1"},
    {"depth": [1]}, {"depth": True}, {"units_per_s": 10**400}, {"units_per_s": "1e5"}, {"units_per_s": True},
    {"units_per_s": 1e308}, {"units_per_s_all": []}, {"units_per_s_all": [float("nan")]}, {"units_per_s_all": [-1.0]},
    {"units_per_s": float("nan")}, {"units_per_s": 2e5}, {"units_per_s_all": [1e300]}, {"units_per_s_all": None},
    {"latency_ms_all": [-1.0]}, {"latency_ms_all": [float("nan")]}, {"latency_ms_all": 5.0}, {"launches": 0},
    {"launches": 10**300}, {"segments": 1}, {"energy_j": 0.0}, {"energy_j": -1.0}, {"energy_j": float("inf")},
    {"device_of": [["a", 10**12]]}, {"device_of": [["a", -1]]}, {"device_of": [[["a"], 3]]}, {"device_of": {"a3": 1}},
    {"device_of": [[1, 3]]}, {"lane": None}, {"lane": 5}, {"lane": "\x1b[31m"}, {"lane": "\ud800"}, {"plan": ["x"]},
    {"plan": 5}, {"energy_j": "hot"},
])  # fmt: skip
def test_a_line_that_no_run_writes_is_refused_with_its_number(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 2 is no line of a replay's journal"):
        read_journal(journal(tmp_path, [SESSION, {**BASE, **wrong}]))


@pytest.mark.quick
def test_files_of_other_kinds_are_refused_in_one_line(tmp_path: Path) -> None:
    good = json.dumps(SESSION) + "\n" + json.dumps(BASE) + "\n"
    path = tmp_path / "x.jsonl"
    for raw in (good.encode("utf-16"), b"\xff\xfe", b'{"kind": "caf\xe9"}\n', b"[" * 100_000 + b"\n{}\n", b"\n\n{}\n"):
        path.write_bytes(raw)
        for read in (read_journal, read_hop):
            with pytest.raises(InputError):
                read(path)
    path.write_bytes(b"\xef\xbb\xbf" + good.encode())
    assert [m.lane for m in read_journal(path)] == ["p"]
    for ns, gbs in (("NaN", "1"), ("1", "Infinity"), ("-1", "1"), ("1", "0"), ('"1"', "1"), ("1e300", "1")):
        path.write_text(f'{{"kind": "link", "link": {{"latency_ns": {ns}, "gbs": {gbs}}}}}\n')
        with pytest.raises(InputError, match="line 1"):
            read_hop(path)
    for split in ("[]", '{"held_out_models": "toy"}', '{"held_out_models": [{}]}', "[" * 100_000, "\udcff"):
        path.write_bytes(split.encode("utf-8", "surrogateescape"))
        with pytest.raises(InputError):
            read_split(path)


@pytest.mark.quick
@pytest.mark.parametrize(("old", "new"), [
    ("[[unit]]", "unit = 5\n[x]"), ("[[unit]]", "[unit]"), ("links =", "link ="), ("split =", "typo = 1\nsplit ="),
    ('"links.jsonl"', "5"), ('"links.jsonl"', '"/dev/zero"'), ('"step-b4.jsonl"', "[1]"), ('"step-b4.jsonl"', '"."'),
    ('"step-b4.jsonl"', '"/dev/zero"'), ('"step-b4.jsonl"', '"a\\u0000b"'),
    ('"split.json"', "5"), ('"split.json"', '"."'), ("\na =", '\n"" ='),
    ('"a.parquet"', "5"), ('"a.parquet"', '"a\\u0000b"'), ("links =", 'launch = "none.json"\nlinks ='),
    ("links =", 'launch = "list.json"\nlinks ='), ("links =", 'launch = "far.json"\nlinks ='),
    ('[unit.traces]\na = "a.parquet"\nb = "b.parquet"\n', "traces = {}\n"),
])  # fmt: skip
def test_a_runs_file_that_is_wrong_is_one_line(
    old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "far.json").write_text('{"kernel_overhead_ns": Infinity}')
    text = bench_files(tmp_path)
    assert old in text
    (tmp_path / "runs.toml").write_text(text.replace(old, new))
    assert main(["validate", str(tmp_path / "runs.toml")]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "internal" not in err


@pytest.mark.quick
def test_tables_never_take_the_place_of_what_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs.toml").write_text(bench_files(tmp_path))
    before = (tmp_path / "a.parquet").read_bytes()
    for out in ("a", "a.parquet", "a.csv", ".", "runs.toml/x"):
        assert main(["validate", str(tmp_path / "runs.toml"), "--out", str(tmp_path / out)]) == 2, out
        said = capsys.readouterr()
        assert len(said.err.splitlines()) == 1 and not said.out
    assert main(["validate", str(tmp_path / "runs.toml"), "--out", "/dev/full"]) == 2
    assert (tmp_path / "a.parquet").read_bytes() == before and not list(tmp_path.glob("*.csv"))
    assert main(["validate", str(tmp_path / "runs.toml"), "--out", str(tmp_path / "v1.5")]) == 0
    assert {p.name for p in tmp_path.glob("v1*")} == {"v1.5.parquet", "v1.5.csv"}
    assert main(["validate", str(tmp_path / "runs.toml"), "--plans", str(tmp_path / "runs.toml")]) == 2
