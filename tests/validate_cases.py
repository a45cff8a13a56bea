"""A toy unit of three kernels, its journals and runs files, whose right answers are closed forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hw.journals import Hop
from tesserasim.trace.model import Access, Buffer, Kernel, Trace, TraceMeta
from tesserasim.trace.parquet import write_trace


def trace(durations: tuple[int, int, int], batch: int = 4, nbytes: int = 0, gpu: str = "H200", **extra: Any) -> Trace:
    """Three kernels that hand 1000 bytes on; each reads `nbytes` of DRAM."""
    chain = [[], [0], [1]]
    kernels = []
    for i, ns in enumerate(durations):
        reads = tuple(Access(b, "R", 0, 1000, "exact", False, "schema") for b in chain[i])
        write = Access(i, "W", 0, 1000, "exact", True, "schema")
        kernels.append(
            Kernel(i, f"k{i}", f"m/k{i}#0", kind="gemm", grid=(1, 1, 1), block=(32, 1, 1), duration_ns=ns,
                   duration_p10_ns=ns, duration_p90_ns=ns, read_bytes=nbytes, accesses=(*reads, write))
        )  # fmt: skip
    unit = {"name": "step", "phase": "other", "batch": batch, "tokens": 7, "context": 50}
    return Trace(
        TraceMeta(origin="captured", model="toy", unit=unit, gpu=gpu, driver="580", torch="2.11", extra=extra),
        buffers=tuple(Buffer(i, f"b{i}", 1000, "activation", i) for i in range(3)), kernels=tuple(kernels),
    )  # fmt: skip


#: 1000 bytes take 2000 ns and 500 ns of latency.
HOP = Hop(500.0, 0.5)


def journal(folder: Path, lines: list[Any]) -> Path:
    path = folder / "step-b4.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), "utf-8")
    return path


def timing(plan: str, devices: str, depth: int, rate: float) -> dict[str, Any]:
    return {"kind": "timing", "plan": plan, "lane": plan, "depth": depth, "units_per_s": rate, "energy_j": None,
            "units_per_s_all": [rate * 0.99, rate * 1.01], "device_of": [[d, 1] for d in devices]}  # fmt: skip


SESSION = {"kind": "session", "model": "toy"}
BASE = timing("p", "aab", 1, 1e5)


def bench_files(folder: Path) -> str:
    """A runs file's text beside the files that it names."""
    for d, times in (("a", (1000, 2000, 3000)), ("b", (2000, 3000, 4000))):
        write_trace(trace(times), folder / f"{d}.parquet")
    (folder / "split.json").write_text('{"held_out_models": []}')
    (folder / "links.jsonl").write_text(json.dumps({"kind": "link", "link": {"latency_ns": 500, "gbs": 0.5}}) + "\n")
    journal(folder, [SESSION, BASE])
    return (
        'split = "split.json"\n[[unit]]\njournal = "step-b4.jsonl"\nlinks = "links.jsonl"\n'
        '[unit.traces]\na = "a.parquet"\nb = "b.parquet"\n'
    )
