"""Random programs, and a second opinion: a simulator that steps through time one nanosecond at a time.

The stepping simulator shares no code and no idea with the engines: it keeps plain dictionaries, asks at every
nanosecond what has ended and who may start, and follows docs/semantics.md.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tesserasim.sim.components import components
from tesserasim.sim.engine import run
from tesserasim.sim.program import Channel, LaneProgram, Program, Send, StreamProgram
from tesserasim.sim.result import SimResult, StarvedError


@st.composite
def lane_programs(draw, index, devices, channels, max_kernels):
    """A cohort of kernels on random devices; later kernels wait for earlier ones of other devices."""
    small = st.integers(0, 4)
    place = draw(st.lists(st.integers(0, devices - 1), min_size=1, max_size=max_kernels))
    streams = [StreamProgram(d) for d in range(devices)]
    where = []
    tokens = 0
    for position, d in enumerate(place):
        s = streams[d]
        where.append((d, len(s.duration)))
        duration = draw(st.integers(1, 8))
        delay = draw(st.sampled_from([0, 0, 0, 1, 2, 5]))
        shave = draw(st.integers(0, duration - 1)) if delay == 0 and s.duration else 0
        waits = []
        for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2])) if position else 0):
            source, i = where[draw(st.integers(0, position - 1))]
            if source != d:
                send = Send(channels[source, d], draw(st.integers(0, 30)), tokens)
                streams[source].sends[i] = (*(streams[source].sends[i] or ()), send)
                waits.append(tokens)
                tokens += 1
        for values, value in (
            (s.duration, duration), (s.delay, delay), (s.shave, shave), (s.order, position),
            (s.waits, tuple(waits) or None), (s.sends, None),
        ):  # fmt: skip
            values.append(value)
    if devices > 1 and draw(small) == 0:  # something sent that nobody waits for
        d, i = where[-1]
        send = Send(channels[d, (d + 1) % devices], draw(st.integers(0, 30)), tokens)
        streams[d].sends[i] = (*(streams[d].sends[i] or ()), send)
        tokens += 1
    for s in streams:
        s.labels = [f"{index}.{p}" for p in s.order]
    kept = tuple(draw(st.permutations([s for s in streams if s.duration or draw(small)])))
    units, priority = draw(st.sampled_from([1, 100])), draw(st.integers(-1, 1))
    depth, batch = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    stagger = draw(st.sampled_from([0, 0, 1, 7, 40]))
    return LaneProgram(f"lane{index}", batch, depth, kept, tokens, units, priority, stagger)


@st.composite
def programs(draw, max_kernels=12, engines=False):
    """Up to three devices, a channel for every ordered pair, up to three lanes; with copy engines if asked for."""
    devices = draw(st.integers(2 if engines else 1, 3))
    pairs = [(a, b) for a in range(devices) for b in range(devices) if a != b]
    channels = tuple(
        Channel(
            f"{a}>{b}", a, b, draw(st.integers(1, 4)) * 10**9, draw(st.sampled_from([0, 0, 1, 3, 6])),
            draw(st.sampled_from([0, 0, 2])), draw(st.sampled_from([None, 0, 0, 1])) if engines else None,
        )
        for a, b in pairs
    )  # fmt: skip
    index = {pair: k for k, pair in enumerate(pairs)}
    lanes = tuple(
        draw(lane_programs(i, devices, index, max_kernels)) for i in range(draw(st.integers(1, 3)))
    )
    return Program(tuple(f"g{d}" for d in range(devices)), channels, lanes)


def by_reader(program, lane, engine):
    """Tokens that a copy engine carries, by first reader, then by producer; unread ones last."""
    sent = [
        (p, x.token) for s in lane.streams for p, sends in zip(s.order, s.sends, strict=True) for x in sends or ()
        if program.channels[x.channel].engine == engine
    ]  # fmt: skip
    reads = [(p, t) for s in lane.streams for p, waits in zip(s.order, s.waits, strict=True) for t in waits or ()]
    return [t for *_, t in sorted((min([p for p, r in reads if r == t], default=10**9), at, t) for at, t in sent)]


def step_through(program, lanes, goals):
    """Completion times per lane until every lane has its goal, and busy ns per device: naive on purpose."""
    done, entered, busy = {i: [] for i in lanes}, 0, {}
    live, arrivals, queues = [], [], {k: [] for k in range(len(program.channels))}
    engines = {c.engine: ([], {}) for c in program.channels if c.engine is not None}  # due in order; what is there
    running, carrying = {}, {}
    slots = [(i, slot) for i in lanes for slot in range(program.lanes[i].depth)]
    free = []
    t = 0
    while True:
        changed = True
        while changed:  # everything that ends at t; transfers of no length end at the moment they start
            changed = False
            for k in list(carrying):
                if carrying[k][0] == t:
                    _, cohort, send = carrying.pop(k)
                    cohort["sending"] -= 1
                    arrivals.append((t + program.channels[k].latency_ns, cohort, send.token))
                    changed = True
            for d in list(running):
                if running[d][0] == t:
                    _, cohort, s = running.pop(d)
                    for send in s.sends[cohort["at"][d]] or ():
                        cohort["sending"] += 1
                        if program.channels[send.channel].engine is None:
                            queues[send.channel].append((cohort, send))
                        else:
                            there = engines[program.channels[send.channel].engine][1]
                            there[cohort["rank"], send.token] = (cohort, send)
                    cohort["at"][d] += 1
                    cohort["end"][d] = t
                    if all(cohort["at"][x.device] == len(x.duration) for x in cohort["streams"]):
                        done[cohort["lane"]].append(t)
                    changed = True
            for engine, (due, there) in engines.items():
                if due and due[0] in there and all(program.channels[k].engine != engine for k in carrying):
                    queues[there[due[0]][1].channel].append(there.pop(due.pop(0)))
                    break
            for k, queue in queues.items():
                if queue and k not in carrying:
                    cohort, send = queue.pop(0)
                    c = program.channels[k]
                    carrying[k] = (t + c.setup_ns + -(-send.nbytes * 10**9 // c.bytes_per_s), cohort, send)
                    changed = True
        for a in [a for a in arrivals if a[0] == t]:
            a[1]["arrived"].add(a[2])
        arrivals = [a for a in arrivals if a[0] > t]
        if all(len(done[i]) >= goals[i] for i in lanes):
            for d in running:
                busy[d] -= running[d][0] - t
            return done, busy
        for cohort in list(live):
            if not cohort["sending"] and all(
                cohort["at"][x.device] == len(x.duration) for x in cohort["streams"]
            ):
                live.remove(cohort)
                free.append((cohort["lane"], cohort["slot"]))
        free += [(i, slot) for i, slot in slots if slot * program.lanes[i].stagger_ns == t]
        slots = [(i, slot) for i, slot in slots if slot * program.lanes[i].stagger_ns > t]
        for i, slot in sorted(free):
            at = {s.device: 0 for s in program.lanes[i].streams}
            live.append(
                {"lane": i, "slot": slot, "rank": entered, "streams": program.lanes[i].streams, "at": at,
                 "end": dict.fromkeys(at, t), "sending": 0, "arrived": set()}
            )  # fmt: skip
            for engine, (due, _) in engines.items():
                due += [(entered, token) for token in by_reader(program, program.lanes[i], engine)]
            entered += 1
        free = []
        for d in range(len(program.devices)):
            if d in running:
                continue
            ready = []
            for cohort in live:
                for s in cohort["streams"]:
                    i = cohort["at"][s.device]
                    if s.device != d or i == len(s.duration) or cohort["end"][d] + s.delay[i] > t:
                        continue
                    if set(s.waits[i] or ()) <= cohort["arrived"]:
                        ready.append((program.lanes[cohort["lane"]].priority, cohort["rank"], cohort, s, i))
            if ready:
                _, _, cohort, s, i = min(ready, key=lambda r: r[:2])
                length = s.duration[i] - (s.shave[i] if i and cohort["end"][d] == t else 0)
                running[d] = (t + length, cohort, s)
                busy[d] = busy.get(d, 0) + length
        t += 1


def outcome(program, **options):
    """The result, or the message of the error that a starved lane gives."""
    try:
        return run(program, **options)
    except StarvedError as error:
        return str(error)


def goals_of(result):
    return {i: lane.warmup + lane.window for i, lane in enumerate(result.lanes)}


@settings(max_examples=120, deadline=None)
@given(programs(max_kernels=6), st.sampled_from([None, 1, 3]))
def test_stepping_through_time_agrees(program, cohorts):
    """The reference and a simulator that shares nothing with it give the same completions and busy times.

    Mutation that fails here: let `_kernel_ended` call `_close` without asking `peek` (starts before ends).
    """
    result = outcome(program, engine="simpy", cohorts=cohorts)
    assume(not isinstance(result, str))
    for lanes in components(program):
        done, busy = step_through(program, lanes, goals_of(result))
        for i in lanes:
            assert result.lanes[i].completion_ns == done[i]
        for d in {s.device for i in lanes for s in program.lanes[i].streams if s.duration}:
            assert result.devices[d].busy_ns == busy.get(d, 0)


@settings(max_examples=150, deadline=None)
@given(programs(max_kernels=6, engines=True), st.sampled_from([None, 1, 3]))
def test_stepping_through_time_agrees_on_copy_engines(program, cohorts):
    """As above where engines carry copies in the order of their readers, and every invariant holds.

    Mutation that fails here: let `_carry` take any transfer that waits.
    """
    result = outcome(program, cohorts=cohorts, check=True)
    assume(not isinstance(result, str))
    assert result.engine == "simpy"
    for lanes in components(program):
        done, _ = step_through(program, lanes, goals_of(result))
        for i in lanes:
            assert result.lanes[i].completion_ns == done[i]


@settings(max_examples=400, deadline=None)
@given(programs(), st.sampled_from([None, 1, 2, 5]))
def test_fast_engine_is_equal(program, cohorts):
    """Every field of the result is equal, slices included.

    Mutation that fails here: make `earliest_end` 1 ns later than it may be, or drop `between` from `run_two`.
    """
    reference = outcome(program, engine="simpy", cohorts=cohorts, timeline=True)
    fast = outcome(program, engine="fast", cohorts=cohorts, timeline=True)
    if isinstance(fast, SimResult):
        fast.engine = "simpy"
    assert fast == reference


@pytest.mark.quick
@settings(max_examples=60, deadline=None)
@given(programs(), st.sampled_from(["simpy", "fast"]))
def test_invariants_hold(program, engine):
    """Every invariant, verified from the slices."""
    outcome(program, engine=engine, check=True)
