"""Triton bodies of the operators in `ssm`: imported only where they run.

A prompt is one kernel per layer: each program takes some channels of one head through all chunks of the prompt,
with the state in registers. Within a chunk the scan is a masked product, as in attention. Chunks of one head follow
one another, but heads and channels are many enough to fill the GPU, and no state passes through memory.
"""
# mypy: disable-error-code="no-untyped-def, no-any-return"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """How a kernel is cut: rows (tokens; of the state in a step), columns (channels), warps, pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int = 1


@triton.jit
def _input(x, tail, at, x_row, channel, channels, keep, PAST: tl.constexpr, BEFORE: tl.constexpr):
    """Inputs of one token, in float32; those before the first (only if BEFORE) from `tail`, or zero."""
    if BEFORE:
        v = tl.load(x + at.to(tl.int64) * x_row + channel, mask=keep & (at >= 0), other=0.0).to(tl.float32)
        if PAST:
            v += tl.load(tail + (at + 3) * channels + channel, mask=keep & (at < 0), other=0.0).to(tl.float32)
    else:
        v = tl.load(x + at.to(tl.int64) * x_row + channel, mask=keep, other=0.0).to(tl.float32)
    return v


@triton.jit
def _mixed(out, at, channels, keep, bias, w0, w1, w2, w3, v0, v1, v2, v3):
    acc = bias + v0 * w0 + v1 * w1 + v2 * w2 + v3 * w3
    y = acc * tl.sigmoid(acc)
    tl.store(out + at.to(tl.int64) * channels, y.to(out.dtype.element_ty), mask=keep)


@triton.jit
def ssm_conv(
    x, weight, bias, tail, out, x_batch, x_row, tokens, channels, W: tl.constexpr, PAST: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BT tokens (1, or a multiple of 4) of BC channels, over 4 inputs; a thread keeps its channels, and reads each
    input once. The programs of the first tokens also keep the last inputs in `tail`."""
    tl.static_assert(W == 4)
    batch = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.program_id(0) * BT + tl.zeros((BC,), tl.int32)
    inside = channel < channels
    x += batch * x_batch
    tail += batch * (W - 1) * channels
    to = out + batch * tokens * channels + channel
    b = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    w0 = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(weight + channels + channel, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(weight + 2 * channels + channel, mask=inside, other=0.0).to(tl.float32)
    w3 = tl.load(weight + 3 * channels + channel, mask=inside, other=0.0).to(tl.float32)
    v0 = _input(x, tail, first - 3, x_row, channel, channels, inside, PAST, True)
    v1 = _input(x, tail, first - 2, x_row, channel, channels, inside, PAST, True)
    v2 = _input(x, tail, first - 1, x_row, channel, channels, inside, PAST, True)
    if BT == 1:
        v3 = _input(x, tail, first, x_row, channel, channels, inside, PAST, False)
        _mixed(to, first, channels, inside, b, w0, w1, w2, w3, v0, v1, v2, v3)
    else:
        for i in tl.static_range(0, BT, 4):  # all loads before the stores, which nothing could be moved across
            t = first + i
            v3 = _input(x, tail, t, x_row, channel, channels, inside & (t < tokens), PAST, False)
            v4 = _input(x, tail, t + 1, x_row, channel, channels, inside & (t + 1 < tokens), PAST, False)
            v5 = _input(x, tail, t + 2, x_row, channel, channels, inside & (t + 2 < tokens), PAST, False)
            v6 = _input(x, tail, t + 3, x_row, channel, channels, inside & (t + 3 < tokens), PAST, False)
            _mixed(to, t, channels, inside & (t < tokens), b, w0, w1, w2, w3, v0, v1, v2, v3)
            _mixed(to, t + 1, channels, inside & (t + 1 < tokens), b, w0, w1, w2, w3, v1, v2, v3, v4)
            _mixed(to, t + 2, channels, inside & (t + 2 < tokens), b, w0, w1, w2, w3, v2, v3, v4, v5)
            _mixed(to, t + 3, channels, inside & (t + 3 < tokens), b, w0, w1, w2, w3, v3, v4, v5, v6)
            v0, v1, v2 = v4, v5, v6
    if tl.program_id(0) == 0:
        tl.debug_barrier()  # other threads of this program read the old tail above
        for j in tl.static_range(W - 1):
            last = tokens - (W - 1) + j + tl.zeros((BC,), tl.int32)
            new = tl.load(x + last.to(tl.int64) * x_row + channel, mask=inside & (last >= 0), other=0.0)
            if PAST:  # rows that are still to be overwritten
                new += tl.load(tail + (last + W - 1) * channels + channel, mask=inside & (last < 0), other=0.0)
            tl.store(tail + j * channels + channel, new, mask=inside)


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def ssm_step(
    x, dt, dt_bias, a_log, b, c, skip, state, out, x_batch, dt_batch, b_batch, c_batch, heads, each,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One token: BP rows of one head's state, read once and written once."""
    split: tl.constexpr = P // BP
    batch, h = tl.program_id(1).to(tl.int64), tl.program_id(0) // split
    p = tl.program_id(0) % split * BP + tl.arange(0, BP)
    n = tl.arange(0, N)
    place = state + ((batch * heads + h) * P + p)[:, None] * N + n[None, :]
    s = tl.load(place)
    d = _softplus(tl.load(dt + batch * dt_batch + h).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32))
    decay = tl.exp(d * -tl.exp(tl.load(a_log + h).to(tl.float32)))
    u = tl.load(x + batch * x_batch + h * P + p).to(tl.float32)
    bt = tl.load(b + batch * b_batch + h // each * N + n).to(tl.float32)
    ct = tl.load(c + batch * c_batch + h // each * N + n).to(tl.float32)
    s = s * decay + (d * u)[:, None] * bt[None, :]
    tl.store(place, s)
    y = tl.sum(s * ct[None, :], axis=1) + tl.load(skip + h).to(tl.float32) * u
    tl.store(out + (batch * heads + h) * P + p, y.to(out.dtype.element_ty))


@triton.jit
def _sum_and_last(a, x, b, y):
    """Scans to (running sum, the value itself); what comes out of a scan is not computed again per layout."""
    return a + b, y


@triton.jit
def ssm_chunks(
    x, dt, dt_bias, a_log, b, c, skip, state, out, x_batch, dt_batch, b_batch, c_batch, tokens, heads: tl.constexpr,
    each: tl.constexpr, x_row: tl.constexpr, dt_row: tl.constexpr, b_row: tl.constexpr, c_row: tl.constexpr,
    PAST: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """All tokens of BP channels of one head, in chunks of L; the state, transposed [N, BP], stays in registers.

    Decay is kept as a base-2 logarithm, summed from the start of the chunk. Strides are constants, so that the
    addresses of a tile are immediates on one pointer: there are no registers to spare.
    """
    split: tl.constexpr = P // BP
    batch, h = tl.program_id(1).to(tl.int64), tl.program_id(0) // split
    p = tl.program_id(0) % split * BP + tl.arange(0, BP)
    n = tl.arange(0, N)
    i = tl.arange(0, L)
    kind = x.dtype.element_ty
    bias = tl.load(dt_bias + h).to(tl.float32)
    rate = -1.4426950408889634 * tl.exp(tl.load(a_log + h).to(tl.float32))
    d_skip = tl.load(skip + h).to(tl.float32)
    dt += batch * dt_batch + h
    x += batch * x_batch + h * P
    b += batch * b_batch + h // each * N
    c += batch * c_batch + h // each * N
    out += batch * tokens * (heads * P) + h * P
    x_at = i[:, None] * x_row + p[None, :]
    b_at = i[:, None] * b_row + n[None, :]
    c_at = i[:, None] * c_row + n[None, :]
    y_at = i[:, None] * (heads * P) + p[None, :]
    kept = state + (batch * heads + h) * P * N + p[None, :] * N + n[:, None]
    if PAST:
        s = tl.load(kept)
    else:
        s = tl.zeros((N, BP), tl.float32)
    later = tl.load(dt + i * dt_row, mask=i < tokens, other=0.0)
    for start in range(0, tokens, L):
        live = start + i < tokens
        raw = later
        dt += L * dt_row
        later = tl.load(dt + i * dt_row, mask=start + L + i < tokens, other=0.0)  # for the next chunk
        ct = tl.load(c + c_at, mask=live[:, None], other=0.0)
        bt = tl.load(b + b_at, mask=live[:, None], other=0.0)
        u = tl.load(x + x_at, mask=live[:, None], other=0.0)
        d = tl.where(live, _softplus(raw.to(tl.float32) + bias), 0.0)
        last = tl.sum(d * rate, axis=0)
        total, d = tl.associative_scan((d * rate, d), 0, _sum_and_last)
        source = total - tl.log2(d)  # so that exp2(total[i] - source[j]) is the weight of token j in token i
        mix = tl.dot(ct, tl.trans(bt))
        mix = tl.where(i[:, None] >= i[None, :], mix * tl.exp2(total[:, None] - source[None, :]), 0.0)
        y = tl.dot(ct, s.to(kind)) * tl.exp2(total)[:, None]
        y = tl.dot(mix.to(kind), u, y)
        y += d_skip * u.to(tl.float32)
        tl.store(out + y_at, y.to(kind), mask=live[:, None])
        faded = u.to(tl.float32) * tl.exp2(last - source)[:, None]
        s = tl.dot(tl.trans(bt), faded.to(kind), s * tl.exp2(last))
        x += L * x_row
        b += L * b_row
        c += L * c_row
        out += L * (heads * P)
    tl.store(kept, s)


@triton.jit
def ssm_gated_norm(
    y, z, weight, out, z_row, rows, eps, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """BR rows of one group of WIDTH channels; y and out are contiguous."""
    row = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    k = tl.arange(0, BLOCK)
    channel = tl.program_id(1) * WIDTH + k
    live = (row < rows)[:, None] & (k < WIDTH)[None, :]
    place = row[:, None] * (GROUPS * WIDTH) + channel[None, :]
    gate = tl.load(z + row[:, None] * z_row + channel[None, :], mask=live, other=0.0).to(tl.float32)
    h = tl.load(y + place, mask=live, other=0.0).to(tl.float32) * gate * tl.sigmoid(gate)
    h *= tl.rsqrt(tl.sum(h * h, axis=1) / WIDTH + eps)[:, None]
    scale = tl.load(weight + channel, mask=k < WIDTH, other=0.0)
    tl.store(out + place, h.to(out.dtype.element_ty) * scale[None, :], mask=live)


def _rows(*tensors: torch.Tensor) -> None:
    for t in tensors:
        inner = 1
        for size, stride in zip(reversed(t.shape[2:]), reversed(t.stride()[2:]), strict=True):
            if size != 1 and stride != inner:
                raise ValueError(f"the values of a token must be contiguous: shape {tuple(t.shape)}, {t.stride()}")
            inner *= size


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tail: torch.Tensor, past: bool, tile: Tile | None = None
) -> torch.Tensor:
    _rows(x)
    batch, tokens, channels = x.shape
    rows, columns, warps, _ = tile or (Tile(1, 256, 1) if tokens == 1 else Tile(8, 256, 1))
    out = torch.empty(batch, tokens, channels, dtype=x.dtype, device=x.device)
    ssm_conv[(triton.cdiv(tokens, rows), triton.cdiv(channels, columns), batch)](
        x, weight, bias, tail, out, *x.stride()[:2], tokens, channels, W=len(weight), PAST=past, BT=rows, BC=columns,
        num_warps=warps,
    )  # fmt: skip
    return out


def step(
    x: torch.Tensor, dt: torch.Tensor, dt_bias: torch.Tensor, a_log: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    skip: torch.Tensor, state: torch.Tensor, tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    _rows(x, dt, b, c)
    batch, _, heads, p = x.shape
    rows, _, warps, _ = tile or Tile(min(p, 8), 0, 2)
    out = torch.empty(batch, 1, heads * p, dtype=x.dtype, device=x.device)
    ssm_step[(heads * (p // rows), batch)](
        x, dt, dt_bias, a_log, b, c, skip, state, out, x.stride(0), dt.stride(0), b.stride(0), c.stride(0), heads,
        heads // b.shape[2], P=p, N=b.shape[3], BP=rows, num_warps=warps,
    )  # fmt: skip
    return out


def prompt(
    x: torch.Tensor, dt: torch.Tensor, dt_bias: torch.Tensor, a_log: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    skip: torch.Tensor, state: torch.Tensor, past: bool, tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    _rows(x, dt, b, c)
    batch, tokens, heads, p = x.shape
    chunk, columns, warps, stages = tile or Tile(64, min(p, 32), 4, 3)
    out = torch.empty(batch, tokens, heads * p, dtype=x.dtype, device=x.device)
    batches, row_strides = zip(*(t.stride()[:2] for t in (x, dt, b, c)), strict=True)
    ssm_chunks[(heads * (p // columns), batch)](
        x, dt, dt_bias, a_log, b, c, skip, state, out, *batches, tokens, heads, heads // b.shape[2], *row_strides,
        PAST=past, P=p, N=b.shape[3], L=chunk, BP=columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def gate(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, groups: int, eps: float, tile: Tile | None = None
) -> torch.Tensor:
    _rows(y, z)
    batch, tokens, channels = y.shape
    if not y.is_contiguous() or (batch > 1 and z.stride(0) != tokens * z.stride(1)):
        raise ValueError(f"y must be contiguous and the rows of z evenly spaced: {y.stride()}, {z.stride()}")
    width = channels // groups
    rows, _, warps, _ = tile or Tile(1, 0, 4)
    out = torch.empty_like(y)
    ssm_gated_norm[(triton.cdiv(batch * tokens, rows), groups)](
        y, z, weight, out, z.stride(1) if tokens > 1 else z.stride(0), batch * tokens, eps, GROUPS=groups,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), BR=rows, num_warps=warps,
    )  # fmt: skip
    return out
