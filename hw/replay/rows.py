"""Where the rows that a step appends to a growing state lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hw.errors import HardwareError


@dataclass(frozen=True, slots=True)
class Row:
    """`count` runs of `nbytes`, `pitch` bytes apart, the first at `offset`."""

    offset: int
    nbytes: int
    count: int
    pitch: int


Rows = tuple[Row, ...]


def appended(shape: Sequence[int], strides: Sequence[int], itemsize: int, tokens: int, context: int) -> Rows:
    """Rows of the last `tokens` of `context` positions of a cache. Shape and strides in elements.

    HardwareError unless exactly one axis has the length of the context.
    """
    axes = [i for i, n in enumerate(shape) if n == context]
    if len(axes) > 1:  # the positions have the longest stride but batch and heads; ambiguous sizes are not guessed
        raise HardwareError(f"a cache of shape {tuple(shape)}: which axis counts {context} positions?")
    if not axes:
        raise HardwareError(f"a cache of shape {tuple(shape)} has no axis of {context} positions")
    first = (context - tokens) * strides[axes[0]] * itemsize
    kept = [(tokens if i == axes[0] else n, s) for i, (n, s) in enumerate(zip(shape, strides, strict=True))]
    # Axes of one element do not matter; from the innermost out, runs that touch are one run.
    axes_left = sorted(((s, n) for n, s in kept if n > 1), reverse=True)
    run = 1
    while axes_left and axes_left[-1][0] == run:
        run *= axes_left.pop()[1]
    if not axes_left:
        return (Row(first, run * itemsize, 1, run * itemsize),)
    pitch, count = axes_left.pop()
    while axes_left and axes_left[-1][0] == pitch * count:
        count *= axes_left.pop()[1]
    offsets = [0]
    for stride, n in axes_left:
        offsets = [o + i * stride for o in offsets for i in range(n)]
    return tuple(Row(first + o * itemsize, run * itemsize, count, pitch * itemsize) for o in sorted(offsets))
