"""Attention on one GPU, the rest on the other (attention-FFN disaggregation), in either direction.

Cohorts in flight overlap: while one is in its attention part, another is in its feed-forward part. This
file is the one to copy for a policy that is a single placement rule.
"""

from __future__ import annotations

from itertools import permutations

from tesserasim.planner.seeds import af_vector
from tesserasim.plans import Plan
from tesserasim.policies.base import Context, NotApplicable, Policy, Run, register


@register
class AttentionFfn(Policy):
    name = "af"
    summary = "attention on one GPU, the rest on another, cohorts overlapped by depth"

    def candidates(self, ctx: Context) -> list[Plan] | NotApplicable:
        if ctx.n_gpus < 2:
            return NotApplicable("it needs two GPUs")
        if ctx.mix.kind != "llm":
            return NotApplicable(f"{ctx.mix.model or ctx.mix.name} has no attention-FFN decode to split")
        scored = []
        for batch, depth in ctx.options(n_gpus=2):
            form = ctx.form(batch)
            for attention, rest in permutations(range(ctx.n_gpus), 2):
                x = af_vector(form.workload, attention, rest)
                if x is None:
                    return NotApplicable("the traces do not tell attention from feed-forward parts")
                scored.append(ctx.score([Run("attention+ffn", batch, depth, x)]))
        return ctx.plans(self, scored)
