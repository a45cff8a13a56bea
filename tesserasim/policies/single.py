"""One GPU serves everything: the best GPU type of the cluster, alone."""

from __future__ import annotations

import numpy as np

from tesserasim.plans import Plan
from tesserasim.policies.base import Context, NotApplicable, Policy, Run, Scored, register


def on_device(ctx: Context, device: int) -> list[Scored]:
    """Every grid point of the whole mix on one device."""
    scored = []
    for batch, depth in ctx.options(n_gpus=1):
        x = np.full(ctx.form(batch).n_sites, device, dtype=np.int64)
        scored.append(ctx.score([Run(ctx.cluster.devices[device].id, batch, depth, x)]))
    return scored


def first_of_each_type(ctx: Context) -> list[int]:
    """Device indices, one per GPU type."""
    names = [d.gpu.name for d in ctx.cluster.devices]
    return [names.index(n) for n in dict.fromkeys(names)]


@register
class Single(Policy):
    """All units on one GPU. The other GPUs of the cluster idle, and are not paid for."""

    name = "single"
    summary = "the best single GPU of the cluster serves whole requests"
    uses_link = False

    def candidates(self, ctx: Context) -> list[Plan] | NotApplicable:
        return ctx.plans(self, [s for d in first_of_each_type(ctx) for s in on_device(ctx, d)])


class SingleOn(Policy):
    """All units on one given device: what the comparison "best single at equal budget" is made of."""

    name = "single"
    summary = "one given GPU serves whole requests"
    uses_link = False

    def __init__(self, device: int) -> None:
        self.device = device

    def candidates(self, ctx: Context) -> list[Plan] | NotApplicable:
        return ctx.plans(self, on_device(ctx, self.device))
