"""Which step must wait for which, when steps of several devices run at the same time.

Kernels of one device keep their program order, as on a stream; moves of one direction go one after another, as
over a link. Beyond that a step waits for what it would otherwise overtake in memory: the bytes that it reads must
have been written, and the bytes that it overwrites must have been read, whatever buffer they held before. The
allocator gives one address to many buffers, so a move into an arena may have to wait for kernels there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hw.replay.cut import Launch, Move, Step
from tesserasim.trace.model import Trace


@dataclass(frozen=True, slots=True)
class Touch:
    """Bytes [start, end) of the address space."""

    start: int
    end: int
    write: bool


@dataclass(slots=True)
class _Span:
    start: int
    end: int
    writer: int = -1
    readers: list[int] = field(default_factory=list)


class _Memory:
    """Last writer and later readers of every byte that was touched."""

    def __init__(self) -> None:
        self.spans: list[_Span] = []

    def over(self, start: int, end: int) -> list[_Span]:
        """Spans that make up [start, end), cut and filled so that they cover it exactly."""
        if end <= start:
            return []
        i = bisect_left(self.spans, start, key=lambda s: s.end)
        if i < len(self.spans) and self.spans[i].end == start:
            i += 1
        found: list[_Span] = []
        at = start
        while at < end:
            if i == len(self.spans) or self.spans[i].start >= end:
                new = _Span(at, end)
            elif self.spans[i].start > at:
                new = _Span(at, self.spans[i].start)
            else:
                old = self.spans[i]
                if old.start < at:
                    self.spans.insert(i, _Span(old.start, at, old.writer, list(old.readers)))
                    old.start = at
                    i += 1
                if old.end > end:
                    self.spans.insert(i + 1, _Span(end, old.end, old.writer, list(old.readers)))
                    old.end = end
                found.append(old)
                at, i = old.end, i + 1
                continue
            self.spans.insert(i, new)
            found.append(new)
            at, i = new.end, i + 1
        return found


def waits(chains: Sequence[Hashable], touches: Sequence[Sequence[Touch]]) -> list[list[int]]:
    """Per step the earlier steps that it waits for, ascending; none that another of them waits for on its own chain.

    `chains[i]`: the stream or link direction of step i, whose steps run in order; `touches[i]`: what it reads and
    writes.
    """
    memory = _Memory()
    last: dict[Hashable, int] = {}
    out: list[list[int]] = []
    for i, (chain, touched) in enumerate(zip(chains, touches, strict=True)):
        found: set[int] = set()
        for t in touched:
            for s in memory.over(t.start, t.end):
                found.add(s.writer)
                if t.write:
                    found.update(s.readers)
        for t in touched:
            for s in memory.over(t.start, t.end):
                if t.write:
                    s.writer, s.readers = i, []
                elif s.writer != i:
                    s.readers.append(i)
        if chain in last:
            found.add(last[chain])
        newest: dict[Hashable, int] = {}
        for j in found - {-1, i}:
            newest[chains[j]] = max(j, newest.get(chains[j], -1))
        out.append(sorted(newest.values()))
        last[chain] = i
    return out


class Place(Protocol):
    """What ordering must know of an arena: the unit in it, and where its buffers lie."""

    @property
    def trace(self) -> Trace: ...

    def address(self, buffer: int) -> int: ...


def touches(step: Step, arenas: Mapping[str, Place]) -> list[Touch]:
    """Addresses that a step reads and writes; weights are left out, since nobody writes them."""
    if isinstance(step, Move):
        found = []
        for device, write in ((step.source, False), (step.target, True)):
            at = arenas[device].address(step.buffer)
            whole = arenas[device].trace.buffers[step.buffer].nbytes
            first, end = (0, whole) if step.delta else (step.start, step.end)
            found.append(Touch(at + first, at + end, write))
        return found
    arena = arenas[step.device]
    found = []
    for a in arena.trace.kernels[step.kernel].accesses:
        b = arena.trace.buffers[a.buffer]
        if b.role == "weight":
            continue
        at = arena.address(a.buffer)
        # Where the rows of a growing state lie is not in the access: the whole of it counts.
        whole = a.extent == "unknown" or b.role == "state" or b.role == "workspace"
        first, end = (0, b.nbytes) if whole else (a.offset, a.offset + a.nbytes)
        if a.reads:
            found.append(Touch(at + first, at + end, False))
        if a.writes:
            found.append(Touch(at + first, at + end, True))
    return found


def order(steps: Sequence[Step], arenas: Mapping[str, Place]) -> list[list[int]]:
    """Per step the earlier steps that it waits for."""
    chains = [s.device if isinstance(s, Launch) else (s.source, s.target) for s in steps]
    needs = waits(chains, [touches(s, arenas) for s in steps])
    # A launch waits for the moves that bring what it reads, also where their bytes lie elsewhere than it names.
    coming: dict[tuple[int, str], list[int]] = {}
    for i, s in enumerate(steps):
        if isinstance(s, Move):
            coming.setdefault((s.before, s.target), []).append(i)
        else:
            needs[i] = sorted({*needs[i], *coming.get((s.kernel, s.device), ())})
    return needs


def implied(needs: Sequence[Sequence[int]], reader: int, writer: int, gone: Collection[int]) -> bool:
    """Whether step `reader` still comes after `writer` if it does not wait for the steps `gone` itself."""
    seen: set[int] = set()
    todo = [j for j in needs[reader] if j not in gone]
    while todo:
        j = todo.pop()
        if j == writer:
            return True
        if j > writer and j not in seen:  # waits go back in the program only
            seen.add(j)
            todo += needs[j]
    return False
