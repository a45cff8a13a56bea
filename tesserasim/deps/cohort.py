"""What flows between the launches of a cohort: the KV cache, the sampled token, latents.

Every launch leaves versions of carried buffers behind (see `tesserasim.deps.graph`); a later launch that reads
the buffer needs all of them. A version goes to each *place* that reads it once, at its first read there. A
place is whatever the caller distinguishes: a device when lowering, a site when deriving flows for any
placement. Both come from this one walk, so what a workload promises is what a program sends.

Sequences
    A launch whose batch is smaller than the cohort's works on sequences of its own: it sees nothing of the
    launches before it, and replaces nothing of theirs. A launch of the whole cohort sees everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tesserasim.deps.graph import CARRIED, UnitFlow, Value
from tesserasim.trace.model import Buffer


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch (`count` equal ones, if it does not span the cohort) and how its bytes scale."""

    flow: UnitFlow
    whole: bool  # works on all sequences of the cohort
    count: int
    byte_scale: float  # batch * tokens here over the trace's
    batch_scale: float  # batch here over the trace's


@dataclass(slots=True)
class Version:
    """What one launch left in one carried buffer. `places` is a bit mask of where it was written or read."""

    launch: int
    value: Value
    places: int
    #: (place, launch, kernel) of the first read at every place that had not seen it inside its own unit
    arrivals: list[tuple[int, int, int]] = field(default_factory=list)


def value_bytes(value: Value, buffer: Buffer, byte_scale: float, batch_scale: float) -> int:
    """Bytes of a value at the launch's point, round half up, at least 1.

    State that does not grow with the tokens (the sampled token, latents) scales with the batch alone.
    """
    fixed = buffer.role in CARRIED and buffer.bytes_per_token == 0 and buffer.role == "state"
    scale = batch_scale if fixed else byte_scale
    return value.nbytes if scale == 1.0 else max(1, int(value.nbytes * scale + 0.5))


def carried_versions(launches: Sequence[Launch], places: Mapping[int, Sequence[int]]) -> list[Version]:
    """All versions of carried buffers in program order, with where each is read later.

    `places[id(flow)]` gives the place of every kernel of that flow.
    """
    logs: dict[str, list[Version]] = {}
    seen: dict[str, dict[int, int]] = {}  # buffer -> place -> versions of its log already consumed there
    found: list[Version] = []
    plans = {id(x.flow): _reads_and_writes(x.flow, places[id(x.flow)]) for x in launches}
    for number, launch in enumerate(launches):
        reads, replaced, writes = plans[id(launch.flow)]
        if launch.whole:
            for name, place, kernel in reads:
                log = logs.get(name)
                if not log:
                    continue
                cursor = seen.setdefault(name, {})
                bit = 1 << place
                for version in log[cursor.get(place, 0) :]:
                    if not version.places & bit:
                        version.places |= bit
                        version.arrivals.append((place, number, kernel))
                cursor[place] = len(log)
            for name in replaced:
                logs.pop(name, None)
                seen.pop(name, None)
        for name, value, mask in writes:
            version = Version(number, value, mask)
            found.append(version)
            logs.setdefault(name, []).append(version)
    return found


_Reads = list[tuple[str, int, int]]
_Writes = list[tuple[str, Value, int]]


def _reads_and_writes(flow: UnitFlow, place: Sequence[int]) -> tuple[_Reads, list[str], _Writes]:
    """(first external read of each buffer at each place, buffers replaced, values left with their places)."""
    buffers = flow.trace.buffers
    first: dict[tuple[str, int], int] = {}
    for kernel, b in flow.external:
        first.setdefault((buffers[b].name, place[kernel]), kernel)
    reads = sorted(((name, p, kernel) for (name, p), kernel in first.items()), key=lambda r: (r[2], r[0]))
    writes: _Writes = []
    for v in flow.values:
        if v.left:
            mask = 1 << place[v.writer]
            for r in v.readers:
                mask |= 1 << place[r]
            writes.append((buffers[v.buffer].name, v, mask))
    return reads, sorted(buffers[b].name for b in flow.replaced), writes
