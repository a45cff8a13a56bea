"""The seam between costs and everything else: what a cost model is, and which one is used.

Every time in the simulator comes through `CostModel.kernel_ns`. A better model replaces the one returned by
`default_costs`, and nothing else changes: plans, engine and metrics never ask how a time was found, only what
its source and its error are (`KernelTimes`).
"""

from __future__ import annotations

from typing import Protocol

from tesserasim.cluster.model import GpuSpec
from tesserasim.costs.calibrated import calibrated
from tesserasim.costs.times import FloatArray, KernelTimes, captured_times
from tesserasim.trace.model import Trace

__all__ = ["CostModel", "FloatArray", "KernelTimes", "captured_times", "default_costs"]


class CostModel(Protocol):
    """Kernel times of any trace on any GPU of the catalogue.

    A model must return the captured durations, source "captured", for the GPU the trace was captured on, must
    be deterministic, and must raise InputError where it has no answer rather than guess in silence.
    """

    @property
    def name(self) -> str:
        """Word by which results and command line know the model."""
        ...

    @property
    def version(self) -> str:
        """Hash over everything that decides the times: results made under another version are stale."""
        ...

    def kernel_ns(self, trace: Trace, gpu: GpuSpec) -> KernelTimes:
        """Times of all kernels of `trace` on `gpu`."""
        ...


def default_costs() -> CostModel:
    """The model that everything uses unless told otherwise: the one place to change when a better one exists."""
    return calibrated()
