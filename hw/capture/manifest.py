"""MANIFEST.json: what a folder of traces holds. Needs no GPU and no PyTorch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tesserasim import __version__
from tesserasim.trace.parquet import read_trace


def write_manifest(root: Path) -> None:
    """MANIFEST.json: what, where, when, how and sha256 of every trace under `root`."""
    rows = []
    for path in sorted(root.rglob("*.parquet")):
        m = read_trace(path).meta
        rows.append(
            {
                "file": path.relative_to(root).as_posix(), "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "model": m.model, "unit": dict(m.unit), "origin": m.origin, "gpu": m.gpu, "driver": m.driver,
                "torch": m.torch, "captured_at": m.captured_at, "repeats": m.repeats, "e2e_ns": m.e2e_ns,
                "tool_version": m.tool_version,
            }
        )  # fmt: skip
    how = f"python -m hw capture (tesserasim {__version__}); random weights, published sizes"
    text = json.dumps({"how": how, "traces": rows}, indent=1, sort_keys=True)
    (root / "MANIFEST.json").write_text(text + "\n", encoding="utf-8")
