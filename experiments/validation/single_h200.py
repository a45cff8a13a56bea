"""`single` on the captured GPU against the measured end-to-end time of every committed trace.

Each unit is lowered and run on one H200 at depth 1, as any plan is, and its latency is compared with the
event-timed replay of the same graph without the profiler. Left-out points are interpolated from the grid of
their mix, as an uncaptured point would be. Prints signed errors and residuals; exits 1 beyond 2 % (captured)
or 5 % (left out).

    python experiments/validation/single_h200.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from tesserasim.cluster.parse import parse_cluster
from tesserasim.costs.base import default_costs
from tesserasim.errors import InputError, TesserasimError
from tesserasim.lower import lower
from tesserasim.plans import Lane, Plan
from tesserasim.sim.engine import run
from tesserasim.terminal import BAD_INPUT, outcome, say
from tesserasim.trace.mix import Mix, UnitInstance, load_mix
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import read_trace

TRACES = Path(__file__).resolve().parents[2] / "traces"
BAR, LEFT_OUT_BAR = 0.02, 0.05


class OneLaunch(Mix):
    """A request that is one launch of one unit, at the point of `extra["point"]`."""

    @property
    def units(self) -> tuple[str, ...]:
        return (self.extra["point"].unit,)

    def cohort(self, batch: int) -> tuple[UnitInstance, ...]:
        return (self.extra["point"],)


def simulated_ns(traces: tuple[Trace, ...], point: UnitInstance) -> int:
    """Latency of one launch, alone on an H200."""
    mix = OneLaunch("one", traces[0].meta.model, "image", {point.unit: traces}, extra={"point": point})
    cluster = parse_cluster("H200-SXM")
    device = cluster.devices[0].id
    plan = Plan("one", cluster.name, "single", (Lane("whole", point.batch, 1, {point.unit: {"*": device}}),))
    result = run(lower(mix, plan, cluster, default_costs()), engine="simpy", cohorts=1)
    lane = result.lanes[0]
    return lane.completion_ns[0] - lane.entry_ns[0]


def point_of(trace: Trace) -> UnitInstance:
    unit = trace.meta.unit
    lacking = [name for name in ("batch", "tokens", "context") if name not in unit]
    if lacking:
        raise InputError(f"unit {trace.unit} does not say its {lacking[0]}; capture it again")
    return UnitInstance(trace.unit, unit["batch"], unit["tokens"], unit["context"])


def line(name: str, trace: Trace, simulated: int, bar: float) -> bool:
    assert trace.meta.e2e_ns is not None
    measured = trace.meta.e2e_ns["median"]
    error = simulated / measured - 1
    raw = trace.span_ns / measured - 1
    spread = (trace.meta.e2e_ns["p90"] - trace.meta.e2e_ns["p10"]) / measured
    print(
        f"{name:<44} {measured / 1e6:9.3f} {simulated / 1e6:9.3f} {100 * error:+7.2f} % "
        f"{(trace.residual_ns or 0) / 1e3:+9.1f} {100 * raw:+8.2f} % {100 * spread:7.2f} %"
    )
    return abs(error) <= bar


def check(path: Path, folder: Path) -> bool:
    """The line of one trace; False beyond its bar."""
    trace, name = read_trace(path), path.relative_to(folder).with_suffix("").as_posix()
    if not trace.meta.e2e_ns or not trace.meta.e2e_ns["median"]:
        raise InputError("no end-to-end time was measured; capture it again")
    if not name.startswith("left-out/"):
        return line(name, trace, simulated_ns((trace,), point_of(trace)), BAR)
    mix = folder / f"{path.parent.name}.toml"
    grid = load_mix(mix).traces.get(trace.unit)
    if grid is None:
        raise InputError(f"{mix} has no unit {trace.unit} to interpolate")
    return line(name, trace, simulated_ns(grid, point_of(trace)), LEFT_OUT_BAR)


def main(folder: Path = TRACES) -> int:
    paths = sorted(folder.rglob("*.parquet"))
    if not paths:
        raise InputError(f"{folder}: holds no traces")
    head = ("unit", "e2e ms", "sim ms", "error", "resid. us", "profiled", "p90-p10")
    print("{:<44} {:>9} {:>9} {:>9} {:>9} {:>10} {:>9}".format(*head))
    good = True
    problems = []
    for path in paths:
        try:
            good &= check(path, folder)
        except TesserasimError as error:  # the others are checked all the same
            problems.append(str(error) if str(path) in str(error) else f"{path}: {error}")
    print("profiled: sum of durations and gaps as profiled, before what the profiler adds is taken off")
    print("fit/ units fix the launch figures: their zero error is by construction and counts for nothing")
    for problem in problems:
        say("error", problem)
    if problems:
        return BAD_INPUT
    print("all within the bars" if good else "SOME OUTSIDE THE BARS (2 % captured, 5 % left out)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(outcome("error", main))
