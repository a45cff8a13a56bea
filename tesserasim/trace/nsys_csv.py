"""Reader of the CSV that `nsys stats --report cuda_gpu_trace --format csv` prints → `Profile`.

The text is what a terminal got: lines before the header ("Processing [report.sqlite] with ..."), other reports
before and after, columns and units that differ by version. The header says which column is what and in which unit;
a table ends at the first line that has no time in it. Numbers are exact decimals, never floats.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator
from typing import Any

from tesserasim.errors import InputError
from tesserasim.trace import source
from tesserasim.trace.rows import COPY, KERNEL, SET, Numbers, Profile, Row
from tesserasim.trace.values import DURATION_LIMIT, integer, label, scaled, text_of

_NS = {"ns": 1, "nsec": 1, "us": 10**3, "usec": 10**3, "μs": 10**3, "µs": 10**3, "ms": 10**6, "msec": 10**6,
       "s": 10**9, "sec": 10**9}  # fmt: skip
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 1 << 10, "mib": 1 << 20,
          "gib": 1 << 30, "tib": 1 << 40}  # fmt: skip
#: Our name → names of the column, lower case and without unit.
_COLUMNS = {
    "start": ("start",), "duration": ("duration",), "correlation": ("corrid", "correlationid"), "device": ("device",),
    "stream": ("strm", "stream"), "name": ("name", "kernel name"),
    "gridx": ("grdx",), "gridy": ("grdy",), "gridz": ("grdz",), "blockx": ("blkx",), "blocky": ("blky",),
    "blockz": ("blkz",), "registers": ("reg/trd",), "static": ("stcsmem",), "dynamic": ("dymsmem",),
    "bytes": ("bytes", "size"),
}  # fmt: skip
_UNIT = re.compile(r"(.*?)\s*\(([^()]*)\)")
_DEVICE = re.compile(r"(.*?)\s*\((\d{1,9})\)")
#: The whole text is held in memory; a report this large should be exported as SQLite.
_LIMIT = 1 << 30


class _Table:
    """One table of the text: where each of our columns is, and its unit."""

    def __init__(self, header: list[str]) -> None:
        self.at: dict[str, int] = {}
        self.unit: dict[str, str] = {}
        names = {name: ours for ours, theirs in _COLUMNS.items() for name in theirs}
        for i, cell in enumerate(header):
            with_unit = _UNIT.fullmatch(cell.strip())
            name, unit = (with_unit[1], with_unit[2]) if with_unit else (cell.strip(), "")
            ours = names.get(name.lower())
            if ours is not None and ours not in self.at:
                self.at[ours], self.unit[ours] = i, unit.strip().lower()

    @property
    def of_gpu(self) -> bool:
        """Whether the rows are of a GPU: an API trace has times and names too, but no device or stream."""
        return {"start", "duration", "name"} <= self.at.keys() and bool({"device", "stream"} & self.at.keys())

    def text(self, cells: list[str], column: str) -> str:
        at = self.at.get(column)
        return cells[at].strip() if at is not None and at < len(cells) else ""

    def time(self, cells: list[str], column: str) -> int | None:
        return scaled(self.text(cells, column), _NS.get(self.unit[column], 1))

    def size(self, cells: list[str], column: str) -> int:
        found = scaled(self.text(cells, column), _BYTES.get(self.unit.get(column, ""), 1))
        return found if found is not None and 0 <= found < 1 << 62 else 0

    def triple(self, cells: list[str], what: str) -> tuple[int, int, int]:
        x, y, z = (integer(self.text(cells, f"{what}{axis}")) for axis in "xyz")
        if x is None or y is None or z is None or not all(0 <= v < 1 << 31 for v in (x, y, z)):
            return 0, 0, 0
        return x, y, z


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read the CSV at `path`. Raises InputError if it is none, or is of another report (says which to make)."""
    where = os.fspath(path)
    profile = Profile()
    streams, devices = Numbers(), Numbers()
    names: dict[int, str] = {}
    table: _Table | None = None
    others = cut = 0
    for line, cells in _lines(where):
        if _is_header(cells):
            table = _Table(cells)
            others += not table.of_gpu
            _check_units(where, line, table)
        elif table is not None and table.of_gpu and cells:
            if table.at["name"] >= len(cells) and len(cells) > 1:
                cut += 1
                continue
            if not re.search(r"\d", table.text(cells, "start") + table.text(cells, "duration")) and len(cells) < 3:
                table = None  # the lines between two reports
                continue
            row = _row(profile, table, cells, line, streams, devices, names)
            if row is not None:
                profile.rows.append(row)
    if cut:
        profile.dropped["with fewer columns than the header"] = cut
    if not profile.rows and others:
        profile.nothing = "another report of 'nsys stats'; print 'nsys stats --report cuda_gpu_trace --format csv'"
    elif not profile.rows:
        profile.nothing = "the report has no rows"
    used = dict.fromkeys(names[d] for d in sorted(names) if names[d])
    profile.gpu = " + ".join(used) or None
    profile.link()
    return profile


def _lines(where: str) -> Iterator[tuple[int, list[str]]]:
    """The records of the text, with their line. Quotes may hold delimiters and line ends, a preamble may not."""
    parts, size = [], 0
    for piece in source.pieces(where):
        size += len(piece)
        if size > _LIMIT:
            raise InputError(f"{where}: more than {_LIMIT >> 20} MiB of CSV; export SQLite instead")
        parts.append(piece)
    text = b"".join(parts).decode("utf-8-sig", "replace").replace("\0", "�")
    start, line = 0, 1
    header = None
    for match in re.finditer(r"[^\r\n]*(?:\r\n|\r|\n|$)", text):
        if _is_header(next(iter(_records(match[0], _delimiter(match[0]))), [])):
            header = match
            break
        line += 1
    if header is None:
        return
    start = header.start()
    reader = _records(text[start:], _delimiter(header[0]))
    try:
        for cells in reader:
            yield line + reader.line_num - 1, cells
    except csv.Error as error:
        raise InputError(f"{where}:{line + reader.line_num - 1}: not valid CSV ({error})") from None


def _records(text: str, delimiter: str) -> Any:
    csv.field_size_limit(1 << 24)
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)


def _delimiter(header: str) -> str:
    return max(",;\t", key=header.count)


def _is_header(cells: list[str]) -> bool:
    first = [cell.strip().lower() for cell in cells]
    timed = any(re.fullmatch(r"(api )?(start|duration|time|total time) ?\(.*\)", cell) for cell in first)
    return timed and any(cell in ("name", "kernel name", "operation", "range", "strm") for cell in first)


def _check_units(where: str, line: int, table: _Table) -> None:
    for column in ("start", "duration"):
        unit = table.unit.get(column)
        if table.of_gpu and unit not in _NS:
            raise InputError(f"{where}:{line}: unknown unit of time {unit!r}; one of ns, us, ms, s was expected")


def _row(
    profile: Profile, table: _Table, cells: list[str], line: int, streams: Numbers, devices: Numbers,
    names: dict[int, str],
) -> Row | None:  # fmt: skip
    """The row of one record, or None (counted) if it has no usable time."""
    start, duration = table.time(cells, "start"), table.time(cells, "duration")
    if start is None or duration is None:
        profile.dropped["without a start or a duration"] += 1
        return None
    if not (0 <= start < 1 << 63 and 0 <= duration < DURATION_LIMIT):
        profile.dropped["with a negative or impossible time"] += 1
        return None
    given = table.text(cells, "device")
    numbered = _DEVICE.fullmatch(given)
    device = devices(int(numbered[2]) if numbered else label(given))
    names.setdefault(device, text_of(numbered[1] if numbered else given if label(given) is None else ""))
    name = text_of(table.text(cells, "name")) or "(unnamed)"
    low = name.lower()
    role = COPY if low.startswith("[cuda memcpy") else SET if low.startswith("[cuda memset") else KERNEL
    kernel = role == KERNEL
    return Row(
        role=role, name=name, start_ns=start, duration_ns=duration, device=device,
        stream=streams(label(table.text(cells, "stream"))), correlation=integer(table.text(cells, "correlation")),
        external=None, node=None, index=line, grid=table.triple(cells, "grid") if kernel else (0, 0, 0),
        block=table.triple(cells, "block") if kernel else (0, 0, 0),
        registers=min(max(integer(table.text(cells, "registers")) or 0, 0), (1 << 31) - 1),
        shared_bytes=min(table.size(cells, "static") + table.size(cells, "dynamic"), (1 << 31) - 1),
        nbytes=0 if kernel else table.size(cells, "bytes"),
    )  # fmt: skip
