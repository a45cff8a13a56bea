"""The planner against brute force, its bound, its seeds and its limits."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import chain, cluster, llama

from tesserasim.errors import DoesNotFitError
from tesserasim.metrics.memory import PlacedLane, overflow
from tesserasim.metrics.predict import ClosedForm
from tesserasim.planner.milp import Program, Solution, contract
from tesserasim.planner.place import finish, ideal_ns, place, start
from tesserasim.planner.seeds import layer_of, respects_groups, seeds
from tesserasim.workload import Workload

pytestmark = pytest.mark.quick

PAIR = [(780.0, 4.3), (180.0, 0.75)]


def brute_force(w: Workload, depth: int) -> float:
    """Least period over all placements that fit and keep groups; inf if none."""
    form, best = ClosedForm(w), np.inf
    for choice in product(range(form.n_devices), repeat=form.n_sites):
        x = np.array(choice)
        if respects_groups(w, x) and overflow([PlacedLane(w, x, depth)]) is None:
            best = min(best, form.predict(x, depth).period_ns)
    return float(best)


@st.composite
def instances(draw: st.DrawFn) -> tuple[Workload, int]:
    """Chains of up to 8 sites on 2 devices or 6 on 3, on any link, some with groups, some short of memory."""
    d = draw(st.integers(2, 3))
    n = draw(st.integers(2, 8 if d == 2 else 5))
    row = st.lists(st.integers(1, 50).map(float), min_size=d, max_size=d)
    times = draw(st.lists(row, min_size=n, max_size=n))
    nbytes = draw(st.lists(st.sampled_from([0.0, 10.0, 100.0, 1000.0]), min_size=n - 1, max_size=n - 1))
    groups = draw(st.one_of(st.none(), st.lists(st.integers(-1, 1), min_size=n, max_size=n)))
    memory = draw(st.sampled_from([80.0, 6.0, 3.0]))
    gbps = draw(st.sampled_from([8.0, 80.0, 800.0]))
    where = cluster(["A", "B", "C"][:d], gbps=gbps, latency_us=0.001, memory_gb=memory)
    units = draw(st.sampled_from([(("denoise", 1),), (("prefill", 2), ("decode", 3))]))
    w = chain(
        times, where, nbytes, batch=2, gaps=0.5, weight_bytes=10**9, state_bytes=10**8, groups=groups, units=units
    )
    return w, draw(st.integers(1, 4))


@given(instances())
@settings(max_examples=80, deadline=None)
def test_equals_brute_force(case: tuple[Workload, int]) -> None:
    """At gap 0 the planner's period is the least over all placements, and its bound is not above it.

    Mutations tried: y >= x[writer] - x[reader]; memory rows left out.
    """
    w, depth = case
    best = brute_force(w, depth)
    if not np.isfinite(best):
        with pytest.raises(DoesNotFitError):
            place(ClosedForm(w), depth, gap=0.0, nodes=10_000)
        return
    found = place(ClosedForm(w), depth, gap=0.0, nodes=10_000)
    assert found.prediction.period_ns == pytest.approx(best, rel=1e-5)
    assert found.bound_ns <= best * (1 + 1e-9)
    assert respects_groups(w, found.x)


@pytest.mark.parametrize(
    ("times", "nbytes", "depth"),
    [
        (
            [[11, 29], [28, 20], [12, 7], [28, 8], [17, 20], [7, 10], [22, 6]],
            [100, 200, 100, 100, 50, 200], 2,
        ),
        (
            [[14, 11], [23, 2], [16, 9], [29, 7], [12, 2], [15, 16], [22, 13]],
            [20, 0, 200, 0, 100, 200], 3,
        ),
    ],
)  # fmt: skip
def test_instances_that_tell_mistakes_apart(times: list[list[float]], nbytes: list[float], depth: int) -> None:
    """Two instances, found by search, on which small mistakes cost the optimum.

    Mutations tried: the latency row divided by depth twice (first), contraction at half the incumbent (second).
    """
    w = chain(times, cluster(["A", "B"], gbps=80.0, latency_us=0.0), nbytes)
    found = place(ClosedForm(w), depth, gap=0.0, nodes=10_000)
    assert found.prediction.period_ns == pytest.approx(brute_force(w, depth), rel=1e-6)


@given(instances(), st.integers(1, 100).map(float))
@settings(max_examples=40, deadline=None)
def test_bound_holds_with_launch_costs(case: tuple[Workload, int], launch: float) -> None:
    """Launch costs enter the program once per unit, the closed form once per unit and device: still a bound.

    Mutation tried: charging the program one launch per device.
    """
    import dataclasses

    w, depth = case
    w = dataclasses.replace(w, launch_ns=launch, launch_each_ns=tuple((u, launch) for u, _ in w.unit_launches))
    best = brute_force(w, depth)
    begun = start(ClosedForm(w), depth)
    assert begun.bound_ns <= best * (1 + 1e-9)
    begun.tighten()
    assert begun.bound_ns <= best * (1 + 1e-9)


@pytest.mark.parametrize(("gbps", "batch", "depth"), [(25.0, 64, 4), (200.0, 64, 2), (200.0, 256, 2)])
def test_llama_size(gbps: float, batch: int, depth: int) -> None:
    """832 sites: no worse than the best seed, small gap, inside memory, bound below, the same twice.

    Mutation tried: no seeds at all.
    """
    w = llama(cluster(["A", "L"], gbps, 5.0, [80, 48]), batch, PAIR)
    form = ClosedForm(w)
    begun = start(form, depth)
    found = finish(begun)
    assert begun.seed is not None
    assert found.prediction.period_ns <= begun.seed.prediction.period_ns
    assert ideal_ns(form, depth) <= found.bound_ns * (1 + 1e-9) <= found.prediction.period_ns * (1 + 2e-9)
    assert found.gap <= 0.03
    assert overflow([PlacedLane(w, found.x, depth)]) is None
    again = place(form, depth)
    assert np.array_equal(again.x, found.x) and again.bound_ns == found.bound_ns


def test_a_poor_incumbent_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the solver returns, the seed stays if it is better; without an incumbent, too.

    Mutation tried: returning the solver's plan even if the seed is better.
    """
    rng = np.random.default_rng(0)
    w = chain(rng.integers(10, 99, (12, 2)).astype(float), cluster(["A", "B"], gbps=80.0), nbytes=100.0)
    form = ClosedForm(w)
    begun = start(form, 4)
    for x in (np.arange(12) % 2, None):
        monkeypatch.setattr(Program, "solve", lambda self, gap, nodes, x=x: Solution(x, 0.0))
        found = place(form, 4, gap=0.0)
        assert begun.seed is not None and np.array_equal(found.x, begun.seed.x) and found.status == "feasible"


def test_never_worse_than_pd_and_af() -> None:
    """At equal (B, d) the plan is at least as good as every seed that fits: pd and af in both directions.

    Mutation tried: no seed but the first.
    """
    w = llama(cluster(["A", "L"], 200.0), 32, PAIR, layers=4)
    form = ClosedForm(w)
    names = {name.split()[0] for name, _ in seeds(form)}
    assert {"single", "whole", "af", "layers"} <= names
    for depth in (1, 2, 4):
        found = place(form, depth)
        for _, x in seeds(form):
            if overflow([PlacedLane(w, x, depth)]) is None:
                assert found.prediction.period_ns <= form.predict(x, depth).period_ns * (1 + 1e-12)


def test_narrow_link_is_proven_without_search() -> None:
    """Where every transfer takes longer than the whole request, everything is one block and one GPU is optimal.

    Mutation tried: contraction that ignores the link rate.
    """
    w = chain([[5.0, 9.0]] * 6, cluster(["A", "B"], gbps=0.001, latency_us=0.0), nbytes=1000.0)
    form = ClosedForm(w)
    assert contract(form, 2.0, form.predict(np.zeros(6, dtype=int), 2).period_ns).max() == 0
    found = place(form, 2)
    assert found.status == "optimal" and found.origin == "single on A"


def test_optimal_is_said_only_if_proven() -> None:
    """With a gap of 10 % allowed the status is "feasible" and the gap is the true one.

    Mutation tried: status from the solver's own flag.
    """
    rng = np.random.default_rng(0)
    w = chain(rng.integers(10, 99, (30, 2)).astype(float), cluster(["A", "B"], gbps=80.0), nbytes=100.0)
    loose, tight = place(ClosedForm(w), 8, gap=0.1), place(ClosedForm(w), 8, gap=0.0, nodes=100_000)
    assert loose.gap <= 0.1 + 1e-6 and tight.status == "optimal"
    assert loose.prediction.period_ns >= tight.prediction.period_ns * (1 - 1e-6)
    assert (loose.status == "optimal") == (loose.gap <= 2e-6)


def test_nothing_fits() -> None:
    """The error names the device, what is missing, and that it is proven.

    Mutation tried: an infeasible program taken for "no incumbent".
    """
    w = chain([[1.0, 1.0]] * 3, cluster(["A", "B"], memory_gb=1), weight_bytes=10**9)
    with pytest.raises(DoesNotFitError, match=r"no placement fits at batch 1, depth 1.*GB"):
        place(ClosedForm(w), 1)


def test_without_a_link_nothing_is_split() -> None:
    """Devices that cannot talk get no split; the program forbids it rather than pricing it.

    Mutation tried: leaving the pair's y free.
    """
    import dataclasses

    where = dataclasses.replace(cluster(["A", "B"]), links=())
    w = chain([[5.0, 1.0], [1.0, 5.0]] * 2, where, nbytes=10.0)
    assert len(set(place(ClosedForm(w), 4).x.tolist())) == 1
    solution = Program(ClosedForm(w), 4, np.arange(4), 12.0).solve(0.0, 10_000)
    assert solution.x is not None and len(set(solution.x.tolist())) == 1


def test_equal_gpus_are_interchangeable() -> None:
    """Symmetry breaking fixes the heaviest block on the first of equal GPUs and loses nothing.

    Mutation tried: also forbidding the block on a GPU of another type.
    """
    w = chain([[4.0, 4.0, 3.0], [9.0, 9.0, 2.0], [4.0, 4.0, 9.0], [5.0, 5.0, 9.0]],
              cluster(["A", "A", "B"], 800.0, 0.0), 10.0)  # fmt: skip
    form = ClosedForm(w)
    solution = Program(form, 4, np.arange(4), 5.0).solve(0.0, 10_000)
    assert solution.x is not None
    assert form.predict(solution.x, 4).period_ns == pytest.approx(brute_force(w, 4), rel=1e-6)


def test_latency_limit() -> None:
    """A limit on a cohort's latency is kept, at the cost of throughput.

    Mutation tried: leaving the row out of the program.
    """
    w = chain([[10.0, 12.0]] * 6, cluster(["A", "B"], gbps=80.0, latency_us=0.01), nbytes=10.0)
    form = ClosedForm(w)
    free = place(form, 4, gap=0.0)
    held = place(form, 4, gap=0.0, latency_limit_ns=61.0)
    assert free.prediction.latency_ns > 61.0 >= held.prediction.latency_ns
    assert held.prediction.period_ns > free.prediction.period_ns


def test_layers_from_names() -> None:
    """What precedes the first layer joins it, what follows the last joins the last, per unit.

    Mutation tried: counting layers over both units together.
    """
    import dataclasses

    w = llama(cluster(["A", "L"]), 8, PAIR, layers=3)
    assert layer_of(w).tolist() == [i // 13 % 3 for i in range(78)]
    # The same with the first site of each unit taken for an embedding, the last for a head.
    names = {0: "embed", 38: "head", 39: "embed", 77: "head"}
    sites = tuple(dataclasses.replace(s, name=names.get(i, s.name)) for i, s in enumerate(w.sites))
    assert layer_of(dataclasses.replace(w, sites=sites)).tolist() == [i // 13 % 3 for i in range(78)]
