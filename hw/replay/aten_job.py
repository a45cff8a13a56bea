"""`python -m hw replay --backend aten`: a unit operator by operator over two arenas, on any device of PyTorch.

Nothing is compiled or captured, so this also splits a model over GPUs of different architecture, and over the CPU
alone. Sites are operators of PyTorch here (`layers.0/mm#0`), not the kernels of a captured trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence

import torch

from hw.errors import HardwareError
from hw.replay.aten_record import Recorded, record_unit
from hw.replay.aten_run import replay_lane
from hw.replay.run import SWITCHES, Job, Journal, check_plans, chosen_units, log, plan_id, plan_lanes
from hw.replay.session import random_devices
from hw.workloads import UnitSpec, Workload, load_workload
from tesserasim.errors import TesserasimError
from tesserasim.plans import ANY_SITE, Lane

LETTERS = "abcdefgh"


def arenas(names: str) -> dict[str, torch.device]:
    """Devices a, b, ... of "cpu,cuda:0"; HardwareError for what PyTorch does not know or this machine has not."""
    found: dict[str, torch.device] = {}
    if len(names.split(",")) > len(LETTERS):
        raise HardwareError(f"--on: at most {len(LETTERS)} devices")
    for letter, name in zip(LETTERS, names.split(","), strict=False):
        try:
            found[letter] = torch.device(name)
            torch.zeros(1, device=name).item()  # a device without values (meta) compares nothing
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise HardwareError(f"--on {names}: no device {name!r} here ({str(error).splitlines()[0][:80]})") from None
    if len(found) < 2:
        raise HardwareError(f"--on {names}: name at least two devices, e.g. cpu,cpu")
    return found


def replay_aten(job: Job, on: str) -> int:
    """Replay `job.random` placements, and the lanes of `job.plans`; 1 if one is not equal to the bit.

    What the time limit leaves undone is said, and left to the next call.
    """
    devices = arenas(on)
    check_plans(job)
    workload = load_workload(job.model, str(next(iter(devices.values()))))
    failed = 0
    with _users_code(job, "its units"):
        units = chosen_units(job, workload)
    for unit in units:
        if job.late:
            log(f"{workload.name} {unit.file_stem}: not reached; the same command goes on")
            continue
        with _users_code(job, unit.file_stem):
            recorded = record_unit(workload, unit)
        failed += _unit(job, workload, unit, recorded, devices)
    return 1 if failed else 0


@contextlib.contextmanager
def _users_code(job: Job, what: str) -> Iterator[None]:
    """What the code of a model raises, in one line that names the model."""
    try:
        yield
    except TesserasimError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise HardwareError(f"--model {job.model}: {what}: {type(error).__name__}: {text}") from error


def _unit(job: Job, workload: Workload, unit: UnitSpec, recorded: Recorded, devices: Mapping[str, torch.device]) -> int:
    """Replay a recorded unit under all lanes; how many were not equal, now or in a run before."""
    sites = [k.site for k in recorded.trace.kernels]
    if len(set(sites)) < 2:
        raise HardwareError(f"--model {job.model}: {unit.file_stem}: {len(set(sites))} operators cannot be split")
    todo = _lanes(job, unit, sites, list(devices))
    facts = {"model": workload.name, "unit": unit.as_dict(), "devices": {n: str(d) for n, d in devices.items()}}
    journal = Journal(job.out / workload.name / f"{unit.file_stem}.aten.jsonl", facts)
    log(f"{workload.name} {unit.file_stem}: {len(recorded.ops)} operators recorded")
    failed = left = 0
    for key, lane in todo.items():
        if journal.has("check", key):
            failed += key in journal.unequal
        elif job.late:
            left += 1
        else:
            report = replay_lane(recorded, unit.name, lane, devices, seed=1 + job.seed)
            failed += not report.equal
            journal.add({"kind": "check", "plan": key, "lane": lane.name, **dataclasses.asdict(report)})
            log(f"  {lane.name}: equal {report.equal}, {report.switches} switches, {report.moved_bytes} B moved")
    if left:
        log(f"  {left} placements not reached; the same command goes on")
    return failed


def _lanes(job: Job, unit: UnitSpec, sites: Sequence[str], names: Sequence[str]) -> dict[str, Lane]:
    """What is replayed, by the hash of its devices: equal placements once."""
    rng = random.Random(f"{job.seed} {unit.file_stem}")
    lanes = [Lane(f"single-{n}", unit.batch, 1, {unit.name: {ANY_SITE: n}}) for n in names]
    for i in range(job.random):
        switches = min(SWITCHES[i % len(SWITCHES)], len(dict.fromkeys(sites)) - 1)
        placed = random_devices(sites, names, switches, rng)
        lanes.append(Lane(f"random-{i}-{switches}", unit.batch, 1, {unit.name: placed}))
    lanes += plan_lanes(job, unit, sites, names)
    found: dict[str, Lane] = {}
    for lane in lanes:
        found.setdefault(plan_id([lane.device_of(unit.name, s) for s in sites]), lane)
    return found
