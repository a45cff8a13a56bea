"""What the grid gives: the kernels of launches at their points, and the times that go with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tesserasim.trace.mix import UnitInstance
from tesserasim.trace.model import Trace

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """One launch of a unit at one point: `trace` gives the kernels, the arrays their times in ns."""

    instance: UnitInstance
    trace: Trace
    duration_ns: FloatArray
    gap_ns: FloatArray  # signed
    launch_ns: float
    byte_scale: float  # activation bytes here / activation bytes of `trace`
    extrapolated: bool
    residual_ns: float | None  # end-to-end minus durations, gaps and launch cost, on the captured GPU

    @property
    def unit_ns(self) -> float:
        """Sum of durations and gaps plus launch cost: the unit alone on one device."""
        return float(self.duration_ns.sum() + self.gap_ns.sum() + self.launch_ns)


@dataclass(frozen=True, slots=True)
class IntegerTimes:
    """Whole nanoseconds of a `ProfileRun`: [launch, kernel], and [launch] for the launch cost."""

    duration: IntArray  # >= 1
    delay: IntArray  # the positive part of the gap
    shave: IntArray  # the negative part, at most duration - 1: counts only right after the captured predecessor
    launch: IntArray


@dataclass(frozen=True)
class ProfileRun:
    """Launches that share one kernel list, in program order; rows of the arrays are launches."""

    trace: Trace
    instances: tuple[UnitInstance, ...]
    duration_ns: FloatArray  # [launch, kernel]
    gap_ns: FloatArray  # [launch, kernel]
    launch_ns: FloatArray  # [launch]
    byte_scale: tuple[float, ...]
    extrapolated: tuple[bool, ...]
    residual_ns: tuple[float | None, ...]
    captured_ns: FloatArray  # [launch] durations, gaps and launch cost on the captured GPU

    def __len__(self) -> int:
        return len(self.instances)

    @cached_property
    def batch_scale(self) -> tuple[float, ...]:
        """Batch of each launch over the trace's: how state that does not grow with the tokens scales."""
        own = float(self.trace.meta.unit.get("batch", 1))
        return tuple(i.batch / own for i in self.instances)

    @cached_property
    def counts(self) -> IntArray:
        """[launch] consecutive executions of each row."""
        return np.array([i.count for i in self.instances], dtype=np.int64)

    @cached_property
    def follows(self) -> IntArray:
        """[kernel] captured predecessor on the kernel's stream, -1 for the first: where a gap counts from."""
        last: dict[int, int] = {}
        before = []
        for k in self.trace.kernels:
            before.append(last.get(k.stream, -1))
            last[k.stream] = k.id
        return np.array(before, dtype=np.int64)

    def integers(self) -> IntegerTimes:
        """What an engine executes: whole nanoseconds, round half up, every duration at least 1."""
        duration = np.maximum(_round(self.duration_ns), 1)
        gap = _round(self.gap_ns)
        shave = np.clip(-gap, 0, duration - 1)
        shave[:, self.follows < 0] = 0
        return IntegerTimes(duration, np.maximum(gap, 0), shave, _round(self.launch_ns))

    def profile(self, row: int) -> UnitProfile:
        return UnitProfile(
            self.instances[row], self.trace, self.duration_ns[row], self.gap_ns[row],
            float(self.launch_ns[row]), self.byte_scale[row], self.extrapolated[row], self.residual_ns[row],
        )  # fmt: skip


def _round(values: FloatArray) -> IntArray:
    return np.floor(values + 0.5).astype(np.int64)
