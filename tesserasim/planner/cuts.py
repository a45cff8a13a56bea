"""Two GPUs and very many sites: the bound by minimum cuts, fast where a linear program is not.

The period of a placement is the largest of a few sums: the load of either GPU, of either link direction, and the
latency over the (effective) depth. For weights on these sums that add up to one, the weighted sum is at most their
largest, so its minimum over all placements is a bound. With two GPUs that minimum is a minimum cut: a site is on
GPU 0's side or on the other, which costs its weighted time there; a value that is read across costs its weighted
transfer, once per direction, by an edge to a node of its own from which edges without limit lead to the readers.

Memory that does not hold everything enters with prices: what lies on a GPU beyond its room, times a price, may be
added to the weighted sum of any placement that fits without raising it. A resident pays once where any of its sites is.

Weights and prices come from cutting planes: every cut is a placement with its sums, and the next weights are those
whose least weighted sum over the placements so far is largest: a linear program of a few variables (Kelley 1960).
Capacities are integers, rounded down, so a cut's value is a bound whatever the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from tesserasim.metrics.memory import Room
from tesserasim.metrics.predict import ClosedForm, IntArray
from tesserasim.planner.milp import fixed_ns
from tesserasim.planner.relax import Relaxation
from tesserasim.workload import FloatArray

ROUNDS = 40
#: Highest price of one whole memory too much, in loads of the GPU with most.
_DEAREST = 20.0
#: A bound this close to what any weights can still prove is not sharpened further.
CLOSE = 2e-4
_MEAN, _MOST = 1e6, 2**30  # average capacity in units, and one without limit


@dataclass(frozen=True)
class Cuts:
    """What minimum cuts prove and find."""

    bound_ns: float
    placements: list[IntArray]  # [block] -> device, one per cut
    share: FloatArray  # [block, device] of the mix of placements whose largest sum is least: the relaxed placement


class TwoWay:
    """Weighted sums of one (workload, depth) on two linked GPUs, over blocks."""

    def __init__(self, form: ClosedForm, depth: int, block: IntArray) -> None:
        self.form, self.depth, self.block = form, depth, block
        plain = Relaxation(form, depth, block, 1.0)
        self.writer, self.totals, self.flow, self.reader = plain.flows
        self.time = np.zeros((plain.n_blocks, 2))
        np.add.at(self.time, block, form.workload.time_ns)
        self.divisor, self.fixed = form.effective_depth(depth), fixed_ns(form)
        self.room = Room(form.workload, depth)
        inside = self.block[self.room.site] * len(self.room.size) + self.room.resident  # [membership], once per block
        inside = np.unique(inside) if not self.room.always else inside[:0]
        home, resident = inside // max(1, len(self.room.size)), inside % max(1, len(self.room.size))
        n, flows, kept = plain.n_blocks, len(self.writer), 0 if self.room.always else len(self.room.size)
        each, over, lies = np.arange(n), np.arange(flows), np.arange(kept)
        self.source = n + 2 * flows + 2 * kept
        self.sink = self.source + 1
        away, back = n + over, n + flows + over  # nodes of values that 0 sends to 1, and 1 to 0
        here, there = n + 2 * flows + lies, n + 2 * flows + kept + lies  # nodes of residents on 0, and on 1
        self.edges = (
            np.concatenate([np.full(n, self.source), each, self.writer, away[self.flow], self.reader, back,
                            home, here, np.full(kept, self.source), there[resident]]),
            np.concatenate([each, np.full(n, self.sink), away, self.reader, back[self.flow], self.writer,
                            here[resident], np.full(kept, self.sink), there, home]),
        )  # fmt: skip
        self.members = len(home)
        self.sizes = self.room.size[lies] if kept else np.zeros(0)

    def sums(self, x: IntArray) -> FloatArray:
        """[load 0, load 1, link 0 to 1, link 1 to 0, latency over depth, memory too much on 0, on 1] of a placement
        [block]; the last two as shares of a memory, below 0 where there is room."""
        placed = x[self.block]
        p = self.form.predict(placed, self.depth)
        over = self.room.placed(placed) / self.room.usable - 1.0
        return np.array([*p.loads_ns, p.link_ns[0, 1], p.link_ns[1, 0], p.latency_ns / self.divisor, *over])

    def cut(self, weight: FloatArray) -> tuple[float, IntArray]:
        """(least weighted sum, rounded down, and a placement that has it)."""
        late = weight[4] / self.divisor
        cost = self.time * (weight[:2] + late)  # of a block on either device
        base = cost.min(axis=1)
        across = []
        for k, (s, t) in enumerate(((0, 1), (1, 0))):
            per_byte = 1.0 / self.form.rate[s, t]
            wait = self.totals[:, 1] * per_byte + self.totals[:, 2] * self.form.latency[s, t]
            across.append(weight[2 + k] * self.totals[:, 0] * per_byte + late * wait)
        endless, tied = np.full(len(self.reader), np.inf), np.full(self.members, np.inf)
        price = weight[5:] / self.room.usable  # per byte
        capacity = np.concatenate([
            cost[:, 1] - base, cost[:, 0] - base, across[0], endless, endless, across[1],
            tied, price[0] * self.sizes, price[1] * self.sizes, tied,
        ])  # fmt: skip
        known = capacity[np.isfinite(capacity) & (capacity > 0)]
        scale = _MEAN / float(known.mean()) if len(known) else 1.0
        units = np.minimum(np.where(np.isfinite(capacity), np.floor(capacity * scale), _MOST), _MOST)
        graph = csr_array((units.astype(np.int32), self.edges), shape=(self.sink + 1, self.sink + 1))
        found = maximum_flow(graph, self.source, self.sink)
        left = graph - found.flow
        left.data[left.data < 0] = 0
        left.eliminate_zeros()
        reached = breadth_first_order(left, self.source, return_predecessors=False)
        x = np.ones(len(base), dtype=np.int64)
        x[reached[reached < len(base)]] = 0
        # Workspace is left out: a GPU without a site has none.
        return float(base.sum()) + found.flow_value / scale + late * self.fixed - float(weight[5:].sum()), x


def cutting_planes(two: TwoWay, others: Sequence[IntArray], rounds: int = ROUNDS) -> Cuts:
    """Weights by cutting planes, from the placements `others` [block] on: the best bound, and every cut's placement."""
    every = list(others)
    known = [two.sums(x) for x in every]
    bound, mixed = 0.0, np.ones(1)
    weight = np.array([0.4, 0.4, 0.0, 0.0, 0.2, 0.0, 0.0])
    for _ in range(rounds):
        value, x = two.cut(weight)
        bound = max(bound, value)
        every.append(x)
        known.append(two.sums(x))
        weight, ceiling, mixed = _weights(known, two.room.always)
        if ceiling <= bound * (1 + CLOSE):
            break
    first = mixed @ (np.array(every) == 0)
    return Cuts(bound, every[len(others) :], np.stack([first, 1.0 - first], axis=1))


def _weights(known: Sequence[FloatArray], fits: bool) -> tuple[FloatArray, float, FloatArray]:
    """(the weights and prices whose least weighted sum over placements is largest, that sum, and how much of each
    placement the mix holds that reaches no more than it: the dual). `fits`: memory costs nothing."""
    sums = np.array(known)
    scale = float(sums[:, :2].max()) or 1.0
    matrix = np.hstack([-sums[:, :5] / scale, -sums[:, 5:], np.ones((len(sums), 1))])
    cost = np.zeros(8)
    cost[-1] = -1.0
    dearest = 0.0 if fits else _DEAREST
    answer = linprog(
        cost, A_ub=matrix, b_ub=np.zeros(len(sums)), A_eq=[[1.0] * 5 + [0.0] * 3], b_eq=[1.0],
        bounds=[(0.0, 1.0)] * 5 + [(0.0, dearest)] * 2 + [(0.0, None)],
    )  # fmt: skip
    weight, mixed = np.maximum(answer.x[:7], 0.0), np.maximum(-answer.ineqlin.marginals, 0.0)
    weight[:5] /= weight[:5].sum()
    weight[5:] *= scale
    return weight, float(answer.x[7]) * scale, mixed / mixed.sum()
