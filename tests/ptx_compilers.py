"""PTX from the compilers that are installed: nvcc, Triton (which needs no GPU for it). None where one is missing."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def nvcc(source: Path) -> str | None:
    """The PTX of a CUDA source file."""
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.ptx"
        run = subprocess.run([found, "-ptx", "-arch=sm_90", "-o", str(out), str(source)], capture_output=True)
        return out.read_text() if run.returncode == 0 else None


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton(
    function: Any, types: list[str], constants: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> str:
    """The PTX of one Triton kernel for compute capability 9.0; `types` are those of the arguments that vary."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    given = iter(types)
    while not hasattr(function, "__name__"):
        function = function.fn  # under an autotuner
    names = function.arg_names
    signature = {n: "constexpr" if n in constants else next(given) for n in names}
    values = {(names.index(n),): v for n, v in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=values)
    return str(compile(source, target=GPUTarget("cuda", 90, 32), options=dict(options or {})).asm["ptx"])


R3 = ["*fp32", "*fp32", "*fp32", "i32"]
BLOCK = {"n_cols": 1000, "BLOCK_SIZE": 1024}
# Kernels of the installed package liger-kernel: module, kernel, truth by reading its source, types, constants.
PACKAGE: list[tuple[str, str, str, list[str], dict[str, Any]]] = [
    ("swiglu", "_swiglu_forward_kernel", "0=R 1=R 2=W", [*R3, "fp32"], BLOCK),
    ("swiglu", "_swiglu_backward_kernel", "0=R 1=RW 2=RW", [*R3, "fp32"], BLOCK),
    ("geglu", "_geglu_tanh_forward_kernel", "0=R 1=R 2=W", R3, BLOCK),
    ("geglu", "_geglu_tanh_backward_kernel", "0=R 1=RW 2=RW", R3, BLOCK),
    ("layer_norm", "_layer_norm_forward_kernel", "0=W 2=R 4=R 6=R 8=W 10=W", ["*fp32", "i32"] * 6 + ["i32", "fp32"],
     {"BLOCK_SIZE": 1024}),
    ("softmax", "_softmax_single_block_forward_kernel", "0=W 2=R", ["*fp32", "i32"] * 2 + ["i32"],
     {"BLOCK_SIZE": 1024}),
    ("softmax", "_softmax_single_block_backward_kernel", "0=R 2=R 4=W", ["*fp32", "i32"] * 3 + ["i32"],
     {"BLOCK_SIZE": 1024}),
    ("relu_squared", "_relu_squared_forward_kernel", "0=W 2=R", ["*fp32", "i32"] * 2, BLOCK),
    ("relu_squared", "_relu_squared_backward_kernel", "0=W 2=R 4=R", ["*fp32", "i32"] * 3, BLOCK),
    ("kl_div", "_kldiv_kernel_backward", "0=R 2=W", ["*fp32", "i32"] * 2 + ["i32"],
     {"BLOCK_SIZE": 1024, "log_target": False}),
    ("dyt", "_dyt_fwd_kernel", "0=R 1=W 2=R 3=R 4=R", ["*fp32"] * 5, {"HAVE_BETA": True, "N": 1000, "BLOCK_N": 1024}),
]  # fmt: skip


def package() -> list[tuple[str, str, str]]:
    """(kernel, truth, PTX) of the kernels of the installed package; empty without it."""
    if not has_triton() or importlib.util.find_spec("liger_kernel") is None:
        return []
    made = []
    for module, name, truth, types, constants in PACKAGE:
        function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
        made.append((name, truth, triton(function, types, constants)))
    return made
