"""Invariants of a run, verified from its slices alone."""

from __future__ import annotations

from tesserasim.sim.program import Program
from tesserasim.sim.result import SimResult


def check_run(program: Program, result: SimResult) -> None:
    """To come: the reference engine is here first."""
