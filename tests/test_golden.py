"""Timelines worked out by hand, and closed forms: what the engine must give to the nanosecond."""

from __future__ import annotations

import pytest

from tesserasim.sim.engine import run
from tesserasim.sim.program import Channel, LaneProgram, Program, Send, StreamProgram

ENGINES = ["simpy", "fast"]
PER_NS = 1_000_000_000  # bytes per second of a link that carries 1 byte per ns


def stream(device, duration, *, delay=None, shave=None, waits=None, sends=None, order=None):
    """A stream program; what is left out is zero, or nothing."""
    n = len(duration)
    return StreamProgram(
        device,
        list(duration),
        list(delay or [0] * n),
        list(shave or [0] * n),
        [(waits or {}).get(i) for i in range(n)],
        [(sends or {}).get(i) for i in range(n)],
        list(order or range(n)),
    )


def two_stage(depth, a, nbytes, rate, latency, b):
    """A on g0, a transfer, B on g1."""
    first = stream(0, [a], sends={0: (Send(0, nbytes, 0),)})
    second = stream(1, [b], waits={0: (0,)}, order=[1])
    lane = LaneProgram("golden", 1, depth, (first, second), tokens=1, units=1)
    return Program(("g0", "g1"), (Channel("g0>g1", 0, 1, rate * PER_NS, latency),), (lane,))


@pytest.mark.quick
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("depth", "ends"), [(1, [45, 90, 135]), (2, [45, 65, 90, 110]), (3, [45, 65, 85, 105])]
)
def test_first_golden_timeline(engine, depth, ends):
    """A 10 ns, 100 B over 10 B/ns with 5 ns of latency, B 20 ns."""
    result = run(two_stage(depth, 10, 100, 10, 5, 20), engine=engine, cohorts=len(ends), check=True)
    assert result.lanes[0].completion_ns[: len(ends)] == ends


@pytest.mark.quick
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("depth", "ends"), [(1, [45, 90, 135]), (2, [45, 70, 95, 120]), (3, [45, 70, 95, 120])]
)
def test_second_golden_timeline(engine, depth, ends):
    """A 10 ns, 100 B over 4 B/ns (25 ns) with 5 ns of latency, B 5 ns: the link is the bottleneck.

    Mutation that fails here: occupy the link for occupation + latency in `_occupy` (gives 45, 75, 105).
    """
    result = run(two_stage(depth, 10, 100, 4, 5, 5), engine=engine, cohorts=len(ends), check=True)
    assert result.lanes[0].completion_ns[: len(ends)] == ends
