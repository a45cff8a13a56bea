"""From the tensors of recorded calls and the raw parameters of kernels to logical buffers and accesses.

A storage address is a place, not a value: the allocator reuses it inside one graph. A logical buffer begins
when a call writes a fresh result to a place, and ends when its storage is freed or overwritten as a whole.
"""

from __future__ import annotations

import bisect
import dataclasses
import struct
from collections.abc import Iterable

from hw.capture.driver import Node
from hw.capture.recorder import Argument, Call
from hw.workloads.base import NamedTensor, UnitSpec
from tesserasim.trace.model import Access, Buffer


class BufferTable:
    """Logical buffers of one unit, found by storage address at a moment of the capture."""

    def __init__(self, named: Iterable[NamedTensor], unit: UnitSpec) -> None:
        self.buffers: list[Buffer] = []
        self.unit = unit
        self._named: dict[int, int] = {}  # storage address -> buffer id
        self._value: dict[int, int] = {}  # allocation number -> buffer id of its present value
        self._last_written: dict[str, int] = {}
        self._spans: list[tuple[int, int, int]] = []  # named storages as sorted (first, end, buffer)
        for n in named:
            storage = n.tensor.untyped_storage()
            if storage.data_ptr() in self._named:
                continue
            i = self._add(
                n.name, storage.nbytes(), n.role, storage.data_ptr(),
                bytes_per_token=n.bytes_per_token, bytes_per_sequence=n.bytes_per_sequence,
            )  # fmt: skip
            self._named[storage.data_ptr()] = i
            self._spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), i))
        self._spans.sort()

    def _add(self, name: str, nbytes: int, role: str, storage: int, **state: int) -> int:
        self.buffers.append(Buffer(len(self.buffers), name, nbytes, role, storage, **state))
        return len(self.buffers) - 1

    def resolve(self, a: Argument, site: str) -> int:
        """The buffer an argument means now; a fresh write begins a new one."""
        if a.storage in self._named:
            return self._named[a.storage]
        known = self._value.get(a.allocation)
        if a.mode == "W" and (known is None or (a.fresh and a.elements >= self.buffers[known].nbytes)):
            i = self._add(f"{site}:{a.name}", a.storage_bytes, "activation", a.storage)
        elif known is None:
            # Made before the capture or by a launch we did not see: a constant of the unit.
            i = self._add(f"{site}:{a.name}", a.storage_bytes, "input", a.storage)
        else:
            return known
        self._value[a.allocation] = i
        return i

    def at_address(self, address: int) -> int | None:
        """Named buffer that contains an address (for raw parameters)."""
        k = bisect.bisect_right(self._spans, (address, 1 << 63, 0)) - 1
        if k >= 0 and self._spans[k][0] <= address < self._spans[k][1]:
            return self._spans[k][2]
        return None

    def workspace(self, segment: tuple[int, int], site: str) -> int:
        """A private workspace of one site inside an allocator segment."""
        key = f"{site}:workspace@{segment[0]:x}"
        if key not in self._last_written:
            self._last_written[key] = self._add(f"{site}:workspace", segment[1] - segment[0], "workspace", segment[0])
        return self._last_written[key]

    def finish(self, accesses: list[list[Access]]) -> list[Buffer]:
        """Fill first and last use; place numbers replace addresses so that traces are reproducible."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for k, row in enumerate(accesses):
            for a in row:
                first.setdefault(a.buffer, k)
                last[a.buffer] = k
        places: dict[int, int] = {}
        return [
            dataclasses.replace(
                b, storage=places.setdefault(b.storage, len(places)), first_use=first.get(b.id, -1),
                last_use=last.get(b.id, -1),
            )
            for b in self.buffers
        ]  # fmt: skip


def scan_pointers(params: Iterable[bytes]) -> list[int]:
    """Every 8-byte value at 4-byte steps of the parameter bytes that could be an address, in order.

    Pointers may sit inside by-value structs and tensor maps, so parameter borders are not trusted. A scalar
    that looks like an address only widens the set.
    """
    found: dict[int, None] = {}
    for blob in params:
        for at in range(0, len(blob) - 7, 4):
            value = struct.unpack_from("<Q", blob, at)[0]
            if value > 1 << 20:
                found[value] = None
    return list(found)


def site_accesses(
    call: Call, nodes: list[Node], table: BufferTable, segments: list[tuple[int, int]], site: str
) -> tuple[list[list[Access]], list[str]]:
    """Accesses of each node of a call, and warnings.

    Each tensor of the call goes to the nodes whose parameters contain an address inside it. A tensor that no
    parameter shows is read at the first node and written at the last: one site is never split, so that is
    enough for placement. Any other allocation a parameter points to is workspace of the site, RW.
    """
    rows: list[list[Access]] = [[] for _ in nodes]
    warnings: list[str] = []
    hits = [_addresses(n) for n in nodes]
    explained: list[set[int]] = [set() for _ in nodes]
    for a in sorted(call.arguments, key=lambda a: a.mode == "W"):  # reads resolve before fresh writes begin
        buffer = table.resolve(a, site)
        access = _access(a, buffer, table, call)
        seen = [i for i, h in enumerate(hits) if _points_into(h, a.address, max(a.nbytes, 1))]
        for i in seen:
            explained[i].update(p for p in hits[i] if a.storage <= p < a.storage + max(a.storage_bytes, 1))
        targets = seen or ([0] if a.mode == "R" else [len(nodes) - 1])
        if a.mode == "RW" and not seen:
            targets = sorted({0, len(nodes) - 1})
        if a.mode == "W" and len(targets) > 1:
            # Several kernels are given the result (split-K writes partial sums that the reduce finishes).
            for i in targets[:-1]:
                rows[i].append(dataclasses.replace(access, mode="RW", covers=False, evidence="params"))
            targets = targets[-1:]
        for i in targets:
            rows[i].append(access)
        if not seen and a.nbytes and call.door == "triton":
            warnings.append(f"{site}: no parameter of its kernels points to {a.name}")
    for i, h in enumerate(hits):
        for p in h:
            if p in explained[i]:
                continue
            named = table.at_address(p)
            if named is not None:
                b = table.buffers[named]
                mode = "R" if b.role == "weight" else "RW"
                rows[i].append(Access(named, mode, 0, b.nbytes, "superset", False, "params"))
                explained[i].update(q for q in h if table.at_address(q) == named)
                continue
            k = bisect.bisect_right(segments, (p, 1 << 63)) - 1
            if k >= 0 and segments[k][0] <= p < segments[k][1]:
                w = table.workspace(segments[k], site)
                if all(a.buffer != w for a in rows[i]):
                    rows[i].append(Access(w, "RW", 0, table.buffers[w].nbytes, "unknown", False, "params"))
    return rows, warnings


def _addresses(node: Node) -> list[int]:
    return [p for p, _, _ in node.pointers] if node.pointers else scan_pointers(node.params)


def _points_into(addresses: list[int], start: int, nbytes: int) -> bool:
    return any(start <= p < start + nbytes for p in addresses)


def _access(a: Argument, buffer: int, table: BufferTable, call: Call) -> Access:
    b = table.buffers[buffer]
    offset = min(max(a.address - a.storage, 0), b.nbytes)
    nbytes = min(a.nbytes, b.nbytes - offset)
    scatter = "index_put" in call.op or "index_copy" in call.op
    if b.role == "state" and b.bytes_per_token and a.mode != "R" and (scatter or a.mode == "RW"):
        # An append to a cache writes the new tokens and reads nothing; its rows are scattered, so only the
        # number of bytes is exact, not their place.
        new = b.bytes_per_token * table.unit.batch * table.unit.tokens
        return Access(buffer, "W", 0, min(new, b.nbytes), "exact", False, "schema")
    if a.mode == "R" and b.role == "weight" and "embedding" in call.op:
        return Access(buffer, "R", offset, nbytes, "superset", False, "schema")
    extent = "exact" if a.elements == a.nbytes else "superset"
    return Access(buffer, a.mode, offset, nbytes, extent, a.covers, "schema")
