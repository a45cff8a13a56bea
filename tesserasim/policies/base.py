"""What a policy is, and what it sees.

A policy answers one question: *given these machines, this mix and these limits, what would you run?* It
returns whole `Plan`s, best predicted first, each with its own (B, d) from the grid and a word on what stopped
a larger one; or `NotApplicable` with a reason, which is an answer and not an error. It never simulates:
`evaluate` runs the best two and keeps the better.

Adding a policy
    1. Copy `af.py` (a policy that is one placement rule) to a new file in this directory.
    2. Change `name`, `summary` and the rule that makes the vector x (site -> device index).
    3. Import it in `policies/__init__.py`. It is now in `policies`, `simulate --policy NAME` and the sweep.

    @register
    class OddEven(Policy):
        name, summary = "odd-even", "odd sites here, even sites there"

        def candidates(self, ctx):
            scored = []
            for batch, depth in ctx.options(n_gpus=2):
                form = ctx.form(batch)
                x = np.arange(form.n_sites) % 2
                scored.append(ctx.score([Run("all", batch, depth, x)]))
            return ctx.plans(self, scored)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar

from tesserasim.cluster.model import Cluster, cluster_hash
from tesserasim.errors import InputError
from tesserasim.metrics.memory import PlacedLane, max_sequences, overflow, placed_bytes, why_not
from tesserasim.metrics.predict import NS, ClosedForm, IntArray, LaneLoad, lane_load, share_machines
from tesserasim.plans import Lane, Plan
from tesserasim.trace.mix import Mix
from tesserasim.workload import Workload

BATCHES = (1, 8, 32, 64, 128, 256)
DEPTHS = (1, 2, 4, 8)
#: Predictions closer than this (relative) are a tie: the smaller number of requests in flight wins.
TIE = 1e-6
#: Candidates a policy returns at most.
KEEP = 6


@dataclass(frozen=True)
class Limits:
    """The rules that hold for every policy alike.

    `in_flight` selects the table "equal in flight": B * d, summed over the lanes, is exactly that.
    """

    batches: tuple[int, ...] = BATCHES
    depths: tuple[int, ...] = DEPTHS
    max_seqs: int = 256  # sequences per GPU; a lane over n GPUs may have n times as many
    latency_ms: float | None = None  # of a cohort, entry to exit
    in_flight: int | None = None


@dataclass(frozen=True)
class NotApplicable:
    """The policy has no plan here, and why."""

    reason: str


@dataclass(frozen=True)
class Run:
    """A lane before it becomes a Lane: placement as a vector over the sites of the workload at `batch`."""

    name: str
    batch: int
    depth: int
    x: IntArray
    share: float = 1.0
    priority: int = 0


@dataclass(frozen=True)
class Scored:
    """Lanes with their closed form. `blocked` names the limit they break; "" if they may run."""

    runs: tuple[Run, ...]
    rates: tuple[float, ...]  # requests per second and lane
    blocked: str
    detail: str = ""
    extra: dict[str, Any] = field(default_factory=dict)  # fields of the Plan: status, bound_us, gap, notes

    @property
    def per_s(self) -> float:
        return sum(self.rates)

    @property
    def in_flight(self) -> int:
        return sum(r.batch * r.depth for r in self.runs)


class Context:
    """Everything a policy may look at, and the helpers that make plans alike.

    `build(batch)` gives the Workload at a batch and may raise InputError where the traces do not reach.
    """

    def __init__(
        self, mix: Mix, cluster: Cluster, build: Callable[[int], Workload], limits: Limits | None = None,
        trace_hashes: tuple[str, ...] = (), memo: MutableMapping[Any, Any] | None = None,
    ) -> None:  # fmt: skip
        self.mix, self.cluster, self.limits = mix, cluster, limits or Limits()
        self.trace_hashes = trace_hashes
        self.memo: MutableMapping[Any, Any] = {} if memo is None else memo  # for policies that share work
        self.unreachable: dict[int, str] = {}  # batch -> why the traces do not reach it
        self._build = build
        self._forms: dict[int, ClosedForm] = {}

    @property
    def n_gpus(self) -> int:
        return len(self.cluster.devices)

    def form(self, batch: int) -> ClosedForm:
        """The closed form at a batch. Raises InputError where the traces do not reach."""
        if batch not in self._forms:
            self._forms[batch] = ClosedForm(self._build(batch))
        return self._forms[batch]

    def reachable(self, batch: int) -> bool:
        """`form(batch)` exists; if not, the reason is kept in `unreachable`."""
        if batch in self.unreachable:
            return False
        try:
            self.form(batch)
        except InputError as error:
            self.unreachable[batch] = str(error)
            return False
        return True

    def options(self, n_gpus: int) -> list[tuple[int, int]]:
        """Grid points (B, d) for a lane over `n_gpus`; in the equal table those with B * d = in_flight.

        Points beyond `max_seqs` or memory are included: `score` marks them, and the best of them says what
        limited the plan. If no point has exactly `in_flight`, those with the most below it.
        """
        points = [(b, d) for b, d in product(self.limits.batches, self.limits.depths) if self.reachable(b)]
        want = self.limits.in_flight
        if want is None:
            return points
        most = max((b * d for b, d in points if b * d <= want), default=0)
        return [(b, d) for b, d in points if b * d == most]

    def score(self, runs: Sequence[Run], dispatch: str = "free", **extra: Any) -> Scored:
        """Closed form of lanes that run together, and the limit they break."""
        loads: list[LaneLoad] = []
        latest = 0.0
        for r in runs:
            p = self.form(r.batch).predict(r.x, r.depth)
            latest = max(latest, p.latency_ns)
            loads.append(lane_load(p, r.share, r.priority))
        rates = tuple(share_machines(loads, dispatch))
        blocked, detail = self._blocked(runs, latest)
        return Scored(tuple(runs), rates, blocked, detail, extra)

    def _blocked(self, runs: Sequence[Run], latency_ns: float) -> tuple[str, str]:
        placed = [PlacedLane(self.form(r.batch).workload, r.x, r.depth) for r in runs]
        found = overflow(placed)
        if found is not None:
            gpu = self.cluster.device(found[0]).gpu.name
            return f"memory of {gpu}", why_not(placed)
        everywhere = {int(d) for r in runs for d in set(r.x.tolist())}
        seqs = sum(r.batch * r.depth for r in runs)
        allowed = max_sequences(len(everywhere), self.limits.max_seqs)
        each = all(
            r.batch * r.depth <= max_sequences(len(set(r.x.tolist())), self.limits.max_seqs) for r in runs
        )
        if seqs > allowed or not each:
            return "max_seqs", f"{seqs} sequences in flight exceed {allowed} (max_seqs {self.limits.max_seqs} per GPU)"
        if self.limits.latency_ms is not None and latency_ns > self.limits.latency_ms * 1e6:
            return "latency", f"a cohort takes {latency_ns / 1e6:.0f} ms, the limit is {self.limits.latency_ms:g} ms"
        return "", ""

    def _lane(self, r: Run) -> Lane:
        form = self.form(r.batch)
        lane = Lane(r.name, r.batch, r.depth, form.assignment(r.x), r.share, r.priority)
        if r.depth == 1 or len(lane.devices) == 1:
            return lane
        # A pipeline is filled one cohort a period: those that enter together may stay together for ever.
        return replace(lane, stagger_us=round(form.predict(r.x, r.depth).ideal_ns / 1000.0, 3))

    def plans(self, policy: Policy, scored: Sequence[Scored], keep: int = KEEP) -> list[Plan] | NotApplicable:
        """The best `keep` that may run, as plans with `limited_by`; NotApplicable if none may."""
        order = sorted(range(len(scored)), key=lambda i: (-scored[i].per_s, scored[i].in_flight, i))
        usable = [scored[i] for i in order if not scored[i].blocked and scored[i].per_s > 0]
        if not usable:
            return NotApplicable(self._why_none([scored[i] for i in order]))
        best = [s for s in usable if s.per_s >= usable[0].per_s * (1 - TIE)]
        first = min(best, key=lambda s: s.in_flight)
        usable = [first, *(s for s in usable if s is not first)]
        return [self.plan(policy, s, self.limited_by(s, scored)) for s in usable[:keep]]

    def _why_none(self, scored: Sequence[Scored]) -> str:
        if scored:
            mildest = min(scored, key=lambda s: s.in_flight)
            return f"{mildest.blocked}: {mildest.detail}" if mildest.blocked else "no link between the GPUs it needs"
        if self.unreachable:
            return next(iter(self.unreachable.values()))
        return f"no (B, d) of the grid has B * d <= {self.limits.in_flight}"

    def limited_by(self, chosen: Scored, scored: Sequence[Scored]) -> str:
        """What stopped a larger (B, d): the limit of the best option that is faster, else the end of the grid."""
        if self.limits.in_flight is not None:
            short = chosen.in_flight < self.limits.in_flight
            return f"in flight {chosen.in_flight} of {self.limits.in_flight}" if short else "in flight"
        faster = [s for s in scored if s.blocked and s.per_s > chosen.per_s * (1 + TIE)]
        if faster:
            return max(faster, key=lambda s: s.per_s).blocked
        if len(self.limits.batches) == 1:  # the user's choice, not the end of a grid
            return "given batch"
        return "grid" if any(r.batch == max(self.limits.batches) for r in chosen.runs) else "throughput"

    def plan(self, policy: Policy, s: Scored, limited_by: str) -> Plan:
        """A Plan with everything the closed form knows about it."""
        total = s.per_s
        shared = s.runs if policy.fixed_shares else tuple(
            replace(r, share=rate / total) for r, rate in zip(s.runs, s.rates, strict=True)
        )  # fmt: skip
        placed = [PlacedLane(self.form(r.batch).workload, r.x, r.depth) for r in s.runs]
        memory = placed_bytes(placed)
        cuts = [self.form(r.batch).cut(r.x) for r in s.runs]
        prediction = {str(s.runs[0].depth): total}
        if len(s.runs) == 1:
            r = s.runs[0]
            prediction = {str(d): self.form(r.batch).predict(r.x, d).per_s for d in self.limits.depths}
            prediction[str(r.depth)] = total
        fields: dict[str, Any] = {"status": "fixed", "objective_us": NS / total / 1e3, **s.extra}
        return Plan(
            mix=self.mix.name, cluster=self.cluster.name, policy=policy.name,
            lanes=tuple(self._lane(r) for r in shared), limited_by=limited_by, prediction=prediction,
            cut_bytes=sum(c for c, _ in cuts), switches=sum(w for _, w in cuts),
            memory_bytes={d.id: int(m) for d, m in zip(self.cluster.devices, memory, strict=True)},
            trace_hashes=self.trace_hashes, cluster_hash=cluster_hash(self.cluster), **fields,
        )  # fmt: skip


def hedge(plans: Sequence[Plan], kind: Callable[[Plan], bool]) -> list[Plan]:
    """Best predicted first, then the best of the other `kind`, then the rest.

    Only the first two are simulated. Where the closed form is less sure of one kind (many cuts, lanes that
    compete), this puts the other kind beside it rather than a near copy of the first.
    """
    first = kind(plans[0])
    other = next((p for p in plans if kind(p) != first), None)
    return list(plans) if other is None else [plans[0], other, *(p for p in plans[1:] if p is not other)]


class Policy(ABC):
    """One way to use the machines. Subclasses are stateless: everything comes with the context."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for `policies`
    uses_link: ClassVar[bool] = True  # False: no result depends on the link, so a sweep runs it once
    #: "free": lanes take requests as they finish; "static": each lane gets exactly its share
    dispatch: ClassVar[str] = "free"
    #: True: the shares of the runs are the policy's own choice; False: they follow from the closed form
    fixed_shares: ClassVar[bool] = False

    @abstractmethod
    def candidates(self, ctx: Context) -> list[Plan] | NotApplicable:
        """Plans, best predicted first. Called once per (mix, cluster, limits); must be deterministic."""


_REGISTRY: dict[str, type[Policy]] = {}


def register(policy: type[Policy]) -> type[Policy]:
    """Class decorator: make a policy known by its name."""
    known = _REGISTRY.setdefault(policy.name, policy)
    if known.__qualname__ != policy.__qualname__ or known.__module__ != policy.__module__:
        raise ValueError(f"two policies are called {policy.name!r}")
    return policy


def registry() -> dict[str, type[Policy]]:
    """Name -> class, in order of registration."""
    return dict(_REGISTRY)
