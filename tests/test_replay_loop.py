"""The order in which launches of several slots are submitted, and what a group of loops adds up to."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from hw.replay.loop import Group, latencies, steady_per_s, turns

pytestmark = pytest.mark.quick


def test_launches_are_spread_evenly() -> None:
    assert turns([2, 2]) == [0, 1, 0, 1]
    assert turns([4, 2]) == [0, 1, 0, 0, 1, 0]
    found = turns([30, 7, 13])
    assert [found.count(s) for s in range(3)] == [30, 7, 13]
    for k in range(1, 50):  # at no point has a slot more than one launch too many or too few
        assert all(abs(found[:k].count(s) - k * n / 50) <= 1 for s, n in enumerate((30, 7, 13)))


def test_a_group_adds_up_its_slots_burst_by_burst() -> None:
    found = Group((3, 5), ((10.0, 12.0, 11.0), (20.0, 21.0, 25.0)), 0.5)
    assert found.total_per_s == (30.0, 33.0, 36.0)
    assert found.as_dict()["units_per_s"] == 33.0 and found.as_dict()["launches"] == [3, 5]


def test_a_steady_rate_leaves_out_the_start_and_the_end() -> None:
    """Two slots, one completion every 10 ms from 40 ms on; the last ones, alone on the GPU, every 4 ms."""
    ends = [[0.040, 0.060, 0.080, 0.100], [0.050, 0.070, 0.090, 0.104]]
    assert steady_per_s(ends) == pytest.approx(100)
    assert steady_per_s([[0.010, 0.015, 0.020]]) == pytest.approx(200)  # without the first, from a standstill
    assert steady_per_s([[0.5], [1.0]]) == 2.0  # too few: all of them, from the start
    assert latencies(ends) == pytest.approx([0.02, 0.02, 0.02, 0.02, 0.02, 0.014])
