"""Triton body of `linear.linear`: imported only where it runs.

A program multiplies a few rows of weights with the only row of `x` over all of K, so that nothing has to be summed
afterwards; a thread asks for all its weights before it uses the first.
"""
# mypy: disable-error-code="no-untyped-def, no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Tile:
    """Shape of one launch: outputs of a program, depth of its loads, warps."""

    columns: int
    depth: int
    warps: int


@triton.jit
def linear_row(x, weight, bias, out, n, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    inside = column < n
    w = weight + column[:, None] * K + depth[None, :]
    acc = tl.zeros((BN, BK), tl.float32)
    for start in tl.static_range(0, K, BK):
        within = depth + start < K
        v = tl.load(x + start + depth, mask=within, other=0.0).to(tl.float32)
        u = tl.load(w + start, mask=inside[:, None] & within[None, :], other=0.0).to(tl.float32)
        acc += u * v[None, :]
    y = tl.sum(acc, axis=1) + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + column, y.to(x.dtype.element_ty), mask=inside)


#: The fastest of `experiments/bench/moe_kernels.py` on an H200.
CHOSEN = Tile(1, 4096, 4)


def one_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tile: Tile | None = None) -> torch.Tensor:
    x = x.contiguous()
    (n, k), t = weight.shape, tile or CHOSEN
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    columns = min(t.columns, max(1, triton.next_power_of_2(n // 32)))
    linear_row[(triton.cdiv(n, columns),)](
        x, weight, bias, out, n, K=k, BN=columns, BK=min(t.depth, triton.next_power_of_2(k)), num_warps=t.warps
    )  # fmt: skip
    return out
