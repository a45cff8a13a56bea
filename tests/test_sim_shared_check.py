"""Every invariant of shared devices notices a run that breaks it. The runs are spoiled by hand."""

from __future__ import annotations

import dataclasses

import pytest
from shared_cases import lane, shared, stream

from tesserasim.sim.engine import run
from tesserasim.sim.invariants import InvariantError
from tesserasim.sim.shared_check import _SharedCheck, check_shared_run
from tesserasim.sim.sharing import ONE, Sharing

pytestmark = pytest.mark.quick


def program(**options):
    """Two streams of unequal kernels on one device; they share its SMs (3/4 + 1/2) and its DRAM."""
    a = stream(0, [(100, 0.75, 0.25), (70, 0.75, 0.5)], delay=[0, 5])
    b = stream(0, [(90, 0.5, 0.75), (60, 0.5, 0.25)])
    return shared(lane("a", a), lane("b", b), **options)


def spoil(result, pick, **changes):
    at = next(i for i, s in enumerate(result.timeline) if pick(s))
    result.timeline[at] = dataclasses.replace(result.timeline[at], **changes)


def faster(result, by):
    """All rates by this factor, from some moment on for all kernels alike."""
    result.rates[:] = [x._replace(rate=int(x.rate * by)) for x in result.rates]


def second(s):
    return s.cohort == 1


def late_head(result):
    """The second kernel of a cohort, moved behind the moment in which it was ready."""
    at = next(i for i, s in enumerate(result.timeline) if s.cohort == 0 and s.index == 1)
    s = result.timeline[at]
    result.timeline[at] = dataclasses.replace(s, start_ns=s.start_ns + 1)


SPOILED = {
    "lasts: a kernel that ends early": (3, "streams_in_order", lambda r: spoil(r, second, end_ns=0)),
    "lasts: rates that do less than the work": (3, "streams_in_order", lambda r: faster(r, 0.99)),
    "lasts: rates that do more than the work": (3, "streams_in_order", lambda r: faster(r, 1.2)),
    "lasts: a rate that was never logged": (3, "streams_in_order", lambda r: r.rates.pop(0)),
    "shares: more than there is": (4, "one_at_a_time", lambda r: faster(r, 1.2)),
    "shares: less than there is": (4, "one_at_a_time", lambda r: faster(r, 0.5)),
    "heads: one that waits": (7, "no_idle_device", late_head),
    "busy: the sum in place of the union": (
        8, "accounts", lambda r: setattr(r.devices[0], "busy_ns", r.devices[0].busy_ns + 90)
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_run_is_noticed(what):
    """Mutation that fails here: let any of the named methods of `_SharedCheck` return at once."""
    number, method, change = SPOILED[what]
    result = run(program(), cohorts=4, timeline=True)
    check_shared_run(program(), result)
    change(result)
    with pytest.raises(InvariantError, match=f"invariant {number}:"):
        getattr(_SharedCheck(program(), result, [0, 1]), method)()
    with pytest.raises(InvariantError):
        check_shared_run(program(), result)


def test_another_division_is_noticed():
    """A run under other rules, held against these: unequal rates in one class; priorities that do not count."""
    urgent = dataclasses.replace(program(), lanes=tuple(
        dataclasses.replace(x, priority=p) for p, x in enumerate(program().lanes)
    ))  # fmt: skip
    by_class = run(urgent, cohorts=4, timeline=True)
    check_shared_run(urgent, by_class)
    with pytest.raises(InvariantError, match=r"invariant 4: .* slower"):
        check_shared_run(program(), by_class)
    with pytest.raises(InvariantError, match=r"invariant 4: .* idle SMs"):
        check_shared_run(urgent, run(program(), cohorts=4, timeline=True))


def test_losses_are_held_to_the_constants():
    lossy = program(sharing=Sharing(corun_rate=ONE // 2))
    with pytest.raises(InvariantError, match=r"invariant 4: .* above"):
        check_shared_run(lossy, run(program(), cohorts=4, timeline=True))
    with pytest.raises(InvariantError, match="invariant 4: "):
        check_shared_run(program(), run(lossy, cohorts=4, timeline=True))


def test_a_dram_is_not_exceeded():
    reading = stream(0, [(100, 0.25, 1)]), stream(1, [(100, 0.25, 1)])
    apart = shared(lane("a", reading[0]), lane("b", reading[1]), devices=2)
    together = dataclasses.replace(apart, domains=(0, 0))
    free = run(apart, cohorts=4, timeline=True)
    with pytest.raises(InvariantError, match="invariant 4: DRAM exceeded"):
        check_shared_run(together, free)
