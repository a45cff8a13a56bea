"""Times of derived kernels on a reference GPU, through the fitted models and the mechanisms of tesserasim.costs.

    gemm, attention, moe, elementwise    the fitted model that knows no captured time, at the kernel's shape
    mxfp4         grouped products that unpack 4-bit weights: no fitted row has them on the H200; see `mxfp4_us`
    analytic      MLA: FLOPs and bytes alone
    collective    bytes over the group's link (tesserasim.derive.collectives)

Floors
    Benchmarks of attention and of experts launch more kernels than a unit of a serving engine does for the operation
    (schedules and sorted copies are made once a step, not once a layer). Their floors stand for those launches, and are
    replaced by `ONE_KERNEL_US` for every kernel that runs here: one of attention, or two where keys are split; four of
    a layer of experts with its routing and sum.

Gaps
    The benchmarks behind the fitted models time whole operations in a CUDA graph, so their time reaches to the start of
    the next kernel. A derived kernel therefore has `GAP_NS` of gap before it and that much less duration: the two add
    up to the benchmark's time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tesserasim.cluster.model import GpuSpec
from tesserasim.costs.errors import load_errors
from tesserasim.costs.mechanisms import FLOOR_US, Specs, specs
from tesserasim.costs.shipped import shipped
from tesserasim.costs.times import FloatArray
from tesserasim.derive.unit import Cost

#: Median gap between two kernels of a graph on an H200, in the unit decode-b4-c1024 of traces/fit, which serves to fit
#: launch figures and which nothing derived is compared with (its prefill has 336).
GAP_NS = 368
#: Shares of the peak rates that mechanisms reach, as in tesserasim.costs.mechanisms.Limits.prior.
TENSOR, DRAM = 0.8, 0.85
#: Instructions that unpacking one 4-bit weight takes: the least squares of ln(time) over the published H200 rows of
#: vLLM 0.24.0 with MXFP4 experts (not sharded, balanced), and the log-sd that remains there.
#: experiments/validation/derived_vs_captured.py --unpack computes both again. No captured unit entered.
UNPACK, UNPACK_SIGMA = 5.5, 0.122
#: Floor of one kernel. The floors of attention and MoE benchmarks (FLOOR_US: 7 and 15 us) are those of several kernels.
ONE_KERNEL_US = FLOOR_US["gemm"]
LANES = 128.0  # lanes of an SM that issue one instruction per clock
_BITS_OF_MX = 4.25


@dataclass(frozen=True)
class Priced:
    """Times of a unit's kernels; arrays have one entry per kernel."""

    us: FloatArray  # to the start of the next kernel
    sigma: FloatArray  # log-sd of the model's error
    sources: tuple[str, ...]

    @property
    def duration_ns(self) -> list[int]:
        """What is left after the gap, at least half of the time."""
        ns = self.us * 1e3
        return [int(v + 0.5) for v in np.maximum(ns - GAP_NS, 0.5 * ns)]


class ReferenceTimes:
    """Prices kernels on one GPU; equal shapes are priced once. Without `floors` those of the benchmarks stay."""

    def __init__(self, gpu: GpuSpec, floors: bool = True) -> None:
        self.gpu, self.figures, self.floors = gpu, specs([gpu]), floors
        self._known: dict[Cost, float] = {}

    def price(self, costs: Sequence[Cost]) -> Priced:
        wanted = dict.fromkeys(x for c in costs for x in (_plain(c), *map(_plain, c.without)))
        self._fill([c for c in wanted if c not in self._known])
        return Priced(
            np.array([self._us(c) for c in costs]), np.array([self._sigma(c.kind) for c in costs]),
            tuple(self.source(c.kind) for c in costs),
        )  # fmt: skip

    def _us(self, c: Cost) -> float:
        whole = self._known[_plain(c)]
        parts = sum(self._known[_plain(w)] for w in c.without)
        launched = ONE_KERNEL_US * (c.kernels + len(c.without))
        floor = {"mxfp4": FLOOR_US["moe"], "gemm": launched, "elementwise": launched, "analytic": 0.0}
        surplus = (floor.get(c.kind, FLOOR_US.get(c.kind, launched)) - launched) if self.floors else 0.0
        return max(whole - surplus - parts, 0.5 * whole) * c.share

    def _fill(self, costs: Sequence[Cost]) -> None:
        kinds: dict[str, list[Cost]] = {}
        for c in costs:
            kinds.setdefault(c.kind, []).append(c)
        for kind, group in kinds.items():
            columns = {name: np.array([dict(c.columns)[name] for c in group]) for name, _ in group[0].columns}
            if kind == "collective":
                us = columns["us"]
            elif kind == "mxfp4":
                us = mxfp4_us(columns, self.figures)
            elif kind == "analytic":
                us = analytic_us(columns, self.figures)
            else:
                us = shipped(kind, None).predict(columns, self.gpu)
            self._known.update(zip(group, us.tolist(), strict=True))

    def _sigma(self, kind: str) -> float:
        if kind == "mxfp4":
            return UNPACK_SIGMA
        if kind in ("analytic", "collective"):
            errors = load_errors()
            return math.hypot(errors.systematic("other"), errors.site("other"))
        spread = shipped(kind, None).spread(self.gpu.name)
        return math.hypot(spread.systematic, spread.site)

    def source(self, kind: str) -> str:
        """Where times of a kind come from, in words."""
        if kind in ("analytic", "collective", "mxfp4"):
            return {"analytic": "FLOPs and bytes", "collective": "bytes over the link", "mxfp4": "mechanisms"}[kind]
        how, whose = shipped(kind, None).source(self.gpu.name)
        return how if how == "calibrated" else f"{how} {whose}".strip()


def _plain(c: Cost) -> Cost:
    return Cost(c.kind, c.columns)


def analytic_us(x: dict[str, FloatArray], s: Specs) -> FloatArray:
    """FLOPs and bytes, which overlap nearly: the prior of the mechanisms at 16 bits, without its floor."""
    return _overlapped(x["flops"] / s.bf16 / TENSOR, x["nbytes"] / s.dram / DRAM)


def _overlapped(a: FloatArray, b: FloatArray) -> FloatArray:
    found: FloatArray = np.sqrt(np.sqrt(a**4 + b**4))
    return found


def _up(x: FloatArray) -> FloatArray:
    """The next whole number; one that rounding has just passed is not raised by one."""
    found: FloatArray = np.ceil(x - 1e-9)
    return found


def mxfp4_us(
    x: dict[str, FloatArray], s: Specs, active: FloatArray | None = None, unpack: float = UNPACK
) -> FloatArray:
    """A layer of experts whose 4-bit weights are unpacked in the kernel, with routing and the final sum.

    Inside an SM unpacking and tensor work follow each other; the weights' way from memory is hidden behind them:

        t     = floor + (memory^4 + (tensor + unpack)^4)^(1/4)
        unpack = instructions per weight * weights of active experts * passes / (SMs * 128 lanes * clock)
        passes = rows of an expert / 128, up: every block of rows unpacks its weights again

    `active` [row]: experts that get a token; by default those of tokens that choose evenly at random.
    """
    tokens, experts, hidden, inter = x["tokens"], x["experts"], x["hidden"], x["inter"]
    if active is None:
        active = experts * -np.expm1(tokens * np.log1p(-np.minimum(x["topk"] / experts, 1.0 - 1e-9)))
    pairs = tokens * x["topk"]
    each = pairs / active
    weights = active * 3.0 * hidden * inter
    memory = (weights * _BITS_OF_MX / 8.0 + pairs * (2.0 * hidden + 4.0 * inter) * 2.0) / s.dram
    tile = np.clip(2.0 ** _up(np.log2(np.maximum(each, 1.0))), 16.0, 128.0)
    tensor = 6.0 * active * _up(each / tile) * tile * hidden * inter / s.bf16
    work = unpack * weights * _up(each / 128.0) / (s.sms * s.clock_ghz * 1e3 * LANES)
    found: FloatArray = FLOOR_US["moe"] + _overlapped(memory / DRAM, tensor / TENSOR + work)
    return found
