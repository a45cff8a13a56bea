"""What a trace file must hold: columns, types, nulls and ranges of the rows, types and ranges of the JSON.

Everything about rows is checked on whole Arrow columns, so a trace of any size costs little; the error names
the first row that breaks a rule. A trace that is written passes the same rules, so it can be read again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tesserasim.errors import InputError
from tesserasim.files import shown
from tesserasim.trace.model import PHASES, SCHEMA_VERSION, Buffer, Trace, TraceMeta

HOUR_NS = 3600 * 10**9
MAX_BYTES = 1 << 50
MAX_COUNT = (1 << 31) - 1
MAX_FLOPS = 1 << 62
INT64 = (1 << 63) - 1
SECOND_NS, MILLISECOND_NS = 10**9, 10**6

_TIMES = dict.fromkeys(("duration_ns", "duration_p10_ns", "duration_p90_ns"), (0, HOUR_NS))
_COUNTS = dict.fromkeys(("id", "registers"), (0, MAX_COUNT))  # stream and device are labels: any number
_SIZES = dict.fromkeys(("shared_bytes", "read_bytes", "write_bytes"), (0, MAX_BYTES))
_ROW_LIMITS = {
    **_TIMES, **_COUNTS, **_SIZES, "gap_ns": (-HOUR_NS, HOUR_NS), "start_ns": (0, INT64), "flops": (0, MAX_FLOPS),
    "group": (-1, MAX_COUNT),
}  # fmt: skip
#: A profile may mix clocks; it can be read and inspected, but `check_simulated` keeps it out of a mix.
_PROFILE_LIMITS = _ROW_LIMITS | dict.fromkeys(_TIMES, (0, INT64)) | {"gap_ns": (-INT64, INT64)}
_ACCESS_LIMITS = {"buffer": (0, MAX_COUNT), "offset": (0, MAX_BYTES), "nbytes": (0, MAX_BYTES)}
_LAUNCH_LIMITS = {
    "empty_graph_ns": (0, SECOND_NS), "per_node_ns": (0, MILLISECOND_NS), "memset_overhead_ns": (0, MILLISECOND_NS),
    "kernel_overhead_ns": (-MILLISECOND_NS, MILLISECOND_NS),
}  # fmt: skip
_BUFFER_LIMITS = {
    "id": (0, MAX_COUNT), "nbytes": (0, MAX_BYTES), "storage": (-1, MAX_FLOPS), "storage_offset": (0, MAX_BYTES),
    "first_use": (-1, MAX_COUNT), "last_use": (-1, MAX_COUNT), "bytes_per_token": (0, MAX_BYTES),
    "bytes_per_sequence": (0, MAX_BYTES),
}  # fmt: skip
_UNIT_LIMITS = {"batch": (1, MAX_COUNT), "tokens": (0, MAX_COUNT), "context": (0, MAX_COUNT)}


# --- rows ----------------------------------------------------------------------------------------------


def check_columns(table: pa.Table, schema: pa.Schema, where: str, imported: bool = False) -> None:
    """InputError at the first column of `table` that is not as `schema` and the ranges above say."""
    limits = _PROFILE_LIMITS if imported else _ROW_LIMITS
    names = table.schema.names
    for field in schema:
        if names.count(field.name) != 1:
            problem = "is missing" if field.name not in names else "appears twice"
            raise InputError(f"{where}: damaged trace: column {field.name!r} {problem}; make the trace again")
    for name in names:
        if name not in schema.names:
            raise InputError(f"{where}: not a trace: unknown column {shown(name)}")
    for field in schema:
        column = table.column(field.name)
        _check_type(column.type, field.type, field.name, where)
        if column.null_count:
            _fail_row(where, field.name, column, pc.is_null(column), "has no value")
        if field.name in limits:
            _check_range(column, *limits[field.name], field.name, where)
    _check_sites(table.column("site"), where)
    _check_lists(table, where)


def check_simulated(trace: Trace, where: str) -> None:
    """InputError for a trace without kernels, and for times of a profile that no unit of a request can have."""
    if not trace.kernels:
        raise InputError(f"{where}: a trace without kernels; nothing of it can be simulated")
    for k in trace.kernels if trace.meta.origin == "imported" else ():
        if k.duration_ns > HOUR_NS or abs(k.gap_ns) > HOUR_NS:
            name, value = ("gap_ns", k.gap_ns) if k.duration_ns <= HOUR_NS else ("duration_ns", k.duration_ns)
            raise InputError(f"{where}: row {k.id}: {name} {value} is beyond an hour; import it with --clip or --range")


def _check_type(found: pa.DataType, wanted: pa.DataType, name: str, where: str) -> None:
    """Integers may be 32 or 64 bits wide, text and lists of any Arrow layout; everything else is as written."""
    if pa.types.is_integer(wanted):
        good = pa.types.is_int32(found) or pa.types.is_int64(found)
    elif pa.types.is_string(wanted):
        good = pa.types.is_string(found) or pa.types.is_large_string(found)
    elif pa.types.is_struct(wanted):
        good = pa.types.is_struct(found) and sorted(f.name for f in found) == sorted(f.name for f in wanted)
        if good:
            for field in wanted:
                _check_type(found.field(field.name).type, field.type, f"{name}.{field.name}", where)
    elif pa.types.is_list(wanted) or pa.types.is_fixed_size_list(wanted):
        good = pa.types.is_list(found) or pa.types.is_large_list(found) or pa.types.is_fixed_size_list(found)
        if good:
            _check_type(found.value_type, wanted.value_type, f"{name}[]", where)
    else:
        good = found == wanted
    if not good:
        raise InputError(f"{where}: damaged trace: column {name} holds {str(found)[:60]}, not {str(wanted)[:60]}")


def _check_range(column: Any, low: int, high: int, name: str, where: str, rows: Any = None) -> None:
    ends = pc.min_max(column)
    least, most = ends["min"].as_py(), ends["max"].as_py()
    if least is not None and (least < low or most > high):
        bad = pc.or_(pc.less(column, low), pc.greater(column, high))
        _fail_row(where, name, column, pc.fill_null(bad, False), f"must lie between {low} and {high}", rows)


def _fail_row(where: str, name: str, column: Any, bad: Any, problem: str, rows: Any = None) -> None:
    first = pc.index(bad, True).as_py()
    row, value = first if rows is None else rows[first].as_py(), column[first].as_py()
    tail = "" if value is None else f", not {shown(value)}"
    raise InputError(f"{where}: damaged trace: row {row}: {name} {problem}{tail}; make the trace again")


def _check_sites(sites: Any, where: str) -> None:
    """A site is a name that a plan can state: a line of text, not empty, and not the plan's wildcard."""
    good = pc.and_(pc.utf8_is_printable(sites), pc.not_equal(sites, "*"))
    good = pc.and_(good, pc.greater(pc.utf8_length(sites), 0))
    if not pc.all(good).as_py() and len(sites):
        _fail_row(where, "site", sites, pc.invert(good), "must be a line of text other than '*'")


def _check_lists(table: pa.Table, where: str) -> None:
    shape = table.column("shape").combine_chunks()
    for field in shape.type:
        _check_range(pc.struct_field(shape, field.name), 0, MAX_FLOPS, f"shape.{field.name}", where)
    for name in ("grid", "block", "cluster"):
        column = table.column(name)
        sizes, rows = pc.list_value_length(column), pc.list_parent_indices(column)
        if len(column) and not pc.all(pc.equal(sizes, 3)).as_py():
            _fail_row(where, name, column, pc.not_equal(sizes, 3), "must hold three counts")
        values = pc.list_flatten(column)
        if values.null_count:
            _fail_row(where, name, values, pc.is_null(values), "has no value", rows)
        _check_range(values, 0, MAX_COUNT, name, where, rows)
    column = table.column("accesses")
    accesses, rows = pc.list_flatten(column), pc.list_parent_indices(column)
    if accesses.null_count:
        _fail_row(where, "accesses", accesses, pc.is_null(accesses), "holds an empty entry", rows)
    for field in accesses.type:
        values, name = pc.struct_field(accesses, field.name), f"accesses.{field.name}"
        if values.null_count:
            _fail_row(where, name, values, pc.is_null(values), "has no value", rows)
        if field.name in _ACCESS_LIMITS:
            _check_range(values, *_ACCESS_LIMITS[field.name], name, where, rows)


# --- JSON ----------------------------------------------------------------------------------------------


def check_document(document: Any, where: str) -> None:
    """InputError at the first field of the metadata or the buffers that has a wrong type or range."""
    parts = document if isinstance(document, dict) else {}
    meta, buffers = parts.get("meta"), parts.get("buffers")
    if not isinstance(meta, dict) or not isinstance(buffers, dict):
        raise InputError(f"{where}: damaged trace: its metadata holds no 'meta' and 'buffers'; make it again")
    version = meta.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise InputError(f"{where}: trace schema version {shown(version)}, this tool reads up to {SCHEMA_VERSION}")
    _check_names(meta, {f.name for f in dataclasses.fields(TraceMeta)}, "metadata", where)
    _check_names(buffers, {f.name for f in dataclasses.fields(Buffer)}, "buffers", where)
    _check_meta(meta, where)
    _check_unit(meta["unit"], where)
    _check_buffers(buffers, where)


def _check_names(found: Mapping[str, Any], wanted: set[str], what: str, where: str) -> None:
    for name in sorted(wanted - set(found)):
        raise InputError(f"{where}: damaged trace: {what} lack {name!r}; make the trace again")
    for name in sorted(set(found) - wanted):
        raise InputError(f"{where}: damaged trace: {what} hold the unknown field {shown(name)}")


def _need(good: bool, where: str, name: str, rule: str, value: Any) -> None:
    if not good:
        raise InputError(f"{where}: damaged trace: {name} must be {rule}, not {shown(value)}; make the trace again")


def _whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _line(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 1000 and value.isprintable()


def _check_meta(meta: Mapping[str, Any], where: str) -> None:
    for name in ("origin", "model"):
        _need(_line(meta[name]), where, name, "a line of text", meta[name])
    for name in ("driver", "torch", "structure_sha256", "tool_version", "captured_at", "source"):
        _need(isinstance(meta[name], str), where, name, "text", meta[name])
    gpu = meta["gpu"]  # an imported profile says what it says, or nothing
    good = isinstance(gpu, str) and len(gpu) <= 1000 if meta["origin"] == "imported" else _line(gpu)
    _need(good, where, "gpu", "the name of a GPU", gpu)
    _need(_whole(meta["tp_size"], 1, MAX_COUNT), where, "tp_size", "a count of GPUs", meta["tp_size"])
    if meta["tp_size"] > 1 or meta["tp_rank"] != 0:
        size, rank = meta["tp_size"], shown(meta["tp_rank"])
        what = f"rank {rank} of {size}; capture the model on one GPU"
        raise InputError(f"{where}: tensor-parallel traces are not simulated yet ({what})")
    for name, high in (("repeats", MAX_COUNT), ("workspace_bytes", MAX_BYTES)):
        _need(_whole(meta[name], 0, high), where, name, f"a whole number from 0 to {high}", meta[name])
    for name in ("e2e_ns", "launch", "moe"):
        _need(meta[name] is None or isinstance(meta[name], dict), where, name, "a table or null", meta[name])
    _need(isinstance(meta["extra"], dict), where, "extra", "a table", meta["extra"])
    warnings = meta["warnings"]
    good = isinstance(warnings, list | tuple) and all(isinstance(w, str) for w in warnings)
    _need(good, where, "warnings", "a list of texts", warnings)
    for name in ("median", "p10", "p90") if meta["e2e_ns"] is not None else ():
        value = meta["e2e_ns"].get(name)
        _need(_whole(value, 0, HOUR_NS), where, f"e2e_ns.{name}", f"a whole number from 0 to {HOUR_NS}", value)
    for name, (low, high) in _LAUNCH_LIMITS.items():
        value = (meta["launch"] or {}).get(name, 0)
        good = type(value) in (int, float) and math.isfinite(value) and low <= value <= high
        _need(good, where, f"launch.{name}", f"a number from {low} to {high}", value)


def _check_unit(unit: Any, where: str) -> None:
    _need(isinstance(unit, dict), where, "unit", "a table", unit)
    _need(_line(unit.get("name")), where, "unit.name", "a line of text", unit.get("name"))
    phase = unit.get("phase", "other")
    _need(isinstance(phase, str) and phase in PHASES, where, "unit.phase", f"one of {', '.join(PHASES)}", phase)
    for name, (low, high) in _UNIT_LIMITS.items():
        value = unit.get(name, low)
        _need(_whole(value, low, high), where, f"unit.{name}", f"a whole number from {low} to {high}", value)
    # An imported unit may not know its point; one that states it states no point that cannot be.
    for name in {"prefill": ("batch", "tokens"), "decode": ("batch", "context")}.get(phase, ()):
        _need(unit.get(name, 1) >= 1, where, f"unit.{name}", f"at least 1 for a {phase}", unit.get(name))


def _check_buffers(buffers: Mapping[str, Any], where: str) -> None:
    count = len(buffers["id"]) if isinstance(buffers["id"], list) else -1
    for name, values in buffers.items():
        good = isinstance(values, list) and len(values) == count
        _need(good, where, f"buffers.{name}", "a list as long as the others", values)
        rule: Callable[[Any], bool] = _line
        text = "a line of text"
        if name in _BUFFER_LIMITS:
            low, high = _BUFFER_LIMITS[name]
            if set(map(type, values)) <= {int} and (not values or (min(values) >= low and max(values) <= high)):
                continue
            rule, text = (lambda v, a=low, b=high: _whole(v, a, b)), f"a whole number from {low} to {high}"  # type: ignore[misc]
        for i, value in enumerate(values):
            _need(rule(value), where, f"buffers.{name}[{i}]", text, value)
