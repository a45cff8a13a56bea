"""What a program calls, on tiny mixes; and that the command line's JSON says the same and fits its schemas."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sweep_cases import write_tiny_sweep
from test_cli import check

import tesserasim
from tesserasim import api
from tesserasim.cli import main
from tesserasim.cluster.parse import parse_cluster
from tesserasim.errors import InputError
from tesserasim.sweep.executor import Done, Task, Work, run_local

PAIR = "A100-80GB-PCIe+L40S@25Gbps"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_sweep(directory)
    return directory


def printed(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == code
    return json.loads(capsys.readouterr().out)


def test_compare_is_a_table_best_first(files: Path) -> None:
    frame = tesserasim.compare(files / "tiny.toml", PAIR, batch=(1, 8), depth=(1, 2))
    assert isinstance(frame, pd.DataFrame)
    assert set(frame["policy"]) == {"single", "replicas-static", "replicas-lo", "pd", "af", "kernel"}
    assert frame["throughput_per_s"].is_monotonic_decreasing
    assert frame["p_win"].sum() == pytest.approx(1.0)
    assert (frame["throughput_per_s"] <= frame["bound_per_s"] * (1 + 1e-9)).all()
    assert "SYNTHETIC" in frame.attrs["verdict"]


def test_objects_and_text_mean_the_same(files: Path) -> None:
    options: dict[str, Any] = {"policies": ["single"], "depth": (1,), "input_tokens": 64, "output_tokens": 3}
    mix = api.load_mix(files / "tiny.toml")
    by_text = api.compare(str(files / "tiny.toml"), PAIR, **options)
    assert by_text.equals(api.compare(mix, parse_cluster(PAIR), **options))
    with pytest.raises(InputError, match="token lengths apply"):
        api.compare(files / "pixels.toml", PAIR, **options)


def test_a_policy_that_does_not_apply_is_an_answer(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = printed(capsys, "simulate", "--mix", files / "pixels.toml", "--cluster", PAIR, "--policy", "pd",
                  "--batch", 1, "--json")  # fmt: skip
    check(row, "simulate")
    assert row["status"] == "not applicable"
    assert row["reason"]
    assert main(["plan", "--mix", str(files / "pixels.toml"), "--cluster", PAIR, "--policy", "pd"]) == 2
    assert "pd does not apply" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["single", "replicas-static", "replicas-lo", "pd", "af", "kernel"])
def test_a_plan_simulates_as_its_policy_did(
    policy: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutation: `_options` ignores batch and depth: the rows name other points."""
    case = ("--mix", files / "tiny.toml", "--cluster", PAIR, "--json")
    own = printed(capsys, "simulate", *case, "--policy", policy, "--batch", 4, "--depth", 2)
    check(own, "simulate")
    assert (own["batch"], own["depth"]) == (4, 2)
    plan = printed(capsys, "plan", *case, "--policy", policy, "--batch", 4, "--depth", 2, "--out", tmp_path / "p.json")
    check(plan, "plan")
    sites = {u: {s for t in ts for s in t.sites} for u, ts in api.load_mix(files / "tiny.toml").traces.items()}
    assert {u: set(a) for u, a in plan["assignment"].items()} == sites
    again = printed(capsys, "simulate", *case, "--plan", tmp_path / "p.json", "--check")
    check(again, "simulate")
    assert again["throughput_per_s"] == pytest.approx(own["throughput_per_s"], rel=1e-12)


def test_the_run_can_be_written_for_perfetto(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = ("simulate", "--mix", files / "tiny.toml", "--cluster", PAIR, "--policy", "af", "--depth", 2)
    printed(capsys, *case, "--timeline", tmp_path / "run.json", "--json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert {e["cat"] for e in events if e.get("ph") == "X"} >= {"kernel"}
    assert main([*map(str, case), "--timeline", str(tmp_path / "none" / "run.json")]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_pick_is_the_fastest(files: Path) -> None:
    best = api.plan(files / "tiny.toml", PAIR, depth=2)
    frame = api.compare(files / "tiny.toml", PAIR, depth=(2,))
    assert frame.iloc[0]["policy"] == best.policy


def test_the_function_plan_is_not_hidden_by_the_module() -> None:
    """Mutation: the module plans.py called plan.py again: in the second order `tesserasim.plan` is the module."""
    first = "import tesserasim as t; t.compare; import tesserasim.evaluate; print(callable(t.plan))"
    second = "import tesserasim.evaluate; import tesserasim as t; print(callable(t.plan))"
    for code in (first, second):
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ended.stdout.split() == ["True"]


def test_sweep_prints_rows_and_keeps_files(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    document = printed(capsys, "sweep", files / "tiny-sweep.toml", "--quick", "--out", out, "--jobs", 1, "--json")
    check(document, "sweep")
    assert (document["computed"], document["reused"], document["failed"]) == (24, 0, 0)
    results = sorted((out / "experiments").glob("*.json"))
    assert len(results) == 24
    for path in results:
        result = json.loads(path.read_text())
        check(result, "experiment")
        if result["result"]["row"]["status"] == "ok":
            assert len(result["result"]["draws"]) >= 200
    table, lines = pd.read_parquet(out / "summary.parquet"), pd.read_csv(out / "summary.csv")
    assert len(table) == len(lines) == len(document["rows"]) == 24
    assert list(table.columns) == list(lines.columns)
    for case, rows in table[table["status"] == "ok"].groupby(["mix", "cluster", "link", "table"]):
        assert rows["p_win"].sum() == pytest.approx(1.0), case
    assert len(document["verdicts"]) == 2
    assert all("SYNTHETIC" in line for line in document["verdicts"])


def test_a_failed_experiment_leaves_the_others(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: `_collect` stores a failed experiment like a finished one: the second run keeps it."""

    def all_but_one(tasks: Sequence[Task], work: Work, jobs: int) -> Iterator[Done]:
        broken = next(t for t in tasks if t.payload.experiment.policy == "kernel")
        yield Done(broken.key, error="worker process died 2 times (signal SIGKILL)")
        yield from run_local([t for t in tasks if t is not broken], work, jobs)

    command = ("sweep", files / "tiny-sweep.toml", "--quick", "--out", tmp_path, "--jobs", 1, "--json")
    monkeypatch.setattr("tesserasim.sweep.run.executor", lambda name: all_but_one)
    document = printed(capsys, *command, code=1)
    check(document, "sweep")
    assert (document["computed"], document["failed"]) == (23, 1)
    assert "SIGKILL" in document["failures"][0]["error"]
    failed = [row for row in document["rows"] if row["status"] == "failed"]
    assert [row["policy"] for row in failed] == ["kernel"]
    assert "failed: worker process died" in (tmp_path / "verdicts.txt").read_text()
    monkeypatch.undo()
    document = printed(capsys, *command)
    assert (document["computed"], document["reused"], document["failed"]) == (1, 23, 0)


def test_what_lies_beyond_the_captured_range_is_said(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = ("simulate", "--mix", files / "tiny.toml", "--cluster", "L40S", "--policy", "single", "--json")
    far = ("--input-tokens", 900, "--batch", 1, "--depth", 1)
    assert main([str(word) for word in (*case, *far)]) == 2
    assert "captured" in capsys.readouterr().err
    allowed = printed(capsys, *case, *far, "--allow-extrapolation")
    assert allowed["status"] == "ok"
    assert allowed["extrapolated"]


BAD_ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"mix {v!r}": ("compare", {"mix": v}) for v in (5, None, b"x", ["tiny"])},
    **{f"cluster {v!r}": ("compare", {"cluster": v}) for v in (5, None, "", ["L40S"])},
    **{f"policies {v!r}": ("compare", {"policies": v}) for v in ([5], "single", [], 5, [None], [""])},
    **{f"prices {v!r}": ("compare", {"prices": v}) for v in (5, None)},
    **{f"{k} {v!r:.20}": ("compare", {k: v})
       for k in ("input_tokens", "output_tokens", "in_flight", "max_seqs", "batch", "depth")
       for v in (1.5, "8", True, 0, -1, 10**400, float("nan"))},
    **{f"{k} {v!r}": ("compare", {k: v}) for k in ("in_flight", "max_seqs") for v in ((8,), [8, 9])},
    **{f"seed {v!r:.20}": ("compare", {"seed": v}) for v in ("x", 1.5, None, True, -1, 2**63)},
    **{f"engine {v!r}": ("compare", {"engine": v}) for v in ("slow", 5, None)},
    "allow_extrapolation": ("compare", {"allow_extrapolation": "no"}),
    "check": ("simulate", {"policy": "single", "check": 1}),
    "policy": ("simulate", {"policy": 5}),
    "plan": ("simulate", {"plan": 5}),
    "timeline": ("simulate", {"policy": "single", "timeline": 5}),
    "policy of a plan": ("plan", {"policy": 5}),
    "spec": ("sweep", {"spec": 5}),
    "out": ("sweep", {"out": 5}),
    "jobs": ("sweep", {"jobs": 0}),
    "executor": ("sweep", {"executor": None}),
    "quick": ("sweep", {"quick": "yes"}),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_an_argument_of_a_wrong_type_is_named(case: str, files: Path) -> None:
    """Mutation: `whole` takes int(value): 1.5 tokens are one. Mutation: `names` takes a text apart."""
    function, wrong = BAD_ARGUMENTS[case]
    right: dict[str, Any] = {"mix": files / "tiny.toml", "cluster": PAIR}
    if function == "sweep":
        right = {"spec": files / "tiny-sweep.toml"}
    with pytest.raises(InputError) as error:
        getattr(api, function)(**{**right, **wrong})
    assert str(error.value).startswith(list(wrong)[-1])
    assert len(str(error.value)) < 120


def test_numbers_of_numpy_are_numbers(files: Path) -> None:
    """Mutation: `whole` asks for int: numpy's are refused."""
    own = api.simulate(files / "tiny.toml", PAIR, "single", batch=4, depth=2, output_tokens=3)
    numbers: dict[str, Any] = {"batch": np.int64(4), "depth": np.int32(2), "output_tokens": np.int64(3)}
    other = api.simulate(files / "tiny.toml", PAIR, "single", **numbers)
    assert own == other


def test_traces_without_accesses_say_so(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: `without_accesses` looks at the first unit only, or is left out of the row."""
    from test_cli import PROFILE

    for mix, said in ((files / "tiny.toml", False), (tmp_path / "m.toml", True)):
        if said:
            (tmp_path / "p.json").write_text(json.dumps(PROFILE))
            assert main(["import", str(tmp_path / "p.json"), "--out", str(tmp_path / "t.parquet")]) == 0
            assert main(["mix", "new", str(tmp_path / "t.parquet"), "--out", str(mix)]) == 0
        row = api.simulate(mix, PAIR, "single", batch=1)
        assert any("nothing can be split" in note for note in row["notes"]) == said
        capsys.readouterr()
        assert main(["simulate", "--mix", str(mix), "--cluster", PAIR, "--policy", "single", "--batch", "1"]) == 0
        assert ("memory is not counted" in capsys.readouterr().out) == said


def test_kernel_placement_on_many_gpus_is_bounded_without_an_integer_program(files: Path) -> None:
    """64 equal GPUs are one pool of the relaxation, whose bound proves the plan.

    Mutation: ALL_PAIRS = 80: the pairs of 64 GPUs take minutes.
    """
    row = api.simulate(files / "tiny.toml", "64xL40S@25Gbps", "kernel", batch=1, depth=1)
    assert row["plan_status"] == "optimal"
    assert any("no integer program solved" in note for note in row["notes"])
