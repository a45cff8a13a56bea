"""How many more bytes do our write sets send than the writes that the oracle saw?

For every report of the oracle: the checked kernels as a unit of their own, its sites placed at random on two GPUs
(sites of a group together, as a planner must), and the bytes that cross, by `unit_flow`; once with the declared
accesses and once with every write set replaced by what was seen to be written; reads are the same in both. Kernels
that the oracle did not find ok keep their declared writes. Only what is read inside the unit on the other GPU counts,
state included. Bar: 1.2 at the median of every unit.

    python experiments/validation/transfer_ratio.py [FOLDER]      (default: experiments/validation/oracle)
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hw.oracle.report import read_report
from tesserasim.deps.graph import CARRIED, UnitFlow, unit_flow
from tesserasim.deps.words import shown
from tesserasim.errors import TesserasimError
from tesserasim.terminal import outcome, say
from tesserasim.trace.model import Access, Buffer, Kernel, Trace, TraceMeta

FOLDER = Path(__file__).resolve().parent / "oracle"
PLACEMENTS = 400
PIECES = 4096  # most intervals of one write that are told apart
BAR = 1.2


def unit_of(report: dict[str, Any], observed: bool, where: str = "report") -> Trace:
    """The checked kernels as a trace, with the declared or the observed writes. InputError names `where`."""
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
    trace.validate(where)
    return trace


def _seen(accesses: list[Access], writes: list[dict[str, Any]], buffers: list[Buffer]) -> list[Access]:
    """Reads as declared, then what was written: every byte of it, and nothing else."""
    out = [dataclasses.replace(a, mode="R", covers=False) for a in accesses if a.reads]
    for w in writes:
        a = accesses[w["access"]]
        b = buffers[a.buffer]
        if not w["bytes"]:
            continue
        if b.role in CARRIED:
            # Carried buffers are logs of writes, which count by their bytes, wherever they lie.
            places, covers = [(0, w["bytes"])], w["bytes"] == b.nbytes
        else:
            origin = 0 if a.extent == "unknown" else a.offset
            places, covers = [(origin + first, origin + end) for first, end in _spans(w)], True
        for first, end in places:
            place = {"offset": first, "nbytes": end - first, "extent": "exact", "covers": covers}
            out.append(dataclasses.replace(a, mode="W", **place))
    return out


def _spans(w: dict[str, Any]) -> list[tuple[int, int]]:
    """Where an access wrote, from the first byte of its span.

    Intervals that were too many to be listed are taken to be alike and evenly spaced, `PIECES` at most: exact for
    columns of a matrix, and never more bytes than were seen.
    """
    if "spans" in w:
        return [(first, end) for first, end in w["spans"]]
    n = min(w["intervals"], PIECES)
    width = w["bytes"] // n
    last = w["end"] - w["first"] - width
    starts = [w["first"] + i * last // max(1, n - 1) for i in range(n)]
    return [(start, start + width) for start in starts]


def crossing(flow: UnitFlow, gpu_of: np.ndarray) -> int:
    """Bytes that leave the GPU of their writer; `gpu_of`: 0 or 1 per site."""
    site = flow.trace.site_of
    return sum(v.nbytes for v in flow.values if any(gpu_of[site[r]] != gpu_of[site[v.writer]] for r in v.readers))


def placements(flow: UnitFlow, count: int, seed: int) -> Iterator[np.ndarray]:
    """GPU (0 or 1) per site, at random; sites of a group get that of the group's first."""
    groups = np.array(flow.group_of, dtype=np.int64)
    leader = np.arange(len(groups))
    for g in range(groups.max(initial=-1) + 1):
        leader[groups == g] = np.flatnonzero(groups == g)[0]
    random = np.random.default_rng(seed)
    for _ in range(count):
        yield random.integers(0, 2, len(groups))[leader]


def ratios(report: dict[str, Any], seed: int = 0, where: str = "report") -> list[float]:
    """Declared over observed bytes, per random placement that sends anything."""
    declared, observed = (unit_flow(unit_of(report, o, where)) for o in (False, True))
    out = []
    for gpu_of in placements(declared, PLACEMENTS, seed):
        ours, seen = crossing(declared, gpu_of), crossing(observed, gpu_of)
        if seen or ours:
            out.append(ours / seen if seen else math.inf)
    return out


def main(folder: Path) -> int:
    paths = sorted(folder.glob("*/*.json"))
    if not paths:
        print(f"error: no reports in {folder}", file=sys.stderr)
        return 2
    everything: list[float] = []
    good = True
    problems: list[str] = []
    print(f"{'unit':<40} {'ok/kernels':>10} {'placements':>10} {'min':>7} {'median':>7} {'max':>7}")
    for path in paths:
        try:
            report = read_report(path)
            found = ratios(report, where=str(path))
        except TesserasimError as error:  # the others are counted all the same
            problems.append(str(error))
            continue
        fine = f"{sum(k['status'] == 'ok' for k in report['kernels'])}/{len(report['kernels'])}"
        name = shown(f"{path.parent.name}/{path.stem}")
        if not found:
            print(f"{name:<40} {fine:>10} {'nothing to send':>10}")
            continue
        median = float(np.median(found))
        good &= median <= BAR
        everything += found
        print(f"{name:<40} {fine:>10} {len(found):>10} {min(found):7.3f} {median:7.3f} {max(found):7.3f}")
    for problem in problems:
        say("error", problem)
    if problems:
        return 2
    if not everything:
        say("error", "no unit has anything to send")
        return 2
    print(f"all: median {np.median(everything):.3f}, max {max(everything):.3f} (bar: {BAR} at every median)")
    print("all within the bar" if good else "SOME OUTSIDE THE BAR")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(outcome("error", lambda: main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)))
