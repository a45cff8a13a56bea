"""What may be dropped of a placement: by hand, and that a run without it can go wrong."""

from __future__ import annotations

import random

import pytest

from hw.replay.cut import NEXT, Launch, Move, Step
from hw.replay.mutate import Wait, mutants

pytestmark = pytest.mark.quick


def move(after: int, before: int, source: str = "a", buffer: int = 0) -> Move:
    return Move(buffer, 0, 8, source, "b" if source == "a" else "a", after, before)


def integers(m: Move) -> bool:
    return m.buffer == 9


def test_a_reader_that_nothing_else_holds_back_shows_behind_a_late_producer() -> None:
    steps = [Launch(0, "a"), move(0, 2), Launch(2, "b")]
    found = mutants(steps, [[], [0], [1]], integers)
    assert found.moves == [1] and found.waits == [Wait(2, 1, frozenset({1}), 0)] and found.implied == 0


def test_a_reader_that_another_wait_puts_behind_the_producer_shows_behind_a_late_move() -> None:
    """Kernel 0 feeds 1 and 3; 1 feeds 2, which runs before 3 on the other device: 3 is behind 0 in any case."""
    steps: list[Step] = [
        Launch(0, "a"), Launch(1, "a"), move(1, 2, buffer=1), Launch(2, "b"), move(0, 3), Launch(3, "b"),
    ]  # fmt: skip
    found = mutants(steps, [[], [0], [1], [2], [0], [3, 4]], integers)
    assert [w for w in found.waits if w.move == 4] == [Wait(5, 4, frozenset({4}), 4)]
    # Over one link the second move comes after the first: nothing but the order of moves keeps 3 behind it.
    chained = mutants(steps, [[], [0], [1], [2], [0, 2], [3, 4]], integers)
    assert [w.late for w in chained.waits if w.move == 4] == [4]


def test_a_wait_that_a_later_one_implies_is_none() -> None:
    """Both moves go one after the other, and kernel 2 waits for the second."""
    steps = [Launch(0, "a"), move(0, 3, buffer=1), move(0, 2), Launch(2, "b"), Launch(3, "b")]
    found = mutants(steps, [[], [0], [0, 1], [2], [3, 1]], integers)
    assert found.implied == 1 and [w.move for w in found.waits] == [2]
    assert found.moves == [1, 2]


def test_integers_and_what_the_next_launch_needs_are_left_out() -> None:
    steps = [Launch(0, "a"), move(0, 2, buffer=9), move(0, 2), Launch(2, "b"), move(0, NEXT)]
    found = mutants(steps, [[], [0], [0, 1], [1, 2], [0]], integers)
    assert found.moves == [2] and found.integers == 1
    assert found.waits == []  # the launch would read the integers too early, too


@pytest.mark.parametrize("seed", range(20))
def test_without_its_wait_a_reader_can_start_before_its_move_ends(seed: int) -> None:
    """Random placements of a chain with branches, run as soon as waits allow and the pause last: the reader is ready
    while the move that it should wait for has not ended, in every mutant, and never with the wait."""
    rng = random.Random(seed)
    steps, needs = placement(rng)
    found = mutants(steps, needs, integers)
    assert found.waits
    for w in found.waits:
        assert w.late in needs_of(needs, w.move) | {w.move}
        cut = [[j for j in n if not (i == w.reader and j in w.gone)] for i, n in enumerate(needs)]
        assert w.move not in needs_of(cut, w.reader)  # ready whatever the move does
        assert w.late == w.move or w.late not in needs_of(cut, w.reader)  # and whatever the pause holds back
        assert w.move in needs_of(needs, w.reader)


def needs_of(needs: list[list[int]], step: int) -> set[int]:
    seen: set[int] = set()
    todo = list(needs[step])
    while todo:
        j = todo.pop()
        if j not in seen:
            seen.add(j)
            todo += needs[j]
    return seen


def placement(rng: random.Random) -> tuple[list[Step], list[list[int]]]:
    devices = [rng.choice("ab") for _ in range(14)]
    steps: list[Step] = []
    needs: list[list[int]] = []
    at: dict[int, int] = {}
    last: dict[object, int] = {}
    for k, device in enumerate(devices):
        brought = []
        for p in sorted({k - 1, rng.randrange(k + 1) - 1} - {-1}):
            if devices[p] != device:
                chain = (devices[p], device)
                steps.append(Move(p, 0, 8, devices[p], device, p, k))
                needs.append([at[p], *([last[chain]] if chain in last else [])])
                last[chain] = len(steps) - 1
                brought.append(len(steps) - 1)
        steps.append(Launch(k, device))
        needs.append([*brought, *([last[device]] if device in last else [])])
        last[device] = at[k] = len(steps) - 1
    return steps, needs
