"""Import of Nsight Systems SQLite exports: which tables and columns a capture has depends on capture and version."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from kineto_cases import SHARED, needs_shared
from nsys_cases import COPY, KERNEL, NAMES, PROCESS, SET, call, copied, export, kernel, nvtx, version

from tesserasim.cli import main
from tesserasim.errors import InputError, NotKernelTraceError
from tesserasim.trace.importer import import_profile
from tesserasim.trace.inspect import inspect_file
from tesserasim.trace.parquet import read_trace, write_trace

pytestmark = pytest.mark.quick
OTHER = PROCESS + (1 << 24)


def test_every_column_reaches_the_trace(tmp_path: Path) -> None:
    """Mutation tried: `shared_bytes` from the static part alone → 1024 instead of 5120, fails."""
    tables = {
        KERNEL: [kernel(1_000, 1_400, 11), kernel(2_000, 2_500, 12, streamId=13)],
        COPY: [copied(500, 900)], SET: [{**copied(1_450, 1_500), "bytes": 64}], "META_DATA_EXPORT": version(),
        "TARGET_INFO_GPU": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}, {"id": 1, "name": "NVIDIA L40S"}],
    }  # fmt: skip
    trace = import_profile(export(tmp_path / "e.sqlite", tables))
    rows = [(k.name, k.kind, k.stream, k.start_ns, k.duration_ns, k.gap_ns) for k in trace]
    assert rows == [
        ("[CUDA memcpy Host-to-Device]", "copy", 7, 0, 400, 0),
        ("void gemm<float>(float*)", "gemm", 7, 500, 400, 100),
        ("[CUDA memset]", "memset", 7, 950, 50, 50),
        ("void gemm<float>(float*)", "gemm", 13, 1500, 500, 0),
    ]
    first, gemm, cleared = trace.kernels[:3]
    assert (gemm.grid, gemm.block, gemm.cluster) == ((8, 2, 1), (128, 1, 1), (2, 1, 1))
    assert (gemm.registers, gemm.shared_bytes) == (32, 5120)
    assert (first.read_bytes, first.write_bytes, cleared.write_bytes) == (0, 4096, 64)
    assert (trace.meta.gpu, trace.meta.warnings, trace.unit) == ("NVIDIA H100 80GB HBM3", (), "e")
    write_trace(trace, tmp_path / "t.parquet")
    assert read_trace(tmp_path / "t.parquet") == trace


def test_tables_and_columns_that_lack_are_no_error(tmp_path: Path) -> None:
    """Kernels alone, in the columns of an early version.

    Mutation tried: `select` asks for every wanted column → SQLite knows none called greenContextId, fails.
    """
    old = {k: v for k, v in kernel(0, 400).items() if k in ("start", "end", "deviceId", "streamId", "shortName")}
    trace = import_profile(export(tmp_path / "e.sqlite", {KERNEL: [old]}))
    assert [(k.name, k.grid, k.cluster) for k in trace] == [("gemm", (0, 0, 0), (1, 1, 1))]
    assert trace.meta.warnings == ("the export does not say its schema version",)
    assert trace.meta.gpu == ""


@pytest.mark.parametrize("tables", [{}, {KERNEL: []}, {COPY: []}, {"META_DATA_EXPORT": version()}])
def test_no_kernels_is_one_line(tmp_path: Path, tables: dict[str, Any]) -> None:
    path = export(tmp_path / "e.sqlite", tables)
    for function in (import_profile, inspect_file):
        with pytest.raises(NotKernelTraceError, match=r"no GPU kernels in .*CUPTI_ACTIVITY_KIND_KERNEL") as caught:
            function(path)
        assert "\n" not in str(caught.value) and "SELECT" not in str(caught.value)


def test_a_capture_of_the_cpu_is_described(tmp_path: Path) -> None:
    path = export(tmp_path / "e.sqlite", {"NVTX_EVENTS": [nvtx(1, 9, "step 1")]})
    assert inspect_file(path)["kernels"] == 0
    with pytest.raises(NotKernelTraceError, match="no table CUPTI_ACTIVITY_KIND_KERNEL"):
        import_profile(path)


@pytest.mark.parametrize(
    ("given", "said"),
    [("3.25.0", None), ("2.4.1", None), ("99.0.0", "unknown export schema version 99.0.0"), ("", "does not say"),
     ("four", "unknown export schema version four"), ("0.9", "unknown export schema version 0.9")],
)  # fmt: skip
def test_schema_version_is_read_and_an_unknown_one_said(tmp_path: Path, given: str, said: str | None) -> None:
    """Mutation tried: the version looked up in a column of its own name → none is found, fails."""
    path = export(tmp_path / "e.sqlite", {KERNEL: [kernel(0, 9)], "META_DATA_EXPORT": version(given)})
    warnings = inspect_file(path)["warnings"]
    assert (said is None and not warnings) or (said is not None and said in warnings[0])


def test_dangling_string_ids_are_named_and_said(tmp_path: Path) -> None:
    """Mutation tried: `_kernel_name` does not note the missing id → no warning, fails."""
    rows = [kernel(0, 9, demangledName=123, shortName=124), kernel(10, 19, demangledName=123), kernel(20, 29)]
    trace = import_profile(export(tmp_path / "e.sqlite", {KERNEL: rows, "META_DATA_EXPORT": version()}))
    assert [k.name for k in trace] == ["string 123?", "gemm", "void gemm<float>(float*)"]
    assert trace.meta.warnings == ("1 kernel name not in StringIds: ids 123",)


def test_graph_kernels_by_node_by_graph_and_by_their_launch(tmp_path: Path) -> None:
    """One correlation id is shared by all kernels of a graph launch; node ids decide the order of overlaps.

    Mutation tried: `graph` from graphNodeId alone → 3 instead of 4, fails.
    """
    rows = [
        kernel(100, 150, 5, graphNodeId=2, graphId=9), kernel(100, 150, 5, graphNodeId=1, graphId=9, shortName=3),
        kernel(200, 210, 6, graphId=9), kernel(220, 230, 7), kernel(240, 250, 8),
    ]  # fmt: skip
    tables = {KERNEL: rows, "CUPTI_ACTIVITY_KIND_RUNTIME": [call(1, 7, 4), call(2, 8, 3)]}
    path = export(tmp_path / "e.sqlite", tables)
    facts = inspect_file(path)
    assert (facts["kernels"], facts["graph_kernels"], facts["busy_ns"], facts["union_ns"]) == (5, 4, 130, 80)
    assert any("starting before an earlier one" in w for w in facts["warnings"])


def test_graphs_recorded_as_a_whole_are_said(tmp_path: Path) -> None:
    tables = {"CUPTI_ACTIVITY_KIND_GRAPH_TRACE": [{"start": 1, "end": 99}, {"start": 101, "end": 199}]}
    with pytest.raises(NotKernelTraceError, match=r"2 runs of CUDA graphs .* --cuda-graph-trace=node"):
        import_profile(export(tmp_path / "e.sqlite", tables))


def test_streams_of_processes_and_green_contexts(tmp_path: Path) -> None:
    """Two processes call their streams 7; a correlation id is unique within a process only.

    Mutation tried: `_Export.stream` without the process → one stream and a false overlap, fails.
    """
    rows = [kernel(0, 100, 1), kernel(50, 150, 1, globalPid=OTHER), kernel(200, 210, 2, streamId=13, greenContextId=4)]
    runtime = [call(1, 1, 4), call(2, 1, 3, OTHER)]
    tables = {KERNEL: rows, "CUPTI_ACTIVITY_KIND_RUNTIME": runtime, "META_DATA_EXPORT": version()}
    facts = inspect_file(export(tmp_path / "e.sqlite", tables))
    assert (facts["streams"], facts["devices"], facts["graph_kernels"], facts["warnings"]) == (3, 1, 1, [])


def test_operators_come_from_nvtx_around_the_launch(tmp_path: Path) -> None:
    tables = {
        KERNEL: [kernel(500, 600, 1), kernel(600, 700, 2), kernel(700, 800, 3)],
        "CUPTI_ACTIVITY_KIND_RUNTIME": [call(20, 1), call(40, 2), call(90, 3)],
        "NVTX_EVENTS": [nvtx(0, 80, "my range"), nvtx(10, 60, "aten::mm, op_id = 3"), nvtx(30, 50, None, text_id=6)],
    }
    trace = import_profile(export(tmp_path / "e.sqlite", tables, {**NAMES, 6: "aten::add_"}))
    assert [k.op for k in trace] == ["aten::mm", "aten::add_", "gemm"]


def test_gpu_numbers_of_cuda_and_of_the_system(tmp_path: Path) -> None:
    """Mutation tried: the numbers of TARGET_INFO_CUDA_DEVICE ignored → the name of the wrong GPU, fails."""
    gpus = [{"id": 0, "name": "NVIDIA L40S"}, {"id": 3, "name": "NVIDIA A100"}]
    tables = {KERNEL: [kernel(0, 9)], "TARGET_INFO_GPU": gpus, "TARGET_INFO_CUDA_DEVICE": [{"cudaId": 0, "gpuId": 3}]}
    assert inspect_file(export(tmp_path / "e.sqlite", tables))["gpu"] == "NVIDIA A100"
    del tables["TARGET_INFO_CUDA_DEVICE"]
    assert inspect_file(export(tmp_path / "f.sqlite", tables))["gpu"] == "NVIDIA L40S"


def test_times_are_integers_to_the_last_nanosecond(tmp_path: Path) -> None:
    """Mutation tried: times through float → 400 ns near 2^62 become 512, fails."""
    late = 1 << 62
    rows = [kernel(late + 1, late + 401), kernel(late + 450, late + 451), kernel(9, 5), kernel(None, 5), kernel("x", 5)]
    trace = import_profile(export(tmp_path / "e.sqlite", {KERNEL: rows, "META_DATA_EXPORT": version()}))
    assert [(k.start_ns, k.duration_ns, k.gap_ns) for k in trace] == [(0, 400, 0), (449, 1, 49)]
    assert sorted(w[:21] for w in trace.meta.warnings) == ["dropped 1 GPU event w", "dropped 2 GPU events "]


def test_nothing_is_written_beside_the_file(tmp_path: Path) -> None:
    """A file in write-ahead mode; a log beside it is not read, which is said.

    Mutation tried: `immutable=1` left out → SQLite wants -shm and -wal beside the file, fails.
    """
    path = export(tmp_path / "odd name?#%.sqlite", {KERNEL: [kernel(0, 9)], "META_DATA_EXPORT": version()})
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.close()
    before = path.read_bytes()
    assert inspect_file(path)["warnings"] == []
    assert [p.name for p in tmp_path.iterdir()] == [path.name] and path.read_bytes() == before
    (tmp_path / f"{path.name}-wal").write_bytes(b"x")
    assert any("write-ahead log" in w for w in inspect_file(path)["warnings"])


def test_views_are_never_run(tmp_path: Path) -> None:
    path = export(tmp_path / "e.sqlite", {})
    database = sqlite3.connect(path)
    endless = "WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM n) SELECT * FROM n"
    database.execute(f"CREATE VIEW {KERNEL} AS {endless}")
    database.commit()
    database.close()
    with pytest.raises(NotKernelTraceError, match="no table"):
        inspect_file(path)


def test_damaged_pages_are_one_line(tmp_path: Path) -> None:
    path = export(tmp_path / "e.sqlite", {KERNEL: [kernel(i, i + 1) for i in range(500)]})
    data = bytearray(path.read_bytes())
    data[4096 * 4 : 4096 * 5] = b"\xff" * 4096
    path.write_bytes(data)
    with pytest.raises(InputError, match="damaged SQLite database"):
        inspect_file(path)


@needs_shared
@pytest.mark.parametrize("name", ["37a_no_nvtx_no_runtime", "37f_metadata_export_schema"])
def test_shared_exports(name: str) -> None:
    facts = inspect_file(SHARED / "data" / "bad_inputs" / f"{name}.sqlite")
    assert (facts["kernels"], facts["busy_ns"], facts["span_ns"]) == (3, 1200, 2400)
    assert any("99.0.0" in w for w in facts["warnings"]) is name.startswith("37f")


@needs_shared
def test_shared_export_without_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    path = SHARED / "data" / "bad_inputs" / "37d_no_kernel_table.sqlite"
    assert main(["inspect", os.fspath(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no GPU kernels in" in said and "CUPTI_ACTIVITY_KIND_KERNEL" in said


@needs_shared
def test_real_export_through_parquet(tmp_path: Path) -> None:
    path = SHARED / "data" / "traces" / "nsys-h100-2gpu-1s.sqlite"
    write_trace(import_profile(path), tmp_path / "t.parquet")
    assert inspect_file(tmp_path / "t.parquet") == inspect_file(path)
