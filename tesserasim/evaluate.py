"""From a policy to one result row: candidates, the best two simulated, the better kept, honest numbers beside it.

`evaluate` and `evaluate_plan` return an `Evaluation`, whose `row` is plain data with the keys of `simulate
--json`. Three numbers stand beside every result: replicas (the better routing), the best single GPU type at
equal budget, and the bound.

Comparisons use steady throughput (see metrics/summary.py). `regime`: this is a closed loop in which every lane
always has its cohorts in flight, i.e. at saturation by construction: "near".

`cache` (any mutable mapping) keeps what several results share: see case.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tesserasim.case import SETTLED, US_PER_S, BoundViolatedError, Cache, Case, Ran
from tesserasim.cluster.model import Cluster
from tesserasim.costs.base import CostModel
from tesserasim.errors import DoesNotFitError, InputError
from tesserasim.honest import Honest, break_even, honest_numbers
from tesserasim.metrics.memory import PlacedLane, why_not
from tesserasim.metrics.summary import per_usd, tokens_per_s, usd_per_hour
from tesserasim.metrics.uncertainty import interval80, p_win, rel_error
from tesserasim.plans import Lane, Plan, check_plan
from tesserasim.policies import find_policy, policies
from tesserasim.policies.base import Limits, NotApplicable, Policy
from tesserasim.provenance import changed_since, check_made_for, without_accesses
from tesserasim.sim.program import SERIAL
from tesserasim.trace.mix import Mix
from tesserasim.workload import FloatArray, Workload

__all__ = [
    "BoundViolatedError", "Cache", "Case", "Evaluation", "Limits", "evaluate", "evaluate_plan", "honest_numbers",
    "set_p_win",
]  # fmt: skip

OWN_BEST, EQUAL = "own-best", "equal-in-flight"


@dataclass
class Evaluation:
    """A result row and what it was made from. `draws` (200) belong to the row; policies share their numbers."""

    row: dict[str, Any]
    plan: Plan | None = None
    draws: list[float] = field(default_factory=list)

    @property
    def applicable(self) -> bool:
        return bool(self.row["applicable"])


def evaluate(
    mix: Mix, cluster: Cluster, costs: CostModel, policy: str | Policy | type[Policy], *,
    limits: Limits | None = None, engine: str = "auto", seed: int = 0, table: str | None = None,
    cache: Cache | None = None, allow_extrapolation: bool = False, check: bool = False, device_model: str = SERIAL,
) -> Evaluation:  # fmt: skip
    """The best plan of a policy as one row.

    `table` names the row ("own-best", or "equal-in-flight" where `limits.in_flight` is set). Prices come with
    the cluster. A policy without a plan gives a row with applicable False and the reason. `check` runs the
    plan once more and verifies the engine's invariants (slow). Raises InputError for input that cannot be used.
    """
    chosen = _policy(policy)
    case = Case(mix, cluster, costs, limits, engine, seed, cache, allow_extrapolation, device_model)
    ran = case.best(chosen)
    if isinstance(ran, NotApplicable):
        row = {"policy": chosen.name, "applicable": False, "reason": ran.reason}
        return Evaluation({**_common(case, table), **row})
    if check:
        case.verify(ran.plan)
    return _evaluation(case, ran, table)


def evaluate_plan(
    mix: Mix, cluster: Cluster, costs: CostModel, plan: Plan, *, limits: Limits | None = None,
    engine: str = "auto", seed: int = 0, table: str | None = None, cache: Cache | None = None,
    allow_extrapolation: bool = False, check: bool = False, device_model: str = SERIAL,
) -> Evaluation:  # fmt: skip
    """A given plan as one row. Raises DoesNotFitError if it exceeds a device's memory, InputError if it is damaged,
    was made for another mix or cluster, does not cover the mix or names unknown devices. Traces, prices or links
    that have changed since it was made are a note in the row."""
    check_plan(plan)
    check_made_for(plan, mix, cluster)
    case = Case(mix, cluster, costs, limits, engine, seed, cache, allow_extrapolation, device_model)
    plan = replace(plan, notes=(*plan.notes, *changed_since(plan, case.traces, cluster)))
    try:
        lanes = case.priced(plan)
    except KeyError as error:
        raise InputError(f"plan for {plan.mix} on {plan.cluster}: {error} is not in this mix or cluster") from None
    reason = why_not([PlacedLane(x.form.workload, x.x, x.depth) for x in lanes])
    if reason:
        raise DoesNotFitError(reason)
    if check:
        case.verify(plan)
    known = policies().get(plan.policy)
    return _evaluation(case, case.run(plan, known.dispatch if known else "free"), table)


def _policy(policy: str | Policy | type[Policy]) -> Policy:
    if isinstance(policy, str):
        return find_policy(policy)
    return policy() if isinstance(policy, type) else policy


def _common(case: Case, table: str | None) -> dict[str, Any]:
    """What a row says whether or not the policy applies."""
    mix = case.mix
    return {
        "mix": mix.name, "cluster": case.cluster.name,
        "table": table or (OWN_BEST if case.limits.in_flight is None else EQUAL),
        "throughput_unit": mix.throughput_unit, "origins": list(mix.origins), "incomplete": list(mix.incomplete),
        "device_model": case.device_model, "seed": case.seed, "costs": case.costs.name,
    }  # fmt: skip


def _evaluation(case: Case, ran: Ran, table: str | None) -> Evaluation:
    plan, s = ran.plan, ran.summary
    draws = case.draws(ran)
    honest = honest_numbers(case)
    per_s, at = case.bound_for(plan)
    price = usd_per_hour(plan, case.cluster)
    main = max(plan.lanes, key=lambda lane: lane.share)
    forms = {lane.batch: case.context.form(lane.batch).workload for lane in plan.lanes}
    row: dict[str, Any] = {
        **_common(case, table),
        "policy": plan.policy, "applicable": True, "reason": "",
        "batch": main.batch, "depth": main.depth, "limited_by": plan.limited_by,
        "throughput_per_s": s.steady_per_s, "steady_throughput_per_s": s.steady_per_s,
        "end_to_end_per_s": s.end_to_end_per_s, "output_tokens_per_s": tokens_per_s(case.mix, s.steady_per_s),
        "predicted_per_s": US_PER_S / plan.objective_us if plan.objective_us else None,
        "latency_ms": dict(s.latency_ms), "utilisation": dict(s.utilisation),
        "usd_per_hour": price, "per_usd": per_usd(s.steady_per_s, price),
        "bound_per_s": per_s, "bound_batch": at,
        "replicas_per_s": honest.replicas_per_s, "replicas_policy": honest.replicas_policy,
        "best_single_per_s": honest.best_single_per_s, "best_single_int_per_s": honest.best_single_int_per_s,
        "best_single_gpu": honest.best_single_gpu, "best_single_count": honest.best_single_count,
        "median_per_s": float(np.median(draws)), "interval80": list(interval80(draws)), "rel_error": rel_error(draws),
        "p_win": _p_win(draws, honest), "regime": "near", "engine": ran.engine,
        "gain80_vs_replicas": _gain(draws, honest.replicas_draws),
        "gain80_vs_single": _gain(draws, honest.single_draws),
        "gain_vs_replicas": _median_gain(draws, honest.replicas_draws),
        "gain_vs_single": _median_gain(draws, honest.single_draws),
        **break_even(case.cluster, plan, s.steady_per_s, honest.one_gpu_per_s),
        "plan_status": plan.status, "plan_gap": plan.gap,
        "notes": [*plan.notes, *without_accesses(case.mix), *_unsettled(s.change), *_model_notes(case)],
        "steady_change": s.change,
        "lanes": [_lane(case, lane, rate) for lane, rate in zip(plan.lanes, s.lane_per_s, strict=True)],
        "extrapolated": sorted({u for w in forms.values() for u in w.extrapolated}),
        "cost_sources": dict(zip((d.id for d in case.cluster.devices), _sources(forms[main.batch]), strict=True)),
    }  # fmt: skip
    return Evaluation(row, plan, [float(v) for v in draws])


def _unsettled(change: float) -> list[str]:
    if change < SETTLED:
        return []
    return [f"steady rate not settled: it moved by {100 * change:.1f} % when the window was last doubled"]


def _model_notes(case: Case) -> list[str]:
    if case.device_model == SERIAL:
        return []
    return [
        "shared devices: what kernels lose by co-running is assumed, not yet calibrated; plans, batch and depth are "
        "still chosen by the closed form of serial devices"
    ]


def _sources(w: Workload) -> tuple[str, ...]:
    return w.sources or ("",) * len(w.devices)


def _lane(case: Case, lane: Lane, per_s: float) -> dict[str, Any]:
    return {
        "name": lane.name, "batch": lane.batch, "depth": lane.depth, "devices": list(lane.devices),
        "share": lane.share, "priority": lane.priority, "throughput_per_s": per_s,
    }  # fmt: skip


def _gain(draws: FloatArray, other: FloatArray | None) -> list[float] | None:
    """80 % interval of the gain over another plan, draw by draw (0.07 = 7 % faster)."""
    return None if other is None else [g - 1.0 for g in interval80(draws / other)]


def _median_gain(draws: FloatArray, other: FloatArray | None) -> float | None:
    """Median over the draws of the gain over another plan."""
    return None if other is None else float(np.median(draws / other)) - 1.0


def _p_win(draws: FloatArray, honest: Honest) -> float:
    """P(this plan is at least as fast as replicas on the same GPUs); 1 for replicas themselves.

    A comparison of several policies replaces it by P(fastest of all): `set_p_win`.
    """
    if honest.replicas_draws is None:
        return 1.0
    return float(np.mean(draws >= honest.replicas_draws * (1.0 - 1e-9)))


def set_p_win(evaluations: Sequence[Evaluation]) -> None:
    """Set every applicable row's `p_win` to its share of draws as the fastest of all these policies."""
    usable = [e for e in evaluations if e.applicable]
    shares = p_win({str(i): np.array(e.draws) for i, e in enumerate(usable)})
    for i, e in enumerate(usable):
        e.row["p_win"] = shares[str(i)]
