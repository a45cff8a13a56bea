"""Parts of one GPU as devices: green contexts, each with multiprocessors of its own.

DRAM, L2 and the copy engines stay shared. What a partition runs must be captured on a stream of its own: a kernel
node remembers the context that it was captured in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import driver as cuda

from hw.capture.driver import call
from hw.errors import HardwareError

#: Hopper deals multiprocessors out in eights.
GRANULE = 8


@dataclass(frozen=True)
class Partition:
    """Multiprocessors of one GPU. `context` is None for the whole GPU."""

    name: str
    sms: int
    device: int = 0
    context: Any = None
    primary: Any = None  # the GPU's own context; None where there is one GPU, whose context is current in any case

    @property
    def driver_context(self) -> Any:
        """The context of its kernels as the driver API wants it; None for the whole of the only GPU."""
        if self.context is None:
            return self.primary
        return call(cuda.cuCtxFromGreenCtx(self.context), "cuCtxFromGreenCtx")

    def stream(self, priority: int = 0) -> torch.cuda.Stream:
        """A new stream on which kernels use these multiprocessors alone."""
        if self.context is None:
            return torch.cuda.Stream(self.device, priority=priority)
        flags = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        handle = call(cuda.cuGreenCtxStreamCreate(self.context, flags, priority), "cuGreenCtxStreamCreate")
        return torch.cuda.ExternalStream(int(handle), device=self.device)


def primary(device: int) -> Any:
    """The context of a GPU that its memory and whole-GPU kernels belong to; None if there is one GPU."""
    if torch.cuda.device_count() < 2:
        return None
    torch.zeros(1, device=f"cuda:{device}")
    handle = call(cuda.cuDeviceGet(device), "cuDeviceGet")
    return call(cuda.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")


def whole(device: int = 0, name: str = "gpu0") -> Partition:
    """The whole GPU as one device."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Partition(name, sms, device, primary=primary(device))


def connect(devices: Sequence[int]) -> None:
    """Let every GPU read the memory of the others. HardwareError if one cannot."""
    for a in devices:
        for b in devices:
            if a == b:
                continue
            if not torch.cuda.can_device_access_peer(a, b):
                raise HardwareError(f"GPU {a} cannot read the memory of GPU {b}: plans over both cannot be replayed")
            torch.ones(1, device=f"cuda:{a}").to(f"cuda:{b}")  # PyTorch opens the way at the first copy
    for a in devices:
        torch.cuda.synchronize(a)


def split(
    sms: Sequence[int], device: int = 0, names: Sequence[str] = ("a", "b", "c", "d"), rest: bool = True
) -> list[Partition]:
    """Disjoint partitions with about `sms` multiprocessors each: rounded up to eights; with `rest` the last takes what
    is left.

    HardwareError if the GPU has fewer, or its driver knows no green contexts.
    """
    torch.cuda.init()
    torch.zeros(1, device=f"cuda:{device}")  # the primary context, which green contexts belong to
    handle = call(cuda.cuDeviceGet(device), "cuDeviceGet")
    kind = cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    left = call(cuda.cuDeviceGetDevResource(handle, kind), "cuDeviceGetDevResource")
    parts: list[Partition] = []
    for i, (name, count) in enumerate(zip(names, sms, strict=False)):
        available = int(left.sm.smCount)
        if available < min(count, GRANULE):
            raise HardwareError(f"partition {name}: {count} multiprocessors wanted, {available} left")
        piece = left
        want = -(-count // GRANULE) * GRANULE
        if i + 1 < len(sms) or (not rest and available > want):
            result = cuda.cuDevSmResourceSplitByCount(1, left, 0, want)
            groups, number, left = call(result, "cuDevSmResourceSplitByCount")
            if not number:
                raise HardwareError(f"partition {name}: {want} multiprocessors wanted, {available} left")
            piece = groups[0]
        made = call(cuda.cuDevResourceGenerateDesc([piece], 1), "cuDevResourceGenerateDesc")
        flags = int(cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        context = call(cuda.cuGreenCtxCreate(made, handle, flags), "cuGreenCtxCreate")
        parts.append(Partition(name, int(piece.sm.smCount), device, context, primary(device)))
    return parts
