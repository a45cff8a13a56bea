"""What a file is, decided by its content. Names and extensions lie: exporters write JSON into .gz and back.

`sniff` looks at the first bytes (behind gzip, where there is gzip) and never parses a whole file; it is the
importer that finds out whether the rest keeps the promise.
"""

from __future__ import annotations

import enum
import os
import re

from tesserasim.errors import InputError, NotKernelTraceError
from tesserasim.trace import protobuf, source, sqlitefile

#: Enough to see past the metadata that some exporters put before the events.
_HEAD_BYTES = 1 << 18


class FileKind(enum.Enum):
    """What a file is. The value says it in words, as it is printed."""

    KINETO = "Kineto (Chrome trace) JSON"
    PARQUET = "Parquet"
    JSON = "JSON without traceEvents"
    CHAKRA_JSON = "a Chakra workload graph (JSON)"
    PYTORCH_ET = "a PyTorch execution trace (JSON)"
    CHAKRA_ET = "a Chakra execution trace (protobuf)"
    XPLANE = "a JAX/TensorFlow xplane profile (protobuf)"
    NSYS_SQLITE = "Nsight Systems SQLite"
    NSYS_STATS_CSV = "'nsys stats' CSV"
    SQLITE = "an SQLite database without Nsight Systems tables"
    LFS_POINTER = "a Git LFS pointer"
    PTX = "PTX assembly"
    ARCHIVE = "an archive or a file compressed with something other than gzip"
    UTF16 = "UTF-16 or UTF-32 text"
    TEXT = "text of an unknown kind"
    BINARY = "binary data of an unknown kind"
    EMPTY = "empty"


#: What to do about a file that is not a profile this tool imports.
_ADVICE = {
    FileKind.JSON: "export the profile with torch.profiler's export_chrome_trace",
    FileKind.CHAKRA_JSON: "import the Kineto profile that it was made from",
    FileKind.PYTORCH_ET: "import the Kineto profile of the same run",
    FileKind.CHAKRA_ET: "import the Kineto profile that it was made from",
    FileKind.XPLANE: "profile with torch.profiler, or export the GPU rows as a Chrome trace",
    FileKind.SQLITE: "export the report with 'nsys export --type sqlite'",
    FileKind.LFS_POINTER: "fetch the file itself with 'git lfs pull'",
    FileKind.PTX: "use 'deps' for it",
    FileKind.ARCHIVE: "unpack it first",
    FileKind.TEXT: "give a Kineto JSON, an Nsight Systems export or a Parquet trace",
    FileKind.BINARY: "give a Kineto JSON, an Nsight Systems export or a Parquet trace",
}
_PROFILES = (FileKind.KINETO, FileKind.JSON, FileKind.PARQUET, FileKind.NSYS_SQLITE, FileKind.NSYS_STATS_CSV)

_MAGICS = (
    (b"PAR1", FileKind.PARQUET), (b"SQLite format 3\0", FileKind.SQLITE), (b"PK\x03\x04", FileKind.ARCHIVE),
    (b"BZh", FileKind.ARCHIVE), (b"\xfd7zXZ\0", FileKind.ARCHIVE), (b"7z\xbc\xaf\x27\x1c", FileKind.ARCHIVE),
    (b"\x28\xb5\x2f\xfd", FileKind.ARCHIVE), (b"\x04\x22\x4d\x18", FileKind.ARCHIVE),
    (b"version https://git-lfs.github.com/spec/", FileKind.LFS_POINTER),
    (b"\xff\xfe", FileKind.UTF16), (b"\xfe\xff", FileKind.UTF16), (b"\0\0\xfe\xff", FileKind.UTF16),
)  # fmt: skip
_BOM = b"\xef\xbb\xbf"
_EVENTS = re.compile(rb'"traceEvents"\s*:')
_WORKLOAD_GRAPH = re.compile(rb'"workload_graph"\s*:')
_ET_SCHEMA = re.compile(rb'"schema"\s*:\s*"[\d.]+[^"]*"')
#: The header line of a report of `nsys stats`: of GPU rows, of other events, or a summary.
_NSYS_HEADER = re.compile(
    rb"^\W*(Start|API Start|Duration|Time|Total Time) ?\((ns|us|ms|s|nsec|usec|msec|sec|%)\)\W?[,;\t]", re.MULTILINE
)
_ET_NODES = re.compile(rb'"nodes"\s*:\s*\[')


def sniff(path: str | os.PathLike[str]) -> FileKind:
    """What `path` is.

    Raises InputError if the file cannot be read, is gzip with a broken start, or is compressed twice.
    """
    where = os.fspath(path)
    head = source.head(path, _HEAD_BYTES)
    if not head.removeprefix(_BOM).strip(b" \t\r\n") and len(head) < _HEAD_BYTES:
        return FileKind.EMPTY
    if head.startswith(source.GZIP_MAGIC):
        # `head` is what lies behind one gzip layer, if there was one.
        raise InputError(f"{where}: compressed twice with gzip; unpack it once ('gunzip')")
    for magic, kind in _MAGICS:
        if head.startswith(magic):
            return _sqlite_kind(where) if kind is FileKind.SQLITE else kind
    if head[257:262] == b"ustar":
        return FileKind.ARCHIVE
    body = head.removeprefix(_BOM).lstrip(b" \t\r\n")
    if body[:1] in (b"{", b"["):
        return _json_kind(body)
    if protobuf.is_xplane(head):
        return FileKind.XPLANE
    if protobuf.is_chakra(head):
        return FileKind.CHAKRA_ET
    return _text_kind(head)


def require_profile(path: str | os.PathLike[str], kind: FileKind) -> None:
    """Raise for a `kind` that holds no kernel trace this tool can read; the error names what `path` is.

    NotKernelTraceError: recognised as something else. InputError: to be converted first.
    """
    where = os.fspath(path)
    if kind in _PROFILES:
        return
    if kind is FileKind.EMPTY:
        raise NotKernelTraceError(f"no GPU kernels in {where}: the file is empty; export it again")
    if kind is FileKind.UTF16:
        raise InputError(f"{where}: {kind.value}; convert it to UTF-8 ('iconv -f UTF-16 -t UTF-8')")
    raise NotKernelTraceError(f"{where}: this is {kind.value}, not a kernel trace; {_ADVICE[kind]}")


def require_trace(path: str | os.PathLike[str], where: str) -> None:
    """Raise InputError, naming the file `where`, if `path` is something known that is no Parquet."""
    try:
        kind = sniff(path)
    except InputError:
        return  # unreadable as what it seems to be
    if kind is FileKind.PARQUET:
        return
    advice = "make one of it with 'import'" if kind in _PROFILES else "make traces with 'import' or 'hw capture'"
    if kind in (FileKind.LFS_POINTER, FileKind.ARCHIVE):
        advice = _ADVICE[kind]
    what = "an empty file" if kind is FileKind.EMPTY else kind.value
    raise InputError(f"{where}: this is {what}, not a trace in Parquet; {advice}")


def name_json(keys: list[str]) -> FileKind:
    """What a JSON object with these top-level names is, once it has been read and held no trace events."""
    if "workload_graph" in keys:
        return FileKind.CHAKRA_JSON
    if "nodes" in keys and ("schema" in keys or "pid" in keys):
        return FileKind.PYTORCH_ET
    return FileKind.JSON


def _json_kind(body: bytes) -> FileKind:
    if body[1:2] == b"\0" or body[1:4] == b"\0\0\0":
        return FileKind.UTF16  # without a byte-order mark
    if body.startswith(b"["):
        return FileKind.KINETO  # a bare array of events is legal
    if _EVENTS.search(body):
        return FileKind.KINETO
    if _WORKLOAD_GRAPH.search(body):
        return FileKind.CHAKRA_JSON
    return FileKind.PYTORCH_ET if _ET_SCHEMA.search(body) and _ET_NODES.search(body) else FileKind.JSON


def _text_kind(head: bytes) -> FileKind:
    if b"\0" in head:
        return FileKind.UTF16 if head[:1] == b"\0" and head[1:2] in b"[{" else FileKind.BINARY
    if re.search(rb"^\s*\.version\s+\d", head, re.MULTILINE) and b".target" in head:
        return FileKind.PTX
    if _NSYS_HEADER.search(head):
        return FileKind.NSYS_STATS_CSV
    control = sum(head[:4096].count(c) for c in range(32) if c not in (9, 10, 12, 13, 27))
    return FileKind.BINARY if control > len(head[:4096]) // 20 else FileKind.TEXT


def _sqlite_kind(where: str) -> FileKind:
    """Nsight Systems exports are known by their tables; a capture may lack any one of them."""
    if source.is_gzip(where):
        return FileKind.ARCHIVE
    tables = sqlitefile.tables(where)
    marks = ("CUPTI_ACTIVITY_KIND_", "META_DATA_EXPORT", "TARGET_INFO_", "NVTX_EVENTS", "StringIds")
    return FileKind.NSYS_SQLITE if any(t.startswith(marks) for t in tables) else FileKind.SQLITE
