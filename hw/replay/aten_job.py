"""`python -m hw replay --backend aten`: a unit operator by operator over two arenas, on any device of PyTorch.

Nothing is compiled or captured, so this also splits a model over GPUs of different architecture, and over the CPU
alone. Sites are operators of PyTorch here (`layers.0/mm#0`), not the kernels of a captured trace.
"""

from __future__ import annotations

import dataclasses
import random

import torch

from hw.errors import HardwareError
from hw.replay.aten_record import record_unit
from hw.replay.aten_run import replay_lane
from hw.replay.run import SWITCHES, Job, Journal, log, plan_id
from hw.replay.session import random_devices
from hw.workloads import load_workload
from tesserasim.plans import ANY_SITE, Lane, read_plan


def arenas(names: str) -> dict[str, torch.device]:
    """"cpu,cuda:0" as devices a, b, ...; HardwareError for what PyTorch does not know or this machine has not."""
    found = {}
    for letter, name in zip("abcdefgh", names.split(","), strict=False):
        try:
            found[letter] = torch.device(name)
            torch.empty(1, device=name)
        except (RuntimeError, AssertionError) as error:
            raise HardwareError(f"--on {names}: no device {name!r} here ({str(error).splitlines()[0][:80]})") from None
    if len(found) < 2:
        raise HardwareError(f"--on {names}: name at least two devices, e.g. cpu,cpu")
    return found


def replay_aten(job: Job, on: str) -> int:
    """Replay `job.random` placements, and the lanes of `job.plans`; 1 if one is not equal to the bit."""
    devices = arenas(on)
    workload = load_workload(job.model, str(next(iter(devices.values()))))
    failed = 0
    for unit in [u for u in workload.units() if not job.units or u.file_stem in job.units]:
        recorded = record_unit(workload, unit)
        sites = [k.site for k in recorded.trace.kernels]
        facts = {"model": workload.name, "unit": unit.as_dict(), "devices": {n: str(d) for n, d in devices.items()}}
        journal = Journal(job.out / workload.name / f"{unit.file_stem}.aten.jsonl", facts)
        log(f"{workload.name} {unit.file_stem}: {len(recorded.ops)} operators recorded")
        rng = random.Random(f"{job.seed} {unit.file_stem}")
        lanes = [Lane(f"single-{n}", unit.batch, 1, {unit.name: {ANY_SITE: n}}) for n in devices]
        for i in range(job.random):
            switches = min(SWITCHES[i % len(SWITCHES)], len(dict.fromkeys(sites)) - 1)
            placed = random_devices(sites, list(devices), switches, rng)
            lanes.append(Lane(f"random-{i}-{switches}", unit.batch, 1, {unit.name: placed}))
        lanes += [x for p in job.plans for x in read_plan(p).lanes if unit.name in x.assignment]
        for lane in lanes:
            key = plan_id([lane.device_of(unit.name, s) for s in sites])
            if job.late or journal.has("check", key):
                continue
            report = replay_lane(recorded, unit.name, lane, devices, seed=1 + job.seed)
            failed += not report.equal
            journal.add({"kind": "check", "plan": key, "lane": lane.name, **dataclasses.asdict(report)})
            log(f"  {lane.name}: equal {report.equal}, {report.switches} switches, {report.moved_bytes} B moved")
    return 1 if failed else 0
