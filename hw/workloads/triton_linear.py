"""Triton bodies of `linear.linear_few`: imported only where they run.

Few rows or few outputs leave a GPU waiting for memory: what counts is how much is asked for at once. For one row a
program takes a few rows of weights over all of K, and a thread asks for all its weights before it uses the first. For
more rows each warp of a program takes a part of K of one small tile, and the parts are summed at the end.
"""
# mypy: disable-error-code="no-untyped-def, no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Tile:
    """Shape of one launch: outputs of a program, depth of its loads, warps, and what rows add to it."""

    columns: int
    depth: int
    warps: int
    stages: int = 3


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


@triton.jit
def product(
    x, weight, row, live, column, inside, K: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Rows `row` [BM] of x times rows `column` [BN] of weights, both of K: [BM, BN] in float32, in S parts."""
    part, depth = tl.arange(0, S), tl.arange(0, BK)
    at = part[:, None, None] * BK + depth[None, None, :]
    a = x + row.to(tl.int64)[None, :, None] * K + at
    w = weight + column[None, :, None] * K + at
    acc = tl.zeros((S, BM, BN), tl.float32)
    for start in range(0, K, S * BK):
        within = at + start < K
        u = tl.load(a + start, mask=live[None, :, None] & within, other=0.0)
        v = tl.load(w + start, mask=inside[None, :, None] & within, other=0.0)
        acc = tl.dot(u, tl.permute(v, (0, 2, 1)), acc)
    return tl.sum(acc, axis=0)


@triton.jit
def linear_rows(
    x, weight, bias, out, rows, n, K: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    live, inside = row < rows, column < n
    y = product(x, weight, row, live, column, inside, K, S, BM, BN, BK)
    y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(to, y.to(x.dtype.element_ty), mask=live[:, None] & inside[None, :])


#: The fastest of `experiments/bench/moe_kernels.py` on an H200: of one row, of more.
ONE, MORE = Tile(1, 4096, 4), Tile(16, 128, 4)


def few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tile: Tile | None = None) -> torch.Tensor:
    x = x.contiguous()
    (n, k), rows = weight.shape, x.numel() // x.shape[-1]
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    if rows == 1:
        t = tile or ONE
        columns = min(t.columns, max(1, triton.next_power_of_2(n // 32)))
        linear_row[(triton.cdiv(n, columns),)](
            x, weight, bias, out, n, K=k, BN=columns, BK=min(t.depth, triton.next_power_of_2(k)), num_warps=t.warps
        )  # fmt: skip
        return out
    t = tile or MORE
    linear_rows[(triton.cdiv(n, t.columns), triton.cdiv(rows, 16))](
        x, weight, bias, out, rows, n, K=k, S=t.warps, BM=16, BN=t.columns, BK=t.depth, num_warps=t.warps,
        num_stages=t.stages,
    )  # fmt: skip
    return out
