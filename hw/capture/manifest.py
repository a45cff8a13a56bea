"""MANIFEST.json: what a folder of traces holds. Needs no GPU and no PyTorch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hw.errors import HardwareError
from tesserasim import __version__
from tesserasim.files import path_text
from tesserasim.trace.parquet import read_trace
from tesserasim.writing import check_output, write_whole


def write_manifest(root: Path) -> int:
    """MANIFEST.json: what, where, when, how and sha256 of every trace under `root`; how many there are.

    HardwareError or InputError, and the manifest as it was, if there is no trace or one cannot be read.
    """
    if not root.is_dir():
        raise HardwareError(f"{path_text(root)}: no such folder; name the folder of the traces")
    target = root / "MANIFEST.json"
    check_output(target)
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
    if not rows:
        raise HardwareError(f"{path_text(root)}: holds no traces (*.parquet); name the folder of the traces")
    how = f"python -m hw capture (tesserasim {__version__}); random weights, published sizes"
    others = sorted({str(row["origin"]) for row in rows} - {"captured"})
    if others:  # each row says its own origin
        how = f"captured ones: {how}; not captured: those of origin {', '.join(others)}"
    text = json.dumps({"how": how, "traces": rows}, indent=1, sort_keys=True)
    write_whole(target, (text + "\n").encode())
    return len(rows)
