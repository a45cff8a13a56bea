"""What is on its way in the reference engine: cohorts, their streams, the devices and links that carry them."""

from __future__ import annotations

from collections import deque

from simpy import Environment, Event

from tesserasim.sim import order
from tesserasim.sim.program import Channel, Send, StreamProgram
from tesserasim.sim.result import Slice

NEVER = -1


class Cohort:
    """One cohort on its way: which tokens have arrived, and what has still to end before its slot is free."""

    __slots__ = ("arrived", "lane", "number", "rank", "slot", "streams", "streams_left", "transfers_left")

    def __init__(self, lane: int, slot: int, number: int, rank: int, tokens: int) -> None:
        self.lane, self.slot, self.number = lane, slot, number
        self.rank = rank  # order of entry over all lanes
        self.arrived = bytearray(tokens)
        self.streams: dict[int, Stream] = {}
        self.streams_left = 0
        self.transfers_left = 0


class Stream:
    """A cohort's kernels on one device; `at` is the head, which waits for `missing` tokens."""

    __slots__ = ("at", "cohort", "missing", "previous_end", "program", "ready_at", "tie", "urgency")

    def __init__(self, cohort: Cohort, program: StreamProgram, urgency: int) -> None:
        self.cohort, self.program, self.urgency = cohort, program, urgency
        self.tie = order.cohort_part(cohort.rank)
        self.at = 0
        self.missing = 0
        self.ready_at = 0
        self.previous_end = NEVER  # a cohort's first kernel follows nothing


class Device:
    """A serial device: `ready` heads by urgency, `later` heads by the time their delay is over."""

    __slots__ = ("busy", "end", "kernels", "later", "ready", "running", "started", "wake_at")

    def __init__(self, env: Environment) -> None:
        self.end = Event(env)  # used again for every kernel: at most one is running
        self.end._ok, self.end._value = True, self
        self.ready: list[tuple[int, Stream]] = []
        self.later: list[tuple[int, int, Stream]] = []
        self.running: Stream | None = None
        self.started = 0
        self.wake_at = NEVER
        self.busy = 0
        self.kernels = 0

    def busy_at(self, now: int) -> int:
        """Busy time up to now, what is under way included."""
        return self.busy + (now - self.started if self.running is not None else 0)


class Engine:
    """A copy engine: what it has to carry, in order, and what of that is there already."""

    __slots__ = ("busy", "queue", "waiting")

    def __init__(self) -> None:
        self.queue: deque[tuple[int, int]] = deque()  # rank of the cohort, token
        self.waiting: dict[tuple[int, int], tuple[Link, tuple[Stream, int, Send]]] = {}
        self.busy = False


class Link:
    """One direction of a link: the transfer that occupies it and those behind."""

    __slots__ = ("busy", "carrying", "channel", "end", "engine", "index", "nbytes", "queue", "started", "transfers")

    def __init__(self, env: Environment, channel: Channel, index: int, engine: Engine | None = None) -> None:
        self.channel, self.index, self.engine = channel, index, engine
        self.end = Event(env)
        self.end._ok, self.end._value = True, self
        self.queue: deque[tuple[Stream, int, Send]] = deque()
        self.carrying: tuple[Stream, int, Send] | None = None
        self.started = 0
        self.busy = 0
        self.nbytes = 0
        self.transfers = 0

    def busy_at(self, now: int) -> int:
        """Busy time up to now, what is under way included."""
        return self.busy + (now - self.started if self.carrying is not None else 0)


def kernel_slice(stream: Stream, start: int, end: int) -> Slice:
    c, p, i = stream.cohort, stream.program, stream.at
    label = p.labels[i] if p.labels else ""
    return Slice(
        start, end, "kernel", p.device, c.lane, c.slot, c.number, p.device, i, p.order[i], label=label
    )  # fmt: skip


def transfer_slice(stream: Stream, i: int, send: Send, link: Link, start: int, end: int, arrival: int) -> Slice:
    c, p = stream.cohort, stream.program
    label = p.labels[i] if p.labels else ""
    return Slice(
        start, end, "transfer", link.index, c.lane, c.slot, c.number, p.device, i, p.order[i],
        send.token, send.nbytes, arrival, label,
    )  # fmt: skip
