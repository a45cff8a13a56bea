"""`costs predict`: a trace on the GPUs of a cluster, as a document."""

from __future__ import annotations

from typing import Any

import numpy as np

from tesserasim.cluster.model import Cluster, GpuSpec
from tesserasim.costs.calibrated import SiteTimes, calibrated, explain
from tesserasim.errors import InputError
from tesserasim.files import did_you_mean, shown
from tesserasim.trace.model import Trace


def predict_document(trace: Trace, cluster: Cluster, name: str, site: str | None) -> dict[str, Any]:
    """Totals per GPU type of the cluster with the share of time of each source, and all sites' times, us.

    `site` adds what decides that site's time. Raises InputError for a site that the trace does not have.
    """
    if site is not None and site not in trace.sites:
        raise InputError(f"{name}: no site {shown(site)}{did_you_mean(site, trace.sites[:2000])}")
    costs = calibrated()
    gpus = list(dict.fromkeys(d.gpu for d in cluster.devices))
    captured = np.bincount(
        np.array(trace.site_of, dtype=np.intp), weights=[k.duration_ns for k in trace.kernels],
        minlength=len(trace.sites),
    ) / 1e3  # fmt: skip
    times = {g.name: costs.site_times(trace, g) for g in gpus}
    explained = []
    for g in gpus if site is not None else []:
        i = trace.sites.index(str(site))
        row = {**explain(trace, g, str(site), times[g.name]), **_site(times[g.name], i)}
        explained.append({**row, "captured_us": round(float(captured[i]), 3)})
    return {
        "trace": name,
        "captured_on": trace.meta.gpu,
        "origin": trace.meta.origin,
        "model": costs.name,
        "version": costs.version,
        "sites": len(trace.sites),
        "gpus": [_total(g, times[g.name]) for g in gpus],
        "times": [
            {"site": s, "gpu": g.name, "captured_us": round(float(captured[i]), 3), **_site(times[g.name], i)}
            for g in gpus
            for i, s in enumerate(trace.sites)
        ],
        "explained": explained,
    }


def _site(t: SiteTimes, i: int) -> dict[str, Any]:
    return {
        "us": round(float(t.ns[i]) / 1e3, 3),
        "low_us": round(float(t.low_ns[i]) / 1e3, 3),
        "high_us": round(float(t.high_ns[i]) / 1e3, 3),
        "source": t.sources[i],
        "kind": t.kinds[i],
        "sigma_systematic": round(float(t.systematic[i]), 4),
        "sigma_site": round(float(t.site[i]), 4),
    }


def _total(gpu: GpuSpec, t: SiteTimes) -> dict[str, Any]:
    total = float(t.ns.sum())
    by_source: dict[str, float] = {}
    for source, ns in zip(t.sources, t.ns.tolist(), strict=True):
        by_source[source] = by_source.get(source, 0.0) + ns
    shares = sorted(by_source.items(), key=lambda x: -x[1])
    return {
        "gpu": gpu.name,
        "total_us": round(total / 1e3, 3),
        "time_by_source": {k: round(v / total, 4) if total else 0.0 for k, v in shares},
    }
