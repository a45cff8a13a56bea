"""Independent replicas: every GPU serves whole requests, each at its own best (B, d).

Two ways to route. *Least outstanding* ("lo"): a request goes where fewest wait, so in a closed loop every GPU
runs as fast as it can, and the rates add up. *Static-weighted*: requests are dealt out by fixed shares, the
GPUs' own-best predicted rates; if one GPU turns out slower than predicted, all wait for it. By the closed form
both are equal; they part in the simulation and under errors of the costs.
"""

from __future__ import annotations

import numpy as np

from tesserasim.plans import Plan
from tesserasim.policies.base import Context, NotApplicable, Policy, Run, Scored, register
from tesserasim.policies.single import on_device


class _Replicas(Policy):
    uses_link = False

    def candidates(self, ctx: Context) -> list[Plan] | NotApplicable:
        per_device = [ranked(ctx, d) for d in range(ctx.n_gpus)]
        if ctx.limits.in_flight is not None:
            return self._equal(ctx, per_device)
        serving = [options for options in per_device if not options[0].blocked]
        if not serving:
            return ctx.plans(self, [s for options in per_device for s in options])
        # The k-th plan takes every GPU's k-th best point.
        depth = max(sum(not s.blocked for s in options) for options in serving)
        plans: list[Plan] = []
        for k in range(min(depth, 3)):
            chosen = [[s for s in options if not s.blocked] for options in serving]
            picks = [usable[min(k, len(usable) - 1)] for usable in chosen]
            plans.append(self._plan(ctx, picks, per_device))
        return plans

    def _plan(self, ctx: Context, picks: list[Scored], per_device: list[list[Scored]]) -> Plan:
        total = sum(s.per_s for s in picks)
        runs = [
            Run(r.name, r.batch, r.depth, r.x, s.per_s / total) for s in picks for r in s.runs
        ]  # fmt: skip
        by_name = {options[0].runs[0].name: options for options in per_device}
        limits = [f"{s.runs[0].name}: {ctx.limited_by(s, by_name[s.runs[0].name])}" for s in picks]
        idle = [f"{o[0].runs[0].name} serves nothing: {o[0].detail}" for o in per_device if o[0].blocked]
        scored = ctx.score(runs, self.dispatch, notes=tuple(idle))
        return ctx.plan(self, scored, "; ".join(limits))

    def _equal(self, ctx: Context, per_device: list[list[Scored]]) -> list[Plan] | NotApplicable:
        """`in_flight` requests over the GPUs in proportion to rate, with any whole batch of at least 1."""
        rates = np.array([o[0].per_s if not o[0].blocked else 0.0 for o in per_device])
        total = int(ctx.limits.in_flight or 0)
        # A GPU whose grid points are all too large for it may still hold a smaller share.
        if not rates.any():
            rates = np.array([o[0].per_s for o in per_device])
        counts = proportional(rates, total)
        runs: list[Run] = []
        for d, n in enumerate(counts):
            if n:
                points = [s for s in equal_points(ctx, d, int(n)) if s.per_s > 0]
                usable = [s for s in points if not s.blocked]
                if not usable:
                    why = points[0].detail if points else "no batch of the traces fits its share"
                    return NotApplicable(f"{ctx.cluster.devices[d].id} cannot hold its {n} of {total}: {why}")
                runs += max(usable, key=lambda s: s.per_s).runs
        each = [ctx.score([r]).per_s for r in runs]
        runs = [
            Run(r.name, r.batch, r.depth, r.x, e / sum(each)) for r, e in zip(runs, each, strict=True)
        ]  # fmt: skip
        return [ctx.plan(self, ctx.score(runs, self.dispatch), "in flight")]


def ranked(ctx: Context, device: int) -> list[Scored]:
    """Grid points of one device: those that may run first, best predicted first."""
    points = on_device(ctx, device)
    if not points:
        raise_reason = next(iter(ctx.unreachable.values()), "no grid point")
        x = np.zeros(0, dtype=np.int64)
        return [Scored((Run(ctx.cluster.devices[device].id, 1, 1, x),), (0.0,), "grid", raise_reason)]
    return sorted(points, key=lambda s: (s.blocked != "", -s.per_s, s.in_flight))


def proportional(rates: np.ndarray, total: int) -> list[int]:
    """Whole numbers that add up to `total` in proportion to `rates` (largest remainder, then first device)."""
    exact = rates / rates.sum() * total
    counts = np.floor(exact + 1e-9).astype(int)
    order = sorted(range(len(rates)), key=lambda i: (-(exact[i] - counts[i]), i))
    for i in order[: total - int(counts.sum())]:
        counts[i] += 1
    return [int(c) for c in counts]


def equal_points(ctx: Context, device: int, n: int) -> list[Scored]:
    """(B, d) with B * d = n on one device: any whole batch up to the grid's largest.

    A mix with one batch only (images) runs n cohorts of it, if it divides n.
    """
    top = max(ctx.limits.batches)
    if len(ctx.limits.batches) == 1:
        pairs = [(top, n // top)] if n % top == 0 else []
    else:
        pairs = [(n // d, d) for d in ctx.limits.depths if n % d == 0 and n // d <= top]
    found = []
    for batch, depth in pairs:
        if ctx.reachable(batch):
            x = np.full(ctx.form(batch).n_sites, device, dtype=np.int64)
            found.append(ctx.score([Run(ctx.cluster.devices[device].id, batch, depth, x)]))
    return found


@register
class ReplicasStatic(_Replicas):
    """Replicas with requests dealt out by fixed shares."""

    name = "replicas-static"
    summary = "every GPU serves whole requests; fixed shares by own-best rates"
    dispatch = "static"
    fixed_shares = True


@register
class ReplicasLeastOutstanding(_Replicas):
    """Replicas with requests going where fewest wait."""

    name = "replicas-lo"
    summary = "every GPU serves whole requests; each takes the next as it finishes one"
