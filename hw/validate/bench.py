"""A unit that was replayed, as the simulator sees it: a mix of one launch, devices as a cluster, measured times."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from hw.journals import Hop
from hw.validate.timeline import Span, Use, used
from tesserasim.case import Case, settled_run
from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import Cluster, Device, GpuSpec, Link
from tesserasim.costs.times import KernelTimes, captured_times
from tesserasim.demands import kernel_demands
from tesserasim.errors import InputError
from tesserasim.lower import lower
from tesserasim.plans import Lane, Plan
from tesserasim.policies import policies
from tesserasim.policies.base import Limits, NotApplicable
from tesserasim.sim.engine import run
from tesserasim.sim.program import Program
from tesserasim.sim.result import LaneResult
from tesserasim.sim.sharing import ONE
from tesserasim.trace.mix import Mix
from tesserasim.trace.model import Trace

DEVICE_MODELS = ("serial", "shared")
#: How the trace of a partition names its multiprocessors: "H200-SXM/64sm".
_PARTITION = re.compile(r"/(\d{1,6})sm(?:~\d{1,6})?$")
#: Policies whose plans for a unit are replayed.
POLICIES = ("single", "af", "kernel")
#: Cohorts per slot in the run whose timeline is looked at; the first half is warm-up.
_SEEN = 4


@dataclass(frozen=True)
class MeasuredTimes:
    """Kernel times of a unit on the devices that it was profiled on, by device; a cost model."""

    traces: Mapping[str, Trace]  # GPU name -> the unit's trace there
    name: str = "measured"

    @property
    def version(self) -> str:
        content = [[g, [k.duration_ns for k in t.kernels]] for g, t in sorted(self.traces.items())]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def kernel_ns(self, trace: Trace, gpu: GpuSpec) -> KernelTimes:
        if gpu.name not in self.traces:
            raise InputError(f"{trace.unit}: not profiled on {gpu.name}")
        return captured_times(self.traces[gpu.name])


@dataclass(frozen=True)
class Unit:
    """One unit on its devices: traces of the same kernels, and the hop between them."""

    model: str
    traces: Mapping[str, Trace]  # device -> trace
    hop: Hop | None
    copies: str = "engine"  # what moved bytes between devices

    def __post_init__(self) -> None:
        first = next(iter(self.traces.values()))
        for device, t in self.traces.items():
            if [k.site for k in t.kernels] != [k.site for k in first.kernels]:
                raise InputError(f"{self.model} {first.unit}: device {device} runs other kernels than the first one")

    @property
    def gpus(self) -> dict[int, list[str]]:
        """Number of a GPU -> the devices that are parts of it. Traces without a number are of GPU 0 if all of their
        devices fit on one, else each has its own."""
        known = {d: t.meta.extra.get("gpu_index") for d, t in self.traces.items()}
        if any(type(i) is not int for i in known.values()):
            found = [n for t in self.traces.values() if (n := partition_sms(t)) is not None]
            specs = {whole_gpu(t).name: whole_gpu(t).sms for t in self.traces.values()}
            one = len(found) == len(self.traces) and len(specs) == 1 and sum(found) <= max(specs.values())
            known = {d: 0 if one else i for i, d in enumerate(self.traces)}
        gpus: dict[int, list[str]] = {}
        for device, i in known.items():
            gpus.setdefault(int(i or 0), []).append(device)
        return gpus

    @property
    def parts(self) -> dict[str, int]:
        """Multiprocessors of every device that is a part of a GPU."""
        found = {d: n for d, t in self.traces.items() if (n := partition_sms(t)) is not None}
        return {d: n for d, n in found.items() if n < whole_gpu(self.traces[d]).sms}


@dataclass(frozen=True)
class Prediction:
    """A closed loop as the simulator runs it, in its steady state."""

    per_s: float  # units
    latency_ms: float  # median time of a unit in its slot
    use: Use


def whole_gpu(trace: Trace) -> GpuSpec:
    """The GPU that a trace was taken on, or on a part of which."""
    return find_gpu(trace.meta.gpu.partition("/")[0])


def partition_sms(trace: Trace) -> int | None:
    """Multiprocessors of the device that a trace was taken on, where it says so."""
    found = _PARTITION.search(trace.meta.gpu)
    return int(found[1]) if found else None


def bench(unit: Unit) -> tuple[Mix, Cluster, MeasuredTimes]:
    """The unit as a mix of one launch, its devices as a cluster, and what was measured as a cost model."""
    names = sorted(unit.traces)
    first = unit.traces[names[0]]
    hop = unit.hop or Hop(0.0, 1.0)
    specs = {n: whole_gpu(unit.traces[n]) for n in names}
    gpus = {n: replace(s, name=f"{s.name}/{n}", aliases=()) for n, s in specs.items()}
    links = tuple(
        Link(a, b, hop.gbs * 8, hop.latency_ns / 1000, "measured", setup_us=hop.setup_ns / 1000, in_order=hop.in_order)
        for a, b in combinations(names, 2)
    )
    parts = unit.parts
    shared = tuple(tuple(sorted(own)) for _, own in sorted(unit.gpus.items()) if len(own) > 1)  # parts share a DRAM
    devices = tuple(Device(n, gpus[n], parts.get(n)) for n in names)
    cluster = Cluster("devices", devices, links, dram_domains=shared)
    # A mix of stages launches a unit at tokens 1 and context 0, whatever they were: the trace is taken as it is.
    point = {**first.meta.unit, "tokens": 1, "context": 0}
    first = replace(first, meta=replace(first.meta, unit=point))
    mix = Mix("unit", unit.model, "stages", {first.unit: (first,)}, stages=((first.unit, 1),))
    return mix, cluster, MeasuredTimes({gpus[n].name: t for n, t in unit.traces.items()})


def simulate(
    unit: Unit, device_of: Sequence[str], depth: int, device_model: str = "serial", stagger_us: float = 0.0
) -> Prediction:
    """A closed loop of `depth` slots, kernel i on `device_of[i]`; slot k opens k * `stagger_us` late.

    InputError if a site lies on two devices or on none that was profiled, or bytes must move and no hop was measured.
    """
    first = unit.traces[min(unit.traces)]
    placed = placed_sites(unit, device_of)
    if unit.hop is None and len(set(device_of)) > 1:
        raise InputError("no hop was measured between the devices: python -m hw replay --links")
    if device_model not in DEVICE_MODELS:
        raise InputError(f"device model {device_model!r}: one of {', '.join(DEVICE_MODELS)}")
    mix, cluster, costs = bench(unit)
    batch = _batch(unit)
    lane = Lane("lane", batch, depth, {first.unit: placed}, stagger_us=stagger_us)
    plan = Plan("unit", cluster.name, "replay", (lane,))
    program = lower(mix, plan, cluster, costs, device_model=device_model)
    result, _ = settled_run(program, "auto")
    ran = result.lanes[0]
    per_s = ran.steady_per_s / batch
    if len(set(device_of)) > 1:
        use = _use(program)
    else:  # nothing moves, and nothing runs beside it
        busy = {d.name: d.utilisation / per_s * 1e9 for d in result.devices if d.name in device_of}
        use = Use(busy, 0.0, 0.0)
    return Prediction(per_s, statistics.median(ran.latencies_ns()) / 1e6, use)


def predict(unit: Unit, device_of: Sequence[str], depth: int, device_model: str = "serial") -> float:
    """Units per second of a closed loop; as `simulate`."""
    return simulate(unit, device_of, depth, device_model).per_s


def placed_sites(unit: Unit, device_of: Sequence[str]) -> dict[str, str]:
    """Site -> device. InputError if a site lies on two devices, or a kernel on one that was not profiled."""
    first = unit.traces[min(unit.traces)]
    if len(device_of) != len(first.kernels):
        raise InputError(f"{unit.model} {first.unit}: {len(first.kernels)} kernels, devices for {len(device_of)}")
    placed: dict[str, str] = {}
    for k, device in zip(first.kernels, device_of, strict=True):
        if device not in unit.traces:
            raise InputError(f"{unit.model} {first.unit}: not profiled on device {device}")
        if placed.setdefault(k.site, device) != device:
            raise InputError(f"{unit.model} {first.unit}: site {k.site} lies on two devices")
    return placed


def _use(program: Program) -> Use:
    """Use of devices per unit, from the timeline of a short run."""
    result = run(program, timeline=True, cohorts=_SEEN * program.lanes[0].depth)
    lane: LaneResult = result.lanes[0]
    kernels: dict[str, list[Span]] = {program.devices[s.device]: [] for s in program.lanes[0].streams}
    transfers: list[Span] = []
    for x in result.timeline or ():
        if x.kind == "kernel":
            kernels[program.devices[x.resource]].append((x.start_ns, x.end_ns))
        else:
            transfers.append((x.start_ns, x.arrival_ns))
    return used(kernels, transfers, lane.window_start_ns, lane.window_end_ns, lane.window)


def dram_share(unit: Unit, device_of: Sequence[str]) -> float:
    """Share of the DRAM's bandwidth that the plan's kernels ask for, weighted by their times alone."""
    asked, total = 0.0, 0.0
    places = np.array(device_of)
    for device, trace in unit.traces.items():
        ns = np.array([k.duration_ns for k in trace.kernels], dtype=np.float64)
        gpu = whole_gpu(trace)
        _, dram = kernel_demands(trace, ns, gpu, partition_sms(trace) or gpu.sms)
        here = places == device
        asked += float((ns * dram / ONE)[here].sum())
        total += float(ns[here].sum())
    return asked / max(total, 1.0)


def policy_plans(unit: Unit, depths: Sequence[int], names: Sequence[str] = POLICIES) -> dict[str, Plan]:
    """What policies make of the unit at its batch, by "policy-depth": from measured times and the measured hop."""
    if unit.hop is None:
        raise InputError("no hop was measured between the devices: python -m hw replay --links")
    mix, cluster, costs = bench(unit)
    batch = _batch(unit)
    found: dict[str, Plan] = {}
    for depth in depths:
        limits = Limits((batch,), (depth,), max_seqs=max(256, batch * depth))
        for name in names:
            ran = Case(mix, cluster, costs, limits).best(policies()[name]())
            if not isinstance(ran, NotApplicable):
                found[f"{name}-{depth}"] = ran.plan
    return found


def _batch(unit: Unit) -> int:
    value: Any = unit.traces[min(unit.traces)].meta.unit.get("batch", 1)
    return int(value)
