"""The bound: the best any placement could do if communication were free.

For one batch B it is the linear program

    min T   over fractional x[site, device]:   sum_d x[site, d] = 1,   sum_site t[site, d] x[site, d] <= T

over the sites of all units together. Gaps, launch costs, links, groups and memory by device are left out,
so every plan at B is at least as slow. The bound reported is the largest over all B that *could* fit
(`memory.could_fit`: everything once, over all devices together, one cohort in flight) with at most
`max_seqs` requests per GPU; each relaxation can only raise it. Equal devices are pooled: n of them
are one device n times as fast, which a fractional x can reach.

On `shared` devices the rows of T are by resource instead: per device the sum of SM-time, per DRAM the sum of
DRAM-time (demands.py). Losses by sharing (sharing.json) are left out, which can only raise the bound.

The objective is checked in the tests against the closed form for two devices (sort the sites by the ratio
of their times, fill the first device until the loads meet).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from tesserasim.demands import ResourceLoad
from tesserasim.metrics.memory import MAX_SEQS, could_fit, max_sequences
from tesserasim.metrics.predict import NS
from tesserasim.workload import FloatArray, Workload


@dataclass(frozen=True)
class Bound:
    """Requests per second that no placement exceeds, and the batch at which it is reached."""

    per_s: float
    batch: int
    by_batch: Mapping[int, float]  # batch -> requests per second


def pool(workload: Workload, time_ns: FloatArray) -> FloatArray:
    """[site, GPU type]: times on all devices of a type working together.

    Devices are pooled if they are the same GPU and every site takes the same time on them.
    """
    columns: list[FloatArray] = []
    names: list[str] = []
    counts: list[int] = []
    for k, device in enumerate(workload.cluster.devices):
        for j, column in enumerate(columns):
            if names[j] == device.gpu.name and np.array_equal(column, time_ns[:, k]):
                counts[j] += 1
                break
        else:
            columns.append(time_ns[:, k])
            names.append(device.gpu.name)
            counts.append(1)
    return np.stack([c / n for c, n in zip(columns, counts, strict=True)], axis=1)


def fractional_ns(time_ns: FloatArray, fixed_ns: float | None = None, depth: float = 1.0) -> float:
    """Minimum of the linear program above for times [site, device].

    With `fixed_ns` (gaps and launch costs of a cohort) also `(sum of placed times + fixed_ns) / depth <= T`,
    which sharpens the bound for a known depth.

    A solver's objective is right to its tolerance (1e-7), and a bound that is a hair too low is no bound.
    So only its multipliers are used: for any multipliers m >= 0 of the rows, scaled so that T cancels,
    sum_site min_d (weight of d) t[site, d] (+ the latency row's share of `fixed_ns`) is a proven lower
    limit, and at the solver's multipliers it is the optimum to rounding.
    """
    s, d = time_ns.shape
    scale = float(time_ns.max()) * s or 1.0
    site, dev = np.divmod(np.arange(s * d), d)
    t = (time_ns / scale).ravel()
    rows, cols, vals = [dev, np.arange(d)], [np.arange(s * d), np.full(d, s * d)], [t, -np.ones(d)]
    upper = np.zeros(d)
    if fixed_ns is not None:
        rows += [np.full(s * d, d), np.array([d])]
        cols += [np.arange(s * d), np.array([s * d])]
        vals += [t, np.array([-float(depth)])]
        upper = np.append(upper, -fixed_ns / scale)
    a_ub = coo_array(
        (np.concatenate(vals), (np.concatenate(rows), np.concatenate(cols))), shape=(len(upper), s * d + 1)
    ).tocsr()
    a_eq = coo_array((np.ones(s * d), (site, np.arange(s * d))), shape=(s, s * d + 1)).tocsr()
    cost = np.zeros(s * d + 1)
    cost[-1] = 1.0
    solve: Any = linprog  # the stubs do not know sparse matrices
    found = solve(cost, A_ub=a_ub, b_ub=upper, A_eq=a_eq, b_eq=np.ones(s), bounds=(0, None), method="highs")
    if found.status != 0:
        raise ArithmeticError(f"bound: the linear program ended with status {found.status} ({found.message})")
    m = np.maximum(-np.asarray(found.ineqlin.marginals), 0.0)
    lam, nu = m[:d], (float(m[d]) if fixed_ns is not None else 0.0)
    total = float(lam.sum()) + nu * depth
    lam, nu = lam / total, nu / total
    return float(((lam + nu) * time_ns).min(axis=1).sum()) + nu * (fixed_ns or 0.0)


def bound_ns(workload: Workload) -> float:
    """Least nanoseconds per cohort at this batch."""
    return fractional_ns(pool(workload, workload.time_ns))


def shared_ns(sm_ns: FloatArray, dram_ns: FloatArray, domain_of: Sequence[int]) -> float:
    """Minimum over fractional x of the fullest resource, in ns: [site, device] SM-time and DRAM-time.

    Only the solver's multipliers are used, as in `fractional_ns`: they stand at rows [SMs of each device, each
    DRAM], and a site costs at least its cheapest device under them.
    """
    s, d = sm_ns.shape
    drams = sorted(set(domain_of))
    row_of = np.array([d + drams.index(x) for x in domain_of])
    scale = max(float(sm_ns.max()), float(dram_ns.max())) * s or 1.0
    site, dev = np.divmod(np.arange(s * d), d)
    n = d + len(drams)
    rows = np.concatenate((dev, row_of[dev], np.arange(n)))
    cols = np.concatenate((np.arange(s * d), np.arange(s * d), np.full(n, s * d)))
    vals = np.concatenate(((sm_ns / scale).ravel(), (dram_ns / scale).ravel(), -np.ones(n)))
    a_ub = coo_array((vals, (rows, cols)), shape=(n, s * d + 1)).tocsr()
    a_eq = coo_array((np.ones(s * d), (site, np.arange(s * d))), shape=(s, s * d + 1)).tocsr()
    cost = np.zeros(s * d + 1)
    cost[-1] = 1.0
    solve: Any = linprog  # the stubs do not know sparse matrices
    found = solve(cost, A_ub=a_ub, b_ub=np.zeros(n), A_eq=a_eq, b_eq=np.ones(s), bounds=(0, None), method="highs")
    if found.status != 0:
        raise ArithmeticError(f"bound: the linear program ended with status {found.status} ({found.message})")
    m = np.maximum(-np.asarray(found.ineqlin.marginals), 0.0)
    m /= m.sum()
    return float((m[:d] * sm_ns + m[row_of] * dram_ns).min(axis=1).sum())


def bound(
    workloads: Sequence[Workload], max_seqs: int = MAX_SEQS, loads: Mapping[int, ResourceLoad] | None = None
) -> Bound | None:
    """The bound over workloads of one mix and cluster at different batches; None if none could fit.

    `loads` (by batch) makes it the bound of shared devices.
    """
    rates: dict[int, float] = {}
    for w in sorted(workloads, key=lambda w: w.batch):
        if could_fit(w) and w.batch <= max_sequences(len(w.devices), max_seqs):
            least = bound_ns(w) if loads is None else _load_ns(loads[w.batch])
            rates[w.batch] = w.batch * NS / least
    if not rates:
        return None
    best = max(rates, key=lambda b: (rates[b], -b))
    return Bound(rates[best], best, rates)


def _load_ns(load: ResourceLoad) -> float:
    return shared_ns(load.sm_ns, load.dram_ns, load.domain_of)


def mixed_shared_bound_per_s(loads: Sequence[ResourceLoad]) -> float:
    """As `mixed_bound_per_s`, of shared devices: each resource of each site at its cheapest batch."""
    sm, dram = (np.min([x / load.batch for load, x in zip(loads, each, strict=True)], axis=0)
                for each in ([y.sm_ns for y in loads], [y.dram_ns for y in loads]))  # fmt: skip
    return NS / shared_ns(sm, dram, loads[0].domain_of)


def mixed_bound_per_s(workloads: Sequence[Workload]) -> float:
    """Bound for a plan whose lanes run at different batches: every site at its cheapest batch, per request.

    With one workload this is that batch's own bound. A plan of several may exceed the per-batch bound where
    one device is faster per request at a smaller batch; never this one.
    """
    per_request = np.min([w.time_ns / w.batch for w in workloads], axis=0)
    return NS / fractional_ns(pool(workloads[0], per_request))
