"""Small Kineto profiles of our own making, and where the shared data folder is."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(os.environ.get("TESSERASIM_SHARED", Path(__file__).resolve().parents[2] / "shared"))
SMALL = Path(__file__).parent / "data" / "kineto_small.json"
needs_shared = pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="no shared data folder")
H100 = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}


def event(cat: str, name: Any, ts: Any, dur: Any, **args: Any) -> dict[str, Any]:
    """A complete event; `pid` and `tid` may be given among the args, which otherwise go under "args"."""
    row = {"ph": "X", "cat": cat, "name": name, "pid": args.pop("pid", 0), "tid": args.pop("tid", 7)}
    return {**row, "ts": ts, "dur": dur, "args": args}


def kernel(name: Any, ts: Any, dur: Any, stream: Any = 7, device: Any = 0, **args: Any) -> dict[str, Any]:
    shape = {"grid": [8, 1, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 0}
    return event("kernel", name, ts, dur, **{"device": device, "stream": stream, **shape, **args})


def call(name: str, ts: Any, correlation: int, dur: Any = 3, tid: int = 99) -> dict[str, Any]:
    return event("cuda_runtime", name, ts, dur, pid=4242, tid=tid, correlation=correlation)


def cpu_op(name: str, ts: Any, dur: Any, tid: int = 99, **args: Any) -> dict[str, Any]:
    return event("cpu_op", name, ts, dur, pid=4242, tid=tid, **args)


def document(events: list[Any], **top: Any) -> dict[str, Any]:
    return {"schemaVersion": 1, "deviceProperties": [H100], "traceEvents": events, **top}


def write(path: Path, content: Any, compress: bool = False) -> Path:
    """Write bytes, text or a JSON value to `path`."""
    if not isinstance(content, bytes | str):
        content = json.dumps(content)
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if compress else data)
    return path
