"""Placements near a relaxed one: round the shares, then move the borders between devices while that helps.

In program order a placement is a row of *runs*, each on one device. Rounding takes shares as cumulative over the
devices and cuts them at a common threshold, so that neighbours with similar shares go together. A climb then moves
whole runs, and pieces at their ends, to other devices. It stops when nothing helps or after so many pricings: never by
the clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tesserasim.metrics.predict import ClosedForm, IntArray
from tesserasim.planner.milp import fixed_ns
from tesserasim.workload import FloatArray

THRESHOLDS = 15
#: Pieces at the end of a run that are moved: blocks, and parts of all blocks.
PIECES, PARTS = (1, 2, 4, 8, 16, 32, 64), (100, 50, 25, 12, 6)
#: Placements that a climb begins from, and pricings per climb and further device.
CLIMBS, PRICINGS = 3, 250
#: So close to the bound no further start is climbed from.
ENOUGH = 2e-3
_WORTH = 1e-9

Admissible = Callable[[IntArray], bool]


def orders(n: int) -> list[list[int]]:
    """Orders of the pools in which shares are summed up: each pool first once."""
    return [[*range(k, n), *range(k)] for k in range(n)]


def rounded(share: FloatArray, pool: IntArray, form: ClosedForm, block: IntArray) -> list[IntArray]:
    """Placements [block] -> device: every threshold and order of the pools, on the first device of each pool, and with
    the blocks of a pool dealt out over its devices in program order by load."""
    found: dict[bytes, IntArray] = {}
    members = [np.flatnonzero(pool == p) for p in range(int(pool.max()) + 1)]
    time = np.zeros((len(share), form.n_devices))
    np.add.at(time, block, form.workload.time_ns)
    cuts = (np.arange(THRESHOLDS) + 0.5) / THRESHOLDS
    for order in orders(share.shape[1]):
        total = np.cumsum(share[:, order], axis=1)
        for cut in cuts:
            chosen = np.array(order)[np.minimum((total < cut).sum(axis=1), len(order) - 1)]
            for x in (_on_first(chosen, members), _dealt(chosen, members, time)):
                found.setdefault(x.tobytes(), x)
    return list(found.values())


def _on_first(chosen: IntArray, members: list[IntArray]) -> IntArray:
    return np.array([m[0] for m in members], dtype=np.int64)[chosen]


def _dealt(chosen: IntArray, members: list[IntArray], time: FloatArray) -> IntArray:
    x = _on_first(chosen, members)
    for p, own in enumerate(members):
        here = np.flatnonzero(chosen == p)
        if len(own) > 1 and len(here):
            load = np.cumsum(time[here, own[0]])
            part = np.minimum((load - time[here, own[0]] / 2) / load[-1] * len(own), len(own) - 1)
            x[here] = own[part.astype(np.int64)]
    return x


class Climb:
    """Better placements near one, at one depth. `admissible`: whether a placement [site] may be a plan at all."""

    def __init__(self, form: ClosedForm, depth: int, block: IntArray, admissible: Admissible) -> None:
        self.form, self.depth, self.block, self.admissible = form, depth, block, admissible
        self.n_blocks = int(block.max()) + 1
        time = np.zeros((self.n_blocks, form.n_devices))
        np.add.at(time, block, form.workload.time_ns)
        self.before = np.concatenate([np.zeros((1, form.n_devices)), np.cumsum(time, axis=0)])  # [block, device]
        self.fixed = fixed_ns(form)
        self.pieces = sorted({*PIECES, *(self.n_blocks // k for k in PARTS)} - {0}, reverse=True)

    def price(self, x: IntArray) -> float:
        """Period of a placement [block]; inf if it cannot be a plan."""
        placed = x[self.block]
        period = self.form.predict(placed, self.depth).period_ns
        return period if self.admissible(placed) else np.inf

    def run(self, x: IntArray, period: float, pricings: int) -> tuple[IntArray, float]:
        """(placement, period) that no move improves, or what was found when the pricings are used up."""
        left = pricings
        while left > 0:
            was = period
            for first, last, device in self._moves(x):
                source = int(x[first])
                if left <= 0 or device == source or (x[first:last] != source).any():
                    continue
                if self._least(x, first, last, source, device) >= period * (1 - _WORTH):
                    continue
                y = x.copy()
                y[first:last] = device
                left -= 1
                found = self.price(y)
                if found < period * (1 - _WORTH):
                    x, period = y, found
            if period == was:
                break
        return x, period

    def _moves(self, x: IntArray) -> Iterator[tuple[int, int, int]]:
        """(first, last, device): blocks [first, last) of a run to another device."""
        edges = np.concatenate(([0], np.flatnonzero(np.diff(x)) + 1, [len(x)])).tolist()
        for a, b in itertools.pairwise(edges):
            for device in range(self.form.n_devices):
                yield a, b, device
            for k in self.pieces:
                if k < b - a:
                    if a > 0:
                        yield a, a + k, int(x[a - 1])
                    if b < len(x):
                        yield b - k, b, int(x[b])

    def _least(self, x: IntArray, first: int, last: int, source: int, device: int) -> float:
        """The period of the moved placement if transfers took no time."""
        loads = self.form.loads(x[self.block]) if self._loads_of is not x else self._loads
        if self._loads_of is not x:
            self._loads_of, self._loads = x, loads
        moved = loads.copy()
        moved[source] -= self.before[last, source] - self.before[first, source]
        moved[device] += self.before[last, device] - self.before[first, device]
        return max(float(moved.max()), (float(moved.sum()) + self.fixed) / self.depth)

    _loads_of: IntArray | None = None
    _loads: FloatArray


def improve(
    form: ClosedForm, depth: int, block: IntArray, starts: Sequence[IntArray], admissible: Admissible, bound_ns: float
) -> tuple[IntArray, float] | None:
    """(placement [site], period) of the best that climbing finds from the best of `starts` [block]; climbs no further
    from others once one is ENOUGH. None if nothing that may be a plan was found."""
    climb = Climb(form, depth, block, admissible)
    priced = sorted((climb.price(x), i) for i, x in enumerate(starts))
    best: tuple[IntArray, float] | None = None
    for period, i in priced[:CLIMBS]:
        if not np.isfinite(period) or (best is not None and best[1] <= bound_ns * (1 + ENOUGH)):
            break
        x, found = climb.run(starts[i], period, PRICINGS * (form.n_devices - 1))
        if best is None or found < best[1]:
            best = x[block].astype(np.int64), found
    return best
