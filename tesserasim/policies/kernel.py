"""Kernel disaggregation: every site on the GPU that the planner chooses.

For every (B, d) of the grid the seeds and the relaxation's bound are cheap. The integer program is solved
only where the bound says that the point could still beat the best plan found, best bound first.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from tesserasim.errors import DoesNotFitError
from tesserasim.metrics.memory import could_fit, max_sequences
from tesserasim.metrics.predict import NS
from tesserasim.planner.place import (
    GAP,
    NODES,
    PROVEN,
    ROUNDED,
    SOLVED,
    Placement,
    Start,
    finish,
    ideal_ns,
    start,
)
from tesserasim.plans import Plan
from tesserasim.policies.base import KEEP, Context, NotApplicable, Policy, Run, Scored, hedge, register

#: A point is solved if its bound beats the best plan by more than this (the solver's own gap).
WORTH = GAP
#: Integer programs solved per case at most; the rest keep their best seed, and the plan says so.
SOLVES = 4
#: GPUs up to which the integer program is solved; its size grows with sites x GPUs^2. Beyond, the best plan is that
#: of the rounded relaxation, or a seed; the relaxation's bound holds for any number.
SOLVABLE = 8


@register
class KernelPlacement(Policy):
    name = "kernel"
    summary = "every site on the GPU that the planner chooses (MILP, with bound and gap)"

    def __init__(self, gap: float = GAP, nodes: int = NODES, solves: int = SOLVES) -> None:
        self.gap, self.nodes, self.solves = gap, nodes, solves

    def candidates(self, ctx: Context) -> list[Plan] | NotApplicable:
        starts, blocked = self._starts(ctx)
        if not starts:
            return ctx.plans(self, blocked)
        found = self._search(starts, ctx.n_gpus <= SOLVABLE)
        if not found:
            return NotApplicable("no placement that fits was found")
        ceiling = max(s.ceiling_per_s for s in starts)
        limits = [b for b in blocked if b.per_s > ceiling]
        scored = [self._scored(ctx, s, p) for s, p in found]
        plans = ctx.plans(self, [*scored, *limits], keep=len(scored))
        # Many cuts (the solver's) against few (a seed).
        return plans if isinstance(plans, NotApplicable) else hedge(plans, by_solver)[:KEEP]

    def _starts(self, ctx: Context) -> tuple[list[Start], list[Scored]]:
        """Grid points with a bound, and those that no placement can run (kept to say what limits)."""
        limit = None if ctx.limits.latency_ms is None else ctx.limits.latency_ms * 1e6
        starts: list[Start] = []
        blocked: list[Scored] = []
        for batch, depth in ctx.options(ctx.n_gpus):
            form = ctx.form(batch)
            fits = could_fit(form.workload, depth)
            if fits and batch * depth <= max_sequences(ctx.n_gpus, ctx.limits.max_seqs):
                starts.append(start(form, depth, limit, ctx.limits.max_seqs))
                continue
            word = "max_seqs" if fits else "memory of all GPUs together"
            detail = f"batch {batch}, depth {depth}: {'too many sequences in flight' if fits else 'does not fit'}"
            run = Run("kernel", batch, depth, np.zeros(form.n_sites, dtype=np.int64))
            # Priced by the ideal, so that `limited_by` names the limit that cost most.
            blocked.append(Scored((run,), (batch * NS / ideal_ns(form, depth),), word, detail))
        return starts, blocked

    def _search(self, starts: list[Start], exact: bool) -> list[tuple[Start, Placement]]:
        """Best bound first, tightened before it is solved (`exact`); stop where none beats the best plan by the gap."""
        best = max((s.seed.prediction.per_s for s in starts if s.seed), default=0.0)
        found = [(s, s.seed) for s in starts if s.seed]
        queue = [(-s.ceiling_per_s, i) for i, s in enumerate(starts)]
        heapify(queue)
        solved = 0
        while queue and solved < self.solves and -queue[0][0] > best * (1 + WORTH):
            _, i = heappop(queue)
            begun = starts[i]
            if not begun.tightened:
                begun.tighten()
                if begun.seed is not None and begun.seed.origin == ROUNDED:
                    found.append((begun, begun.seed))
                    best = max(best, begun.seed.prediction.per_s)
                heappush(queue, (-begun.ceiling_per_s, i))
                continue
            solved += 1
            if not exact:
                continue
            try:
                placement = finish(begun, self.gap, self.nodes)
            except DoesNotFitError:
                continue
            if placement.origin == SOLVED:
                found.append((begun, placement))
            best = max(best, placement.prediction.per_s)
        return found

    def _scored(self, ctx: Context, begun: Start, p: Placement) -> Scored:
        batch = begun.form.batch
        bound_ns = min(begun.bound_ns, p.prediction.period_ns)
        gap = 1.0 - bound_ns / p.prediction.period_ns
        status, notes = "optimal" if gap <= PROVEN else "feasible", [f"planner: {p.origin}"]
        if ctx.n_gpus > SOLVABLE:
            notes.append(f"planner: more than {SOLVABLE} GPUs: the relaxation was rounded, no integer program solved")
        return ctx.score(
            [Run("kernel", batch, begun.depth, p.x)], status=status, bound_us=bound_ns / batch / 1e3, gap=gap,
            notes=tuple(notes),
        )  # fmt: skip


def by_solver(plan: Plan) -> bool:
    """The plan is the solver's, not a seed."""
    return any(note in plan.notes for note in (f"planner: {SOLVED}", f"planner: {ROUNDED}"))
