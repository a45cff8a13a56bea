"""Place one workload at one depth: the best plan found, what is proven about it, and how it was found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tesserasim.errors import DoesNotFitError
from tesserasim.metrics.bound import fractional_ns, pool
from tesserasim.metrics.memory import PlacedLane, max_sequences, overflow, why_not
from tesserasim.metrics.predict import ClosedForm, IntArray, Prediction
from tesserasim.planner.milp import Program, contract, fixed_ns
from tesserasim.planner.seeds import seeds

#: Relative gap at which the solver stops, and its node limit.
GAP, NODES = 0.01, 20
#: A gap below this is called "optimal".
PROVEN = 2e-6


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


@dataclass(frozen=True)
class Start:
    """The best seed at one (batch, depth) and the bound of the relaxation: cheap, and often enough."""

    form: ClosedForm
    depth: int
    seed: Placement | None  # None if no seed fits; the solver may still find a plan
    bound_ns: float  # inf: nothing fits
    program: Program
    max_seqs: int | None = None


def ideal_ns(form: ClosedForm, depth: int) -> float:
    """Least period at this depth with free communication and unlimited memory."""
    return fractional_ns(pool(form.workload, form.workload.time_ns), fixed_ns(form), depth)


def start(
    form: ClosedForm, depth: int, latency_limit_ns: float | None = None, max_seqs: int | None = None
) -> Start:
    """Price the seeds, shrink the program by what they prove, and solve its relaxation.

    Only plans with at most `max_seqs` sequences in flight per GPU they use are considered.
    """
    best: tuple[Prediction, IntArray, str] | None = None
    for name, x in seeds(form):
        p = form.predict(x, depth)
        late = latency_limit_ns is not None and p.latency_ns > latency_limit_ns
        if late or crowded(form, x, depth, max_seqs) or (best is not None and p.period_ns >= best[0].period_ns):
            continue
        if overflow([PlacedLane(form.workload, x, depth)]) is None:
            best = (p, x, name)
    period = best[0].period_ns if best else np.inf
    least = ideal_ns(form, depth)
    program = Program(form, depth, contract(form, depth, period), least, latency_limit_ns)
    # Contraction rules out only plans that are no better than the seed, hence the min.
    bound = min(period, max(least, program.relax().bound_ns))
    seed = None if best is None else Placement(best[1], best[0], bound, _status(best[0], bound), best[2])
    return Start(form, depth, seed, bound, program, max_seqs)


def crowded(form: ClosedForm, x: IntArray, depth: int, max_seqs: int | None) -> bool:
    """More sequences in flight than the GPUs that `x` uses may have."""
    return max_seqs is not None and form.batch * depth > max_sequences(len(set(x.tolist())), max_seqs)


def finish(begun: Start, gap: float = GAP, nodes: int = NODES) -> Placement:
    """Run the solver unless the seed is already within `gap` of the bound.

    The result is never worse than the seed. Raises DoesNotFitError, with the reason, if no plan exists or
    none was found within the node limit.
    """
    seed = begun.seed
    if seed is not None and seed.gap <= max(gap, PROVEN):
        return seed
    found = begun.program.solve(gap, nodes)
    form, depth = begun.form, begun.depth
    period = seed.prediction.period_ns if seed else np.inf
    bound = min(period, max(begun.bound_ns, found.bound_ns))
    fits = found.x is not None and overflow([PlacedLane(form.workload, found.x, depth)]) is None
    if fits and found.x is not None and not crowded(form, found.x, depth, begun.max_seqs):
        p = form.predict(found.x, depth)
        if p.period_ns < period:
            return Placement(found.x, p, min(bound, p.period_ns), _status(p, bound), "solver")
    if seed is None:
        raise DoesNotFitError(_reason(begun, found.infeasible))
    return Placement(seed.x, seed.prediction, bound, _status(seed.prediction, bound), seed.origin)


def place(
    form: ClosedForm, depth: int, gap: float = GAP, nodes: int = NODES, latency_limit_ns: float | None = None
) -> Placement:
    """The best placement of one workload at one depth. Raises DoesNotFitError if there is none."""
    begun = start(form, depth, latency_limit_ns)
    if not np.isfinite(begun.bound_ns):
        raise DoesNotFitError(_reason(begun, True))
    return finish(begun, gap, nodes)


def _status(p: Prediction, bound_ns: float) -> str:
    return "optimal" if p.period_ns - bound_ns <= PROVEN * p.period_ns else "feasible"


def _reason(begun: Start, proven: bool) -> str:
    """Why there is no plan, by what is missing on the device where everything would fit best."""
    w = begun.form.workload
    lanes = [[PlacedLane(w, np.full(len(w.sites), d, dtype=np.int64), begun.depth)] for d in range(len(w.devices))]
    head = "no placement fits" if proven else "no placement was found within the node limit"
    missing = next((text for text in (why_not(lane) for lane in lanes) if text), "the latency limit is too short")
    return f"{head} at batch {w.batch}, depth {begun.depth}: on one device, {missing}"
