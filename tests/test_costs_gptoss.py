"""The check against published kernel pairs: what counts as right, what weighs how much, what is assumed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kineto_cases import SHARED

pytestmark = pytest.mark.quick

REPO = Path(__file__).resolve().parents[1]
PAIRS = SHARED / "data" / "paper" / "gptoss20b_kernel_pairs.csv"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = REPO / "experiments" / "validation" / "costs_gptoss_pairs.py"
    spec = importlib.util.spec_from_file_location("costs_gptoss_pairs", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def assumed(script: ModuleType) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(script.SHAPES.read_text(encoding="utf-8"))
    return document


def test_sides_weigh_by_time_and_experts_stand_apart(script: ModuleType) -> None:
    """By hand. Mutation tried: rows counted alike, experts counted, near ones counted -> fails each."""
    rows = [
        {"weight_us": 60.0, "ratio": 1.5, "predicted": 1.2, "kind": "gemm"},  # right
        {"weight_us": 20.0, "ratio": 0.5, "predicted": 1.2, "kind": "gemm"},  # wrong
        {"weight_us": 20.0, "ratio": 0.5, "predicted": None},  # unknown: wrong
        {"weight_us": 50.0, "ratio": 1.05, "predicted": 0.9, "kind": "norm"},  # no side
        {"weight_us": 50.0, "ratio": 2.0, "predicted": 0.5, "kind": "moe"},
    ]
    found = script.summary(rows)
    assert found["right_share"] == pytest.approx(0.6)
    assert found["sided_share_of_non_moe"] == pytest.approx(100 / 150)
    assert found["moe_share"] == pytest.approx(0.25) and found["unknown_share"] == pytest.approx(0.1)
    assert (found["right_rows"], found["sided_rows"]) == (1, 3)


def test_every_assumed_shape_has_reasons_and_times(script: ModuleType, assumed: dict[str, Any]) -> None:
    """Work by hand for the language model's head: its weights over the bandwidths; mean of both windows."""
    for row in assumed["rows"]:
        us, source, _ = script.predict_us(row, assumed["model"], "L40S")
        assert us > 0.5 and source and row["why"]
    (head,) = (r for r in assumed["rows"] if r["kernel"].startswith("lm_head"))
    for gpu, least_us in (("A100-80GB-PCIe", 2 * 201088 * 2880 / 1.935e6), ("L40S", 2 * 201088 * 2880 / 0.864e6)):
        us, _, parts = script.predict_us(head, assumed["model"], gpu)
        assert least_us < us < 1.6 * least_us and parts["memory"] > parts["tensor"]
    (attention,) = (r for r in assumed["rows"] if r["kernel"].endswith("3d"))
    both = [script.predict_us({**attention, "windows": [w]}, assumed["model"], "L40S")[0] for w in (0, 128)]
    mean = script.predict_us(attention, assumed["model"], "L40S")[0]
    assert mean == pytest.approx(sum(both) / 2) and both[1] < both[0]


def test_a_pair_without_a_shape_is_unknown(script: ModuleType, assumed: dict[str, Any]) -> None:
    pair = {
        "phase": "decode", "block": "ffn", "launches": "10", "a100_us_median": "2.0",
        "ratio_l40s_over_a100_median": "0.5", "kernel_a100": "mystery", "kernel_l40s": "same",
    }  # fmt: skip
    (row,) = script.compare([pair], assumed)
    assert row["predicted"] is None and row["weight_us"] == 20.0 and "unknown shape" in script.words(row)


@pytest.mark.skipif(not PAIRS.is_file(), reason="the published pairs are not here")
def test_the_published_pairs(script: ModuleType, assumed: dict[str, Any]) -> None:
    """Bars: the right side for 90 % of the time that is not the experts', at most 20 % of the time unknown."""
    pairs = script.read_pairs(PAIRS)
    assert {(p["phase"], p["kernel_a100"]) for p in pairs} == {(r["phase"], r["kernel"]) for r in assumed["rows"]}
    found = script.summary(script.compare(pairs, assumed))
    assert found["right_share"] >= 0.9 and found["unknown_share"] <= 0.2
