"""How sure: the costs' errors, drawn 200 times, through the closed form of each policy's plan.

A time is off by two log-normal factors: one shared by all sites of a (GPU type, kind) - the systematic part,
which does not average out - and one of the site itself. Draw k uses the same factors for every policy
(*common random numbers*: each factor comes from a hash of seed, GPU and kind or site, never from the order of
evaluation), so what two policies share cancels in their ratio. Plans stay fixed: who planned on wrong times
lives with the plan. A draw gives

    simulated throughput x (closed form under perturbed times / closed form under nominal times)

times the simulator's own error (simulator_error.json): one factor for plans that keep a request on one GPU,
another for pipelines, each shared by all plans of its class. The captured units' residual (time that was
measured but is not simulated) is one more factor, common to all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources

import numpy as np

from tesserasim.metrics.predict import EQUAL, NS, ClosedForm, IntArray, LaneLoad, lane_load, share_machines
from tesserasim.plans import Plan
from tesserasim.workload import FloatArray

DRAWS = 200


@lru_cache(maxsize=1 << 16)
def normals(seed: int, label: str, draws: int = DRAWS) -> FloatArray:
    """Standard normal numbers that depend on (seed, label) alone."""
    digest = hashlib.sha256(f"{seed}|{label}".encode()).digest()
    values = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big"))).standard_normal(draws)
    values.setflags(write=False)
    return values


@cache
def simulator_error() -> Mapping[str, Mapping[str, float | str]]:
    """Class of plan ("whole", "pipeline") -> sigma (log) and where the figure comes from."""
    text = resources.files("tesserasim.metrics").joinpath("simulator_error.json").read_text(encoding="utf-8")
    found: dict[str, Mapping[str, float | str]] = json.loads(text)
    return found


def plan_class(plan: Plan) -> str:
    """"whole" if every request stays on one GPU, else "pipeline"."""
    return "whole" if all(len(lane.devices) == 1 for lane in plan.lanes) else "pipeline"


@dataclass(frozen=True)
class PricedLane:
    """A lane with its closed form, ready to be priced under other times."""

    form: ClosedForm
    x: IntArray
    depth: int
    share: float
    priority: int


def factors(form: ClosedForm, x: IntArray, seed: int, draws: int = DRAWS) -> FloatArray:
    """[draw, site] by what the time of each site, where it is placed, is multiplied."""
    w = form.workload
    if not w.sigma_systematic.size:
        return np.ones((draws, form.n_sites))
    log = np.empty((draws, form.n_sites))
    gpus = [d.gpu.name for d in w.cluster.devices]
    for i, (site, d) in enumerate(zip(w.sites, x, strict=True)):
        shared, own = w.sigma_systematic[i, d], w.sigma_site[i, d]
        log[:, i] = shared * normals(seed, f"{gpus[d]}|{site.kind}", draws)
        if own:
            log[:, i] += own * normals(seed, f"{gpus[d]}|{site.unit}|{site.name}", draws)
    return np.exp(log)


def lane_draws(lane: PricedLane, seed: int, draws: int = DRAWS) -> list[LaneLoad]:
    """The closed form of a lane under each draw."""
    form, x = lane.form, lane.x
    nominal = form.predict(x, lane.depth)
    picked = form.workload.time_ns[np.arange(form.n_sites), x] * factors(form, x, seed, draws)
    where = np.zeros((form.n_sites, form.n_devices))
    where[np.arange(form.n_sites), x] = 1.0
    loads = picked @ where
    latency = loads.sum(axis=1) + (nominal.latency_ns - float(nominal.loads_ns.sum()))
    links = np.broadcast_to(nominal.link_ns.ravel(), (draws, form.n_devices**2))
    use = np.concatenate([loads, links], axis=1) / form.batch
    cap = form.batch * nominal.divisor * NS / latency
    return [LaneLoad(use[k], float(cap[k]), lane.share, lane.priority) for k in range(draws)]


def plan_draws(
    plan: Plan, lanes: Sequence[PricedLane], dispatch: str, simulated_per_s: float, seed: int, draws: int = DRAWS
) -> FloatArray:
    """[draw] throughput of a plan: its simulated value under perturbed times and the simulator's error."""
    per_lane = [lane_draws(lane, seed, draws) for lane in lanes]
    loads = [lane_load(lane.form.predict(lane.x, lane.depth), lane.share, lane.priority) for lane in lanes]
    nominal = sum(share_machines(loads, dispatch))
    values = np.array([sum(share_machines([c[k] for c in per_lane], dispatch)) for k in range(draws)]) / nominal
    kind = plan_class(plan)
    own = float(simulator_error()[kind]["sigma"]) * normals(seed, f"simulator|{kind}", draws)
    residual = max((lane.form.workload.residual_share for lane in lanes), default=0.0)
    found: FloatArray = simulated_per_s * values * np.exp(own + residual * normals(seed, "residual", draws))
    return found


def interval80(values: FloatArray | Sequence[float]) -> tuple[float, float]:
    """The 10th and 90th percentile."""
    lo, hi = np.quantile(np.asarray(values, dtype=float), [0.1, 0.9])
    return float(lo), float(hi)


def rel_error(values: FloatArray | Sequence[float]) -> float:
    """Half the 80 % interval over the median."""
    lo, hi = interval80(values)
    return (hi - lo) / 2.0 / float(np.median(np.asarray(values, dtype=float)))


def p_win(draws: Mapping[str, FloatArray | Sequence[float]]) -> dict[str, float]:
    """Policy -> share of draws in which it is the fastest.

    Policies within 1e-9 (relative) of the fastest tie and split the draw evenly: `replicas-static` and
    `replicas-lo` on equal GPUs, or `kernel` where the planner keeps everything on one GPU.
    """
    if not draws:
        return {}
    table = np.array([np.asarray(v, dtype=float) for v in draws.values()])
    first = table >= table.max(axis=0) * (1 - EQUAL)
    share = (first / first.sum(axis=0)).mean(axis=1)
    return {name: float(p) for name, p in zip(draws, share, strict=True)}
