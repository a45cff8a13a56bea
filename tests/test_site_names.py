"""A site of an imported profile is one line, whatever the kernel is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tesserasim.trace.importer import import_profile
from tesserasim.trace.parquet import read_trace, write_trace

pytestmark = pytest.mark.quick


def test_a_line_break_in_a_kernel_name_does_not_reach_the_site(tmp_path: Path) -> None:
    """The trace can be written and read again. Mutation tried: `_one_line` returning the name as it is."""
    event = {"ph": "X", "cat": "kernel", "name": "void\nf", "ts": 1, "dur": 2, "args": {"device": 0, "stream": 7}}
    (tmp_path / "p.json").write_text(json.dumps({"traceEvents": [event]}))
    trace = import_profile(tmp_path / "p.json")
    assert trace.sites[0].isprintable()
    assert trace.kernels[0].name == "void\nf"
    write_trace(trace, tmp_path / "t.parquet")
    assert read_trace(tmp_path / "t.parquet") == trace
