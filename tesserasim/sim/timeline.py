"""A run as Chrome trace events, for Perfetto: what ran where, and which transfer joins which kernels.

One process per device with a thread per stream (lane and slot), one process for links with a thread per
direction. Times are decimal microseconds with exactly three digits, written from integers: no float is
involved, so a reader that keeps the decimals gets the nanoseconds back. Flows lead from the producing kernel
over the transfer to the kernel that waits for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator

from tesserasim.errors import InputError
from tesserasim.sim.program import Program
from tesserasim.sim.result import SimResult, Slice
from tesserasim.trace.chrome import metadata, us
from tesserasim.writing import write_whole


def write_timeline(program: Program, result: SimResult, path: str | os.PathLike[str]) -> None:
    """Write the slices of a run made with `timeline=True`; the file appears whole or not at all."""
    write_whole(path, timeline_json(program, result).encode())


def timeline_json(program: Program, result: SimResult) -> str:
    """The JSON text: one event per line, in order of time."""
    if result.timeline is None:
        raise InputError("the run kept no slices: simulate with timeline=True")
    events = [*_names(program, result.timeline), *_events(program, result.timeline)]
    return '{"displayTimeUnit":"ns","traceEvents":[\n' + ",\n".join(events) + "\n]}\n"


def _track(program: Program, s: Slice) -> tuple[int, int]:
    """Process and thread: devices come first, links share the process behind them."""
    if s.kind == "transfer":
        return len(program.devices), s.resource
    before = sum(lane.depth for lane in program.lanes[: s.lane])
    return s.resource, before + s.slot


def _names(program: Program, slices: Iterable[Slice]) -> Iterator[str]:
    tracks = {}
    for s in slices:
        if s.kind == "transfer":
            tracks[_track(program, s)] = ("links", program.channels[s.resource].name)
        else:
            lane = program.lanes[s.lane].name
            tracks[_track(program, s)] = (program.devices[s.resource], f"{lane} slot {s.slot}")
    for process in sorted({(p, name) for (p, _), (name, _) in tracks.items()}):
        yield metadata("process_name", process[0], 0, process[1])
    for (p, t), (_, name) in sorted(tracks.items()):
        yield metadata("thread_name", p, t, name)


def _events(program: Program, slices: list[Slice]) -> Iterator[str]:
    consumers = _consumers(program, slices)
    producers = {(s.lane, s.cohort, s.device, s.index): s for s in slices if s.kind == "kernel"}
    for flow, s in enumerate(slices):
        yield _slice(program, s)
        if s.kind == "transfer":
            producer = producers[s.lane, s.cohort, s.device, s.index]
            consumer = consumers.get((s.lane, s.cohort, s.token))
            yield _flow(program, "s", flow, producer, producer.start_ns)
            yield _flow(program, "t", flow, s, s.start_ns)
            if consumer is not None:
                yield _flow(program, "f", flow, consumer, consumer.start_ns)


def _consumers(program: Program, slices: Iterable[Slice]) -> dict[tuple[int, int, int], Slice]:
    """The first kernel that waits for each token."""
    waits = {(i, s.device): s.waits for i, lane in enumerate(program.lanes) for s in lane.streams}
    consumers: dict[tuple[int, int, int], Slice] = {}
    for s in slices:
        if s.kind == "kernel":
            for token in waits[s.lane, s.device][s.index] or ():
                consumers.setdefault((s.lane, s.cohort, token), s)
    return consumers


def _slice(program: Program, s: Slice) -> str:
    process, thread = _track(program, s)
    name = s.label or f"kernel {s.order}"
    args: dict[str, object] = {"lane": program.lanes[s.lane].name, "cohort": s.cohort, "slot": s.slot, "order": s.order}
    if s.kind == "transfer":
        args |= {"bytes": s.nbytes, "token": s.token, "arrival_ns": s.arrival_ns}
    else:
        args |= {"device": process, "stream": thread}  # where profiles say it, so that importers find it
    return (
        f'{{"ph":"X","pid":{process},"tid":{thread},"ts":{us(s.start_ns)},"dur":{us(s.end_ns - s.start_ns)},'
        f'"cat":"{s.kind}","name":{json.dumps(name)},"args":{json.dumps(args, separators=(",", ":"))}}}'
    )


def _flow(program: Program, phase: str, number: int, s: Slice, at: int) -> str:
    process, thread = _track(program, s)
    end = ',"bp":"e"' if phase == "f" else ""
    return (
        f'{{"ph":"{phase}","id":{number},"pid":{process},"tid":{thread},"ts":{us(at)},'
        f'"cat":"transfer","name":"transfer"{end}}}'
    )
