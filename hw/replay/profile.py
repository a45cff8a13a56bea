"""`python -m hw replay --profile` and `--links`: what the devices are like, before plans run on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hw.capture.run import capture_unit, gpu_name, machine
from hw.devices import Devices
from hw.errors import HardwareError
from hw.partition import Partition
from hw.replay.graph import COPIES_BY, ENGINE
from hw.replay.run import Job, Journal, chosen_units, devices, load_workloads, log, repeatable
from hw.replay.session import Session
from hw.watchdog import watchdog
from hw.workloads import UnitSpec, Workload
from tesserasim.trace.model import Trace


def links(job: Job) -> int:
    """Hops between the first two devices, by a line of `out`/links.jsonl; not again if it is there."""
    from hw.replay.links import HANG_S, measure

    found, info = devices(job.devices), machine()
    parts = found.parts
    journal = Journal(job.out / "links.jsonl", {"machine": info, "devices": found.facts()})
    for copies in COPIES_BY if parts[0].device == parts[1].device else (ENGINE,):
        if not journal.has("link", copies):
            with watchdog(HANG_S, f"links by {copies} copies"), found.throttled():
                row = measure(parts[0], parts[1], copies)
            journal.add({**row, "plan": copies})
            log(f"link by {copies} copies: {row['link']}")
    return 0


def profile(job: Job) -> int:
    """Kernel times of units on every device, as traces under `out`/profile/<device>/<model>; with `job.pairs` also
    how their kernels slow each other down, under `out`/pairs/<model>."""
    found, info = devices(job.devices), machine()
    workloads = load_workloads(job.model, found)
    for unit in chosen_units(job, next(iter(workloads.values()))):
        with repeatable(unit), found.throttled():
            names = {p.name: found.gpu_name(gpu_name(p.device), p) for p in found.parts}
            traces = [
                _profiled(job, workloads[p.device], unit, p, {**info, "gpu": names[p.name], "gpu_index": p.device})
                for p in found.parts if not job.late
            ]  # fmt: skip
            if job.pairs and len(traces) == len(found.parts) and not job.late:
                _pairs(job, workloads, unit, found, traces[0], info)
    return 0


def _profiled(job: Job, workload: Workload, unit: UnitSpec, part: Partition, info: Mapping[str, Any]) -> Trace:
    """The unit's trace on one device, which `info` names, from disk if it is there."""
    from hw.capture.assemble import assemble
    from tesserasim.trace.parquet import read_trace, write_trace

    path = job.out / "profile" / part.name / workload.name / f"{unit.file_stem}.parquet"
    if path.exists():
        kept = read_trace(path)
        if kept.meta.gpu != info["gpu"]:
            raise HardwareError(f"{path}: measured on {kept.meta.gpu}, not on {info['gpu']}; give another --out")
        return kept
    with torch.cuda.device(part.device):
        captured = capture_unit(workload, unit, stream=part.stream())
    trace = assemble(workload, captured, dict(info))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_trace(trace, path)
    log(f"{workload.name} {unit.file_stem} on {part.name} ({part.sms} SMs): {captured.e2e_ns['median'] / 1e6:.3f} ms")
    return trace


def _pairs(
    job: Job, workloads: Mapping[int, Workload], unit: UnitSpec, found: Devices, trace: Trace, info: Mapping[str, Any]
) -> None:
    from hw.replay.pairs import measure

    model = next(iter(workloads.values())).name
    facts = {"machine": info, "devices": found.facts(), "model": model}
    journal = Journal(job.out / "pairs" / model / f"{unit.file_stem}.jsonl", facts)
    if journal.has("end", ""):
        return
    session = Session(workloads, unit, found.parts)
    for row in measure(session, [k.duration_ns for k in trace.kernels], known=lambda p: journal.has("pair", p)):
        journal.add(row)
        if job.late:
            return
    journal.add({"kind": "end", "plan": ""})
    log(f"{model} {unit.file_stem}: pairs of kernels measured")
