"""Import of the CSV of `nsys stats --report cuda_gpu_trace`: what a terminal got, whatever the version."""

from __future__ import annotations

from pathlib import Path

import pytest
from kineto_cases import SHARED, needs_shared, write
from nsys_cases import CSV

from tesserasim.errors import InputError, NotKernelTraceError
from tesserasim.trace.importer import import_profile
from tesserasim.trace.inspect import inspect_file
from tesserasim.trace.parquet import read_trace, write_trace
from tesserasim.trace.sniff import FileKind, sniff

pytestmark = pytest.mark.quick
HEADER = "Start (ns),Duration (ns),CorrId,Device,Strm,Name\n"


def test_preamble_quotes_empty_cells_and_devices(tmp_path: Path) -> None:
    """Mutation tried: every row on device 0 → one device, fails."""
    path = write(tmp_path / "report.csv", CSV)
    trace = import_profile(path)
    rows = [(k.name, k.kind, k.device, k.stream, k.start_ns, k.duration_ns, k.grid) for k in trace]
    assert rows == [
        ("[CUDA memcpy Host-to-Device]", "copy", 0, 7, 0, 500, (0, 0, 0)),
        ('void f<int, 4>(float *, "x", int)', "other", 0, 7, 1000, 300, (8, 1, 1)),
        ("g", "other", 1, 7, 1100, 300, (8, 1, 1)),
        ("[CUDA memset]", "memset", 1, 9, 1500, 10, (0, 0, 0)),
    ]
    assert (trace.kernels[0].write_bytes, trace.kernels[0].read_bytes) == (4_194_000, 0)
    assert (trace.kernels[1].shared_bytes, trace.kernels[1].registers) == (33_000, 32)
    facts = inspect_file(path)
    assert (facts["kernels"], facts["memcpys"], facts["devices"], facts["gpu"]) == (2, 1, 2, "NVIDIA L40S")
    assert (facts["busy_ns"], facts["union_ns"], facts["span_ns"]) == (600, 400, 400)
    write_trace(trace, tmp_path / "t.parquet")
    assert inspect_file(tmp_path / "t.parquet") == facts


@pytest.mark.parametrize(
    ("start", "duration", "row", "expected"),
    [
        ("Start (ns)", "Duration (ns)", "2000,300", (300, 700)), ("Start (us)", "Duration (us)", "2,0.3", (300, 700)),
        ("Start (ms)", "Duration (ns)", "0.002,300", (300, 700)),
        ("Start(nsec)", "Duration(nsec)", "2000,300", (300, 700)),
        ("Start (s)", "Duration (us)", "0.000002,0.3", (300, 700)),
        ("Start (sec)", "Duration (ms)", "2e-6,0.0003", (300, 700)),
    ],
)  # fmt: skip
def test_units_are_those_of_the_header(
    tmp_path: Path, start: str, duration: str, row: str, expected: tuple[int, int]
) -> None:
    """Mutation tried: `_Table.time` takes ns for everything → the second case fails."""
    begin = {"(ns)": "1000", "(us)": "1", "(ms)": "0.001", "(nsec)": "1000", "(s)": "0.000001", "(sec)": "1e-6"}
    unit = start[5:].strip()
    text = f"{start},{duration},CorrId,Device,Strm,Name\n{begin[unit]},0,1,GPU (0),7,a\n{row},2,GPU (0),7,b\n"
    trace = import_profile(write(tmp_path / "r.csv", text))
    assert (trace.kernels[1].duration_ns, trace.kernels[1].start_ns - 300) == expected


def test_nanoseconds_beyond_32_bits_and_near_63(tmp_path: Path) -> None:
    """Mutation tried: times through float → the last start is not exact, fails."""
    text = HEADER + "3000000000,2200000000,1,GPU (0),7,k1\n9223372036854775000,900,2,GPU (0),7,k2\n"
    trace = import_profile(write(tmp_path / "r.csv", text))
    assert [(k.start_ns, k.duration_ns) for k in trace] == [(0, 2200000000), (9223372033854775000, 900)]
    write_trace(trace, tmp_path / "t.parquet")
    assert read_trace(tmp_path / "t.parquet") == trace
    beyond = HEADER + "1,2,1,GPU (0),7,k\n9223372036854775808,1,2,GPU (0),7,k\n-5,1,2,GPU (0),7,k\n7,-1,2,GPU (0),7,k\n"
    found = import_profile(write(tmp_path / "b.csv", beyond))
    assert len(found) == 1 and "dropped 3 GPU events" in found.meta.warnings[0]


VARIANTS = {
    "crlf": CSV.replace("\n", "\r\n"), "bom": "\ufeff" + CSV, "no_end": CSV.rstrip("\n"),
    "semicolons": "\n".join(line.replace(",", ";").replace("int; 4", "int, 4") for line in CSV.splitlines()),
    "tabs": "Start (ns)\tDuration (ns)\tDevice\tStrm\tName\n2000\t300\tNVIDIA L40S (0)\t7\tf\n"
    "2100\t300\tNVIDIA L40S (1)\t7\tg\n",
    "other_report_after": CSV + "\nProcessing [r.sqlite] with [cuda_api_sum.py]...\n"
    "Time (%),Total Time (ns),Num Calls,Avg (ns),Name\n50.0,1000,2,500.0,cudaLaunchKernel\n",
    "other_report_before": "Start (ns),Duration (ns),Name,Result,CorrID,Pid,Tid\n1,2,cudaMalloc,0,3,4,5\n\n" + CSV,
    "cut_row": CSV + "2600,3,11,8",
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_the_text(tmp_path: Path, name: str) -> None:
    """Mutation tried: `_Table.of_gpu` always true → API calls count as kernels, fails."""
    path = write(tmp_path / "r.csv", VARIANTS[name])
    assert sniff(path) is FileKind.NSYS_STATS_CSV
    facts = inspect_file(path)
    assert (facts["kernels"], facts["devices"], facts["busy_ns"], facts["union_ns"]) == (2, 2, 600, 400)
    assert any("fewer columns" in w for w in facts["warnings"]) is (name == "cut_row")


def test_a_name_over_two_lines(tmp_path: Path) -> None:
    trace = import_profile(write(tmp_path / "r.csv", HEADER + '1,2,3,GPU (0),7,"a\nb"\n5,6,7,GPU (0),7,c\n'))
    assert [k.name for k in trace] == ["a\nb", "c"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Time (%),Total Time (ns),Instances,Avg (ns),Name\n100.0,5,1,5.0,gemm\n", "--report cuda_gpu_trace"),
        ("Start (ns),Duration (ns),Name,Result,CorrID,Pid,Tid\n1,2,cudaMalloc,0,3,4,5\n", "--report cuda_gpu_trace"),
        (HEADER, "the report has no rows"),
        (HEADER + "never,2,3,GPU (0),7,k\n", "dropped 1 GPU event"),
    ],
)
def test_reports_without_gpu_rows_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "r.csv", text)
    for function in (import_profile, inspect_file):
        with pytest.raises(NotKernelTraceError, match=said) as caught:
            function(path)
        assert "no GPU kernels in" in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_unit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"r.csv:1: unknown unit of time 'weeks'"):
        import_profile(write(tmp_path / "r.csv", HEADER.replace("Duration (ns)", "Duration (weeks)") + "1,2,3,G,7,k\n"))


@needs_shared
def test_shared_files() -> None:
    folder = SHARED / "data" / "bad_inputs"
    facts = inspect_file(folder / "51_nsys_stats_with_preamble.csv")
    assert [facts[key] for key in ("kernels", "memcpys", "memsets", "streams", "devices")] == [2, 1, 0, 2, 2]
    facts = inspect_file(folder / "42_ns_overflows_int32.csv")
    assert (facts["kernels"], facts["busy_ns"], facts["span_ns"]) == (2, 2200000900, 9223372033854775900)
