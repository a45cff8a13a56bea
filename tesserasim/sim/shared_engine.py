"""Shared devices in the reference engine: kernels of several streams co-run (docs/semantics.md, "Shared devices").

Streams, links, slots and moments are those of `simpy_engine.py`. What differs: every ready head starts, and when a
kernel starts or ends, the rates of all kernels on the devices of its DRAM are found anew (`fluid.py`). Work is kept
in ns * 2^20: at each change of its rate rem -= rate * dt, and the kernel ends at now + ceil(rem / rate).
Of all kernels of a DRAM only the next to end has an event. A change leaves the former one in the queue: it is *stale*,
ends nothing, but may close its moment.
"""

from __future__ import annotations

from heapq import heappop, heappush

from simpy import Event

from tesserasim.sim.fluid import Load, rates
from tesserasim.sim.parts import NEVER, Device, Stream, kernel_slice
from tesserasim.sim.program import Program
from tesserasim.sim.result import Rate, SimResult
from tesserasim.sim.sharing import ONE
from tesserasim.sim.simpy_engine import SimpyRun

#: Sets of kernels whose rates are kept: the same few co-run again and again.
_KEPT = 1 << 16


class _Running:
    """A kernel under way: `rem` is the work left at `since`, from when on it runs at `rate`."""

    __slots__ = ("end", "key", "load", "rate", "rem", "since", "started", "stream")

    def __init__(self, stream: Stream, load: int, work: int, now: int, key: int) -> None:
        self.stream, self.load, self.rem, self.key = stream, load, work, key  # load: its number
        self.started = self.since = now
        self.rate = 0
        self.end = NEVER  # as things stand


class _SharedDevice(Device):
    """Heads as on a serial device; it is busy while any kernel runs, since `started`."""

    __slots__ = ("count", "dram")

    def __init__(self, run: SharedRun, dram: _Dram) -> None:
        super().__init__(run.env)
        self.count = 0  # kernels that run
        self.dram = dram

    def busy_at(self, now: int) -> int:
        return self.busy + (now - self.started if self.count else 0)


class _Dram:
    """A DRAM, what runs on its devices, and which of that ends next: the event that carries this object is valid."""

    __slots__ = ("changed", "next", "running")

    def __init__(self) -> None:
        self.running: list[_Running] = []
        self.changed = False
        self.next: Event | None = None


class SharedRun(SimpyRun):
    """One run of the given lanes, which share devices, links or a DRAM."""

    def __init__(self, program: Program, lanes: list[int], result: SimResult) -> None:
        self.drams: dict[int, _Dram] = {}
        self.changed: list[_Dram] = []
        self.numbers: dict[Load, int] = {}
        self.loads: list[Load] = []
        self.known: dict[tuple[int, ...], list[int]] = {}
        self.log = result.rates
        classes = sorted({program.lanes[i].priority for i in lanes})
        self.rank = {i: classes.index(program.lanes[i].priority) for i in lanes}
        super().__init__(program, lanes, result)

    def _device(self, index: int) -> Device:
        return _SharedDevice(self, self.drams.setdefault(self.program.domain(index), _Dram()))

    def _kernel_ended(self, event: Event) -> None:
        running, dram = event._value
        now = self.env._now
        if dram.next is event:
            stream: Stream = running.stream
            device = self.devices[stream.program.device]
            assert isinstance(device, _SharedDevice)
            dram.running.remove(running)
            self._note(dram)
            self._next_end(dram, now)
            device.count -= 1
            if not device.count:
                device.busy += now - device.started
            if self.slices is not None:
                self.slices.append(kernel_slice(stream, running.started, now))
            self._move_on(stream, device, now)
        if self.env.peek() > now:
            self._close()

    def _note(self, dram: _Dram) -> None:
        if not dram.changed:
            dram.changed = True
            self.changed.append(dram)

    def _close(self) -> None:
        super()._close()
        if self.finished:
            return
        for dram in self.changed:
            dram.changed = False
            self._share(dram, self.env._now)
        self.changed.clear()

    def _choose(self, device: Device, now: int) -> None:
        """Start every ready head, the most urgent first, and come back when the next one is ready."""
        assert isinstance(device, _SharedDevice)
        later, ready = device.later, device.ready
        while later and later[0][0] <= now:
            _, urgency, stream = heappop(later)
            heappush(ready, (urgency, stream))
        while ready:
            self._begin(device, heappop(ready)[1], now)
        if later:
            self._wake(device, later[0][0], now)

    def _begin(self, device: _SharedDevice, stream: Stream, now: int) -> None:
        p, i = stream.program, stream.at
        duration = p.duration[i]
        if p.shave[i] and stream.previous_end == now:
            duration -= p.shave[i]
        lane = stream.cohort.lane
        load = Load(p.device, self.rank[lane], p.sm[i], p.dram[i])
        number = self.numbers.setdefault(load, len(self.loads))
        if number == len(self.loads):
            self.loads.append(load)
        key = self.keys[lane, p.device][i] + stream.tie
        device.dram.running.append(_Running(stream, number, duration * ONE, now, key))
        self._note(device.dram)
        if not device.count:
            device.started = now
        device.count += 1

    def _share(self, dram: _Dram, now: int) -> None:
        """Give every kernel on this DRAM its rate from now on."""
        loads = tuple([x.load for x in dram.running])
        found = self.known.get(loads)
        if found is None:
            if len(self.known) == _KEPT:
                self.known.clear()
            found = self.known[loads] = rates([self.loads[n] for n in loads], self.program.sharing)
        for x, rate in zip(dram.running, found, strict=True):
            if rate == x.rate and x.started != now:
                continue
            x.rem -= x.rate * (now - x.since)
            x.since, x.rate = now, rate
            x.end = now - (-x.rem // rate) if rate else NEVER
            if self.log is not None:
                c, p = x.stream.cohort, x.stream.program
                self.log.append(Rate(now, p.device, c.lane, c.number, x.stream.at, rate))
        self._next_end(dram)

    def _next_end(self, dram: _Dram, at: int | None = None) -> None:
        """Schedule the next end on a DRAM, as things stand; with `at`, only if it is at that time."""
        dram.next = None
        first: _Running | None = None
        for x in dram.running:
            if x.end != NEVER and (first is None or x.end < first.end or (x.end == first.end and x.key < first.key)):
                first = x
        if first is None or (at is not None and first.end > at):
            return
        event = dram.next = Event(self.env)
        event._ok, event._value = True, (first, dram)
        event.callbacks = [self._kernel_ended]
        self.env.schedule(event, first.key, first.end - self.env._now)

    def _account(self) -> None:
        """As ever; kernels under way get slices that end as things stand, or behind the end if they stand still."""
        end = self.env._now
        if self.slices is not None:
            for dram in self.drams.values():
                self.slices += [
                    kernel_slice(x.stream, x.started, end + 1 if x.end == NEVER else x.end) for x in dram.running
                ]
        super()._account()
