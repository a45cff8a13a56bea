"""What fits, by what is really placed on each device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from planner_cases import GB, chain, cluster

from tesserasim.errors import DoesNotFitError
from tesserasim.metrics.memory import PlacedLane, Room, could_fit, overflow, placed_bytes, require_fit

pytestmark = pytest.mark.quick


def test_weights_once_state_per_request() -> None:
    """Weights lie once on each device that reads them, state for all B * d requests, workspace per cohort.

    Mutation tried: state for B requests only.
    """
    w = chain([[1.0, 1.0]] * 3, cluster(["A", "B"]), batch=4, weight_bytes=100, state_bytes=10)
    w = dataclasses.replace(w, workspace_bytes=7)
    lane = PlacedLane(w, np.array([0, 0, 1]), 2)
    assert placed_bytes([lane]).tolist() == [2 * 100 + 2 * 10 * 8 + 14, 100 + 10 * 8 + 14]
    # A second lane of the same model adds state and workspace, not the weights that are there already.
    other = PlacedLane(w, np.array([0, 0, 0]), 1)
    assert placed_bytes([lane, other]).tolist() == [300 + 160 + 14 + 3 * 10 * 4 + 7, 100 + 80 + 14]


def test_reason_names_device_and_amount() -> None:
    """The worst device, its limit of 90 % and the excess.

    Mutation tried: 100 % of the memory usable.
    """
    w = chain([[1.0, 1.0]], cluster(["A", "B"], memory_gb=[10, 100]), weight_bytes=95 * GB // 10)
    assert overflow([PlacedLane(w, np.array([1]), 1)]) is None
    assert overflow([PlacedLane(w, np.array([0]), 1)]) == ("A", GB // 2)
    with pytest.raises(DoesNotFitError, match=r"A: 9\.5 GB .* exceed 9\.0 GB \(90% of its memory\) by 0\.50 GB"):
        require_fit([PlacedLane(w, np.array([0]), 1)])


def test_weakest_sense_is_implied_by_any_fit() -> None:
    """Whatever placement fits, `could_fit` holds: else the bound would not be one.

    Mutation tried: requiring everything on the largest device.
    """
    w = chain([[1.0, 1.0]] * 2, cluster(["A", "B"], memory_gb=10), weight_bytes=8 * GB)
    assert overflow([PlacedLane(w, np.array([0, 1]), 1)]) is None
    assert overflow([PlacedLane(w, np.array([0, 0]), 1)]) is not None
    three = chain([[1.0, 1.0]] * 3, cluster(["A", "B"], memory_gb=10), weight_bytes=8 * GB)
    assert could_fit(w) and not could_fit(three)


@pytest.mark.parametrize("seed", range(30))
def test_the_quick_answer_is_that_of_the_whole_account(seed: int) -> None:
    """Mutations: workspace on every device; state of one request; a resident counted per site."""
    rng = np.random.default_rng(seed)
    names = ["A", "B", "C"][: int(rng.integers(1, 4))]
    n = int(rng.integers(1, 9))
    memory = [float(m) for m in rng.choice([4.0, 8.0, 16.0, 80.0], len(names))]
    w = chain(
        [[1.0] * len(names)] * n, cluster(names, memory_gb=memory), batch=3, weight_bytes=GB, state_bytes=GB // 10
    )
    shared = tuple(dataclasses.replace(r, sites=tuple({*r.sites, 0})) for r in w.residents)
    w = dataclasses.replace(w, workspace_bytes=GB // 2, residents=shared)
    for depth in (1, 4):
        room = Room(w, depth)
        for _ in range(20):
            x = rng.integers(0, len(names), n)
            assert room.fits(x) == (overflow([PlacedLane(w, x, depth)]) is None)
