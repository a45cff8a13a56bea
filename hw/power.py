"""Energy of a GPU from its own counter. Unknown stays unknown: None, never 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class EnergyMeter:
    """Joules between two reads of NVML's total energy counters. A counter moves every 20 to 100 ms. Devices are
    numbered as PyTorch numbers them, whatever CUDA_VISIBLE_DEVICES leaves out."""

    def __init__(self, devices: Sequence[int] = (0,)) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            for device in devices:
                handle = _handle(pynvml, device)
                pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
                self._handles.append(handle)
            self._nvml = pynvml
        except Exception:  # no NVML, a MIG slice, or a GPU without the counter
            self._nvml = None

    def millijoules(self) -> int | None:
        """The sum of the counters, or None where one is missing."""
        if self._nvml is None:
            return None
        try:
            values = [int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(h)) for h in self._handles]
        except Exception:
            return None
        return sum(values) if min(values, default=0) > 0 else None


def _handle(nvml: Any, device: int) -> Any:
    """NVML's handle of a GPU of PyTorch, found by what both know it by."""
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def joules(before: int | None, after: int | None) -> float | None:
    """Energy between two reads of the counter; None if either is unknown or the counter did not move."""
    if before is None or after is None or after <= before:
        return None
    return (after - before) / 1000
