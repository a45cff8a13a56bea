"""The cost model of measured kernels: what a site costs on a GPU that it was not captured on.

The order of sources, per site (tesserasim.costs.learn):

    captured    the GPU of the trace: its own durations
    calibrated  the GPU has measured rows of the site's kind
    sibling     another GPU of the same die has
    spec        neither: mechanisms and what all measured GPUs have in common
    own table   the GPU, or the one of the trace, has a table of the user's (tesserasim.costs.own)
    roofline    the site's kind was never measured: the roofline ratio

A captured time on the reference GPU goes into the model as it is; one on any other GPU is scaled by the model's two
predictions. The ratio is taken per site and shared out over its kernels as captured.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import GpuSpec
from tesserasim.costs.distance import Z80
from tesserasim.costs.learn import REFERENCE, KindModel, regime
from tesserasim.costs.mechanisms import Known
from tesserasim.costs.own import Own, OwnCosts, load_own, named_files, own_hash
from tesserasim.costs.roofline import RooflineRatio
from tesserasim.costs.shipped import shipped, shipped_hash
from tesserasim.costs.sites import TRANSLATED, SiteRows, site_rows
from tesserasim.costs.times import (
    CAPTURED_SYSTEMATIC,
    FloatArray,
    KernelTimes,
    captured_sigma,
    captured_times,
    own_source,
)
from tesserasim.trace.model import Trace

#: A site whose time says that it did not run as the benchmark did is not scaled beyond this factor of the roofline.
MOST_RATIO = 30.0


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


Sides = dict[tuple[str, str | None], Known]  # (kind, reference)


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
    sides: Sides = field(default_factory=dict)  # as they are found


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

    def __init__(self, own: OwnCosts | None = None, own_version: str = "") -> None:
        self.roofline = RooflineRatio()
        self.own = own or {}
        self._own_version = own_version
        self._known: dict[int, tuple[weakref.ref[Trace], _Facts]] = {}

    @cached_property
    def version(self) -> str:
        """Hash over the shipped parameters, the translation of sites and the roofline that stands in."""
        content = [self.name, 2, shipped_hash(), sorted(TRANSLATED.items()), self.roofline.version, self._own_version]
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
            return SiteTimes(before, (own_source(trace),) * n, ("",) * n, known, np.zeros(n), before, before)
        ns, systematic, own_sigma = before.copy(), np.zeros(n), np.zeros(n)
        self._plain(facts, gpu, ns, systematic, own_sigma)
        width = Z80 * np.hypot(systematic, own_sigma)
        low, high = np.exp(-width), np.exp(width)
        sources, kinds = np.full(n, "roofline", dtype=object), np.full(n, "", dtype=object)
        for rows in facts.rows:
            at = rows.sites
            known = np.maximum(before[at] / 1e3 / rows.share, 1e-3)
            found = _predict(rows, captured, gpu, known, self.own, facts.sides)
            ns[at] = before[at] * np.clip(found.us / known, 1.0 / MOST_RATIO, MOST_RATIO)
            systematic[at] = np.hypot(found.systematic, rows.extra)
            own_sigma[at] = found.site
            low[at] = np.exp(found.low - Z80 * rows.extra)
            high[at] = np.exp(found.high + Z80 * rows.extra)
            sources[at], kinds[at] = found.source, rows.kind
        return SiteTimes(
            ns, tuple(sources.tolist()), tuple(kinds.tolist()), systematic, own_sigma, ns * low, ns * high
        )  # fmt: skip

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


def calibrated() -> Calibrated:
    """The model with the own tables that the environment names (tesserasim.costs.own)."""
    return _calibrated(named_files(), own_hash())


@cache
def _calibrated(files: tuple[str, ...], version: str) -> Calibrated:
    return Calibrated(load_own(files, shipped_hash()) if files else None, version)


@dataclass(frozen=True)
class _Found:
    us: FloatArray
    source: str
    systematic: float
    site: float
    low: FloatArray  # log of the interval's ends over the prediction
    high: FloatArray


def _predict(
    rows: SiteRows, captured: GpuSpec, gpu: GpuSpec, known_us: FloatArray, own: OwnCosts, sides: Sides
) -> _Found:
    """us of the measured operations on `gpu`, from their times on `captured`."""
    if captured.name == REFERENCE:
        better = own.get((gpu.name, rows.kind, REFERENCE))
        if better or not any((g.name, rows.kind, None) in own for g in (gpu, captured)):
            model = shipped(rows.kind, REFERENCE)
            return _by_model(model, rows, gpu, better, _side(model, rows, known_us, sides))
    # Two predictions without a reference: what both GPUs share cancels; the errors of both remain.
    model = shipped(rows.kind, None)
    side = _side(model, rows, None, sides)
    here, there = (_by_model(model, rows, g, own.get((g.name, rows.kind, None)), side) for g in (gpu, captured))
    systematic, site = math.hypot(here.systematic, there.systematic), math.hypot(here.site, there.site)
    low, high = -np.hypot(here.low, there.high), np.hypot(here.high, there.low)
    return _Found(known_us * here.us / there.us, here.source, systematic, site, low, high)


def _side(model: KindModel, rows: SiteRows, known_us: FloatArray | None, sides: Sides) -> Known:
    key = (rows.kind, model.reference)
    if key not in sides:
        sides[key] = model.known_side(rows.shape, known_us)
    return sides[key]


def _by_model(model: KindModel, rows: SiteRows, gpu: GpuSpec, own: Own | None, side: Known) -> _Found:
    """us on `gpu` by one model, with the correction of an own table."""
    base, x = model.base(rows.shape, gpu, side)
    factor = model.log_factor(gpu.name, x)
    if own is None:
        return _Found(base * np.exp(factor), _source(model, gpu), *_errors(model, gpu, base, None))
    return _Found(base * np.exp(factor + own.forest.predict(x)), "own table", *_errors(model, gpu, base, own))


def _source(model: KindModel, gpu: GpuSpec) -> str:
    how, whose = model.source(gpu.name)
    return f"{how} {whose}" if how == "sibling" else how


def _errors(
    model: KindModel, gpu: GpuSpec, base: FloatArray, own: Own | None
) -> tuple[float, float, FloatArray, FloatArray]:
    """(systematic, site, low, high) of predictions on `gpu`."""
    spread = own.spread if own is not None else model.spread(gpu.name)
    where = regime(model.kind, base)
    return spread.systematic, spread.site, spread.low[where], spread.high[where]


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
