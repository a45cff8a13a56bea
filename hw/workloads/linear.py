"""A linear layer of few rows, where a library splits the sum over two kernels: plain PyTorch on the CPU, Triton on the
GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

#: Most rows of a layer of few outputs, and of any.
ROUTER_ROWS, FEW_ROWS = 1024, 1


@torch.library.custom_op("tesserasim::addmm", mutates_args=(), device_types="cpu")
def linear_few(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N]; sums in float32."""
    return F.linear(x, weight, bias)


@linear_few.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@linear_few.register_kernel("cuda")
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    from hw.workloads.triton_linear import few_rows

    return few_rows(x, weight, bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`F.linear`, by the operator above where that is faster."""
    few = x.numel() // x.shape[-1] <= (ROUTER_ROWS if len(weight) <= 64 else FEW_ROWS)
    return linear_few(x, weight, bias) if few else F.linear(x, weight, bias)
