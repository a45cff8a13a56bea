"""Models on one page each, at their full published size, written the way serving engines run them."""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from pathlib import Path
from typing import Any

from hw.errors import HardwareError
from hw.workloads.base import NamedTensor, UnitSpec, Workload

__all__ = ["NamedTensor", "UnitSpec", "Workload", "check_workload", "load_workload", "workload_names"]

#: Name -> module and class or factory; a module is imported when its model is built.
_KNOWN = {
    "llama-3-8b": "hw.workloads.llama:Llama",
    "sd3.5-medium": "hw.workloads.sd3:StableDiffusion3",
    "mamba-codestral-7b": "hw.workloads.mamba2:Mamba2",
    "qwen2.5-vl-7b": "hw.workloads.qwen_vl:QwenVL",
    "gpt-oss-20b": "hw.workloads.gpt_oss:GptOss",
    "gpt-oss-20b-zipf": "hw.workloads.gpt_oss:zipf",
    "gpt-oss-20b-bf16": "hw.workloads.gpt_oss:bf16",
    "sd3.5-encoders": "hw.workloads.sd3_encoders:Sd3Encoders",
}


def workload_names() -> tuple[str, ...]:
    """Names that `capture --model` takes, besides `file.py:factory`."""
    return tuple(_KNOWN)


def check_workload(name: str) -> None:
    """HardwareError if `name` is neither a known model nor `file.py:factory` with a file that exists."""
    if name in _KNOWN:
        return
    path, colon, factory = name.rpartition(":")
    if not colon or not path.endswith(".py") or not factory.isidentifier():
        known = ", ".join(_KNOWN)
        raise HardwareError(f"unknown model {name!r}; known: {known}; or file.py:factory for one of your own")
    if not Path(path).is_file():
        raise HardwareError(f"--model {name}: no file {path}")


def load_workload(name: str, device: str = "cuda") -> Workload:
    """Build a workload by name; weights are random, sizes are the published ones.

    `file.py:factory` runs the file and calls `factory(device=...)`, which returns a `Workload`; its `name` is
    the folder of its traces.
    """
    check_workload(name)
    if name in _KNOWN:
        module, factory = _KNOWN[name].split(":")
        return _build(importlib.import_module(module), factory, name, device)
    path, factory = name.rsplit(":", 1)
    spec = importlib.util.spec_from_file_location(f"user_workload_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise HardwareError(f"--model {name}: cannot import {path}")
    module_of_user = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module_of_user)
        return _build(module_of_user, factory, name, device)
    except HardwareError:
        raise
    except (Exception, SystemExit) as error:  # the user's code: its line says more than ours
        raise HardwareError(f"--model {name}: {_place(error, path)}{type(error).__name__}: {error}") from error


def _place(error: BaseException, path: str) -> str:
    """`file:line: ` of the last line of `path` on the way to `error`; "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path}:{error.lineno}: "
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}:{lines[-1]}: " if lines else ""


def _build(module: Any, factory: str, name: str, device: str) -> Workload:
    make = getattr(module, factory, None)
    if not callable(make):
        raise HardwareError(f"--model {name}: {module.__file__} has no function or class {factory!r}")
    workload = make(device=device)
    if not isinstance(workload, Workload):
        raise HardwareError(f"--model {name}: {factory} returned {type(workload).__name__}, not a Workload")
    return workload
