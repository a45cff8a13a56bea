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
from numpy.typing import NDArray

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import GpuSpec
from tesserasim.costs.learn import REFERENCE, KindModel, regime
from tesserasim.costs.roofline import RooflineRatio
from tesserasim.costs.shipped import shipped, shipped_hash
from tesserasim.costs.sites import TRANSLATED, SiteRows, site_rows
from tesserasim.costs.times import CAPTURED_SYSTEMATIC, FloatArray, KernelTimes, captured_sigma, captured_times
from tesserasim.trace.model import Trace

#: A site whose time says that it did not run as the benchmark did is not scaled beyond this factor of the roofline.
MOST_RATIO = 30.0
NO_ERROR = 0.3  # log-sd where a model states none
Z80 = 1.2816  # half of an 80 % interval in standard deviations


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


@dataclass(frozen=True)
class _Facts:
    """What every GPU's prediction needs of a trace, found once."""

    own: KernelTimes
    sigma: FloatArray  # [kernel] scatter of the captured repeats
    site: NDArray[np.intp]  # [kernel]
    before: FloatArray  # [site] captured ns
    rows: tuple[SiteRows, ...]
    rest: Trace  # the kernels of sites without a measured kind
    rest_sites: NDArray[np.intp]  # indices of those sites, in the order of `rest.sites`


def _facts(trace: Trace) -> _Facts:
    own = captured_times(trace)
    site = np.array(trace.site_of, dtype=np.intp)
    before = np.bincount(site, weights=own.ns, minlength=len(trace.sites)).astype(np.float64)
    rows = site_rows(trace)
    measured = np.zeros(len(trace.sites), dtype=bool)
    for part in rows:
        measured[part.sites] = True
    rest = tuple(k for k, m in zip(trace.kernels, measured[site], strict=True) if not m)
    plain = Trace(trace.meta, rest, trace.buffers)
    number = {name: i for i, name in enumerate(trace.sites)}
    rest_sites = np.array([number[name] for name in plain.sites], dtype=np.intp)
    return _Facts(own, captured_sigma(trace), site, before, rows, plain, rest_sites)


class Calibrated:
    """`CostModel` by shipped, fitted parameters; stateless but for what it has computed."""

    name = "calibrated"

    def __init__(self) -> None:
        self.roofline = RooflineRatio()
        self._known: dict[int, tuple[weakref.ref[Trace], _Facts]] = {}

    @cached_property
    def version(self) -> str:
        """Hash over the shipped parameters, the translation of sites and the roofline that stands in."""
        content = [self.name, 1, shipped_hash(), sorted(TRANSLATED.items()), self.roofline.version]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def _facts_of(self, trace: Trace) -> _Facts:
        """The facts of a trace, kept as long as the trace lives."""
        kept = self._known.get(id(trace))
        if kept is None or kept[0]() is not trace:  # an id may be that of a trace that is gone
            self._known = {i: entry for i, entry in self._known.items() if entry[0]() is not None}
            kept = self._known[id(trace)] = (weakref.ref(trace), _facts(trace))
        return kept[1]

    def kernel_ns(self, trace: Trace, gpu: GpuSpec) -> KernelTimes:
        """Times of `trace` on `gpu`; its own durations if it was captured there.

        Raises InputError if the GPU the trace was captured on is not in the catalogue.
        """
        if find_gpu(trace.meta.gpu).name == gpu.name or not trace.kernels:
            return captured_times(trace)
        times, facts = self.site_times(trace, gpu), self._facts_of(trace)
        factor = np.divide(times.ns, facts.before, out=np.ones(len(times.ns)), where=facts.before > 0)
        site_sigma = np.hypot(times.site[facts.site], facts.sigma)
        return KernelTimes(facts.own.ns * factor[facts.site], self.name, times.systematic[facts.site], site_sigma)

    def site_times(self, trace: Trace, gpu: GpuSpec) -> SiteTimes:
        """Times of the sites of `trace` on `gpu`, with source and error each."""
        captured, facts = find_gpu(trace.meta.gpu), self._facts_of(trace)
        n, before = len(trace.sites), facts.before
        if captured.name == gpu.name:
            known = np.full(n, CAPTURED_SYSTEMATIC)
            return SiteTimes(before, ("captured",) * n, ("",) * n, known, np.zeros(n), before, before)
        ns, systematic, own_sigma = before.copy(), np.zeros(n), np.zeros(n)
        self._plain(facts, gpu, ns, systematic, own_sigma)
        width = Z80 * np.hypot(systematic, own_sigma)
        low, high = np.exp(-width), np.exp(width)
        sources, kinds = ["roofline"] * n, [""] * n
        for rows in facts.rows:
            at = rows.sites
            known = np.maximum(before[at] / 1e3 / rows.share, 1e-3)
            found = _predict(rows, captured, gpu, known)
            ns[at] = before[at] * np.clip(found.us / known, 1.0 / MOST_RATIO, MOST_RATIO)
            systematic[at] = np.hypot(found.systematic, rows.extra)
            own_sigma[at] = found.site
            low[at] = np.exp(found.low - Z80 * rows.extra)
            high[at] = np.exp(found.high + Z80 * rows.extra)
            for i in at.tolist():
                sources[i], kinds[i] = found.source, rows.kind
        return SiteTimes(ns, tuple(sources), tuple(kinds), systematic, own_sigma, ns * low, ns * high)

    def _plain(
        self, facts: _Facts, gpu: GpuSpec, ns: FloatArray, systematic: FloatArray, own_sigma: FloatArray
    ) -> None:
        """The roofline's times and errors for the sites without a measured kind, written into the arrays [site]."""
        if not facts.rest.kernels:
            return
        plain = self.roofline.kernel_ns(facts.rest, gpu)
        site = facts.rest_sites[np.array(facts.rest.site_of, dtype=np.intp)]
        ns[facts.rest_sites] = np.bincount(site, weights=plain.ns, minlength=len(ns))[facts.rest_sites]
        np.maximum.at(systematic, site, plain.sigma_systematic)
        np.maximum.at(own_sigma, site, plain.sigma_site)


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
        wide = np.full(len(us), Z80 * NO_ERROR)
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
