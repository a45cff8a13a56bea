"""`python -m hw replay`: run plans of captured units on devices of this machine, kernel by kernel.

Every result is a line of `<out>/<model>/<unit>.jsonl` the moment it is there; a plan whose line is there is not run
again, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hw.capture.run import machine
from hw.devices import Devices, DeviceSpec, make_devices
from hw.errors import HardwareError
from hw.journals import MAX_JOURNAL_BYTES
from hw.replay.session import Session, random_devices
from hw.watchdog import watchdog
from hw.workloads import UnitSpec, Workload, load_workload
from tesserasim.errors import InputError
from tesserasim.files import did_you_mean, path_text, read_bytes, shown
from tesserasim.plans import ANY_SITE, Lane, read_plan
from tesserasim.writing import naming

HANG_S = 120.0  # no check, mutation or timing takes as long
SWITCHES = (1, 10, 100, 4, 16, 32, 64, 8)


_BEGUN = time.monotonic()


def log(text: str) -> None:
    print(f"{time.monotonic() - _BEGUN:6.1f} s  {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Job:
    """One call of the command."""

    model: str
    units: tuple[str, ...]
    devices: tuple[DeviceSpec, ...]  # empty: every GPU is a device
    plans: tuple[Path, ...]
    random: int
    depths: tuple[int, ...]
    mutations: int  # moves, and as many waits, that are dropped over all random placements of a unit
    out: Path
    deadline: float
    seed: int = 0
    timelines: bool = False
    pairs: bool = False
    timed: int | None = None  # random placements that are timed; None: all
    copies: str = "engine"  # who moves bytes between devices

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline


def devices(specs: Sequence[DeviceSpec]) -> Devices:
    """The devices asked for, or all GPUs."""
    if not torch.cuda.is_available():
        raise HardwareError("no CUDA device: plans are replayed on GPUs (or see the aten backend for CPUs)")
    gpus = torch.cuda.device_count()
    if not specs and gpus < 2:
        raise HardwareError("one GPU alone: give --sms, e.g. --sms 64,68, to split it into partitions")
    return make_devices(specs or [DeviceSpec(i) for i in range(gpus)], gpus)


class Journal:
    """Lines of results of one unit, each written and flushed whole; what a killed run left of its last one is cut off.

    InputError for a file that is no journal, or the journal of other devices or of another point: their results are
    not results of this run.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = self._read() if path.exists() else []
        here = json.loads(json.dumps(facts))
        last: dict[str, Any] = next((r for r in reversed(rows) if r["kind"] == "session"), {})
        if last:
            last = {**last, "copies": last.get("copies", "engine")}  # the only way there was
        for key in ("model", "unit", "devices", "sms", "copies"):
            if key in last and key in here and last[key] != here[key]:
                raise InputError(f"{path_text(path)}: its {key} was {shown(last[key])}; give another --out")
        self.done = {(r["kind"], r.get("plan"), r.get("depth")) for r in rows}
        #: Plans that a run before this one found unequal: they stay so.
        self.unequal = {r.get("plan") for r in rows if r["kind"] == "check" and not r.get("equal")}
        self.mutated = sum(map(_mutated, rows))  # waits that were dropped
        self.add({"kind": "session", **facts})

    def _read(self) -> list[dict[str, Any]]:
        raw = read_bytes(self.path, "replay's journal", MAX_JOURNAL_BYTES)
        end = raw.rfind(b"\n") + 1
        rows = [r for r in map(_row, raw[:end].split(b"\n")) if r is not None]
        if raw.strip() and not rows and (end or not raw.startswith(b'{"')):
            raise InputError(f"{path_text(self.path)}: not a replay's journal; give another --out")
        if end < len(raw):  # the next line must not be glued to half of one
            os.truncate(self.path, end)
        return [r for r in rows if all(isinstance(r.get(k), str | int | None) for k in ("plan", "depth"))]

    def has(self, kind: str, plan: str, depth: int | None = None) -> bool:
        return (kind, plan, depth) in self.done

    def add(self, row: Mapping[str, Any]) -> None:
        with naming(self.path), self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(row, sort_keys=True) + "\n")
        self.done.add((row["kind"], row.get("plan"), row.get("depth")))
        self.mutated += _mutated(row)


def _mutated(row: Mapping[str, Any]) -> int:
    early = row.get("early")
    return len(early) if row["kind"] == "mutations" and isinstance(early, list) else 0


def _row(line: bytes) -> dict[str, Any] | None:
    """A line of a journal; None for what is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("kind"), str) else None


def chosen_units(job: Job, workload: Workload) -> list[UnitSpec]:
    """The units that a job names, or all. HardwareError for a name that the model has not, and for no unit at all."""
    units = list(workload.units())
    if not units or not all(isinstance(u, UnitSpec) for u in units):
        raise HardwareError(f"--model {job.model}: its units() must list at least one UnitSpec")
    name = getattr(workload, "name", None)
    if not isinstance(name, str) or not name.isprintable() or name in ("", ".", "..") or "/" in name:
        raise HardwareError(f"--model {job.model}: its name {shown(name)} cannot be that of a folder")
    known = [u.file_stem for u in units]
    for wanted in job.units:
        if wanted not in known:
            raise HardwareError(f"--units: {job.model} has no unit {shown(wanted)}{did_you_mean(wanted, known)}")
    chosen = [u for u in units if not job.units or u.file_stem in job.units]
    for path in job.plans:
        if not any(u.name in x.assignment for x in read_plan(path).lanes for u in chosen):
            names = ", ".join(sorted({u.name for u in chosen}))
            raise InputError(f"{path_text(path)}: places none of the units to run ({names})")
    return chosen


def timed(job: Job, lane: Lane) -> bool:
    """Whether a lane is timed: random placements only up to the job's number."""
    return job.timed is None or not lane.name.startswith(tuple(f"random-{i}-" for i in range(job.timed, job.random)))


def plan_lanes(job: Job, unit: UnitSpec, sites: Sequence[str], names: Sequence[str]) -> list[Lane]:
    """Lanes of the plan files that place a unit. InputError for a device or site that the plan cannot be run with."""
    found = []
    for path in job.plans:
        for lane in (x for x in read_plan(path).lanes if unit.name in x.assignment):
            where = f"{path_text(path)}: lane {lane.name}"
            for site in sites:
                try:
                    device = lane.device_of(unit.name, site)
                except KeyError:
                    raise InputError(f"{where} leaves out site {site} of unit {unit.name}") from None
                if device not in names:
                    raise InputError(f"{where}: no device {shown(device)} here; devices: {', '.join(names)}")
            found.append(lane)
    return found


def lanes(job: Job, unit: UnitSpec, sites: Sequence[str], names: Sequence[str], parts: Mapping[str, str]) -> list[Lane]:
    """What is replayed: every device alone, attention and FFN apart, random placements, and the lanes of plan files."""
    found = [Lane(f"single-{n}", unit.batch, 1, {unit.name: {ANY_SITE: n}}) for n in names]
    for one, other in itertools.permutations(names, 2):
        placed = {s: one if parts.get(s) == "attention" else other for s in sites}
        if len(set(placed.values())) > 1:
            found.append(Lane(f"af-{one}-{other}", unit.batch, 1, {unit.name: placed}))
    rng = random.Random(f"{job.seed} {unit.file_stem}")
    for i in range(job.random):
        switches = min(SWITCHES[i % len(SWITCHES)], len(dict.fromkeys(sites)) - 1)
        placed = random_devices(sites, names, switches, rng)
        found.append(Lane(f"random-{i}-{switches}", unit.batch, 1, {unit.name: placed}))
    return found + plan_lanes(job, unit, sites, names)


def check_plans(job: Job) -> None:
    """InputError for a plan file that cannot be read, before anything is built."""
    for path in job.plans:
        read_plan(path)


@contextmanager
def repeatable(unit: UnitSpec) -> Iterator[None]:
    """Units of one token are built without cuDNN's attention: its kernel for them gives other bits from run to run
    (seen on an H200 with the bits of every input the same), and what does not repeat itself cannot be checked."""
    if unit.tokens != 1:
        yield
        return
    was = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


def plan_id(device_of: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(device_of).encode()).hexdigest()[:16]


def replay(job: Job) -> int:
    """Run a job; 1 if a plan failed. What the time limit leaves undone is left to the next call."""
    check_plans(job)
    found = devices(job.devices)
    workloads = load_workloads(job.model, found)
    info = machine()
    failed = 0
    for unit in chosen_units(job, next(iter(workloads.values()))):
        try:
            with repeatable(unit), found.throttled():
                failed += _unit(job, workloads, unit, found, info)
        except torch.AcceleratorError:
            raise
        except InputError as error:
            log(f"{job.model} {unit.file_stem}: FAILED {error}")
            failed += 1
        except Exception as error:
            traceback.print_exc()
            log(f"{job.model} {unit.file_stem}: FAILED {type(error).__name__}: {str(error)[:300]}")
            failed += 1
    return 1 if failed else 0


def load_workloads(model: str, found: Devices) -> dict[int, Workload]:
    """The model on every GPU that devices are parts of, by number; the first device's GPU first."""
    built: dict[int, Workload] = {}
    for gpu in dict.fromkeys(p.device for p in found.parts):
        with torch.cuda.device(gpu):
            built[gpu] = load_workload(model, f"cuda:{gpu}" if gpu else "cuda")
    return built


def _unit(
    job: Job, workloads: Mapping[int, Workload], unit: UnitSpec, found: Devices, info: Mapping[str, Any]
) -> int:
    t0, parts = time.monotonic(), found.parts
    session = Session(workloads, unit, parts, copies=job.copies)
    workload = session.workload
    facts = {
        "model": workload.name, "copies": job.copies, "unit": unit.as_dict(), "machine": dict(info),
        "devices": found.facts(), "pinned": dict(session.pinned),
    }  # fmt: skip
    journal = Journal(job.out / workload.name / f"{unit.file_stem}.jsonl", facts)
    log(f"{workload.name} {unit.file_stem}: captured on {len(parts)} devices in {time.monotonic() - t0:.1f} s, "
        f"{len(session.pinned)} sites pinned")  # fmt: skip
    kernels = session.trace.kernels
    part = {k.site: k.part for k in kernels}
    todo = lanes(job, unit, [k.site for k in kernels], [p.name for p in parts], part)
    failed = _checks(job, session, journal, todo)
    if not job.late and not journal.has("plain", parts[0].name, 1):
        plain = session.time_plain()
        journal.add({"kind": "plain", "plan": parts[0].name, **plain.as_dict()})
        log(f"  the captured graph itself on {parts[0].name}: {plain.as_dict()['units_per_s']:.2f}/s")
    for depth in job.depths:
        if not job.late:
            session.deepen(depth)
        if session.pinned != facts["pinned"]:
            facts["pinned"] = dict(session.pinned)
            journal.add({"kind": "pinned", "depth": depth, "sites": facts["pinned"]})
            log(f"  at depth {depth} {len(session.pinned)} sites are pinned: {next(iter(session.pinned.values()))}")
        failed += _times(job, session, journal, todo, depth)
        _replicas(job, session, journal, depth)
    return failed


def _times(job: Job, session: Session, journal: Journal, todo: Sequence[Lane], depth: int) -> int:
    failed, stem = 0, session.unit.file_stem
    # Of plans with one placement the one that was made for this depth, with its stagger.
    for lane in sorted(todo, key=lambda x: x.depth != depth):
        device_of = session.devices(lane)
        key = plan_id(device_of)
        if job.late or journal.has("timing", key, depth) or not timed(job, lane):
            continue
        if journal.has("fault", key, depth):
            failed += 1
            continue
        with _last_words(journal, {"kind": "fault", "plan": key, "depth": depth, "lane": lane.name}):
            timing = session.time(device_of, depth, lane.stagger_us if lane.depth == depth else 0.0)
        if session.refused:
            log(f"  segments, since: {session.refused}")
        row = {
            "kind": "timing", "plan": key, "lane": lane.name, "segments": bool(session.refused),
            "device_of": _runs(device_of),
        }  # fmt: skip
        journal.add({**row, **timing.as_dict()})
        log(f"  {lane.name} d{depth}: {timing.as_dict()['units_per_s']:.2f}/s")
        if job.timelines:
            session.timeline(device_of, depth, job.out / session.workload.name / f"{stem}.{lane.name}.d{depth}.json")
    return failed


def _replicas(job: Job, session: Session, journal: Journal, depth: int) -> None:
    """Every device runs whole units in `depth` slots of its own, all at once: what splitting has to beat. Where that
    takes no more slots than there are anyway."""
    names = [p.name for p in session.partitions]
    slots = [name for name in names for _ in range(depth)]
    if job.late or len(slots) > max(job.depths) or any(journal.has(k, "replicas", depth) for k in ("group", "fault")):
        return
    session.deepen(len(slots))
    count = len(session.trace.kernels)
    with _last_words(journal, {"kind": "fault", "plan": "replicas", "depth": depth, "lane": "replicas"}):
        found = session.time_together([[name] * count for name in slots])
    journal.add({"kind": "group", "plan": "replicas", "depth": depth, "slots": slots, **found.as_dict()})
    log(f"  replicas d{depth} each: {found.as_dict()['units_per_s']:.2f}/s")


def _checks(job: Job, session: Session, journal: Journal, todo: Sequence[Lane]) -> int:
    failed, want, seed = 0, None, 7 + job.seed
    for lane in todo:
        device_of = session.devices(lane)
        key = plan_id(device_of)
        failed += key in journal.unequal
        if job.late or journal.has("check", key):
            continue
        if want is None:
            want = session.unsplit(seed)
            again, other = session.unsplit(seed), session.unsplit(seed + 1)
            same = all(torch.equal(a, b) for a, b in zip(want, again, strict=True))
            moved = sum(not torch.equal(a, b) for a, b in zip(want, other, strict=True))
            row = {"kind": "reference", "repeats": same, "outputs": len(want), "follow_inputs": moved}
            why = "" if same else _why_unstable(session, seed)
            journal.add({**row, "why": why} if why else row)
            log(f"  reference: {len(want)} outputs, repeats {same}, {moved} change with the inputs")
            if why:
                log(f"  {why}: no placement can be checked")
                return 1
        facts = {"plan": key, "lane": lane.name, "seed": seed}
        with _last_words(journal, {"kind": "check", **facts, "equal": False, "device_of": _runs(device_of)}):
            report = session.check(device_of, seed, want)
        failed += not report["equal"]
        journal.add({"kind": "check", **facts, "device_of": _runs(device_of), **report})
        log(f"  {lane.name}: equal {report['equal']}, {report['switches']} switches, {report['moved_bytes']} B moved")
        if not report["equal"]:
            log(f"  {report['wrong']}, NaN {report['nan']}, again {report['again']}")
        wanted = max(0, min(-(-job.mutations // max(1, job.random)), job.mutations - journal.mutated))
        if not wanted or not lane.name.startswith("random") or report["moves"] < 8 or not report["equal"]:
            continue
        if not journal.has("mutations", key):
            rng = random.Random(f"{job.seed} {key}")
            with _last_words(journal, {"kind": "mutations", **facts, "lost": [], "early": []}):
                found = session.mutate(device_of, seed, want, wanted, rng)
            journal.add({"kind": "mutations", "plan": key, "lane": lane.name, **found})
            log(f"  {lane.name}: {sum(x[1] for x in found['lost'])} of {len(found['lost'])} lost moves and "
                f"{sum(x[1] for x in found['early'])} of {len(found['early'])} lost waits show")  # fmt: skip
    return failed


@contextmanager
def _last_words(journal: Journal, row: Mapping[str, Any]) -> Iterator[None]:
    """A fault or hang of the GPU ends the process: the row says where, so that the next call does not run into it
    again."""
    try:
        hung = {**row, "fault": f"no end after {HANG_S:g} s"}
        with watchdog(HANG_S, f"{row['kind']} of {row['lane']}", lambda: journal.add(hung)):
            yield
    except torch.AcceleratorError as error:
        journal.add({**row, "fault": (str(error).splitlines() or [""])[0][:200]})
        raise


def _why_unstable(session: Session, seed: int) -> str:
    found = session.unstable(seed)
    if found is None:
        return "the unit does not repeat itself, its kernels one by one do"
    kernel = session.trace.kernels[found[0]]
    names = ", ".join(session.trace.buffers[b].name for b in found[1][:3])
    return f"kernel {found[0]} of site {kernel.site} ({kernel.name[:60]}) does not repeat itself: {names}"


def _runs(device_of: Sequence[str]) -> list[list[Any]]:
    """Device of every kernel as runs of [device, count]."""
    return [[d, len(list(g))] for d, g in itertools.groupby(device_of)]
