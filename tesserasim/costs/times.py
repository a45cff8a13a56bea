"""Kernel times and their error, and the times that need no model: the captured ones.

Errors are hierarchical, because independent errors of single kernels average out over a thousand kernels and
say nothing: one factor is shared by all kernels of a kind on a GPU (the model misjudges decode attention on
that GPU, everywhere by the same factor), and one factor belongs to each site. Both are log-normal around the
predicted time; the arrays carry the standard deviations of the logarithm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tesserasim.trace.model import Trace

FloatArray = NDArray[np.float64]

#: Log-sd of the factor shared by all captured times of a kind: medians of repeated captures of one unit on one
#: H200 agree within 1-2 %, so a whole run may sit that far off another.
CAPTURED_SYSTEMATIC = 0.015
#: (p90 - p10) of a normal distribution in standard deviations.
P10_P90_SPAN = 2.563


@dataclass(frozen=True)
class KernelTimes:
    """Times of one trace's kernels on one GPU, in launch order; all arrays as long as the trace."""

    ns: FloatArray  # [kernel] nanoseconds; not rounded, so that sums over sites stay exact
    source: str  # "captured" | "derived" | "roofline-ratio" | ...
    sigma_systematic: FloatArray  # [kernel] log-sd of the factor shared by all kernels of this (GPU, kind)
    sigma_site: FloatArray  # [kernel] log-sd of the site's own factor


def captured_sigma(trace: Trace) -> FloatArray:
    """Log-sd per kernel from the spread of its repeats: (p90 - p10) / 2.563 / median; 0 if not recorded."""
    median = np.array([k.duration_ns for k in trace.kernels], dtype=np.float64)
    spread = np.array([k.duration_p90_ns - k.duration_p10_ns for k in trace.kernels], dtype=np.float64)
    return np.maximum(spread, 0.0) / P10_P90_SPAN / np.maximum(median, 1.0)


def captured_times(trace: Trace) -> KernelTimes:
    """The trace's own durations, exactly, with the scatter of its repeats.

    In a derived trace the spread of a kernel is the error of the model that made its time: kernels of a kind share it.
    """
    ns = np.array([k.duration_ns for k in trace.kernels], dtype=np.float64)
    scatter, source = captured_sigma(trace), own_source(trace)
    if source != "captured":
        return KernelTimes(ns, source, np.maximum(scatter, CAPTURED_SYSTEMATIC), np.zeros(len(ns)))
    return KernelTimes(ns, source, np.full(len(ns), CAPTURED_SYSTEMATIC), scatter)


def own_source(trace: Trace) -> str:
    """What a trace's own durations are: "captured", or "derived" if a model made them."""
    return "derived" if trace.meta.origin == "derived" else "captured"
