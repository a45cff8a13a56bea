"""`python -m hw oracle`: check the read and write sets of captured units on the GPU, kernel by kernel.

The work runs in a child process that writes a journal, since a kernel that is fed garbage may fault (which ends
the process's use of the GPU) or hang. The parent watches the journal, says what such an end means, and starts
another child behind the kernel.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hw.errors import HardwareError
from hw.oracle.report import FAILED_WHILE, TIME_IS_UP, read_journal, write_report
from hw.workloads import workload_names
from tesserasim.trace.parquet import read_trace

HANG_S = 90.0  # without a line in the journal
RESTARTS = 8


@dataclass(frozen=True)
class Job:
    """Units of one model; what a child is told."""

    model: str
    traces: tuple[Path, ...]
    out: Path
    blocks: tuple[str, ...]  # modules; () for the first, two in the middle and the last; ("all",) for the step
    deadline: float  # time.time()


def oracle(traces: Sequence[Path], out: Path, blocks: Sequence[str], limit_s: float) -> int:
    """Check the units of the traces; 1 if anything was missed or not reached."""
    import torch

    started = time.time()
    by_model: dict[str, list[Path]] = defaultdict(list)
    for path in traces:
        meta = read_trace(path).meta
        if meta.origin != "captured":
            raise HardwareError(f"{path}: a trace of origin {meta.origin!r}; the oracle runs captured units again")
        model = path.resolve().parent.name
        if model not in workload_names():
            raise HardwareError(f"{path}: its folder {model!r} names no workload; known: {', '.join(workload_names())}")
        by_model[model].append(path)
    if not torch.cuda.is_available():
        raise HardwareError("no CUDA device: the oracle runs kernels on the GPU that the traces describe")
    good = True
    for model, paths in by_model.items():
        job = Job(model, tuple(paths), out, tuple(blocks), started + limit_s)
        good &= _watch(job)
        for path in paths:
            good &= write_report(path, out / model / f"{path.stem}.journal", out / model / f"{path.stem}.json")
    return 0 if good else 1


def _watch(job: Job) -> bool:
    """Run children until all units are done; False if some could not be."""
    folder = job.out / job.model
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(RESTARTS):
        if time.time() > job.deadline:
            return False
        command = [
            sys.executable, "-m", "hw.oracle.worker", job.model, str(job.out), repr(job.deadline),
            ",".join(job.blocks), *map(str, job.traces),
        ]  # fmt: skip
        child = subprocess.Popen(command)
        hung = False
        while child.poll() is None:
            time.sleep(0.2)
            if time.time() - _last_sign(folder) > HANG_S:
                hung = True
                child.kill()
                child.wait()
        if child.returncode in (0, TIME_IS_UP):
            return child.returncode == 0
        if not _explain(folder, job.traces, "hang" if hung else f"the process ended with {child.returncode}"):
            print(f"oracle: {job.model}: the child failed before any kernel", file=sys.stderr)
            return False
    return False


def _last_sign(folder: Path) -> float:
    return max((p.stat().st_mtime for p in folder.glob("*.journal")), default=time.time())


def _explain(folder: Path, traces: Iterable[Path], how: str) -> bool:
    """Close the kernel during which a child died; False if there is none."""
    for path in traces:
        journal = folder / f"{path.stem}.journal"
        open_kernel: dict[str, Any] | None = None
        for line in read_journal(journal):
            if line["kind"] == "phase":
                open_kernel = line
            elif line["kind"] == "kernel" and open_kernel is not None:
                same = all(line[k] == open_kernel[k] for k in ("input", "node"))
                open_kernel = None if same else open_kernel
        if open_kernel is not None:
            status, reason = FAILED_WHILE.get(open_kernel["phase"].split(" ")[0], ("skipped", "while preparing it"))
            closing = {"kind": "kernel", "input": open_kernel["input"], "node": open_kernel["node"], "status": status}
            with journal.open("a", encoding="utf-8") as f:
                f.write(json.dumps(closing | {"reason": f"{how} {reason}", "writes": [], "reads": []}) + "\n")
            return True
    return False
