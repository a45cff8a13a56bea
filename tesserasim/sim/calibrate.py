"""What co-running costs, fitted from pairs of single kernels: `calibrate(pairs)`.

A pair is measured with two streams: each runs its kernel back to back, n times, and the time from the first start
to the last end over n is `together_ns`. So the quicker kernel ends its n runs first and the other goes on alone.

Two constants speak of the DRAM, but only their ratio shows: what kernels reach together over what their bytes ask for.
Below 1 it is `dram_efficiency`; above 1 fewer bytes reach the DRAM than the kernels move, and it is `dram_byte_share`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from tesserasim.errors import InputError
from tesserasim.sim.fluid import Load, rates
from tesserasim.sim.sharing import ONE, Sharing

FITTED = ("sm_efficiency", "dram", "corun_rate")
#: The constants that each fitted value stands for.
CONSTANTS = {
    "sm_efficiency": ("sm_efficiency",), "dram": ("dram_efficiency", "dram_byte_share"), "corun_rate": ("corun_rate",),
}  # fmt: skip
#: Where the search begins, per constant: the time is piecewise smooth in them, so from several places.
_STARTS = (0.95, 0.6)
_LOWEST, _HIGHEST = 0.05, (1.0, 4.0, 1.0)
#: A constant whose change by 1 % changes no predicted time by this much is not decided by the pairs.
_SEEN = 1e-5


@dataclass(frozen=True, slots=True)
class Solo:
    """One kernel alone: what it demands (units of 2^-20, `demands.py`), and its duration.

    `dram` is that of all its bytes, so it may exceed ONE.
    """

    sm: int
    dram: int
    ns: float

    def load(self, device: int, sharing: Sharing) -> Load:
        return Load(device, 0, self.sm, min(ONE, self.dram * sharing.dram_byte_share // ONE))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two kernels looped on two streams of one device, and their time together per run (module docstring).

    `apart`: on two devices that share a DRAM.
    """

    a: Solo
    b: Solo
    together_ns: float
    apart: bool = False


@dataclass(frozen=True)
class Calibration:
    """Fitted constants and what they leave unexplained. Residuals are predicted / measured - 1."""

    constants: Sharing
    residuals: tuple[float, ...]  # per pair, in order
    rms: float
    worst: float  # largest in size
    undecided: tuple[str, ...]  # constants that the pairs say nothing about: left at 1

    def document(self, source: str) -> dict[str, dict[str, object]]:
        """Entries for sharing.json: the fitted ones with `source` and the residual, the undecided without."""
        left = f"rms residual {100 * self.rms:.1f} % over {len(self.residuals)} pairs"
        return {
            name: {"value": getattr(self.constants, name) / ONE, "source": f"{source}; {left}"}
            for fitted in FITTED if fitted not in self.undecided for name in CONSTANTS[fitted]
        }  # fmt: skip


def together_ns(a: Solo, b: Solo, sharing: Sharing, apart: bool = False) -> float:
    """Predicted time together per run: both at their shared rates until the quicker is through."""
    found = rates([a.load(0, sharing), b.load(int(apart), sharing)], sharing)
    (first, _), (last, alone) = sorted((x.ns * ONE / r, x.ns) for x, r in zip((a, b), found, strict=True))
    return first + (1.0 - first / last) * alone


def calibrate(pairs: Sequence[Pair]) -> Calibration:
    """Constants that fit the pairs best: least squares of predicted / measured - 1, each in (0.05, 1] (the ratio of the
    DRAM up to 4).

    Deterministic. A residual that stays large says that the model is wrong, not that the fit failed; it is the
    caller's to judge. Raises InputError without pairs, or for times that are not positive and finite.
    """
    if not pairs:
        raise InputError("calibrate: no pairs")
    for i, p in enumerate(pairs):
        if not all(math.isfinite(t) and t > 0 for t in (p.a.ns, p.b.ns, p.together_ns)):
            raise InputError(f"calibrate: pair {i} has a time that is not a positive number")
    best = min((_fit(pairs, start) for start in product(_STARTS, repeat=len(FITTED))), key=lambda f: f[0])[1]
    residuals = _residuals(pairs, best)
    undecided = []
    for k, name in enumerate(FITTED):
        moved = best.copy()
        moved[k] *= 0.99
        if np.abs(_residuals(pairs, moved) - residuals).max() < _SEEN:
            undecided.append(name)
            best[k] = 1.0
    residuals = _residuals(pairs, best)
    return Calibration(
        _sharing(best), tuple(residuals.tolist()), float(np.sqrt(np.mean(residuals**2))),
        float(residuals[np.abs(residuals).argmax()]), tuple(undecided),
    )  # fmt: skip


def _sharing(values: NDArray[np.float64]) -> Sharing:
    sm, dram, corun = (float(v) for v in values)
    found = (sm, min(1.0, dram), corun, min(1.0, 1.0 / dram))
    return Sharing(*(max(1, round(v * ONE)) for v in found))


def _residuals(pairs: Sequence[Pair], values: NDArray[np.float64]) -> NDArray[np.float64]:
    sharing = _sharing(values)
    return np.array([together_ns(p.a, p.b, sharing, p.apart) / p.together_ns - 1.0 for p in pairs])


def _fit(pairs: Sequence[Pair], start: Sequence[float]) -> tuple[float, NDArray[np.float64]]:
    solve: Any = least_squares  # the stubs ask for an array of steps
    found = solve(
        lambda v: _residuals(pairs, v), start, bounds=(_LOWEST, _HIGHEST),
        diff_step=1e-3,  # rates come in steps of 2^-20: a derivative over less sees the steps
    )  # fmt: skip
    return float(found.cost), np.asarray(found.x, dtype=np.float64)
