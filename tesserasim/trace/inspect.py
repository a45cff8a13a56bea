"""The facts of a profile: how many kernels, on what, for how long. Works on profiles and on our own traces.

`busy_ns` adds the kernels' durations up, `union_ns` counts time with at least one kernel running once, and
`span_ns` goes from the first kernel's start to the last one's end; all three over kernels only, of all
devices. Where kernels of several streams overlap, busy exceeds union: idle time is span minus *union*.
"""

from __future__ import annotations

import os
from typing import Any

from tesserasim.errors import NotKernelTraceError
from tesserasim.trace.assemble import no_kernels, trace_of_profile
from tesserasim.trace.importer import load_profile
from tesserasim.trace.model import Kernel, Trace
from tesserasim.trace.parquet import read_trace
from tesserasim.trace.sniff import FileKind, sniff


def inspect_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts of the profile or Parquet trace at `path`, as `inspect --json` prints them.

    `kernels, memcpys, memsets, streams` (distinct device and stream over the three), `devices, gpu` (text;
    "?" if the profile lists a GPU without a name, None if it lists none), `busy_ns, union_ns, span_ns,
    graph_kernels, warnings`. A profile of the CPU alone has zeros and a warning.

    Raises InputError as `import_profile` does, and NotKernelTraceError for a file in which nothing at all
    was recorded.
    """
    if sniff(path) is FileKind.PARQUET:
        return facts(read_trace(path))
    profile = load_profile(path)
    if not profile.rows and not profile.host_events:
        raise NotKernelTraceError(no_kernels(os.fspath(path), profile))
    return facts(trace_of_profile(profile, os.fspath(path))[0])


def facts(trace: Trace) -> dict[str, Any]:
    """The facts of a trace in memory; keys and units as in `inspect_file`."""
    sets = [k for k in trace.kernels if k.kind == "memset"]
    copies = [k for k in trace.kernels if is_memcpy(k)]
    kernels = [k for k in trace.kernels if k.kind != "memset" and not is_memcpy(k)]
    starts = starts_ns(trace)
    intervals = [(starts[k.id], starts[k.id] + k.duration_ns) for k in kernels]
    # A captured trace is one CUDA graph; an imported one counted its graph kernels when it was imported.
    graph = trace.meta.extra.get("graph_kernels", len(kernels) if trace.meta.origin == "captured" else 0)
    return {
        "kernels": len(kernels),
        "memcpys": len(copies),
        "memsets": len(sets),
        "streams": len({(k.device, k.stream) for k in trace.kernels}),
        "devices": len({k.device for k in trace.kernels}),
        "gpu": trace.meta.gpu or None,
        "busy_ns": sum(k.duration_ns for k in kernels),
        "union_ns": union_ns(intervals),
        "span_ns": max(e for _, e in intervals) - min(s for s, _ in intervals) if intervals else 0,
        "graph_kernels": int(graph),
        "warnings": kept_warnings(trace),
    }


def kept_warnings(trace: Trace) -> list[str]:
    """The warnings in the file of a trace; a last one says how many its capture gave that the file does not hold."""
    found = list(trace.meta.warnings)
    total = trace.meta.extra.get("warnings_total")
    if isinstance(total, int) and total > len(found):
        found.append(f"{total - len(found)} of the {total} warnings of the capture are not in the trace")
    return found


def union_ns(intervals: list[tuple[int, int]]) -> int:
    """Total length covered by at least one interval (start, end)."""
    total = 0
    reach: int | None = None
    for start, end in sorted(intervals):
        if reach is None or start > reach:
            total += end - start
            reach = end
        elif end > reach:
            total += end - reach
            reach = end
    return total


def is_memcpy(kernel: Kernel) -> bool:
    """Whether a row is a copy by the driver. A kernel that copies may be of kind `copy` too, but has blocks."""
    return kernel.kind == "copy" and not any(kernel.block)


def starts_ns(trace: Trace) -> list[int]:
    """Start of each row: as profiled or, in traces without start times, from durations and gaps."""
    if any(k.start_ns for k in trace.kernels):
        return [k.start_ns for k in trace.kernels]
    ends: dict[tuple[int, int], int] = {}
    starts = []
    for k in trace.kernels:
        start = ends.get((k.device, k.stream), 0) + k.gap_ns
        starts.append(start)
        ends[k.device, k.stream] = start + k.duration_ns
    return starts
