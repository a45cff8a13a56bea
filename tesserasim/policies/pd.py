"""Prefill on some GPUs, decode on others, with overflow of whole requests.

Every ratio and direction is tried. A ratio p:q becomes lanes that pair each prefill GPU with each decode GPU
(1:1 has one lane). *Overflow*: prefill and decode seldom balance, so one more lane serves whole requests
on one of the GPUs at lower priority, in the time that the split leaves idle; its share follows from the
closed form and, in a closed loop, from the run itself.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np

from tesserasim.planner.seeds import pd_vector
from tesserasim.plans import Plan
from tesserasim.policies.base import KEEP, Context, NotApplicable, Policy, Run, Scored, hedge, register

#: Splits (best predicted first) to which overflow lanes are added.
BASES = 6


@register
class PrefillDecode(Policy):
    name = "pd"
    summary = "prefill on some GPUs, decode on the others, idle time filled with whole requests"

    def candidates(self, ctx: Context) -> list[Plan] | NotApplicable:
        if ctx.mix.kind != "llm":
            return NotApplicable(f"{ctx.mix.model or ctx.mix.name} has no prefill and decode")
        if "decode" not in ctx.mix.units:
            return NotApplicable("with one output token there is no decode")
        if ctx.n_gpus < 2:
            return NotApplicable("it needs two GPUs")
        splits = [
            ctx.score(lanes(ctx, pre, dec, batch, depth), notes=(f"prefill:decode {len(pre)}:{len(dec)}",))
            for pre, dec in ratios(ctx) for batch, depth in self._points(ctx, len(pre) + len(dec))
        ]  # fmt: skip
        want = ctx.limits.in_flight
        exact = [s for s in splits if want is None or s.in_flight == want]
        usable = sorted((s for s in splits if not s.blocked), key=lambda s: -s.per_s)[:BASES]
        extended = [o for s in usable for o in overflows(ctx, s)]
        scored = [*(exact or splits), *(o for o in extended if want is None or o.in_flight == want)]
        plans = ctx.plans(self, scored, keep=len(scored))
        return plans if isinstance(plans, NotApplicable) else hedge(plans, has_overflow)[:KEEP]

    def _points(self, ctx: Context, n_gpus: int) -> list[tuple[int, int]]:
        """All grid points below `in_flight`: what is left over goes to the overflow lane."""
        want = ctx.limits.in_flight
        if want is None:
            return ctx.options(n_gpus)
        return [
            (b, d) for b in ctx.limits.batches for d in ctx.limits.depths if b * d <= want and ctx.reachable(b)
        ]  # fmt: skip


def ratios(ctx: Context) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prefill devices, decode devices): every way to part the devices, equal GPUs counted once."""
    everyone = range(ctx.n_gpus)
    names = [d.gpu.name for d in ctx.cluster.devices]
    found: dict[tuple[str, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for k in range(1, ctx.n_gpus):
        for prefill in combinations(everyone, k):
            decode = tuple(d for d in everyone if d not in prefill)
            found.setdefault(tuple(sorted(names[d] for d in prefill)), (prefill, decode))
    return list(found.values())


def lanes(ctx: Context, prefill: tuple[int, ...], decode: tuple[int, ...], batch: int, depth: int) -> list[Run]:
    """One lane per pair, cyclic, so that every GPU of a side has the same number; equal shares."""
    n = math.lcm(len(prefill), len(decode))
    runs = []
    for i in range(n):
        x = pd_vector(ctx.form(batch).workload, prefill[i % len(prefill)], decode[i % len(decode)])
        assert x is not None  # candidates() has checked that both units exist
        runs.append(Run("pd" if n == 1 else f"pd{i}", batch, depth, x, 1.0 / n))
    return runs


def overflows(ctx: Context, split: Scored) -> list[Scored]:
    """The split with a lane of whole requests on each GPU in turn, at every grid point that helps."""
    found = []
    points = [(b, d) for b in ctx.limits.batches for d in ctx.limits.depths if ctx.reachable(b)]
    want = ctx.limits.in_flight
    main = tuple(replace(r, priority=0) for r in split.runs)
    for batch, depth in points:
        if want is not None and split.in_flight + batch * depth != want:
            continue
        for device in range(ctx.n_gpus):
            x = np.full(ctx.form(batch).n_sites, device, dtype=np.int64)
            scored = ctx.score([*main, Run("overflow", batch, depth, x, 1.0, 1)])
            if scored.blocked or scored.per_s <= split.per_s:
                continue
            share = scored.rates[-1] / scored.per_s
            notes = (*split.extra.get("notes", ()), f"overflow {share:.1%} on {ctx.cluster.devices[device].id}")
            found.append(replace(scored, extra={"notes": notes}))
    return found


def has_overflow(plan: Plan) -> bool:
    return any(lane.name == "overflow" for lane in plan.lanes)
