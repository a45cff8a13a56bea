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
    assert (result.lanes[0].warmup, result.lanes[0].window) == (2 * 3 + 8 * 3, 8 * 3)


def test_the_quarter_before_the_window_is_counted_from_its_own_start() -> None:
    """Depth 2 of the golden pipeline: B ends at 45, 65, 90, 110, ...; two completions take 45 ns.

    Mutation tried: `before_per_s` counting from 0.
    """
    lane = run(replace(pipeline(), stretch=2)).lanes[0]
    assert lane.completion_ns[:4] == [45, 65, 90, 110]
    assert lane.before_per_s(2) == pytest.approx(2e9 / 45)


def two_trains(kernels: int = 40) -> Program:
    """Depth 2; a cohort takes 40 kernels of 10 with gaps of 2 on a, then the same on b."""

    def train(device: int, first: int) -> StreamProgram:
        rest = kernels - 1
        waits: list[tuple[int, ...] | None] = [(0,) if device else None, *[None] * rest]
        sends: list[tuple[Send, ...] | None] = [*[None] * rest, None if device else (Send(0, 1, 0),)]
        order = list(range(first, first + kernels))
        return StreamProgram(device, [10] * kernels, [2] * kernels, [0] * kernels, waits, sends, order)

    lane = LaneProgram("p", 1, 2, (train(0, 0), train(1, kernels)), 1, 100)
    return Program(("a", "b"), (Channel("a->b", 0, 1, 10_000_000_000, 5),), (lane,))


def test_cohorts_that_enter_together_stay_together_and_staggered_ones_do_not() -> None:
    """A gap lets the younger cohort in, so two that entered together alternate kernel by kernel, on a and then on b,
    while the other device idles: half the rate, for ever. With slot 1 opened one period (480) later both
    devices work all the time.

    Mutation tried: `stagger_ns` ignored by the fast engine.
    """
    together = two_trains()
    apart = replace(together, lanes=(replace(together.lanes[0], stagger_ns=480),))
    for engine in ("simpy", "fast"):
        slow, quick = (settled_run(p, engine)[0].lanes[0].steady_per_s for p in (together, apart))
        assert slow == pytest.approx(2e9 / 1588, rel=1e-3)
        assert quick == pytest.approx(1e9 / 480, rel=0.03)


def test_doubling_stops_when_settled_or_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation tried: `stretch *= 2` dropped: the loop never ends on a rate that does not settle."""
    asked: list[int] = []

    class Lane:
        window = 8

        def __init__(self, stretch: int) -> None:
            self.steady_per_s = 200.0

        def before_per_s(self, window: int) -> float:
            return 196.0

    class Result:
        def __init__(self, program: Program) -> None:
            asked.append(program.stretch)
            self.lanes = [Lane(program.stretch)]

    monkeypatch.setattr(case, "run", lambda program, **_: Result(program))
    _, change = settled_run(pipeline(), "fast")
    assert asked == [2, 4, 8, 16]
    assert change == pytest.approx(200 / 196 - 1)


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
