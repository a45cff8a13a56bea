"""What a placement makes of a unit: every kernel on its device, and the bytes that move between devices.

A device holds its own copy of every buffer (its *arena*). Weights are everywhere and never move. Of every other
byte the newest version counts: it lies where the kernel that wrote it ran, and goes to another device once, before
the first kernel there that needs it. Content that the unit did not write lies wherever it is read.

State that grows (a KV cache) moves as what was written: a write of exactly known extent that does not cover its
buffer is a *delta*. The trace knows its size, not where in the buffer its rows lie; whoever runs the moves does.

This is a second derivation of what `tesserasim.lower` derives for the simulator, from the same accesses: there by
values and their readers, here by what each device holds. Both must send the same bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tesserasim.deps.graph import CARRIED, needs_old_bytes
from tesserasim.errors import InputError
from tesserasim.trace.model import Access, Trace

BEFORE = -1  # a version that was there before the unit
NEXT = -1  # needed by the next launch of the unit


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel on its device."""

    kernel: int
    device: str


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes [start, end) of a buffer from one arena to another."""

    buffer: int
    start: int
    end: int
    source: str
    target: str
    after: int  # kernel that wrote them
    before: int  # first kernel on `target` that needs them; NEXT: of the next launch
    delta: bool = False  # rows of a growing state: `end - start` bytes somewhere in the buffer

    @property
    def nbytes(self) -> int:
        return self.end - self.start


Step = Launch | Move


@dataclass(slots=True)
class _Piece:
    """A byte range with one version, and the devices that hold it."""

    start: int
    end: int
    writer: int
    holders: set[str]


@dataclass(slots=True)
class _Content:
    """Newest versions of one buffer: disjoint pieces in order, and the deltas since the last whole write."""

    pieces: list[_Piece] = field(default_factory=list)
    deltas: list[_Piece] = field(default_factory=list)

    def within(self, start: int, end: int) -> Iterator[_Piece]:
        """The pieces inside [start, end), cut at both ends."""
        cut: list[_Piece] = []
        for p in self.pieces:
            marks = [p.start, *(m for m in (start, end) if p.start < m < p.end), p.end]
            cut += [_Piece(a, b, p.writer, set(p.holders)) for a, b in itertools.pairwise(marks)]
        self.pieces = cut
        return (p for p in self.pieces if start <= p.start and p.end <= end)

    def write(self, start: int, end: int, kernel: int, device: str) -> None:
        inside = {id(p) for p in self.within(start, end)}
        kept = [p for p in self.pieces if id(p) not in inside]
        self.pieces = sorted([*kept, _Piece(start, end, kernel, {device})], key=lambda p: p.start)


class _Cut:
    def __init__(self, trace: Trace, device_of: Sequence[str]) -> None:
        self.trace, self.device_of = trace, device_of
        self.content: dict[int, _Content] = {}
        self.steps: list[Step] = []

    def run(self, carry: bool) -> list[Step]:
        for k, device in zip(self.trace.kernels, self.device_of, strict=True):
            reads = [a for a in k.accesses if needs_old_bytes(a, self.trace.buffers[a.buffer])]
            for a in reads:
                self._read(a, k.id, device)
            self.steps.append(Launch(k.id, device))
            for a in k.accesses:
                if a.writes and self.trace.buffers[a.buffer].role != "weight":
                    self._write(a, k.id, device)
        if carry:
            self._carry()
        return self.steps

    def _extent(self, a: Access) -> tuple[int, int]:
        b = self.trace.buffers[a.buffer]
        if a.extent == "unknown":
            return 0, b.nbytes
        return a.offset, min(a.offset + a.nbytes, max(b.nbytes, a.offset))

    def _read(self, a: Access, kernel: int, device: str) -> None:
        b = self.trace.buffers[a.buffer]
        content = self.content.get(b.id)
        if content is None or b.role == "weight":
            return
        whole = b.role in CARRIED  # a log is read as a whole
        for p in content.within(*((0, b.nbytes) if whole else self._extent(a))):
            self._send(b.id, p, device, kernel)
        for p in content.deltas:
            self._send(b.id, p, device, kernel, delta=True)

    def _send(self, buffer: int, p: _Piece, device: str, kernel: int, delta: bool = False) -> None:
        if device in p.holders:
            return
        source = self.device_of[p.writer]
        last = self.steps[-1] if self.steps else None
        p.holders.add(device)
        if (
            isinstance(last, Move) and not delta and not last.delta and last.buffer == buffer and last.end == p.start
            and (last.source, last.target, last.after, last.before) == (source, device, p.writer, kernel)
        ):  # fmt: skip
            self.steps[-1] = Move(buffer, last.start, p.end, source, device, p.writer, kernel)
            return
        self.steps.append(Move(buffer, p.start, p.end, source, device, p.writer, kernel, delta))

    def _write(self, a: Access, kernel: int, device: str) -> None:
        b = self.trace.buffers[a.buffer]
        content = self.content.setdefault(b.id, _Content())
        start, end = self._extent(a)
        if end <= start:
            return
        if b.role not in CARRIED:
            content.write(start, end, kernel, device)
        elif a.covers and start == 0 and end == b.nbytes:
            content.pieces, content.deltas = [_Piece(0, b.nbytes, kernel, {device})], []
        elif needs_old_bytes(a, b):
            content.write(start, end, kernel, device)
        else:
            content.deltas.append(_Piece(start, end, kernel, {device}))

    def _carry(self) -> None:
        """What the next launch of the unit reads elsewhere than where this one left it."""
        written: set[int] = set()
        seen: set[tuple[int, str]] = set()
        for k, device in zip(self.trace.kernels, self.device_of, strict=True):
            for a in k.accesses:
                b = self.trace.buffers[a.buffer]
                if b.role not in CARRIED or b.id in written or (b.id, device) in seen:
                    continue
                if needs_old_bytes(a, b) and b.id in self.content:
                    seen.add((b.id, device))
                    for p in self.content[b.id].pieces:
                        self._send(b.id, p, device, NEXT)
                    for p in self.content[b.id].deltas:
                        self._send(b.id, p, device, NEXT, delta=True)
            written |= {
                a.buffer for a in k.accesses if a.writes and a.covers and self.trace.buffers[a.buffer].role in CARRIED
            }


def cut(trace: Trace, device_of: Sequence[str], carry: bool = False) -> list[Step]:
    """The launches of `trace` in program order, kernel i on `device_of[i]`, each behind the moves that it needs.

    Run one after another the steps are right; run at the same time, a move needs its writer, and a launch the moves
    before it that lead to its device. `carry`: also move what the next launch of the same unit reads.
    InputError if there is no device for every kernel.
    """
    if len(device_of) != len(trace.kernels):
        raise InputError(f"{len(trace.kernels)} kernels, but devices for {len(device_of)}")
    return _Cut(trace, device_of).run(carry)


@dataclass(frozen=True, slots=True)
class Remains:
    """Bytes that a unit leaves behind for others, and the device that wrote them."""

    buffer: int
    start: int
    end: int
    device: str
    delta: bool = False


def remains(trace: Trace, device_of: Sequence[str]) -> list[Remains]:
    """What a unit has made when it ends: written state, inputs and outputs, and values that nothing in it reads and
    whose place nothing has taken since."""
    done = _Cut(trace, device_of)
    done.run(carry=False)
    read = {a.buffer: k.id for k in trace.kernels for a in k.accesses if needs_old_bytes(a, trace.buffers[a.buffer])}
    found = []
    for i, content in sorted(done.content.items()):
        b = trace.buffers[i]
        for delta, pieces in ((False, content.pieces), (True, content.deltas)):
            kept = [
                p for p in pieces
                if b.role in CARRIED
                or (b.role == "activation" and read.get(i, -1) < p.writer and not _overwritten(trace, i, p))
            ]  # fmt: skip
            found += [Remains(i, p.start, p.end, device_of[p.writer], delta) for p in kept]
    return found


def _overwritten(trace: Trace, buffer: int, p: _Piece) -> bool:
    """Whether a later kernel writes another buffer to the place of a piece: the allocator has given it out again."""
    b = trace.buffers[buffer]
    start, end = b.storage_offset + p.start, b.storage_offset + p.end
    for k in trace.kernels[p.writer + 1 :]:
        for a in k.accesses:
            c = trace.buffers[a.buffer]
            other = a.writes and a.buffer != buffer and c.storage == b.storage
            if other and c.storage_offset < end and start < c.storage_offset + c.nbytes:
                return True
    return False


def brought(trace: Trace, device_of: Sequence[str]) -> set[tuple[int, str]]:
    """(buffer, device) of state and inputs whose content from before the unit is read on that device."""
    found: set[tuple[int, str]] = set()
    replaced: set[int] = set()
    for k, device in zip(trace.kernels, device_of, strict=True):
        for a in k.accesses:
            b = trace.buffers[a.buffer]
            if b.role in CARRIED and b.id not in replaced and needs_old_bytes(a, b):
                found.add((b.id, device))
        replaced |= {
            a.buffer for a in k.accesses
            if a.writes and a.covers and a.offset == 0 and a.nbytes == trace.buffers[a.buffer].nbytes
        }  # fmt: skip
    return found
