"""The bound: equal to an independent closed form, below every placement, honest about what could fit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import chain, cluster

from tesserasim.metrics.bound import bound, bound_ns, fractional_ns, mixed_bound_per_s, pool
from tesserasim.metrics.predict import ClosedForm

pytestmark = pytest.mark.quick

times = st.floats(1.0, 1e6)


def two_device_optimum(t: np.ndarray) -> float:
    """Least makespan of fractional sites on two devices: by ratio, the best suited to device 0 first.

    Exchange argument: an optimum gives device 0 the sites with the smallest t0 / t1, with at most one shared.
    """
    t = t[np.argsort(t[:, 0] / t[:, 1], kind="stable")]
    on0, on1 = 0.0, float(t[:, 1].sum())
    for a, b in t:
        if on0 + a >= on1 - b:  # the loads meet inside this site: on0 + f a = on1 - f b
            return on0 + (on1 - on0) / (a + b) * a
        on0, on1 = on0 + a, on1 - b
    return on0


@given(st.lists(st.tuples(times, times), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_two_devices_match_the_closed_form(rows: list[tuple[float, float]]) -> None:
    """The linear program equals the sorted fractional split.

    Mutation tried: using only the loads of device 0 in the program's rows.
    """
    t = np.array(rows)
    assert fractional_ns(t) == pytest.approx(two_device_optimum(t), rel=1e-9)


@given(st.lists(st.tuples(times, times, times), min_size=1, max_size=6), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_no_placement_beats_the_bound(rows: list[tuple[float, float, float]], depth: int) -> None:
    """Over all integer placements of a chain with free links and no gaps: period >= bound, to the last bit or so.

    Mutation tried: returning the solver's objective times 1.001.
    """
    w = chain(rows, cluster(["A", "B", "C"], gbps=1e9, latency_us=0.0))
    form, least = ClosedForm(w), bound_ns(w)
    for x in product(range(3), repeat=len(rows)):
        assert form.predict(np.array(x), depth).period_ns >= least * (1 - 1e-12)


def test_depth_one_adds_the_latency_row() -> None:
    """With one cohort in flight and fixed times, no plan beats the sum of the best times.

    Mutation tried: forgetting `fixed_ns` in the multiplier sum.
    """
    t = np.array([[1.0, 5.0], [5.0, 1.0], [2.0, 2.0]])
    assert fractional_ns(t) == pytest.approx(2.0)
    assert fractional_ns(t, fixed_ns=3.0, depth=1) == pytest.approx(1 + 1 + 2 + 3)
    assert fractional_ns(t, fixed_ns=3.0, depth=4) == pytest.approx(2.0)


def test_equal_devices_are_pooled() -> None:
    """Two equal GPUs count as one of twice the speed, and the optimum does not change.

    Mutation tried: pooling without dividing the times.
    """
    w = chain([[6.0, 6.0, 3.0]] * 4, cluster(["A", "A", "B"]))
    assert pool(w, w.time_ns).shape == (4, 2)
    assert bound_ns(w) == pytest.approx(fractional_ns(w.time_ns))
    assert bound_ns(w) == pytest.approx(24 / (1 + 1 + 2))


def test_largest_over_batches_that_could_fit() -> None:
    """The bound takes the best batch; one whose state fits no placement does not count.

    Mutation tried: dropping `could_fit`.
    """
    where = cluster(["A", "B"], memory_gb=10)
    small = chain([[10.0, 10.0]] * 2, where, batch=8, state_bytes=1_000_000)
    large = chain([[12.0, 12.0]] * 2, where, batch=64, state_bytes=1_000_000)
    huge = chain([[13.0, 13.0]] * 2, where, batch=128, state_bytes=1_000_000_000)
    found = bound([small, large, huge])
    assert found is not None and found.batch == 64 and set(found.by_batch) == {8, 64}
    assert found.per_s == pytest.approx(64e9 / 12)
    assert bound([huge]) is None


def test_mixed_batches() -> None:
    """Lanes at different batches are bounded by each site's cheapest batch; one batch gives its own bound.

    Mutation tried: max instead of min over the batches.
    """
    where = cluster(["A", "B"])
    one = chain([[10.0, 90.0]] * 2, where, batch=1)
    four = chain([[80.0, 40.0]] * 2, where, batch=4)
    assert mixed_bound_per_s([one]) == pytest.approx(1e9 / bound_ns(one))
    # per request: min(10, 20) on A, min(90, 10) on B
    assert mixed_bound_per_s([one, four]) == pytest.approx(1e9 / fractional_ns(np.array([[10.0, 10.0]] * 2)))
