"""What kernels demand of a shared device when they run alone: multiprocessors (SMs) and DRAM bandwidth.

Both are shares in units of 2^-20 of the whole. SMs: blocks over the places that they take in whole waves: 96 blocks on
64 places need two waves, of which the second leaves half of its places to others, so 3/4. DRAM: bytes over duration
over the achievable bandwidth, at most 1; how many of the bytes stay in the L2 is not known, one constant
(`sharing.json`, dram_byte_share) stands for it. docs/semantics.md, "Shared devices", says what is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import Cluster, Device, GpuSpec
from tesserasim.costs.base import CostModel
from tesserasim.errors import InputError
from tesserasim.mixtimes import MixTimes, mix_times
from tesserasim.sim.sharing import ONE, load_sharing
from tesserasim.trace.mix import Mix
from tesserasim.trace.model import Kernel, Trace
from tesserasim.trace.profile import FloatArray, IntArray

WARP = 32
REGISTERS_PER_SM = 65536
REGISTER_UNIT = 256  # registers are allocated per warp in these steps
SHARED_PER_BLOCK = 1024  # what the driver keeps for itself of the shared memory of each block
#: Compute capability -> threads, blocks and KiB of shared memory per SM (CUDA programming guide, technical
#: specifications per compute capability). Others count as 9.0.
PER_SM = {
    "7.0": (2048, 32, 96), "7.5": (1024, 16, 64), "8.0": (2048, 32, 164), "8.6": (1536, 16, 100),
    "8.9": (1536, 24, 100), "9.0": (2048, 32, 228), "10.0": (2048, 32, 228), "12.0": (1536, 24, 100),
}  # fmt: skip


def resident_blocks(kernel: Kernel, gpu: GpuSpec) -> int:
    """Blocks of `kernel` that fit on one SM at a time, at least 1 (it ran, whatever the figures say)."""
    threads, blocks, shared_kib = PER_SM.get(gpu.compute_capability, PER_SM["9.0"])
    warps = max(1, -(-int(np.prod(kernel.block)) // WARP))
    per_warp = -(-kernel.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    limits = [blocks, threads // WARP // warps]
    if per_warp:
        limits.append(REGISTERS_PER_SM // (per_warp * warps))
    limits.append(shared_kib * 1024 // (kernel.shared_bytes + SHARED_PER_BLOCK))
    return max(1, min(limits))


def sm_demand(kernel: Kernel, gpu: GpuSpec, sms: int) -> int:
    """Share of the SM-time of a device with `sms` SMs, 1 to ONE, over the kernel's duration. Without a grid a memset or
    copy counts as one SM, anything else as the whole device."""
    blocks = int(np.prod(kernel.grid))
    if not blocks:
        return max(1, ONE // sms) if kernel.kind in ("memset", "copy") else ONE
    places = sms * resident_blocks(kernel, gpu)
    waves = -(-blocks // places)
    return max(1, round(ONE * blocks / (places * waves)))


def achievable_gbs(trace: Trace, gpu: GpuSpec) -> float:
    """DRAM bandwidth in GB/s: that of a large copy, measured beside the trace, if `gpu` has the same memory; else
    the catalogue's."""
    measured = trace.meta.extra.get("copy_gbs")
    try:
        own = find_gpu(trace.meta.gpu.partition("/")[0])  # "GPU/64sm" is a part of one
    except InputError:
        return gpu.dram_gbs
    usable = isinstance(measured, int | float) and measured > 0 and own.dram_gbs == gpu.dram_gbs
    return float(measured) if usable and measured is not None else gpu.dram_gbs


def kernel_demands(trace: Trace, ns: FloatArray, gpu: GpuSpec, sms: int) -> tuple[IntArray, IntArray]:
    """(SM demand, DRAM demand) of each kernel of a trace that takes `ns` [kernel] on a device of `sms` SMs."""
    sm = np.array([sm_demand(k, gpu, sms) for k in trace.kernels], dtype=np.int64)
    nbytes = np.array([k.read_bytes + k.write_bytes for k in trace.kernels], dtype=np.float64)
    share = nbytes * (load_sharing().dram_byte_share / ONE) / np.maximum(ns, 1.0) / achievable_gbs(trace, gpu)
    dram = np.floor(np.clip(share, 0.0, 1.0) * ONE + 0.5).astype(np.int64)
    return sm, dram


class Demands:
    """Demands of a mix's traces on the devices of a cluster, each made once."""

    def __init__(self, times: MixTimes) -> None:
        self.times = times
        self._known: dict[tuple[int, GpuSpec, int], tuple[IntArray, IntArray]] = {}

    def of(self, trace: Trace, device: Device) -> tuple[IntArray, IntArray]:
        key = (id(trace), device.gpu, device.sm_count)
        if key not in self._known:
            ns = self.times.times(trace, device.gpu).ns
            self._known[key] = kernel_demands(trace, ns, device.gpu, device.sm_count)
        return self._known[key]


@dataclass(frozen=True)
class ResourceLoad:
    """[site, device] ns per cohort, by resource: time * share of the device's SMs, time * share of its DRAM.

    Sites as in `Workload`. `domain_of` [device]: its DRAM.
    """

    batch: int
    sm_ns: FloatArray
    dram_ns: FloatArray
    domain_of: tuple[int, ...]


def resource_load(
    mix: Mix, cluster: Cluster, costs: CostModel, batch: int, allow_extrapolation: bool = False
) -> ResourceLoad:
    """What a cohort of `batch` requests asks of every device, site by site; the same nanoseconds as the workload."""
    times = mix_times(mix, costs)
    demands = Demands(times)
    names = [(unit, name) for unit, grid in times.grids.items() for name in grid.sites]
    index = {key: i for i, key in enumerate(names)}
    shape = (len(index), len(cluster.devices))
    sm_ns, dram_ns = np.zeros(shape), np.zeros(shape)
    for d, device in enumerate(cluster.devices):
        for run in times.cohort_runs(batch, device.gpu, allow_extrapolation):
            exact = run.integers()
            shaved = run.follows == np.arange(len(run.trace)) - 1
            total = (run.counts @ (exact.duration - exact.shave * shaved)).astype(np.float64)
            place = np.array([index[run.trace.unit, k.site] for k in run.trace.kernels], dtype=np.int64)
            for column, demand in zip((sm_ns, dram_ns), demands.of(run.trace, device), strict=True):
                np.add.at(column[:, d], place, total * demand / ONE)
    return ResourceLoad(batch, sm_ns, dram_ns, cluster.dram_of)
