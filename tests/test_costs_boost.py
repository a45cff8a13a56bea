"""The learner: exact in integers whatever the order of rows, right on groups it has not seen, the same everywhere."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from tesserasim.costs.boost import BINS, UNIT, BoostParams, borders, fit_forest
from tesserasim.costs.shipped import forest_document, forest_from

pytestmark = pytest.mark.quick

REPO = Path(__file__).resolve().parents[1]
SMALL = BoostParams(trees=60, rate=0.2, shrink=2.0, features=1.0)


def cells(n: int = 4000, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, targets with two steps and an interaction, 40 groups."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-4, 4, (n, 3))
    y = 0.4 * (x[:, 0] > 1) - 0.3 * (x[:, 1] > -1) * (x[:, 2] > 0)
    return x, y, rng.integers(0, 40, n)


def test_steps_are_learnt_and_hold_on_other_groups() -> None:
    """Mutation tried: leaves of the other sign (`-total`) -> fails."""
    x, y, group = cells()
    known = group < 30
    forest = fit_forest(x[known], y[known], group[known], SMALL)
    assert np.abs(forest.predict(x[~known]) - y[~known]).mean() < 0.02 < np.abs(y[~known] - y.mean()).mean() / 5


def test_the_order_of_rows_does_not_matter() -> None:
    """Sums of integers: mutation tried, float residuals without `rint` -> fails."""
    x, y, group = cells()
    y = y + np.random.default_rng(1).normal(0, 0.1, len(y))
    order = np.random.default_rng(2).permutation(len(y))
    a = fit_forest(x, y, group, SMALL)
    b = fit_forest(x[order], y[order], group[order], SMALL)
    assert forest_document(a) == forest_document(b)


def test_a_tree_is_comparisons_and_one_look_up() -> None:
    """All trees at once give what walking each tree row by row gives; and the file gives the forest back."""
    x, y, group = cells(700)
    forest = forest_from(json.loads(json.dumps(forest_document(fit_forest(x, y, group, SMALL)))))
    slow = np.full(len(x), float(forest.base))
    for features, thresholds, leaves in zip(forest.feature, forest.threshold, forest.leaves, strict=True):
        for row in range(len(x)):
            leaf = 0
            for f, t in zip(features, thresholds, strict=True):
                above = int(np.sum(forest.edges[f] < x[row, f])) > t
                leaf = 2 * leaf + above
            slow[row] += leaves[leaf]
    assert np.array_equal(forest.predict(x), slow * UNIT)


def test_borders_are_exact_in_single_precision_and_few() -> None:
    edges = borders(np.random.default_rng(0).normal(0, 9, (5000, 2)))
    for e in edges:
        assert len(e) < BINS and (np.diff(e) > 0).all() and np.array_equal(e, e.astype(np.float32))


def test_outliers_do_not_lead() -> None:
    """Mutation tried: no clip -> the outlier's share of the mean remains and the test fails."""
    x = np.zeros((1000, 1))
    y = np.where(np.arange(1000) < 30, 8.0, 0.0)
    forest = fit_forest(x + np.arange(1000)[:, None] % 2, y, np.arange(1000) % 20, SMALL)
    assert np.abs(forest.predict(x)).max() < 0.02


def test_a_feature_without_values_is_never_asked() -> None:
    x, y, group = cells(500)
    forest = fit_forest(np.column_stack([np.ones(500), x]), y, group, SMALL)
    assert not (forest.feature == 0).any()
    empty = fit_forest(np.ones((10, 2)), np.full(10, 0.5), np.zeros(10, dtype=np.int64), SMALL)
    assert empty.predict(np.ones((3, 2))) == pytest.approx(0.5, abs=UNIT)


def test_the_committed_sample_gives_its_parameters_bit_for_bit() -> None:
    """1 % of the tables, refitted with the parameters that ship. Mutation tried: `seed=1` in PER_GPU -> fails."""
    path = REPO / "experiments" / "costs" / "sample.py"
    spec = importlib.util.spec_from_file_location("costs_sample", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = REPO / "tests" / "data" / "costs"
    expected = json.loads((folder / "forests.json").read_text())
    assert len(expected) == 5 and len(set(expected.values())) == 5
    assert module.forest_hashes([folder / f"{n}.parquet" for n in module.TABLES]) == expected
