"""What flows between the launches of a cohort: the KV cache, the sampled token, latents.

Every launch leaves versions of carried buffers behind (see `tesserasim.deps.graph`); a later launch that reads
the buffer needs all of them. A version goes to each *place* that reads it once, at its first read there. A
place is whatever the caller distinguishes: a device when lowering, a site when deriving flows for any
placement. Both come from this one walk, so what a workload promises is what a program sends.

Sequences
    A launch whose batch is smaller than the cohort's works on sequences of its own: it sees nothing of the
    launches before it, and replaces nothing of theirs, but for those of its own part (the encoder of the image
    that a prefill reads). A launch of the whole cohort sees everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    part: int = 0  # launches of one part (from 1) work on the same sequences; 0: on none of another launch's


@dataclass(slots=True)
class Version:
    """What one launch left in one carried buffer. `places` is a bit mask of where it was written or read."""

    launch: int
    value: Value
    places: int
    #: (place, launch, kernel) of the first read at every place that had not seen it inside its own unit
    arrivals: list[tuple[int, int, int]]
    replaced: bool = False  # by a later launch of its own part

    def read(self, mask: int, first: Sequence[tuple[int, int]] | None, launch: int) -> None:
        """Note the places of `mask` as readers; `first`: first reading kernel at each place, to note arrivals."""
        new = mask & ~self.places
        if new:
            self.places |= mask
            if first is not None:
                self.arrivals += [(p, launch, k) for p, k in first if new >> p & 1]


def value_bytes(value: Value, buffer: Buffer, byte_scale: float, batch_scale: float) -> int:
    """Bytes of a value at the launch's point, round half up, at least 1.

    State that does not grow with the tokens (the sampled token, latents) scales with the batch alone.
    """
    fixed = buffer.role in CARRIED and buffer.bytes_per_token == 0 and buffer.role == "state"
    scale = batch_scale if fixed else byte_scale
    return value.nbytes if scale == 1.0 else max(1, int(value.nbytes * scale + 0.5))


def carried_versions(
    launches: Sequence[Launch], places: Mapping[int, Sequence[int]], arrivals: bool = True
) -> list[Version]:
    """All versions of carried buffers in program order, with where each is read later.

    `places[id(flow)]` gives the place of every kernel of that flow. Without `arrivals` only the masks are
    filled in.
    """
    logs: dict[str, list[Version]] = {}
    parts: dict[tuple[str, int], list[Version]] = {}  # (buffer, part) -> versions that only this part sees
    seen: dict[str, dict[int, int]] = {}  # buffer -> flow -> versions of its log that the flow has read before
    found: list[Version] = []
    flows = {id(x.flow): x.flow for x in launches}
    steps = {key: _reads_and_writes(flow, places[key]) for key, flow in flows.items()}
    for number, launch in enumerate(launches):
        key = id(launch.flow)
        reads, replaced, writes = steps[key]
        own = not launch.whole and launch.part
        for name, mask, first in reads if launch.whole else ():
            log = logs.get(name)
            if not log:
                continue
            cursor = seen.setdefault(name, {})
            for version in log[cursor.get(key, 0) :]:
                if not version.replaced:
                    version.read(mask, first if arrivals else None, number)
            cursor[key] = len(log)
        for name, mask, first in reads if own else ():
            for version in parts.get((name, launch.part), ()):
                version.read(mask, first if arrivals else None, number)
        for name in replaced:
            if launch.whole:
                logs.pop(name, None)
                seen.pop(name, None)
            for version in parts.pop((name, launch.part), ()) if own else ():
                version.replaced = True
        for name, value, mask in writes:
            version = Version(number, value, mask, [])
            found.append(version)
            logs.setdefault(name, []).append(version)
            if own:
                parts.setdefault((name, launch.part), []).append(version)
    return found


#: (buffer, mask of the places that read it, first reading kernel at each place)
_Reads = list[tuple[str, int, list[tuple[int, int]]]]
_Writes = list[tuple[str, Value, int]]


def _reads_and_writes(flow: UnitFlow, place: Sequence[int]) -> tuple[_Reads, list[str], _Writes]:
    """(external reads, buffers whose earlier content the unit replaces, values it leaves with their places)."""
    buffers = flow.trace.buffers
    first: dict[str, dict[int, int]] = {}
    for kernel, b in flow.external:
        first.setdefault(buffers[b].name, {}).setdefault(place[kernel], kernel)
    reads = [(name, sum(1 << p for p in at), list(at.items())) for name, at in first.items()]
    writes: _Writes = []
    for v in flow.values:
        if v.left:
            mask = 1 << place[v.writer]
            for r in v.readers:
                mask |= 1 << place[r]
            writes.append((buffers[v.buffer].name, v, mask))
    return reads, sorted(buffers[b].name for b in flow.replaced), writes


@dataclass(frozen=True, slots=True)
class PlaceFlow:
    """All values of a cohort that one place writes and the same set of other places reads."""

    writer: int
    readers: tuple[int, ...]
    nbytes: int  # per cohort and destination
    count: int  # transfers per cohort and destination
    name: str  # of the first buffer
    state: bool


def place_flows(launches: Sequence[Launch], places: Mapping[int, Sequence[int]]) -> list[PlaceFlow]:
    """What flows between places in one cohort, in program order of the writers.

    A value read only where it is written does not flow. Sums are over launches; every launch's bytes are
    rounded alone, as they are sent.
    """
    total: dict[tuple[int, int, bool], list[int]] = {}
    names: dict[tuple[int, int, bool], str] = {}

    def add(launch: Launch, value: Value, mask: int, count: int) -> None:
        writer = places[id(launch.flow)][value.writer]
        mask &= ~(1 << writer)
        if mask:
            buffer = launch.flow.trace.buffers[value.buffer]
            key = (writer, mask, buffer.role in CARRIED)
            entry = total.setdefault(key, [0, 0])
            entry[0] += count * value_bytes(value, buffer, launch.byte_scale, launch.batch_scale)
            entry[1] += count
            names.setdefault(key, buffer.name)

    alike: dict[tuple[int, float, float], list[int]] = {}  # launches with equal bytes: index of one, how many
    for i, x in enumerate(launches):
        alike.setdefault((id(x.flow), x.byte_scale, x.batch_scale), [i, 0])[1] += x.count
    for i, count in alike.values():
        place = places[id(launches[i].flow)]
        for v in launches[i].flow.values:
            if not v.left:
                mask = 0
                for r in v.readers:
                    mask |= 1 << place[r]
                add(launches[i], v, mask, count)
    for version in carried_versions(launches, places, arrivals=False):
        launch = launches[version.launch]
        add(launch, version.value, version.places, launch.count)
    return [
        PlaceFlow(w, _members(mask), nbytes, count, names[w, mask, state], state)
        for (w, mask, state), (nbytes, count) in sorted(total.items())
    ]


def _members(mask: int) -> tuple[int, ...]:
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)
