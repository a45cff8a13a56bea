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

from tesserasim.sim.accounts import Run, account
from tesserasim.sim.compiled import CompiledLane, compile_lane
from tesserasim.sim.flows import (
    NEVER,
    Cohort,
    Device,
    Flow,
    Link,
    earliest_end,
    resolve,
    run_alone,
    run_one,
    run_two,
)
from tesserasim.sim.program import Program
from tesserasim.sim.result import STARVED_AFTER, DeadlockError, SimResult, starved

#: A stretch of kernels this long is worth the fixed price of an array operation.
_MERGE = 40


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
        self.stop = NEVER  # the end, as far as decided: it can only come nearer

    def run(self) -> int:
        """Run until every lane has its window; fill the result in; return the end in ns."""
        for lane in self.lanes:
            for slot in range(lane.depth):
                self._enter(lane, slot, slot * lane.stagger_ns)
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
            above = between = NEVER
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
                t = min(above, between, near.ready if near is not None else NEVER)
                if t == NEVER:
                    raise DeadlockError(f"device {self.program.devices[device.index]}: nothing left to run")
                continue
            if chosen.at == chosen.limit:
                t = self._start_special(device, chosen, t)
                if chosen.done and not chosen.cohort.left:
                    break  # the end may have come nearer, or others lag far behind
                continue
            # Two flows to alternate between: the chosen one, and one just above or the next below.
            first, second, below = chosen, None, NEVER
            if near is not None:
                if near.ready <= t + chosen.code.duration[chosen.at]:
                    first, second = near, chosen
                else:
                    above = min(above, between, near.ready)
                    between = NEVER
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
                quiet = min(above, between, below, second.ready if second is not None else NEVER)
                if quiet > t + first.code.earliest[m] - first.code.earliest[first.at]:
                    t = run_alone(first, t, min(quiet, stop))
                    continue
            if above > stop:
                above = stop
            if second is None:
                t = run_one(first, t, above, between)
            else:
                t = run_two(first, second, t, above, between, below)
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
                resolve(other)
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
            resolve(flow)
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
        end, give_up = 0, NEVER
        for index, completions in self.completions.items():
            goal = self.result.lanes[index].goal
            end = max(end, completions[goal - 1] if len(completions) >= goal else NEVER)
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
                    bound = max(bound, earliest_end(other, len(other.code.duration) - 1))
            return bound + flow.code.delay[0]
        bound = flow.base
        arrival = cohort.arrival
        for token in flow.waits or ():
            at = arrival[token]
            if at < 0:
                source = cohort.lane.sources[token]
                sender = flows[source.device]
                assert sender is not None
                at = earliest_end(sender, source.kernel) + source.transfer_ns
            if at > bound:
                bound = at
        return bound


def _clock(device: Device) -> int:
    return device.clock


def _key(flow: Flow) -> tuple[int, int, int, int]:
    return flow.key
