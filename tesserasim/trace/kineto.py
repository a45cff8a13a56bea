"""Reader of Kineto profiles (what torch.profiler exports): JSON or JSON.gz → `Profile`.

A *row* is one complete event (`ph` X) of a GPU category. Host events are looked at only for linking;
synchronisation records and annotations, which sit on GPU tracks too, are no work and are left out. All
times are integers of nanoseconds, parsed from the decimal text.
"""

from __future__ import annotations

import os
import re
from typing import Any

from tesserasim.trace import source
from tesserasim.trace.jsontext import EventStream
from tesserasim.trace.launches import Annotation, Op, process_of
from tesserasim.trace.rows import COPY, KERNEL, SET, Numbers, Profile, Row
from tesserasim.trace.shapes import recorded
from tesserasim.trace.values import (
    DURATION_LIMIT,
    TIME_LIMIT,
    count,
    counted,
    integer,
    label,
    ns_of_us,
    text_of,
    triple,
)

CALL, OP, NOTE, HOST = "call", "op", "note", "host"

#: Category (lower case) → role. 2021 profiles write Kernel, Memcpy, Memset, Runtime, Operator.
_ROLES = {
    "kernel": KERNEL, "gpu_memcpy": COPY, "memcpy": COPY, "gpu_memset": SET, "memset": SET,
    "cuda_runtime": CALL, "cuda_driver": CALL, "hip_runtime": CALL, "runtime": CALL, "driver": CALL,
    "cpu_op": OP, "operator": OP, "user_annotation": NOTE, "gpu_user_annotation": NOTE,
}  # fmt: skip
#: Synchronisation records that some versions file under "kernel".
_SYNC = re.compile(r"(stream|event|context|device)\s(sync\w*|wait\s?event|wait)", re.IGNORECASE)
#: A row at time 0 this far (ns) before the rest carries no time: the exporter never filled it in.
_HOUR_NS = 3600 * 10**9
_HEADER = (
    "deviceProperties", "schemaVersion", "cuda_runtime_version", "cuda_driver_version", "cupti_version",
    "hip_runtime_version", "hip_driver_version", "roctracer_version", "displayTimeUnit", "baseTimeNanoseconds",
)  # fmt: skip


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read the JSON or JSON.gz at `path`. Raises InputError (file, line, column) if it is no such file."""
    where = os.fspath(path)
    profile = Profile()
    stream = EventStream(where, source.pieces(path), keep=_HEADER)
    devices, streams = Numbers(), Numbers()
    latest = odd = negative_occupancy = 0
    for index, event in enumerate(stream):
        if not isinstance(event, dict):
            odd += 1
            continue
        if event.get("ph") != "X":
            continue
        category = event.get("cat")
        role = _ROLES.get(category.lower(), HOST) if isinstance(category, str) else HOST
        if role in (KERNEL, COPY, SET):
            row = _row(profile, role, event, index, devices, streams)
            if row is not None:
                profile.rows.append(row)
                latest = max(latest, row.start_ns)
            negative_occupancy += _negative_occupancy(event)
            continue
        profile.host_events += 1
        if role != HOST:
            latest = max(latest, _host_event(profile, role, event))
    profile.header, profile.keys, profile.bare_array = stream.header, stream.keys, stream.bare_array
    _drop_unset_times(profile, latest)
    _note(profile, stream, odd, negative_occupancy)
    profile.gpu = _gpu(stream.header.get("deviceProperties"), {row.device for row in profile.rows})
    profile.link()
    return profile


def _row(
    profile: Profile, role: str, event: dict[str, Any], index: int, devices: Numbers, streams: Numbers
) -> Row | None:
    """The row of one GPU event, or None (counted) if it has no usable time."""
    name = text_of(event.get("name")) or "(unnamed)"
    if role == KERNEL and _SYNC.fullmatch(name):
        return None
    start, duration = ns_of_us(event.get("ts")), ns_of_us(event.get("dur"))
    if start is None or duration is None:
        profile.dropped["without a start or a duration"] += 1
        return None
    if not (0 <= duration < DURATION_LIMIT and -DURATION_LIMIT < start < TIME_LIMIT):
        profile.dropped["with a negative or impossible time"] += 1
        return None
    given = event.get("args")
    args: dict[str, Any] = given if isinstance(given, dict) else {}
    device, stream = label(args.get("device")), label(args.get("stream"))
    kernel = role == KERNEL
    return Row(
        role=role,
        name=name,
        start_ns=start,
        duration_ns=duration,
        device=devices(device if device is not None else label(event.get("pid"))),
        stream=streams(stream if stream is not None else label(event.get("tid"))),
        correlation=integer(args.get("correlation")),
        external=integer(args.get("External id", args.get("external id"))),
        node=integer(args.get("graph node id")) or None,
        index=index,
        grid=triple(args.get("grid")) if kernel else (0, 0, 0),
        block=triple(args.get("block")) if kernel else (0, 0, 0),
        registers=count(args.get("registers per thread")) if kernel else 0,
        shared_bytes=count(args.get("shared memory")) if kernel else 0,
        nbytes=0 if kernel else count(args.get("bytes")),
    )


def _host_event(profile: Profile, role: str, event: dict[str, Any]) -> int:
    """Note a launching call, an operator or an annotation; returns its start, 0 if it has none."""
    start = ns_of_us(event.get("ts"))
    if start is None:
        return 0
    given = event.get("args")
    args: dict[str, Any] = given if isinstance(given, dict) else {}
    thread = f"{event.get('pid')}/{event.get('tid')}"
    name = text_of(event.get("name"))
    if role == OP and name.startswith("ProfilerStep#"):
        role = NOTE  # versions without a category for annotations
    if role == CALL:
        correlation = integer(args.get("correlation"))
        if correlation is not None:
            profile.launches.add_call(correlation, name, start, thread)
        return start if start < TIME_LIMIT else 0
    end = start + max(0, ns_of_us(event.get("dur")) or 0)
    if role == NOTE:
        gpu = str(event.get("cat")).lower().startswith("gpu")
        profile.annotations.append(Annotation(start, end, name, process_of(thread), gpu))
        return 0
    if name:
        op = Op(start, end, name, recorded(name, args))
        profile.launches.add_op(op, thread, integer(args.get("External id", args.get("external id"))))
    return start if start < TIME_LIMIT else 0


def _negative_occupancy(event: dict[str, Any]) -> bool:
    args = event.get("args")
    value = args.get("est. achieved occupancy %") if isinstance(args, dict) else None
    return (isinstance(value, int) and value < 0) or (isinstance(value, str) and value.strip().startswith("-"))


def _drop_unset_times(profile: Profile, latest: int) -> None:
    """Drop rows at time 0 of a profile whose clock reads hours: their span would be the years since 1970."""
    if latest < _HOUR_NS:
        return
    kept = [row for row in profile.rows if row.start_ns > 0]
    if len(kept) < len(profile.rows):
        profile.dropped["at time 0 beside a clock that reads hours or years"] += len(profile.rows) - len(kept)
        profile.rows = kept


def _note(profile: Profile, stream: EventStream, odd: int, negative_occupancy: int) -> None:
    notes = profile.notes
    if stream.bad_utf8:
        notes.append("bytes that are not UTF-8 were replaced in names")
    if stream.unclosed:
        notes.append("the array of events is not closed: the last events may be missing")
    if odd:
        notes.append(f"ignored {counted(odd, 'array element')} that cannot be an event")
    if negative_occupancy:
        notes.append(f"ignored the negative occupancy of {counted(negative_occupancy, 'GPU event')}")


def _gpu(properties: Any, used: set[int]) -> str | None:
    """Names of the devices used (of all listed ones if the ids do not tell), "?" for a blank name."""
    listed = [p for p in properties if isinstance(p, dict)] if isinstance(properties, list) else []
    chosen = [p for p in listed if integer(p.get("id")) in used] or listed
    names = dict.fromkeys(text_of(p.get("name")).strip() or "?" for p in chosen)
    return " + ".join(names) if names else None
