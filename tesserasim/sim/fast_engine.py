"""The fast engine: the reference's results (simpy_engine.py), exactly, without a global queue of events.

Every device has its own clock and runs ahead of the others until it would have to know something that they
have not decided yet. Three facts make that safe and cheap:

1. A kernel is never interrupted, so its end, and the arrival of what it sends, are known when it starts.
2. At time t a device takes the most urgent ready head. Heads below the chosen one do not matter, and a head
   above it that still waits for another device matters only if its input *could* have arrived by t. That is
   bounded from below by the sender's clock and the kernels before the sender's kernel (`_bound`).
3. The device with the smallest clock can always decide: whatever the others have still to start ends later.

While two streams of a device alternate (one fills the other's gaps) a tight loop runs them; a stream that
nothing can interrupt is run by prefix sums. Only the starts of kernels are kept, as they are all that a run
is: completions, use and timelines follow from them (accounts.py). A start is stored as ~start (negative)
where the kernel was shaved.
"""

from __future__ import annotations

from bisect import insort

import numpy as np

from tesserasim.sim.accounts import Run, account
from tesserasim.sim.compiled import Code, CompiledLane, Outgoing, compile_lane
from tesserasim.sim.program import Program
from tesserasim.sim.result import STARVED_AFTER, DeadlockError, SimResult, starved

_NEVER = 1 << 62
#: A stretch of kernels this long is worth the fixed price of an array operation.
_MERGE = 40


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


class FastRun:
    """One run of the given lanes (indices into the program), which share devices or links."""

    def __init__(self, program: Program, lanes: list[int], result: SimResult) -> None:
        self.program, self.result = program, result
        priorities = sorted({program.lanes[i].priority for i in lanes})
        self.lanes = [compile_lane(program, i, priorities.index(program.lanes[i].priority)) for i in lanes]
        used = sorted({d for lane in self.lanes for d in lane.used})
        self.devices = {d: Device(d) for d in used}
        self.links = {k: Link() for k, c in enumerate(program.channels) if c.src in self.devices}
        self.logging = result.timeline is not None
        self.cohorts: list[Cohort] = []
        self.completions: dict[int, list[int]] = {i: [] for i in lanes}  # sorted, as far as decided
        self.starving = False
        self.stop = _NEVER  # the end, as far as decided: it can only come nearer

    def run(self) -> int:
        """Run until every lane has its window; fill the result in; return the end in ns."""
        for lane in self.lanes:
            for slot in range(lane.depth):
                self._enter(lane, slot, 0)
        devices = list(self.devices.values())
        while True:
            device = min(devices, key=_clock)
            if device.clock >= self.stop:
                break
            self._advance(device)
        run = Run(self.program, self.cohorts, self.devices, self.links, self.completions, self.stop)
        account(run, self.result)
        if self.starving:
            raise starved(self.result, list(self.completions))
        return self.stop

    def _advance(self, device: Device) -> None:
        """Decide on this device until another must decide first, a cohort is done, or the run ends.

        One long loop by intent: everything in it is paid per decision.
        """
        flows = device.flows
        t = device.clock
        stop = self.stop
        while t < stop:
            # Look for the most urgent ready head. `above`: when a more urgent one may turn up.
            above = between = _NEVER
            near: Flow | None = None  # the first above it that is ready later, at a known time
            chosen: Flow | None = None
            place = 0
            for flow in flows:
                place += 1
                ready = flow.ready
                if ready <= t:
                    if flow.known:
                        chosen = flow
                        break
                    ready = flow.ready = self._bound(flow)
                    if ready <= t:  # perhaps ready: another device must decide first
                        device.clock = t
                        return
                elif near is None and flow.known:
                    near = flow
                    continue
                if near is None:
                    if ready < above:
                        above = ready
                elif ready < between:
                    between = ready
            if chosen is None:
                t = min(above, between, near.ready if near is not None else _NEVER)
                if t == _NEVER:
                    raise DeadlockError(f"device {self.program.devices[device.index]}: nothing left to run")
                continue
            if chosen.at == chosen.limit:
                t = self._start_special(device, chosen, t)
                if chosen.done and not chosen.cohort.left:
                    break  # the end may have come nearer, or others lag far behind
                continue
            # Two flows to alternate between: the chosen one, and one just above or the next below.
            first, second, below = chosen, None, _NEVER
            if near is not None:
                if near.ready <= t + chosen.code.duration[chosen.at]:
                    first, second = near, chosen
                else:
                    above = min(above, between, near.ready)
                    between = _NEVER
            for flow in flows[place:]:
                if second is None and flow.known:
                    second = flow
                    continue
                ready = flow.ready
                if second is None:
                    if ready < between:
                        between = ready
                elif ready < below:
                    below = ready
            m = first.at + _MERGE
            if m < first.limit and first is chosen:
                quiet = min(above, between, below, second.ready if second is not None else _NEVER)
                if quiet > t + first.code.earliest[m] - first.code.earliest[first.at]:
                    t = _run_alone(first, t, min(quiet, stop))
                    continue
            if above > stop:
                above = stop
            if second is None:
                t = _run_one(first, t, above, between)
            else:
                t = _run_two(first, second, t, above, between, below)
        device.clock = t

    def _start_special(self, device: Device, flow: Flow, t: int) -> int:
        """Start a kernel that others wait for; returns its end."""
        i = flow.at
        code = flow.code
        end = t + code.duration[i]
        if code.shave[i] and flow.previous_end == t:
            end -= code.shave[i]
            t = ~t
        flow.starts.append(t)
        flow.previous_end = end
        cohort = flow.cohort
        for x in code.outgoing[flow.nth]:
            channel, occupation, latency, token, dst, _ = x
            link = self.links[channel]
            free = link.free
            free = link.free = (free if free > end else end) + occupation
            link.ends.append(free)
            link.sent.append(x)
            if free > cohort.transfers_end:
                cohort.transfers_end = free
            cohort.arrival[token] = free + latency
            if self.logging:
                link.log.append((flow, i))
            other = cohort.flows[dst]
            if other is not None and not other.known and other.waits and token in other.waits:
                _resolve(other)
        i += 1
        flow.at = i
        if i == len(code.duration):
            self._finish(device, flow, end)
            return end
        flow.nth += 1
        flow.limit = code.special[flow.nth]
        flow.ready = end + code.delay[i]
        waits = code.program.waits[i]
        if waits:
            flow.base = flow.ready
            flow.waits = waits
            _resolve(flow)
        return end

    def _finish(self, device: Device, flow: Flow, end: int) -> None:
        """A cohort is through with a device: the flow stands for the next one in its slot until that enters."""
        cohort = flow.cohort
        device.past.append(flow)
        device.flows.remove(flow)
        flow.done = True
        flow.ready = end
        flow.known = False
        flow.waits = None
        flow.key = (cohort.lane.rank, end, -1, -1)  # the next cohort cannot be older than this
        insort(device.flows, flow, key=_key)
        if end > cohort.last_end:
            cohort.last_end = end
        cohort.left -= 1
        if cohort.left:
            return
        for d in cohort.lane.used:
            old = cohort.flows[d]
            assert old is not None
            self.devices[d].flows.remove(old)
        insort(self.completions[cohort.lane.index], cohort.last_end)
        self._enter(cohort.lane, cohort.slot, max(cohort.last_end, cohort.transfers_end))
        self._near_stop()

    def _enter(self, lane: CompiledLane, slot: int, entry: int) -> None:
        cohort = Cohort(lane, slot, entry, len(self.program.devices))
        self.cohorts.append(cohort)
        for d in lane.used:
            code = lane.codes[d]
            assert code is not None
            device = self.devices[d]
            flow = cohort.flows[d] = Flow(cohort, code, device)
            insort(device.flows, flow, key=_key)

    def _near_stop(self) -> None:
        """The end is when the last lane has its goal; completions still undecided may bring it nearer."""
        end, give_up = 0, _NEVER
        for index, completions in self.completions.items():
            goal = self.result.lanes[index].goal
            end = max(end, completions[goal - 1] if len(completions) >= goal else _NEVER)
            if len(completions) >= goal * STARVED_AFTER:
                give_up = min(give_up, completions[goal * STARVED_AFTER - 1])
        self.starving = give_up < end
        self.stop = min(end, give_up)

    def _bound(self, flow: Flow) -> int:
        """No earlier than this is the flow's head ready, by what other devices have decided so far."""
        cohort = flow.cohort
        flows = cohort.flows
        if flow.done:  # the next cohort enters when the rest of this one has ended
            bound = max(cohort.last_end, cohort.transfers_end)
            for d in cohort.lane.used:
                other = flows[d]
                assert other is not None
                if not other.done:
                    bound = max(bound, _earliest_end(other, len(other.code.duration) - 1))
            return bound + flow.code.delay[0]
        bound = flow.base
        arrival = cohort.arrival
        for token in flow.waits or ():
            at = arrival[token]
            if at < 0:
                source = cohort.lane.sources[token]
                sender = flows[source.device]
                assert sender is not None
                at = _earliest_end(sender, source.kernel) + source.transfer_ns
            if at > bound:
                bound = at
        return bound


def _clock(device: Device) -> int:
    return device.clock


def _key(flow: Flow) -> tuple[int, int, int, int]:
    return flow.key


def _earliest_end(flow: Flow, index: int) -> int:
    """The least time at which a kernel that has not started can end."""
    start = flow.device.clock
    if flow.ready > start:
        start = flow.ready
    earliest = flow.code.earliest
    return start + earliest[index + 1] - earliest[flow.at] - flow.code.delay[flow.at]


def _resolve(flow: Flow) -> None:
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


def _run_alone(flow: Flow, t: int, quiet: int) -> int:
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


def _run_one(flow: Flow, t: int, until: int, idle_until: int) -> int:
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


def _run_two(a: Flow, b: Flow, t: int, above: int, between: int, below: int) -> int:
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
