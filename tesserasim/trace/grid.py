"""A unit at any point of its grid: the kernels of a captured point, the times of all points around it.

A unit is captured at a few points (decode: batch × context; prefill: batch × tokens). Between them

* the *kernel list* is that of the nearest captured point that is at least as large in every coordinate, as
  serving engines pad to the graph sizes they captured;
* each *site's* time, gap and share of launch cost is linear in every coordinate within the cell (bilinear in
  batch × context) and shared out over the site's kernels in proportion to the kernel list's own times.

Everything is linear in the captured points, so a launch is a row of weights over them and hundreds of decode
steps are priced at once.

Where the grid has holes
    A missing corner is replaced by the plane through the other three, else by the line through two points of
    its row or column. An axis captured at one value only is scaled by the larger of bytes and FLOPs (weights
    count once). A point outside the grid continues the nearest cell's line. All these set `extrapolated`, and
    a coordinate more than a factor of two outside is refused unless allowed. A site that a corner lacks takes
    its time from the corners that have it, or the kernel list's own time if none has; a site that the kernel
    list lacks is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tesserasim.errors import InputError
from tesserasim.trace.mix import UnitInstance
from tesserasim.trace.model import Trace
from tesserasim.trace.profile import FloatArray, IntArray, ProfileRun, UnitProfile

#: Kernel times of a trace on some GPU, in ns.
Times = Callable[[Trace], FloatArray]

MAX_REACH = 2.0
#: FLOPs per byte at which a kernel turns from memory to compute bound; only scales an axis with one value.
_RIDGE = 200.0


@dataclass(frozen=True)
class SiteTable:
    """Times of one GPU at every captured point: what `Grid.profiles` interpolates. Make it once per GPU."""

    kernel_ns: tuple[FloatArray, ...]  # [point][kernel]
    site_ns: FloatArray  # [point, site]


def captured_times(trace: Trace) -> FloatArray:
    """The times the trace itself holds: those of the GPU it was captured on."""
    return np.array([k.duration_ns for k in trace.kernels], dtype=np.float64)


def coordinates(trace: Trace) -> tuple[float, float]:
    """(batch, x) of a trace; x: context of a decode step, tokens of a prefill, 0 for other units."""
    unit = trace.meta.unit
    return float(unit.get("batch", 1)), _second(str(unit.get("phase", unit.get("name", ""))), unit)


def _second(phase: str, unit: object) -> float:
    key = {"decode": "context", "prefill": "tokens"}.get(phase)
    if key is None:
        return 0.0
    value = unit.get(key, 0) if isinstance(unit, dict) else getattr(unit, key)
    return float(value)


class Grid:
    """The captured points of one unit. Raises InputError for two traces at one point."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        if not traces:
            raise InputError("a grid needs at least one trace")
        self.traces = tuple(traces)
        self.unit = traces[0].unit
        self.phase = str(traces[0].meta.unit.get("phase", self.unit))
        self.points = [coordinates(t) for t in self.traces]
        if len(set(self.points)) < len(self.points):
            twice = next(p for p in self.points if self.points.count(p) > 1)
            raise InputError(f"unit {self.unit}: two traces at batch {twice[0]:.0f}, size {twice[1]:.0f}")
        self.index = {p: i for i, p in enumerate(self.points)}
        self.axes = tuple(sorted({p[a] for p in self.points}) for a in (0, 1))
        self.sites = merge_sites([t.sites for t in self.traces])
        number = {name: i for i, name in enumerate(self.sites)}
        #: [point][kernel] index of the kernel's site in `sites`
        self.site_of: tuple[IntArray, ...] = tuple(
            np.array([number[k.site] for k in t.kernels], dtype=np.int64) for t in self.traces
        )
        self.present = np.zeros((len(traces), len(self.sites)), dtype=bool)
        self.gaps: list[FloatArray] = []
        self.site_gap = np.zeros((len(traces), len(self.sites)))
        for p, trace in enumerate(self.traces):
            self.present[p, self.site_of[p]] = True
            self.gaps.append(np.array(trace.replay_gaps_ns, dtype=np.float64))
            self.site_gap[p] = self._by_site(p, self.gaps[p])
        self.launch = np.array([t.launch_ns for t in self.traces], dtype=np.float64)

    def _by_site(self, point: int, values: FloatArray) -> FloatArray:
        total = np.bincount(self.site_of[point], weights=values, minlength=len(self.sites))
        return total.astype(np.float64)

    def table(self, times: Times) -> SiteTable:
        """Times of one GPU at every captured point."""
        kernel = tuple(np.asarray(times(t), dtype=np.float64) for t in self.traces)
        return SiteTable(kernel, np.array([self._by_site(p, v) for p, v in enumerate(kernel)]))

    def profile(self, instance: UnitInstance, times: Times, allow_extrapolation: bool = False) -> UnitProfile:
        """The unit at one point. InputError more than a factor of two outside, unless allowed."""
        return self.profiles([instance], self.table(times), allow_extrapolation)[0].profile(0)

    def profiles(
        self, instances: Sequence[UnitInstance], table: SiteTable, allow_extrapolation: bool = False
    ) -> list[ProfileRun]:
        """Many launches, in order; neighbours with the same kernel list share one `ProfileRun`."""
        runs: list[ProfileRun] = []
        first = 0
        structures = [self.structure(*self._at(i)) for i in instances]
        for i in range(1, len(instances) + 1):
            if i == len(instances) or structures[i] != structures[first]:
                run = self._run(structures[first], instances[first:i], table, allow_extrapolation)
                runs.append(run)
                first = i
        return runs

    def _at(self, instance: UnitInstance) -> tuple[float, float]:
        return float(instance.batch), _second(self.phase, instance)

    def structure(self, batch: float, x: float) -> int:
        """Point whose kernels run: nearest that is larger in both coordinates, else in batch alone."""

        def distance(point: tuple[float, float]) -> tuple[bool, bool, float, float]:
            return (point[0] < batch, point[1] < x, abs(point[0] - batch), abs(point[1] - x))

        return min(range(len(self.points)), key=lambda i: distance(self.points[i]))

    def _run(self, structure: int, instances: Sequence[UnitInstance], table: SiteTable, allow: bool) -> ProfileRun:
        rows = [self._weights(*self._at(i)) for i in instances]
        for instance, (_, _, reach) in zip(instances, rows, strict=True):
            if reach > MAX_REACH and not allow:
                raise InputError(self._refusal(instance))
        weights = np.array([w for w, _, _ in rows])
        scale = self._axis_scale(structure, instances)
        site = self._interpolate(weights, table.site_ns, structure) * scale
        np.maximum(site, 0.0, out=site)
        gap = self._interpolate(weights, self.site_gap, structure)
        residual = self._residuals(weights)
        batch, x = self.points[structure]
        at = [self._at(i) for i in instances]
        return ProfileRun(
            self.traces[structure], tuple(instances),
            self._share_times(structure, site, table), self._share_gaps(structure, gap),
            np.maximum(_combine(weights, self.launch), 0.0),
            tuple(b / batch * (c / x if self.phase == "prefill" and x else 1.0) for b, c in at),
            tuple(flag for _, flag, _ in rows), residual,
            _combine(weights, np.array([t.replay_ns for t in self.traces], dtype=np.float64)),
        )  # fmt: skip

    def _refusal(self, instance: UnitInstance) -> str:
        spans = ", ".join(
            f"{name} {axis[0]:.0f}..{axis[-1]:.0f}"
            for name, axis in zip(("batch", {"prefill": "tokens"}.get(self.phase, "context")), self.axes, strict=True)
        )
        return (
            f"unit {self.unit}: batch {instance.batch}, tokens {instance.tokens}, context {instance.context} "
            f"is more than a factor of {MAX_REACH:.0f} outside the captured grid ({spans}); "
            "capture it or allow extrapolation"
        )

    def _weights(self, batch: float, x: float) -> tuple[FloatArray, bool, float]:
        """(weight of every captured point, extrapolated, how far outside as a factor ≥ 1)."""
        row = np.zeros(len(self.points))
        b, c = _bracket(self.axes[0], batch), _bracket(self.axes[1], x)
        outside = max(_reach(self.axes[0], batch), _reach(self.axes[1], x))
        holes = False
        for b_value, b_weight in b:
            for c_value, c_weight in c:
                if b_weight * c_weight == 0.0:
                    continue
                known, exact = self._corner(b_value, c_value, [v for v, _ in b], [v for v, _ in c])
                holes |= not exact
                for point, w in known:
                    row[point] += w * b_weight * c_weight
        return row, holes or outside > 1.0, outside

    def _corner(
        self, b: float, c: float, bs: Sequence[float], cs: Sequence[float]
    ) -> tuple[list[tuple[int, float]], bool]:
        """(points and weights that give the value at corner (b, c), whether that corner was captured)."""
        if (b, c) in self.index:
            return [(self.index[b, c], 1.0)], True
        other_b = next((v for v in bs if v != b), None)
        other_c = next((v for v in cs if v != c), None)
        if other_b is not None and other_c is not None:
            three = [(b, other_c, 1.0), (other_b, c, 1.0), (other_b, other_c, -1.0)]
            if all((p, q) in self.index for p, q, _ in three):
                return [(self.index[p, q], w) for p, q, w in three], False
        row = sorted(q for p, q in self.points if p == b)
        column = sorted(p for p, q in self.points if q == c)
        if len(row) >= 2:
            return [(self.index[b, v], w) for v, w in _bracket(row, c)], False
        if len(column) >= 2:
            return [(self.index[v, c], w) for v, w in _bracket(column, b)], False
        return [(self.structure(b, c), 1.0)], False

    def _interpolate(self, weights: FloatArray, values: FloatArray, structure: int) -> FloatArray:
        """weights @ values over the points that have each site. [launch, site]"""
        result = _combine(weights, values)
        used = np.any(weights != 0.0, axis=0)
        for s in np.flatnonzero(~self.present[used].all(axis=0) & self.present[structure]):
            have = np.clip(weights, 0.0, None) * self.present[:, s]
            total = have.sum(axis=1)
            own = values[structure, s]
            result[:, s] = np.where(
                total > 1e-9, _combine(have, values[:, s]) / np.where(total > 1e-9, total, 1.0), own
            )
        return result

    def _axis_scale(self, structure: int, instances: Sequence[UnitInstance]) -> FloatArray:
        """[launch, site] factor for axes captured at one value: larger of bytes and FLOPs; 1 elsewhere."""
        scale = np.ones((len(instances), len(self.sites)))
        batch, x = self.points[structure]
        ratios = np.ones(len(instances))
        for row, (b, c) in enumerate(self._at(i) for i in instances):
            if len(self.axes[0]) == 1:
                ratios[row] *= b / batch
            if len(self.axes[1]) == 1 and x:
                ratios[row] *= c / x
        if np.all(ratios == 1.0):
            return scale
        trace = self.traces[structure]
        fixed, moving, flops = (self._by_site(structure, v) for v in _work(trace))
        before = np.maximum(fixed + moving, flops / _RIDGE)
        r = ratios[:, None]
        after = np.maximum(fixed + r * moving, r * flops / _RIDGE)
        return np.where(before > 0, after / np.where(before > 0, before, 1.0), r)

    def _share_times(self, structure: int, site: FloatArray, table: SiteTable) -> FloatArray:
        of, own, total = self.site_of[structure], table.kernel_ns[structure], table.site_ns[structure]
        count = np.bincount(of, minlength=len(self.sites))
        share = np.where(total[of] > 0, own / np.where(total[of] > 0, total[of], 1.0), 1.0 / count[of])
        shared: FloatArray = site[:, of] * share
        return shared

    def _share_gaps(self, structure: int, gap: FloatArray) -> FloatArray:
        # In proportion, written so that gaps of opposite sign inside a site do not blow up.
        of, own = self.site_of[structure], self.gaps[structure]
        size = self._by_site(structure, np.abs(own))
        count = np.bincount(of, minlength=len(self.sites))
        share = np.where(size[of] > 0, np.abs(own) / np.where(size[of] > 0, size[of], 1.0), 1.0 / count[of])
        shared: FloatArray = own + (gap - self.site_gap[structure])[:, of] * share
        return shared

    def _residuals(self, weights: FloatArray) -> tuple[float | None, ...]:
        known = [t.residual_ns for t in self.traces]
        if any(r is None and weights[:, p].any() for p, r in enumerate(known)):
            return (None,) * len(weights)
        return tuple(_combine(weights, np.array([float(r or 0) for r in known])).tolist())


def predict_unit_ns(
    traces: Sequence[Trace], instance: UnitInstance, times: Times = captured_times, allow: bool = False
) -> float:
    """Σ(durations + gaps) + launch cost of a unit at any point: what a left-out capture is held against."""
    return Grid(traces).profile(instance, times, allow).unit_ns


def merge_sites(lists: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Union of site lists that keeps program order: a new site follows its predecessor in its own list."""
    merged: list[str] = []
    known: set[str] = set()
    for sites in lists:
        if known.issuperset(sites):
            continue
        at = 0
        for name in sites:
            if name in known:
                at = merged.index(name) + 1
            else:
                merged.insert(at, name)
                known.add(name)
                at += 1
    return tuple(merged)


def _combine(weights: FloatArray, values: FloatArray) -> FloatArray:
    """weights @ values, summed point by point: a matrix library would round as its threads happen to split."""
    result = np.zeros((len(weights), *values.shape[1:]))
    for p in np.flatnonzero(np.any(weights != 0.0, axis=0)):
        result += np.multiply.outer(weights[:, p], values[p])
    return result


def _bracket(axis: Sequence[float], value: float) -> list[tuple[float, float]]:
    """Axis values around `value` with linear weights; outside, the nearest two continue their line."""
    if len(axis) == 1 or value in axis:
        return [(value if value in axis else axis[0], 1.0)]
    high = min(max(int(np.searchsorted(axis, value)), 1), len(axis) - 1)
    low_value, high_value = axis[high - 1], axis[high]
    w = (value - low_value) / (high_value - low_value)
    return [(low_value, 1.0 - w), (high_value, w)]


def _reach(axis: Sequence[float], value: float) -> float:
    """Factor by which `value` lies outside the axis: 1 inside, 2 at half the least or twice the largest."""
    if axis[0] <= value <= axis[-1] or axis[-1] == 0:
        return 1.0
    return axis[0] / max(value, 1e-9) if value < axis[0] else value / axis[-1]


def _work(trace: Trace) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Per kernel: bytes of weights (which do not grow with batch or length), other bytes, FLOPs."""
    fixed = np.array(
        [sum(a.nbytes for a in k.accesses if trace.buffers[a.buffer].role == "weight") for k in trace.kernels],
        dtype=np.float64,
    )
    total = np.array([k.read_bytes + k.write_bytes for k in trace.kernels], dtype=np.float64)
    fixed = np.minimum(fixed, total)
    return fixed, total - fixed, np.array([k.flops for k in trace.kernels], dtype=np.float64)
