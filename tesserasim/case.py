"""One case: a mix on a cluster under a cost model and limits, with everything that its results share.

A `Case` builds workloads, turns a policy into its best plan (candidates ranked by the closed form, the best two
simulated), and holds every run to the bound. What is worth keeping lies in a `cache`: any mutable mapping, plain
data except under keys that begin with "workload", "bound" or "honest". Runs are kept by content, component by
component, so a replica on one GPU, `single` on it and the comparison at equal budget are one run, whatever
the link.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tesserasim.cluster.model import Cluster
from tesserasim.costs.base import CostModel
from tesserasim.demands import ResourceLoad, resource_load
from tesserasim.errors import InputError
from tesserasim.lower import lower
from tesserasim.metrics.bound import Bound, bound, mixed_bound_per_s, mixed_shared_bound_per_s
from tesserasim.metrics.summary import LaneOutcome, Outcome, Summary, outcome, summarise
from tesserasim.metrics.uncertainty import PricedLane, plan_draws
from tesserasim.plans import Lane, Plan
from tesserasim.policies.base import Context, Limits, NotApplicable, Policy
from tesserasim.sim.components import grouped
from tesserasim.sim.engine import check_engine, run
from tesserasim.sim.program import SERIAL, SHARED, Program
from tesserasim.sim.result import SimResult
from tesserasim.sim.sharing import load_sharing
from tesserasim.trace.mix import Mix
from tesserasim.trace.model import Trace
from tesserasim.workload import FloatArray, Workload, build_workload

Cache = MutableMapping[Any, Any]
#: Candidates simulated per policy: predictions rank, the engine decides. Where more than two are predicted alike
#: (one GPU at several depths, several equal GPUs), up to SIMULATED_TIED of them.
SIMULATED, SIMULATED_TIED, TIED = 2, 6, 1e-3
#: A second plan that is predicted slower, by more than this, than the first has run is not simulated.
HOPE = 0.05
#: A steady rate is settled when doubling the run changes it by less than this; LONGEST (windows) bounds the run.
SETTLED = 0.01
LONGEST = 16
#: Relative slack of the invariant "throughput <= bound".
SLACK = 1e-9
#: objective_us is microseconds per request: 1e6 / us = requests per second.
US_PER_S = 1e6


class BoundViolatedError(AssertionError):
    """A run was faster than the bound: a fault of the simulator, never of the input."""


@dataclass(frozen=True)
class Ran:
    """A plan with its run."""

    plan: Plan
    summary: Summary
    engine: str
    dispatch: str


class Case:
    """One (mix, cluster, costs, limits): builds workloads, runs plans, and keeps what policies share."""

    def __init__(
        self, mix: Mix, cluster: Cluster, costs: CostModel, limits: Limits | None = None, engine: str = "auto",
        seed: int = 0, cache: Cache | None = None, allow_extrapolation: bool = False, device_model: str = SERIAL,
    ) -> None:  # fmt: skip
        check_engine(engine, device_model)
        self.device_model = device_model
        self.mix, self.cluster, self.costs, self.engine, self.seed = mix, cluster, costs, engine, seed
        self.limits = limits or Limits()
        self.cache: Cache = {} if cache is None else cache
        self.allow = allow_extrapolation
        self.traces = tuple(trace_hash(t) for unit in mix.units for t in mix.traces[unit])
        #: what every result here depends on, machines aside
        model = [] if device_model == SERIAL else [device_model, asdict(load_sharing())]
        self.base = digest(mix_facts(mix), self.traces, costs.name, costs.version, allow_extrapolation, *model)
        # Grids and site tables are kept with the mix and the cost model: equal ones are one object.
        self.mix = self.cache.setdefault(("workload mix", self.base), mix)
        self.costs = self.cache.setdefault(("workload costs", costs.name, costs.version), costs)
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

    def best(self, policy: Policy, limits: Limits | None = None) -> Ran | NotApplicable:
        """The policy's best plan: of its candidates the two best predicted are simulated.

        Raises InputError if the traces reach no batch at all (lengths beyond the captured grid).
        """
        ctx = self.context if limits is None else self.context_for(limits)
        found = policy.candidates(ctx)
        if ctx.unreachable and not any(ctx.reachable(b) for b in ctx.limits.batches):
            raise InputError(next(iter(ctx.unreachable.values())))
        if isinstance(found, NotApplicable):
            return found
        best: Ran | None = None
        for plan in _worth_a_run(found):
            predicted = US_PER_S / plan.objective_us if plan.objective_us else 0.0
            if best is not None and predicted * (1 + HOPE) <= best.summary.steady_per_s:
                continue
            ran = self.run(plan, policy.dispatch)
            if best is None or ran.summary.steady_per_s > best.summary.steady_per_s:
                best = ran
        assert best is not None  # candidates() returns at least one plan
        return best

    def run(self, plan: Plan, dispatch: str) -> Ran:
        """Simulate a plan, component by component."""
        parts = [self._component(plan, lanes) for lanes in self._components(plan)]
        summary = summarise(plan, self.cluster, parts, dispatch)
        engines = sorted({part.engine for _, part in parts})
        ran = Ran(plan, summary, "+".join(engines), dispatch)
        return self._held_to_bound(ran)

    def _components(self, plan: Plan) -> list[list[Lane]]:
        """Lanes that cannot influence each other, apart: shared devices of one DRAM can."""
        if self.device_model == SERIAL or not self.cluster.dram_domains:
            return lane_components(plan)
        dram = dict(zip((d.id for d in self.cluster.devices), self.cluster.dram_of, strict=True))
        return [[plan.lanes[i] for i in g] for g in grouped({dram[d] for d in x.devices} for x in plan.lanes)]

    def _component(self, plan: Plan, lanes: Sequence[Lane]) -> tuple[tuple[str, ...], Outcome]:
        devices = tuple(d.id for d in self.cluster.devices if any(d.id in lane.devices for lane in lanes))
        names = [f"lane{i}" for i in range(len(lanes))]
        key = ("run", self.base, self.engine, *self._component_facts(lanes, devices))
        if key not in self.cache:
            renamed = [replace(x, name=n) for x, n in zip(lanes, names, strict=True)]
            result, change = settled_run(self._lowered(plan, renamed), self.engine)
            self.cache[key] = outcome(result, devices, change).to_dict()
        kept = self.cache[key]
        own = tuple(
            LaneOutcome(**{**data, "name": lane.name}) for data, lane in zip(kept["lanes"], lanes, strict=True)
        )
        return devices, Outcome(own, tuple(kept["utilisation"]), kept["engine"], kept["change"])

    def _lowered(self, plan: Plan, lanes: Sequence[Lane]) -> Program:
        part = replace(plan, lanes=tuple(lanes))
        return lower(
            self.mix, part, self.cluster, self.costs, allow_extrapolation=self.allow, device_model=self.device_model
        )

    def verify(self, plan: Plan) -> None:
        """Run a plan once more, for a first window, and hold every slice of it to the invariants.

        One window shows all kernels and transfers of the plan. Raises InvariantError.
        """
        for lanes in self._components(plan):
            run(self._lowered(plan, lanes), engine=self.engine, check=True)

    def _component_facts(self, lanes: Sequence[Lane], devices: tuple[str, ...]) -> tuple[str, ...]:
        """What a component's run depends on, with devices by position, so that equal machines share a run."""
        place = {d: i for i, d in enumerate(devices)}
        content = [
            [x.batch, x.depth, x.priority, x.stagger_us,
             {u: {s: place[d] for s, d in a.items()} for u, a in x.assignment.items()}]
            for x in lanes
        ]
        links = [
            [i, j, asdict(link), self.cluster.nic_gbps.get(a), self.cluster.nic_gbps.get(b)]
            for i, a in enumerate(devices) for j, b in enumerate(devices)
            if i < j and (link := self.cluster.link(a, b)) is not None
        ]  # fmt: skip
        gpus = [repr(self.cluster.device(d).gpu) for d in devices]
        if self.device_model == SERIAL:
            return (digest(content), digest(gpus, links))
        drams = dict(zip((d.id for d in self.cluster.devices), self.cluster.dram_of, strict=True))
        order = list(dict.fromkeys(drams[d] for d in devices))
        parts = [[self.cluster.device(d).sm_count, order.index(drams[d])] for d in devices]
        return (digest(content), digest(gpus, links, parts))

    def load(self, batch: int) -> ResourceLoad:
        """What a cohort asks of SMs and DRAM; kept like the workload."""
        key = ("workload load", self.base, self._machines(), batch)
        if key not in self.cache:
            self.cache[key] = resource_load(self.mix, self.cluster, self.costs, batch, self.allow)
        kept: ResourceLoad = self.cache[key]
        return kept

    def _machines(self) -> str:
        return digest([[repr(d.gpu), d.sm_count] for d in self.cluster.devices], self.cluster.dram_of)

    def bound(self) -> Bound | None:
        """The bound over the grid's batches, kept per set of GPUs."""
        gpus = [repr(d.gpu) for d in self.cluster.devices]
        shared = self.device_model == SHARED
        machines = (self._machines(),) if shared else ()
        key = ("bound", self.base, digest(gpus, self.limits.batches, self.limits.max_seqs, *machines))
        if key not in self.cache:
            loads = [self.workload(b) for b in self.limits.batches if self.context.reachable(b)]
            by_resource = {w.batch: self.load(w.batch) for w in loads} if shared else None
            self.cache[key] = bound(loads, self.limits.max_seqs, by_resource)
        found: Bound | None = self.cache[key]
        return found

    def bound_for(self, plan: Plan) -> tuple[float, int]:
        """(requests per second, batch): the case's bound, raised if the plan uses batches outside the grid."""
        grid = self.bound()
        per_s, batch = (grid.per_s, grid.batch) if grid else (0.0, 0)
        used = sorted({lane.batch for lane in plan.lanes})
        if len(used) > 1 or used[0] not in self.limits.batches or not grid:
            if self.device_model == SHARED:
                own = mixed_shared_bound_per_s([self.load(b) for b in used])
            else:
                own = mixed_bound_per_s([self.workload(b) for b in used])
            if own > per_s:
                return own, used[-1]
        return per_s, batch

    def _held_to_bound(self, ran: Ran) -> Ran:
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

    def draws(self, ran: Ran) -> FloatArray:
        return plan_draws(ran.plan, self.priced(ran.plan), ran.dispatch, ran.summary.steady_per_s, self.seed)


def _worth_a_run(plans: Sequence[Plan]) -> list[Plan]:
    """The first SIMULATED, and one-GPU plans (cheap to run) that are predicted as fast as the first."""
    first = plans[0].objective_us or 0.0
    tied = [
        p for p in plans[SIMULATED:]
        if p.objective_us and p.objective_us <= first * (1 + TIED) and all(len(x.devices) == 1 for x in p.lanes)
    ]  # fmt: skip
    return [*plans[:SIMULATED], *tied[: SIMULATED_TIED - SIMULATED]]


def settled_run(program: Program, engine: str) -> tuple[SimResult, float]:
    """Run a program until doubling the run changes its rate by less than 1 %; (result, last change).

    Lanes that talk to nobody repeat themselves exactly on serial devices and run once. Others may drift: cohorts
    that entered together go through the machines together and spread out slowly, so that a first window sees idle
    devices which later windows do not (20 % too slow, for prefill and decode on two GPUs at depth 2). Each doubling
    counts only the second half of the run and compares it with the quarter before; given up at LONGEST windows,
    the change being reported.
    """
    if not program.channels and program.device_model == SERIAL:
        return run(program, engine=engine), 0.0
    stretch = 2
    while True:
        result = run(replace(program, stretch=stretch), engine=engine)
        before = sum(lane.before_per_s(lane.window // 2) for lane in result.lanes)
        change = abs(sum(lane.steady_per_s for lane in result.lanes) / before - 1.0)
        if change < SETTLED or stretch >= LONGEST:
            return result, change
        stretch *= 2


def lane_components(plan: Plan) -> list[list[Lane]]:
    """Lanes grouped so that groups share no device (and so no link)."""
    return [[plan.lanes[i] for i in group] for group in grouped(set(lane.devices) for lane in plan.lanes)]


def digest(*content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]


def mix_facts(mix: Mix) -> list[Any]:
    """What a mix says beside its traces."""
    words = [mix.name, mix.model, mix.kind, mix.incomplete, mix.units]
    return [*words, mix.input_tokens, mix.output_tokens, mix.prefill_batch, mix.stages]


_TRACE_HASHES: dict[int, tuple[Trace, str]] = {}


def trace_hash(trace: Trace) -> str:
    """Hash over the content of a trace; computed once per object."""
    kept = _TRACE_HASHES.get(id(trace))
    if kept is None or kept[0] is not trace:
        text = repr((trace.meta, trace.kernels, trace.buffers))
        kept = (trace, hashlib.sha256(text.encode()).hexdigest()[:16])
        _TRACE_HASHES[id(trace)] = kept
    return kept[1]
