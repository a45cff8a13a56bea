"""Kineto import: files that are not clean JSON or gzip. Each fault gives one line or loads; the kind counts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kineto_cases import SHARED, SMALL, document, kernel, needs_shared, write

from tesserasim.errors import InputError, NotKernelTraceError
from tesserasim.trace import jsontext
from tesserasim.trace.importer import import_profile
from tesserasim.trace.inspect import inspect_file

pytestmark = pytest.mark.quick
TEXT = json.dumps(document([kernel("k", 5, 5, correlation=1)]))
ROW = json.dumps(kernel("k", 5, 5))
PACKED = gzip.compress(TEXT.encode(), mtime=0)

LOADS = {
    "plain.json.gz": TEXT.encode(),
    "gzip.json": PACKED,
    "bom.json": b"\xef\xbb\xbf" + TEXT.encode(),
    "members.json.gz": gzip.compress(TEXT[:40].encode()) + gzip.compress(TEXT[40:].encode()),
    "padded.json.gz": PACKED + b"\0" * 512,
    "array.json": f"[{ROW}, {ROW}]".encode(),
    "open_array.json": f"[{ROW},\n{ROW},\n".encode(),
    "array_gz.json": gzip.compress(f" \n[{ROW}]".encode()),
    "control.json": b'{"traceEvents":[{"ph":"X","cat":"python_function","name":"a\x01\x1b\n","ts":1,"dur":2},'
    + ROW.encode() + b"]}",
    "bad_utf8.json": b'{"traceEvents":[' + ROW.replace('"k"', '"k\xff\xfe\xc0"').encode("latin-1") + b"]}",
    "late_events.json": b'{"filler":"' + b"x" * 600_000 + b'","traceEvents":[' + ROW.encode() + b"]}",
}  # fmt: skip

FAILS = {
    "missing_quote.json": (b'{"traceEvents":[\n{"ph":"X",pid":0}]}', r":2:11: not valid JSON"),
    "quotes.json": (b'{"traceEvents":[{"name":"f("a","b")\n: <module>"}]}', r":1:29: not valid JSON"),
    "truncated.json": (TEXT[:-30].encode(), r":1:\d+: not valid JSON: the file ends in the middle"),
    "cut_after_event.json": (TEXT[:-2].encode(), "ends in the middle"),
    "trailing_comma.json": (b'{"traceEvents":[' + ROW.encode() + b",]}", "not valid JSON"),
    "two_documents.json": ((TEXT + TEXT).encode(), "text after the end"),
    "deep.json": (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    "digits.json": (b'{"traceEvents":[{"ts":' + b"9" * 5000 + b"}]}", "too many digits"),
    "truncated.json.gz": (PACKED[:-20], "ends early"),
    "header.json.gz": (PACKED[:2], "ends early"),
    "damaged.json.gz": (PACKED[:60] + b"\xff" * 40 + PACKED[100:], "damaged gzip|not valid JSON"),
    "garbage.json.gz": (PACKED + b"junk", "bytes that are not gzip follow"),
    "twice.json.gz": (gzip.compress(PACKED), "compressed twice"),
    "utf16.json": (TEXT.encode("utf-16"), "UTF-16"),
    "utf16be.json": (TEXT.encode("utf-16-be"), "UTF-16"),
    "utf16_no_bom.json": (TEXT.encode("utf-16-le"), "UTF-16"),
    "utf32.json": (TEXT.encode("utf-32"), "UTF-16 or UTF-32"),
}

EMPTY = {
    "zero.json": b"",
    "zero.json.gz": gzip.compress(b""),
    "space.json": b" \n",
    "no_events.json": b'{"schemaVersion": 1}',
    "empty.json": json.dumps(document([])).encode(),
    "null.json": b'{"traceEvents": null}',
    "object.json": b"{}",
    "array.json": b"[]",
    "metadata.json": json.dumps(document([{"ph": "M", "name": "process_name", "pid": 0, "args": {}}])).encode(),
}


@pytest.mark.parametrize("name", LOADS)
def test_loads(tmp_path: Path, name: str) -> None:
    """Mutation tried: only the first gzip member is read → members.json.gz fails."""
    trace = import_profile(write(tmp_path / name, LOADS[name]))
    assert all(k.duration_ns == 5000 for k in trace)
    expected = {"bad_utf8.json": "not UTF-8", "open_array.json": "not closed"}.get(name)
    assert expected is None or any(expected in w for w in trace.meta.warnings)


def one_line(function: Any, path: Path, kind: type[InputError] = InputError) -> str:
    with pytest.raises(kind) as caught:
        function(path)
    line = str(caught.value)
    assert "\n" not in line and str(path) in line
    return line


@pytest.mark.parametrize("name", FAILS)
def test_fails_with_one_line(tmp_path: Path, name: str) -> None:
    """Mutation tried: `except ValueError` taken out of `EventStream._value` → digits.json fails."""
    import re

    content, pattern = FAILS[name]
    path = write(tmp_path / name, content)
    for function in (import_profile, inspect_file):
        assert re.search(pattern, one_line(function, path))


@pytest.mark.parametrize("name", EMPTY)
def test_no_gpu_kernels(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, EMPTY[name])
    for function in (import_profile, inspect_file):
        line = one_line(function, path, InputError)
        assert f"no GPU kernels in {path}" in line or "empty" in line


def test_position_far_into_a_large_file(tmp_path: Path) -> None:
    """Mutation tried: `_more` does not count the lines it drops → fails."""
    row = json.dumps({"ph": "X", "cat": "cpu_op", "name": "x" * 100, "ts": 1, "dur": 1})
    good = (row + ",\n") * 9_999
    path = write(tmp_path / "big.json", '{"traceEvents":[\n' + good + row[:-1] + ',oops"}]}')
    assert len(good) > 4 * jsontext.WINDOW
    column = len(row) + 1
    assert f"{path}:10001:{column}:" in one_line(import_profile, path)


def test_values_larger_than_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a few characters give the same trace; a limit on one value gives one line."""
    whole = import_profile(SMALL)
    monkeypatch.setattr(jsontext, "WINDOW", 1)
    tiny = [SMALL.read_bytes()[i : i + 3] for i in range(0, SMALL.stat().st_size, 3)]
    monkeypatch.setattr("tesserasim.trace.source.pieces", lambda path: iter(tiny))
    assert import_profile(SMALL) == whole
    monkeypatch.setattr(jsontext, "VALUE_LIMIT", 100)
    with pytest.raises(InputError, match="larger than"):
        import_profile(SMALL)


def test_large_profiles_are_streamed(tmp_path: Path) -> None:
    """30 MB of Python rows around one kernel stay out of memory.

    Mutation tried: `list(stream)` in `read_profile` → 130 MB at the peak, fails.
    """
    import tracemalloc

    noise = json.dumps({"ph": "X", "cat": "python_function", "name": "x" * 150, "ts": 1, "dur": 1, "args": {}})
    path = write(tmp_path / "big.json", '{"traceEvents":[' + (noise + ",") * 130_000 + ROW + "]}")
    tracemalloc.start()
    try:
        assert len(import_profile(path)) == 1
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_cpu_only_profile_is_refused_by_import_and_described_by_inspect(tmp_path: Path) -> None:
    cpu = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 9}
    path = write(tmp_path / "cpu.json", document([cpu]))
    assert "only CPU events" in one_line(import_profile, path, NotKernelTraceError)
    facts = inspect_file(path)
    assert facts["kernels"] == facts["span_ns"] == 0
    assert "no GPU kernels in cpu.json" in facts["warnings"][0]


@needs_shared
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("01_missing_quote.json", r"json:2:37: not valid JSON"), ("05_newline_and_quotes.json", r"json:1:68: not"),
        ("49a_empty.json.gz", "empty"), ("49b_truncated.json.gz", "ends early"),
        ("49f_truncated_mid_event.json", "in the middle"), ("49h_trailing_garbage.json.gz", "not gzip follow"),
        ("09_metadata_only.json", "no GPU kernels in"), ("10a_empty_events.json", "no GPU kernels in"),
        ("10b_no_traceEvents.json", "no GPU kernels in"), ("10d_zero_bytes.json", "no GPU kernels in"),
        ("18_cpu_only_cuda_trace.json", "no GPU kernels in"), ("40_profile_missing_kernel.json", "no GPU kernels in"),
        ("12_no_distributedInfo_two_ranks", "directory"),
    ],
)  # fmt: skip
def test_bad_files_of_the_shared_folder(name: str, pattern: str) -> None:
    import re

    assert re.search(pattern, one_line(import_profile, SHARED / "data" / "bad_inputs" / name))


@needs_shared
@pytest.mark.parametrize(
    "name", ["02_invalid_utf8.json", "03_control_char.json", "49c_plain_json_named_gz.json.gz",
             "49d_gzip_named_json.json", "49i_utf8_bom.json"],
)  # fmt: skip
def test_tolerable_files_of_the_shared_folder(name: str) -> None:
    assert len(import_profile(SHARED / "data" / "bad_inputs" / name)) == 1
