"""Observed memory: snapshot, poison, restore, and what a run changed. On PyTorch tensors, so on any device.

Memory is a list of regions (whole allocator segments, guard zones) in rows of `ROW` bytes. A *row number* counts
rows over all regions in order. Whatever is in a region is observed, whether somebody listed it or not.

The patterns depend on the address, so that a copy between two poisoned places is seen as a change: `A` is a
negative NaN in bf16 and fp32 and a negative number as an integer, `B` a large finite number; their bytes differ
everywhere. The period is a multiple of a prime, which distances between buffers are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from hw.oracle.spans import Spans, clip, gaps

ROW = 4096
PERIOD = 1999  # rows; 8 MB, which stays in the L2 cache of a large GPU
PATTERNS = ("A", "B")
_PIECE = 1 << 16  # rows compared at once
_GAP, _KEPT, _MIXED = 0, 1, 2


@dataclass(frozen=True)
class Region:
    """A range of addresses that starts and ends at a multiple of `ROW`."""

    first: int
    live: torch.Tensor  # uint8, one-dimensional
    name: str = ""

    @property
    def end(self) -> int:
        return self.first + int(self.live.numel())


@dataclass(frozen=True)
class Layout:
    """Which rows of memory keep their content (wholly, in part, not at all)."""

    kept: Spans
    kinds: np.ndarray  # uint8 per row


@dataclass(frozen=True)
class Shot:
    """What a run left behind: the rows that differ from the state before it, and their content."""

    rows: np.ndarray  # row numbers, ascending
    content: torch.Tensor  # [rows, ROW] uint8


class Memory:
    """All observed memory of one device, and its snapshot."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = list(regions)
        for r in self.regions:
            if r.first % ROW or r.live.numel() % ROW:
                raise ValueError(f"region {r.first:#x} is not made of rows of {ROW} bytes")
        sizes = [r.live.numel() // ROW for r in self.regions]
        self.start = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        self._live = [r.live.view(-1, ROW) for r in self.regions]
        self._saved = [torch.empty_like(t) for t in self._live]
        self.device = self._live[0].device
        self._flags = torch.zeros(int(self.start[-1]), dtype=torch.bool, device=self.device)
        self._tiles = {p: _tile(p).to(self.device) for p in PATTERNS}

    @property
    def nbytes(self) -> int:
        return int(self.start[-1]) * ROW

    # -- whole memory -------------------------------------------------------------------------------------------

    def save(self) -> None:
        """The snapshot becomes what memory holds now."""
        for live, saved in zip(self._live, self._saved, strict=True):
            saved.copy_(live)

    def restore(self) -> None:
        """Memory becomes the snapshot."""
        for live, saved in zip(self._live, self._saved, strict=True):
            live.copy_(saved)

    def layout(self, kept: Spans) -> Layout:
        """Rows by what `kept` (merged spans) holds of them."""
        kinds = np.zeros(int(self.start[-1]), dtype=np.uint8)
        for i, r in enumerate(self.regions):
            base = int(self.start[i])
            for first, end in clip(kept, r.first, r.end):
                a, b = (first - r.first) // ROW, -(-(end - r.first) // ROW)
                inner_a, inner_b = -(-(first - r.first) // ROW), (end - r.first) // ROW
                kinds[base + a : base + b] = _MIXED
                if inner_b > inner_a:
                    kinds[base + inner_a : base + inner_b] = _KEPT
        return Layout(kept, kinds)

    def poison(self, layout: Layout, pattern: str) -> None:
        """Fill every byte outside `layout.kept`. The kept bytes are left as they are."""
        tile = self._tiles[pattern]
        for i, first, end, kind in self._runs(layout):
            live = self._live[i]
            if kind == _GAP:
                for a, n, rows in self._pieces(i, first, end):
                    target = live[a : a + n].view(-1, rows.stop - rows.start, ROW).view(torch.int64)
                    target.copy_(tile[rows].view(torch.int64).expand_as(target))
            elif kind == _MIXED:
                for row in range(first, end):
                    self._poison_row(live[row], self.regions[i].first + row * ROW, layout.kept, tile)

    def _poison_row(self, row: torch.Tensor, address: int, kept: Spans, tile: torch.Tensor) -> None:
        source = tile[address // ROW % PERIOD]
        for a, b in gaps(kept, address, address + ROW):
            row[a - address : b - address] = source[a - address : b - address]

    def differing(self, layout: Layout | None = None, pattern: str = "") -> np.ndarray:
        """Rows that may differ from the snapshot, or (outside `layout.kept`) from the pattern.

        Rows that are kept in part are always among them; what differs in a row, `Shot` and `expected` tell.
        """
        whole = layout or Layout([], np.full(int(self.start[-1]), _KEPT, dtype=np.uint8))
        for i, first, end, kind in self._runs(whole):
            live, flags = self._live[i], self._flags[int(self.start[i]) : int(self.start[i + 1])]
            if kind == _MIXED:
                flags[first:end] = True
            elif kind == _KEPT:
                for a in range(first, end, _PIECE):
                    b = min(end, a + _PIECE)
                    differ = live[a:b].view(torch.int64) != self._saved[i][a:b].view(torch.int64)
                    torch.any(differ, dim=1, out=flags[a:b])
            else:
                for a, n, rows in self._pieces(i, first, end):
                    here = live[a : a + n].view(-1, rows.stop - rows.start, ROW).view(torch.int64)
                    differ = here != self._tiles[pattern][rows].view(torch.int64)
                    torch.any(differ.view(n, -1), dim=1, out=flags[a : a + n])
        return np.flatnonzero(self._flags.cpu().numpy())

    def _runs(self, layout: Layout) -> Iterator[tuple[int, int, int, int]]:
        """(region, first row, end row, kind): stretches of rows of one kind, rows counted inside the region."""
        for i in range(len(self.regions)):
            kinds = layout.kinds[int(self.start[i]) : int(self.start[i + 1])]
            cuts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
            for a, b in pairwise(cuts):
                if b > a:
                    yield i, a, b, int(kinds[a])

    def _pieces(self, region: int, first: int, end: int) -> Iterator[tuple[int, int, slice]]:
        """(row, rows, rows of the pattern) so that the pattern's rows, repeated, lie over [row, row + rows)."""
        base = self.regions[region].first // ROW
        at = first
        while at < end:
            phase = (base + at) % PERIOD
            periods = (end - at) // PERIOD if phase == 0 else 0
            periods = min(periods, _PIECE // PERIOD)
            n = periods * PERIOD or min(end - at, PERIOD - phase)
            yield at, n, slice(0, PERIOD) if periods else slice(phase, phase + n)
            at += n

    # -- single rows --------------------------------------------------------------------------------------------

    def shoot(self, layout: Layout | None = None, pattern: str = "") -> Shot:
        """What the run behind us changed."""
        rows = self.differing(layout, pattern)
        return Shot(rows, self._gather(self._live, rows))

    def current(self, rows: np.ndarray) -> torch.Tensor:
        """[rows, ROW]: what memory holds."""
        return self._gather(self._live, rows)

    def expected(self, rows: np.ndarray, layout: Layout | None = None, pattern: str = "") -> torch.Tensor:
        """[rows, ROW]: the state before the run."""
        out = self._gather(self._saved, rows)
        if layout is None:
            return out
        kinds, tile = layout.kinds[rows], self._tiles[pattern]
        filled = np.flatnonzero(kinds == _GAP)
        if len(filled):
            phases = self.addresses(rows[filled]) // ROW % PERIOD
            out[self._index(filled)] = tile[self._index(phases)]
        for k in np.flatnonzero(kinds == _MIXED):
            self._poison_row(out[k], self.address(int(rows[k])), layout.kept, tile)
        return out

    def before_and_after(
        self, shot: Shot, rows: np.ndarray, layout: Layout | None = None, pattern: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, ROW] twice: what stood there before the run of `shot`, and after it."""
        before = self.expected(rows, layout, pattern)
        after = before.clone()
        where = np.flatnonzero(np.isin(rows, shot.rows, assume_unique=True))
        if len(where):
            after[self._index(where)] = shot.content[self._index(np.searchsorted(shot.rows, rows[where]))]
        return before, after

    def restore_rows(self, rows: np.ndarray) -> None:
        """The snapshot's content, in these rows."""
        for i, local, _ in self._by_region(rows):
            if _contiguous(local):
                self._live[i][local[0] : local[-1] + 1] = self._saved[i][local[0] : local[-1] + 1]
            else:
                index = self._index(local)
                self._live[i][index] = self._saved[i][index]

    def restore_span(self, first: int, end: int) -> None:
        """The snapshot's content, in the rows that [first, end) touches."""
        self.restore_rows(self.rows_of(first, end))

    def mask(self, rows: np.ndarray, layout: Layout) -> torch.Tensor:
        """[rows, ROW] bool: the bytes inside `layout.kept`."""
        kinds = layout.kinds[rows]
        out = torch.from_numpy(kinds == _KEPT).to(self.device)[:, None].repeat(1, ROW)
        for k in np.flatnonzero(kinds == _MIXED):
            address = self.address(int(rows[k]))
            for a, b in clip(layout.kept, address, address + ROW):
                out[k, a - address : b - address] = True
        return out

    def view(self, first: int, end: int) -> torch.Tensor:
        """The live bytes [first, end), which lie in one region. ValueError if they do not."""
        for r in self.regions:
            if r.first <= first and end <= r.end:
                return r.live[first - r.first : end - r.first]
        raise ValueError(f"[{first:#x}, {end:#x}) is not inside an observed region")

    def address(self, row: int) -> int:
        """Address of the first byte of a row."""
        return int(self.addresses(np.array([row]))[0])

    def addresses(self, rows: np.ndarray) -> np.ndarray:
        """Addresses of the first bytes of rows."""
        i = np.searchsorted(self.start, rows, side="right") - 1
        firsts = np.array([r.first for r in self.regions], dtype=np.int64)
        return firsts[i] + (rows - self.start[i]) * ROW

    def rows_of(self, first: int, end: int) -> np.ndarray:
        """Numbers of the rows that [first, end) touches."""
        found = []
        for i, r in enumerate(self.regions):
            for a, b in clip([(first, end)], r.first, r.end):
                base = int(self.start[i])
                found.append(np.arange(base + (a - r.first) // ROW, base - (-(b - r.first) // ROW)))
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _gather(self, source: list[torch.Tensor], rows: np.ndarray) -> torch.Tensor:
        out = torch.empty((len(rows), ROW), dtype=torch.uint8, device=self.device)
        for i, local, at in self._by_region(rows):
            if _contiguous(local):
                out[at : at + len(local)] = source[i][local[0] : local[-1] + 1]
            else:
                torch.index_select(source[i], 0, self._index(local), out=out[at : at + len(local)])
        return out

    def _by_region(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray, int]]:
        """(region, rows inside it, position of the first of them in `rows`); `rows` ascends."""
        cuts = np.searchsorted(rows, self.start)
        for i in np.flatnonzero(np.diff(cuts)):
            yield int(i), rows[cuts[i] : cuts[i + 1]] - self.start[i], int(cuts[i])

    def _index(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.device)


def _contiguous(rows: np.ndarray) -> bool:
    return bool(rows[-1] - rows[0] + 1 == len(rows))


def _tile(pattern: str) -> torch.Tensor:
    """[PERIOD, ROW] bytes: 16-bit words with a fixed high byte and a low byte that depends on the place."""
    random = np.random.default_rng(PATTERNS.index(pattern)).integers(1, 127, size=(PERIOD, ROW // 2), dtype=np.uint8)
    low, high = (random | 0x80, 0xFF) if pattern == "A" else (random, 0x7A)
    return torch.from_numpy(np.stack((low, np.full_like(low, high)), axis=-1).reshape(PERIOD, ROW))
