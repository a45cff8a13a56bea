"""Energy of a GPU from its own counter. Unknown stays unknown: None, never 0."""

from __future__ import annotations

from typing import Any


class EnergyMeter:
    """Joules between two reads of NVML's total energy counter. The counter moves every 20 to 100 ms."""

    def __init__(self, device: int = 0) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(device)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            self._nvml = pynvml
        except Exception:  # no NVML, a MIG slice, or a GPU without the counter
            self._nvml = None

    def millijoules(self) -> int | None:
        """The counter, or None where there is none."""
        if self._nvml is None:
            return None
        try:
            value = int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except Exception:
            return None
        return value if value > 0 else None


def joules(before: int | None, after: int | None) -> float | None:
    """Energy between two reads of the counter; None if either is unknown or the counter did not move."""
    if before is None or after is None or after <= before:
        return None
    return (after - before) / 1000
