"""Whatever is done to a small export, importing it gives a trace or one of our errors, never another."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from import_checks import import_and_check
from nsys_cases import COPY, CSV, KERNEL, SET, call, copied, export, kernel, nvtx, version

pytestmark = pytest.mark.quick
TABLES: dict[str, list[dict[str, Any]]] = {
    KERNEL: [kernel(100 * i, 100 * i + 60, i, graphNodeId=i if i > 6 else None) for i in range(1, 9)],
    COPY: [copied(5, 9)], SET: [copied(10, 12)], "META_DATA_EXPORT": version(),
    "CUPTI_ACTIVITY_KIND_RUNTIME": [call(10 * i, i) for i in range(1, 9)],
    "NVTX_EVENTS": [nvtx(40 * i, 40 * i + 39, f"step {i}") for i in range(3)],
    "TARGET_INFO_GPU": [{"id": 0, "name": "NVIDIA L40S"}],
}  # fmt: skip
with tempfile.TemporaryDirectory() as _folder:
    CONTENT = export(Path(_folder) / "e.sqlite", TABLES).read_bytes()
values = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=8), st.binary(max_size=8),
    st.sampled_from([0, -1, 2**31, 2**62, 2**63 - 1, "7", "1e9"]),
)  # fmt: skip


def check_bytes(data: st.DataObject, base: bytes, name: str, pieces: list[bytes]) -> None:
    content = bytearray(base)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        size = data.draw(st.sampled_from([0, 1, 1, 2, 30, 4096]))
        new = data.draw(st.one_of(st.binary(min_size=size, max_size=size) if size < 40 else st.just(b""),
                                  st.sampled_from(pieces)))  # fmt: skip
        content[at : at + size] = new
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        import_and_check(path)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_mutated_pages(data: st.DataObject) -> None:
    """Mutation tried: `sqlitefile.opened` lets sqlite3.Error through → fails."""
    check_bytes(data, CONTENT, "e.sqlite", [b"\0", b"\xff\xff", b"\0" * 4096])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mutated_values(data: st.DataObject) -> None:
    """Mutation tried: `nsys._row` takes start and end as they are → text is compared with numbers, fails."""
    tables = {name: [dict(row) for row in rows] for name, rows in TABLES.items()}
    for _ in range(data.draw(st.integers(1, 4))):
        rows = tables[data.draw(st.sampled_from(sorted(tables)))]
        row = rows[data.draw(st.integers(0, len(rows) - 1))]
        row[data.draw(st.sampled_from(sorted(row)))] = data.draw(values)
    with tempfile.TemporaryDirectory() as folder:
        import_and_check(export(Path(folder) / "e.sqlite", tables))


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_mutated_csv(data: st.DataObject) -> None:
    """Mutation tried: `_Table.text` without its test of the row's length → IndexError, fails."""
    check_bytes(data, CSV.encode(), "r.csv", [b'"', b",", b"\n", b"\0", b"\r", b"9" * 19, b"\n\n", b"(us)"])
