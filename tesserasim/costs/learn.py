"""From rows to a model: what is fitted for a kind, and what the model answers for GPUs with and without rows.

A `KindModel` belongs to one kernel kind and one situation: the time on the reference GPU is known (the trace was
captured there) or it is not. It holds a forest per GPU with rows, which corrects the mechanisms' base time, and a
pooled forest over all of them for GPUs without rows:

    calibrated  the GPU has rows: its own forest
    sibling     another GPU of the same die has rows: that one's forest over this GPU's figures
    spec        neither: `pooled_share` of the pooled forest over this GPU's figures

Everything the errors need comes from rows that were held out (tesserasim.costs.validate).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import GpuSpec
from tesserasim.costs.boost import BoostParams, Forest, fit_forest
from tesserasim.costs.distance import UNKNOWN, Z80, Between, distance
from tesserasim.costs.mechanisms import FLOOR_US, Known, Shape, features, known_side, specs
from tesserasim.costs.times import FloatArray

REFERENCE = "H200-SXM"
#: GPUs whose kernels behave alike up to clock, SMs, bandwidth and power.
DIES = (
    frozenset({"A100-40GB-PCIe", "A100-40GB-SXM", "A100-80GB-PCIe", "A100-80GB-SXM"}),
    frozenset({"H100-PCIe", "H100-SXM", "H100-NVL", "H200-SXM", "H20"}),
    frozenset({"B200", "B300", "GB200"}),
    frozenset({"L40S", "L40", "L20", "L4", "RTX-4090"}),
    frozenset({"RTX-PRO-6000", "RTX-5090"}),
)
PER_GPU = BoostParams(trees=250, rate=0.12)
POOLED = BoostParams(trees=120, rate=0.1, shrink=100.0)
#: Rows of one GPU that the pooled forest sees: GPUs count alike.
POOLED_ROWS = 12_000
#: Rows of one GPU that its forest sees at most: more give little and cost time.
GPU_ROWS = 40_000

if TYPE_CHECKING:  # the tables need pandas, which predictions do without
    from tesserasim.costs.tables import Rows


@dataclass(frozen=True)
class Spread:
    """Held-out errors, ln(measured / predicted), of one kind on one GPU (or on GPUs without rows)."""

    low: FloatArray  # [regime] 10 % quantile
    high: FloatArray  # [regime] 90 % quantile
    systematic: float  # log-sd that shapes of a group, or a GPU without rows, share
    site: float  # log-sd of the rest


@dataclass(frozen=True)
class KindModel:
    """Everything that decides the times of one kind in one situation."""

    kind: str
    reference: str | None
    forests: Mapping[str, Forest]
    pooled: Forest
    pooled_share: float = 0.0
    spreads: Mapping[str, Spread] = field(default_factory=dict)  # GPU with rows -> errors
    launches: Mapping[str, float] = field(default_factory=dict)  # GPU -> launches of a block-scaled GEMM, H200 = 1
    between: Between = UNKNOWN  # errors of GPUs without rows

    def source(self, gpu: str) -> tuple[str, str]:
        """(how times on `gpu` are found, the GPU whose forest is used or "")."""
        if gpu in self.forests:
            return "calibrated", gpu
        sibling = sibling_of(gpu, [*self.forests, *([self.reference] if self.reference else [])])
        return ("sibling", sibling) if sibling else ("spec", "")

    def known_side(self, shape: Shape, known_us: FloatArray | None) -> Known:
        """What `base` needs and no GPU changes."""
        there = specs([find_gpu(self.reference)]) if self.reference else None
        return known_side(self.kind, shape, there, known_us)

    def base(self, shape: Shape, gpu: GpuSpec, known: Known) -> tuple[FloatArray, FloatArray]:
        """(base [row] us, features [row, feature]) of the mechanisms on one GPU."""
        shape = with_launches(self.kind, shape, self.launches, [gpu.name])
        return features(self.kind, shape, specs([gpu]), known)

    def predict(self, shape: Shape, gpu: GpuSpec, known_us: FloatArray | None = None) -> FloatArray:
        """[row] us on `gpu`; `known_us` [row] is the time on the reference GPU if the model has one."""
        base, x = self.base(shape, gpu, self.known_side(shape, known_us))
        return base * np.exp(self.log_factor(gpu.name, x))

    def log_factor(self, gpu: str, x: FloatArray) -> FloatArray:
        """[row] what the forests add to the mechanisms, for features x [row, feature]."""
        how, whose = self.source(gpu)
        if how != "spec":
            return self.forests[whose].predict(x) if whose in self.forests else np.zeros(len(x))
        if not self.pooled_share:
            return np.zeros(len(x))
        return self.pooled_share * self.pooled.predict(x)

    def spread(self, gpu: str) -> Spread:
        """The errors of times on `gpu`: held-out ones if it has rows, else what its distance lets expect."""
        how, whose = self.source(gpu)
        if how == "calibrated" and gpu in self.spreads:
            return self.spreads[gpu]
        anchor = anchor_of(gpu, whose, self.reference, list(self.forests))
        return far_spread(self.between, gpu, anchor, whose in self.forests)


def sibling_of(gpu: str, known: list[str]) -> str:
    """A GPU of `known` with the same die, the first by name; "" if there is none."""
    for die in DIES:
        if gpu in die:
            return min((k for k in known if k in die and k != gpu), default="")
    return ""


def with_launches(
    kind: str, shape: Shape, launches: Mapping[str, float], gpus: Sequence[str], gpu: NDArray[np.int64] | None = None
) -> Shape:
    """The shape with a column "launches" for block-scaled 8-bit GEMMs, as the GPU's *sibling* launches them.

    A GPU's own figure is never used, so a GPU with rows is fitted on the same base as one without is predicted from.
    `gpu` [row] indexes `gpus`; None: all rows are on the first.
    """
    if kind != "gemm" or not launches:
        return shape
    of = np.array([launches.get(sibling_of(g, list(launches)), 1.0) for g in gpus])
    if gpu is None and of[0] == 1.0:
        return shape
    scaled = (shape["block"] > 0) & (shape["a_bits"] == 8)
    return {**shape, "launches": np.where(scaled, of[0] if gpu is None else of[gpu], 1.0)}


def anchor_of(gpu: str, sibling: str, reference: str | None, known: Sequence[str]) -> str:
    """The known GPU from which the errors of `gpu` grow: its sibling, the reference or the nearest one with rows."""
    if sibling or reference or not known:
        return sibling or reference or REFERENCE
    return min(known, key=lambda k: (distance(find_gpu(gpu), find_gpu(k)), k))


def far_spread(between: Between, gpu: str, anchor: str, sibling: bool) -> Spread:
    """The errors of a GPU without rows, the same near the floor and far from it, to both sides."""
    systematic, site = between.errors(distance(find_gpu(gpu), find_gpu(anchor)), sibling)
    half = np.full(4, Z80 * np.hypot(systematic, site))
    return Spread(np.round(-half, 4), np.round(half, 4), round(systematic, 4), round(site, 4))


def regime(kind: str, base_us: FloatArray) -> NDArray[np.int64]:
    """[row] 0 near the floor, 1 within four times, 2 within 32 times, 3 beyond: the errors differ."""
    return np.digitize(base_us / FLOOR_US[kind], (1.5, 4.0, 32.0)).astype(np.int64)


@dataclass(frozen=True)
class Problem:
    """Rows of a kind with their base times and features, made once for all fits of a cross-validation."""

    rows: Rows
    reference: str | None
    base: FloatArray
    x: FloatArray
    y: FloatArray  # ln(measured / base)
    lone: FloatArray  # ln(base without what siblings tell / base)
    lone_x: FloatArray  # features without what siblings tell


def problem(rows: Rows, reference: str | None) -> Problem:
    """Rows that can be fitted: with a known time on the reference GPU, which itself is then no target."""
    if reference:
        rows = rows.take(np.isfinite(rows.reference_us) & ~rows.is_gpu(reference))
    every = specs([find_gpu(g) for g in rows.gpus]).take(rows.gpu) if len(rows) else specs([find_gpu(REFERENCE)])
    there = specs([find_gpu(reference)]) if reference else None
    known = rows.reference_us if reference else None
    shape = with_launches(rows.kind, rows.shape, rows.launches, rows.gpus, rows.gpu)
    side = known_side(rows.kind, rows.shape, there, known)
    base, x = features(rows.kind, shape, every, side)
    lone, lone_x = features(rows.kind, rows.shape, every, side) if "launches" in shape else (base, x)
    return Problem(rows, reference, base, x, np.log(rows.time_us / base), np.log(lone / base), lone_x)


def thin(where: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """At most `most` of the indices, evenly spread by a fixed stride that no shape grid shares."""
    if len(where) <= most:
        return where
    order = (np.arange(len(where), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)
    return np.sort(where[np.argsort(order, kind="stable")[:most]])


def fit_gpu(p: Problem, where: NDArray[np.bool_], gpu: str, params: BoostParams = PER_GPU) -> Forest:
    """The forest of one GPU from the rows of `where` [row]."""
    rows = thin(np.flatnonzero(where & p.rows.is_gpu(gpu)), GPU_ROWS)
    return fit_forest(p.x[rows], p.y[rows], p.rows.group[rows], params)


def fit_pooled(p: Problem, where: NDArray[np.bool_], gpus: list[str], params: BoostParams = POOLED) -> Forest:
    """The forest of GPUs without rows: the rows of `where` on `gpus`, as many of each."""
    parts = [thin(np.flatnonzero(where & p.rows.is_gpu(g)), POOLED_ROWS) for g in gpus]
    rows = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return fit_forest(p.x[rows], p.y[rows], p.rows.group[rows], params)


def fit_kind(p: Problem, where: NDArray[np.bool_], gpus: list[str] | None = None, pooled: bool = True) -> KindModel:
    """The model of a kind from the rows of `where`, without errors."""
    gpus = [g for g in (gpus or p.rows.gpus) if (where & p.rows.is_gpu(g)).any()]
    forests = {g: fit_gpu(p, where, g) for g in gpus}
    shared = fit_pooled(p, where, gpus) if pooled else fit_pooled(p, where, [])
    return KindModel(p.rows.kind, p.reference, forests, shared, launches=p.rows.launches)


def with_errors(model: KindModel, spreads: Mapping[str, Spread], pooled_share: float, between: Between) -> KindModel:
    return replace(model, spreads=dict(spreads), pooled_share=pooled_share, between=between)


def measure_spread(
    kind: str, base: FloatArray, error: FloatArray, group: NDArray[np.int64], shared: NDArray[Any]
) -> Spread:
    """Errors [row] = ln(measured / predicted) as quantiles per regime and as two standard deviations.

    `shared` [row] numbers what a systematic error belongs to (the group; the GPU for those without rows). A regime of
    fewer than 100 rows takes the quantiles of all.
    """
    where = regime(kind, base)
    low, high = np.empty(4), np.empty(4)
    for r in range(4):
        part = error[where == r]
        part = part if len(part) >= 100 else error
        low[r], high[r] = np.quantile(part, [0.1, 0.9]) if len(part) else (-1.0, 1.0)
    if not len(error):
        return Spread(low, high, 0.5, 0.5)
    number = np.unique(shared, return_inverse=True)[1]
    count = np.bincount(number)
    mean = np.bincount(number, weights=error) / count
    systematic = float(np.sqrt(np.mean(mean**2)))
    site = float(np.sqrt(np.mean((error - mean[number]) ** 2)))
    return Spread(np.round(low, 4), np.round(high, 4), round(systematic, 4), round(site, 4))
