"""Minimum cuts between two GPUs: against all placements."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from planner_cases import GB, chain, cluster

from tesserasim.metrics.memory import PlacedLane, overflow
from tesserasim.metrics.predict import ClosedForm
from tesserasim.planner.cuts import TwoWay, cutting_planes
from tesserasim.workload import Flow, Workload

pytestmark = pytest.mark.quick


def instance(seed: int) -> tuple[Workload, int]:
    """A chain of up to 8 sites with values that several sites read, asymmetric times, memory that may bind."""
    rng = random.Random(seed)
    n = rng.randint(2, 8)
    times = [[float(rng.randint(1, 50)), float(rng.randint(1, 50))] for _ in range(n)]
    where = cluster(
        ["A", "B"], gbps=rng.choice([8.0, 80.0, 800.0]), latency_us=0.002,
        memory_gb=[rng.choice([3.0, 5.0, 80.0]), rng.choice([3.0, 5.0, 80.0])],
    )  # fmt: skip
    nbytes = [rng.choice([0.0, 10.0, 100.0]) for _ in range(n - 1)]
    w = chain(times, where, nbytes, batch=2, gaps=0.5, weight_bytes=GB, state_bytes=GB // 10)
    readers = [tuple(sorted(rng.sample(range(i + 1, n), min(2, n - i - 1)))) for i in range(n - 1)]
    wide = tuple(Flow(i, found, 50.0, 1.0, f"wide{i}") for i, found in enumerate(readers))
    shared = tuple(replace(r, sites=tuple(sorted({*r.sites, 0}))) if rng.random() < 0.3 else r for r in w.residents)
    return replace(w, flows=(*w.flows, *wide), residents=shared), rng.randint(1, 4)


@pytest.mark.parametrize("seed", range(60))
def test_a_cut_is_the_least_weighted_sum_of_all_placements(seed: int) -> None:
    """Mutations that fail here: pay a value once per reader; a resident once per site; one direction for both."""
    w, depth = instance(seed)
    form, rng = ClosedForm(w), np.random.default_rng(seed)
    two = TwoWay(form, depth, np.arange(form.n_sites))
    every = [np.array(x) for x in product((0, 1), repeat=form.n_sites)]
    for _ in range(4):
        weight = np.concatenate([rng.dirichlet(np.ones(5)), rng.uniform(0, 200, 2) * (not two.room.always)])
        value, x = two.cut(weight)
        sums = np.array([float(weight @ two.sums(y)) for y in every])  # launch cost and workspace are 0 here
        assert value <= sums.min() * (1 + 1e-9) + 1e-9
        assert value == pytest.approx(sums.min(), rel=1e-3, abs=1e-3)
        assert float(weight @ two.sums(x)) == pytest.approx(sums.min(), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_is_below_every_placement_that_fits(seed: int) -> None:
    w, depth = instance(seed)
    form = ClosedForm(w)
    two = TwoWay(form, depth, np.arange(form.n_sites))
    found = cutting_planes(two, [])
    fitting = [
        float(two.sums(x)[:5].max()) for x in map(np.array, product((0, 1), repeat=form.n_sites))
        if overflow([PlacedLane(w, x, depth)]) is None
    ]  # fmt: skip
    assert found.bound_ns <= min(fitting, default=np.inf) * (1 + 1e-9)
    assert found.share.shape == (form.n_sites, 2) and np.allclose(found.share.sum(axis=1), 1)


def test_the_bound_of_many_small_sites_is_nearly_reached() -> None:
    """200 equal sites, nothing to send: half on each GPU, and the bound says so."""
    form = ClosedForm(chain([[10.0, 10.0]] * 200, cluster(["A", "B"], gbps=80_000.0, latency_us=0.0)))
    found = cutting_planes(TwoWay(form, 64, np.arange(200)), [np.zeros(200, dtype=np.int64)])
    assert found.bound_ns == pytest.approx(1000, rel=1e-3)


def test_memory_raises_the_bound() -> None:
    """All would like GPU 0, which holds half: the rest runs ten times slower on the other."""
    times = [[1.0, 10.0]] * 10
    free = ClosedForm(chain(times, cluster(["A", "B"], gbps=80_000.0, latency_us=0.0), weight_bytes=GB))
    small = cluster(["A", "B"], gbps=80_000.0, latency_us=0.0, memory_gb=[5 / 0.9, 80.0])
    bound = ClosedForm(chain(times, small, weight_bytes=GB))
    one, two = (cutting_planes(TwoWay(f, 1, np.arange(10)), []).bound_ns for f in (free, bound))
    assert one == pytest.approx(10, rel=1e-3) and two == pytest.approx(5 * 1 + 5 * 10, rel=1e-3)
