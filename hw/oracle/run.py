"""`python -m hw oracle`: check the read and write sets of captured units on the GPU, kernel by kernel.

The work runs in a child process that writes a journal, since a kernel that is fed garbage may fault (which ends
the process's use of the GPU) or hang. The parent watches the journal, says what such an end means, and starts
another child behind the kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hw.errors import HardwareError
from hw.oracle.report import FAILED_WHILE, TIME_IS_UP, append_line, read_journal, write_report
from hw.workloads import workload_names
from tesserasim.errors import TesserasimError
from tesserasim.trace.parquet import read_trace
from tesserasim.writing import check_directory, check_output, naming

HANG_S = 60.0  # without a line in the journal, while a kernel is under way
START_S = 300.0  # the same while a model is built, compiled or captured
GRACE_S = 120.0  # after the deadline
RESTARTS = 8
_REPORTED = (1, 2, 130)  # a Python error, an error of the user or the machine, an interrupt
_FROM_OUTSIDE = tuple(-s for s in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


@dataclass(frozen=True)
class Job:
    """Units of one model; what a child is told."""

    model: str
    traces: tuple[Path, ...]
    out: Path
    blocks: tuple[str, ...]  # modules; () for the first, two in the middle and the last; ("all",) for the step
    deadline: float  # time.monotonic()


def oracle(traces: Sequence[Path], out: Path, blocks: Sequence[str], limit_s: float) -> int:
    """Check the units of the traces; 1 if anything was missed or not reached.

    Raises HardwareError or InputError before any work for traces that cannot be checked and reports that cannot be
    written; what fails later leaves the other units and their reports alone.
    """
    import torch

    deadline = time.monotonic() + limit_s
    by_model = _by_model(traces, out)
    if not torch.cuda.is_available():
        raise HardwareError("no CUDA device: the oracle runs kernels on the GPU that the traces describe")
    good = True
    problems: list[str] = []
    for model, paths in by_model.items():
        try:
            good &= _watch(Job(model, tuple(paths), out, tuple(blocks), deadline))
        except TesserasimError as error:
            problems.append(str(error))
        finally:  # after an interrupt too
            good &= _write_reports(out / model, paths, problems)
    if problems:
        raise HardwareError("; ".join(dict.fromkeys(problems)))
    return 0 if good else 1


def _by_model(traces: Sequence[Path], out: Path) -> dict[str, list[Path]]:
    """The traces by the workload that their folder names, each once."""
    by_model: dict[str, list[Path]] = defaultdict(list)
    taken: dict[Path, Path] = {}
    for path in traces:
        meta = read_trace(path).meta
        if meta.origin != "captured":
            raise HardwareError(f"{path}: a trace of origin {meta.origin!r}; the oracle runs captured units again")
        model = path.resolve().parent.name
        if model not in workload_names():
            raise HardwareError(f"{path}: its folder {model!r} names no workload; known: {', '.join(workload_names())}")
        report = out / model / f"{path.stem}.json"
        if report in taken:
            if taken[report].resolve() == path.resolve():
                continue
            other = taken[report]
            raise HardwareError(f"{path}: would share the report {report} with {other}; check one of them at a time")
        taken[report] = path
        by_model[model].append(path)
        check_directory(report.parent)
        for place in (report, report.with_suffix(".journal")) if report.parent.is_dir() else ():
            check_output(place, path)
    return by_model


def _write_reports(folder: Path, traces: Iterable[Path], problems: list[str]) -> bool:
    """Write every report that can be written; False if something is missed or was not reached."""
    good = True
    for path in traces:
        try:
            good &= write_report(path, folder / f"{path.stem}.journal", folder / f"{path.stem}.json")
        except TesserasimError as error:
            problems.append(str(error))
    return good


def _watch(job: Job, command: Sequence[str] = (sys.executable, "-m", "hw.oracle.worker")) -> bool:
    """Run children until all units are done; False if some could not be. `command`: the child's beginning."""
    folder = job.out / job.model
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as lock:
        for _ in range(RESTARTS):
            left_s = job.deadline - time.monotonic()
            if left_s <= 0:
                return False
            arguments = [job.model, str(job.out), repr(left_s), ",".join(job.blocks), *map(str, job.traces)]
            before = _sizes(job)
            child = subprocess.Popen([*command, *arguments], pass_fds=(lock,))
            how = _wait(child, job)
            if child.returncode == 0:
                return True
            if child.returncode == TIME_IS_UP or how == "time":
                print(f"oracle: {job.model}: out of time; the same command goes on", file=sys.stderr)
                return False
            if not how and child.returncode in _FROM_OUTSIDE:
                ended = f"the child was ended by {signal.Signals(-child.returncode).name}"
                print(f"oracle: {job.model}: {ended}, which no kernel does; the same command goes on", file=sys.stderr)
                return False
            # An error that the child itself reports says nothing about the kernel.
            if child.returncode in _REPORTED or not _explain(
                folder, job.traces, how or f"the process ended with {child.returncode}", before
            ):
                print(f"oracle: {job.model}: the child failed outside any kernel", file=sys.stderr)
                return False
        print(f"oracle: {job.model}: gave up after {RESTARTS} failed kernels", file=sys.stderr)
        return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Hold the folder; children inherit the descriptor, so that one that outlives its parent holds it too."""
    with naming(folder / ".lock"):
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    except BlockingIOError:
        raise HardwareError(f"{folder}: another oracle runs here; wait or choose another --out") from None
    finally:
        os.close(lock)


def _sizes(job: Job) -> dict[Path, int]:
    """Bytes of the journals that there are."""
    found = {}
    for path in job.traces:
        journal = job.out / job.model / f"{path.stem}.journal"
        with contextlib.suppress(OSError):
            found[journal] = journal.stat().st_size
    return found


def _wait(child: subprocess.Popen[bytes], job: Job) -> str:
    """Wait for the end of a child, or end it: "hang" without a sign, "time" long after the deadline, else "".

    A sign is a journal that grew. Silence is counted in steps of this loop, none longer than a second, so that a
    clock that is set or a machine that slept is no hang.
    """
    seen, newest, silent = _sizes(job), None, 0.0
    last = time.monotonic()
    try:
        while child.poll() is None:
            time.sleep(0.1)
            now, sizes = time.monotonic(), _sizes(job)
            grown = [journal for journal, size in sizes.items() if size != seen.get(journal)]
            silent = 0.0 if grown else silent + min(now - last, 1.0)
            seen, last, newest = sizes, now, grown[-1] if grown else newest
            if silent > (HANG_S if newest is not None and _under_way(newest) else START_S):
                return "hang"
            if now > job.deadline + GRACE_S:
                return "time"
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
    return ""


def _under_way(journal: Path) -> bool:
    """A kernel is under way, as the last line says."""
    with naming(journal), journal.open("rb") as f:
        f.seek(max(0, journal.stat().st_size - 4096))
        return f.read().rstrip(b"\n").rsplit(b"\n", 1)[-1].startswith(b'{"kind": "phase"')


def _explain(folder: Path, traces: Iterable[Path], how: str, before: Mapping[Path, int]) -> bool:
    """Close the kernel during which a child died; False if there is none. `before`: sizes when it started."""
    for path in traces:
        journal = folder / f"{path.stem}.journal"
        if not journal.exists() or journal.stat().st_size == before.get(journal):
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
            append_line(journal, _closing(open_kernel, judged, how))
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
