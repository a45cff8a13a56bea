"""The door to the engines: what is refused, when a run ends, and what a result says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from test_golden import PER_NS, one_lane, stream, two_stage

from tesserasim.errors import InputError
from tesserasim.sim.components import components
from tesserasim.sim.engine import run
from tesserasim.sim.program import Channel, LaneProgram, Program, Send
from tesserasim.sim.result import STARVED_AFTER, DeadlockError, StarvedError

pytestmark = pytest.mark.quick
ENGINES = ["simpy", "fast"]


def test_a_token_that_nobody_sends_is_a_deadlock():
    """Mutation that fails here: skip `_check_progress`."""
    program = one_lane(stream(0, [5, 5], waits={1: (0,)}), tokens=1)
    with pytest.raises(DeadlockError, match=r"lane lane, device g0, kernel 1 waits for token 0"):
        run(program)


def test_a_circle_of_waits_is_a_deadlock():
    link = (Channel("0>1", 0, 1, PER_NS, 0), Channel("1>0", 1, 0, PER_NS, 0))
    a = stream(0, [5, 5], waits={0: (1,)}, sends={1: (Send(0, 1, 0),)})
    b = stream(1, [5], waits={0: (0,)}, sends={0: (Send(1, 1, 1),)}, order=[2])
    with pytest.raises(DeadlockError, match="never arrives there"):
        run(one_lane(a, b, channels=link, tokens=2))


def test_a_token_that_arrives_elsewhere_is_a_deadlock():
    link = (Channel("0>1", 0, 1, PER_NS, 0),)
    a = stream(0, [5, 5], sends={0: (Send(0, 1, 0),)}, waits={1: (0,)})
    with pytest.raises(DeadlockError, match="kernel 1 waits for token 0"):
        run(one_lane(a, stream(1, [5]), channels=link, tokens=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.duration.__setitem__(0, 0), "duration below 1"),
        (lambda s: s.delay.__setitem__(0, -1), "negative delay"),
        (lambda s: s.shave.__setitem__(1, 5), "shave leaves less"),
        (lambda s: s.order.pop(), "equal length"),
        (lambda s: s.sends.__setitem__(0, (Send(0, 1, 0),)), "starts at another device"),
        (lambda s: s.sends.__setitem__(0, (Send(7, 1, 0),)), "does not exist"),
        (lambda s: s.sends.__setitem__(0, (Send(1, 1, 9),)), "out of range"),
    ],
)
def test_programs_that_make_no_sense_are_refused(change, message):
    s = stream(0, [5, 5])
    change(s)
    link = (Channel("1>0", 1, 0, PER_NS, 0), Channel("0>1", 0, 1, PER_NS, 0))
    with pytest.raises(InputError, match=message):
        run(one_lane(s, channels=link, tokens=1, devices=2))


def test_nothing_to_run_and_unknown_engines_are_refused():
    with pytest.raises(InputError, match="no lanes"):
        run(Program(("g",), (), ()))
    with pytest.raises(InputError, match="no kernels"):
        run(one_lane(stream(0, [])))
    with pytest.raises(InputError, match="unknown engine 'quick'"):
        run(one_lane(stream(0, [1])), engine="quick")
    with pytest.raises(InputError, match="cohorts"):
        run(one_lane(stream(0, [1])), cohorts=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_starved_lane_is_an_error_not_an_endless_run(engine):
    """Mutation that fails here (by never ending): raise STARVED_AFTER to infinity."""
    lanes = tuple(LaneProgram(n, 1, 2, (stream(0, [5]),), 0, 1, p) for n, p in (("low", 1), ("high", 0)))
    with pytest.raises(StarvedError, match=f"lane low has 0 of 20 .* lane high has {20 * STARVED_AFTER}"):
        run(Program(("g",), (), lanes), engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_warmup_and_window(engine):
    """2 d completions, then 8 d for short cohorts, 2 d for those of 100 units; the slower lane ends the run."""
    for units, window in ((1, 16), (100, 4)):
        lane = run(one_lane(stream(0, [7]), depth=2, units=units), engine=engine).lanes[0]
        assert (lane.warmup, lane.window) == (4, window)
        assert len(lane.completion_ns) == 4 + window
        assert lane.steady_per_s == pytest.approx(1e9 / 7)
        assert lane.window_start_ns == 28
    slow = LaneProgram("slow", 3, 1, (stream(0, [30], delay=[40]),), 0, 1)
    quick = LaneProgram("quick", 1, 1, (stream(0, [5]),), 0, 1)
    result = run(Program(("g",), (), (slow, quick)), engine=engine)
    assert result.end_ns == result.lanes[0].window_end_ns
    assert len(result.lanes[1].completion_ns) > 10  # kept the device busy meanwhile
    assert result.steady_per_s == sum(lane.steady_per_s for lane in result.lanes)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_longer_run_has_the_same_steady_rate(engine):
    program = two_stage(3, 10, 100, 10, 5, 20)
    short, long = (run(program, engine=engine, cohorts=n).steady_per_s for n in (40, 80))
    assert long == pytest.approx(short, rel=0.01)


def test_lanes_that_share_nothing_are_run_apart():
    """A lane's result is the same alone and beside a lane on other devices; lanes in contact stay together."""
    a = LaneProgram("a", 1, 2, (stream(0, [10, 3], delay=[0, 2]),), 0, 1)
    b = LaneProgram("b", 1, 1, (stream(2, [1000]),), 0, 1)
    c = LaneProgram("c", 1, 1, (stream(1, [4], sends={0: (Send(0, 8, 0),)}),), 1, 1)
    link = (Channel("1>0", 1, 0, PER_NS, 0),)
    both = Program(("g0", "g1", "g2"), link, (a, b))
    assert components(both) == [[0], [1]]
    assert components(Program(both.devices, link, (a, b, c))) == [[0, 2], [1]]
    alone = run(Program(both.devices, link, (a,)))
    together = run(both)
    assert together.lanes[0] == alone.lanes[0]
    assert together.devices[0] == alone.devices[0]
    assert together.devices[1].span_ns == 0
    assert together.end_ns == 10_000


def test_auto_takes_the_reference_only_where_slices_are_wanted():
    program = two_stage(1, 1, 1, 1, 1, 1)
    assert run(program).engine == "fast"
    assert run(program, check=True).engine == run(program, timeline=True).engine == "simpy"
    assert run(program, check=True).timeline is None


def test_same_bytes_whatever_the_hash_seed():
    """Mutation that fails here: order `ready` by `id(stream)`."""
    code = (
        "import sys; sys.path[:0] = ['experiments/bench']\n"
        "from engine_speed import run, two_gpu_plan\n"
        "for e in ('simpy', 'fast'): print(run(two_gpu_plan(30, 90, 3), engine=e, cohorts=9, timeline=True))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "7")
    }  # fmt: skip
    assert len(outputs) == 1
    simpy, fast = outputs.pop().splitlines()
    assert simpy.replace(b"engine='simpy'", b"engine='fast'") == fast
