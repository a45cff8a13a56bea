"""A trace as Chrome trace events, for Perfetto: what ran when, a track per device and stream.

Times are decimal microseconds with exactly three digits from the first kernel on, written from integers. Kernels of
one stream that overlap (programmatic launch) get tracks beside each other, since slices of one track must not; where
they ran stands in their arguments, as in profiles, so importing the file gives back the same kernels and times.
"""

from __future__ import annotations

import heapq
import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tesserasim.errors import InputError
from tesserasim.trace.assemble import trace_of_profile
from tesserasim.trace.chrome import metadata, us
from tesserasim.trace.importer import load_profile
from tesserasim.trace.inspect import is_memcpy, starts_ns
from tesserasim.trace.model import Kernel, Trace
from tesserasim.trace.parquet import read_trace
from tesserasim.trace.sniff import FileKind, sniff
from tesserasim.writing import write_whole


def export_perfetto(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> dict[str, Any]:
    """Write the trace or profile at `path` for Perfetto; returns counts. InputError if it holds no kernels."""
    where = os.fspath(path)
    trace = read_trace(path) if sniff(path) is FileKind.PARQUET else trace_of_profile(load_profile(path), where)[0]
    if not trace.kernels:
        raise InputError(f"{where}: no kernels, copies or sets to export")
    write_whole(out, perfetto_json(trace).encode())
    return {"file": os.fspath(out), "slices": len(trace.kernels), "tracks": len(set(_tracks(trace)))}


def perfetto_json(trace: Trace) -> str:
    """The JSON text of a trace, an event per line."""
    starts, tracks = starts_ns(trace), _tracks(trace)
    first = min(starts, default=0)
    head: dict[str, Any] = {"displayTimeUnit": "ns"}
    if trace.meta.gpu:
        devices = sorted({k.device for k in trace.kernels})
        head["deviceProperties"] = [{"id": d, "name": trace.meta.gpu} for d in devices]
    events = [*_names(trace, tracks)]
    for k, start, (device, tid) in sorted(zip(trace.kernels, starts, tracks, strict=True), key=lambda x: x[1]):
        events.append(_slice(k, start - first, device, tid, graph=trace.meta.origin == "captured"))
    return json.dumps(head)[:-1] + ',"traceEvents":[\n' + ",\n".join(events) + "\n]}\n"


def _tracks(trace: Trace) -> list[tuple[int, int]]:
    """(device, thread) of every kernel: threads of one device are numbered by stream, overlapping ones apart."""
    found: list[tuple[int, int]] = [(0, 0)] * len(trace.kernels)
    busy: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (device, stream) -> heap of (end, track)
    free: dict[tuple[int, int], list[int]] = {}  # heap of tracks where nothing runs
    starts = starts_ns(trace)
    place: dict[int, tuple[int, int, int]] = {}
    for i in sorted(range(len(starts)), key=lambda i: (starts[i], i)):
        k = trace.kernels[i]
        running, idle = busy.setdefault((k.device, k.stream), []), free.setdefault((k.device, k.stream), [])
        while running and running[0][0] <= starts[i]:
            heapq.heappush(idle, heapq.heappop(running)[1])
        at = heapq.heappop(idle) if idle else len(running)
        heapq.heappush(running, (starts[i] + k.duration_ns, at))
        place[i] = (k.device, k.stream, at)
    numbers: dict[tuple[int, int, int], int] = {}
    used: Counter[int] = Counter()
    for key in sorted(set(place.values())):
        numbers[key] = used[key[0]]
        used[key[0]] += 1
    for i, key in place.items():
        found[i] = (key[0], numbers[key])
    return found


def _names(trace: Trace, tracks: list[tuple[int, int]]) -> Iterator[str]:
    streams = {track: k.stream for k, track in zip(trace.kernels, tracks, strict=True)}
    for device in sorted({d for d, _ in tracks}):
        yield metadata("process_name", device, 0, f"{trace.meta.gpu or 'GPU'} {device}")
    for (device, tid), stream in sorted(streams.items()):
        yield metadata("thread_name", device, tid, f"stream {stream}")


def _slice(k: Kernel, start: int, device: int, tid: int, graph: bool) -> str:
    category = "gpu_memset" if k.kind == "memset" else "gpu_memcpy" if is_memcpy(k) else "kernel"
    args: dict[str, Any] = {"device": k.device, "stream": k.stream, "site": k.site, "kind": k.kind}
    if category == "kernel":
        args |= {"grid": list(k.grid), "block": list(k.block), "registers per thread": k.registers,
                 "shared memory": k.shared_bytes}  # fmt: skip
        if graph:
            args["graph node id"] = k.id + 1
    else:
        args["bytes"] = k.write_bytes or k.read_bytes
    return (
        f'{{"ph":"X","pid":{device},"tid":{tid},"ts":{us(start)},"dur":{us(k.duration_ns)},"cat":"{category}",'
        f'"name":{json.dumps(k.name or k.site)},"args":{json.dumps(args, separators=(",", ":"))}}}'
    )
