"""Run a program: `run(program)` is the one door to both engines.

`simpy` is the reference (simpy_engine.py); `fast` (fast_engine.py) gives exactly the same results in less
time; `auto` takes `fast` unless a timeline or a check is wanted. Lanes that share neither a device nor a link cannot
influence each other: each such *component* is run apart, to its own end, by both engines.
"""

from __future__ import annotations

from tesserasim.errors import InputError
from tesserasim.sim.components import components
from tesserasim.sim.fast_engine import FastRun
from tesserasim.sim.invariants import check_run
from tesserasim.sim.program import Program
from tesserasim.sim.result import SimResult
from tesserasim.sim.simpy_engine import SimpyRun
from tesserasim.sim.validate import check_program

ENGINES = ("auto", "simpy", "fast")


def run(
    program: Program,
    *,
    engine: str = "auto",
    check: bool = False,
    timeline: bool = False,
    cohorts: int | None = None,
) -> SimResult:
    """Simulate until every lane has its warm-up and window of completions (or `cohorts` completions).

    `check` verifies the invariants on the slices of the run and raises `InvariantError`; `timeline` keeps the
    slices in the result. Raises `InputError` for a program that cannot run, `DeadlockError` for one that
    would get stuck.
    """
    if engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}: one of {', '.join(ENGINES)}")
    check_program(program)
    name = ("simpy" if check or timeline else "fast") if engine == "auto" else engine
    simulation = FastRun if name == "fast" else SimpyRun
    result = SimResult.blank(program, cohorts, name)
    if check or timeline:
        result.timeline = []
    for lanes in components(program):
        result.end_ns = max(result.end_ns, simulation(program, lanes, result).run())
    if result.timeline is not None:
        result.timeline.sort()
    if check:
        check_run(program, result)
    if not timeline:
        result.timeline = None
    return result
