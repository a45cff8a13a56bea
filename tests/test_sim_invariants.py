"""Every invariant notices a run that breaks it. The runs are spoiled by hand; the engines make none like them."""

from __future__ import annotations

import dataclasses

import pytest
from test_golden import one_lane, stream, two_stage

from tesserasim.sim.engine import run
from tesserasim.sim.invariants import InvariantError, _Check, check_run
from tesserasim.sim.program import LaneProgram, Program

pytestmark = pytest.mark.quick


def spoil(result, pick, **changes):
    """Replace the first slice that `pick` takes."""
    at = next(i for i, s in enumerate(result.timeline) if pick(s))
    result.timeline[at] = dataclasses.replace(result.timeline[at], **changes)


def kernel(s):
    return s.kind == "kernel" and s.cohort == 1


def second_kernel(s):
    return kernel(s) and s.device == 1


def transfer(s):
    return s.kind == "transfer" and s.cohort == 1


def last_transfer(result):
    return max((s for s in result.timeline if s.kind == "transfer"), key=lambda s: s.start_ns)


SPOILED = {
    "1: a kernel that ends before it starts": (1, lambda r: spoil(r, kernel, end_ns=0)),
    "1: something starts after the end": (1, lambda r: spoil(r, transfer, start_ns=10**9, end_ns=10**9)),
    "2: a cohort leaves twice": (2, lambda r: r.lanes[0].cohorts.__setitem__(1, 0)),
    "2: a cohort leaves early": (2, lambda r: r.lanes[0].completion_ns.__setitem__(0, 44)),
    "3: a kernel starts before its input": (3, lambda r: spoil(r, second_kernel, start_ns=34, end_ns=54)),
    "3: a kernel is too short": (3, lambda r: spoil(r, kernel, end_ns=19)),
    "4: two kernels at once": (4, lambda r: spoil(r, second_kernel, start_ns=44, end_ns=64)),
    "5: wrong number of bytes": (5, lambda r: spoil(r, transfer, nbytes=99)),
    "5: faster than the link": (5, lambda r: spoil(r, transfer, end_ns=29)),
    "5: arrives without latency": (5, lambda r: spoil(r, transfer, arrival_ns=30)),
    "6: a cohort enters late": (6, lambda r: r.lanes[0].entry_ns.__setitem__(2, 50)),
    "8: busy time made up": (8, lambda r: setattr(r.devices[0], "busy_ns", r.devices[0].busy_ns + 1)),
    "8: window made up": (8, lambda r: setattr(r.devices[1], "window_busy_ns", 3)),
    "8: bytes made up": (8, lambda r: setattr(r.channels[0], "nbytes", 1)),
    "8: kernels made up": (8, lambda r: setattr(r.devices[0], "kernels", 1)),
}


METHODS = {
    1: "clock", 2: "cohorts_leave_once", 3: "streams_in_order", 4: "one_at_a_time", 5: "transfers_match",
    6: "slots", 7: "no_idle_device", 8: "accounts",
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_run_is_noticed(what):
    """Mutation that fails here: make any of the methods that `_Check.all` calls return at once, or drop it."""
    number, change = SPOILED[what]
    program = two_stage(2, 10, 100, 10, 5, 20)
    result = run(program, engine="simpy", cohorts=6, timeline=True)
    check_run(program, result)
    change(result)
    result.timeline.sort()
    with pytest.raises(InvariantError, match=f"invariant {number}:"):
        getattr(_Check(program, result, [0]), METHODS[number])()
    with pytest.raises(InvariantError):
        check_run(program, result)


def test_a_check_asks_for_every_invariant(monkeypatch):
    asked = []
    for name in METHODS.values():
        monkeypatch.setattr(_Check, name, lambda self, name=name: asked.append(name))
    run(two_stage(1, 1, 1, 1, 1, 1), check=True)
    assert asked == list(METHODS.values())


def test_an_idle_device_and_a_wrong_choice_are_noticed():
    """Invariant 7 on whole runs of another program: one with a delay that the checked program does not have,
    one with priorities the other way round."""
    lazy = run(one_lane(stream(0, [10, 10], delay=[0, 3])), cohorts=3, timeline=True)
    with pytest.raises(InvariantError, match=r"invariant 7: .* something was ready at 10"):
        check_run(one_lane(stream(0, [10, 10])), lazy)
    programs = [
        Program(("g",), (), tuple(
            LaneProgram(f"l{i}", 1, 1, (stream(0, [9], delay=[9]),), 0, 1, p) for i, p in enumerate(order)
        ))
        for order in ((0, 1), (1, 0))
    ]  # fmt: skip
    first = run(programs[0], cohorts=3, timeline=True)
    check_run(programs[0], first)
    with pytest.raises(InvariantError, match=r"invariant 7: .* passed over"):
        check_run(programs[1], first)
