"""What kernels of closed libraries do beyond the schema of the operator that launches them.

Schemas say nothing of workspaces, and nothing of which kernel of a call does what. Every row names a family of
kernels by a part of its function name and says how it uses memory that no argument of the call explains. What a
row does not say stays as the schema has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class LibraryKernel:
    """One family of kernels. Modes are `R`, `W` or `RW`."""

    family: str
    pattern: str  # searched in the function name, mangled or not
    workspace: str = "RW"  # what it does with memory that no argument explains
    result: str = "W"  # what it does with a result of the call that an earlier kernel has begun
    hidden: bool = False  # it reaches the call's tensors through pointers in memory, not in its parameters
    followed: str = ""  # the row holds only if a later kernel of the call matches this
    preceded: str = ""  # and only if an earlier kernel or set of the call matches this


#: First match wins. `memset` stands for a set among the nodes of a call.
KERNELS = (
    # With a bias it was seen to write partial sums back to its workspace (H200, cuBLAS 13).
    LibraryKernel("split-K reduce", r"splitKreduce|splitk_reduce", workspace="RW", result="RW"),
    LibraryKernel("split-K GEMM", r"nvjet|gemm|gemv|xmma", workspace="W", result="RW", followed=r"splitKreduce"),
    LibraryKernel("flash attention combine", r"flash_fwd_splitkv_combine", workspace="R", result="RW"),
    LibraryKernel(
        "flash attention split", r"flash_fwd_splitkv", workspace="W", result="RW", followed=r"splitkv_combine"
    ),
    LibraryKernel("flash attention", r"flash_fwd", workspace="RW", result="RW"),
    # Its blocks meet at a semaphore in the workspace that the set before it has cleared.
    LibraryKernel("cuDNN attention", r"cudnn.*(sdpa|fprop|attention)|cudnn_generated_fort_native_sdpa"),
    LibraryKernel("memory-efficient attention", r"fmha_cutlassF"),
    LibraryKernel("grouped GEMM preparation", r"prepare_grouped_gemm_data", workspace="W", result="none"),
    LibraryKernel(
        "grouped GEMM", r"cutlass.*device_kernel", workspace="R", hidden=True, preceded=r"prepare_grouped_gemm_data"
    ),
    LibraryKernel("cub initialisation", r"DeviceScanInitKernel|DeviceCompactInitKernel", workspace="W", result="RW"),
    LibraryKernel("cub", r"\bcub\b|3cub|DeviceScan|DeviceRadixSort|DeviceReduce|DeviceSegmented", result="RW"),
)  # fmt: skip


def library_kernel(names: list[str], at: int) -> LibraryKernel | None:
    """The row of the kernel `names[at]`, given the function names of all nodes of its call; None without one.

    A set among the nodes is named "memset", a copy "memcpy".
    """
    for row in KERNELS:
        if not re.search(row.pattern, names[at]):
            continue
        if row.followed and not any(re.search(row.followed, n) for n in names[at + 1 :]):
            continue
        if row.preceded and not any(re.search(row.preceded, n) for n in names[:at]):
            continue
        return row
    return None
