"""Timelines worked out by hand, and closed forms: what the engine must give to the nanosecond."""

from __future__ import annotations

import pytest

from tesserasim.errors import InputError
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


def one_lane(*streams, depth=1, channels=(), tokens=0, devices=None, units=1):
    names = tuple(f"g{d}" for d in range(devices or len(streams)))
    return Program(names, tuple(channels), (LaneProgram("lane", 1, depth, streams, tokens, units),))


@pytest.mark.quick
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize(("a", "b"), [(10, 20), (20, 10), (15, 15)])
def test_two_stage_pipeline_closed_form(engine, depth, a, b):
    """Free communication: the first takes a + b; then one per a + b at depth 1, per max(a, b) from 2 on.

    Mutation that fails here: let a slot go when its *first* stream ends (`streams_left` never counted down).
    """
    result = run(two_stage(depth, a, 0, 1, 0, b), engine=engine, cohorts=12, check=True)
    period = a + b if depth == 1 else max(a, b)
    assert result.lanes[0].completion_ns[:12] == [a + b + k * period for k in range(12)]
    if depth > 1:
        assert result.steady_per_s == pytest.approx(1e9 / period)
        assert result.devices[0 if a > b else 1].utilisation == (1.0 if a != b else pytest.approx(1.0))


@pytest.mark.quick
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_fifo_link_closed_form(engine, n):
    """n transfers of one kernel queue on the link: transfer k arrives at a + (k + 1) x + latency.

    Mutation that fails here: `queue.pop()` in place of `popleft()` in `_transfer_ended`.
    """
    a, x, latency, rate = 10, 25, 7, 4
    first = stream(0, [a], sends={0: tuple(Send(0, x * rate - k, k) for k in range(n))})
    second = stream(1, [1] * n, waits={k: (k,) for k in range(n)}, order=range(1, n + 1))
    program = one_lane(first, second, channels=[Channel("l", 0, 1, rate * PER_NS, latency)], tokens=n)
    result = run(program, engine=engine, cohorts=1, check=True, timeline=True)
    arrivals = [s.arrival_ns for s in result.timeline if s.kind == "transfer"]
    # x * rate - k bytes round up to x ns as long as k < rate, and to one less for the next four
    occupations = [-(-(x * rate - k) // rate) for k in range(n)]
    assert arrivals == [a + sum(occupations[: k + 1]) + latency for k in range(n)]
    assert [s.token for s in result.timeline if s.kind == "transfer"] == list(range(n))
    assert result.lanes[0].completion_ns[0] == arrivals[-1] + 1
    assert result.channels[0].busy_ns == sum(occupations)


@pytest.mark.quick
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_contention_closed_form(engine, lanes):
    """n equal lanes of one kernel on one device, depth 1: each waits for the others, (n - 1) s, every round."""
    s = 12
    made = tuple(LaneProgram(f"l{i}", 1, 1, (stream(0, [s]),), 0, 1) for i in range(lanes))
    result = run(Program(("g",), (), made), engine=engine, cohorts=6, check=True)
    for i in range(lanes):
        assert result.lanes[i].completion_ns[:6] == [(k * lanes + i + 1) * s for k in range(6)]
        assert set(result.lanes[i].latencies_ns()) == {lanes * s}
    assert result.devices[0].busy_ns == result.end_ns
    assert result.steady_per_s == pytest.approx(1e9 / s)


@pytest.mark.quick
@pytest.mark.parametrize("engine", ENGINES)
def test_one_device_depth_one_is_the_sum(engine):
    """Sum of durations and gaps (negative ones shorten, delays hold launch cost), exactly; then again."""
    s = stream(0, [10, 20, 30, 5], delay=[100, 3, 0, 0], shave=[0, 0, 4, 2])
    total = 100 + 10 + 3 + 20 + (30 - 4) + (5 - 2)
    result = run(one_lane(s), engine=engine, cohorts=4, check=True)
    assert result.lanes[0].completion_ns == [total * k for k in (1, 2, 3, 4)]
    assert result.devices[0].busy_ns == 4 * (total - 103)


@pytest.mark.quick
@pytest.mark.parametrize("engine", ENGINES)
def test_negative_gap_counts_only_right_behind_its_predecessor(engine):
    """Two cohorts on one device, a delay in front of the second kernel's *stream neighbour* lets the other in.

    Kernels A 10 | B 10, delay 0, shave 4 | C 10, delay 5. Cohort 0: A 0-10, B 10-16 (shaved), then C is ready
    at 21, so cohort 1 runs A 16-26; C 26-36; cohort 1's B starts at 36, not at 26: it keeps its 10 ns.

    Mutation that fails here: drop `previous_end == now` from the shave in `_choose`.
    """
    s = stream(0, [10, 10, 10], delay=[0, 0, 5], shave=[0, 4, 0])
    result = run(one_lane(s, depth=2), engine=engine, cohorts=2, timeline=True, check=True)
    kernels = [(x.cohort, x.index, x.start_ns, x.end_ns) for x in result.timeline][:5]
    assert kernels == [(0, 0, 0, 10), (0, 1, 10, 16), (1, 0, 16, 26), (0, 2, 26, 36), (1, 1, 36, 46)]


@pytest.mark.quick
@pytest.mark.parametrize("engine", ENGINES)
def test_a_wait_that_ends_at_the_same_moment_keeps_the_shave(engine):
    """B may start at 10, the moment its predecessor ends and its input arrives: shaved. One ns later: not."""
    for late, length in ((0, 6), (1, 10)):
        first = stream(0, [5], sends={0: (Send(0, 5, 0),)})
        second = stream(1, [10, 10], shave=[0, 4], waits={1: (0,)}, order=[1, 2])
        link = Channel("l", 0, 1, PER_NS, late)
        result = run(one_lane(first, second, channels=[link], tokens=1), engine=engine, cohorts=1, check=True)
        assert result.lanes[0].completion_ns[0] == 10 + late + length


@pytest.mark.quick
@pytest.mark.parametrize("engine", ENGINES)
def test_priority_before_age_and_no_preemption(engine):
    """A lane with priority 0 beats an older cohort of priority 1, but waits for the kernel that runs."""
    low = LaneProgram("low", 1, 1, (stream(0, [10, 10]),), 0, 1, priority=1)
    high = LaneProgram("high", 1, 1, (stream(0, [4], delay=[3]),), 0, 1, priority=0)
    result = run(Program(("g",), (), (low, high)), engine=engine, cohorts=2, timeline=True, check=True)
    kernels = [(s.lane, s.start_ns, s.end_ns) for s in result.timeline]
    # 0: only `low` is ready. At 10 `high` has been ready since 3. At 14 it has a delay until 17.
    assert kernels[:4] == [(0, 0, 10), (1, 10, 14), (0, 14, 24), (1, 24, 28)]


@pytest.mark.quick
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_ready_at_the_same_moment_competes(engine):
    """At 10 a kernel ends and an input arrives; the more urgent head gets the device, whichever came first.

    Lane 0 (older) has A 5 on g1, 5 bytes at 1 B/ns, then B 7 on g0. Lane 1 has two kernels of 10 ns on g0.

    Mutation that fails here: let `_kernel_ended` call `_close` without asking `peek`.
    """
    older = LaneProgram(
        "older", 1, 1,
        (stream(1, [5], sends={0: (Send(0, 5, 0),)}), stream(0, [7], waits={0: (0,)}, order=[1])), 1, 1,
    )  # fmt: skip
    other = LaneProgram("other", 1, 1, (stream(0, [10, 10]),), 0, 1)
    program = Program(("g0", "g1"), (Channel("1>0", 1, 0, PER_NS, 0),), (older, other))
    result = run(program, engine=engine, cohorts=1, timeline=True, check=True)
    on_g0 = [(s.lane, s.start_ns) for s in result.timeline if s.kind == "kernel" and s.resource == 0]
    assert on_g0[:3] == [(1, 0), (0, 10), (1, 17)]


@pytest.mark.quick
@pytest.mark.parametrize("engine", ENGINES)
def test_a_slot_waits_for_its_last_transfer(engine):
    """A 10 sends 100 B at 1 B/ns that nobody awaits: the cohort is complete at 10, its slot is free at 110.

    Latency is not part of it: the sender's buffer is free when the link has taken the last byte.

    Mutation that fails here: drop `transfers_left` from `_leave_if_idle`.
    """
    program = one_lane(
        stream(0, [10], sends={0: (Send(0, 100, 0),)}),
        channels=[Channel("l", 0, 1, PER_NS, 5)],
        tokens=1,
        devices=2,
    )
    result = run(program, engine=engine, cohorts=3, check=True)
    assert result.lanes[0].completion_ns == [10, 120, 230]
    assert result.lanes[0].entry_ns[:3] == [0, 110, 220]
    assert result.lanes[0].latencies_ns(window_only=False) == [10, 10, 10]


@pytest.mark.quick
@pytest.mark.parametrize("engine", ENGINES)
def test_cohorts_that_enter_together_are_ordered_by_slot(engine):
    """At 0 three cohorts enter; the first slot's is the oldest and goes first, and so on round the slots."""
    result = run(one_lane(stream(0, [10]), depth=3), engine=engine, cohorts=6, timeline=True, check=True)
    assert [s.slot for s in result.timeline[:6]] == [0, 1, 2, 0, 1, 2]
    assert result.lanes[0].cohorts[:6] == [0, 1, 2, 3, 4, 5]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("engine", "setup", "ends"), [(None, 0, [40, 50, 90, 100]), (0, 0, [40, 60, 80, 100]), (0, 2, [44, 68, 92, 116])]
)
def test_a_copy_engine_serves_cohorts_one_after_the_other(engine, setup, ends):
    """A 10 ns on g0, 5 ns over, B 10 ns on g1, 5 ns back, C 10 ns on g0; two cohorts in flight.

    With one engine for both directions the second cohort's first copy, ready at 20, waits for the first cohort's second
    one (25 to 30): 30, B 35, back 45 to 50, C 50 to 60. Without it goes at once.
    """
    first = stream(0, [10, 10], waits={1: (1,)}, sends={0: (Send(0, 5, 0),)}, order=[0, 2])
    second = stream(1, [10], waits={0: (0,)}, sends={0: (Send(1, 5, 1),)}, order=[1])
    channels = [Channel("0>1", 0, 1, PER_NS, 0, setup, engine), Channel("1>0", 1, 0, PER_NS, 0, setup, engine)]
    result = run(one_lane(first, second, depth=2, channels=channels, tokens=2), cohorts=4, check=True)
    assert result.lanes[0].completion_ns[:4] == ends


@pytest.mark.quick
def test_copies_are_carried_in_the_order_of_their_readers():
    """Both kernels of g0 send; g1 reads the second value first: the engine holds the first one back."""
    first = stream(0, [10, 10], sends={0: (Send(0, 5, 0),), 1: (Send(0, 5, 1),)})
    second = stream(1, [10, 10], waits={0: (1,), 1: (0,)}, order=[2, 3])
    channel = Channel("0>1", 0, 1, PER_NS, 0, 0, 3)
    result = run(one_lane(first, second, channels=[channel], tokens=2), cohorts=1, timeline=True, check=True)
    transfers = [(s.token, s.start_ns) for s in result.timeline if s.kind == "transfer" and not s.cohort]
    assert transfers == [(1, 20), (0, 25)] and result.lanes[0].completion_ns[0] == 45


@pytest.mark.quick
def test_the_fast_engine_refuses_copy_engines():
    channel = Channel("0>1", 0, 1, PER_NS, 0, 0, 0)
    program = one_lane(stream(0, [1]), channels=[channel])
    with pytest.raises(InputError, match="copy engines"):
        run(program, engine="fast")
    assert run(program).engine == "simpy"
