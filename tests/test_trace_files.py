"""Damaged trace files: one line that names the file and the row or field, never another number."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import TINY

from tesserasim.errors import InputError
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import METADATA_KEY, SCHEMA, read_trace, write_trace
from tesserasim.trace.sniff import sniff
from tesserasim.trace.synthetic import decoder_unit

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, pa.Table, dict[str, Any]]:
    trace = decoder_unit(TINY, "decode", 4, 1, 64)
    path = tmp_path_factory.mktemp("trace") / "good.parquet"
    write_trace(trace, path)
    with pq.ParquetFile(path) as file:
        return trace, file.read(), json.loads(file.metadata.metadata[METADATA_KEY])


def refused(path: Path, table: pa.Table, document: Any, *words: str) -> None:
    """The file is refused in one line that names it and says `words`."""
    text = document if isinstance(document, str) else json.dumps(document)
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: text.encode()}), path)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and line.isprintable() and len(line) < 500
    for word in words:
        assert word in line


class TestColumns:
    """Mutations tried: skip `_check_type`; no count of the names -> each fails."""

    @pytest.mark.parametrize("name", SCHEMA.names)
    def test_every_column_is_needed(self, good: Any, tmp_path: Path, name: str) -> None:
        refused(tmp_path / "t.parquet", good[1].drop_columns([name]), good[2], f"column '{name}' is missing")

    def test_an_unknown_column(self, good: Any, tmp_path: Path) -> None:
        ones = pa.array([1] * len(good[1]))
        refused(tmp_path / "t.parquet", good[1].append_column("zz", ones), good[2], "unknown column 'zz'")

    @pytest.mark.parametrize("value", [1.5, math.nan, math.inf, True, "5", b"5", None])
    @pytest.mark.parametrize("name", ["id", "duration_ns", "gap_ns", "flops", "group"])
    def test_whole_numbers_only(self, good: Any, tmp_path: Path, name: str, value: object) -> None:
        column = pa.array([value] * len(good[1]))
        table = good[1].set_column(good[1].schema.get_field_index(name), name, column)
        refused(tmp_path / "t.parquet", table, good[2], f"column {name} holds")

    def test_other_widths_of_integers_and_lists_are_the_same_trace(self, good: Any, tmp_path: Path) -> None:
        trace, table, document = good
        wide = {"id": pa.int64(), "duration_ns": pa.int32(), "name": pa.large_string()}
        wide["grid"] = pa.large_list(pa.int64())
        for name, kind in wide.items():
            table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(kind))
        path = tmp_path / "t.parquet"
        pq.write_table(table.replace_schema_metadata({METADATA_KEY: json.dumps(document).encode()}), path)
        assert read_trace(path) == trace


ROWS: list[tuple[str, Any]] = [
    ("duration_ns", -1), ("duration_ns", 2**62), ("duration_ns", None), ("duration_p10_ns", -5), ("gap_ns", 2**62),
    ("gap_ns", -(2**62)), ("gap_ns", None), ("flops", -1), ("flops", None), ("read_bytes", -(2**62)),
    ("read_bytes", 2**62), ("write_bytes", None), ("group", -7), ("group", None), ("registers", -1), ("site", None),
    ("site", ""), ("site", "*"), ("site", "a\nb\x1b[31m"), ("name", None), ("kind", "zz"), ("phase", None), ("id", 0),
    ("grid", None), ("grid", [1, -1, 1]), ("grid", [1, None, 1]), ("shape", None), ("shape", {"m": -1}),
    ("accesses", None), ("accesses", [None]), ("start_ns", None), ("shared_bytes", 2**51),
]  # fmt: skip
ACCESSES: list[tuple[str, Any]] = [
    ("buffer", -1), ("buffer", 10**6), ("buffer", None), ("mode", "Q"), ("mode", None), ("offset", -1),
    ("offset", 2**62), ("nbytes", 2**62), ("nbytes", None), ("extent", "qq"), ("covers", None), ("evidence", "zz"),
]  # fmt: skip


class TestRows:
    """Mutations tried: no null check of columns, of access fields; no range; a lower limit alone -> each fails."""

    @pytest.mark.parametrize(("name", "value"), ROWS)
    def test_a_row(self, good: Any, tmp_path: Path, name: str, value: object) -> None:
        rows = good[1].to_pylist()
        rows[3][name] = value
        words = ("kernel 3",) if name in ("kind", "id") else (f"row 3: {name}",)
        refused(tmp_path / "t.parquet", pa.Table.from_pylist(rows, schema=SCHEMA), good[2], *words)

    @pytest.mark.parametrize(("name", "value"), ACCESSES)
    def test_an_access(self, good: Any, tmp_path: Path, name: str, value: object) -> None:
        rows = copy.deepcopy(good[1].to_pylist())
        rows[3]["accesses"][0][name] = value
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        refused(tmp_path / "t.parquet", table, good[2], f"row 3: accesses.{name}" if value is None else " 3")


META: list[tuple[str, Any]] = [
    ("unit", None), ("unit", []), ("unit", "x"), ("unit", {}), ("gpu", None), ("gpu", 5), ("gpu", ""), ("origin", 5),
    ("origin", "guessed"), ("model", None), ("model", 5), ("model", ""), ("launch", 5), ("launch", []),
    ("e2e_ns", {}), ("e2e_ns", {"p10": 1}), ("e2e_ns", {"median": 1.5, "p10": 1, "p90": 1}), ("e2e_ns", 5),
    ("workspace_bytes", -(10**15)), ("workspace_bytes", math.nan), ("workspace_bytes", None), ("repeats", True),
    ("schema_version", True), ("schema_version", 0), ("schema_version", "1"), ("schema_version", 2), ("extra", None),
    ("warnings", "abc"), ("warnings", [5]), ("source", None), ("tp_size", 0), ("tp_size", "x"), ("zz", 1),
    ("tool_version", None),
]  # fmt: skip
LAUNCH: list[tuple[str, Any]] = [
    ("empty_graph_ns", "x"), ("empty_graph_ns", math.nan), ("empty_graph_ns", 1e300), ("empty_graph_ns", -5),
    ("kernel_overhead_ns", math.inf), ("kernel_overhead_ns", 1e12), ("kernel_overhead_ns", None),
    ("memset_overhead_ns", -1), ("per_node_ns", True),
]  # fmt: skip
UNIT: list[tuple[str, Any]] = [
    ("name", 5), ("name", None), ("name", ""), ("phase", "zz"), ("phase", None), ("batch", 0), ("batch", -1),
    ("batch", "x"), ("batch", None), ("batch", math.nan), ("batch", 1.5), ("batch", 10**30), ("batch", True),
    ("context", -5), ("context", "x"), ("context", math.inf), ("context", None), ("context", 0),
]  # fmt: skip


class TestMetadata:
    """Mutations tried: `_check_unit` not called; no upper limit of launch figures; no test of tp_size -> each fails."""

    @pytest.mark.parametrize(("name", "value"), META)
    def test_a_field(self, good: Any, tmp_path: Path, name: str, value: object) -> None:
        document = copy.deepcopy(good[2])
        document["meta"][name] = value
        refused(tmp_path / "t.parquet", good[1], document, "schema version" if name == "schema_version" else name)

    @pytest.mark.parametrize("name", ["tp_size", "launch", "workspace_bytes", "e2e_ns", "origin"])
    def test_an_absent_field_is_not_its_default(self, good: Any, tmp_path: Path, name: str) -> None:
        document = copy.deepcopy(good[2])
        del document["meta"][name]
        refused(tmp_path / "t.parquet", good[1], document, f"lack '{name}'")

    @pytest.mark.parametrize(("name", "value"), LAUNCH)
    def test_launch_figures(self, good: Any, tmp_path: Path, name: str, value: object) -> None:
        document = copy.deepcopy(good[2])
        document["meta"]["launch"] = {name: value}
        refused(tmp_path / "t.parquet", good[1], document, f"launch.{name}")

    @pytest.mark.parametrize(("name", "value"), UNIT)
    def test_the_unit(self, good: Any, tmp_path: Path, name: str, value: object) -> None:
        document = copy.deepcopy(good[2])
        document["meta"]["unit"][name] = value
        refused(tmp_path / "t.parquet", good[1], document, f"unit.{name}")

    def test_tensor_parallel_traces_are_not_taken_for_whole_models(self, good: Any, tmp_path: Path) -> None:
        document = copy.deepcopy(good[2])
        document["meta"]["tp_size"] = 8
        refused(tmp_path / "t.parquet", good[1], document, "tensor-parallel traces are not simulated yet")

    @pytest.mark.parametrize("text", ["{}", "[]", "null", "5", "{", "[" * 100_000, "9" * 5000])
    def test_other_json(self, good: Any, tmp_path: Path, text: str) -> None:
        refused(tmp_path / "t.parquet", good[1], text, "damaged trace")


BUFFERS: list[tuple[str, Any]] = [
    ("id", 5), ("name", None), ("name", 5), ("nbytes", 2**70), ("nbytes", "x"), ("nbytes", None), ("nbytes", math.nan),
    ("nbytes", 1.5e9), ("role", "zz"), ("role", None), ("bytes_per_token", -(10**9)), ("bytes_per_token", math.nan),
    ("bytes_per_token", 10**12), ("bytes_per_sequence", -1), ("first_use", "x"), ("first_use", 10**9),
    ("last_use", -5), ("storage", None), ("storage_offset", -5),
]  # fmt: skip


class TestBuffers:
    """Mutations tried: `_check_buffers` not called; the fast path without `min` -> each fails."""

    @pytest.mark.parametrize(("name", "value"), BUFFERS)
    def test_a_buffer(self, good: Any, tmp_path: Path, name: str, value: object) -> None:
        document = copy.deepcopy(good[2])
        at = document["buffers"]["role"].index("state")
        document["buffers"][name][at] = value
        refused(tmp_path / "t.parquet", good[1], document, "buffer", str(at))

    def test_columns_of_other_lengths(self, good: Any, tmp_path: Path) -> None:
        document = copy.deepcopy(good[2])
        document["buffers"]["nbytes"].pop()
        refused(tmp_path / "t.parquet", good[1], document, "buffers.nbytes")


class TestFiles:
    """Mutation tried: `check_regular` opens the file in place of stat -> the pipe hangs."""

    @pytest.mark.parametrize("kind", ["pipe", "directory", "device", "none", "nul", "long"])
    def test_only_regular_files(self, tmp_path: Path, kind: str) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "directory").mkdir()
        paths = {"device": "/dev/zero", "nul": "a\0b", "long": "x" * 5000}
        with pytest.raises(InputError) as caught:
            read_trace(paths.get(kind, tmp_path / kind))
        assert str(caught.value).isprintable() and len(str(caught.value)) < 500

    def test_a_profile_is_no_pipe(self, tmp_path: Path) -> None:
        """Mutation tried: `pieces` without `check_regular` -> hangs."""
        os.mkfifo(tmp_path / "pipe.json")
        with pytest.raises(InputError, match="a pipe, not a profile"):
            sniff(tmp_path / "pipe.json")

    def test_what_is_written_can_be_read(self, good: Any, tmp_path: Path) -> None:
        """Mutation tried: `write_trace` without `check_document` -> fails."""
        trace: Trace = good[0]
        for change in ({"workspace_bytes": -1}, {"gpu": ""}, {"launch": {"kernel_overhead_ns": 1e12}}):
            wrong = dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, **change))
            with pytest.raises(InputError, match=next(iter(change))):
                write_trace(wrong, tmp_path / "t.parquet")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["name", "site", "kind", "weight_dtype", "accesses"])
def test_a_text_that_is_not_utf8(good: Any, tmp_path: Path, name: str) -> None:
    """Parquet says that a column holds UTF-8 and lets anything through. Mutation: no `table.validate`."""
    column = good[1].column(name).combine_chunks()
    bad = pa.array([b"\xff\xfe"] * len(column), pa.binary()).view(pa.string())
    if name == "accesses":
        flat = column.flatten()
        modes = pa.array([b"\xff"] * len(flat), pa.binary()).view(pa.string())
        parts = [modes if f.name == "mode" else flat.field(f.name) for f in flat.type]
        bad = pa.ListArray.from_arrays(column.offsets, pa.StructArray.from_arrays(parts, fields=list(flat.type)))
    table = good[1].set_column(good[1].schema.get_field_index(name), name, bad)
    refused(tmp_path / "t.parquet", table, good[2], "not a readable Parquet file", "UTF8")


def test_a_trace_on_a_full_disk(good: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: Parquet writes the file itself: OSError without its name, and nothing is brought to the disk."""
    path = tmp_path / "t.parquet"
    path.write_bytes(b"old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(InputError, match=r"t\.parquet: cannot be written \(No space"):
        write_trace(good[0], path)
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["t.parquet"]
    monkeypatch.undo()
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match="is a directory"):
        write_trace(good[0], path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"traceEvents": []}', "this is Kineto (Chrome trace) JSON, not a trace in Parquet; make one of it"),
        (b"hello\n", "this is text of an unknown kind, not a trace in Parquet; make traces with"),
        (b"", "this is an empty file, not a trace in Parquet"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer, not a trace in Parquet; fetch the file"),
        (b"PAR1" + bytes(40), "not a readable Parquet file"),
        (b"\x1f\x8b\x08broken", "not a readable Parquet file"),
    ],
)
def test_a_file_that_is_no_parquet_is_called_what_it_is(content: bytes, words: str, tmp_path: Path) -> None:
    """Mutation: what the Parquet reader says: magic bytes not found in the footer."""
    path = tmp_path / "t.parquet"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value)
