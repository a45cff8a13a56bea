"""Rates that are worth reporting: a run goes on until doubling it changes little, and says so if it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tesserasim import case
from tesserasim.case import settled_run
from tesserasim.cluster.parse import parse_cluster
from tesserasim.lower import _Channels
from tesserasim.sim.engine import run
from tesserasim.sim.program import Channel, LaneProgram, Program, Send, StreamProgram

pytestmark = pytest.mark.quick


def stage(device: int, duration: int, waits: int | None = None, sends: Send | None = None) -> StreamProgram:
    return StreamProgram(
        device, [duration], [0], [0], [None if waits is None else (waits,)], [None if sends is None else (sends,)],
        [0 if waits is None else 1],
    )  # fmt: skip


def pipeline(depth: int = 2) -> Program:
    lane = LaneProgram("p", 1, depth, (stage(0, 10, sends=Send(0, 100, 0)), stage(1, 20, waits=0)), 1, 1)
    return Program(("a", "b"), (Channel("a->b", 0, 1, 10_000_000_000, 5),), (lane,))


def test_a_periodic_pipeline_settles_at_once() -> None:
    """Depth 3 of the golden pipeline: one completion per 20 ns."""
    result, change = settled_run(pipeline(3), "simpy")
    assert change == 0.0
    assert result.lanes[0].steady_per_s == pytest.approx(1e9 / 20)
    assert result.lanes[0].window == 2 * 8 * 3


def test_the_first_part_of_a_long_run_is_the_short_run() -> None:
    """Mutation tried: `first_part_per_s` counting from 0 in place of the window's start."""
    short, long = run(pipeline()), run(replace(pipeline(), stretch=2))
    assert long.lanes[0].window == 2 * short.lanes[0].window
    assert long.lanes[0].first_part_per_s(short.lanes[0].window) == short.lanes[0].steady_per_s


def test_doubling_stops_when_settled_or_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation tried: `stretch *= 2` dropped: the loop never ends on a rate that does not settle."""
    asked: list[int] = []

    class Lane:
        window = 8

        def __init__(self, stretch: int) -> None:
            self.steady_per_s = 100.0 + 4 * stretch

        def first_part_per_s(self, window: int) -> float:
            return self.steady_per_s - 2.0

    class Result:
        def __init__(self, program: Program) -> None:
            asked.append(program.stretch)
            self.lanes = [Lane(program.stretch)]

    monkeypatch.setattr(case, "run", lambda program, **_: Result(program))
    _, change = settled_run(pipeline(), "fast")
    assert asked == [2, 4, 8]
    assert change == pytest.approx(132 / 130 - 1)


def test_ports_are_dealt_out_over_the_channels_that_use_them() -> None:
    """One GPU sends to two others through one 25 Gb/s port: 12.5 Gb/s each. A pair keeps the whole port.

    Mutation tried: `within_ports` returning the channels as they are.
    """
    three = _Channels(parse_cluster("A100-80GB-PCIe+2xL40S@25Gbps"))
    three.between(0, 1), three.between(0, 2), three.between(1, 0)
    assert [c.bytes_per_s for c in three.within_ports()] == [1_562_500_000, 1_562_500_000, 3_125_000_000]
    pair = _Channels(parse_cluster("A100-80GB-PCIe+L40S@25Gbps"))
    pair.between(0, 1), pair.between(1, 0)
    assert [c.bytes_per_s for c in pair.within_ports()] == [3_125_000_000] * 2
