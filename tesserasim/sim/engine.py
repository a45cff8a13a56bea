"""Run a program: `run(program)` is the one door to both engines.

`simpy` is the reference (simpy_engine.py); `fast` (fast_engine.py) gives exactly the same results in less
time; `auto` takes `fast` unless a timeline or a check is wanted. Programs of `shared` devices are run by the
reference's own variant (shared_engine.py); the fast engine does not know them. Lanes that share neither a device nor a
link (nor, of shared devices, a DRAM) cannot influence each other: each such *component* is run apart, to its own end.
"""

from __future__ import annotations

from tesserasim.errors import InputError
from tesserasim.sim.components import components
from tesserasim.sim.fast_engine import FastRun
from tesserasim.sim.invariants import check_run
from tesserasim.sim.program import SHARED, Program
from tesserasim.sim.result import SimResult
from tesserasim.sim.shared_check import check_shared_run
from tesserasim.sim.shared_engine import SharedRun
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
    shared = program.device_model == SHARED
    check_engine(engine, program.device_model)
    if engine == "fast" and program.has_engines:
        raise InputError("engine 'fast' knows no copy engines: take auto or simpy")
    name = ("simpy" if check or timeline or shared or program.has_engines else "fast") if engine == "auto" else engine
    simulation: type[FastRun] | type[SimpyRun] = FastRun if name == "fast" else SharedRun if shared else SimpyRun
    result = SimResult.blank(program, cohorts, name)
    if check or timeline:
        result.timeline = []
        result.rates = [] if shared else None
    for lanes in components(program):
        result.end_ns = max(result.end_ns, simulation(program, lanes, result).run())
    if result.timeline is not None:
        result.timeline.sort()
    if check:
        (check_shared_run if shared else check_run)(program, result)
    if not timeline:
        result.timeline = result.rates = None
    return result


def check_engine(engine: str, device_model: str) -> None:
    """Raise InputError if this engine cannot run devices of this model."""
    if engine == "fast" and device_model == SHARED:
        raise InputError("engine 'fast' runs serial devices only: take auto or simpy for device model 'shared'")
