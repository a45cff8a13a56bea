"""Which step must wait for which, when steps of several devices run at the same time.

Kernels of one device keep their program order, as on a stream; moves of one direction go one after another, as
over a link. Beyond that a step waits for what it would otherwise overtake in memory: the bytes that it reads must
have been written, and the bytes that it overwrites must have been read, whatever buffer they held before. The
allocator gives one address to many buffers, so a move into an arena may have to wait for kernels there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


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
