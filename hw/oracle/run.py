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

HANG_S = 60.0  # without a line in the journal, while a kernel is under way
START_S = 300.0  # the same while a model is built, compiled or captured
GRACE_S = 120.0  # after the deadline
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


def _watch(job: Job, command: Sequence[str] = (sys.executable, "-m", "hw.oracle.worker")) -> bool:
    """Run children until all units are done; False if some could not be. `command`: the child's beginning."""
    folder = job.out / job.model
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(RESTARTS):
        if time.time() > job.deadline:
            return False
        arguments = [job.model, str(job.out), repr(job.deadline), ",".join(job.blocks), *map(str, job.traces)]
        started = time.time()
        child = subprocess.Popen([*command, *arguments])
        how = _wait(child, folder, job.deadline)
        if child.returncode == 0:
            return True
        if child.returncode == TIME_IS_UP or how == "time":
            print(f"oracle: {job.model}: out of time; the same command goes on", file=sys.stderr)
            return False
        # A Python error of the check itself (code 1) says nothing about the kernel.
        if child.returncode == 1 or not _explain(
            folder, job.traces, how or f"the process ended with {child.returncode}", started
        ):
            print(f"oracle: {job.model}: the child failed outside any kernel", file=sys.stderr)
            return False
    print(f"oracle: {job.model}: gave up after {RESTARTS} failed kernels", file=sys.stderr)
    return False


def _wait(child: subprocess.Popen[bytes], folder: Path, deadline: float) -> str:
    """Wait for the end of a child, or end it: "hang" without a sign, "time" long after the deadline, else ""."""
    started = time.time()
    try:
        while child.poll() is None:
            time.sleep(0.1)
            sign, busy = _last_sign(folder)
            silent = time.time() - max(sign, started)
            if silent > (HANG_S if busy and sign > started else START_S):
                return "hang"
            if time.time() > deadline + GRACE_S:
                return "time"
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
    return ""


def _last_sign(folder: Path) -> tuple[float, bool]:
    """When the newest journal grew, and whether a kernel is under way."""
    newest = max(folder.glob("*.journal"), key=lambda p: p.stat().st_mtime, default=None)
    if newest is None:
        return 0.0, False
    with newest.open("rb") as f:
        f.seek(max(0, newest.stat().st_size - 4096))
        tail = f.read().rstrip(b"\n").rsplit(b"\n", 1)[-1]
    return newest.stat().st_mtime, tail.startswith(b'{"kind": "phase"')


def _explain(folder: Path, traces: Iterable[Path], how: str, since: float = 0.0) -> bool:
    """Close the kernel during which a child that started at `since` died; False if there is none."""
    for path in traces:
        journal = folder / f"{path.stem}.journal"
        if not journal.exists() or journal.stat().st_mtime < since:
            continue  # what is open there, a child of an earlier call left open
        open_kernel: dict[str, Any] | None = None
        judged: dict[str, Any] | None = None
        for line in read_journal(journal):
            if line["kind"] == "phase":
                open_kernel = line
            elif line["kind"] == "judged":
                judged = line
            else:  # its finding, or the beginning of another child, which has launched nothing yet
                open_kernel = judged = None
        if open_kernel is not None:
            closing, cut_short = _closing(open_kernel, judged, how), not journal.read_bytes().endswith(b"\n")
            with journal.open("a", encoding="utf-8") as f:
                f.write("\n" * cut_short + json.dumps(closing) + "\n")
            return True
    return False


def _closing(opened: dict[str, Any], judged: dict[str, Any] | None, how: str) -> dict[str, Any]:
    """The finding of a kernel during which a child died: what was judged before its reads were tried stands."""
    phase = opened["phase"].split(" ")[0]
    status, words = FAILED_WHILE.get(phase, ("skipped", "while preparing it"))
    same = judged is not None and all(judged[k] == opened[k] for k in ("input", "node"))
    if judged is not None and same and (phase == "perturb" or judged["status"] != "ok"):
        return judged | {"kind": "kernel", "note": f"{how} {words}"}
    head = {"kind": "kernel", "input": opened["input"], "node": opened["node"]}
    return head | {"status": status, "reason": f"{how} {words}", "writes": [], "reads": []}
