"""Co-run times from the ends of two loops: against a fluid model written out."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from hw.replay.pairs import corun


@pytest.mark.quick
@pytest.mark.parametrize(("alone", "slow", "count"), [
    ((10.0, 20.0), (15.0, 26.0), (100, 70)), ((10.0, 20.0), (15.0, 26.0), (300, 30)),
    ((5.0, 5.0), (10.0, 10.0), (50, 50)), ((10.0, 40.0), (10.0, 44.0), (7, 90)),
])  # fmt: skip
def test_the_times_that_made_the_ends(
    alone: tuple[float, float], slow: tuple[float, float], count: tuple[int, int]
) -> None:
    whole = [n * s for n, s in zip(count, slow, strict=True)]
    first = 0 if whole[0] <= whole[1] else 1
    other = 1 - first
    done = whole[first] / slow[other]  # kernels of the other loop when the first ends
    ends = [0.0, 0.0]
    ends[first] = whole[first]
    ends[other] = whole[first] + (count[other] - done) * alone[other]
    assert corun(*ends, *count, *alone) == pytest.approx(slow)
