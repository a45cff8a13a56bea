"""Place one workload at one depth: the best plan found, what is proven about it, and how it was found."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tesserasim.errors import DoesNotFitError
from tesserasim.metrics.bound import fractional_ns, pool
from tesserasim.metrics.memory import PlacedLane, Room, max_sequences, overflow, why_not
from tesserasim.metrics.predict import NS, ClosedForm, IntArray, Prediction
from tesserasim.planner.cuts import TwoWay, cutting_planes
from tesserasim.planner.milp import Program, contract, fixed_ns
from tesserasim.planner.relax import Relaxation
from tesserasim.planner.rounding import improve, rounded
from tesserasim.planner.seeds import seeds

#: Relative gap at which the solver stops, and its node limit. A Llama-size root takes seconds and finds most; the
#: seeds and the true gap say what is left.
GAP, NODES = 0.01, 2
#: A gap below this is called "optimal".
PROVEN = 2e-6
#: Origins of plans that are no seeds.
SOLVED, ROUNDED = "solver", "solver, rounded relaxation"


@dataclass(frozen=True)
class Placement:
    """A placement with its closed form and the proven limit of what any placement could reach."""

    x: IntArray
    prediction: Prediction
    bound_ns: float  # proven lower limit of the period at this batch and depth
    status: str  # "optimal" | "feasible"
    origin: str  # "solver", or the seed that was best

    @property
    def gap(self) -> float:
        """(period - bound) / period."""
        return max(0.0, 1.0 - self.bound_ns / self.prediction.period_ns)


@dataclass
class Start:
    """One (batch, depth) with its best seed and a bound: cheap, and often enough.

    The bound starts as the ideal (free communication, unlimited memory; milliseconds) and is sharpened by the
    program's relaxation only when `tighten` is called (tens of milliseconds).
    """

    form: ClosedForm
    depth: int
    latency_limit_ns: float | None
    max_seqs: int | None
    best: tuple[Prediction, IntArray, str] | None  # None if nothing tried fits (the solver may still find a plan)
    bound_ns: float  # inf: nothing fits
    tightened: bool = False

    @property
    def seed(self) -> Placement | None:
        if self.best is None:
            return None
        p, x, name = self.best
        bound = min(self.bound_ns, p.period_ns)
        return Placement(x, p, bound, _status(p, bound), name)

    @property
    def ceiling_per_s(self) -> float:
        """No placement at this point is expected to give more requests per second."""
        return self.form.batch * NS / self.bound_ns

    @property
    def period_ns(self) -> float:
        """Of the best plan so far; inf without one."""
        return self.best[0].period_ns if self.best else np.inf

    def blocks(self) -> IntArray:
        """[site] -> block that no better plan than the best so far splits."""
        return contract(self.form, self.form.effective_depth(self.depth), self.period_ns)

    def admissible(self, x: IntArray) -> bool:
        """Whether a placement that keeps groups may be a plan here: it fits, and keeps the limits."""
        if crowded(self.form, x, self.depth, self.max_seqs):
            return False
        late = self.latency_limit_ns is not None
        if late and self.form.predict(x, self.depth).latency_ns > (self.latency_limit_ns or 0.0):
            return False
        return self._room.fits(x)

    def _relaxed(self, block: IntArray, starts: list[IntArray]) -> tuple[float, list[IntArray]]:
        """(bound, placements [block] near the relaxed one): by minimum cuts between two GPUs, else by HiGHS."""
        form = self.form
        if form.n_devices == 2 and form.linked.all() and self.latency_limit_ns is None:
            cuts = cutting_planes(TwoWay(form, self.depth, block), starts)
            return cuts.bound_ns, [*cuts.placements, *rounded(cuts.share, np.arange(2), form, block)]
        relaxation = Relaxation(form, self.depth, block, self.bound_ns, self.latency_limit_ns)
        relaxed = relaxation.solve()
        near = [] if relaxed.share is None else rounded(relaxed.share, relaxation.pool, form, block)
        return relaxed.bound_ns, near

    @cached_property
    def _room(self) -> Room:
        return Room(self.form.workload, self.depth)

    def tighten(self) -> None:
        """Take the bound of the relaxation, shrunk by what the best plan proves, and look for plans near it."""
        if self.tightened:
            return
        self.tightened = True
        block, period = self.blocks(), self.period_ns
        first = np.unique(block, return_index=True)[1]
        own = self.best[1][first] if self.best else None
        starts = [own] if self.best and own is not None and np.array_equal(own[block], self.best[1]) else []
        bound_ns, near = self._relaxed(block, starts)
        # What the relaxation does not cover is no better than the best plan: plans that contraction rules out,
        # and plans that keep units whole, all of which are seeds. Hence the min.
        self.bound_ns = min(period, max(self.bound_ns, bound_ns))
        if not near or (self.seed is not None and self.seed.gap <= PROVEN):
            return
        found = improve(self.form, self.depth, block, [*starts, *near], self.admissible, self.bound_ns)
        if found is not None and found[1] < period:
            self.best = self.form.predict(found[0], self.depth), found[0], ROUNDED
            self.bound_ns = min(self.bound_ns, found[1])


def ideal_ns(form: ClosedForm, depth: int, divisor: float | None = None) -> float:
    """Least period at this depth with free communication and unlimited memory.

    By default no cohort waits for another; `divisor` states the waiting (ClosedForm.effective_depth).
    """
    divisor = float(depth) if divisor is None else divisor
    return fractional_ns(pool(form.workload, form.workload.time_ns), fixed_ns(form), divisor)


def start(
    form: ClosedForm, depth: int, latency_limit_ns: float | None = None, max_seqs: int | None = None
) -> Start:
    """Price the seeds. Only plans with at most `max_seqs` sequences in flight per GPU they use are considered."""
    best: tuple[Prediction, IntArray, str] | None = None
    for name, x in seeds(form):
        p = form.predict(x, depth)
        late = latency_limit_ns is not None and p.latency_ns > latency_limit_ns
        if late or crowded(form, x, depth, max_seqs) or (best is not None and p.period_ns >= best[0].period_ns):
            continue
        if overflow([PlacedLane(form.workload, x, depth)]) is None:
            best = (p, x, name)
    return Start(form, depth, latency_limit_ns, max_seqs, best, ideal_ns(form, depth))


def crowded(form: ClosedForm, x: IntArray, depth: int, max_seqs: int | None) -> bool:
    """More sequences in flight than the GPUs that `x` uses may have."""
    return max_seqs is not None and form.batch * depth > max_sequences(len(set(x.tolist())), max_seqs)


def finish(begun: Start, gap: float = GAP, nodes: int = NODES) -> Placement:
    """Tighten the bound, and run the solver unless the seed is already within `gap` of it.

    The result is never worse than the seed. Raises DoesNotFitError, with the reason, if no plan exists or
    none was found within the node limit.
    """
    begun.tighten()
    seed = begun.seed
    if seed is not None and seed.gap <= max(gap, PROVEN):
        return seed
    if not np.isfinite(begun.bound_ns):
        raise DoesNotFitError(_reason(begun, True))
    program = Program(begun.form, begun.depth, begun.blocks(), begun.bound_ns, begun.latency_limit_ns)
    found = program.solve(gap, nodes)
    form, depth = begun.form, begun.depth
    period = seed.prediction.period_ns if seed else np.inf
    begun.bound_ns = min(period, max(begun.bound_ns, found.bound_ns))
    fits = found.x is not None and overflow([PlacedLane(form.workload, found.x, depth)]) is None
    if fits and found.x is not None and not crowded(form, found.x, depth, begun.max_seqs):
        p = form.predict(found.x, depth)
        if p.period_ns < period:
            bound = min(begun.bound_ns, p.period_ns)
            return Placement(found.x, p, bound, _status(p, bound), SOLVED)
    if begun.seed is None:
        raise DoesNotFitError(_reason(begun, found.infeasible))
    return begun.seed


def place(
    form: ClosedForm, depth: int, gap: float = GAP, nodes: int = NODES, latency_limit_ns: float | None = None
) -> Placement:
    """The best placement of one workload at one depth. Raises DoesNotFitError if there is none."""
    return finish(start(form, depth, latency_limit_ns), gap, nodes)


def _status(p: Prediction, bound_ns: float) -> str:
    return "optimal" if p.period_ns - bound_ns <= PROVEN * p.period_ns else "feasible"


def _reason(begun: Start, proven: bool) -> str:
    """Why there is no plan, by what is missing on the device where everything would fit best."""
    w = begun.form.workload
    lanes = [[PlacedLane(w, np.full(len(w.sites), d, dtype=np.int64), begun.depth)] for d in range(len(w.devices))]
    head = "no placement fits" if proven else "no placement was found within the node limit"
    missing = next((text for text in (why_not(lane) for lane in lanes) if text), "the latency limit is too short")
    return f"{head} at batch {w.batch}, depth {begun.depth}: on one device, {missing}"
