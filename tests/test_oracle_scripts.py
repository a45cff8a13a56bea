"""The tables over the oracle's reports, on reports with known answers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tesserasim.trace.parquet import write_trace

FOLDER = Path(__file__).resolve().parents[1] / "experiments" / "validation"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def access(buffer: int, mode: str, nbytes: int, **more: Any) -> dict[str, Any]:
    plain = {"offset": 0, "extent": "exact", "covers": mode == "W", "evidence": "schema"}
    return {"buffer": buffer, "mode": mode, "nbytes": nbytes} | plain | more


def kernel(node: int, accesses: list[dict[str, Any]], writes: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    roles = {9: "state", 8: "weight"}
    buffers = {
        str(a["buffer"]): {
            "name": f"b{a['buffer']}", "nbytes": 1000, "role": roles.get(a["buffer"], "activation"),
            "bytes_per_token": 0, "bytes_per_sequence": 0,
        }
        for a in accesses
    }  # fmt: skip
    plain = {"status": "ok", "reason": "", "unknown": False, "reads": []}
    name = {"node": node, "site": f"layers.1/op#{node}", "name": f"k{node}"}
    return {**name, "accesses": accesses, "buffers": buffers, "writes": writes, **plain, **more}


def report(*kernels: dict[str, Any]) -> dict[str, Any]:
    head = {"model": "m", "unit": {"name": "decode"}, "gpu": "H200", "blocks": ["layers.1"]}
    head |= {"same_kernels_as_trace": True, "kernels_with_other_sets_than_trace": 0}
    return {**head, "kernels": list(kernels)}


def chain(declared: int, written: int, **more: Any) -> dict[str, Any]:
    """A writes b0, which B reads as a whole."""
    seen = {"access": 0, "bytes": written, "first": 0, "end": written, "spans": [[0, written]]}
    first = kernel(0, [access(0, "W", declared, **more)], [seen])
    return report(first, kernel(1, [access(0, "R", 1000), access(1, "W", 10)], []))


@pytest.mark.parametrize(
    "declared, written, more, want",
    [(600, 600, {}, 1.0), (600, 400, {}, 1.5), (900, 300, {"covers": False, "extent": "superset"}, 3.0)],
)
def test_ratio_of_a_chain(declared: int, written: int, more: dict[str, Any], want: float) -> None:
    found = load("transfer_ratio").ratios(chain(declared, written, **more))
    assert len(found) > 50 and set(found) == {want}


def test_old_bytes_of_a_partial_write_count_against_it() -> None:
    """A writes b0; B is declared to write perhaps all of it, so A's bytes go to B and all goes back."""
    whole = {"access": 0, "bytes": 1000, "first": 0, "end": 1000, "spans": [[0, 1000]]}
    half = {"access": 0, "bytes": 500, "first": 0, "end": 500, "spans": [[0, 500]]}
    kernels = [
        kernel(0, [access(0, "W", 1000)], [whole]),
        kernel(1, [access(0, "W", 1000, covers=False, extent="superset")], [half]),
        kernel(2, [access(0, "R", 1000)], []),
    ]
    found = load("transfer_ratio").ratios(report(*kernels))
    # Placements 0|12, 01|2, 02|1: declared 1000, 1000, 2000; observed 500, 1000, 500 bytes.
    assert set(found) == {2.0, 1.0, 4.0}


def test_appends_to_state_count_by_their_bytes() -> None:
    append = access(9, "W", 64, covers=False)
    seen = {"access": 0, "bytes": 32, "first": 400, "end": 900, "intervals": 200}
    found = load("transfer_ratio").ratios(
        report(kernel(0, [append], [seen]), kernel(1, [access(9, "R", 1000), access(1, "W", 10)], []))
    )
    assert set(found) == {2.0}


def test_groups_stay_together() -> None:
    unknown = [dict(a, evidence="unknown") for a in (access(0, "R", 1000), access(1, "W", 10))]
    kernels = [*chain(600, 400)["kernels"][:1], kernel(1, unknown, [])]
    assert load("transfer_ratio").ratios(report(*kernels)) == []


# -- an independent count of the bytes that cross ----------------------------------------------------------------


def crossing_bytes(report: dict[str, Any], gpu: dict[str, int], observed: bool) -> int:
    """Bytes sent, from the last writer of every single byte. `gpu`: 0 or 1 per site."""
    last: dict[int, np.ndarray] = {}  # last writer per byte of a buffer, -1: none
    sent: dict[int, np.ndarray] = {}  # bytes that the other GPU has got already
    logs: dict[int, list[list[int]]] = {}  # carried buffers: [writer, bytes, sent]
    total = 0
    for n, k in enumerate(report["kernels"]):
        here = gpu[k["site"]]
        seen = {w["access"]: w for w in k["writes"]} if observed else None
        for a in k["accesses"]:
            b, size = a["buffer"], k["buffers"][str(a["buffer"])]["nbytes"]
            role = k["buffers"][str(b)]["role"]
            old = a["mode"] != "W" or (seen is None and not a["covers"] and (role != "state" or a["extent"] != "exact"))
            if role == "state" and old:
                for entry in logs.get(b, []):
                    if gpu[report["kernels"][entry[0]]["site"]] != here and not entry[2]:
                        total, entry[2] = total + entry[1], 1
            elif role == "activation" and old and b in last:
                sites = np.array([gpu[x["site"]] for x in report["kernels"]] + [here])  # nobody's bytes: here
                piece = np.zeros(size, bool)
                piece[a["offset"] : a["offset"] + a["nbytes"]] = True
                piece &= (sites[last[b]] != here) & ~sent[b]
                total += int(piece.sum())
                sent[b] |= piece
        for i, a in enumerate(k["accesses"]):
            b, size = a["buffer"], k["buffers"][str(a["buffer"])]["nbytes"]
            if a["mode"] == "R":
                continue
            spans, covers, amount = [(0, a["nbytes"])], a["covers"], a["nbytes"]
            if seen is not None:
                spans, amount = seen[i]["spans"], seen[i]["bytes"]
                covers = amount == size
            if k["buffers"][str(b)]["role"] == "state":
                if covers and amount == size:
                    logs[b] = []
                logs.setdefault(b, []).extend([[n, amount, 0]] * bool(amount))
                continue
            last.setdefault(b, np.full(size, -1))
            sent.setdefault(b, np.zeros(size, bool))
            for first, end in spans:
                last[b][a["offset"] + first : a["offset"] + end] = n
                sent[b][a["offset"] + first : a["offset"] + end] = False
    return total


def random_report(seed: int) -> dict[str, Any]:
    """Kernels over few buffers: reads and writes of parts of them, seen writes inside the declared ones."""
    random = np.random.default_rng(seed)
    kernels = []
    for n in range(int(random.integers(3, 12))):
        accesses, writes = [], []
        for b in random.choice([0, 1, 2, 3, 8, 9], size=int(random.integers(1, 4)), replace=False):
            mode = "R" if b == 8 else str(random.choice(["R", "W", "RW"]))
            first, end = sorted(random.choice(1001, 2, replace=False))
            if b == 9 and random.random() < 0.7:
                first, end = 0, 1000
            covers = mode == "W" and bool(random.random() < 0.6)
            extent = "exact" if covers or random.random() < 0.5 else "superset"
            place = {"offset": int(first), "extent": extent, "covers": covers}
            accesses.append(access(int(b), mode, int(end - first), **place))
            if mode != "R":
                cuts = np.sort(random.choice(int(end - first) + 1, 2)).tolist()
                cuts = [0, int(end - first)] if covers and random.random() < 0.5 else cuts
                spans = [cuts] if cuts[1] > cuts[0] else []
                ends = {"first": cuts[0], "end": cuts[1]} if spans else {}
                seen = {"access": len(accesses) - 1, "bytes": cuts[1] - cuts[0], "intervals": len(spans)}
                writes.append(seen | {"spans": spans} | ends)
        kernels.append(kernel(n, accesses, writes, site=f"m/op#{random.integers(0, n + 1)}"))
    return report(*kernels)


@pytest.mark.parametrize("seed", range(40))
def test_bytes_that_cross_counted_byte_by_byte(seed: int) -> None:
    script, unit = load("transfer_ratio"), random_report(seed)
    for observed in (False, True):
        flow = script.unit_flow(script.unit_of(unit, observed))
        for gpu_of in script.placements(flow, 20, seed):
            gpu = {site: int(g) for site, g in zip(flow.trace.sites, gpu_of, strict=True)}
            assert script.crossing(flow, gpu_of) == crossing_bytes(unit, gpu, observed)


def test_placements_are_seeded_and_keep_groups_together() -> None:
    script = load("transfer_ratio")
    assert script.PLACEMENTS >= 200
    unknown = [dict(a, evidence="unknown") for a in (access(0, "R", 1000), access(1, "W", 10))]
    ends = [kernel(n, [access(n, "W", 8)], []) for n in (0, 3, 4)]
    flow = script.unit_flow(script.unit_of(report(ends[0], kernel(1, unknown, []), *ends[1:]), False))
    drawn = np.array(list(script.placements(flow, 300, 7)))
    assert np.array_equal(drawn, list(script.placements(flow, 300, 7)))
    assert (drawn[:, 0] == drawn[:, 1]).all() and (drawn[:, 1] == drawn[:, 2]).all()
    assert 50 < (drawn[:, 3] != drawn[:, 0]).sum() < 250


def test_many_intervals_are_spread_evenly() -> None:
    spans = load("transfer_ratio")._spans
    columns = [(16 + 64 * i, 16 + 64 * i + 8) for i in range(300)]
    seen = {"access": 0, "bytes": 2400, "intervals": 300, "first": 16, "end": columns[-1][1]}
    assert spans(seen) == columns
    for n in (65, 999, 5000, 70001):
        found = spans({"access": 0, "bytes": 3 * n + 1, "intervals": n, "first": 5, "end": 5 + 4 * n})
        assert len(found) <= 4096 and found[0][0] == 5 and found[-1][1] <= 5 + 4 * n
        assert all(a[1] <= b[0] for a, b in pairwise(found))
        assert 0.99 * (3 * n + 1) - n <= sum(b - a for a, b in found) <= 3 * n + 1


def test_kernels_that_are_not_ok_keep_their_declared_writes() -> None:
    unit = chain(600, 400)
    unit["kernels"][0]["status"] = "skipped"
    assert set(load("transfer_ratio").ratios(unit)) == {1.0}


def test_ratio_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ratio = load("transfer_ratio")
    assert ratio.main(tmp_path) == 2
    for folder, unit in (("a", chain(600, 600)), ("b", chain(660, 600))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "u.json").write_text(json.dumps(unit))
    assert ratio.main(tmp_path) == 0
    out = capsys.readouterr().out
    assert "a/u" in out and out.split("b/u")[1].split()[2:5] == ["1.100"] * 3
    (tmp_path / "b" / "u.json").write_text(json.dumps(chain(800, 600)))
    assert ratio.main(tmp_path) == 1
    assert "SOME OUTSIDE THE BAR" in capsys.readouterr().out
    for text in BROKEN:
        (tmp_path / "b" / "u.json").write_text(text)
        assert ratio.main(tmp_path) == 2
        assert capsys.readouterr().err.count("\n") == 1


# -- the summary -------------------------------------------------------------------------------------------------

BROKEN = ["", "[", "7", "[]", "{}", '{"kernels": 3}', '{"kernels": [{}]}', '{"kernels": [7], "blocks": []}']


def fine(count: int = 50, seen: str = "observed") -> list[dict[str, Any]]:
    return [kernel(i, [access(0, "W", 8)], [], reads=[{"seen": seen}]) for i in range(count)]


def summarize(tmp_path: Path, unit: dict[str, Any] | str, name: str = "m/u") -> int:
    path = tmp_path / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(unit if isinstance(unit, str) else json.dumps(unit))
    return int(load("oracle_summary").main(tmp_path, tmp_path / "none"))


@pytest.mark.parametrize(
    "more, code",
    [
        ([], 0),
        ([{"status": "skipped"}], 0),  # 1 of 51
        ([{"status": "skipped"}] * 2, 1),
        ([{"unknown": True}], 0),
        ([{"unknown": True}, {"status": "skipped"}], 1),
        ([{"status": "not reached"}], 1),
        ([{"status": "missed_read"}], 1),
        ([{"status": "missed_write"}], 1),
        ([{"status": "missed_read", "unknown": True}], 1),
        ([{"status": "not reached", "unknown": True}], 1),
    ],
)
def test_bars(tmp_path: Path, more: list[dict[str, Any]], code: int) -> None:
    assert summarize(tmp_path, report(*fine(), *(kernel(50 + i, [], [], **m) for i, m in enumerate(more)))) == code


def test_summary_lists_what_is_not_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = kernel(50, [], [], status="missed_read", reason="3 bytes", unknown=True)
    skipped = [kernel(n, [], [], status="skipped", reason="nondeterministic") for n in (51, 52)]
    assert summarize(tmp_path, report(*fine(), bad, *skipped)) == 1
    out = capsys.readouterr().out
    assert "m/u: missed_read: 3 bytes: layers.1/op#50" in out
    assert "m/u: skipped: nondeterministic: layers.1/op#51 and 1 more" in out
    assert "53 kernels: 1 missed, 0 not reached, 3.77% skipped or unknown" in out


def test_summary_counts_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = [*fine(30), *fine(12, "not observed"), *fine(5, "not tried")]
    assert summarize(tmp_path, report(*kernels)) == 0
    out = capsys.readouterr().out
    assert "30/42/47" in out and "reads: 30 observed, 12 not observed, 5 not tried" in out


@pytest.mark.parametrize(
    "head, words",
    [
        ({"kernels_with_other_sets_than_trace": 0}, "yes"),
        ({"kernels_with_other_sets_than_trace": 3}, "3 sets differ"),
        ({"same_kernels_as_trace": False, "kernels_with_other_sets_than_trace": None}, "other kernels"),
    ],
)
def test_summary_says_whether_the_trace_was_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], head: dict[str, Any], words: str
) -> None:
    assert summarize(tmp_path, report(*fine()) | head) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith(f" no trace {words}")


def test_summary_compares_with_the_trace_as_it_is_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sets(unit: dict[str, Any]) -> str:
        (tmp_path / "r" / "m").mkdir(parents=True, exist_ok=True)
        (tmp_path / "r" / "m" / "u.json").write_text(json.dumps(unit))
        assert load("oracle_summary").main(tmp_path / "r", tmp_path / "traces") == 0
        out = capsys.readouterr().out.splitlines()
        assert ("sets differ: from the trace's" in out[2]) == (int(out[1].split()[-2][0]) < 2)
        return out[1].split()[-2]

    unit = chain(600, 600) | {"step_kernels": 2}
    ratio = load("transfer_ratio")
    write_trace(ratio.unit_of(unit, False), tmp_path / "traces" / "m" / "u.parquet")
    assert sets(unit) == "2/2"
    changes: list[dict[str, Any]] = [
        {"mode": "RW", "covers": False}, {"nbytes": 601}, {"offset": 1}, {"extent": "superset"}, {"covers": False},
    ]  # fmt: skip
    for change in changes:
        other = chain(600, 600, **{k: v for k, v in change.items() if k not in ("mode", "nbytes")})
        other["kernels"][0]["accesses"][0] |= change
        assert sets(other | {"step_kernels": 2}) == "1/2"
    assert sets(unit | {"step_kernels": 3}) == "0/2"
    # How large a workspace is, is the library's choice.
    for k in unit["kernels"]:
        k["buffers"]["0"]["role"] = "workspace"
    write_trace(ratio.unit_of(unit, False), tmp_path / "traces" / "m" / "u.parquet")
    unit["kernels"][0]["accesses"][0]["nbytes"] = 300
    assert sets(unit) == "2/2"


def test_summary_names_missing_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = load("oracle_summary").WANTED
    for model, phases in wanted.items():
        for folder, unit in phases:
            assert summarize(tmp_path, report(*fine()) | {"unit": {"name": unit}}, f"{folder}/{unit}-b1") == 0
            out = capsys.readouterr().out
            assert f"{model} {unit}" not in out.split("not checked yet:")[-1]
    assert "all models and phases checked" in out
    # A unit of which nothing was found to be right has not been checked.
    gone = report(*(kernel(n, [], [], status="not reached") for n in range(3))) | {"unit": {"name": "decode"}}
    assert summarize(tmp_path, gone, "llama-3-8b/decode-b1") == 1
    assert "not checked yet: llama-3-8b decode\n" in capsys.readouterr().out


def test_summary_of_no_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("oracle_summary").main(tmp_path) == 2
    for text in [*BROKEN, json.dumps(report(kernel(0, [], [], status="fine")))]:
        assert summarize(tmp_path, text) == 2
        err = capsys.readouterr().err.splitlines()
        assert err[-1].startswith("error: ") and "Traceback" not in err[-1]


def test_scripts_run_as_programs(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    missed = chain(600, 600)
    missed["kernels"][1] |= {"status": "missed_write", "reason": "4 bytes"}
    for name, unit, code in (
        ("oracle_summary", chain(600, 600), 0), ("oracle_summary", missed, 1),
        ("transfer_ratio", chain(600, 600), 0), ("transfer_ratio", chain(900, 600), 1),
    ):  # fmt: skip
        (tmp_path / "m" / "u.json").write_text(json.dumps(unit))
        command = [sys.executable, str(FOLDER / f"{name}.py"), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1])
        assert done.returncode == code, done.stdout + done.stderr


# -- damaged reports -----------------------------------------------------------------------------------------------


def damaged() -> dict[str, str]:
    """What is wrong -> a report that has it."""

    def changed(change: Any, number: int = 0) -> str:
        unit = json.loads(json.dumps(chain(600, 600)))
        change(unit, unit["kernels"][number])
        return json.dumps(unit)

    one: dict[str, Any] = {
        "a size that is no number": lambda u, k: k["buffers"]["0"].update(nbytes=float("nan")),
        "a size of half a byte": lambda u, k: k["buffers"]["0"].update(nbytes=1000.5),
        "a size beyond 64 bits": lambda u, k: k["accesses"][0].update(nbytes=1 << 80),
        "a negative size": lambda u, k: k["accesses"][0].update(nbytes=-1),
        "a negative buffer": lambda u, k: (k["accesses"][0].update(buffer=-1), k["buffers"].update({"-1": {}})),
        "bytes beyond the buffer": lambda u, k: k["accesses"][0].update(nbytes=5000),
        "no intervals": lambda u, k: k["writes"].__setitem__(0, {"access": 0, "bytes": 8, "intervals": 0, "first": 0,
                                                                "end": 8}),
        "more bytes than place": lambda u, k: k["writes"].__setitem__(0, {"access": 0, "bytes": 80, "intervals": 1,
                                                                         "first": 0, "end": 8}),
        "a write of no access": lambda u, k: k["writes"][0].update(access=7),
        "spans turned round": lambda u, k: k["writes"][0].update(spans=[[9, 1]]),
        "spans outside": lambda u, k: k["writes"][0].update(spans=[[0, 99999]]),
        "a mode that there is not": lambda u, k: k["accesses"][0].update(mode="X"),
        "a status that is a list": lambda u, k: k.update(status=["ok"]),
        "a node that is a text": lambda u, k: k.update(node="0"),
        "reads of no words": lambda u, k: k.update(reads=[{"seen": [1]}]),
        "a unit without a name": lambda u, k: u.update(unit={}),
    }  # fmt: skip
    return {name: changed(change) for name, change in one.items()} | {"deep": "[" * 100_000, "digits": "9" * 5000}


@pytest.mark.parametrize("name", damaged())
def test_a_damaged_report_is_named_and_the_others_are_counted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutations: the first damaged report ends the table; sizes are not checked (a ratio of NaN)."""
    good = [json.dumps(chain(declared, 600)) for declared in (600, 660)]
    for folder, text in zip("abc", (good[0], damaged()[name], good[1]), strict=True):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "u.json").write_text(text)
    assert load("transfer_ratio").main(tmp_path) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith(f"error: {tmp_path / 'b' / 'u.json'}: ") and streams.err.count("\n") == 1
    assert "a/u" in streams.out and "c/u" in streams.out and "b/u" not in streams.out and "nan" not in streams.out
    harmless = name in ("bytes beyond the buffer", "spans outside", "a mode that there is not")  # to this table
    assert load("oracle_summary").main(tmp_path, tmp_path / "none") == (0 if harmless else 2)
    streams = capsys.readouterr()
    assert "a/u" in streams.out and "c/u" in streams.out and ("b/u" in streams.out) == harmless
    assert streams.err.count("\n") == (not harmless)


def test_a_report_of_no_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("transfer_ratio").ratios(report()) == []
    assert summarize(tmp_path, report()) == 1
    assert load("transfer_ratio").main(tmp_path) == 2
    assert "no unit has anything to send" in capsys.readouterr().err


def test_what_lies_in_place_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "dir.json").mkdir()
    os.mkfifo(tmp_path / "m" / "pipe.json")
    (tmp_path / "m" / "loop.json").symlink_to("loop.json")
    (tmp_path / "m" / "u.json").write_text(json.dumps(chain(600, 600)))
    for name, arguments in (("transfer_ratio", ()), ("oracle_summary", (tmp_path / "none",))):
        assert load(name).main(tmp_path, *arguments) == 2
        streams = capsys.readouterr()
        assert streams.err.count("\n") == 3 and "m/u" in streams.out


def test_reports_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = kernel(50, [], [], status="missed_read", reason="\x1b[2J", site="a\nb\x07")
    assert summarize(tmp_path, report(*fine(), bad), "m/u\x1b[31m") == 1
    assert capsys.readouterr().out.replace("\n", "").isprintable()


def test_a_node_beyond_the_trace_has_other_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: the node is looked up unchecked: IndexError."""
    unit = chain(600, 600) | {"step_kernels": 2}
    write_trace(load("transfer_ratio").unit_of(unit, False), tmp_path / "traces" / "m" / "u.parquet")
    unit["kernels"][1]["node"] = 7
    (tmp_path / "r" / "m").mkdir(parents=True)
    (tmp_path / "r" / "m" / "u.json").write_text(json.dumps(unit))
    assert load("oracle_summary").main(tmp_path / "r", tmp_path / "traces") == 0
    assert " 0/2 " in capsys.readouterr().out
    (tmp_path / "traces" / "m" / "u.parquet").write_bytes(b"PAR1")
    assert load("oracle_summary").main(tmp_path / "r", tmp_path / "traces") == 2
    assert "u.parquet: not a readable Parquet file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["oracle_summary", "transfer_ratio"])
def test_a_script_with_nobody_to_print_to(name: str, tmp_path: Path) -> None:
    """Mutation: `main` is called bare: a traceback."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "u.json").write_text(json.dumps(chain(600, 600)))
    for redirection, code, words in (("> /dev/full", 2, "standard output"), (">&-", 0, ""), ("| true", 0, "")):
        line = f"{sys.executable} {FOLDER / name}.py {tmp_path} {redirection}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
        assert done.returncode == code and "Traceback" not in done.stderr and "Exception" not in done.stderr
        assert words in done.stderr and done.stderr.count("\n") == bool(words)
