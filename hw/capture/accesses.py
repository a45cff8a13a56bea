"""What every node of a recorded call reads and writes: its tensors, its workspace, and what its pointers name.

Each tensor of a call goes to the nodes whose parameters contain an address inside it; `evidence.decide` says what
they do with it. A tensor that no parameter shows is read at the first node and written at the last: one site is
never split, so that is enough for placement.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from hw.capture.buffers import BufferTable, scan_pointers
from hw.capture.driver import MEMCPY, MEMSET, Node
from hw.capture.evidence import NAMES, NOWHERE, SCHEMA, Decision, decide
from hw.capture.library import library_kernel
from hw.capture.ptx_evidence import PointerModes, minus, pointer_modes, union
from hw.capture.recorder import Argument, Call
from tesserasim.trace.model import Access


def site_accesses(
    call: Call, nodes: list[Node], table: BufferTable, segments: list[tuple[int, int]], site: str
) -> tuple[list[list[Access]], list[str]]:
    """Accesses of each node of a call, and warnings.

    `segments`: the allocator's, sorted (first, end); `site` names new buffers.
    """
    found = _Site(call, nodes, table, segments, site)
    found.arguments()
    for i in range(len(nodes)):
        found.unexplained(i)
    for i, ptx in enumerate(found.ptx):
        if ptx is not None and ptx.everything:
            found.warnings.append(f"{site}: {nodes[i].name} touches memory that no parameter names")
            found.rows[i] = [dataclasses.replace(a, evidence="unknown") for a in found.rows[i]]
    return found.rows, found.warnings


class _Site:
    def __init__(
        self, call: Call, nodes: list[Node], table: BufferTable, segments: list[tuple[int, int]], site: str
    ) -> None:
        self.call, self.nodes, self.table, self.segments, self.site = call, nodes, table, segments, site
        self.rows: list[list[Access]] = [[] for _ in nodes]
        self.warnings: list[str] = []
        self.ptx = [pointer_modes(n, call.first + i, call.compiled) for i, n in enumerate(nodes)]
        names = [n.name or n.type for n in nodes]
        self.library = [library_kernel(names, i) if p is None else None for i, p in enumerate(self.ptx)]
        self.addresses = [_addresses(n, p) for n, p in zip(nodes, self.ptx, strict=True)]
        self.explained: list[set[int]] = [set() for _ in nodes]
        self.storages: list[tuple[int, int, int]] = []  # of the call's tensors: (first, end, buffer)
        self.source = {"triton": NAMES if call.meta.get("generated", True) else SCHEMA, "jit": NOWHERE}.get(
            call.door, SCHEMA
        )

    def arguments(self) -> None:
        """The accesses to the tensors that the call was given."""
        decided = [(a, self._decide(a)) for a in self.call.arguments if a.nbytes]
        # Reads find their buffers before fresh writes begin new ones in their places.
        for a, per_node in sorted(decided, key=lambda x: _begins(*x)):
            mode = "W" if _begins(a, per_node) else a.mode
            buffer = self.table.resolve(a, self.site, mode)
            self.storages.append((a.storage, a.storage + a.storage_bytes, buffer))
            for i, d in per_node:
                self.rows[i] += self._accesses(i, a, buffer, d)

    def _decide(self, a: Argument) -> list[tuple[int, Decision]]:
        """(node, decision) of one tensor, ascending."""
        found: list[tuple[int, Decision]] = []
        begun = False
        seen = False
        for i, node in enumerate(self.nodes):
            hits = [p for p in self.addresses[i] if a.address <= p < a.address + a.nbytes]
            self.explained[i].update(hits)
            # A view may span its neighbours in one storage: the pointer to its start is its own.
            hits = [a.address] if a.address in hits else hits
            if not hits:
                continue
            seen = True
            d = decide(
                a.mode, self.source, ptx=_mode_at(self.ptx[i], hits), node=_node_mode(node, hits),
                library=self.library[i], begun=begun,
            )  # fmt: skip
            if d.widened and not self._declared_written(a):
                self.warnings.append(_widened(self.site, node.name, a, d))
            begun = begun or d.writes
            if d.mode != "none":
                found.append((i, d))
        hidden = [i for i, row in enumerate(self.library) if row is not None and row.hidden]
        if hidden and self.source == SCHEMA:
            told = {i for i, _ in found}
            found += [(i, decide(a.mode, SCHEMA, library=self.library[i])) for i in hidden if i not in told]
        elif not seen or ("W" in a.mode and self.source != NOWHERE and not begun):
            return self._unseen(a, seen)
        return found

    def _declared_written(self, a: Argument) -> bool:
        """Another argument of the call is declared to write the same bytes."""
        return any(
            "W" in b.mode and b is not a and b.address < a.address + a.nbytes and a.address < b.address + b.nbytes
            for b in self.call.arguments
        )

    def _unseen(self, a: Argument, seen: bool) -> list[tuple[int, Decision]]:
        """Decisions for a tensor that no parameter shows, or whose write no parameter shows."""
        if self.source == NAMES and not seen:
            self.warnings.append(f"{self.site}: no parameter of its kernels points to {a.name}")
        if self.source == NOWHERE:
            blind = [i for i, p in enumerate(self.ptx) if p is None]
            return [(i, decide(a.mode)) for i in blind]
        last = len(self.nodes) - 1
        targets = {"R": [0], "W": [last]}.get(a.mode, sorted({0, last}))
        return [(i, decide(a.mode, self.source)) for i in targets]

    def _accesses(self, i: int, a: Argument, buffer: int, d: Decision) -> list[Access]:
        b = self.table.buffers[buffer]
        offset = min(max(a.address - a.storage, 0), b.nbytes)
        nbytes = min(a.nbytes, b.nbytes - offset)
        if d.vague:
            return [Access(buffer, d.mode, 0, b.nbytes, "unknown", False, d.evidence)]
        if self.nodes[i].type in (MEMCPY, MEMSET):
            return [_driver_access(self.nodes[i], a, buffer, offset, nbytes, d)]
        extent = "exact" if a.elements == a.nbytes else "superset"
        if b.role == "state" and b.bytes_per_token and d.writes and a.mode != "W":
            return self._append(a, buffer, d, Access(buffer, "R", offset, nbytes, extent, False, d.evidence))
        if d.mode == "R" and b.role == "weight" and "embedding" in self.call.op:
            return [Access(buffer, "R", offset, nbytes, "superset", False, d.evidence)]
        # The contract of a result is that all of it is written; that PTX writes somewhere in a tensor is none.
        covers = d.mode == "W" and a.covers and not d.widened and self.source != NOWHERE
        covers = covers and not (self.rows[i] and any(r.buffer == buffer for row in self.rows[:i] for r in row))
        return [Access(buffer, d.mode, offset, nbytes, extent, covers, d.evidence)]

    def _append(self, a: Argument, buffer: int, d: Decision, whole: Access) -> list[Access]:
        """An append to a cache writes the new tokens; its rows are scattered, so only their number is exact.

        A scatter reads nothing; another kernel that is given the cache RW may read all of it.
        """
        b, unit = self.table.buffers[buffer], self.table.unit
        new = min(b.bytes_per_token * unit.batch * unit.tokens, b.nbytes)
        delta = Access(buffer, "W", 0, new, "exact", False, d.evidence)
        by_ptx = [m for m in (_mode_at(p, [a.address]) for p in self.ptx) if m is not None]
        if by_ptx:
            reads = any(m in ("R", "RW", "unknown") for m in by_ptx)
        else:
            reads = d.reads and not any(word in self.call.op for word in ("index_put", "index_copy", "scatter"))
        return [whole, delta] if reads else [delta]

    def unexplained(self, i: int) -> None:
        """Pointers that no argument of the call explains: named buffers, workspace, or values of earlier calls."""
        node, ptx = self.nodes[i], self.ptx[i]
        stray = self.call.door == "none"
        for p in self.addresses[i]:
            if p in self.explained[i]:
                continue
            by_ptx, by_node = _mode_at(ptx, [p]), _node_mode(node, [p])
            # Beside the view of a tensor that the call was given: the rest of its storage is touched too.
            own = next((b for first, end, b in self.storages if first <= p < end), None)
            named = own if own is not None else self.table.at_address(p)
            value = self.table.at_place(p) if stray and named is None else None
            segment = _segment(p, self.segments)
            if stray and segment is not None and named is None:
                self.table.stray(p, self.call.first + i)
            if named is not None or value is not None:
                buffer = named if named is not None else value
                assert buffer is not None
                self._add(i, buffer, decide(None, ptx=by_ptx, node=by_node), "superset")
            elif segment is not None:
                # What kernels that nobody recorded leave in memory, others of them may find there.
                workspace = self.table.workspace(segment, "unrecorded" if stray else self.site)
                d = decide(None, ptx=by_ptx, node=by_node, library=self.library[i])
                self._add(i, workspace, dataclasses.replace(d, evidence="unknown") if stray else d, "unknown")

    def _add(self, i: int, buffer: int, d: Decision, extent: str) -> None:
        """Add or widen the access of node `i` to all of `buffer`."""
        b = self.table.buffers[buffer]
        if b.role == "weight" and d.evidence == "params":
            d = Decision("R", "params")  # weights are constants by their role
        if d.mode == "none":
            return
        row = self.rows[i]
        for j, a in enumerate(row):
            if a.buffer == buffer and a.extent == extent and a.nbytes == b.nbytes:
                row[j] = dataclasses.replace(a, mode=union(a.mode, d.mode))
                return
        row.append(Access(buffer, d.mode, 0, b.nbytes, "unknown" if d.vague else extent, False, d.evidence))


def _widened(site: str, kernel: str, a: Argument, d: Decision) -> str:
    """The warning that PTX does more with an argument than is declared."""
    if d.vague:
        return f"{site}: the PTX of {kernel} gives up on {a.name}, declared {a.mode}; RW of unknown extent is kept"
    more = {"R": "may read", "W": "may write", "RW": "may read and write"}[minus(d.mode, a.mode)]
    return f"{site}: the PTX of {kernel} {more} {a.name}, declared {a.mode}; both are kept"


def _begins(a: Argument, per_node: Sequence[tuple[int, Decision]]) -> bool:
    """The call writes the tensor and needs nothing that it held before."""
    return a.mode == "W" or (bool(per_node) and per_node[0][1].mode == "W" and per_node[0][1].evidence == "ptx")


def _addresses(node: Node, ptx: PointerModes | None) -> list[int]:
    """What of a node's parameters may be an address; with PTX only what it uses as one."""
    if node.pointers:
        return [p for p, _, _ in node.pointers]
    if ptx is not None and not ptx.everything:
        return list(ptx.modes)
    return scan_pointers(node.params)


def _mode_at(ptx: PointerModes | None, addresses: Sequence[int]) -> str | None:
    """Union of the modes of these addresses; None without PTX."""
    return union(*(ptx.modes.get(p, "unknown") for p in addresses)) if ptx is not None else None


def _node_mode(node: Node, addresses: Sequence[int]) -> str | None:
    """What a copy or set does with these addresses; None for kernels."""
    modes = [mode for p, mode, _ in node.pointers if p in addresses]
    return union(*modes) if modes else None


def _driver_access(node: Node, a: Argument, buffer: int, offset: int, nbytes: int, d: Decision) -> Access:
    """A copy or set: exact where it takes the whole tensor; rows of a pitched one lie apart."""
    size = sum(n for p, mode, n in node.pointers if a.address <= p < a.address + a.nbytes and mode == d.mode)
    whole = size >= a.elements == a.nbytes
    return Access(buffer, d.mode, offset, nbytes, "exact" if whole else "superset", whole and d.mode == "W", d.evidence)


def _segment(address: int, segments: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    k = bisect.bisect_right(segments, (address, 1 << 63)) - 1
    return segments[k] if k >= 0 and segments[k][0] <= address < segments[k][1] else None
