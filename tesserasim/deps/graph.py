"""The dependency graph of one unit: which bytes flow between kernels, and which sites stay together.

Last writer per byte range
    Kernels run in launch order. Every activation keeps a map from byte ranges to the kernel that wrote them
    last; a read makes a read-after-write edge from each of those writers, with exactly the bytes read. A
    write whose full coverage is not proven reads the old bytes too (design: partial writes count as RW).
    Stream order alone is no data edge.

Carried buffers
    State, inputs and outputs live longer than a unit and keep their name from unit to unit. Their content is
    a log of writes: a write of exactly known extent appends its new bytes without needing the old version (a
    decode step appends to the KV cache), a write that covers the whole buffer starts a new log, any other
    write also reads. A read needs the whole log. `UnitFlow` holds what of the log stays inside the unit, what
    is read from before it and what is left behind; `tesserasim.deps.cohort` joins launches.

What never flows
    Weights lie on every device that reads them. An activation or workspace that nobody has written has no
    value to move. Write-after-read and write-after-write, which the allocator's reuse of addresses causes,
    order kernels on one GPU; a placement gives every GPU its own arena and sends values, not addresses, so
    they cannot change where a kernel may run. `storage_hazards` lists them for replays in one arena.

Unknown never means independent
    A kernel without accesses, or with one of unknown evidence, shares a group with its neighbours. Kernels of
    one site are together by definition, and so are sites that the trace itself puts into one group.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from tesserasim.errors import InputError
from tesserasim.trace.model import Access, Buffer, Kernel, Trace

CARRIED = ("state", "input", "output")
UNKNOWN_REASON = "unknown accesses: kept with its neighbours"
WAR, WAW = "WAR", "WAW"
MAX_LINKS = 20_000_000  # (write, reader) pairs of one unit; captured ones have at most thousands
_END = 1 << 63  # beyond every storage


@dataclass(frozen=True, slots=True)
class Value:
    """Bytes of one buffer, written by one kernel and read by one set of kernels: they move as one."""

    writer: int  # kernel id
    readers: tuple[int, ...]  # kernel ids inside the unit, ascending; empty: only later units may read it
    buffer: int
    nbytes: int
    left: bool = False  # carried buffers: still part of the content at the end of the unit


@dataclass(frozen=True, slots=True)
class Edge:
    """Read after write between two kernels, all buffers together."""

    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Hazard:
    """`after` overwrites storage that `before` still used (write after read or write after write)."""

    before: int
    after: int
    storage: int
    kind: str  # WAR | WAW
    nbytes: int


@dataclass(frozen=True)
class UnitFlow:
    """The data flow of one unit."""

    trace: Trace
    values: tuple[Value, ...]  # ordered by writer
    external: tuple[tuple[int, int], ...]  # (kernel, carried buffer) reads of what earlier units wrote
    replaced: frozenset[int]  # carried buffers whose earlier content is gone at the end of the unit
    group_of: tuple[int, ...]  # per site of the trace: group, or -1
    group_why: tuple[str, ...]  # per group

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Read-after-write edges, bytes exact, ordered by (src, dst)."""
        total: dict[tuple[int, int], int] = {}
        for v in self.values:
            for r in v.readers:
                total[v.writer, r] = total.get((v.writer, r), 0) + v.nbytes
        return tuple(Edge(s, d, n) for (s, d), n in sorted(total.items()))


def unit_flow(trace: Trace) -> UnitFlow:
    """The data flow of `trace`; computed once per trace object and kept with it."""
    kept: UnitFlow | None = trace.__dict__.get("_unit_flow")
    if kept is None:
        kept = _Builder(trace).build()
        trace.__dict__["_unit_flow"] = kept
    return kept


@dataclass(slots=True)
class _Piece:
    """A byte range with one last writer; `readers` grows until the range is overwritten."""

    start: int
    end: int
    writer: int
    readers: list[int] = field(default_factory=list)


class _RangeMap:
    """Last writer per byte range of one buffer: disjoint pieces in order."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.done: list[_Piece] = []

    def _span(self, start: int, end: int) -> tuple[int, int]:
        """Index range of the pieces inside [start, end) after cutting at both ends."""
        for cut in (start, end):
            i = bisect_left(self.pieces, cut, key=lambda p: p.end)
            if i < len(self.pieces) and self.pieces[i].start < cut < self.pieces[i].end:
                p = self.pieces[i]
                self.pieces.insert(i + 1, _Piece(cut, p.end, p.writer, list(p.readers)))
                p.end = cut
        first = bisect_left(self.pieces, start, key=lambda p: p.start)
        last = bisect_left(self.pieces, end, key=lambda p: p.start)
        return first, last

    def read(self, start: int, end: int, kernel: int) -> int:
        """Note the reader; how many pieces it reads."""
        first, last = self._span(start, end)
        for p in self.pieces[first:last]:
            if p.writer != kernel and (not p.readers or p.readers[-1] != kernel):
                p.readers.append(kernel)
        return last - first

    def write(self, start: int, end: int, kernel: int) -> None:
        if end <= start:
            return
        first, last = self._span(start, end)
        self.done += self.pieces[first:last]
        self.pieces[first:last] = [_Piece(start, end, kernel)]

    def all(self) -> Iterable[_Piece]:
        yield from self.done
        yield from self.pieces


class _Log:
    """Content of a carried buffer inside one unit: writes since the last one that covered everything."""

    def __init__(self) -> None:
        self.live: list[_Piece] = []
        self.gone: list[_Piece] = []
        self.replaced = False
        self.external: list[int] = []

    def read(self, kernel: int) -> int:
        """Note the reader; how many writes it reads."""
        if not self.replaced and (not self.external or self.external[-1] != kernel):
            self.external.append(kernel)
        for p in self.live:
            if p.writer != kernel and (not p.readers or p.readers[-1] != kernel):
                p.readers.append(kernel)
        return len(self.live)

    def write(self, nbytes: int, kernel: int, whole: bool) -> None:
        if whole:
            self.gone += self.live
            self.live = []
            self.replaced = True
        self.live.append(_Piece(0, nbytes, kernel))


class _Builder:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.maps: dict[int, _RangeMap] = {}
        self.logs: dict[int, _Log] = {}
        self.links = 0  # (write, reader) pairs

    def build(self) -> UnitFlow:
        for k in self.trace.kernels:
            # All reads of a kernel see what was there before it started.
            for a in k.accesses:
                b = self.trace.buffers[a.buffer]
                if needs_old_bytes(a, b):
                    self._read(a, b, k)
            for a in k.accesses:
                if a.writes:
                    self._write(a, self.trace.buffers[a.buffer], k)
        groups, why = _groups(self.trace)
        external = sorted((k, b) for b, log in self.logs.items() for k in log.external)
        replaced = frozenset(b for b, log in self.logs.items() if log.replaced)
        return UnitFlow(self.trace, tuple(self._values()), tuple(external), replaced, groups, why)

    def _read(self, a: Access, b: Buffer, k: Kernel) -> None:
        if b.role in CARRIED:
            self.links += self.logs.setdefault(b.id, _Log()).read(k.id)
        elif b.role != "weight" and b.id in self.maps:
            self.links += self.maps[b.id].read(*_extent(a, b), k.id)
        if self.links > MAX_LINKS:
            where = self.trace.meta.source or f"{self.trace.meta.model} {self.trace.unit}"
            raise InputError(
                f"{where}: kernel {k.id} of {len(self.trace.kernels)}: more than {MAX_LINKS} pairs of a write and its "
                "reader; give a trace of one unit of work"
            )

    def _write(self, a: Access, b: Buffer, k: Kernel) -> None:
        start, end = _extent(a, b)
        if b.role in CARRIED:
            whole = a.covers and start == 0 and end == b.nbytes
            self.logs.setdefault(b.id, _Log()).write(end - start, k.id, whole)
        elif b.role != "weight":
            self.maps.setdefault(b.id, _RangeMap()).write(start, end, k.id)

    def _values(self) -> list[Value]:
        # Pieces of one writer with the same readers are one value: they leave and arrive together.
        merged: dict[tuple[int, int, tuple[int, ...], bool], int] = {}
        for b, ranges in self.maps.items():
            for p in ranges.all():
                if p.readers:
                    key = (p.writer, b, tuple(p.readers), False)
                    merged[key] = merged.get(key, 0) + p.end - p.start
        for b, log in self.logs.items():
            for left, pieces in ((False, log.gone), (True, log.live)):
                for p in pieces:
                    if (p.readers or left) and p.end > p.start:
                        key = (p.writer, b, tuple(p.readers), left)
                        merged[key] = merged.get(key, 0) + p.end - p.start
        return [Value(w, r, b, n, left) for (w, b, r, left), n in sorted(merged.items())]


def needs_old_bytes(a: Access, b: Buffer) -> bool:
    """Whether the access needs what the buffer held before: reads, and writes not known to replace it all.

    An exact partial write to a carried buffer is a delta; scratch space holds nothing worth keeping.
    """
    if a.reads:
        return True
    if a.covers or b.role == "workspace":
        return False
    return not (b.role in CARRIED and a.extent == "exact")


def _extent(a: Access, b: Buffer) -> tuple[int, int]:
    """First byte and end of an access; an unknown extent is the whole buffer."""
    return (0, b.nbytes) if a.extent == "unknown" else (a.offset, a.offset + a.nbytes)


def is_unknown(k: Kernel) -> bool:
    """Nothing is known about (some of) what the kernel touches."""
    return not k.accesses or any(a.evidence == "unknown" for a in k.accesses)


def _groups(trace: Trace) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(group per site or -1, reason per group): the trace's own, and unknown kernels with neighbours."""
    n = len(trace.sites)
    parent = list(range(n))
    reasons: dict[int, dict[str, None]] = {i: {} for i in range(n)}

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(a: int, b: int, why: str) -> None:
        a, b = sorted((root(a), root(b)))
        parent[b] = a
        if a != b:
            reasons[a].update(reasons.pop(b))
        if why:
            reasons[a][why] = None

    explicit: dict[int, int] = {}
    for k, site in zip(trace.kernels, trace.site_of, strict=True):
        if k.group >= 0:
            join(explicit.setdefault(k.group, site), site, k.group_reason)
        if is_unknown(k):
            if k.id:
                join(trace.site_of[k.id - 1], site, UNKNOWN_REASON)
            if k.id + 1 < len(trace.kernels):
                join(site, trace.site_of[k.id + 1], UNKNOWN_REASON)
    return _numbered([root(i) for i in range(n)], reasons)


def _numbered(roots: list[int], reasons: dict[int, dict[str, None]]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Groups of at least two sites, numbered densely in program order."""
    size: dict[int, int] = {}
    for r in roots:
        size[r] = size.get(r, 0) + 1
    number: dict[int, int] = {}
    for r in roots:
        if size[r] > 1:
            number.setdefault(r, len(number))
    why = tuple("; ".join(reasons[r]) or "one group in the trace" for r in number)
    return tuple(number.get(r, -1) for r in roots), why


def storage_hazards(trace: Trace) -> tuple[Hazard, ...]:
    """Order that places impose in a single arena, by (after, before, storage, kind).

    Bytes that `after` overwrites and `before` read since they were written last (write after read), or wrote
    last (write after write). Buffers of one storage meet where their ranges do; a buffer of unknown storage
    meets itself alone. Weights are not written.
    """
    arenas: dict[int, _RangeMap] = {}
    found: dict[tuple[int, int, int, str], int] = {}
    for k in trace.kernels:
        writes = []
        for a in k.accesses:
            b = trace.buffers[a.buffer]
            if b.role == "weight":
                continue
            key = b.storage if b.storage >= 0 else -1 - b.id
            if key not in arenas:
                arenas[key] = _RangeMap()
                arenas[key].pieces.append(_Piece(0, _END, -1))
            first, end = _extent(a, b)
            if a.reads:
                arenas[key].read(b.storage_offset + first, b.storage_offset + end, k.id)
            if a.writes:
                writes.append((key, b.storage_offset + first, b.storage_offset + end))
        for key, first, end in writes:
            arena = arenas[key]
            arena.done.clear()
            arena.write(first, end, k.id)
            for p in arena.done:
                before = [(r, WAR) for r in p.readers if r != k.id]
                before += [(p.writer, WAW)] if p.writer not in (-1, k.id) else []
                for kernel, kind in before:
                    hazard = (k.id, kernel, max(key, -1), kind)
                    found[hazard] = found.get(hazard, 0) + p.end - p.start
    return tuple(Hazard(before, after, at, kind, n) for (after, before, at, kind), n in sorted(found.items()))
