"""What the GPU is, as the table's sidecar says it: names, figures, versions, clocks."""

from __future__ import annotations

import datetime
import re
from typing import Any

import torch

from hw.errors import HardwareError
from tesserasim.cluster.catalogue import find_gpu
from tesserasim.errors import InputError


def gpu_name(device: str) -> tuple[str, bool]:
    """(canonical name, True), or the driver's own name and False for a GPU that the catalogue does not know."""
    try:
        return find_gpu(device).name, True
    except InputError:
        return device, False


def file_stem(gpu: str) -> str:
    """The name as part of a file's."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", gpu).strip("-.") or "gpu"


def describe() -> dict[str, Any]:
    """Figures of GPU 0. HardwareError without one."""
    if not torch.cuda.is_available():
        raise HardwareError("no CUDA device: a calibration runs on the GPU that it is about")
    p = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "capability": f"{p.major}.{p.minor}", "sms": p.multi_processor_count,
        "memory_bytes": p.total_memory, "l2_bytes": p.L2_cache_size,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **clocks(str(p.uuid)),
    }  # fmt: skip
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    return found


def clocks(uuid: str) -> dict[str, Any]:
    """Driver, clocks in MHz, power limit in W and temperature of a GPU; None for what NVML does not say."""
    names = ("driver", "max_sm_mhz", "sm_mhz", "memory_mhz", "power_limit_w", "temperature_c")
    found: dict[str, Any] = dict.fromkeys(names)
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except Exception:  # no NVML, or a slice that it does not name
        return found
    ask = {
        "driver": nvml.nvmlSystemGetDriverVersion,
        "max_sm_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    }
    for name, read in ask.items():
        try:
            found[name] = read()
        except Exception:
            found[name] = None
    return found
