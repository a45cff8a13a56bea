"""What policies make of a unit on its devices: plans that `python -m hw replay --plan` runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from hw.validate.bench import Unit, bench, unit_batch
from tesserasim.case import Case
from tesserasim.errors import InputError
from tesserasim.planner.seeds import af_vector
from tesserasim.plans import Plan
from tesserasim.policies import policies
from tesserasim.policies.af import AttentionFfn
from tesserasim.policies.base import Context, Limits, NotApplicable, Policy, Run

#: Policies whose plans for a unit are replayed. Replicas are `single` on every device at once, which the replay times
#: by itself; prefill and decode apart are two units.
POLICIES = ("single", "af", "kernel")


class _PartsApart(AttentionFfn):
    """Attention apart from the rest, in any unit that tells them apart: the policy itself splits decode steps only."""

    def candidates(self, ctx: Context) -> list[Plan] | NotApplicable:
        if ctx.n_gpus < 2:
            return NotApplicable("it needs two devices")
        scored = []
        for batch, depth in ctx.options(n_gpus=2):
            for attention, rest in permutations(range(ctx.n_gpus), 2):
                x = af_vector(ctx.form(batch).workload, attention, rest)
                if x is None:
                    return NotApplicable("the trace does not tell attention from feed-forward parts")
                scored.append(ctx.score([Run("attention+ffn", batch, depth, x)]))
        return ctx.plans(self, scored)


def policy_plans(unit: Unit, depths: Sequence[int], names: Sequence[str] = POLICIES) -> dict[str, Plan]:
    """What policies make of the unit at its batch, by "policy-depth": from measured times and the measured hop.

    A policy that cannot place the unit has no plan. InputError if no hop was measured.
    """
    if unit.hop is None:
        raise InputError("no hop was measured between the devices: python -m hw replay --links")
    mix, cluster, costs = bench(unit)
    batch = unit_batch(unit)
    found: dict[str, Plan] = {}
    for depth in depths:
        limits = Limits((batch,), (depth,), max_seqs=max(256, batch * depth))
        for name in names:
            policy: Policy = _PartsApart() if name == AttentionFfn.name else policies()[name]()
            ran = Case(mix, cluster, costs, limits).best(policy)
            if not isinstance(ran, NotApplicable):
                found[f"{name}-{depth}"] = ran.plan
    return found
