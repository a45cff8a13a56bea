"""From the tensors of recorded calls and the raw parameters of kernels to logical buffers.

A storage address is a place, not a value: the allocator reuses it inside one graph. A logical buffer begins
when a call writes a fresh result to a place, and ends when its storage is freed or overwritten as a whole.

Strays
    A kernel that no recorded call explains may write a tensor that a recorded call reads later, when the tensor
    gets its number. The pointers of such kernels are kept as strays; the first read of a tensor that nobody is
    known to have made takes the strays inside it as its writers.
"""

from __future__ import annotations

import bisect
import dataclasses
import struct
from collections.abc import Iterable, Sequence

from hw.capture.recorder import Argument
from hw.workloads.base import NamedTensor, UnitSpec
from tesserasim.trace.model import Access, Buffer


class BufferTable:
    """Logical buffers of one unit, found by storage address at a moment of the capture."""

    def __init__(self, named: Iterable[NamedTensor], unit: UnitSpec) -> None:
        self.buffers: list[Buffer] = []
        self.unit = unit
        self._named: dict[int, int] = {}  # storage address -> buffer id
        self._value: dict[int, int] = {}  # allocation number -> buffer id of its present value
        self._workspaces: dict[str, int] = {}
        self._places: dict[int, tuple[int, int]] = {}  # storage address -> (end, buffer), last assigned last
        self._strays: list[tuple[int, int]] = []  # (address, graph node)
        #: accesses of earlier nodes that only a later call explained
        self.late: list[tuple[int, Access]] = []
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

    def resolve(self, a: Argument, site: str, mode: str = "") -> int:
        """The buffer an argument means now, given what the call does with it (default: as declared).

        A fresh write begins a new buffer, and so does a write to a tensor that nobody has used before.
        """
        mode = mode or a.mode
        known = self.known(a)
        if a.storage in self._named:
            return self._named[a.storage]
        if mode == "W" and (known is None or (a.fresh and a.elements >= self.buffers[known].nbytes)):
            i = self._add(f"{site}:{a.name}", a.storage_bytes, "activation", a.storage)
        elif known is None:
            strays = self._strays_in(a.storage, a.storage + a.storage_bytes)
            # Without strays it was made before the capture: a constant of the unit.
            i = self._add(f"{site}:{a.name}", a.storage_bytes, "activation" if strays else "input", a.storage)
            self.late += [(n, Access(i, "RW", 0, a.storage_bytes, "unknown", False, "unknown")) for n in strays]
        else:
            return known
        self._value[a.allocation] = i
        self._places.pop(a.storage, None)
        self._places[a.storage] = (a.storage + a.storage_bytes, i)
        return i

    def known(self, a: Argument) -> int | None:
        """The buffer that an argument meant last; None for a tensor that nobody has used."""
        return self._named.get(a.storage, self._value.get(a.allocation))

    def _strays_in(self, start: int, end: int) -> list[int]:
        """Nodes with stray pointers in [start, end), each once; they are strays no longer."""
        found = dict.fromkeys(n for p, n in self._strays if start <= p < end)
        self._strays = [(p, n) for p, n in self._strays if not start <= p < end]
        return list(found)

    def stray(self, address: int, node: int) -> None:
        """Note that an unexplained node was given an address."""
        self._strays.append((address, node))

    def at_place(self, address: int) -> int | None:
        """The value that was put last where an address points; it may be gone, which only widens the set."""
        for start, (end, buffer) in reversed(self._places.items()):
            if start <= address < end:
                return buffer
        return None

    def at_address(self, address: int) -> int | None:
        """Named buffer that contains an address (for raw parameters)."""
        k = bisect.bisect_right(self._spans, (address, 1 << 63, 0)) - 1
        if k >= 0 and self._spans[k][0] <= address < self._spans[k][1]:
            return self._spans[k][2]
        return None

    def workspace(self, segment: tuple[int, int], site: str) -> int:
        """A private workspace of one site inside an allocator segment."""
        key = f"{site}:workspace@{segment[0]:x}"
        if key not in self._workspaces:
            self._workspaces[key] = self._add(f"{site}:workspace", segment[1] - segment[0], "workspace", segment[0])
        return self._workspaces[key]

    def finish(
        self, accesses: Sequence[Sequence[Access]], segments: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[Buffer], list[str]]:
        """Buffers with first and last use, and warnings.

        `segments`: the allocator's, sorted (first, end). Storages of one segment share a number and differ in
        their offset, so that blocks which overlap in part are seen to. Numbers replace addresses: traces are
        reproducible. A weight that a kernel is known to write is state.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        written = set()
        for k, row in enumerate(accesses):
            for a in row:
                first.setdefault(a.buffer, k)
                last[a.buffer] = k
                if a.writes and a.evidence != "params":
                    written.add(a.buffer)
        places: dict[int, int] = {}
        buffers, warnings = [], []
        for b in self.buffers:
            start = _segment(b.storage, segments)
            changed = b.role == "weight" and b.id in written
            if changed:
                warnings.append(f"{b.name}: a weight that a kernel writes; it is treated as state")
            buffers.append(
                dataclasses.replace(
                    b, role="state" if changed else b.role, storage=places.setdefault(start, len(places)),
                    storage_offset=b.storage - start, first_use=first.get(b.id, -1), last_use=last.get(b.id, -1),
                )
            )  # fmt: skip
        return buffers, warnings


def _segment(address: int, segments: Sequence[tuple[int, int]]) -> int:
    """Start of the allocator segment that contains an address; the address itself if none does."""
    k = bisect.bisect_right(segments, (address, 1 << 63)) - 1
    return segments[k][0] if k >= 0 and address < segments[k][1] else address


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
