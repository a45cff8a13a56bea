"""Use of devices and exposed communication in a timeline, simulated or measured: one definition for both.

*Exposed communication*: the length of the holes, in which no kernel runs on any device, that meet a transfer under
way. A hole counts as a whole: the time from the end of a kernel to the start of its copy, and from the end of the copy
to the kernel that waits for it, are what the simulator's latency of a hop stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tesserasim.errors import InputError
from tesserasim.trace.importer import load_profile
from tesserasim.trace.rows import COPY, KERNEL, Row

Span = tuple[int, int]
#: Kernels that only delay the first launch of a burst.
_SPIN = "spin_kernel"


@dataclass(frozen=True)
class Use:
    """What a timeline shows of one unit, in ns."""

    busy_ns: Mapping[
        str, float
    ]  # device -> time in which a kernel runs there; "all" where devices cannot be told apart
    exposed_ns: float | None  # None: unknown
    overlap: float  # share of the time in which kernels run on more than one device


def union(spans: Sequence[Span]) -> list[Span]:
    """The same time as spans that do not touch, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def length(spans: Sequence[Span]) -> int:
    return sum(end - start for start, end in union(spans))


def clipped(spans: Sequence[Span], low: int, high: int) -> list[Span]:
    return [(max(start, low), min(end, high)) for start, end in spans if start < high and end > low]


def exposed(kernels: Sequence[Span], transfers: Sequence[Span], low: int, high: int) -> int:
    """Length of the holes between kernels in [low, high] that meet a transfer (module docstring)."""
    busy = union(clipped(kernels, low, high))
    edges = [low, *(x for span in busy for x in span), high]
    moving = union(clipped(transfers, low, high))
    total, i = 0, 0
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        while i < len(moving) and moving[i][1] <= start:
            i += 1
        if i < len(moving) and moving[i][0] < end:
            total += end - start
    return total


def used(kernels: Mapping[str, Sequence[Span]], transfers: Sequence[Span], low: int, high: int, units: float) -> Use:
    """What one of `units` units, run within [low, high], makes of its devices."""
    busy = {d: length(clipped(spans, low, high)) for d, spans in kernels.items()}
    everywhere = [s for spans in kernels.values() for s in spans]
    together = length(clipped(everywhere, low, high))
    return Use(
        {d: ns / units for d, ns in busy.items()}, exposed(everywhere, transfers, low, high) / units,
        (sum(busy.values()) - together) / max(1, high - low),
    )  # fmt: skip


def read_timeline(path: Path, nodes: int, gpu_of: Mapping[str, int], devices: Sequence[str]) -> Use:
    """What the profiler saw of a replayed plan, per unit.

    `nodes`: kernels of one unit, sets and copies apart. `devices`: those that the plan uses. InputError for a file
    that is no profile, or of other kernels.
    """
    rows = [r for r in load_profile(path).rows if _SPIN not in r.name]
    kernels = [r for r in rows if r.role == KERNEL]
    if not kernels or not nodes or len(kernels) % nodes:
        raise InputError(f"timeline of {len(kernels)} kernels, not of whole units of {nodes}")
    busy = [r for r in rows if r.role != COPY]
    low, high = min(r.start_ns for r in busy), max(r.end_ns for r in busy)
    copies = [(r.start_ns, r.end_ns) for r in rows if r.role == COPY]
    return used(_by_device(busy, gpu_of, devices), copies, low, high, len(kernels) / nodes)


def _by_device(rows: Sequence[Row], gpu_of: Mapping[str, int], devices: Sequence[str]) -> dict[str, list[Span]]:
    """Spans by device, where the profile tells devices apart: partitions of one GPU it does not."""
    name_of = {gpu_of.get(d, -1): d for d in devices}
    if len(devices) == 1:
        name_of = {r.device: devices[0] for r in rows}
    apart = len(set(name_of.values())) == len(devices) and all(r.device in name_of for r in rows)
    found: dict[str, list[Span]] = {}
    for r in rows:
        found.setdefault(name_of[r.device] if apart else "all", []).append((r.start_ns, r.end_ns))
    return found
