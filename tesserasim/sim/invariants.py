"""Invariants of a run, verified from its slices and its program alone.

Nothing here asks an engine: what must hold is worked out again from the program. The numbers are those of
docs/semantics.md, and each has its test in tests/test_sim_invariants.py.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from itertools import pairwise

from tesserasim.errors import TesserasimError
from tesserasim.sim.components import components
from tesserasim.sim.program import LaneProgram, Program, Send, StreamProgram
from tesserasim.sim.result import ChannelResult, DeviceResult, SimResult, Slice

_CohortKey = tuple[int, int]  # lane, number


class InvariantError(TesserasimError):
    """A run contradicts its program: a fault of the engine, never of the input."""


def _need(holds: bool, number: int, what: str) -> None:
    if not holds:
        raise InvariantError(f"invariant {number}: {what}")


def check_run(program: Program, result: SimResult) -> None:
    """Verify every invariant; the slices must be in the result. Raises InvariantError."""
    if result.timeline is None:
        raise ValueError("a check needs the slices of the run")
    for lanes in components(program):
        _Check(program, result, lanes).all()


class _Check:
    """One component of a run, its slices grouped in the ways the invariants need."""

    def __init__(self, program: Program, result: SimResult, lanes: list[int]) -> None:
        self.program, self.result, self.lanes = program, result, lanes
        slices = [s for s in result.timeline or () if s.lane in lanes]
        self.kernels: dict[tuple[int, int, int], list[Slice]] = defaultdict(list)  # lane, cohort, device
        self.arrival: dict[tuple[int, int, int], int] = {}  # lane, cohort, token
        self.transfers: dict[_CohortKey, list[Slice]] = defaultdict(list)
        self.on_device: dict[int, list[Slice]] = defaultdict(list)
        self.on_channel: dict[int, list[Slice]] = defaultdict(list)
        self.on_engine: dict[int, list[Slice]] = defaultdict(list)
        for s in slices:
            if s.kind == "kernel":
                self.kernels[s.lane, s.cohort, s.device].append(s)
                self.on_device[s.resource].append(s)
            else:
                self.arrival[s.lane, s.cohort, s.token] = s.arrival_ns
                self.transfers[s.lane, s.cohort].append(s)
                self.on_channel[s.resource].append(s)
                engine = program.channels[s.resource].engine
                if engine is not None:
                    self.on_engine[engine].append(s)
        self.streams = {(i, s.device): s for i in lanes for s in program.lanes[i].streams if s.duration}
        self.end = max(result.lanes[i].window_end_ns for i in lanes)
        self.slot_of = {(s.lane, s.cohort): s.slot for s in slices}  # of the cohorts that have started

    def all(self) -> None:
        self.clock()
        self.cohorts_leave_once()
        self.streams_in_order()
        self.one_at_a_time()
        self.transfers_match()
        self.slots()
        self.no_idle_device()
        self.accounts()

    def clock(self) -> None:
        """1: time never goes back, nothing lies before 0, nothing starts at or after the end."""
        for group in (*self.on_device.values(), *self.on_channel.values()):
            for s in group:
                _need(0 <= s.start_ns <= s.end_ns, 1, f"{s} ends before it starts")
                _need(s.start_ns < self.end, 1, f"{s} starts after the end, {self.end}")
        for i in self.lanes:
            lane = self.result.lanes[i]
            for times in (lane.entry_ns, lane.completion_ns):
                _need(all(a <= b for a, b in pairwise(times)), 1, f"lane {lane.name}: times out of order")

    def cohorts_leave_once(self) -> None:
        """2: who entered leaves once, when its last kernel ends; at most `depth` are inside."""
        for i in self.lanes:
            lane = self.result.lanes[i]
            _need(len(set(lane.cohorts)) == len(lane.cohorts), 2, f"lane {lane.name}: a cohort left twice")
            _need(len(lane.completion_ns) >= lane.goal, 2, f"lane {lane.name}: window not reached")
            inside = len(lane.entry_ns) - len(lane.cohorts)
            _need(0 <= inside <= lane.depth, 2, f"lane {lane.name}: {inside} cohorts inside")
            left = dict(zip(lane.cohorts, lane.completion_ns, strict=True))
            for c in range(len(lane.entry_ns)):
                ends = self._last_end(i, c)
                due = ends is not None and ends <= self.end
                _need(due == (c in left), 2, f"lane {lane.name}, cohort {c}: left, or should have left")
                if c in left:
                    _need(left[c] == ends, 2, f"lane {lane.name}, cohort {c} left at {left[c]}, not {ends}")

    def _last_end(self, lane: int, cohort: int) -> int | None:
        """End of the cohort's last kernel; None while a kernel has not started."""
        last = 0
        for (i, device), stream in self.streams.items():
            if i == lane:
                done = self.kernels.get((lane, cohort, device), [])
                if len(done) < len(stream.duration):
                    return None
                last = max(last, done[-1].end_ns)
        return last

    def ready(self, s: Slice) -> int:
        """When the kernel of a slice could start at the earliest: predecessor, delay, inputs."""
        stream = self.streams[s.lane, s.device]
        base = self.result.lanes[s.lane].entry_ns[s.cohort]
        if s.index:
            base = self.kernels[s.lane, s.cohort, s.device][s.index - 1].end_ns
        inputs = [self.arrival.get((s.lane, s.cohort, t), self.end + 1) for t in stream.waits[s.index] or ()]
        return max(base + stream.delay[s.index], *inputs, 0)

    def streams_in_order(self) -> None:
        """3: a stream runs in order from its first kernel, none before its inputs, each as long as it must."""
        for (lane, _, device), done in self.kernels.items():
            stream = self.streams[lane, device]
            _need([s.index for s in done] == list(range(len(done))), 3, f"out of order: {done[-1]}")
            previous = None
            for s in done:
                _need(s.start_ns >= self.ready(s), 3, f"{s} starts before it is ready, {self.ready(s)}")
                length = stream.duration[s.index]
                if previous is not None and previous.end_ns == s.start_ns:
                    length -= stream.shave[s.index]
                self.lasts(s, length)
                previous = s

    def lasts(self, s: Slice, length: int) -> None:
        """3: a kernel of `length` takes as long as it must."""
        _need(s.end_ns - s.start_ns == length, 3, f"{s} should take {length}")

    def one_at_a_time(self) -> None:
        """4: a device runs at most one kernel, a channel or copy engine at most one transfer at full rate."""
        for group in (*self.on_device.values(), *self.on_channel.values(), *self.on_engine.values()):
            for a, b in pairwise(group):
                _need(a.end_ns <= b.start_ns, 4, f"{b} overlaps {a}")

    def transfers_match(self) -> None:
        """5: sent is what the program sends, once, in order of the producers' ends or in that of a copy engine, at the
        rate of the link."""
        for engine in {c.engine for c in self.program.channels} - {None}:
            self._engine_in_order(engine or 0)
        for k, group in self.on_channel.items():
            for s in group:
                channel = self.program.channels[k]
                _need(s.end_ns == s.start_ns + channel.occupation_ns(s.nbytes), 5, f"{s} is off the rate")
                _need(s.arrival_ns == s.end_ns + channel.latency_ns, 5, f"{s} arrives at the wrong time")
            if self.program.channels[k].engine is not None:
                continue
            free = produced_before = 0
            # transfers of no length that start together may lie in any order among the slices
            for s in sorted(group, key=lambda s: (s.start_ns, s.end_ns, self._produced(s))):
                channel = self.program.channels[s.resource]
                produced = self._produced(s)
                _need(produced >= produced_before, 5, f"{s} overtakes on {channel.name}")
                _need(s.start_ns == max(free, produced), 5, f"{s} should start at {max(free, produced)}")
                free, produced_before = s.end_ns, produced
        for i in self.lanes:
            want = _sends(self.program.lanes[i])
            for c in self.result.lanes[i].cohorts:
                got = {s.token: (s.resource, s.nbytes) for s in self.transfers[i, c]}
                all_sent = len(got) == len(self.transfers[i, c]) and all(
                    (x.channel, x.nbytes) == got[x.token] for x in want if x.token in got
                )
                _need(all_sent, 5, f"lane {i}, cohort {c} sent something else, or twice")
                late = [x for x in want if x.token not in got]  # it may still queue when the run ends
                queued = all(self._queues(i, c, x) for x in late)
                _need(not late or (queued and self._in_slot_at_end(i, c)), 5, f"lane {i}, cohort {c}: unsent")

    def _engine_in_order(self, engine: int) -> None:
        """The copies of all cohorts, by entry, each in its order, start one by one, and as soon as they can."""
        entered = sorted(
            (entry, i, self.slot_of.get((i, c), 0), c)
            for i in self.lanes for c, entry in enumerate(self.result.lanes[i].entry_ns)
        )
        order = {i: self.program.lanes[i].copies(self.program.channels).get(engine, []) for i in self.lanes}
        due = [(i, c, token) for _, i, _, c in entered for token in order[i]]
        place = {x: k for k, x in enumerate(due)}
        done = sorted(
            self.on_engine[engine], key=lambda s: (s.start_ns, s.end_ns, place[s.lane, s.cohort, s.token])
        )
        free = 0
        for want, s in zip(due, done, strict=False):
            _need(want == (s.lane, s.cohort, s.token), 5, f"{s} passes {want} on copy engine {engine}")
            start = max(free, self._produced(s))
            _need(s.start_ns == start, 5, f"{s} should start at {start}")
            free = s.end_ns
        _need(len(done) <= len(due), 5, f"copy engine {engine} carries more than is sent")
        if len(done) < len(due) and free < self.end:
            i, c, token = due[len(done)]
            src, index = next((s.device, k) for (lane, _), s in self.streams.items() if lane == i
                              for k, sends in enumerate(s.sends) for x in sends or () if x.token == token)  # fmt: skip
            ran = self.kernels.get((i, c, src), [])
            _need(len(ran) <= index or ran[index].end_ns >= self.end, 5, f"copy engine {engine} idle at the end")

    def _produced(self, s: Slice) -> int:
        """When the kernel ended that a transfer hangs on."""
        return self.kernels[s.lane, s.cohort, s.device][s.index].end_ns

    def _queues(self, i: int, c: int, send: Send) -> bool:
        """A transfer that has not started by the end: its channel is busy, or its producer ends only then."""
        if self.program.channels[send.channel].engine is not None:
            return True  # `_engine_in_order` has seen to it
        src = self.program.channels[send.channel].src
        index = next(k for k, x in enumerate(self.streams[i, src].sends) if send in (x or ()))
        busy = self.on_channel[send.channel]
        return self.kernels[i, c, src][index].end_ns >= self.end or (bool(busy) and busy[-1].end_ns >= self.end)

    def _in_slot_at_end(self, lane: int, cohort: int) -> bool:
        """No later cohort has the slot."""
        return all(c <= cohort for (i, c), slot in self.slot_of.items()
                   if i == lane and slot == self.slot_of[lane, cohort])  # fmt: skip

    def slots(self) -> None:
        """6: a cohort enters its slot exactly when the former's last kernel and transfer have ended, the first
        one when the slot opens."""
        last: dict[tuple[int, int], int] = {}
        for i, c in sorted(self.slot_of):
            slot = (i, self.slot_of[i, c])
            entry = self.result.lanes[i].entry_ns[c]
            free = slot[1] * self.program.lanes[i].stagger_ns
            if slot in last:
                ends = self._last_end(i, last[slot])
                _need(ends is not None, 6, f"lane {i}, cohort {c} enters a slot in use")
                free = max(ends or 0, *(s.end_ns for s in self.transfers[i, last[slot]]), 0)
            _need(entry == free, 6, f"lane {i}, cohort {c} enters at {entry}, its slot is free at {free}")
            last[slot] = c

    def no_idle_device(self) -> None:
        """7: a device is never idle while a head is ready, and takes the most urgent of those that are."""
        for device in {d for _, d in self.streams}:
            heads = sorted(h for i, c in self.slot_of for h in self._heads(i, c, device))
            ready: list[tuple[tuple[int, ...], int]] = []  # urgency, index
            at = free = 0
            for s in self.on_device[device]:
                due = free if ready else max(free, heads[at][0])
                _need(s.start_ns == due, 7, f"{s}: something was ready at {due}, the device idle")
                while at < len(heads) and heads[at][0] <= s.start_ns:
                    heappush(ready, heads[at][1:])
                    at += 1
                urgency, index = heappop(ready)
                mine = (self._urgency(s.lane, s.cohort), s.index)
                _need(mine == (urgency, index), 7, f"{s} passed over {urgency}, kernel {index}")
                free = s.end_ns
            if ready or at < len(heads):
                due = free if ready else max(free, heads[at][0])
                _need(due >= self.end, 7, f"device {device} idle at the end though something is ready at {due}")

    def _heads(self, lane: int, cohort: int, device: int) -> list[tuple[int, tuple[int, ...], int]]:
        """When each kernel of a stream became a ready head: those that started, and the one that is next."""
        stream: StreamProgram | None = self.streams.get((lane, device))
        if stream is None:
            return []
        done = self.kernels.get((lane, cohort, device), [])
        urgency = self._urgency(lane, cohort)
        heads = [(self.ready(s), urgency, s.index) for s in done]
        if len(done) < len(stream.duration):
            head = Slice(0, 0, "kernel", device, lane, 0, cohort, device, len(done), 0)
            heads.append((self.ready(head), urgency, head.index))
        return heads

    def _urgency(self, lane: int, cohort: int) -> tuple[int, ...]:
        entry = self.result.lanes[lane].entry_ns[cohort]
        return (self.program.lanes[lane].priority, entry, lane, self.slot_of[lane, cohort])

    def accounts(self) -> None:
        """8: busy + idle = span per device, and the totals are those of the slices, clipped to the end."""
        for device in {d for _, d in self.streams}:
            self._account(self.result.devices[device], self.busy_periods(self.on_device[device]))
            ended = sum(s.end_ns <= self.end for s in self.on_device[device])
            _need(ended == self.result.devices[device].kernels, 8, f"device {device}: kernels miscounted")
        for k, group in self.on_channel.items():
            use = self.result.channels[k]
            self._account(use, group)
            sent = sum(s.nbytes for s in group if s.end_ns <= self.end)
            _need(sent == use.nbytes, 8, f"channel {use.name}: {use.nbytes} bytes, slices say {sent}")

    def busy_periods(self, group: list[Slice]) -> list[Slice]:
        """Slices that do not overlap and cover what a device's slices cover: on serial devices these themselves."""
        return group

    def _account(self, out: DeviceResult | ChannelResult, group: list[Slice]) -> None:
        start = max(self.result.lanes[i].window_start_ns for i in self.lanes)
        busy = sum(min(s.end_ns, self.end) - s.start_ns for s in group)
        inside = sum(max(0, min(s.end_ns, self.end) - max(s.start_ns, start)) for s in group)
        idle = sum(b.start_ns - a.end_ns for a, b in pairwise(group))
        if group:
            idle += group[0].start_ns + max(0, self.end - group[-1].end_ns)
        else:
            idle = self.end
        _need(out.span_ns == self.end and busy + idle == self.end, 8, f"{out.name}: busy + idle != span")
        _need(out.busy_ns == busy, 8, f"{out.name}: busy {out.busy_ns}, slices say {busy}")
        _need(out.window_busy_ns == inside, 8, f"{out.name}: {out.window_busy_ns} in the window, not {inside}")
        _need(out.window_ns == self.end - start, 8, f"{out.name}: window of {out.window_ns}")


def _sends(lane: LaneProgram) -> list[Send]:
    return [x for s in lane.streams for sends in s.sends for x in sends or ()]
