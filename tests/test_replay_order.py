"""Waits: by hand, and that random schedules which respect them give the sequential result."""

from __future__ import annotations

import random

import pytest

from hw.replay.order import Touch, implied, waits


def r(start: int, end: int) -> Touch:
    return Touch(start, end, False)


def w(start: int, end: int) -> Touch:
    return Touch(start, end, True)


@pytest.mark.quick
def test_reads_wait_for_writers_and_writers_for_readers() -> None:
    touches = [[w(0, 10)], [r(5, 8)], [w(4, 6)], [r(0, 10)], [w(20, 30)]]
    assert waits("abcde", touches) == [[], [0], [0, 1], [0, 2], []]


@pytest.mark.quick
def test_a_chain_keeps_its_order_and_hides_what_it_implies() -> None:
    # steps 0 and 1 are of one chain: step 2 needs both, waiting for 1 is enough
    assert waits(["s", "s", "t"], [[w(0, 4)], [w(4, 8)], [r(0, 8)]]) == [[], [0], [1]]


@pytest.mark.quick
def test_a_step_that_reads_what_it_writes_waits_for_the_one_before() -> None:
    assert waits("ab", [[w(0, 8)], [r(0, 8), w(0, 8)]]) == [[], [0]]


@pytest.mark.parametrize("seed", range(30))
def test_any_schedule_within_the_waits_gives_the_sequential_result(seed: int) -> None:
    """Steps write a mix of what they read; a missing wait shows as another memory. Memory is 40 cells."""
    rng = random.Random(seed)
    chains = [rng.randrange(3) for _ in range(40)]
    touches = []
    for _ in chains:
        spans = [(a, a + rng.randrange(1, 8), rng.random() < 0.4) for a in (rng.randrange(34) for _ in range(3))]
        touches.append([Touch(*s) for s in spans])
    needs = waits(chains, touches)

    def run(order: list[int]) -> list[int]:
        cells = list(range(40))
        for i in order:
            value = hash((i, tuple(cells[c] for t in touches[i] if not t.write for c in range(t.start, t.end))))
            for t in touches[i]:
                if t.write:
                    cells[t.start : t.end] = [hash((value, c)) for c in range(t.start, t.end)]
        return cells

    want = run(list(range(40)))
    for _ in range(20):
        done: list[int] = []
        while len(done) < 40:
            ready = [i for i in range(40) if i not in done and all(j in done for j in needs[i])]
            done.append(rng.choice(ready))
        assert run(done) == want


@pytest.mark.quick
def test_a_wait_that_others_imply() -> None:
    # 0 -> 1 -> 3 and 0 -> 2 -> 3: step 3 still comes after 0 and 1 without its wait for 2, not without both.
    needs = [[], [0], [0], [1, 2]]
    assert implied(needs, 3, 1, {2}) and implied(needs, 3, 0, {2})
    assert not implied(needs, 3, 2, {2}) and not implied(needs, 3, 1, {1, 2})
    assert implied([[], [0], [1], [0, 2]], 3, 1, {0})  # by the way over 2
