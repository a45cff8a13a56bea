"""Segments: by hand, and that their order keeps every wait."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from hw.replay.segments import segments


@pytest.mark.quick
def test_a_segment_ends_where_another_chain_waits() -> None:
    found = segments("aaabab", [[], [0], [1], [1], [2], [3, 4]])
    # step 1 is waited for by step 3 of chain b; step 5 waits for step 4
    assert [(s.chain, s.steps, s.after) for s in found] == [
        ("a", [0, 1], []), ("a", [2, 4], []), ("b", [3], [0]), ("b", [5], [1])
    ]  # fmt: skip
    assert [s.asked for s in found] == [True, True, False, False]


@pytest.mark.parametrize("seed", range(20))
def test_every_wait_is_kept_by_a_chain_or_by_an_earlier_segment(seed: int) -> None:
    rng = random.Random(seed)
    chains = [rng.choice("abc") for _ in range(60)]
    needs = [sorted({rng.randrange(i) for _ in range(rng.randrange(3))}) if i else [] for i in range(60)]
    found = segments(chains, needs)
    home = {i: s for s, part in enumerate(found) for i in part.steps}
    assert sorted(home) == list(range(60))
    assert all(chains[i] == found[s].chain for i, s in home.items())
    for chain in "abc":
        assert [i for s in found if s.chain == chain for i in s.steps] == [i for i in range(60) if chains[i] == chain]
    for i, n in enumerate(needs):
        for j in n:
            if chains[i] != chains[j]:
                assert home[j] in found[home[i]].after and home[j] < home[i] and found[home[i]].steps[0] == i
                assert found[home[j]].asked and found[home[j]].steps[-1] == j
