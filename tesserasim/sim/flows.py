"""Streams of cohorts in the fast engine, and how to run one or two of them until somebody else has a say."""

from __future__ import annotations

import numpy as np

from tesserasim.sim.compiled import Code, CompiledLane, Outgoing

NEVER = 1 << 62  # later than every time


class Cohort:
    """A cohort on its way, or done: its streams by device, and when its tokens arrive (-1: not decided)."""

    __slots__ = ("arrival", "entry", "flows", "lane", "last_end", "left", "slot", "transfers_end")

    def __init__(self, lane: CompiledLane, slot: int, entry: int, devices: int) -> None:
        self.lane, self.slot, self.entry = lane, slot, entry
        self.arrival = [-1] * lane.tokens
        self.flows: list[Flow | None] = [None] * devices
        self.left = len(lane.used)
        self.last_end = 0  # of the kernels started
        self.transfers_end = 0


class Flow:
    """A cohort's stream on one device. `ready` is when its head is ready or, if not `known`, a lower bound.

    It is not known while it hangs on a decision of another device. Bounds only grow: an old one stays true.
    """

    __slots__ = (
        "at", "base", "code", "cohort", "device", "done", "key", "known", "limit", "nth", "parts",
        "previous_end", "ready", "starts", "waits",
    )  # fmt: skip

    def __init__(self, cohort: Cohort, code: Code, device: Device) -> None:
        self.cohort, self.code, self.device = cohort, code, device
        # Urgency: lane priority, then age; lane and slot order those that enter together.
        self.key = (cohort.lane.rank, cohort.entry, cohort.lane.index, cohort.slot)
        self.at = 0  # the head
        self.nth = 0  # the next special kernel is number nth, at index limit
        self.limit = code.special[0]
        self.ready = self.base = cohort.entry + code.delay[0]
        self.waits = code.program.waits[0]  # of the head, if `known` is false; `base` is ready but for them
        self.known = not self.waits
        self.previous_end = -1
        self.done = False  # ran to its end; stays on the device in the place of its slot's next cohort
        self.starts: list[int] = []
        self.parts: list[np.ndarray] = []  # earlier starts


class Device:
    """A clock (time of the next decision) and the flows in order of urgency."""

    __slots__ = ("clock", "flows", "index", "past")

    def __init__(self, index: int) -> None:
        self.index = index
        self.clock = 0
        self.flows: list[Flow] = []
        self.past: list[Flow] = []


class Link:
    """When the last transfer ends, and all transfers so far."""

    __slots__ = ("ends", "free", "log", "sent")

    def __init__(self) -> None:
        self.free = 0
        self.ends: list[int] = []
        self.sent: list[Outgoing] = []
        self.log: list[tuple[Flow, int]] = []  # producing flow and kernel; for timelines


def earliest_end(flow: Flow, index: int) -> int:
    """The least time at which a kernel that has not started can end."""
    start = flow.device.clock
    if flow.ready > start:
        start = flow.ready
    earliest = flow.code.earliest
    return start + earliest[index + 1] - earliest[flow.at] - flow.code.delay[flow.at]


def resolve(flow: Flow) -> None:
    """When the head is ready, if every token it waits for has been sent."""
    arrival = flow.cohort.arrival
    ready = flow.base
    for token in flow.waits or ():
        at = arrival[token]
        if at < 0:
            flow.known = False
            return
        if at > ready:
            ready = at
    flow.ready = ready
    flow.known = True


def run_alone(flow: Flow, t: int, quiet: int) -> int:
    """Run a flow from t by prefix sums, up to its next special kernel, while kernels start before `quiet`."""
    i = flow.at
    code = flow.code
    end = t + code.duration[i]
    if code.shave[i] and flow.previous_end == t:
        end -= code.shave[i]
        t = ~t
    flow.starts.append(t)
    i += 1
    flow.parts.append(np.array(flow.starts, dtype=np.int64))
    flow.starts.clear()
    offset = code.offset
    shift = end + code.delay[i] - int(offset[i])
    m = i + int(np.searchsorted(offset[i : flow.limit], quiet - shift))
    part = offset[i:m] + shift
    if code.shaved is not None:
        part = np.where(code.shaved[i:m], ~part, part)
    flow.parts.append(part)
    flow.at = m
    flow.ready = int(offset[m]) + shift
    flow.previous_end = flow.ready - code.delay[m]
    return flow.previous_end


def run_one(flow: Flow, t: int, until: int, idle_until: int) -> int:
    """Run one flow from t up to its next special kernel; stop at `until`, and in a gap at `idle_until`."""
    code = flow.code
    duration, delay, shave = code.duration, code.delay, code.shave
    i, limit, ready, previous_end = flow.at, flow.limit, flow.ready, flow.previous_end
    add = flow.starts.append
    while i < limit:
        if ready > t:
            if ready >= idle_until or ready >= until:
                break
            t = ready
        if shave[i] and previous_end == t:
            add(~t)
            t -= shave[i]
        else:
            add(t)
        t += duration[i]
        i += 1
        previous_end = t
        ready = t + delay[i]
        if t >= until:
            break
    flow.at, flow.previous_end = i, previous_end
    flow.ready = ready
    return t


def run_two(a: Flow, b: Flow, t: int, above: int, between: int, below: int) -> int:
    """Alternate between two flows from t, `a` being the more urgent, until a third may have a say.

    `above`: stop when the clock reaches it; `between`: b may not start from then on; `below`: if neither
    is ready, do not wait until then. Stops at special kernels. One of the two is ready at t and may start.
    """
    a_duration, a_delay, a_shave = a.code.duration, a.code.delay, a.code.shave
    b_duration, b_delay, b_shave = b.code.duration, b.code.delay, b.code.shave
    i, i_limit, i_ready, i_end = a.at, a.limit, a.ready, a.previous_end
    j, j_limit, j_ready, j_end = b.at, b.limit, b.ready, b.previous_end
    i_add, j_add = a.starts.append, b.starts.append
    while True:
        if i_ready <= t:
            if i == i_limit:
                break
            if a_shave[i] and i_end == t:
                i_add(~t)
                t -= a_shave[i]
            else:
                i_add(t)
            t += a_duration[i]
            i += 1
            i_end = t
            i_ready = t + a_delay[i]
        elif j_ready <= t:
            if j == j_limit or t >= between:
                break
            if b_shave[j] and j_end == t:
                j_add(~t)
                t -= b_shave[j]
            else:
                j_add(t)
            t += b_duration[j]
            j += 1
            j_end = t
            j_ready = t + b_delay[j]
        else:
            sooner = i_ready if i_ready < j_ready else j_ready
            if sooner >= below or sooner >= between or sooner >= above:
                break
            t = sooner
        if t >= above:
            break
    if i > a.at:
        a.at, a.previous_end = i, i_end
        a.ready = i_ready
    if j > b.at:
        b.at, b.previous_end = j, j_end
        b.ready = j_ready
    return t
