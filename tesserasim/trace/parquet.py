"""Traces in Parquet: a row per kernel, accesses as a nested list, the rest as JSON in the file metadata.

pandas, DuckDB and Polars read the rows as they are; the JSON (metadata and buffers) lies under the schema
key ``tesserasim``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tesserasim.errors import InputError
from tesserasim.files import check_regular, path_text
from tesserasim.trace.filecheck import check_columns, check_document
from tesserasim.trace.model import SHAPE_FIELDS, Access, Buffer, Kernel, Trace, TraceMeta
from tesserasim.trace.sniff import require_trace
from tesserasim.writing import write_whole

METADATA_KEY = b"tesserasim"
MAX_ROWS = 5_000_000  # kernels of one unit; far beyond any profile that can be simulated
_BUFFER_FIELDS = tuple(f.name for f in dataclasses.fields(Buffer))  # stored by column: the names once, not per buffer

_DIM = pa.list_(pa.int32(), 3)
_ACCESS = pa.struct(
    [
        ("buffer", pa.int32()), ("mode", pa.string()), ("offset", pa.int64()), ("nbytes", pa.int64()),
        ("extent", pa.string()), ("covers", pa.bool_()), ("evidence", pa.string()),
    ]
)  # fmt: skip
_SHAPE = pa.struct([(f, pa.int64()) for f in SHAPE_FIELDS])
_STRINGS = ("name", "site", "kind", "op", "module", "phase", "part")
_INTS = (
    "shared_bytes", "registers", "flops", "read_bytes", "write_bytes", "duration_ns", "duration_p10_ns",
    "duration_p90_ns", "gap_ns", "start_ns",
)  # fmt: skip
SCHEMA = pa.schema(
    [("id", pa.int32()), *((s, pa.string()) for s in _STRINGS), ("stream", pa.int32()), ("device", pa.int32()),
     ("grid", _DIM), ("block", _DIM), ("cluster", _DIM),
     ("weight_dtype", pa.string()), ("act_dtype", pa.string()), ("shape", _SHAPE),
     *((s, pa.int64()) for s in _INTS),
     ("group", pa.int32()), ("group_reason", pa.string()), ("accesses", pa.list_(_ACCESS))]
)  # fmt: skip


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write `trace` to `path`; the file appears whole or not at all."""
    target = Path(path)
    trace.validate(path_text(target))
    columns: dict[str, Any] = {
        name: [getattr(k, name) for k in trace.kernels] for name in SCHEMA.names if name not in ("shape", "accesses")
    }
    columns["shape"] = [{f: k.shape.get(f) for f in SHAPE_FIELDS} for k in trace.kernels]
    columns["accesses"] = [[dataclasses.asdict(a) for a in k.accesses] for k in trace.kernels]
    document = {
        "meta": dataclasses.asdict(trace.meta),
        "buffers": {f: [getattr(b, f) for b in trace.buffers] for f in _BUFFER_FIELDS},
    }
    table = _table(columns, target)
    check_columns(table, SCHEMA, path_text(target), trace.meta.origin == "imported")
    check_document(document, path_text(target))
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    content = pa.BufferOutputStream()
    # Without the stored Arrow schema, which would hold the JSON a second time in base64.
    with pq.ParquetWriter(content, SCHEMA, compression="zstd", compression_level=9, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({METADATA_KEY.decode(): text})
    write_whole(target, content.getvalue().to_pybytes())


def _table(columns: dict[str, Any], target: Path) -> pa.Table:
    try:
        return pa.table(columns, schema=SCHEMA)
    except (pa.ArrowException, OverflowError) as error:
        first = (str(error).splitlines() or ["unusable"])[0]
        raise InputError(f"{path_text(target)}: values that no trace file can hold ({first[:120]})") from None


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace written by `write_trace`.

    Raises InputError, naming the file and the row or field, for a missing file, a Parquet file of another
    kind, a newer schema version, and any type, null or number that `filecheck` refuses.
    """
    where = path_text(path)
    table, text = _read_file(path, where)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]
        raise InputError(f"{where}: damaged trace: its metadata is not JSON ({reason}); make the trace again") from None
    check_document(document, where)
    check_columns(table, SCHEMA, where, document["meta"]["origin"] == "imported")
    meta = TraceMeta(**{**document["meta"], "warnings": tuple(document["meta"]["warnings"])})
    columns = [document["buffers"][f] for f in _BUFFER_FIELDS]
    buffers = tuple(Buffer(*row) for row in zip(*columns, strict=True))
    trace = Trace(meta, tuple(_kernel(row) for row in table.to_pylist()), buffers)
    trace.validate(where)
    return trace


def _read_file(path: str | os.PathLike[str], where: str) -> tuple[pa.Table, bytes]:
    """The rows and the JSON text of a trace file."""
    check_regular(path, "file")
    try:
        with pq.ParquetFile(os.fspath(path)) as file:
            text = (file.metadata.metadata or {}).get(METADATA_KEY)
            if text is None:
                made = "make traces with 'import' or 'hw capture'"
                raise InputError(f"{where}: Parquet without tesserasim metadata; {made}")
            if file.metadata.num_rows > MAX_ROWS:
                raise InputError(f"{where}: {file.metadata.num_rows} rows; a trace has at most {MAX_ROWS}")
            table = file.read()
            table.validate(full=True)  # Parquet lets through texts that are no UTF-8
            return table, text
    except (pa.ArrowException, OSError, ValueError) as error:
        require_trace(path, where)
        first = (str(error).splitlines() or ["cannot be read"])[0]
        raise InputError(f"{where}: not a readable Parquet file ({first[:200]})") from None


def _kernel(row: dict[str, Any]) -> Kernel:
    row["shape"] = {f: v for f, v in row["shape"].items() if v is not None}
    row["accesses"] = tuple(Access(**a) for a in row["accesses"])
    for dim in ("grid", "block", "cluster"):
        row[dim] = tuple(row[dim])
    return Kernel(**row)
