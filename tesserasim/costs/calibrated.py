"""The cost model of measured kernels: what a site costs on a GPU that it was not captured on.

The order of sources, per site (tesserasim.costs.learn):

    captured    the GPU of the trace: its own durations
    calibrated  the GPU has measured rows of the site's kind
    sibling     another GPU of the same die has
    spec        neither: mechanisms and what all measured GPUs have in common
    roofline    the site's kind was never measured: the roofline ratio

A captured time on the reference GPU goes into the model as it is; one on any other GPU is scaled by the model's two
predictions. The ratio is taken per site and shared out over its kernels as captured.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import GpuSpec
from tesserasim.costs.learn import REFERENCE, KindModel, regime
from tesserasim.costs.roofline import RooflineRatio
from tesserasim.costs.shipped import shipped, shipped_hash
from tesserasim.costs.sites import TRANSLATED, SiteRows, site_rows
from tesserasim.costs.times import FloatArray, KernelTimes, captured_sigma, captured_times
from tesserasim.trace.model import Trace

#: A site whose time says that it did not run as the benchmark did is not scaled beyond this factor of the roofline.
MOST_RATIO = 30.0
NO_ERROR = 0.3  # log-sd where a model states none


@dataclass(frozen=True)
class SiteTimes:
    """Times of one trace's sites on one GPU; arrays have one entry per site."""

    ns: FloatArray
    sources: tuple[str, ...]  # "captured" | "calibrated" | "sibling X" | "spec" | "roofline"
    kinds: tuple[str, ...]  # measured kind, "" for the roofline
    systematic: FloatArray  # log-sd
    site: FloatArray  # log-sd
    low_ns: FloatArray  # stated 80 % interval
    high_ns: FloatArray


class Calibrated:
    """`CostModel` by shipped, fitted parameters; stateless but for what it has computed."""

    name = "calibrated"

    def __init__(self) -> None:
        self.roofline = RooflineRatio()
        self._rows: dict[int, tuple[weakref.ref[Trace], tuple[SiteRows, ...]]] = {}

    @cached_property
    def version(self) -> str:
        """Hash over the shipped parameters, the translation of sites and the roofline that stands in."""
        content = [self.name, 1, shipped_hash(), sorted(TRANSLATED.items()), self.roofline.version]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def _site_rows(self, trace: Trace) -> tuple[SiteRows, ...]:
        """The measured sites of a trace, kept as long as the trace lives."""
        kept = self._rows.get(id(trace))
        if kept is None or kept[0]() is not trace:  # an id may be that of a trace that is gone
            self._rows = {i: entry for i, entry in self._rows.items() if entry[0]() is not None}
            kept = self._rows[id(trace)] = (weakref.ref(trace), site_rows(trace))
        return kept[1]

    def kernel_ns(self, trace: Trace, gpu: GpuSpec) -> KernelTimes:
        """Times of `trace` on `gpu`; its own durations if it was captured there.

        Raises InputError if the GPU the trace was captured on is not in the catalogue.
        """
        own = captured_times(trace)
        if find_gpu(trace.meta.gpu).name == gpu.name or not trace.kernels:
            return own
        times = self.site_times(trace, gpu)
        site = np.array(trace.site_of, dtype=np.intp)
        before = np.bincount(site, weights=own.ns, minlength=len(trace.sites))
        factor = np.divide(times.ns, before, out=np.ones(len(before)), where=before > 0)
        return KernelTimes(
            own.ns * factor[site],
            self.name,
            times.systematic[site],
            np.hypot(times.site[site], captured_sigma(trace)),
        )

    def site_times(self, trace: Trace, gpu: GpuSpec) -> SiteTimes:
        """Times of the sites of `trace` on `gpu`, with source and error each."""
        captured = find_gpu(trace.meta.gpu)
        own = captured_times(trace)
        site = np.array(trace.site_of, dtype=np.intp)
        n = len(trace.sites)
        before = np.bincount(site, weights=own.ns, minlength=n).astype(np.float64)
        if captured.name == gpu.name:
            spread = np.full(n, 0.015)
            words = ("captured",) * n
            return SiteTimes(before, words, ("",) * n, spread, np.zeros(n), before, before)
        plain = self.roofline.kernel_ns(trace, gpu)
        ns = np.bincount(site, weights=plain.ns, minlength=n).astype(np.float64)
        systematic, own_sigma = np.zeros(n), np.zeros(n)
        np.maximum.at(systematic, site, plain.sigma_systematic)
        np.maximum.at(own_sigma, site, plain.sigma_site)
        width = 1.2816 * np.hypot(systematic, own_sigma)
        low, high = np.exp(-width), np.exp(width)
        sources, kinds = ["roofline"] * n, [""] * n
        for rows in self._site_rows(trace):
            where = rows.sites[before[rows.sites] > 0]
            if not len(where):
                continue
            known = before[rows.sites] / 1e3 / rows.share
            found = _predict(rows, captured, gpu, np.maximum(known, 1e-3))
            ratio = np.clip(found.us / np.maximum(known, 1e-3), 1.0 / MOST_RATIO, MOST_RATIO)
            ns[rows.sites] = before[rows.sites] * ratio
            systematic[rows.sites] = np.hypot(found.systematic, rows.extra)
            own_sigma[rows.sites] = found.site
            low[rows.sites] = np.exp(found.low - 1.2816 * rows.extra)
            high[rows.sites] = np.exp(found.high + 1.2816 * rows.extra)
            for i in rows.sites.tolist():
                sources[i], kinds[i] = found.source, rows.kind
        return SiteTimes(ns, tuple(sources), tuple(kinds), systematic, own_sigma, ns * low, ns * high)


@dataclass(frozen=True)
class _Found:
    us: FloatArray
    source: str
    systematic: float
    site: float
    low: FloatArray  # log of the interval's ends over the prediction
    high: FloatArray


def _predict(rows: SiteRows, captured: GpuSpec, gpu: GpuSpec, known_us: FloatArray) -> _Found:
    """us of the measured operations on `gpu`, from their times on `captured`."""
    if captured.name == REFERENCE:
        model = shipped(rows.kind, REFERENCE)
        base, x = model.base(rows.shape, gpu, known_us)
        us = base * np.exp(model.log_factor(gpu.name, x))
    else:  # two predictions without a reference: what both GPUs share cancels
        model = shipped(rows.kind, None)
        base, x = model.base(rows.shape, gpu, None)
        there = model.predict(rows.shape, captured)
        us = known_us * base * np.exp(model.log_factor(gpu.name, x)) / there
    how, whose = model.source(gpu.name)
    return _errors(model, gpu, base, us, f"{how} {whose}" if how == "sibling" else how)


def _errors(model: KindModel, gpu: GpuSpec, base: FloatArray, us: FloatArray, source: str) -> _Found:
    spread = model.spread(gpu.name)
    if spread is None:
        wide = np.full(len(us), 1.2816 * NO_ERROR)
        return _Found(us, source, NO_ERROR, NO_ERROR, -wide, wide)
    where = regime(model.kind, base)
    return _Found(us, source, spread.systematic, spread.site, spread.low[where], spread.high[where])


def explain(trace: Trace, gpu: GpuSpec, site: str, times: SiteTimes) -> dict[str, Any]:
    """What decides one site's time on `gpu`: kind, shape, mechanisms in us, source."""
    from tesserasim.costs.mechanisms import LIMITS, specs

    i = trace.sites.index(site)
    found: dict[str, Any] = {"site": site, "gpu": gpu.name, "source": times.sources[i], "kind": times.kinds[i]}
    for rows in site_rows(trace):
        at = np.flatnonzero(rows.sites == i)
        if len(at) and times.kinds[i]:
            shape = {c: v[at] for c, v in rows.shape.items()}
            limits = LIMITS[rows.kind](shape, specs([gpu]))
            found["shape"] = {c: float(v[0]) for c, v in shape.items()}
            found["mechanisms_us"] = {
                "floor": float(limits.floor[0]), "tensor": float(limits.compute[0]), "memory": float(limits.memory[0]),
            }  # fmt: skip
    return found
