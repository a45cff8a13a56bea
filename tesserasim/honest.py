"""The numbers that keep a result honest: replicas, and the best single GPU type at equal budget."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tesserasim.case import Case, Ran, digest
from tesserasim.cluster.model import Cluster
from tesserasim.plans import Plan
from tesserasim.policies import find_policy
from tesserasim.policies.single import SingleOn, first_of_each_type
from tesserasim.workload import FloatArray


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
    replicas: Ran | None = None
    for name in ("replicas-lo", "replicas-static"):
        ran = case.best(find_policy(name))
        if isinstance(ran, Ran) and (replicas is None or ran.summary.steady_per_s > replicas.summary.steady_per_s):
            replicas = ran
    budget = case.cluster.usd_per_hour
    rates: dict[str, float] = {}
    best: tuple[float, float, str, Ran] | None = None
    whole: float | None = None
    for d in first_of_each_type(case.context):
        ran = case.best(SingleOn(d))
        if not isinstance(ran, Ran):
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
