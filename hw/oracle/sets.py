"""The declared read and write sets of one kernel, as address ranges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hw.oracle.spans import Span, Spans, merge
from tesserasim.deps.graph import CARRIED, needs_old_bytes
from tesserasim.trace.model import Access, Buffer


@dataclass(frozen=True)
class Write:
    """Where one access may write."""

    access: int  # position among the kernel's accesses
    span: Span
    limit: int | None  # bytes at most; None: all of the span
    kept: bool  # the old bytes stay true during the poisoned runs, so only changes are seen
    covers: bool  # declared to replace every byte
    scratch: bool  # workspace


@dataclass(frozen=True)
class Read:
    """What one access reads, and what its elements are ("" if nobody knows)."""

    access: int
    span: Span
    dtype: str


@dataclass(frozen=True)
class Declared:
    kept: Spans  # the read set: reads, and writes that do not replace all they could
    writes: tuple[Write, ...]
    reads: tuple[Read, ...]

    @property
    def allowed(self) -> Spans:
        return merge(w.span for w in self.writes)

    @property
    def scratch(self) -> Spans:
        return merge(w.span for w in self.writes if w.scratch)


def declared(
    accesses: Sequence[Access], buffers: Sequence[Buffer], base: Callable[[int], int], dtype: Callable[[int], str]
) -> Declared:
    """Sets of a kernel. `base`: address of a buffer; `dtype`: of the elements of an access, by its position."""
    kept: list[Span] = []
    writes: list[Write] = []
    reads: list[Read] = []
    for i, a in enumerate(accesses):
        b = buffers[a.buffer]
        whole = (base(b.id), base(b.id) + b.nbytes)
        span = whole if a.extent == "unknown" else (whole[0] + a.offset, whole[0] + a.offset + a.nbytes)
        old = needs_old_bytes(a, b)
        if old:
            kept.append(span)
        if a.reads:
            reads.append(Read(i, span, dtype(i)))
        if a.writes:
            # A delta to a carried buffer: how much is exact, where is not said.
            delta = b.role in CARRIED and a.mode == "W" and a.extent == "exact" and not a.covers
            place, limit = (whole, a.nbytes) if delta else (span, None)
            writes.append(Write(i, place, limit, False, a.covers, b.role == "workspace"))
    spans = merge(kept)
    inside = [any(s[0] < w.span[1] and w.span[0] < s[1] for s in spans) for w in writes]
    writes = [Write(w.access, w.span, w.limit, k, w.covers, w.scratch) for w, k in zip(writes, inside, strict=True)]
    return Declared(spans, tuple(writes), tuple(reads))
