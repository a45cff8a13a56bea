"""The reference engine, on SimPy: what a program means is what this file does.

A *device* runs one kernel at a time, to its end. When it is free it takes, of the streams whose next kernel
(head) is ready, the most urgent: lane priority, then the older cohort. A *link* (one direction) carries one
transfer at a time, first in first out, or in the order of the copy engine that carries them. Every kernel is one
scheduled event, its end; that event's priority is the tie key of `order.py`. A *moment* is all events with one time
stamp: the last of them closes the moment (`_close`), which lets new cohorts in and lets free devices choose. A head
that is ready later, with its device free, costs one more event (`_wake`).
"""

from __future__ import annotations

from heapq import heappop, heappush

from simpy import Environment, Event

from tesserasim.errors import InputError
from tesserasim.sim import order
from tesserasim.sim.parts import Cohort, Device, Engine, Link, Stream, kernel_slice, transfer_slice
from tesserasim.sim.program import LaneProgram, Program, Send
from tesserasim.sim.result import STARVED_AFTER, ChannelResult, DeadlockError, DeviceResult, SimResult, starved


class SimpyRun:
    """One run of the given lanes (indices into the program), which share devices or links."""

    def __init__(self, program: Program, lanes: list[int], result: SimResult) -> None:
        self.program, self.result = program, result
        self.lanes = lanes
        self.env = Environment()
        self.done = Event(self.env)
        self.finished = False
        self.starving = False
        self.slices = result.timeline
        urgencies = sorted({program.lanes[i].priority for i in lanes})
        self.urgency = {i: urgencies.index(program.lanes[i].priority) * order.MAX_COHORTS for i in lanes}
        devices = sorted({s.device for i in lanes for s in program.lanes[i].streams if s.duration})
        self.devices = {d: self._device(d) for d in devices}
        self.engines = {c.engine: Engine() for c in program.channels if c.engine is not None}
        self.copies = {i: program.lanes[i].copies(program.channels) for i in lanes} if self.engines else {}
        self.links = {
            k: Link(self.env, c, k, None if c.engine is None else self.engines[c.engine])
            for k, c in enumerate(program.channels) if c.src in self.devices
        }  # fmt: skip
        self.keys = {  # per lane and device: the tie key of each kernel's end, for cohort 0
            (i, s.device): [order.key(order.KERNEL_END, 0, p, s.device) for p in s.order]
            for i in lanes
            for s in program.lanes[i].streams
        }
        self.entered = 0
        self.freed: list[tuple[int, int]] = []
        self.touched: list[Device] = []  # devices that may have something to choose at this moment
        self.lanes_open = len(lanes)
        self.window_start = 0
        self.before_window: dict[int, int] = {}  # busy time of devices and links up to the window
        self.before_window_links: dict[int, int] = {}
        # SimPy takes an event's list of callbacks away when it processes it; these two lists are put back
        self.on_kernel_end = [self._kernel_ended]
        self.on_transfer_end = [self._transfer_ended]

    def _device(self, index: int) -> Device:
        return Device(self.env)

    def run(self) -> int:
        """Run until every lane has its window; fill the result in; return the end in ns."""
        for i in self.lanes:
            for slot in range(self.program.lanes[i].depth):
                self._open(i, slot)
        self._close()
        try:
            self.env.run(until=self.done)
        except RuntimeError as error:  # SimPy ran out of events; `validate` should have seen it coming
            if self.finished:
                raise
            raise DeadlockError(self._stuck()) from error
        self._account()
        return int(self.env.now)

    # What ends -------------------------------------------------------------------------------------------

    def _kernel_ended(self, event: Event) -> None:
        device: Device = event._value
        stream = device.running
        assert stream is not None
        now = self.env._now
        device.running = None
        device.busy += now - device.started
        self._move_on(stream, device, now)
        if self.env.peek() > now:
            self._close()

    def _move_on(self, stream: Stream, device: Device, now: int) -> None:
        """A kernel has ended: hand on what it sends, and expose the next one on its stream."""
        device.kernels += 1
        self.touched.append(device)
        i = stream.at
        sends = stream.program.sends[i]
        if sends:
            for send in sends:
                self._send(stream, i, send)
        stream.at = i = i + 1
        stream.previous_end = now
        if i == len(stream.program.duration):
            self._stream_ended(stream.cohort)
        else:
            self._expose_head(stream, device, now)

    def _stream_ended(self, cohort: Cohort) -> None:
        cohort.streams_left -= 1
        if cohort.streams_left:
            return
        lane = self.result.lanes[cohort.lane]
        lane.completion_ns.append(self.env._now)
        lane.cohorts.append(cohort.number)
        self._leave_if_idle(cohort)
        completed = len(lane.completion_ns)
        if completed == lane.warmup:
            self._mark_window()
        if completed == lane.goal:
            self.lanes_open -= 1
            self.finished = not self.lanes_open
        elif completed == lane.goal * STARVED_AFTER:
            self.starving = True

    def _transfer_ended(self, event: Event) -> None:
        link: Link = event._value
        assert link.carrying is not None
        stream, i, send = link.carrying
        link.carrying = None
        link.busy += self.env._now - link.started
        link.nbytes += send.nbytes
        link.transfers += 1
        arrival = Event(self.env)
        arrival._ok, arrival._value = True, (stream.cohort, send.token, link.channel.dst)
        arrival.callbacks = [self._arrived]
        key = order.key(order.ARRIVAL, stream.cohort.rank, stream.program.order[i], link.channel.dst)
        self.env.schedule(arrival, key, link.channel.latency_ns)
        if link.engine is not None:
            link.engine.busy = False
            self._carry(link.engine)
        elif link.queue:
            self._occupy(link, link.queue.popleft())
        stream.cohort.transfers_left -= 1
        self._leave_if_idle(stream.cohort)
        if self.env.peek() > self.env._now:
            self._close()

    def _arrived(self, event: Event) -> None:
        cohort, token, dst = event._value
        cohort.arrived[token] = 1
        stream = cohort.streams.get(dst)
        if stream is not None and stream.missing and token in stream.program.waits[stream.at]:
            stream.missing -= 1
            if not stream.missing:
                self._queue_head(stream, self.devices[dst], self.env._now)
                self.touched.append(self.devices[dst])
        if self.env.peek() > self.env._now:
            self._close()

    def _open(self, lane: int, slot: int) -> None:
        """Open a slot at its time: at once, or later in a staggered lane."""
        at = slot * self.program.lanes[lane].stagger_ns
        if not at:
            self.freed.append((lane, slot))
            return
        event = Event(self.env)
        event._ok, event._value = True, (lane, slot)
        event.callbacks = [self._opened]
        self.env.schedule(event, order.key(order.ENTRY, lane, slot, 0), at)

    def _opened(self, event: Event) -> None:
        self.freed.append(event._value)
        if self.env.peek() > self.env._now:
            self._close()

    def _woken(self, event: Event) -> None:
        device: Device = event._value
        self.touched.append(device)
        if self.env.peek() > self.env._now:
            self._close()

    # What starts -----------------------------------------------------------------------------------------

    def _close(self) -> None:
        """All that ends at this moment has ended: let cohorts in, let free devices choose, or stop."""
        if self.finished:
            if not self.done.triggered:
                self.done.succeed()
            return
        if self.starving:
            raise starved(self.result, self.lanes)
        if self.freed:
            self.freed.sort()
            freed, self.freed = self.freed, []
            for lane, slot in freed:
                self._enter(lane, slot)
        now = self.env._now
        for device in self.touched:
            if device.running is None:
                self._choose(device, now)
        self.touched.clear()

    def _enter(self, lane_index: int, slot: int) -> None:
        lane: LaneProgram = self.program.lanes[lane_index]
        entries = self.result.lanes[lane_index].entry_ns
        cohort = Cohort(lane_index, slot, len(entries), self.entered, lane.tokens)
        self.entered += 1
        if self.entered > order.MAX_COHORTS:
            raise InputError(f"more than {order.MAX_COHORTS} cohorts in one run")
        now = self.env._now
        entries.append(now)
        for engine, tokens in self.copies.get(lane_index, {}).items():
            self.engines[engine].queue.extend((cohort.rank, token) for token in tokens)
        for program in lane.streams:
            if program.duration:
                cohort.streams_left += 1
                stream = Stream(cohort, program, self.urgency[lane_index] + cohort.rank)
                cohort.streams[program.device] = stream
                device = self.devices[program.device]
                self.touched.append(device)
                self._expose_head(stream, device, now)

    def _expose_head(self, stream: Stream, device: Device, now: int) -> None:
        """The kernel at `at` is next on its stream: its delay counts from now."""
        i = stream.at
        stream.ready_at = now + stream.program.delay[i]
        waits = stream.program.waits[i]
        if waits:
            arrived = stream.cohort.arrived
            stream.missing = sum(not arrived[t] for t in set(waits))
            if stream.missing:
                return
        self._queue_head(stream, device, now)

    def _queue_head(self, stream: Stream, device: Device, now: int) -> None:
        """Every input is there: the head is ready when its delay is over."""
        if stream.ready_at <= now:
            heappush(device.ready, (stream.urgency, stream))
        else:
            heappush(device.later, (stream.ready_at, stream.urgency, stream))

    def _choose(self, device: Device, now: int) -> None:
        """Start the most urgent ready head, or come back when the next one is ready."""
        later, ready = device.later, device.ready
        while later and later[0][0] <= now:
            _, urgency, stream = heappop(later)
            heappush(ready, (urgency, stream))
        if not ready:
            if later:
                self._wake(device, later[0][0], now)
            return
        _, stream = heappop(ready)
        program = stream.program
        i = stream.at
        duration = program.duration[i]
        if program.shave[i] and stream.previous_end == now:
            duration -= program.shave[i]
        device.running = stream
        device.started = now
        device.end.callbacks = self.on_kernel_end
        key = self.keys[stream.cohort.lane, program.device][i] + stream.tie
        self.env.schedule(device.end, key, duration)
        if self.slices is not None:
            self.slices.append(kernel_slice(stream, now, now + duration))

    def _wake(self, device: Device, at: int, now: int) -> None:
        """Come back at `at`, unless an earlier wake-up is under way already."""
        if now < device.wake_at <= at:
            return
        device.wake_at = at
        event = Event(self.env)
        event._ok, event._value = True, device
        event.callbacks = [self._woken]
        stream = device.later[0][2]
        program = stream.program
        key = order.key(order.START, stream.cohort.rank, program.order[stream.at], program.device)
        self.env.schedule(event, key, at - now)

    def _send(self, stream: Stream, i: int, send: Send) -> None:
        stream.cohort.transfers_left += 1
        link = self.links[send.channel]
        if link.engine is not None:
            link.engine.waiting[stream.cohort.rank, send.token] = link, (stream, i, send)
            self._carry(link.engine)
        elif link.carrying is None:
            self._occupy(link, (stream, i, send))
        else:
            link.queue.append((stream, i, send))

    def _carry(self, engine: Engine) -> None:
        """Start the first transfer of an idle engine's queue, if it is there: those behind wait, there or not."""
        if engine.busy or not engine.queue or engine.queue[0] not in engine.waiting:
            return
        engine.busy = True
        self._occupy(*engine.waiting.pop(engine.queue.popleft()))

    def _occupy(self, link: Link, transfer: tuple[Stream, int, Send]) -> None:
        stream, i, send = link.carrying = transfer
        link.started = now = self.env._now
        link.end.callbacks = self.on_transfer_end
        program = stream.program
        key = order.key(order.TRANSFER_END, stream.cohort.rank, program.order[i], program.device)
        occupation = link.channel.occupation_ns(send.nbytes)
        self.env.schedule(link.end, key, occupation)
        if self.slices is not None:
            arrival = now + occupation + link.channel.latency_ns
            self.slices.append(transfer_slice(stream, i, send, link, now, now + occupation, arrival))

    def _leave_if_idle(self, cohort: Cohort) -> None:
        """The slot is free when the last kernel and the last outgoing transfer have ended everywhere."""
        if not cohort.streams_left and not cohort.transfers_left:
            self.freed.append((cohort.lane, cohort.slot))

    # Accounts --------------------------------------------------------------------------------------------

    def _mark_window(self) -> None:
        """A lane's window starts now; the last lane's mark is the one that stays."""
        self.window_start = now = self.env._now
        for d, device in self.devices.items():
            self.before_window[d] = device.busy_at(now)
        for k, link in self.links.items():
            self.before_window_links[k] = link.busy_at(now)

    def _account(self) -> None:
        end = self.env._now
        window = end - self.window_start
        for d, device in self.devices.items():
            out: DeviceResult = self.result.devices[d]
            out.busy_ns, out.span_ns = device.busy_at(end), end
            out.window_busy_ns, out.window_ns = out.busy_ns - self.before_window.get(d, 0), window
            out.kernels = device.kernels
        for k, link in self.links.items():
            use: ChannelResult = self.result.channels[k]
            use.busy_ns, use.span_ns = link.busy_at(end), end
            use.window_busy_ns, use.window_ns = use.busy_ns - self.before_window_links.get(k, 0), window
            use.nbytes, use.transfers = link.nbytes, link.transfers
        if self.slices is not None:
            self.slices[:] = [s for s in self.slices if s.start_ns < end or s.lane not in self.lanes]

    def _stuck(self) -> str:
        lanes = (self.result.lanes[i] for i in self.lanes)
        lane = next(x for x in lanes if len(x.completion_ns) < x.goal)
        return f"lane {lane.name}: no event is left, but only {len(lane.completion_ns)} cohorts are done"
