"""The small relaxation and what is rounded from it, against all placements."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from planner_cases import chain, cluster

from tesserasim.metrics.memory import PlacedLane, overflow
from tesserasim.metrics.predict import ClosedForm
from tesserasim.planner.milp import Program, contract
from tesserasim.planner.place import PROVEN, ROUNDED, start
from tesserasim.planner.relax import Relaxation, pools
from tesserasim.planner.rounding import Climb, rounded
from tesserasim.planner.seeds import respects_groups
from tesserasim.workload import Workload

pytestmark = pytest.mark.quick


def instance(seed: int, names: list[str] | None = None) -> tuple[Workload, int]:
    """A chain of up to 7 sites on 2 or 3 GPUs, some of them equal, some short of memory, some links slow or missing."""
    rng = random.Random(seed)
    names = names or rng.choice([["A", "B"], ["A", "A"], ["A", "B", "B"], ["A", "A", "A"], ["A", "B", "C"]])
    n = rng.randint(2, 7 if len(names) == 2 else 5)
    speed = {name: [float(rng.randint(1, 50)) for _ in range(n)] for name in sorted(set(names))}
    times = [[speed[name][i] for name in names] for i in range(n)]
    gbps, memory = rng.choice([8.0, 80.0, 800.0]), rng.choice([80.0, 6.0, 3.0])
    where = cluster(names, gbps=gbps, latency_us=0.001, memory_gb=memory)
    if len(names) == 3 and rng.random() < 0.3:
        where = replace(where, links=where.links[:-1])
    groups = [rng.randint(-1, 1) for _ in range(n)] if rng.random() < 0.5 else None
    nbytes = [rng.choice([0.0, 10.0, 100.0, 1000.0]) for _ in range(n - 1)]
    w = chain(times, where, nbytes, batch=2, gaps=0.5, weight_bytes=10**9, state_bytes=10**8, groups=groups)
    return w, rng.randint(1, 4)


def periods(w: Workload, depth: int) -> list[float]:
    """Of every placement that may be a plan, by listing them."""
    form = ClosedForm(w)
    found = []
    for choice in product(range(form.n_devices), repeat=form.n_sites):
        x = np.array(choice)
        if respects_groups(w, x) and overflow([PlacedLane(w, x, depth)]) is None:
            found.append(form.predict(x, depth).period_ns)
    return found


@pytest.mark.parametrize("seed", range(120))
def test_the_bound_is_below_every_placement_and_the_plan_is_one_of_them(seed: int) -> None:
    """Mutations that fail here: count a pool's load once; let links of a pool carry one T in all; y from the writer."""
    w, depth = instance(seed)
    every = periods(w, depth)
    begun = start(ClosedForm(w), depth)
    begun.tighten()
    best = min(every, default=np.inf)
    assert begun.bound_ns <= best * (1 + 1e-9)
    if begun.best is not None:
        p, x, _ = begun.best
        assert respects_groups(w, x) and overflow([PlacedLane(w, x, depth)]) is None
        assert min(abs(p.period_ns - e) for e in every) <= 1e-9 * p.period_ns
        assert begun.bound_ns <= p.period_ns


def test_equal_gpus_with_equal_links_are_one_pool() -> None:
    w = chain([[3, 3, 5], [2, 2, 4]], cluster(["A", "A", "B"]))
    assert pools(ClosedForm(w)).tolist() == [0, 0, 1]
    links = tuple(replace(x, gbps=25.0) if {x.a, x.b} == {"A#1", "B"} else x for x in w.cluster.links)
    apart = replace(w, cluster=replace(w.cluster, links=links))
    assert pools(ClosedForm(apart)).tolist() == [0, 1, 2]


def test_a_pool_of_two_may_take_twice_the_load() -> None:
    """Four sites of 10 on two equal GPUs, nothing to send: 20 each."""
    form = ClosedForm(chain([[10, 10]] * 4, cluster(["A", "A"])))
    relaxed = Relaxation(form, 64, contract(form, 64.0, np.inf), 1.0).solve()
    assert relaxed.bound_ns == pytest.approx(20, rel=1e-5)


@pytest.mark.parametrize("seed", range(40))
def test_as_tight_as_the_whole_programs_relaxation_on_two_unlike_gpus(seed: int) -> None:
    w, depth = instance(seed, ["A", "B"])
    form = ClosedForm(w)
    block = contract(form, form.effective_depth(depth), np.inf)
    small = Relaxation(form, depth, block, 1.0).solve()
    whole = Program(form, depth, block, 1.0).relax()
    assert small.bound_ns == pytest.approx(whole.bound_ns, rel=1e-5) or not np.isfinite(whole.bound_ns)


def test_shares_are_cut_at_common_thresholds() -> None:
    form = ClosedForm(chain([[1, 1]] * 4, cluster(["A", "B"])))
    share = np.array([[0.9, 0.1], [0.6, 0.4], [0.6, 0.4], [0.1, 0.9]])
    found = {tuple(x.tolist()) for x in rounded(share, pools(form), form, np.arange(4))}
    assert {(0, 0, 0, 1), (0, 1, 1, 1), (0, 0, 0, 0), (1, 1, 1, 1)} <= found
    assert all(x[1] == x[2] for x in found)  # equal shares stay together


def test_a_climb_balances_two_gpus_and_never_gets_worse() -> None:
    form = ClosedForm(chain([[10, 10]] * 64, cluster(["A", "B"], gbps=80_000.0, latency_us=0.0), 1.0))
    climb = Climb(form, 16, np.arange(64), lambda x: True)
    x = np.array([0] * 50 + [1] * 14)
    begun = climb.price(x)
    y, period = climb.run(x, begun, 500)
    assert begun >= 500 and period == climb.price(y) == pytest.approx(320, rel=0.04)
    assert climb.run(y, period, 500)[1] == period


def test_plans_near_the_relaxation_beat_the_seeds() -> None:
    """Every other site is quick on the other GPU: no seed knows that."""
    times = [[1, 9], [9, 1]] * 20
    w = chain(times, cluster(["A", "B"], gbps=8_000.0, latency_us=0.0), 1.0)
    begun = start(ClosedForm(w), 8)
    assert begun.best is not None
    before = begun.best[0].period_ns
    begun.tighten()
    assert begun.best[2] == ROUNDED and begun.best[0].period_ns < before / 2
    assert begun.seed is not None and begun.seed.gap < 0.05 and begun.seed.gap > -PROVEN
