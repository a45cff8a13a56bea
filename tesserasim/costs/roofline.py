"""First cost model: the captured time of a site times the ratio of two rooflines.

    time(target) = time(captured) * roofline(target) / roofline(captured GPU)
    roofline     = max(FLOPs / tensor rate, bytes / bandwidth, floor)

What a roofline does not know (tile shapes, occupancy, how close a library comes to the peak) is in the captured
time and cancels as far as both GPUs suffer alike. What does not cancel is the model's error; it was measured
(`data/roofline_errors.json`, made by experiments/validation/costs_roofline.py) and travels with every time.

Bandwidth
    Weights and state are larger than any cache and come from DRAM once per launch: *cold* bytes. Activations
    were written just before: *warm* bytes, which move at L2 speed where they fit into `L2_USABLE` of the L2.
Floor
    A kernel takes microseconds however little it does: no bandwidth scales that part. A site's floor is never
    above its captured time, so a site captured at its floor keeps its time until the target's work exceeds it.
Sites
    The ratio is taken per site and applied to the site's kernels: another GPU splits the same operation into
    other kernels.

Not modelled, and therefore in the error: power limits of large GEMMs, other kernels on other architectures,
occupancy of small grids.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import GpuSpec
from tesserasim.costs.errors import RooflineErrors, load_errors
from tesserasim.costs.times import FloatArray, KernelTimes, captured_sigma, captured_times
from tesserasim.trace.model import Kernel, Trace

#: Least time of one kernel, ns. Public kernel tables of six GPU types (NVIDIA aiconfigurator) flatten out at
#: 2-3 us for GEMM and elementwise kernels and at 6-14 us for attention (its geometric mean is used).
FLOOR_NS = 2_500.0
FLOOR_NS_OF = {"attention_decode": 9_000.0, "attention_prefill": 9_000.0}
#: Share of the L2 that a working set may take and still run at L2 speed. Measured knees (te42kyfo/gpu-benches
#: gpu-l2-cache): A100 28 of 40 MB, H100 PCIe 36 of 50, H200 44 of 50, L40 92 of 96: the least is used.
L2_USABLE = 0.7
#: Kinds whose bytes are mostly weights or state, for kernels that come without accesses.
COLD_KINDS = frozenset({"gemm", "moe", "conv", "attention_decode", "ssm_scan"})
COLD_ROLES = frozenset({"weight", "state"})


@dataclass(frozen=True)
class Work:
    """What sites ask of a GPU, one entry per site."""

    flops: FloatArray  # at 16-bit tensor rate
    fp8_flops: FloatArray  # at 8-bit tensor rate, where the GPU has one
    cold: FloatArray  # bytes that come from DRAM
    warm: FloatArray  # bytes that the L2 may hold
    warm_set: FloatArray  # bytes that must fit into the L2 for that
    floor_ns: FloatArray


def work_ns(work: Work, gpu: GpuSpec) -> FloatArray:
    """Roofline without the floor: the larger of compute and memory time, ns. Never rises with a better GPU."""
    rate = gpu.bf16_tflops * 1e3  # FLOP per ns
    fp8_rate = (gpu.fp8_tflops or gpu.bf16_tflops) * 1e3
    compute = work.flops / rate + work.fp8_flops / fp8_rate
    dram = gpu.dram_gbs  # GB/s = bytes per ns
    l2 = max(gpu.l2_gbs or dram, dram)
    fits = work.warm_set <= L2_USABLE * gpu.l2_bytes
    memory = work.cold / dram + work.warm / np.where(fits, l2, dram)
    return np.maximum(compute, memory)


def ratio(work: Work, captured_ns: FloatArray, captured: GpuSpec, target: GpuSpec) -> FloatArray:
    """Time on `target` over time on `captured`, per site.

    A site of unknown size (no FLOPs, no bytes) is taken to be limited by DRAM beyond its floor.
    """
    floor = np.minimum(work.floor_ns, captured_ns)
    before = np.maximum(work_ns(work, captured), floor)
    after = np.maximum(work_ns(work, target), floor)
    known = before > 0
    result = np.ones_like(before)
    np.divide(after, before, out=result, where=known)
    unknown = unknown_size(work) & (captured_ns > 0)
    slower = captured.dram_gbs / target.dram_gbs
    scaled = floor + (captured_ns - floor) * slower
    np.divide(scaled, captured_ns, out=result, where=unknown)
    return result


def limits(work: Work, captured_ns: FloatArray, gpu: GpuSpec) -> NDArray[np.str_]:
    """What limits each site on `gpu`: "floor", "memory" or "compute"."""
    no_bytes = replace(work, cold=np.zeros_like(work.cold), warm=np.zeros_like(work.warm))
    total, compute = work_ns(work, gpu), work_ns(no_bytes, gpu)
    by_work = np.where(compute >= total, "compute", "memory")
    return np.where(total < np.minimum(work.floor_ns, captured_ns), "floor", by_work)


def unknown_size(work: Work) -> NDArray[np.bool_]:
    """Sites with neither FLOPs nor bytes."""
    return (work.flops + work.fp8_flops + work.cold + work.warm) <= 0


def kernel_floor_ns(kind: str) -> float:
    return FLOOR_NS_OF.get(kind, FLOOR_NS)


def _cold_bytes(trace: Trace, k: Kernel) -> int:
    """Bytes of weights and state that the kernel touches, at most all its bytes (accesses may be upper limits)."""
    total = k.read_bytes + k.write_bytes
    if not k.accesses:
        return total if k.kind in COLD_KINDS else 0
    roles = trace.buffers
    return min(total, sum(a.nbytes for a in k.accesses if roles[a.buffer].role in COLD_ROLES))


def trace_work(trace: Trace) -> Work:
    """The work of every site of a trace: sums over its kernels; the working set is that of its largest kernel.

    The floor of a site is that of its slowest kernel's kind, and one plain floor for every further kernel.
    """
    site = np.array(trace.site_of, dtype=np.intp)
    n = len(trace.sites)
    fp8 = np.array(["8" in k.act_dtype for k in trace.kernels], dtype=bool)
    flops = np.array([k.flops for k in trace.kernels], dtype=np.float64)
    total = np.array([k.read_bytes + k.write_bytes for k in trace.kernels], dtype=np.float64)
    cold = np.array([_cold_bytes(trace, k) for k in trace.kernels], dtype=np.float64)
    floors = np.array([kernel_floor_ns(k.kind) for k in trace.kernels], dtype=np.float64)

    def per_site(x: FloatArray) -> FloatArray:
        return np.bincount(site, weights=x, minlength=n).astype(np.float64)

    largest, floor = np.zeros(n), np.zeros(n)
    np.maximum.at(largest, site, total - cold)
    np.maximum.at(floor, site, floors)
    floor += FLOOR_NS * (np.bincount(site, minlength=n) - 1)
    return Work(
        per_site(np.where(fp8, 0.0, flops)),
        per_site(np.where(fp8, flops, 0.0)),
        per_site(cold),
        per_site(total - cold),
        largest,
        floor,
    )


class RooflineRatio:
    """`CostModel` by roofline ratio; stateless but for the table of its measured errors."""

    name = "roofline-ratio"

    def __init__(self, errors: RooflineErrors | None = None) -> None:
        self.errors = errors or load_errors()

    @cached_property
    def version(self) -> str:
        """Hash over the model's constants and its error table; the GPUs' figures are in the cluster's hash."""
        content = [self.name, 1, FLOOR_NS, FLOOR_NS_OF, L2_USABLE, sorted(COLD_KINDS), self.errors.sigmas()]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def kernel_ns(self, trace: Trace, gpu: GpuSpec) -> KernelTimes:
        """Times of `trace` on `gpu`; its own durations if it was captured there.

        Raises InputError if the GPU the trace was captured on is not in the catalogue.
        """
        captured = find_gpu(trace.meta.gpu)
        own = captured_times(trace)
        if captured.name == gpu.name or not trace.kernels:
            return own
        work = trace_work(trace)
        site = np.array(trace.site_of, dtype=np.intp)
        site_ns = np.bincount(site, weights=own.ns, minlength=len(trace.sites)).astype(np.float64)
        factor = ratio(work, site_ns, captured, gpu)
        systematic = np.array([self.errors.systematic(k.kind) for k in trace.kernels])
        residual = np.array([self.errors.site(k.kind) for k in trace.kernels])
        # A site of unknown size may be limited by anything: half the distance between scaling with bandwidth
        # and not scaling at all joins its systematic error.
        doubt = 0.5 * abs(np.log(captured.dram_gbs / gpu.dram_gbs)) * unknown_size(work)[site]
        return KernelTimes(
            own.ns * factor[site],
            self.name,
            np.hypot(systematic, doubt),
            np.hypot(residual, captured_sigma(trace)),
        )
