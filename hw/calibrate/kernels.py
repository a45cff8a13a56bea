"""Triton kernels of the elementwise operations: imported only where they run.

One launch an operation, as a compiler fuses them in a model. Rows are of `k` elements, without gaps.
"""
# mypy: disable-error-code="no-untyped-def, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
EPSILON = 1e-5


@triton.jit
def _scale(x, out, scale, count, INTEGER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(scale)
    if INTEGER:
        v = tl.floor(tl.clamp(v, -127.0, 127.0) + 0.5)
    tl.store(out + at, v.to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _rmsnorm(x, weight, out, k, EPSILON: tl.constexpr, WIDE: tl.constexpr):
    column = tl.arange(0, WIDE)
    inside = column < k
    row = tl.program_id(0).to(tl.int64) * k
    v = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    y = v * tl.rsqrt(tl.sum(v * v, axis=0) / k + EPSILON) * w
    tl.store(out + row + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(x, out, k, BLOCK: tl.constexpr):
    """x [m, 2 k]: the gate, then what it multiplies."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < k
    gate = tl.load(x + row * 2 * k + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * k + k + column, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + row * k + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    w = tl.load(y + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, (v + w).to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _rope(x, cos, sin, out, k, HALF: tl.constexpr, HEADS: tl.constexpr):
    """HEADS heads of 2 HALF elements a program; cos and sin [m, HALF] in float32."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, HALF)
    inside = (head * 2 * HALF < k)[:, None] & (lane >= 0)[None, :]
    at = row * k + head[:, None] * 2 * HALF + lane[None, :]
    c, s = tl.load(cos + row * HALF + lane)[None, :], tl.load(sin + row * HALF + lane)[None, :]
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


def scale_matrix(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [m, k] times scale [1], as `dtype`: 8 bits, floating or integer."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _scale[grid](x, out, scale, x.numel(), INTEGER=not dtype.is_floating_point, BLOCK=BLOCK)
    return out


def rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [m, k] over the root mean square of its row, times weight [k]."""
    m, k = x.shape
    out, wide = torch.empty_like(x), triton.next_power_of_2(k)
    warps = min(16, max(4, wide // 1024))
    _rmsnorm[(m,)](x, weight, out, k, EPSILON=EPSILON, WIDE=wide, num_warps=warps)
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x [m, 2 k] to silu(x[:, :k]) * x[:, k:]."""
    m, k = x.shape[0], x.shape[1] // 2
    out = torch.empty(m, k, dtype=x.dtype, device=x.device)
    _silu_mul[(m, triton.cdiv(k, BLOCK))](x, out, k, BLOCK=BLOCK)
    return out


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _add[(triton.cdiv(x.numel(), BLOCK),)](x, y, out, x.numel(), BLOCK=BLOCK)
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads of x [m, k], each of 2 half elements, turned by the angles of cos and sin [m, half]."""
    (m, k), half = x.shape, cos.shape[1]
    out = torch.empty_like(x)
    heads = 8
    _rope[(m, triton.cdiv(k // (2 * half), heads))](x, cos, sin, out, k, HALF=half, HEADS=heads)
    return out
