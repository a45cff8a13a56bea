"""Held out means held out: no group, no GPU and no choice leaks from what is tested into what is fitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs import validate
from tesserasim.costs.boost import BoostParams
from tesserasim.costs.distance import Left, distance, estimate
from tesserasim.costs.fitting import _as_shipped
from tesserasim.costs.learn import DIES, REFERENCE, Problem, problem, sibling_of, with_launches
from tesserasim.costs.shipped import shipped
from tesserasim.costs.tables import GROUPS, SHAPES, Rows, eager_launches, read_tables
from tesserasim.costs.validate import HeldOut, fold_of, hold_out, intervals, metrics, pair_ranks
from tesserasim.errors import InputError

pytestmark = pytest.mark.quick

SAMPLE = Path(__file__).parent / "data" / "costs"
FEW = BoostParams(trees=4, depth=4)


@pytest.fixture(autouse=True)
def quick_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "INNER", FEW)


@pytest.fixture(scope="module")
def decode() -> Rows:
    return read_tables([SAMPLE / "attention_decode.parquet"])["attention_decode"]


@pytest.fixture(scope="module")
def gemm() -> Rows:
    return read_tables([SAMPLE / "gemm.parquet"])["gemm"]


def held(p: Problem, unseen: bool = True) -> HeldOut:
    return hold_out(p, 3, unseen, FEW, FEW)


def test_groups_are_those_of_the_widths_and_folds_split_them(gemm: Rows) -> None:
    """One group is in one fold, in all its GPUs, data types and builds.

    Mutation tried: folds over rows instead of groups -> fails.
    """
    n, k = gemm.shape["n"], gemm.shape["k"]
    widths = list(zip(n[:50].astype(int).tolist(), k[:50].astype(int).tolist(), strict=True))
    assert [gemm.group_names[g] for g in gemm.group[:50]] == widths
    fold = fold_of(len(gemm.group_names))[gemm.group]
    for f in range(5):
        inside = {*zip(n[fold == f], k[fold == f], strict=True)}
        outside = {*zip(n[fold != f], k[fold != f], strict=True)}
        assert inside and not inside & outside
    assert len(set(gemm.dtype)) >= 3 and len(gemm.gpus) == 7
    assert {k: set(GROUPS[k]) <= {w or c for c, w in SHAPES[k].items()} for k in GROUPS} == dict.fromkeys(GROUPS, True)


def test_no_fit_ever_sees_a_row_that_it_is_tested_on(decode: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records the groups and GPUs of every fit beside those that its forest predicts.

    Mutation tried: `train = fold >= 0` in `hold_out` -> fails; `others` with the GPU itself -> fails.
    """
    p = problem(decode, REFERENCE)
    fitted: dict[int, tuple[set[int], set[int]]] = {}
    tested: list[tuple[int, set[int], set[int]]] = []
    by_content = {row.tobytes(): (int(g), int(u)) for row, g, u in zip(p.x, p.rows.group, p.rows.gpu, strict=True)}
    real = validate.fit_pooled.__globals__["fit_forest"]

    def seen(x: np.ndarray) -> tuple[set[int], set[int]]:
        pairs = [by_content[row.tobytes()] for row in x]
        return {g for g, _ in pairs}, {u for _, u in pairs}

    def watched(x: np.ndarray, y: np.ndarray, group: np.ndarray, params: BoostParams) -> object:
        forest = real(x, y, group, params)
        number = len(fitted)
        fitted[number] = seen(x)

        class Watched:
            def predict(self, asked: np.ndarray) -> np.ndarray:
                tested.append((number, *seen(asked)))
                result: np.ndarray = forest.predict(asked)
                return result

        return Watched()

    monkeypatch.setitem(validate.fit_pooled.__globals__, "fit_forest", watched)
    held(p)
    assert len(fitted) > 20 and len(tested) > 20
    pooled = 0
    for number, groups, gpus in tested:
        known_groups, known_gpus = fitted[number]
        assert not groups & known_groups
        if len(known_gpus) > 1:  # fits over several GPUs answer only for GPUs that none of them is
            assert not gpus & known_gpus
            pooled += 1
    assert pooled > 10


def test_times_of_an_unseen_gpu_change_nothing_about_its_prediction(decode: Rows) -> None:
    """Mutation tried: `pairs[...][gpu]` counted in `choose_share` -> the choice moves with the GPU's own times."""
    p = problem(decode, REFERENCE)
    before = held(p)
    for gpu in ("B200", "L40S"):
        mine = p.rows.is_gpu(gpu)
        kin = np.isin(p.rows.gpu, [i for i, g in enumerate(p.rows.gpus) if sibling_of(g, [gpu])])
        after = held(replace(p, y=p.y + 1.5 * mine))
        assert np.array_equal(before.unseen[mine], after.unseen[mine])
        assert not np.array_equal(before.calibrated[mine], after.calibrated[mine])
        both = held(replace(p, y=p.y + 1.5 * (mine | kin)))
        assert np.array_equal(before.alone[mine], both.alone[mine])


def test_times_of_a_held_out_group_change_nothing_about_its_prediction(decode: Rows) -> None:
    p = problem(decode, REFERENCE)
    before = held(p, unseen=False)
    mine = before.fold == 1
    after = held(replace(p, y=np.where(mine, p.y * 3 + 1, p.y)), unseen=False)
    assert np.array_equal(before.calibrated[mine], after.calibrated[mine])
    assert not np.array_equal(before.calibrated[~mine], after.calibrated[~mine])


def test_the_interval_of_a_row_does_not_come_from_its_own_group(decode: Rows) -> None:
    """Mutation tried: `known = mine` in `intervals` -> fails."""
    p = problem(decode, REFERENCE)
    h = held(p, unseen=False)
    low, high = intervals(h, h.calibrated, "groups")
    mine = (h.fold == 0) & p.rows.is_gpu("L40S")
    wild = replace(h, problem=replace(p, y=p.y + 5.0 * mine))
    low2, high2 = intervals(wild, h.calibrated, "groups")
    assert np.array_equal(low[mine], low2[mine]) and np.array_equal(high[mine], high2[mine])
    assert (low < high).all()


def test_the_stated_error_of_an_unseen_gpu_does_not_come_from_its_rows(decode: Rows) -> None:
    """Mutation tried: `o == gpu` counted in `between` -> fails."""
    p = problem(decode, REFERENCE)
    for gpu in ("L40S", "B200"):
        kin = [g for g in p.rows.gpus if g == gpu or sibling_of(g, [gpu])]
        mine = np.isin(p.rows.gpu, [p.rows.gpus.index(g) for g in kin])
        found = []
        for y in (p.y, p.y + 2.0 * mine):
            h = held(replace(p, y=y))
            low, high = intervals(h, h.alone, "dies")
            found.append((low[mine], high[mine]))
            assert (low < high).all()
        assert np.array_equal(found[0][0], found[1][0]) and np.array_equal(found[0][1], found[1][1])


def test_errors_grow_with_distance() -> None:
    """By hand: two dies at distances 0.5 and 1, off by 0.1 and 0.2 with no scatter: 0.2 per unit of distance.

    Student's t with two dies widens it by 1.886 / 1.2816. Mutations tried: distance not squared; GPUs of a die counted
    twice -> fails.
    """
    one = np.full(50, 0.1)
    left = [Left(0.5, one, "a"), Left(0.5, -one, "a"), Left(1.0, 2.0 * one, "b")]
    found = estimate(left, [0.03])
    assert (found.systematic, found.site, found.scatter, found.dies) == (0.2, 0.0, 0.03, 2)
    systematic, site = found.errors(0.7, False)
    assert systematic == pytest.approx(0.2 * 0.7 * 1.886 / 1.2816, rel=1e-3) and site == pytest.approx(0.03)
    beside, _ = found.errors(0.7, True)
    assert beside == pytest.approx(1.886 / 1.2816 * (0.12**2 / 2 + 0.14**2) ** 0.5, rel=1e-3)
    assert estimate([], []).systematic >= 0.5
    near, far = (distance(find_gpu(g), find_gpu("H200-SXM")) for g in ("H100-SXM", "L40S"))
    assert distance(find_gpu("B200"), find_gpu("B200")) == 0 < near < 0.2 < far


def test_launches_are_seen_where_the_host_sets_the_pace(gemm: Rows) -> None:
    """A GPU's own figure never counts, its sibling's does, and for block-scaled 8-bit operands alone."""
    times = {"H200-SXM": 10.0, "B200": 20.0, "B300-SXM": 23.0}
    rows = [
        {"kernel_kind": "gemm", "gpu": g, "framework": "vllm", "version": "0.24.0", "dtype": "fp8_block",
         "kernel_source": "x", "m": m, "n": 128, "k": 128, "time_us": t * (1.0 if m <= 30 else 50.0)}
        for g, t in times.items() for m in range(1, 41)
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    # Beyond the least time of the H200 the ratio is another, and must not count.
    frame.loc[(frame["m"] > 30) & (frame["gpu"] != "H200-SXM"), "time_us"] *= 9.0
    found = eager_launches(frame)
    assert found == {"H200-SXM": 1.0, "B200": 2.0, "B300": 2.3}
    shape = {c: np.full(2, 64.0) for c in ("m", "n", "k")} | {"a_bits": np.array([8.0, 16.0]), "block": np.ones(2)}
    assert with_launches("gemm", shape, found, ["B200"])["launches"].tolist() == [2.3, 1.0]
    assert "launches" not in with_launches("gemm", shape, found, ["L40S"])
    both = with_launches("gemm", {**shape, "a_bits": np.full(2, 8.0)}, found, ["L40S", "B300"], np.array([0, 1]))
    assert both["launches"].tolist() == [1.0, 2.0]
    assert gemm.launches["B300"] > 1.5  # as measured
    p = problem(gemm, REFERENCE)
    b200 = p.rows.is_gpu("B200") & (p.rows.dtype == "fp8_block")
    assert b200.any() and (p.lone[b200] < 0).all() and not p.lone[~p.rows.is_gpu("B200") & ~p.rows.is_gpu("B300")].any()


def test_shipped_parameters_ignore_what_a_table_says_of_launches(gemm: Rows) -> None:
    """Mutation tried: `problem(rows, ...)` in `_as_shipped` -> fails."""
    model, other = shipped("gemm", REFERENCE), replace(gemm, launches={"B300": 9.0, "H200-SXM": 1.0})
    assert _as_shipped(gemm, model) == _as_shipped(other, model)


def test_ranks_of_pairs(decode: Rows) -> None:
    """Against scipy on a join by hand; a pair whose ratio is constant is left out."""
    h = held(problem(decode, REFERENCE), unseen=False)
    rows = {(r["gpu"], r["other"]): r for r in pair_ranks(h)}
    r, p = rows["A100-80GB-SXM", "L40S"], h.problem
    frame = pd.DataFrame({**p.rows.shape, "dtype": p.rows.dtype, "build": p.rows.build, "gpu": p.rows.gpu})
    frame["t"], frame["q"] = p.rows.time_us, p.base * np.exp(h.calibrated)
    parts = [frame[p.rows.is_gpu(g)].drop(columns="gpu") for g in ("A100-80GB-SXM", "L40S")]
    both = parts[0].merge(parts[1], on=[*p.rows.shape, "dtype", "build"])
    wanted = spearmanr(both["t_x"] / both["t_y"], both["q_x"] / both["q_y"]).statistic
    assert r["n"] == len(both) and r["spearman"] == pytest.approx(wanted)


def test_the_reference_is_the_row_of_the_same_build_and_shape(decode: Rows) -> None:
    """Against a plain search in the table. Mutation tried: join without `build` -> fails for the B300."""
    frame = pd.read_parquet(SAMPLE / "attention_decode.parquet")
    for gpu, source in (("L40S", "L40S"), ("B300", "B300-SXM")):
        rows = decode.take(decode.is_gpu(gpu) & np.isfinite(decode.reference_us))
        assert len(rows) > 10
        version = {"L40S": "0.5.10", "B300": "0.24.0"}[gpu]
        for i in range(0, len(rows), 7):
            same = frame["version"] == version
            for column in ("batch", "seq_kv", "heads", "kv_heads", "head_dim"):
                same &= frame[column] == rows.shape[column][i]
            same &= frame["window_size"] == rows.shape["window"][i]
            same &= frame["kv_cache_dtype"].astype(str) == str(rows.dtype[i]).split("/")[1]
            assert frame[same & (frame["gpu"] == source)]["time_us"].median() == pytest.approx(rows.time_us[i])
            assert frame[same & (frame["gpu"] == "H200-SXM-141GB")]["time_us"].median() == pytest.approx(
                rows.reference_us[i]
            )


def test_metrics_by_hand() -> None:
    one = np.ones(4)
    rows = Rows(
        "elementwise", ("L40S",), np.zeros(4, dtype=np.int64), np.array(["b"] * 4), np.array(["d"] * 4), {"m": one},
        np.array([1.0, 2.0, 4.0, 8.0]), np.zeros(4, dtype=np.int64), ((1,),), one,
    )  # fmt: skip
    predicted = np.array([1.1, 2.0, 3.0, 8.8])
    (m,) = metrics(rows, predicted, predicted * 0.95, predicted * 1.05, REFERENCE)
    assert (m["kind"], m["gpu"], m["n"]) == ("elementwise", "L40S", 4)
    assert m["mape"] == pytest.approx((0.1 + 0 + 0.25 + 0.1) / 4)
    assert m["median_ape"] == pytest.approx(0.1)
    assert m["weighted_ape"] == pytest.approx((0.1 + 0 + 1 + 0.8) / 15)
    assert m["coverage80"] == 0.25 and m["width80"] == pytest.approx(0.1)


def test_siblings_share_a_die() -> None:
    assert sibling_of("B200", ["A100-80GB-SXM", "B300"]) == "B300"
    assert sibling_of("A100-80GB-PCIe", ["A100-80GB-SXM"]) == "A100-80GB-SXM"
    assert sibling_of("L40S", ["RTX-PRO-6000", "L40S"]) == ""
    names = [g for die in DIES for g in die]
    assert len(set(names)) == len(names)


def test_what_is_no_kernel_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pd.DataFrame({"a": [1]}).to_parquet(path)
    with pytest.raises(InputError, match="no column 'kernel_kind'"):
        read_tables([path])
    path.write_bytes(b"PAR?")
    with pytest.raises(InputError, match="not a Parquet table"):
        read_tables([path])
    pd.DataFrame({"kernel_kind": ["gemm"], "gpu": ["L40S"], "time_us": [1.0], "framework": ["a"], "version": ["b"]}
                 ).to_parquet(path)  # fmt: skip
    with pytest.raises(InputError, match="need a column"):
        read_tables([path])
