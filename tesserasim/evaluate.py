"""From a policy to one result row: candidates, the best two simulated, the better kept, honest numbers beside it.

`evaluate` and `evaluate_plan` return an `Evaluation`, whose `row` is plain data with the keys of `simulate
--json`. Three numbers stand beside every result: replicas (the better routing), the best single GPU type at
equal budget, and the bound.

Comparisons use steady throughput (see metrics/summary.py). `regime`: this is a closed loop in which every lane
always has its cohorts in flight, i.e. at saturation by construction: "near".

A `cache` (any mutable mapping; plain data, except under keys that begin with "workload") keeps what several
results share: workloads by batch, runs of components by content (so a replica on one GPU, `single` on it and
the comparison at equal budget are one run, whatever the link), and the honest numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from tesserasim.cluster.model import Cluster
from tesserasim.costs.base import CostModel
from tesserasim.errors import DoesNotFitError, InputError
from tesserasim.lower import lower
from tesserasim.metrics.bound import Bound, bound, mixed_bound_per_s
from tesserasim.metrics.memory import PlacedLane, why_not
from tesserasim.metrics.predict import ClosedForm
from tesserasim.metrics.summary import (
    LaneOutcome,
    Outcome,
    Summary,
    outcome,
    per_usd,
    summarise,
    tokens_per_s,
    usd_per_hour,
)
from tesserasim.metrics.uncertainty import PricedLane, interval80, p_win, plan_draws, rel_error
from tesserasim.plan import Lane, Plan
from tesserasim.policies import find_policy, policies
from tesserasim.policies.base import Context, Limits, NotApplicable, Policy
from tesserasim.policies.single import SingleOn, first_of_each_type
from tesserasim.sim.engine import run
from tesserasim.trace.mix import Mix
from tesserasim.trace.model import Trace
from tesserasim.workload import FloatArray, Workload, build_workload

Cache = MutableMapping[Any, Any]
#: Candidates simulated per policy: predictions rank, the engine decides.
SIMULATED = 2
#: Relative slack of the invariant "throughput <= bound".
SLACK = 1e-9
OWN_BEST, EQUAL = "own-best", "equal-in-flight"


class BoundViolatedError(AssertionError):
    """A run was faster than the bound: a fault of the simulator, never of the input."""


@dataclass
class Evaluation:
    """A result row and what it was made from. `draws` (200) belong to the row; policies share their numbers."""

    row: dict[str, Any]
    plan: Plan | None = None
    draws: list[float] = field(default_factory=list)

    @property
    def applicable(self) -> bool:
        return bool(self.row["applicable"])


@dataclass(frozen=True)
class _Ran:
    """A plan with its run."""

    plan: Plan
    summary: Summary
    engine: str
    dispatch: str


class Case:
    """One (mix, cluster, costs, limits): builds workloads, runs plans, and keeps what policies share."""

    def __init__(
        self, mix: Mix, cluster: Cluster, costs: CostModel, limits: Limits | None = None, engine: str = "auto",
        seed: int = 0, cache: Cache | None = None, allow_extrapolation: bool = False, check: bool = False,
    ) -> None:  # fmt: skip
        self.mix, self.cluster, self.costs, self.engine, self.seed = mix, cluster, costs, engine, seed
        self.limits = limits or Limits()
        self.cache: Cache = {} if cache is None else cache
        self.allow, self.check = allow_extrapolation, check
        self.traces = tuple(trace_hash(t) for unit in mix.units for t in mix.traces[unit])
        #: what every result here depends on, machines aside
        self.base = digest(mix_facts(mix), self.traces, costs.name, costs.version, allow_extrapolation)
        self.context = self.context_for(self.limits)

    def context_for(self, limits: Limits) -> Context:
        return Context(self.mix, self.cluster, self.workload, limits, self.traces)

    def workload(self, batch: int) -> Workload:
        """The workload at a batch; kept per set of GPUs, since links do not change it."""
        gpus = tuple((d.id, repr(d.gpu)) for d in self.cluster.devices)
        key = ("workload", self.base, gpus, batch)
        if key not in self.cache:
            self.cache[key] = build_workload(self.mix, self.cluster, self.costs, batch, self.allow)
        kept: Workload = self.cache[key]
        return kept if kept.cluster is self.cluster else replace(kept, mix=self.mix, cluster=self.cluster)

    def best(self, policy: Policy, limits: Limits | None = None) -> _Ran | NotApplicable:
        """The policy's best plan: of its candidates the two best predicted are simulated."""
        ctx = self.context if limits is None else self.context_for(limits)
        found = policy.candidates(ctx)
        if isinstance(found, NotApplicable):
            return found
        best: _Ran | None = None
        for plan in found[:SIMULATED]:
            # The closed form is optimistic: a plan that is predicted slower than what has run cannot win.
            if best is not None and NS_PER_US / (plan.objective_us or math.inf) <= best.summary.steady_per_s:
                continue
            ran = self.run(plan, policy.dispatch)
            if best is None or ran.summary.steady_per_s > best.summary.steady_per_s:
                best = ran
        assert best is not None  # candidates() returns at least one plan
        return best

    def run(self, plan: Plan, dispatch: str) -> _Ran:
        """Simulate a plan, component by component."""
        parts = [self._component(plan, lanes) for lanes in lane_components(plan)]
        summary = summarise(plan, self.cluster, parts, dispatch)
        engines = sorted({part.engine for _, part in parts})
        ran = _Ran(plan, summary, "+".join(engines), dispatch)
        return self._held_to_bound(ran)

    def _component(self, plan: Plan, lanes: Sequence[Lane]) -> tuple[tuple[str, ...], Outcome]:
        devices = tuple(d.id for d in self.cluster.devices if any(d.id in lane.devices for lane in lanes))
        names = [f"lane{i}" for i in range(len(lanes))]
        key = ("run", self.base, self.engine, *self._component_facts(lanes, devices))
        if key not in self.cache or self.check:
            part = replace(plan, lanes=tuple(replace(x, name=n) for x, n in zip(lanes, names, strict=True)))
            program = lower(self.mix, part, self.cluster, self.costs, allow_extrapolation=self.allow)
            self.cache[key] = outcome(run(program, engine=self.engine, check=self.check), devices).to_dict()
        kept = self.cache[key]
        own = tuple(
            LaneOutcome(**{**data, "name": lane.name}) for data, lane in zip(kept["lanes"], lanes, strict=True)
        )
        return devices, Outcome(own, tuple(kept["utilisation"]), kept["engine"])

    def _component_facts(self, lanes: Sequence[Lane], devices: tuple[str, ...]) -> tuple[str, ...]:
        """What a component's run depends on, with devices by position, so that equal machines share a run."""
        place = {d: i for i, d in enumerate(devices)}
        content = [
            [x.batch, x.depth, x.priority, {u: {s: place[d] for s, d in a.items()} for u, a in x.assignment.items()}]
            for x in lanes
        ]
        links = [
            [i, j, asdict(link), self.cluster.nic_gbps.get(a), self.cluster.nic_gbps.get(b)]
            for i, a in enumerate(devices) for j, b in enumerate(devices)
            if i < j and (link := self.cluster.link(a, b)) is not None
        ]  # fmt: skip
        gpus = [repr(self.cluster.device(d).gpu) for d in devices]
        return (digest(content), digest(gpus, links))

    def bound(self) -> Bound | None:
        """The bound over the grid's batches, kept per set of GPUs."""
        gpus = [repr(d.gpu) for d in self.cluster.devices]
        key = ("bound", self.base, digest(gpus, self.limits.batches, self.limits.max_seqs))
        if key not in self.cache:
            loads = [self.workload(b) for b in self.limits.batches if self.context.reachable(b)]
            self.cache[key] = bound(loads, self.limits.max_seqs)
        found: Bound | None = self.cache[key]
        return found

    def bound_for(self, plan: Plan) -> tuple[float, int]:
        """(requests per second, batch): the case's bound, raised if the plan uses batches outside the grid."""
        grid = self.bound()
        per_s, batch = (grid.per_s, grid.batch) if grid else (0.0, 0)
        used = sorted({lane.batch for lane in plan.lanes})
        if len(used) > 1 or used[0] not in self.limits.batches or not grid:
            own = mixed_bound_per_s([self.workload(b) for b in used])
            if own > per_s:
                return own, used[-1]
        return per_s, batch

    def _held_to_bound(self, ran: _Ran) -> _Ran:
        """Check the invariant "throughput <= bound", and cap what only the window's edges put above it.

        End-to-end figures cannot exceed the bound. A window may count up to d cohorts that began before it.
        """
        limit, _ = self.bound_for(ran.plan)
        s = ran.summary
        if s.end_to_end_per_s > limit * (1 + SLACK):
            raise BoundViolatedError(f"{ran.plan.policy}: {s.end_to_end_per_s} /s end to end exceed the bound {limit}")
        edge = max(1.0 / self._windows(lane) for lane in ran.plan.lanes)
        if s.steady_per_s > limit * (1 + edge):
            raise BoundViolatedError(f"{ran.plan.policy}: {s.steady_per_s} /s in the window exceed the bound {limit}")
        if s.steady_per_s > limit:
            shrink = limit / s.steady_per_s
            lanes = tuple(r * shrink for r in s.lane_per_s)
            return replace(ran, summary=replace(s, steady_per_s=limit, lane_per_s=lanes))
        return ran

    def _windows(self, lane: Lane) -> int:
        """Window over depth, as the engine chooses it (sim/program.py)."""
        return 2 if self.mix.launches(lane.batch) >= 100 else 8

    def priced(self, plan: Plan) -> list[PricedLane]:
        """The plan's lanes on their closed forms."""
        found = []
        for lane in plan.lanes:
            form = self.context.form(lane.batch)
            found.append(PricedLane(form, form.vector(lane), lane.depth, lane.share, lane.priority))
        return found

    def draws(self, ran: _Ran) -> FloatArray:
        return plan_draws(ran.plan, self.priced(ran.plan), ran.dispatch, ran.summary.steady_per_s, self.seed)


NS_PER_US = 1e6  # objective_us is microseconds per request: 1e6 / us = requests per second


@dataclass(frozen=True)
class Honest:
    """The numbers that keep a result honest. None: no such plan, or a price is unknown."""

    replicas_per_s: float | None
    replicas_policy: str
    replicas_draws: FloatArray | None
    best_single_per_s: float | None  # N = budget / price GPUs of one type, N real
    best_single_int_per_s: float | None  # floor(N)
    best_single_gpu: str
    best_single_count: float | None
    single_draws: FloatArray | None  # of the N GPUs
    one_gpu_per_s: dict[str, float]  # GPU type -> rate of one


def honest_numbers(case: Case) -> Honest:
    """Replicas under the better routing and the best single GPU type at equal budget, under the case's limits.

    Budget = price of all devices of the cluster. N GPUs of one type give N times the rate of one, each within
    the limits of one GPU.
    """
    prices = repr(sorted((n, p.usd_per_hour) for n, p in case.cluster.prices.items()))
    gpus = [repr(d.gpu) for d in case.cluster.devices]
    key = ("honest", case.base, case.engine, case.seed, digest(gpus, prices, asdict(case.limits)))
    if key not in case.cache:
        case.cache[key] = _honest(case)
    found: Honest = case.cache[key]
    return found


def _honest(case: Case) -> Honest:
    replicas: _Ran | None = None
    for name in ("replicas-lo", "replicas-static"):
        ran = case.best(find_policy(name))
        if isinstance(ran, _Ran) and (replicas is None or ran.summary.steady_per_s > replicas.summary.steady_per_s):
            replicas = ran
    budget = case.cluster.usd_per_hour
    rates: dict[str, float] = {}
    best: tuple[float, float, str, _Ran] | None = None
    whole: float | None = None
    for d in first_of_each_type(case.context):
        ran = case.best(SingleOn(d))
        if not isinstance(ran, _Ran):
            continue
        gpu = case.cluster.devices[d].gpu.name
        rates[gpu] = ran.summary.steady_per_s
        if budget is None:
            continue
        n = budget / case.cluster.prices[gpu].usd_per_hour
        # n is a quotient of prices: a whole number may come out a hair below.
        whole = max(whole or 0.0, math.floor(n + 1e-9) * rates[gpu])
        if best is None or n * rates[gpu] > best[0]:
            best = (n * rates[gpu], n, gpu, ran)
    return Honest(
        replicas.summary.steady_per_s if replicas else None,
        replicas.plan.policy if replicas else "",
        case.draws(replicas) if replicas else None,
        best[0] if best else None, whole, best[2] if best else "", best[1] if best else None,
        case.draws(best[3]) * best[1] if best else None, rates,
    )  # fmt: skip


def evaluate(
    mix: Mix, cluster: Cluster, costs: CostModel, policy: str | Policy | type[Policy], *,
    limits: Limits | None = None, engine: str = "auto", seed: int = 0, table: str | None = None,
    cache: Cache | None = None, allow_extrapolation: bool = False, check: bool = False,
) -> Evaluation:  # fmt: skip
    """The best plan of a policy as one row.

    `table` names the row ("own-best", or "equal-in-flight" where `limits.in_flight` is set). Prices come with
    the cluster. A policy without a plan gives a row with applicable False and the reason. `check` runs the
    engine's invariants on every run (slow). Raises InputError for input that cannot be used.
    """
    chosen = _policy(policy)
    case = Case(mix, cluster, costs, limits, engine, seed, cache, allow_extrapolation, check)
    ran = case.best(chosen)
    if isinstance(ran, NotApplicable):
        row = {"policy": chosen.name, "applicable": False, "reason": ran.reason}
        return Evaluation({**_common(case, table), **row})
    return _evaluation(case, ran, table)


def evaluate_plan(
    mix: Mix, cluster: Cluster, costs: CostModel, plan: Plan, *, limits: Limits | None = None,
    engine: str = "auto", seed: int = 0, table: str | None = None, cache: Cache | None = None,
    allow_extrapolation: bool = False, check: bool = False,
) -> Evaluation:  # fmt: skip
    """A given plan as one row. Raises DoesNotFitError if it exceeds a device's memory, InputError if it does not
    cover the mix or names unknown devices."""
    case = Case(mix, cluster, costs, limits, engine, seed, cache, allow_extrapolation, check)
    try:
        lanes = case.priced(plan)
    except KeyError as error:
        raise InputError(f"plan for {plan.mix} on {plan.cluster}: {error} is not in this mix or cluster") from None
    reason = why_not([PlacedLane(x.form.workload, x.x, x.depth) for x in lanes])
    if reason:
        raise DoesNotFitError(reason)
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
        "device_model": "serial", "seed": case.seed, "costs": case.costs.name,
    }  # fmt: skip


def _evaluation(case: Case, ran: _Ran, table: str | None) -> Evaluation:
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
        "predicted_per_s": NS_PER_US / plan.objective_us if plan.objective_us else None,
        "latency_ms": dict(s.latency_ms), "utilisation": dict(s.utilisation),
        "usd_per_hour": price, "per_usd": per_usd(s.steady_per_s, price),
        "bound_per_s": per_s, "bound_batch": at,
        "replicas_per_s": honest.replicas_per_s, "replicas_policy": honest.replicas_policy,
        "best_single_per_s": honest.best_single_per_s, "best_single_int_per_s": honest.best_single_int_per_s,
        "best_single_gpu": honest.best_single_gpu, "best_single_count": honest.best_single_count,
        "interval80": list(interval80(draws)), "rel_error": rel_error(draws),
        "p_win": _p_win(draws, honest), "regime": "near", "engine": ran.engine,
        "gain80_vs_replicas": _gain(draws, honest.replicas_draws),
        "gain80_vs_single": _gain(draws, honest.single_draws),
        **break_even(case.cluster, plan, s.steady_per_s, honest.one_gpu_per_s),
        "plan_status": plan.status, "plan_gap": plan.gap, "notes": list(plan.notes),
        "lanes": [_lane(case, lane, rate) for lane, rate in zip(plan.lanes, s.lane_per_s, strict=True)],
        "extrapolated": sorted({u for w in forms.values() for u in w.extrapolated}),
        "cost_sources": dict(zip((d.id for d in case.cluster.devices), _sources(forms[main.batch]), strict=True)),
    }  # fmt: skip
    return Evaluation(row, plan, [float(v) for v in draws])


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


def _p_win(draws: FloatArray, honest: Honest) -> float:
    """P(this plan is at least as fast as replicas and as single GPUs at equal budget); a tie counts half.

    A comparison of several policies replaces it by P(fastest of all): `set_p_win`.
    """
    rivals = {"self": draws}
    if honest.replicas_draws is not None:
        rivals["replicas"] = honest.replicas_draws
    if honest.single_draws is not None:
        rivals["single"] = honest.single_draws
    return p_win(rivals)["self"]


def set_p_win(evaluations: Sequence[Evaluation]) -> None:
    """Set every applicable row's `p_win` to its share of draws as the fastest of all these policies."""
    usable = [e for e in evaluations if e.applicable]
    shares = p_win({str(i): np.array(e.draws) for i, e in enumerate(usable)})
    for i, e in enumerate(usable):
        e.row["p_win"] = shares[str(i)]


def break_even(cluster: Cluster, plan: Plan, per_s: float, one_gpu: dict[str, float]) -> dict[str, Any]:
    """Price of the cluster's second GPU type at which the plan gives as much per dollar as the first type alone.

    With n1, n2 devices of each type at p1, p2 dollars: per_s / (n1 p1 + n2 p2) = rate_1 / p1, solved for p2.
    Below it, adding the second type pays. Negative: it pays at no price. Only for plans on two GPU types.
    """
    types = list(dict.fromkeys(d.gpu.name for d in cluster.devices))
    used = {cluster.device(d).gpu.name for lane in plan.lanes for d in lane.devices}
    found: dict[str, Any] = {"break_even_gpu": None, "break_even_usd_per_hour": None}
    if len(types) != 2 or len(used) != 2 or types[0] not in cluster.prices or not one_gpu.get(types[0]):
        return found
    n1, n2 = (sum(d.gpu.name == t for d in cluster.devices) for t in types)
    p1 = cluster.prices[types[0]].usd_per_hour
    return {
        "break_even_gpu": types[1],
        "break_even_usd_per_hour": (per_s * p1 / one_gpu[types[0]] - n1 * p1) / n2,
    }


def lane_components(plan: Plan) -> list[list[Lane]]:
    """Lanes grouped so that groups share no device (and so no link)."""
    groups: list[tuple[set[str], list[Lane]]] = []
    for lane in plan.lanes:
        devices, members = set(lane.devices), [lane]
        apart = []
        for used, lanes in groups:
            if used & devices:
                devices |= used
                members = lanes + members
            else:
                apart.append((used, lanes))
        groups = [*apart, (devices, members)]
    return [lanes for _, lanes in groups]


def digest(*content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]


def mix_facts(mix: Mix) -> list[Any]:
    return [mix.kind, mix.input_tokens, mix.output_tokens, mix.prefill_batch, mix.stages, mix.units]


_TRACE_HASHES: dict[int, tuple[Trace, str]] = {}


def trace_hash(trace: Trace) -> str:
    """Hash over the content of a trace; computed once per object."""
    kept = _TRACE_HASHES.get(id(trace))
    if kept is None or kept[0] is not trace:
        text = repr((trace.meta, trace.kernels, trace.buffers))
        kept = (trace, hashlib.sha256(text.encode()).hexdigest()[:16])
        _TRACE_HASHES[id(trace)] = kept
    return kept[1]


def closed_form(mix: Mix, cluster: Cluster, costs: CostModel, batch: int) -> ClosedForm:
    """The closed form of a mix at a batch: a shortcut for notebooks and tests."""
    return ClosedForm(build_workload(mix, cluster, costs, batch))
