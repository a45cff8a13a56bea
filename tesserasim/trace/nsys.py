"""Reader of Nsight Systems SQLite exports (`nsys export --type sqlite`) → `Profile`.

Which tables a capture has depends on what was recorded, which columns on the version: of tables and columns
only those that hold GPU rows are needed, all others add what they can. Times are integers of nanoseconds as they
are. A stream is what (process, device, stream id) name together: two processes both call theirs 7.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tesserasim.trace import sqlitefile
from tesserasim.trace.launches import Annotation, Op, process_of
from tesserasim.trace.rows import COPY, KERNEL, SET, Numbers, Profile, Row
from tesserasim.trace.values import DURATION_LIMIT, count, counted, integer, text_of

_TABLES = {
    KERNEL: "CUPTI_ACTIVITY_KIND_KERNEL", COPY: "CUPTI_ACTIVITY_KIND_MEMCPY", SET: "CUPTI_ACTIVITY_KIND_MEMSET",
}  # fmt: skip
_WHOLE_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_COLUMNS = (
    "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "contextId", "greenContextId", "graphNodeId",
    "graphId", "bytes", "copyKind", "demangledName", "shortName", "mangledName", "gridX", "gridY", "gridZ", "blockX",
    "blockY", "blockZ", "clusterX", "clusterY", "clusterZ", "registersPerThread", "staticSharedMemory",
    "dynamicSharedMemory",
)  # fmt: skip
#: Versions of the schema whose tables this reader was written for.
_KNOWN_MAJOR = (1, 2, 3)
_COPY_KINDS = {
    1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array", 4: "Array-to-Host", 5: "Array-to-Array",
    6: "Array-to-Device", 7: "Device-to-Array", 8: "Device-to-Device", 9: "Host-to-Host", 10: "Peer-to-Peer",
    11: "Unified Host-to-Device", 12: "Unified Device-to-Host", 13: "Unified Device-to-Device",
}  # fmt: skip
#: A global thread id holds the process in all but its lowest 24 bits.
_THREAD_BITS = 24
#: NVTX ranges that torch.autograd.profiler.emit_nvtx writes: an operator, then "op_id = 1" and the like.
_OPERATOR = re.compile(r"(\w+(?:::\w+)+)(?:, |$)")


@dataclass
class _Export:
    """An open export: its tables, and the numbers that stand for its streams and processes."""

    database: sqlite3.Connection
    tables: set[str]
    size: int  # of the file, bytes
    profile: Profile = field(default_factory=Profile)
    streams: Numbers = field(default_factory=Numbers)
    devices: Numbers = field(default_factory=Numbers)
    owner: dict[tuple[int, Any], Any] = field(default_factory=dict)  # (device, stream id) → first process
    greens: set[tuple[Any, Any]] = field(default_factory=set)

    def select(self, table: str, *wanted: str) -> Iterator[dict[str, Any]]:
        """Rows as {column: value}; none if this capture lacks the table."""
        if table in self.tables:
            for row in sqlitefile.select(self.database, table, wanted, self.size):
                yield dict(zip(wanted, row, strict=True))

    @cached_property
    def names(self) -> dict[Any, str]:
        """The strings of the export by id."""
        return {row["id"]: text_of(row["value"]) for row in self.select("StringIds", "id", "value")}

    def stream(self, device: int, stream: Any, process: Any) -> int:
        key = (device, stream)
        if self.owner.setdefault(key, process) == process:
            return self.streams(stream)
        return self.streams((device, stream, process))


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read the export at `path`. Raises InputError if SQLite cannot read it."""
    where = os.fspath(path)
    with sqlitefile.opened(where) as database:
        export = _Export(database, sqlitefile.table_names(database), os.path.getsize(where))
        profile = export.profile
        _check_version(export)
        _read_rows(export)
        if profile.rows:
            _read_launches(export)
            profile.gpu = _gpu(export)
        _say_what_lacks(export, where)
    profile.link()
    return profile


def _check_version(export: _Export) -> None:
    """Warn of a schema version that this reader does not know, and of one that is not there."""
    settings = {row["name"]: row["value"] for row in export.select("META_DATA_EXPORT", "name", "value")}
    given = settings.get("EXPORT_SCHEMA_VERSION", settings.get("EXPORT_SCHEMA_VERSION_MAJOR"))
    version = text_of(str(given)).strip()[:40] if given is not None else ""
    major = re.match(r"\d{1,9}", version)
    if not version:
        export.profile.notes.append("the export does not say its schema version")
    elif major is None or int(major[0]) not in _KNOWN_MAJOR:
        known = f"{_KNOWN_MAJOR[0]} to {_KNOWN_MAJOR[-1]}"
        export.profile.notes.append(f"unknown export schema version {version} (known: {known}); figures may be wrong")
    product = settings.get("EXPORT_PRODUCT_VERSION")
    if isinstance(product, str):
        export.profile.header["nsys"] = product[:40]


def _read_rows(export: _Export) -> None:
    dangling: set[Any] = set()
    odd_kinds = 0
    for role, table in _TABLES.items():
        for index, record in enumerate(export.select(table, *_COLUMNS)):
            if role == KERNEL:
                name = _kernel_name(record, export.names, dangling)
            elif role == COPY:
                kind = _COPY_KINDS.get(record["copyKind"])
                odd_kinds += kind is None
                name = f"[CUDA memcpy {kind or 'Unknown'}]"
            else:
                name = "[CUDA memset]"
            row = _row(export, role, name, record, index)
            if row is not None:
                export.profile.rows.append(row)
    if dangling:
        shown = ", ".join(str(i)[:20] for i in sorted(dangling, key=str)[:5])
        export.profile.notes.append(f"{counted(len(dangling), 'kernel name')} not in StringIds: ids {shown}")
    if odd_kinds:
        export.profile.notes.append(f"{counted(odd_kinds, 'memcpy row')} of unknown direction")


def _kernel_name(record: dict[str, Any], names: dict[Any, str], dangling: set[Any]) -> str:
    """The demangled name, else a shorter one; "string 123?" where the export lacks the string."""
    ids = [record[column] for column in ("demangledName", "shortName", "mangledName")]
    for key in ids:
        if isinstance(key, str) and key:
            return text_of(key)  # early exports hold the text itself
        if names.get(key):
            return names[key]
    missing = next((key for key in ids if key is not None), None)
    if missing is None:
        return "(unnamed)"
    dangling.add(missing)
    return f"string {str(missing)[:20]}?"


def _row(export: _Export, role: str, name: str, record: dict[str, Any], index: int) -> Row | None:
    """The row of one record, or None (counted) if it has no usable time."""
    start, end = integer(record["start"]), integer(record["end"])
    if start is None or end is None:
        export.profile.dropped["without a start or an end"] += 1
        return None
    if not (0 <= start < 1 << 63 and 0 <= end - start < DURATION_LIMIT):
        export.profile.dropped["with a negative or impossible time"] += 1
        return None
    device, process = export.devices(integer(record["deviceId"])), record["globalPid"]
    node, graph, green = (integer(record[column]) for column in ("graphNodeId", "graphId", "greenContextId"))
    if green:
        export.greens.add((device, green))

    def three(what: str) -> tuple[int, int, int]:
        x, y, z = (count(record[f"{what}{axis}"]) for axis in "XYZ")
        return (x, y, z) if max(x, y, z) < 1 << 31 else (0, 0, 0)

    kernel = role == KERNEL
    return Row(
        role=role, name=name, start_ns=start, duration_ns=end - start, device=device,
        stream=export.stream(device, integer(record["streamId"]), process),
        correlation=_launch_id(process, record["correlationId"]), external=None, node=node or None, index=index,
        grid=three("grid") if kernel else (0, 0, 0), block=three("block") if kernel else (0, 0, 0),
        cluster=_cluster(three("cluster")), registers=min(count(record["registersPerThread"]), (1 << 31) - 1),
        shared_bytes=min(count(record["staticSharedMemory"]) + count(record["dynamicSharedMemory"]), (1 << 31) - 1),
        nbytes=0 if kernel else count(record["bytes"]), graph=kernel and bool(node or graph),
    )  # fmt: skip


def _cluster(size: tuple[int, int, int]) -> tuple[int, int, int]:
    return size if all(size) else (1, 1, 1)


def _launch_id(process: Any, correlation: Any) -> int | None:
    """A correlation id is unique within its process only."""
    number, group = integer(correlation), integer(process)
    if not number:
        return None
    return number if group is None else (group >> _THREAD_BITS << 64) + number


def _read_launches(export: _Export) -> None:
    """Who launched the rows: runtime calls, and the ranges around them (operators, or the program's own names)."""
    names, launches = export.names, export.profile.launches
    needed = {row.correlation for row in export.profile.rows}
    for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER"):
        for call in export.select(table, "start", "globalTid", "correlationId", "nameId"):
            start, thread = integer(call["start"]), integer(call["globalTid"])
            key = _launch_id(thread, call["correlationId"])
            if start is not None and key in needed and key is not None:
                launches.add_call(key, names.get(call["nameId"], ""), start, _thread(thread))
    for note in export.select("NVTX_EVENTS", "start", "end", "text", "textId", "globalTid"):
        start, end = integer(note["start"]), integer(note["end"])
        text = text_of(note["text"]) or names.get(note["textId"], "")
        if start is None or end is None or end < start or not text:
            continue
        where = _thread(integer(note["globalTid"]))
        operator = _OPERATOR.match(text)
        if operator:
            launches.add_op(Op(start, end, operator[1]), where, None)
        else:
            export.profile.annotations.append(Annotation(start, end, text[:200], process_of(where)))


def _thread(number: int | None) -> str:
    return f"{(number or 0) >> _THREAD_BITS}/{(number or 0) & ((1 << _THREAD_BITS) - 1)}"


def _gpu(export: _Export) -> str | None:
    """Names of the GPUs used, "?" for one without a name; None if the export lists none."""
    used = {row.device for row in export.profile.rows}
    listed = {integer(row["id"]): row["name"] for row in export.select("TARGET_INFO_GPU", "id", "name")}
    # CUDA's number of a device may differ from that of the system where CUDA_VISIBLE_DEVICES was set.
    numbers = {
        integer(row["cudaId"]): integer(row["gpuId"])
        for row in export.select("TARGET_INFO_CUDA_DEVICE", "cudaId", "gpuId")
    }
    if not listed:
        return None
    chosen = [listed[g] for g in (numbers.get(d, d) for d in sorted(used)) if g in listed] or list(listed.values())
    return " + ".join(dict.fromkeys(text_of(name).strip() or "?" for name in chosen))


def _say_what_lacks(export: _Export, where: str) -> None:
    profile = export.profile
    profile.header["green_contexts"] = len(export.greens)
    host = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER", "NVTX_EVENTS", "OSRT_API", _WHOLE_GRAPHS)
    profile.host_events = sum(1 for table in host for _ in export.select(table, "start"))
    whole = sum(1 for _ in export.select(_WHOLE_GRAPHS, "start"))
    if whole:
        profile.notes.append(
            f"{counted(whole, 'run')} of CUDA graphs recorded as a whole, without kernels;"
            " record with --cuda-graph-trace=node"
        )
    if not profile.rows:
        table = _TABLES[KERNEL]
        why = f"the table {table} is empty" if table in export.tables else f"the export has no table {table}"
        profile.nothing = f"{why}; record with 'nsys profile --trace=cuda'"
        if whole:
            profile.nothing = f"{why}; {profile.notes[-1]}"
    if os.path.exists(f"{where}-wal") and os.path.getsize(f"{where}-wal"):
        profile.notes.append("a write-ahead log (-wal) lies beside the file and was not read; export the report again")
