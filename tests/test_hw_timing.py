"""Records of the profiler as replays of a graph's nodes."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")

import numpy as np

from hw.capture.records import SPIN, Record, in_node_order, replays
from hw.capture.timing import between_neighbours

pytestmark = pytest.mark.quick
TYPES = ["kernel", "memset", "kernel", "kernel"]
SET = "Memset (Device)"


def kernel(start: int, name: str, launch: int = 1) -> Record:
    return Record(start, 5, name, launch)


def replayed(count: int, pauses: int, ids: bool = True) -> list[Record]:
    """`count` replays of three kernels and a set, the last `pauses` of them after a pause each."""
    found = []
    for i in range(count):
        at, launch = 1000 * i, i + 1 if ids else 0
        if i >= count - pauses:
            found.append(Record(at, 90, f"void {SPIN}(long)", 500 + i if ids else 0))
        found += [kernel(at + 100 + 10 * k, f"k{k}", launch) for k in (0, 2, 3)]
        found.append(Record(at + 110, 5, SET, launch))
    return sorted(found)


def names(found: list[list[Record]]) -> list[list[str]]:
    return [[r.name for r in g] for g in found]


RIGHT = ["k0", SET, "k2", "k3"]


@pytest.mark.parametrize("ids", [True, False])
def test_measured_replays_are_those_after_a_pause(ids: bool) -> None:
    records = replayed(7, 4, ids)
    assert names(replays(records, TYPES)) == [RIGHT] * 4
    assert replays(records, TYPES)[0][0].start == 3100


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("which", ["first", "last", "middle"])
def test_a_lost_kernel_costs_its_replay_and_shifts_no_other(ids: bool, which: str) -> None:
    records = replayed(7, 4, ids)
    kernels = [i for i, r in enumerate(records) if r.name.startswith("k") and r.start > 3000]
    del records[{"first": kernels[0], "last": kernels[-1], "middle": kernels[5]}[which]]
    assert names(replays(records, TYPES)) == [RIGHT] * 3


def test_records_of_something_else_belong_to_no_replay() -> None:
    records = sorted([*replayed(5, 3), kernel(4500, "other", 900), kernel(2150, "other", 901)])
    assert names(replays(records, TYPES)) == [RIGHT] * 3


def test_every_replay_whole_or_gone_whatever_is_lost() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        records = [r for r in replayed(12, 6) if SPIN in r.name or rng.random() > 0.03]
        found = replays(records, TYPES)
        assert names(found) == [RIGHT] * len(found)
        assert {r.launch for g in found for r in g} <= set(range(7, 13))


def test_no_replay_without_records() -> None:
    assert replays([], TYPES) == []
    assert replays([kernel(1, "k0")], TYPES) == []


def test_a_set_that_seems_early_goes_behind_the_kernel_before_it() -> None:
    a, b, c = kernel(10, "gemm"), kernel(20, "split"), kernel(30, "reduce")
    for at in (9, 16, 500):
        other = Record(at, 1, SET, 1)
        assert in_node_order([other, a, b, c], TYPES) == [a, other, b, c]


def test_records_stay_as_stamped_where_types_do_not_fit() -> None:
    records = [kernel(i, f"k{i}") for i in range(4)]
    assert in_node_order(records, TYPES) == records
    assert in_node_order(records[:3], TYPES) is None


def test_stamps_of_sets_are_moved_between_their_neighbours_and_kernels_are_left() -> None:
    duration = np.array([[5, 2, 5, 5]] * 3)
    start = np.array([[0, 90, 20, 30], [0, -40, 20, 30], [0, 7, 20, 30]])
    moved = between_neighbours(start, duration, TYPES)
    assert moved[:, 1].tolist() == [18, 5, 7]
    assert (moved[:, [0, 2, 3]] == start[:, [0, 2, 3]]).all()
    tight = between_neighbours(np.array([[0, 90, 6, 30]]), duration[:1], TYPES)
    assert tight[0, 1] == 5  # no room: behind the kernel that it waits for
