"""From runs to numbers: throughput, latency, utilisation and cost of a plan.

A plan's lanes fall into *components* that share no device; each component is simulated alone and gives an
`Outcome`, plain data that can be kept and shared. `summarise` puts the outcomes of a plan together.

Throughput is *steady*: requests completed per second in the window, after the warm-up. It is what policies are
compared by, because it is a property of the plan; the end-to-end figure beside it includes the ramp-up from
empty machines and depends on how long one watches. Lanes under static dispatch are slowed to the pace of the
slowest share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tesserasim.cluster.model import Cluster
from tesserasim.metrics.predict import NS
from tesserasim.plans import Plan
from tesserasim.sim.result import SimResult
from tesserasim.trace.mix import Mix


@dataclass(frozen=True)
class LaneOutcome:
    """One lane of one run."""

    name: str
    batch: int
    depth: int
    steady_per_s: float
    end_to_end_per_s: float  # all completions of the run over its length, ramp-up included
    latencies_ns: tuple[int, ...]  # cohorts of the window
    window: int  # completions in the window


@dataclass(frozen=True)
class Outcome:
    """What a component's run gave. `utilisation` by position of the device in the component."""

    lanes: tuple[LaneOutcome, ...]
    utilisation: tuple[float, ...]
    engine: str
    change: float = 0.0  # of the steady rate when the window was last doubled (0.002: by 0.2 %)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def outcome(result: SimResult, devices: Sequence[str], change: float = 0.0) -> Outcome:
    """The outcome of a simulated component; `devices` are its device ids, in the component's order."""
    used = {d.name: d.utilisation for d in result.devices}
    end = max(d.span_ns for d in result.devices)  # the component runs until its last lane has its window
    lanes = tuple(
        LaneOutcome(
            lane.name, lane.batch, lane.depth, lane.steady_per_s,
            lane.batch * sum(t <= end for t in lane.completion_ns) * NS / end, tuple(lane.latencies_ns()), lane.window,
        )
        for lane in result.lanes
    )  # fmt: skip
    return Outcome(lanes, tuple(used[d] for d in devices), result.engine, change)


@dataclass(frozen=True)
class Summary:
    """Numbers of a whole plan."""

    steady_per_s: float
    end_to_end_per_s: float
    latency_ms: Mapping[str, float]  # mean, p50, p90, p99 of a request, entry of its cohort to completion
    utilisation: Mapping[str, float]  # device id -> share of the window in which a kernel ran
    lane_per_s: tuple[float, ...]  # steady, in the order of the plan's lanes
    change: float = 0.0  # largest of the components


def summarise(plan: Plan, cluster: Cluster, parts: Sequence[tuple[Sequence[str], Outcome]], dispatch: str) -> Summary:
    """Put components together; `parts` are (device ids in the component's order, outcome).

    dispatch "static": requests are dealt by the lanes' shares, so the plan runs at the pace of the lane that is
    slowest for its share, and devices of the others are idle in proportion.
    """
    by_name = {lane.name: lane for _, o in parts for lane in o.lanes}
    lanes = [by_name[lane.name] for lane in plan.lanes]
    steady = np.array([lane.steady_per_s for lane in lanes])
    ramped = np.array([lane.end_to_end_per_s for lane in lanes])
    slow = np.ones(len(lanes))
    if dispatch == "static":
        shares = np.array([lane.share for lane in plan.lanes])
        slow = shares * (steady / shares).min() / steady
        ramped = shares * (ramped / shares).min()
    rates = steady * slow
    pace = {lane.name: float(s) for lane, s in zip(plan.lanes, slow, strict=True)}
    use = dict.fromkeys((d.id for d in cluster.devices), 0.0)
    for devices, part in parts:
        factor = max(pace[lane.name] for lane in part.lanes)
        use.update({d: u * factor for d, u in zip(devices, part.utilisation, strict=True)})
    change = max(part.change for _, part in parts)
    each = tuple(map(float, rates))
    return Summary(float(rates.sum()), float(ramped.sum()), _latency(lanes, rates), use, each, change)


def _latency(lanes: Sequence[LaneOutcome], rates: np.ndarray) -> dict[str, float]:
    """Mean and percentiles in ms over requests: a lane's cohorts weigh its share of the requests."""
    times = np.concatenate([np.array(lane.latencies_ns, dtype=float) for lane in lanes]) / 1e6
    weight = np.concatenate([
        np.full(len(lane.latencies_ns), rate / len(lane.latencies_ns))
        for lane, rate in zip(lanes, rates, strict=True)
    ])  # fmt: skip
    order = np.argsort(times, kind="stable")
    times, weight = times[order], weight[order]
    reached = np.cumsum(weight) / weight.sum()
    named = {"mean": float((times * weight).sum() / weight.sum())}
    for p in (50, 90, 99):
        named[f"p{p}"] = float(times[min(int(np.searchsorted(reached, p / 100 - 1e-12)), len(times) - 1)])
    return named


def usd_per_hour(plan: Plan, cluster: Cluster) -> float | None:
    """Price of the devices that the plan uses; None if one is unknown (never 0 in its place)."""
    used = {d for lane in plan.lanes for d in lane.devices}
    try:
        return sum(cluster.prices[d.gpu.name].usd_per_hour for d in cluster.devices if d.id in used)
    except KeyError:
        return None


def per_usd(per_s: float, price: float | None) -> float | None:
    """Requests (images) per US dollar."""
    return per_s * 3600.0 / price if price else None


def tokens_per_s(mix: Mix, per_s: float) -> float | None:
    """Output tokens per second; None for a mix without tokens."""
    return per_s * mix.output_tokens if mix.kind == "llm" else None
