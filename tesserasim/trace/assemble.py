"""The trace of a profile: rows in launch order, their gaps, their sites, and what is wrong with the times.

Rows come in launch order: by start,
and where the profiler's times of one graph launch contradict themselves (rows of one stream overlap), by
graph node id or by file order. A row's gap is its start minus the end of the row before it on the same
(device, stream), negative if they overlap.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import tesserasim
from tesserasim.trace.launches import Op
from tesserasim.trace.model import Kernel, Trace, TraceMeta, structure_sha256
from tesserasim.trace.names import kernel_kind, short_name
from tesserasim.trace.rows import COPY, KERNEL, SET, Profile, Row
from tesserasim.trace.shapes import Work
from tesserasim.trace.sniff import FileKind
from tesserasim.trace.values import counted, text_of

#: A kernel that outlasts the distance to its successor this many times over is a profiler error.
_RUNAWAY = 100
_DAY_NS = 24 * 3600 * 10**9


def no_kernels(where: str, profile: Profile) -> str:
    """The one line for a profile without GPU rows: what it lacks and, as far as known, why."""
    if profile.nothing:
        why = "; ".join([profile.nothing, *profile.drops])
    elif profile.dropped:
        why = "; ".join(profile.drops)
    elif not profile.bare_array and "traceEvents" not in profile.keys:
        shown = ", ".join(repr(key[:30]) for key in profile.keys[:5])
        why = f"{FileKind.JSON.value} (top-level names: {shown or 'none'})"
    elif profile.host_events:
        why = "only CPU events; record with ProfilerActivity.CUDA, and check that CUPTI could attach"
    else:
        why = "no complete events (ph X) at all"
    return f"no GPU kernels in {where}: {why}"


def trace_of_profile(profile: Profile, where: str, clip: bool = False) -> tuple[Trace, list[Row]]:
    """The trace of the rows of `profile` (possibly none), and these rows in launch order.

    `where` is the file's name.
    """
    streams = _by_stream(profile.rows)
    warnings = [*profile.notes, *profile.drops, *_time_warnings(profile.rows, streams)]
    if clip:
        clipped = _clip(streams)
        warnings.append(f"clipped {counted(clipped, 'duration')} to the next start on the stream")
    rows = _launch_order(profile.rows, streams)
    first = min((row.start_ns for row in rows), default=0)
    if rows and not any(row.role == KERNEL for row in rows):
        warnings.append(f"no GPU kernels in {Path(where).name}, only copies and sets")
    if not rows:
        warnings.append(no_kernels(Path(where).name, profile))
    if profile.gpu == "?":
        warnings.append("the profile lists its GPUs without a name")
    kernels = _kernels(rows, first)
    meta = TraceMeta(
        origin="imported",
        model="unknown",
        unit={"name": _stem(where), "phase": "other"},
        gpu=profile.gpu or "",
        driver=_version(profile.header, "driver"),
        repeats=1,
        structure_sha256=structure_sha256(kernels),
        tool_version=tesserasim.__version__,
        source=Path(where).name,
        warnings=tuple(warnings),
        extra={**graph_facts([row.graph for row in rows]), "first_event_ns": first},
    )
    return Trace(meta, kernels), rows


def graph_facts(from_graph: Sequence[bool]) -> dict[str, Any]:
    """For `meta.extra`: how many rows CUDA graphs launched, and [1 or 0, rows] for every stretch of launch order."""
    runs = [[int(graph), len(list(group))] for graph, group in groupby(from_graph)]
    return {"graph_kernels": sum(from_graph), "graph_runs": runs}


def from_graph(extra: Mapping[str, Any]) -> list[bool]:
    """For each row in launch order whether a graph launched it, from what `graph_facts` made."""
    return [bool(graph) for graph, length in extra["graph_runs"] for _ in range(length)]


def _by_stream(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of each (device, stream) by start time; equal starts by graph node id, then file order."""
    streams: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in rows:
        streams[row.device, row.stream].append(row)
    for group in streams.values():
        group.sort(key=_time_key)
    return list(streams.values())


def _time_key(row: Row) -> tuple[int, int, int]:
    return row.start_ns, row.node or 0, row.index


def _time_warnings(rows: list[Row], streams: list[list[Row]]) -> list[str]:
    """Say where the times of the profile cannot be what happened."""
    overlaps = runaways = excess = 0
    for group in streams:
        end = None
        for row in group:
            overlaps += end is not None and row.start_ns < end
            end = max(end, row.end_ns) if end is not None else row.end_ns
        for row, successor in pairwise(group):
            distance = successor.start_ns - row.start_ns
            if row.duration_ns > _RUNAWAY * max(distance, 1000):
                runaways += 1
                excess += row.duration_ns - distance
    warnings = []
    if overlaps:
        warnings.append(
            f"{counted(overlaps, 'row')} starting before an earlier one on the same stream ends"
            " (programmatic launch, or wrong times of graph kernels)"
        )
    if runaways:
        warnings.append(
            f"{counted(runaways, 'duration')} more than {_RUNAWAY} times as long as the way to the next start on"
            f" the stream: about {excess} ns of busy time are not real; importing with clip removes them"
        )
    if rows and max(row.end_ns for row in rows) - min(row.start_ns for row in rows) > _DAY_NS:
        warnings.append("the rows lie more than a day apart: the profile seems to mix two clocks")
    return warnings


def _clip(streams: list[list[Row]]) -> int:
    clipped = 0
    for group in streams:
        for row, successor in pairwise(group):
            if row.end_ns > successor.start_ns:
                row.duration_ns = successor.start_ns - row.start_ns
                clipped += 1
    return clipped


def _launch_order(rows: list[Row], streams: list[list[Row]]) -> list[Row]:
    """All rows by start, with the overlapping rows of a graph launch put back in launch order."""
    order = sorted(rows, key=_time_key)
    place = {row.index: i for i, row in enumerate(order)}
    for group in streams:
        for run in _overlapping_graph_rows(group):
            places = sorted(place[row.index] for row in run)
            by_node = all(row.node is not None for row in run)
            run.sort(key=lambda row: (row.node or 0, row.index) if by_node else (0, row.index))
            for i, row in zip(places, run, strict=True):
                order[i] = row
    return order


def _overlapping_graph_rows(group: list[Row]) -> list[list[Row]]:
    """Runs of rows of one graph launch on one stream that overlap in time.

    Their order by time is worth nothing. Their order by node id or in the file is taken only if it agrees
    with time for all other rows of the launch; some exporters write rows in no order at all.
    """
    launches: dict[int, list[Row]] = defaultdict(list)
    for row in group:
        if row.graph and row.correlation is not None:
            launches[row.correlation].append(row)
    found: list[list[Row]] = []
    for launch in launches.values():
        runs: list[list[Row]] = []
        end = None
        for row in launch:
            if end is not None and row.start_ns < end:
                runs[-1].append(row)
                end = max(end, row.end_ns)
            else:
                runs.append([row])
                end = row.end_ns
        by_node = all(row.node is not None for row in launch)
        keys = [[(row.node or 0) if by_node else row.index for row in run] for run in runs]
        if all(max(a) < min(b) for a, b in pairwise(keys)):
            found.extend(run for run in runs if len(run) > 1)
    return found


def _one_line(name: str) -> str:
    """A name that a site can carry: what does not print (a line break inside a kernel's name) becomes a space."""
    return name if name.isprintable() else "".join(c if c.isprintable() else " " for c in name)


def _kernels(rows: list[Row], first: int) -> tuple[Kernel, ...]:
    workers = _workers(rows)
    calls: dict[tuple[str, object], int] = {}  # (operator, its call) → ordinal
    ordinals: Counter[str] = Counter()
    ends: dict[tuple[int, int], int] = {}
    kernels = []
    for i, row in enumerate(rows):
        op = _one_line(row.op.name if row.op is not None else _own_op(row))
        call = (op, (row.op.start_ns, row.op.end_ns) if row.op is not None else row.index)
        if call not in calls:
            calls[call] = ordinals[op]
            ordinals[op] += 1
        key = (row.device, row.stream)
        work = workers.get(i)
        read, written = (work.read_bytes, work.write_bytes) if work is not None else _moved(row)
        kernels.append(
            Kernel(
                id=i, name=row.name, site=f"{op}#{calls[call]}", op=op, kind=_kind(row, work),
                stream=row.stream, device=row.device, grid=row.grid, block=row.block, cluster=row.cluster,
                shape=dict(work.shape) if work is not None else {}, flops=work.flops if work is not None else 0,
                act_dtype=work.act_dtype if work is not None else "",
                weight_dtype=work.weight_dtype if work is not None else "",
                shared_bytes=row.shared_bytes, registers=row.registers,
                read_bytes=read, write_bytes=written,
                duration_ns=row.duration_ns, duration_p10_ns=row.duration_ns, duration_p90_ns=row.duration_ns,
                gap_ns=row.start_ns - ends.get(key, row.start_ns), start_ns=row.start_ns - first,
            )
        )  # fmt: skip
        ends[key] = row.end_ns
    return tuple(kernels)


def _kind(row: Row, work: Work | None) -> str:
    """By name; where the name tells nothing, by the operator whose work the kernel does."""
    if row.role != KERNEL:
        return row.role
    kind = kernel_kind(row.name)
    return work.kinds[0] if kind == "other" and work is not None else kind


def _workers(rows: list[Row]) -> dict[int, Work]:
    """For each operator call with recorded work the kernel that does it: place in `rows` → work.

    One call may launch several kernels (split-K GEMM and its reduce). The work goes to one of the kind that
    the operator is known for, else to any; of several to the longest that is not called a reduce.
    """
    of_call: dict[Op, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.role == KERNEL and row.op is not None and row.op.work is not None:
            of_call[row.op._replace(work=None)].append(i)
    found = {}
    for places in of_call.values():
        op = rows[places[0]].op
        if op is None or op.work is None:
            continue
        kinds = op.work.kinds
        fitting = [i for i in places if kernel_kind(rows[i].name) in kinds] or places
        found[max(fitting, key=lambda i: ("reduce" not in rows[i].name.lower(), rows[i].duration_ns))] = op.work
    return found


def _own_op(row: Row) -> str:
    """The operator's stand-in where the launch is unknown."""
    return {COPY: "memcpy", SET: "memset"}.get(row.role) or short_name(row.name)


def _moved(row: Row) -> tuple[int, int]:
    """Bytes of this GPU's memory that a copy or a set reads and writes."""
    if row.role == KERNEL:
        return 0, 0
    if row.role == SET:
        return 0, row.nbytes
    name = row.name.lower().replace("-", "")
    reads = 0 if "htod" in name or "hosttodevice" in name else row.nbytes
    writes = 0 if "dtoh" in name or "devicetohost" in name else row.nbytes
    return reads, writes


def _stem(where: str) -> str:
    name = Path(where).name
    for suffix in (".gz", ".json", ".sqlite", ".csv", ".trace", ".pt"):
        name = name.removesuffix(suffix)
    return name or "profile"


def _version(header: dict[str, Any], what: str) -> str:
    for vendor in ("cuda", "hip"):
        value = header.get(f"{vendor}_{what}_version")
        if type(value) in (int, str):
            return text_of(f"{vendor.upper()} {value}"[:80])
    return ""
