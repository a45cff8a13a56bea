"""Tiny clusters, costs and hand-made traces for the tests of flows, workloads and programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tesserasim.cluster.model import Cluster, Device, GpuSpec, Link
from tesserasim.costs.base import KernelTimes
from tesserasim.plans import Lane, Plan
from tesserasim.trace.mix import Mix
from tesserasim.trace.model import Access, Buffer, Kernel, Trace, TraceMeta


def small_gpu(name: str, memory_bytes: int = 80 * 10**9) -> GpuSpec:
    """A GPU of round numbers."""
    return GpuSpec(name, (), "test", "9.0", 100, 1500, 500.0, None, memory_bytes, 2000.0, 50_000_000, 400.0)


def small_cluster(n: int, gbps: float = 100.0, latency_us: float = 5.0) -> Cluster:
    """`n` devices g0, g1, ... of as many GPU types, all linked."""
    names = [f"g{i}" for i in range(n)]
    links = tuple(Link(a, b, gbps, latency_us) for i, a in enumerate(names) for b in names[i + 1 :])
    return Cluster("small", tuple(Device(x, small_gpu(x)) for x in names), links)


@dataclass(frozen=True)
class ScaledCosts:
    """Captured times on g0; every further GPU is half again as slow as the one before it."""

    name: str = "scaled"
    version: str = "test"

    def kernel_ns(self, trace: Trace, gpu: GpuSpec) -> KernelTimes:
        ns = np.array([k.duration_ns for k in trace.kernels], dtype=np.float64) * 1.5 ** int(gpu.name[1:])
        n = len(ns)
        return KernelTimes(ns, "test", np.full(n, 0.1), np.linspace(0.0, 0.2, n))


def handmade(
    kernels: Sequence[tuple[str, Sequence[Access]]], buffers: Sequence[Buffer], name: str = "step",
    durations: Sequence[int] | None = None, gaps: Sequence[int] | None = None, batch: int = 1, **meta: Any,
) -> Trace:  # fmt: skip
    """A trace from (site, accesses) per kernel; 1000 ns each and no gaps unless given."""
    n = len(kernels)
    built = tuple(
        Kernel(i, f"k{i}", site, duration_ns=(durations or [1000] * n)[i], gap_ns=(gaps or [0] * n)[i],
               accesses=tuple(accesses))
        for i, (site, accesses) in enumerate(kernels)
    )  # fmt: skip
    unit = {"name": name, "phase": "other", "batch": batch, "tokens": 1, "context": 0}
    trace = Trace(TraceMeta("synthetic", "handmade", unit, "g0", **meta), built, tuple(buffers))
    trace.validate()
    return trace


def image_like(*units: Trace, launches: int = 2) -> Mix:
    """A mix that runs each unit `launches` times, one after the other."""
    mix = Mix("handmade", "handmade", "image", {t.unit: (t,) for t in units},
              stages=tuple((t.unit, launches) for t in units))  # fmt: skip
    mix.validate()
    return mix


SIZE = 12


@st.composite
def unit_traces(
    draw: st.DrawFn, roles: tuple[str, ...] = ("activation", "workspace", "weight", "state"), name: str = "step",
    batch: int = 1,
) -> Trace:  # fmt: skip
    """Small units with any accesses: partial, unproven, of unknown extent, several on one buffer.

    Buffers of equal role and number share a name in all units, so carried ones connect them.
    """
    kinds = [draw(st.sampled_from(roles)) for _ in range(draw(st.integers(1, 4)))]
    buffers = [Buffer(i, f"{role}{i}", SIZE, role) for i, role in enumerate(kinds)]
    kernels = []
    for i in range(draw(st.integers(1, 8))):
        accesses = []
        for _ in range(draw(st.integers(1, 3))):
            start = draw(st.integers(0, SIZE - 1))
            extent = draw(st.sampled_from(["exact", "superset", "unknown"]))
            mode = draw(st.sampled_from(["R", "W", "RW"]))
            covers = mode != "R" and extent == "exact" and draw(st.booleans())
            nbytes = draw(st.integers(0, SIZE - start))
            if covers and draw(st.booleans()):
                start, nbytes = 0, SIZE
            b = draw(st.integers(0, len(buffers) - 1))
            accesses.append(Access(b, mode, start, nbytes, extent, covers, "schema"))
        kernels.append((f"s{draw(st.integers(0, i))}", accesses))
    n = len(kernels)
    durations = [draw(st.integers(0, 50)) for _ in range(n)]
    gaps = [draw(st.integers(-60, 60)) for _ in range(n)]
    return handmade(kernels, buffers, name, durations, gaps, batch, launch={"empty_graph_ns": 7, "per_node_ns": 0.6})


@st.composite
def small_mixes(draw: st.DrawFn) -> tuple[Mix, int]:
    """(mix, batch): image-like chains of launches, or prefills of single sequences before decode steps."""
    roles = ("activation", "workspace", "state", "output", "weight")
    if draw(st.booleans()):
        units = [draw(unit_traces(roles, name)) for name in ("first", "second")[: draw(st.integers(1, 2))]]
        return image_like(*units, launches=draw(st.integers(1, 3))), 1
    batch = draw(st.integers(1, 3))
    traces = {"prefill": (draw(unit_traces(roles, "prefill")),)}
    traces["decode"] = (draw(unit_traces(roles, "decode", batch)),)
    mix = Mix("handmade", "handmade", "llm", traces, input_tokens=4, output_tokens=draw(st.integers(1, 4)))
    mix.validate()
    return mix, batch


def random_plan(draw: st.DrawFn, mix: Mix, batch: int, devices: Sequence[str], depth: int = 1) -> Plan:
    """Any placement that respects groups (there are none in `unit_traces`)."""
    placed = {unit: {site: draw(st.sampled_from(devices)) for site in mix.traces[unit][0].sites} for unit in mix.units}
    return Plan(mix.name, "small", "random", (Lane("only", batch, depth, placed),))
