"""How many more bytes do our write sets send than the writes that the oracle saw?

For every report of the oracle: the checked kernels as a unit of their own, its sites placed at random on two GPUs
(sites of a group together, as a planner must), and the bytes that cross, by `unit_flow`; once with the declared
accesses and once with every write set replaced by what was seen to be written. Bar: 1.2 at the median of every unit.

    python experiments/validation/transfer_ratio.py [FOLDER]      (default: experiments/validation/oracle)
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tesserasim.deps.graph import CARRIED, UnitFlow, unit_flow
from tesserasim.trace.model import Access, Buffer, Kernel, Trace, TraceMeta

FOLDER = Path(__file__).resolve().parent / "oracle"
PLACEMENTS = 200
BAR = 1.2


def unit_of(report: dict[str, Any], observed: bool) -> Trace:
    """The checked kernels as a trace, with the declared or the observed writes."""
    number: dict[int, int] = {}
    buffers: list[Buffer] = []
    kernels = []
    for i, entry in enumerate(report["kernels"]):
        for key, b in entry["buffers"].items():
            if int(key) not in number:
                number[int(key)] = len(buffers)
                buffers.append(Buffer(len(buffers), storage=-1, **b))
        accesses = [Access(**{**a, "buffer": number[a["buffer"]]}) for a in entry["accesses"]]
        if observed and entry["status"] == "ok":
            accesses = _seen(accesses, entry["writes"], buffers)
        kernels.append(Kernel(i, entry["name"], entry["site"], accesses=tuple(accesses)))
    meta = TraceMeta("captured", report["model"], report["unit"], report["gpu"])
    trace = Trace(meta, tuple(kernels), tuple(buffers))
    trace.validate("report")
    return trace


def _seen(accesses: list[Access], writes: list[dict[str, Any]], buffers: list[Buffer]) -> list[Access]:
    """Reads as declared, then what was written: every byte of it, and nothing else."""
    out = [dataclasses.replace(a, mode="R", covers=False) for a in accesses if a.reads]
    for w in writes:
        a = accesses[w["access"]]
        b = buffers[a.buffer]
        if not w["bytes"]:
            continue
        delta = b.role in CARRIED and a.mode == "W" and a.extent == "exact" and not a.covers
        origin = 0 if delta or a.extent == "unknown" else a.offset
        if b.role in CARRIED:
            whole = w["bytes"] == b.nbytes
            out.append(dataclasses.replace(a, mode="W", offset=0, nbytes=w["bytes"], extent="exact", covers=whole))
            continue
        spans = w.get("spans") or [(w["first"], min(w["end"], w["first"] + w["bytes"]))]
        for first, end in spans:
            place = {"offset": origin + first, "nbytes": end - first}
            out.append(dataclasses.replace(a, mode="W", extent="exact", covers=True, **place))
    return out


def crossing(flow: UnitFlow, gpu_of: np.ndarray) -> int:
    """Bytes that leave the GPU of their writer; `gpu_of`: 0 or 1 per site."""
    site = flow.trace.site_of
    return sum(v.nbytes for v in flow.values if any(gpu_of[site[r]] != gpu_of[site[v.writer]] for r in v.readers))


def ratios(report: dict[str, Any], seed: int = 0) -> list[float]:
    """Declared over observed bytes, per random placement that sends anything."""
    declared, observed = (unit_flow(unit_of(report, o)) for o in (False, True))
    random = np.random.default_rng(seed)
    groups = np.array(declared.group_of)
    out = []
    for _ in range(PLACEMENTS):
        gpu_of = random.integers(0, 2, len(groups))
        for g in range(groups.max(initial=-1) + 1):
            gpu_of[groups == g] = gpu_of[groups == g][0]
        ours, seen = crossing(declared, gpu_of), crossing(observed, gpu_of)
        if seen:
            out.append(ours / seen)
        elif ours:
            out.append(float("inf"))
    return out


def main(folder: Path) -> int:
    paths = sorted(folder.glob("*/*.json"))
    if not paths:
        print(f"error: no reports in {folder}", file=sys.stderr)
        return 2
    everything: list[float] = []
    good = True
    print(f"{'unit':<40} {'placements':>10} {'min':>7} {'median':>7} {'max':>7}")
    for path in paths:
        found = ratios(json.loads(path.read_text(encoding="utf-8")))
        name = f"{path.parent.name}/{path.stem}"
        if not found:
            print(f"{name:<40} {'nothing to send':>10}")
            continue
        median = float(np.median(found))
        good &= median <= BAR
        everything += found
        print(f"{name:<40} {len(found):>10} {min(found):7.3f} {median:7.3f} {max(found):7.3f}")
    print(f"all: median {np.median(everything):.3f}, max {max(everything):.3f} (bar: {BAR} at every median)")
    print("all within the bar" if good else "SOME OUTSIDE THE BAR")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
