"""The facts of a profile: busy, union and span; streams, devices, GPU names; the same from our Parquet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_cases import H100, SHARED, SMALL, document, event, kernel, needs_shared, write

from tesserasim.deps.summary import dependencies
from tesserasim.deps.words import in_words
from tesserasim.report.words import describe_facts
from tesserasim.trace.importer import import_profile
from tesserasim.trace.inspect import facts, inspect_file, union_ns
from tesserasim.trace.model import Kernel, Trace, TraceMeta
from tesserasim.trace.parquet import write_trace

pytestmark = pytest.mark.quick


def test_small_profile() -> None:
    """Mutation tried: the import does not store its count of graph kernels → 0 instead of 2, fails."""
    assert inspect_file(SMALL) == {
        "kernels": 4, "memcpys": 1, "memsets": 1, "streams": 2, "devices": 1, "gpu": "NVIDIA H100 80GB HBM3",
        "busy_ns": 84251, "union_ns": 68500, "span_ns": 68500, "graph_kernels": 2, "warnings": [],
    }  # fmt: skip


def test_sum_union_and_span_over_streams(tmp_path: Path) -> None:
    """Mutation tried: `union_ns` returns the sum of the lengths → 210 instead of 120, fails."""
    events = [kernel("a", 10, 100), kernel("b", 20, 100, stream=20), kernel("c", 200, 10)]
    got = inspect_file(write(tmp_path / "t.json", document(events)))
    assert (got["busy_ns"], got["union_ns"], got["span_ns"]) == (210_000, 120_000, 200_000)


def test_copies_and_sets_count_for_streams_but_not_for_time(tmp_path: Path) -> None:
    events = [
        kernel("a", 10, 5), kernel("copy_kernel", 20, 5, device=1),
        event("gpu_memcpy", "Memcpy DtoD", 500, 50, device=0, stream=8),
        event("gpu_memset", "Memset (Device)", 0, 50, device=1, stream=9, grid=[8, 1, 1], block=[128, 1, 1]),
    ]  # fmt: skip
    got = inspect_file(write(tmp_path / "t.json", document(events)))
    assert (got["kernels"], got["memcpys"], got["memsets"], got["streams"], got["devices"]) == (2, 1, 1, 4, 2)
    assert (got["busy_ns"], got["span_ns"]) == (10_000, 15_000)


@pytest.mark.parametrize(
    ("properties", "gpu"),
    [
        ([H100], H100["name"]), ([], None), (None, None), ([{"id": 0, "name": ""}], "?"), ([{"id": 0}], "?"),
        ([H100, {"id": 1, "name": "NVIDIA L40S"}], H100["name"]),
        ([{"id": 4, "name": "A"}, {"id": 5, "name": "B"}, {"id": 6, "name": "A"}], "A + B"), ("odd", None),
    ],
)  # fmt: skip
def test_gpu_is_named_as_far_as_the_file_names_it(tmp_path: Path, properties: object, gpu: str | None) -> None:
    path = write(tmp_path / "t.json", document([kernel("k", 1, 1)], deviceProperties=properties))
    got = inspect_file(path)
    assert got["gpu"] == gpu
    assert any("without a name" in w for w in got["warnings"]) is (gpu == "?")


def test_parquet_tells_the_same(tmp_path: Path) -> None:
    """Mutation tried: the column `start_ns` left out of the Parquet schema → union and span differ, fails."""
    write_trace(import_profile(SMALL), tmp_path / "t.parquet")
    assert inspect_file(tmp_path / "t.parquet") == inspect_file(SMALL)


def test_captured_traces_have_no_start_times() -> None:
    """Mutation tried: `is_memcpy` without its test for blocks → a copying kernel counts as a copy, fails."""
    rows = [
        Kernel(0, "memset", "a#0", kind="memset", duration_ns=5),
        Kernel(1, "a", "a#0", kind="gemm", duration_ns=100, gap_ns=3, block=(128, 1, 1)),
        Kernel(2, "b", "b#0", kind="copy", duration_ns=50, gap_ns=-10, block=(128, 1, 1)),
        Kernel(3, "memcpy", "c#0", kind="copy", duration_ns=7, gap_ns=2),
        Kernel(4, "c", "d#0", kind="norm", duration_ns=10, gap_ns=1, block=(128, 1, 1)),
    ]
    got = facts(Trace(TraceMeta("captured", "m", {"name": "decode"}, "H200"), tuple(rows)))
    assert (got["kernels"], got["memcpys"], got["memsets"], got["graph_kernels"]) == (3, 1, 1, 3)
    assert (got["busy_ns"], got["union_ns"], got["span_ns"]) == (160, 150, 160)


def test_facts_are_json_of_integers() -> None:
    got = inspect_file(SMALL)
    assert json.loads(json.dumps(got)) == got
    assert all(type(v) is int for k, v in got.items() if k not in ("gpu", "warnings"))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_union_counts_every_covered_nanosecond_once(spans: list[tuple[int, int]]) -> None:
    covered = {t for start, length in spans for t in range(start, start + length)}
    assert union_ns([(start, start + length) for start, length in spans]) == len(covered)


REAL = ["hta-alexnet", "tracelens-vllm-decode-full-graph", "tracelens-sglang-qwen3-8b-decode"]


@needs_shared
@pytest.mark.parametrize("name", REAL)
def test_real_profiles_through_parquet(tmp_path: Path, name: str) -> None:
    path = SHARED / "data" / "traces" / f"{name}.json.gz"
    write_trace(import_profile(path), tmp_path / "t.parquet")
    assert inspect_file(tmp_path / "t.parquet") == inspect_file(path)


def test_warnings_that_the_capture_did_not_keep_are_counted() -> None:
    """Mutation: a list that was cut short looks whole. In words, lines that differ in numbers alone are one."""
    meta = TraceMeta("captured", "m", {"name": "decode"}, "H200", warnings=("l.1@8: x", "l.2@9: x", "other"))
    assert facts(Trace(replace(meta, extra={"warnings_total": 3}), ()))["warnings"] == list(meta.warnings)
    got = facts(Trace(replace(meta, extra={"warnings_total": 63}), ()))
    assert got["warnings"] == [*meta.warnings, "60 of the 63 warnings of the capture are not in the trace"]
    words = describe_facts(got).splitlines()[1:]
    assert [w.strip() for w in words[:2]] == ["warning: l.1@8: x (and 1 more like it)", "warning: other"]
    assert len(words) == 3
    deps = dependencies(Trace(replace(meta, extra={"warnings_total": 63}), ()))
    assert deps["warnings"] == got["warnings"] and "warning: l.1@8: x (and 1 more like it)" in in_words(deps)


def test_the_facts_in_words() -> None:
    """Mutations: `1 kernels`; a GPU called `?`."""
    rows = (
        Kernel(0, "a", "a#0", kind="gemm", duration_ns=1500, block=(128, 1, 1)),
        Kernel(1, "s", "a#0", kind="memset"),
    )
    for gpu, words in (("H200", "H200"), ("", "unknown"), ("?", "without a name")):
        got = describe_facts(facts(Trace(TraceMeta("imported", "m", {"name": "u"}, gpu), rows)))
        assert got == (
            "1 kernel, 0 memcpys, 1 memset, 1 stream, 1 device; busy 0.002 ms, union 0.002 ms, span 0.002 ms; "
            f"0 from graphs; GPU {words}"
        )
