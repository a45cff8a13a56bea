"""The error of times on a GPU without rows: it grows with how far the GPU's figures lie from those of a known GPU.

The known GPU, the *anchor*, is the sibling whose forest is used, else the GPU whose time is known, else the nearest
one with rows. The distance is the root mean square of the logarithms of five ratios: SMs x clock, tensor rate,
bandwidth, L2 and power; an H100 lies 0.1 from an H200, an A100 0.7, an L40S 1. Errors have two parts:

    systematic  shared by all sites of a kind on the GPU: `systematic` x distance, joined by BUILD for a sibling, whose
                table may come from another build of the library than the one that is asked about
    site        the scatter around that: that of GPUs with rows, joined by `site` x distance and BUILD

Both rates are estimated from GPUs that were predicted without their rows, dies counting alike. With a handful of
dies the systematic part is not normal but Student's t: it is widened so that a normal of its width has the same
80 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tesserasim.cluster.model import GpuSpec
from tesserasim.costs.mechanisms import specs
from tesserasim.costs.times import FloatArray

#: Log-sd between two builds on one GPU. The tables' own notes say 4-15 %; the H200's rows differ by 0.04 (GEMM), 0.17
#: (decode) and 0.3 (prefill, MoE) in the mean, so this is no large figure.
BUILD = 0.12
Z80 = 1.2816  # half of an 80 % interval in standard deviations
#: 90 % quantile of Student's t with 1, 2, ... degrees of freedom.
STUDENT = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)


@dataclass(frozen=True)
class Left:
    """What a GPU that was left out showed, all log."""

    distance: float  # to its anchor
    errors: FloatArray  # [row] ln(measured / predicted)
    die: str  # GPUs of one die count as one


@dataclass(frozen=True)
class Between:
    """How errors grow with distance, for one kind in one situation."""

    systematic: float  # log-sd per unit of distance
    site: float
    scatter: float  # log-sd of sites on GPUs with rows
    dies: int  # that the rates were seen on

    def errors(self, distance: float, sibling: bool) -> tuple[float, float]:
        """(systematic, site) log-sd of a GPU without rows; `sibling`: another GPU's forest stands in for its own."""
        build = BUILD**2 / 2.0 if sibling else 0.0
        widened = STUDENT[min(max(self.dies, 1), len(STUDENT)) - 1] / Z80
        systematic = widened * math.sqrt(build + (self.systematic * distance) ** 2)
        return systematic, math.sqrt(build + self.scatter**2 + (self.site * distance) ** 2)


#: Where nothing was left out: no ground for anything narrow.
UNKNOWN = Between(0.5, 0.5, 0.1, 1)


def distance(a: GpuSpec, b: GpuSpec) -> float:
    """How far two GPUs' figures lie apart."""
    s = specs([a, b])
    figures = np.log([s.sms * s.clock_ghz, s.bf16, s.dram, s.l2, s.watts])
    return float(np.sqrt(np.mean((figures[:, 0] - figures[:, 1]) ** 2)))


def robust_scatter(errors: FloatArray) -> float:
    """The standard deviation of a normal with the errors' 80 % interval: tails do not lead."""
    return float(np.quantile(np.abs(errors - errors.mean()), 0.8)) / Z80 if len(errors) else 0.0


def estimate(left: Sequence[Left], known_scatter: Sequence[float]) -> Between:
    """The rates from GPUs left out, each with rows; `known_scatter`: held-out scatter of GPUs with rows."""
    if not left:
        return UNKNOWN
    scatter = float(np.median(known_scatter)) if len(known_scatter) else 0.0
    dies = sorted({x.die for x in left})
    squares = np.zeros(3)
    for die in dies:
        of = [x for x in left if x.die == die]
        rows = [(x.distance**2, x.errors.mean() ** 2, max(robust_scatter(x.errors) ** 2 - scatter**2, 0)) for x in of]
        squares += np.mean(np.array(rows), axis=0)
    systematic, site = np.sqrt(squares[1:] / max(squares[0], 1e-9))
    return Between(round(float(systematic), 4), round(float(site), 4), round(scatter, 4), len(dies))
