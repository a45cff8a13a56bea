"""Models on one page each, at their full published size, written the way serving engines run them."""

from __future__ import annotations

from hw.errors import HardwareError
from hw.workloads.base import NamedTensor, UnitSpec, Workload

__all__ = ["NamedTensor", "UnitSpec", "Workload", "load_workload", "workload_names"]


def workload_names() -> tuple[str, ...]:
    """Names that `capture --model` takes."""
    return ("llama-3-8b", "sd3.5-medium")


def load_workload(name: str, device: str = "cuda") -> Workload:
    """Build a workload by name; weights are random, sizes are the published ones."""
    if name == "llama-3-8b":
        from hw.workloads.llama import Llama

        return Llama(device=device)
    if name == "sd3.5-medium":
        from hw.workloads.sd3 import StableDiffusion3

        return StableDiffusion3(device=device)
    raise HardwareError(f"unknown model {name!r}; known: {', '.join(workload_names())}")
