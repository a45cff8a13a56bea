"""Sets of bytes as sorted, disjoint (first, end) pairs of addresses."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[int, int]
Spans = list[Span]


def merge(spans: Iterable[Span]) -> Spans:
    """Sorted and disjoint; spans that touch become one."""
    out: Spans = []
    for first, end in sorted(s for s in spans if s[1] > s[0]):
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((first, end))
    return out


def clip(spans: Spans, first: int, end: int) -> Spans:
    """The part of `spans` inside [first, end)."""
    return [(max(a, first), min(b, end)) for a, b in spans if a < end and b > first]


def gaps(spans: Spans, first: int, end: int) -> Spans:
    """The part of [first, end) outside `spans`."""
    out: Spans = []
    for a, b in clip(spans, first, end):
        if a > first:
            out.append((first, a))
        first = b
    if first < end:
        out.append((first, end))
    return out


def total(spans: Iterable[Span]) -> int:
    return sum(b - a for a, b in spans)
