"""The command: measure shape after shape, each a line of the journal the moment it is there, then write the table.

A run that is cut short goes on where it stopped; the table of what there is is written at the end of every run.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hw.calibrate.cases import Case, build
from hw.calibrate.machine import describe, file_stem, gpu_name
from hw.calibrate.shapes import KINDS, Shape, shapes
from hw.calibrate.table import csv_text, row, sidecar_text
from hw.calibrate.timing import SAMPLES, Measured, measure, settle
from hw.errors import HardwareError
from hw.journals import MAX_JOURNAL_BYTES, journal_lines
from hw.replay.run import Journal
from tesserasim.errors import InputError
from tesserasim.files import did_you_mean, path_text, read_bytes, shown
from tesserasim.writing import check_directory, write_whole

#: A kernel that hangs, or takes this much longer than the limit to compile, ends the run.
GRACE_S = 20.0
SETTLE_S = 1.0
#: What must agree for lines of two runs to be rows of one table.
SAME = ("gpu", "torch")


class OutOfTime(BaseException):
    """The time limit and its grace are over in the middle of a shape."""


@dataclass(frozen=True)
class Job:
    """One call of the command."""

    out: Path
    kinds: tuple[str, ...] = KINDS
    limit_s: float = 300.0
    link: bool = False


@dataclass(frozen=True)
class Tools:
    """What touches the GPU; tests put others in their place."""

    machine: Callable[[], dict[str, Any]] = describe
    build: Callable[[Shape], Case] = build
    measure: Callable[[Case], Measured] = measure
    settle: Callable[[float], None] = settle
    links: Callable[[], list[dict[str, Any]]] = lambda: measure_links()
    alive: Callable[[], bool] = lambda: alive()
    clock: Callable[[], float] = time.monotonic


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def from_options(out: str, kinds: str, limit_s: float, link: bool) -> int:
    """The command's own arguments; `kinds` with commas between, empty for all."""
    return calibrate(Job(Path(out), tuple(k for k in kinds.split(",") if k) or KINDS, limit_s, link))


def calibrate(job: Job, tools: Tools | None = None) -> int:
    """Run a job: 0, or 1 if the time limit left shapes undone. Errors of use are HardwareError or InputError."""
    tools = tools or Tools()
    started = tools.clock()
    for kind in job.kinds:
        if kind not in KINDS:
            raise HardwareError(f"--kinds: no kind {shown(kind)}{did_you_mean(kind, KINDS)}")
    check_directory(job.out)
    machine = tools.machine()
    if job.link and machine["gpus"] < 2:
        raise HardwareError("--link: one GPU alone has no link to another; leave the option out")
    gpu, known = gpu_name(machine["device"])
    facts = {**machine, "gpu": gpu}
    stem = file_stem(gpu)
    path = job.out / f"{stem}.jsonl"
    done = read_journal(path, facts)
    journal = Journal(path, {"calibration": True, **facts})
    todo = [s for s in shapes(job.kinds) if s.key not in done]
    log(f"{gpu}: {len(done)} shapes measured before, {len(todo)} to go")
    skipped: dict[str, str] = {}
    finished = True
    links: list[dict[str, Any]] = []
    try:
        with _watchdog(job.limit_s + GRACE_S):
            if job.link:
                links = tools.links()
                for link in links:
                    journal.add(link)
            finished = _measure_all(job, tools, started, todo, journal, done, skipped)
    except OutOfTime:
        finished = False
    finally:
        _write(job.out / stem, facts, done, skipped, links)
    _say(job, stem, gpu, known, machine, done, skipped, finished)
    return 0 if finished else 1


def read_journal(path: Path, facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Key of a shape -> what was measured. InputError for what is no journal of a calibration of this GPU and torch."""
    if not path.exists():
        return {}
    what = "calibration's journal"
    found: dict[str, dict[str, Any]] = {}
    first = True
    raw = read_bytes(path, what, MAX_JOURNAL_BYTES)
    if raw and not raw.startswith(b'{"'):
        raise InputError(f"{path_text(path)}: not a {what}; give another --out")
    for number, line in journal_lines(path, what):
        if first and not line.get("calibration"):
            raise InputError(f"{path_text(path)}: not a {what}; give another --out")
        first = False
        if line.get("kind") == "session":
            for key in SAME:
                if line.get(key) != facts[key]:
                    raise InputError(
                        f"{path_text(path)}: measured with {key} {shown(line.get(key))}, here it is "
                        f"{shown(facts[key])}; give another --out"
                    )
        elif line.get("kind") == "shape":
            try:
                times = [float(line[c]) for c in ("time_us", "p10_us", "p90_us")]
                if not isinstance(line["plan"], str) or not all(0 < t < 1e12 for t in times):
                    raise ValueError
                found[line["plan"]] = line
            except (KeyError, ValueError, TypeError):
                raise InputError(f"{path_text(path)}: line {number} is no line of a {what}") from None
    return found


def _measure_all(
    job: Job, tools: Tools, started: float, todo: Sequence[Shape], journal: Journal,
    done: dict[str, dict[str, Any]], skipped: dict[str, str],
) -> bool:  # fmt: skip
    """Measure what is to do; False if the time limit came first."""
    if todo:
        tools.settle(SETTLE_S)
    for i, shape in enumerate(todo):
        elapsed = tools.clock() - started
        if elapsed > job.limit_s:
            log(f"{len(todo) - i} shapes left undone after {elapsed:.0f} s; run the same command again to go on")
            return False
        if i and i % 25 == 0:
            log(f"{i} of {len(todo)} after {elapsed:.0f} s")
        try:
            case = tools.build(shape)
            found = tools.measure(case)
            line = {"kind": "shape", "plan": shape.key, **_line(case, found)}
        except torch.OutOfMemoryError as error:
            skipped[shape.key] = f"out of memory: {_short(error)}"
            gc.collect()
        except Exception as error:  # what a GPU or a library lacks has many types, Triton's own among them
            if isinstance(error, torch.AcceleratorError) and not tools.alive():
                raise HardwareError(
                    f"the GPU failed at {shape.key} ({_short(error)}); what is finished is saved"
                ) from None
            skipped[shape.key] = _short(error)
        else:
            done[shape.key] = line
            journal.add(line)
        finally:
            case = found = None  # type: ignore[assignment]
            forget()
    return True


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def alive() -> bool:
    """The device still works: an error of one call, such as what no graph can capture, is not that of a kernel."""
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError:
        return False
    return True


def _line(case: Case, found: Measured) -> dict[str, Any]:
    """What the journal keeps of a measurement."""
    warm, cold = found.warm, found.cold
    line: dict[str, Any] = {
        "kernel_source": case.source, "time_us": round(warm.us, 3), "p10_us": round(warm.low_us, 3),
        "p90_us": round(warm.high_us, 3), "turns": warm.turns, "samples": SAMPLES,
        "kernels": " + ".join(k[:60] for k in dict.fromkeys(found.kernels))[:200],
    }  # fmt: skip
    return line if cold is None else line | {"cold_us": round(cold.us, 3), "cold_turns": cold.turns}


def forget() -> None:
    """Give memory back: graphs hold pools of their own, and the next shape asks for what is free."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write(
    stem: Path, facts: Mapping[str, Any], done: Mapping[str, dict[str, Any]], skipped: Mapping[str, str],
    links: Sequence[Mapping[str, Any]],
) -> None:  # fmt: skip
    """The table and its sidecar, whole or not at all."""
    rows = [row(s, done[s.key], facts["gpu"], facts["torch"]) for s in shapes() if s.key in done]
    if not rows:
        return
    about = {**facts, "rows": len(rows), "skipped": dict(skipped), "made_by": "python -m hw calibrate"}
    if links:
        about["links"] = list(links)
    write_whole(stem.with_name(stem.name + ".csv"), csv_text(rows).encode())
    write_whole(stem.with_name(stem.name + ".json"), sidecar_text(about).encode())


def _say(
    job: Job, stem: str, gpu: str, known: bool, machine: Mapping[str, Any], done: Mapping[str, Any],
    skipped: Mapping[str, str], finished: bool,
) -> None:  # fmt: skip
    for reason, count in Counter(r.split(":")[0] for r in skipped.values()).items():
        log(f"skipped {count} shapes: {reason}")
    if not done:
        raise HardwareError("nothing could be measured, so no table was written")
    print(f"{path_text(job.out / (stem + '.csv'))}: {len(done)} rows{'' if finished else ', unfinished'}")
    if not known:
        log(
            f"{gpu} is not in the catalogue, which `costs fit` asks for its figures: add a row to "
            f"tesserasim/cluster/data/gpus.csv with this name or alias, sms {machine['sms']}, clock_mhz "
            f"{machine['max_sm_mhz']}, memory_bytes {machine['memory_bytes']}, l2_mb {machine['l2_bytes'] >> 20}, "
            f"compute_capability {machine['capability']}, and bf16_tflops, bandwidth_gbs and tdp_w of its data sheet"
        )


@contextmanager
def _watchdog(seconds: float) -> Iterator[None]:
    """OutOfTime after so many seconds, where a signal can say so (the main thread)."""
    if threading.current_thread() is not threading.main_thread() or not 0 < seconds < 1e8:
        yield
        return

    def ring(number: int, frame: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def measure_links() -> list[dict[str, Any]]:
    """A line per pair of GPUs, as `hw replay --links` writes it."""
    from hw.partition import whole
    from hw.replay.links import measure as measure_link

    parts = [whole(i, f"gpu{i}") for i in range(torch.cuda.device_count())]
    found = []
    for i, one in enumerate(parts):
        for other in parts[i + 1 :]:
            found.append(measure_link(one, other))
            log(f"link {found[-1]['link']}")
    return found
