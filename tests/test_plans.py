"""Plan files from anywhere: every field has a type and a range, and a plan is for one mix and one cluster."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweep_cases import write_tiny_sweep

from tesserasim import api
from tesserasim.cli import main
from tesserasim.errors import InputError
from tesserasim.plans import Plan, read_plan, write_plan

PAIR = "A100-80GB-PCIe+L40S@25Gbps"
Document = dict[str, Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plans")
    write_tiny_sweep(directory)
    return directory


@pytest.fixture(scope="module")
def made(files: Path) -> Plan:
    return api.plan(files / "tiny.toml", PAIR, "kernel", batch=4, depth=2)


@pytest.fixture(scope="module")
def document(made: Plan) -> Document:
    found: Document = json.loads(made.to_json())
    return found


def lane(**changes: Any) -> Callable[[Document], None]:
    return lambda d: d["lanes"][0].update(changes)


def top(**changes: Any) -> Callable[[Document], None]:
    return lambda d: d.update(changes)


def lanes(count: int, **changes: Any) -> Callable[[Document], None]:
    def change(d: Document) -> None:
        d["lanes"] = [{**d["lanes"][0], "name": f"l{i}", "share": 1 / count, **changes} for i in range(count)]

    return change


def unit(**changes: Any) -> Callable[[Document], None]:
    return lambda d: d["lanes"][0]["assignment"].update(changes)


HUGE = 10**400
EMPTY: list[Any] = []
ODD: tuple[Any, ...] = (None, EMPTY, {}, "x", 5)
def these(*values: Any) -> tuple[Any, ...]:
    return values


BAD: dict[str, tuple[Callable[[Document], None], str]] = {
    **{f"{k} {v!r:.20}": (lane(**{k: v}), f"lane 1: {k} must be a whole number from 1 to")
       for k in ("batch", "depth") for v in (0, -1, True, 1.5, 1e9, 10**9, HUGE, None, "4", [4], 1.0)},
    **{f"share {v!r:.20}": (lane(share=v), "share") for v in (0, -1, 2, 1e308, None, "x", True, 0.5, HUGE)},
    **{f"priority {v!r:.20}": (lane(priority=v), "priority") for v in these(None, "x", 1.5, 10**30, -1001, [], True)},
    **{f"stagger {v!r:.20}": (lane(stagger_us=v), "stagger_us") for v in (-1, 1e300, None, "x", HUGE)},
    **{f"name {v!r:.20}": (lane(name=v), "name") for v in these(None, 5, "", [], "x" * 300, "a\nb")},
    **{f"assignment {v!r:.20}": (lane(assignment=v), "assignment") for v in ODD},
    **{f"unit {v!r:.20}": (unit(decode=v), "decode") for v in (*ODD, {"*": 5}, {"*": None})},
    "two lanes of one name": (lanes(2, name="l"), "two lanes are called 'l'"),
    "shares above one": (lanes(2, share=0.6), "sum to 1.2; they must sum to 1"),
    "2000 lanes": (lanes(2000), "1 to 256 lanes"),
    "no lanes": (top(lanes=[]), "1 to 256 lanes"),
    **{f"lanes {v!r}": (top(lanes=v), "'lanes' must be a list") for v in these(None, {}, 5, "x", [None], [EMPTY])},
    **{f"{k} {v!r:.20}": (top(**{k: v}), k) for k in ("mix", "cluster", "policy") for v in (None, 5, "", EMPTY)},
    **{f"{k} {v!r:.20}": (top(**{k: v}), k)
       for k in ("objective_us", "bound_us", "gap") for v in ("x", -1, HUGE, True)},
    "objective of nothing": (top(objective_us=0), "objective_us"),
    **{f"{k} {v!r:.20}": (top(**{k: v}), k) for k in ("prediction", "memory_bytes") for v in (None, 5, {"2": "x"})},
    **{f"{k} {v!r:.20}": (top(**{k: v}), k) for k in ("notes", "trace_hashes") for v in (None, 5, "abc", [5])},
    **{f"{k} {v!r}": (top(**{k: v}), k) for k in ("cut_bytes", "switches") for v in (None, "x", -5, 1.5, True)},
    **{f"version {v!r}": (top(version=v), "not a plan of version 1") for v in (True, 1.0, 2, "1", None)},
    "unknown key": (top(zz=1), "unknown key 'zz'"),
    "unknown key of a lane": (lane(zz=1), "lane 1: unknown key 'zz'"),
    "missing key of a lane": (lambda d: d["lanes"][0].pop("batch"), "lane 1: 'batch' is missing"),
    "missing key": (lambda d: d.pop("policy"), "'policy' is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_field_is_named(case: str, document: Document, tmp_path: Path) -> None:
    """Mutation: `_number` lets bool through: batch true is one request. Mutation: shares are not summed."""
    change, message = BAD[case]
    wrong = copy.deepcopy(document)
    change(wrong)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(InputError) as error:
        read_plan(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value)) < 300 + len(str(path))


RAW = {
    "empty": b"", "list": b"[]", "null": b"null", "deep": b"[" * 200_000, "no text": b"\xff\xfe{}",
    "key twice": b'{"version": 1, "version": 1}', "digits": b'{"version": ' + b"9" * 5000 + b"}",
    "not a number": b'{"version": NaN}',
}  # fmt: skip


@pytest.mark.parametrize("case", RAW)
def test_what_is_no_plan(case: str, tmp_path: Path) -> None:
    """Mutation: RecursionError is not caught: the nested file is an internal error."""
    path = tmp_path / "p.json"
    path.write_bytes(RAW[case])
    with pytest.raises(InputError, match="not a plan"):
        read_plan(path)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """Mutation: `read_text` opens without `check_regular`: the pipe is waited for (the test hangs)."""
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path, tmp_path / "pipe"):
        with pytest.raises(InputError, match=r"name a regular file"):
            read_plan(path)
    for name in ("", "x" * 5000, "a\0b", str(tmp_path / "none")):
        with pytest.raises(InputError):
            read_plan(name)


def test_a_plan_survives_its_file(made: Plan, tmp_path: Path) -> None:
    """Mutation: tuples are left as lists by `read_plan`."""
    write_plan(made, tmp_path / "p.json")
    assert json.loads(read_plan(tmp_path / "p.json").to_json()) == json.loads(made.to_json())
    assert read_plan(tmp_path / "p.json").trace_hashes == made.trace_hashes


def test_every_policy_makes_plans_that_are_read(files: Path, tmp_path: Path) -> None:
    """Mutation: MAX_PRIORITY = 0: the lane that fills idle time is refused."""
    for policy in ("single", "replicas-static", "replicas-lo", "pd", "af", "kernel"):
        for cluster in (PAIR, "2xA100-80GB-PCIe+L40S@25Gbps"):
            plan = api.plan(files / "tiny.toml", cluster, policy, depth=2)
            write_plan(plan, tmp_path / "p.json")
            assert read_plan(tmp_path / "p.json").lanes == plan.lanes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: replace(p, mix="other"), "made for mix other, not tiny"),
        (lambda p: replace(p, cluster="H200"), "made for cluster H200, not A100"),
        (lambda p: place(p, zz={"*": "L40S"}), "unknown unit 'zz'"),
        (lambda p: place(p, decode={"*": "H9"}), "no device 'H9'"),
        (lambda p: place(p, decode={"*": "L40S", "nowhere": "L40S"}), "nowhere"),
        (lambda p: replace(p, lanes=(replace(p.lanes[0], share=float("nan")),)), "share"),
        (lambda p: replace(p, lanes=(replace(p.lanes[0], priority=float("nan")),)), "priority"),
        (lambda p: replace(p, lanes=(replace(p.lanes[0], assignment={"decode": {"*": "L40S"}}),)), "'prefill'"),
    ],
)  # fmt: skip
def test_a_plan_for_something_else_is_refused(
    change: Callable[[Plan], Plan], message: str, files: Path, made: Plan
) -> None:
    """Mutation: `check_made_for` returns at once: the extra unit is ignored and another mix's plan is run."""
    with pytest.raises(InputError, match=message):
        api.simulate(files / "tiny.toml", PAIR, plan=change(made))


def place(plan: Plan, **units: Any) -> Plan:
    main = plan.lanes[0]
    return replace(plan, lanes=(replace(main, assignment={**main.assignment, **units}),))


def test_what_changed_since_is_said(
    files: Path, made: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutation: `changed_since` compares the traces only: another price is not said."""
    command = ["simulate", "--mix", str(files / "tiny.toml"), "--cluster", PAIR, "--plan", str(tmp_path / "p.json")]
    rates = []
    for plan, said in ((made, []), (replace(made, trace_hashes=("zz",)), ["traces"]),
                       (replace(made, cluster_hash="zz"), ["prices"])):  # fmt: skip
        write_plan(plan, tmp_path / "p.json")
        assert main([*command, "--json"]) == 0
        streams = capsys.readouterr()
        row = json.loads(streams.out)
        rates.append(row["throughput_per_s"])
        assert len(streams.err.splitlines()) == len(said)
        for word in said:
            assert word in streams.err and "warning" in streams.err
            assert any(word in note for note in row["notes"])
    assert len(set(rates)) == 1
