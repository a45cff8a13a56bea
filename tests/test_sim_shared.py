"""Shared devices: closed forms by hand, equality with serial devices where nothing co-runs, two second opinions."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shared_cases import lane, serial_of, shared, shared_programs, step_shared, stream, units
from test_sim_programs import goals_of, outcome

from tesserasim.errors import InputError
from tesserasim.sim.components import components
from tesserasim.sim.engine import run
from tesserasim.sim.fluid import Load, rates
from tesserasim.sim.sharing import ONE, Sharing, load_sharing, sharing_of


def ends(program, cohorts=1):
    """First completion times per lane, in ns; every run is checked."""
    result = run(program, cohorts=cohorts, check=True)
    return [x.completion_ns[:cohorts] for x in result.lanes]


def pair(a, b, **options):
    """Two kernels, each the whole of a lane, that start together; when each ends the first time."""
    found = ends(shared(lane("a", stream(0, [a])), lane("b", stream(options.pop("on", 0), [b])), **options))
    return [times[0] for times in found]


# By hand. Levels are floored, so a kernel whose rate is no multiple of 2^-20 may end 1 ns late. -----------


def late(found, exact):
    """Equal, or 1 ns later."""
    return all(0 <= a - b <= 1 for a, b in zip(found, exact, strict=True))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("a", "b", "first"),
    [
        # two kernels that fit beside each other take the time of one
        ((100, 0.5, 0.5), (100, 0.5, 0.5), (100, 100)),
        ((100, 0.25, 0.25), (100, 0.75, 0.75), (100, 100)),
        # two that want everything take twice as long
        ((100, 1, 0), (100, 1, 0), (200, 200)),
        ((100, 0.25, 1), (100, 0.25, 1), (200, 200)),
        # a is GEMM-like, b is memory-bound: each has its own bottleneck, together 5/4 of the SMs
        ((100, 1, 0.25), (100, 0.25, 0.75), (125, 125)),
        # DRAM: 3/4 + 3/4, so both at 2/3
        ((100, 0.25, 0.75), (100, 0.25, 0.75), (150, 150)),
        # b uses no DRAM: a and b share SMs only, 1/2 + 3/4 at rate 4/5
        ((100, 0.5, 1), (100, 0.75, 0), (125, 125)),
    ],
)
def test_two_kernels_side_by_side(a, b, first):
    """Rates are equal while both run; both have the same length, so they end together.

    Mutation that fails here: leave DRAM out of `rates`, or let a level be ONE // kernels.
    """
    assert late(pair(a, b), first)


@pytest.mark.quick
def test_the_rest_of_the_longer_runs_alone():
    """100 and 300 ns, both at 1/2: the first ends at 200; of the other 200 ns are left, alone."""
    assert ends(shared(lane("a", stream(0, [(100, 1, 0)])), lane("b", stream(0, [(300, 1, 0), (1, 1, 0)]))))[0] == [200]
    result = run(shared(lane("a", stream(0, [(100, 1, 0)], delay=[0])), lane("b", stream(0, [(300, 1, 0)]))), cohorts=1)
    # a's next cohort enters at 200 and shares until b ends: b has 300 - 100 = 200 left at 200, at 1/2: 600
    assert result.lanes[1].completion_ns[0] == 600


@pytest.mark.quick
def test_arrival_in_the_middle():
    """b comes at 40, when a (100 ns) has 60 left: both at 1/2. a ends at 160, b then has 40 of 100 left: 200."""
    a = lane("a", stream(0, [(100, 1, 0), (1000, units(0) + 1 / ONE, 0)]))
    program = shared(a, lane("b", stream(0, [(100, 1, 0)], delay=[40])))
    result = run(program, cohorts=1, check=True, timeline=True)
    first = {(s.lane, s.index): (s.start_ns, s.end_ns) for s in result.timeline if s.cohort == 0}
    assert first[0, 0] == (0, 160)
    assert first[1, 0][0] == 40
    assert first[1, 0][1] in (200, 201)  # a's next kernel takes 2^-20 of the SMs beside it


@pytest.mark.quick
def test_unequal_demands_are_slowed_alike():
    """1 + 1/4 of the SMs: both at 4/5. The small one (80 ns) ends at 100; the large one has 20 of 100 left: 120.

    Mutation that fails here: equal *shares* of SMs (1/4 and 3/4) instead of equal rates.
    """
    tail = (4000, 1 / ONE, 0)  # keeps a's next cohort from coming in
    program = shared(lane("a", stream(0, [(80, 0.25, 0), tail])), lane("b", stream(0, [(100, 1, 0)])))
    result = run(program, cohorts=1, check=True, timeline=True)
    first = {(s.lane, s.index): s.end_ns for s in result.timeline if s.cohort == 0}
    assert late((first[0, 0], first[1, 0]), (100, 120))


@pytest.mark.quick
def test_who_is_stopped_leaves_the_rest_to_others():
    """a and b share DRAM (1/2 each), c needs SMs only and takes what they leave: 1 - 2 * 1/2 * 1/4 = 3/4 >= 1/2."""
    a, b = (lane(n, stream(0, [(100, 0.25, 1)])) for n in "ab")
    assert ends(shared(a, b, lane("c", stream(0, [(100, 0.5, 0)])))) == [[200], [200], [100]]


@pytest.mark.quick
def test_three_kernels_round_up():
    """Thirds are floored to 349525 / 2^20, so 10 ns of work take 31 ns, not 30."""
    three = [lane(n, stream(0, [(10, 1, 0)])) for n in "abc"]
    assert ends(shared(*three)) == [[31], [31], [31]]


@pytest.mark.quick
def test_two_devices_on_one_dram():
    """Partitions of one GPU: SMs apart, DRAM together. 3/4 + 1/2 of it: both at 4/5; 1/2 + 1/2 do not meet.

    Mutation that fails here: let `domain` return the device.
    """
    a, b, c = (100, 1, 0.75), (100, 1, 0.5), (100, 1, 1)
    assert late(pair(a, b, on=1, devices=2, domains=(0, 0)), [125, 125])
    assert pair(a, b, on=1, devices=2) == [100, 100]
    assert pair(b, b, on=1, devices=2, domains=(0, 0)) == [100, 100]
    assert pair(c, c, on=1, devices=2, domains=(5, 5)) == [200, 200]


@pytest.mark.quick
def test_urgent_kernels_get_their_multiprocessors_first():
    """a wants 3/4 of the SMs and gets them; b gets 1/4 of the 1/2 it wants: rate 1/2 until a's end.

    a repeats every 100 ns, so b takes 200. In one class both would run at 4/5.
    """
    def lanes(p):
        return lane("a", stream(0, [(100, 0.75, 0)])), lane("b", stream(0, [(100, 0.5, 0)]), priority=p)

    assert ends(shared(*lanes(1))) == [[100], [200]]
    assert late([x[0] for x in ends(shared(*lanes(0)))], [125, 125])


@pytest.mark.quick
def test_without_multiprocessors_a_kernel_waits():
    """a leaves b nothing for 100 ns out of 150; b's 100 ns are done in two pauses: 50 by 150, 50 by 300."""
    a = lane("a", stream(0, [(100, 1, 0)], delay=[50]))
    result = run(shared(a, lane("b", stream(0, [(100, 0.5, 0)]), priority=1)), cohorts=1, check=True)
    assert result.lanes[1].completion_ns[0] == 200  # a runs 50-150 and 200-300
    assert result.devices[0].busy_ns == result.end_ns


@pytest.mark.quick
def test_a_dram_knows_no_priorities():
    """Both want all of the DRAM and fit beside each other on the SMs: the urgent one is slowed as much."""
    a = lane("a", stream(0, [(100, 0.5, 1)]))
    assert ends(shared(a, lane("b", stream(0, [(100, 0.5, 1)]), priority=1))) == [[200], [200]]


@pytest.mark.quick
def test_constants():
    """Each constant stretches what its mechanism touches, and nothing else; alone nothing is stretched."""
    full, half, reading = (100, 1, 0), (100, 0.5, 0), (100, 0.25, 1)
    lossy = Sharing(ONE // 2, ONE // 4, ONE)
    assert pair(full, full, sharing=lossy) == [400, 400]
    assert pair(reading, reading, sharing=lossy) == [800, 800]
    assert pair(half, half, sharing=Sharing(corun_rate=ONE // 4)) == [400, 400]
    assert ends(shared(lane("a", stream(0, [full, reading])), sharing=Sharing(1, 1, 1))) == [[200]]


# Against other simulators ---------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(shared_programs(one_lane=True), st.sampled_from([None, 1, 3]))
def test_alone_on_its_devices_a_cohort_runs_as_on_serial_ones(program, cohorts):
    """One cohort in flight, every device with a DRAM of its own: every field is equal, slices included.

    Mutation that fails here: subtract the shave from the wrong side of `_begin`, or divide rem by rate + 1.
    """
    program = dataclasses.replace(program, domains=())
    a = run(program, cohorts=cohorts, timeline=True)
    b = run(serial_of(program), engine="simpy", cohorts=cohorts, timeline=True)
    b.rates = a.rates
    assert a == b


@settings(max_examples=120, deadline=None)
@given(shared_programs(max_kernels=5), st.sampled_from([None, 1, 3]))
def test_stepping_through_time_agrees(program, cohorts):
    """The engine and a simulator that does the work of every nanosecond apart: equal completions and busy times.

    Mutation that fails here: in `_share` forget the work done before the change, or in `rates` the third step.
    """
    result = outcome(program, cohorts=cohorts)
    assume(not isinstance(result, str) and result.end_ns < 6000)
    for lanes in components(program):
        done, busy = step_shared(program, lanes, goals_of(result))
        for i in lanes:
            assert result.lanes[i].completion_ns == done[i]
        for d in {s.device for i in lanes for s in program.lanes[i].streams if s.duration}:
            assert result.devices[d].busy_ns == busy.get(d, 0)


@pytest.mark.quick
@settings(max_examples=120, deadline=None)
@given(shared_programs())
def test_invariants_hold(program):
    """Every invariant of docs/semantics.md, from slices and rates."""
    outcome(program, check=True)


share = st.integers(ONE // 16, ONE)
loads = st.lists(
    st.builds(Load, st.integers(0, 1), st.integers(0, 2), share, st.one_of(st.just(0), share)),
    min_size=1, max_size=7,
)  # fmt: skip


def exact_max_min(kernels):
    """Max-min fair rates as fractions: raise all, stop whoever meets an exhausted resource, go on."""
    rate = [Fraction(0)] * len(kernels)
    active = set(range(len(kernels)))
    resources = [
        (k.device, {j: x.sm for j, x in enumerate(kernels) if x.device == k.device}) for k in kernels
    ] + [("dram", {j: x.dram for j, x in enumerate(kernels) if x.dram})]
    while active:
        level = Fraction(ONE)
        for _, uses in resources:
            rising = sum(d for j, d in uses.items() if j in active)
            if rising:
                fixed = sum(rate[j] * d for j, d in uses.items() if j not in active)
                level = min(level, Fraction(ONE * ONE - fixed) / rising)
        for j in active:
            rate[j] = level
        full = [uses for _, uses in resources if sum(rate[j] * d for j, d in uses.items()) == ONE * ONE]
        stopped = {j for j in active if level == ONE or any(j in uses for uses in full)}
        active -= stopped
    return rate


@pytest.mark.quick
@settings(max_examples=400, deadline=None)
@given(loads)
def test_rates_are_max_min_fair(kernels):
    """With one class, rates are those of progressive filling in exact fractions, to the rounding of levels.

    Mutation that fails here: in `_fill_dram` do not take off the demand of kernels below the level.
    """
    kernels = [x._replace(rank=0) for x in kernels]
    found, exact = rates(kernels, Sharing()), exact_max_min(kernels)
    # What flooring leaves of one resource moves others in units; who demands very little of it moves further.
    floor = min(x for k in kernels for x in (k.sm, k.dram) if x)
    slack = 4 + 4 * Fraction(sum(k.sm + k.dram for k in kernels), floor)
    assert all(abs(a - b) <= slack for a, b in zip(found, exact, strict=True))


@pytest.mark.quick
@settings(max_examples=200, deadline=None)
@given(loads, st.randoms())
def test_rates_do_not_depend_on_the_order(kernels, random):
    order = list(range(len(kernels)))
    random.shuffle(order)
    found = rates(kernels, Sharing(900_000, 800_000, 1_000_000))
    assert rates([kernels[k] for k in order], Sharing(900_000, 800_000, 1_000_000)) == [found[k] for k in order]


# What is refused ------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.lanes[0].streams[0].sm.__setitem__(0, 0), "demands must lie"),
        (lambda p: p.lanes[0].streams[0].dram.__setitem__(0, ONE + 1), "demands must lie"),
        (lambda p: p.lanes[0].streams[0].sm.clear(), "need demands"),
        (lambda p: setattr(p, "device_model", "fluid"), "unknown device model"),
        (lambda p: setattr(p, "domains", (0, 1)), "DRAM of every device"),
    ],
)
def test_programs_that_make_no_sense_are_refused(change, message):
    program = shared(lane("a", stream(0, [(5, 1, 1)])))
    change(program)
    with pytest.raises(InputError, match=message):
        run(program)


@pytest.mark.quick
def test_the_fast_engine_says_that_it_cannot():
    program = shared(lane("a", stream(0, [(5, 1, 1)])))
    assert run(program).engine == "simpy"
    with pytest.raises(InputError, match="'fast' runs serial devices only"):
        run(program, engine="fast")


@pytest.mark.quick
def test_the_shipped_constants_say_where_they_come_from():
    import json
    from importlib import resources

    content = json.loads(resources.files("tesserasim.sim").joinpath("sharing.json").read_text())
    assert load_sharing() == sharing_of(content)
    assert all(entry["source"] for entry in content.values())
    with pytest.raises(InputError, match="corun_rate"):
        sharing_of({**content, "corun_rate": {"value": 0}})
