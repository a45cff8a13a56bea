"""Triton bodies of the operator in `sinks`: a prompt in tiles of queries, a decode step split over the keys."""
# mypy: disable-error-code="no-untyped-def, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _range(
    acc, total, top, q, k, v, k_row, v_row, at, first, last, keys, scale, WINDOW: tl.constexpr, MASK: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Online softmax of queries at positions `at` over keys [first, last)."""
    for start in range(first, last, BN):
        j = start + tl.arange(0, BN)
        kp = k + j.to(tl.int64)[:, None] * k_row + tl.arange(0, D)[None, :]
        vp = v + j.to(tl.int64)[:, None] * v_row + tl.arange(0, D)[None, :]
        if MASK:
            kt = tl.load(kp, mask=(j < keys)[:, None], other=0.0)
        else:
            kt = tl.load(kp)
        s = tl.dot(q, tl.trans(kt))
        if MASK:
            age = at[:, None] - j[None, :]
            seen = (age >= 0) & (j < last)[None, :]
            if WINDOW > 0:
                seen = seen & (age < WINDOW)
            s = tl.where(seen, s, -1.0e30)
        new = tl.maximum(top, tl.max(s, axis=1) * scale)
        p = tl.exp2(s * scale - new[:, None])
        if MASK:
            p = tl.where(seen, p, 0.0)
        shrink = tl.exp2(top - new)
        if MASK:
            vt = tl.load(vp, mask=(j < keys)[:, None], other=0.0)
        else:
            vt = tl.load(vp)
        acc = tl.dot(p.to(vt.dtype), vt, acc * shrink[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        top = new
    return acc, total, top


@triton.jit
def sinks_prefill(
    q, k, v, sinks, out, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, heads, group,
    queries, keys, scale, WINDOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """BM queries of one head; logits and sinks in base 2. The queries that see most keys start first."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    i = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    live = (i < queries)[:, None]
    qt = tl.load(q + b * q_batch + h * q_head + i.to(tl.int64)[:, None] * q_row + d[None, :], mask=live, other=0.0)
    k += b * k_batch + h // group * k_head
    v += b * v_batch + h // group * v_head
    at = keys - queries + i
    oldest = keys - queries + tile * BM
    last = tl.minimum(oldest + BM, keys)
    acc = tl.zeros((BM, D), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), -1.0e30, tl.float32)
    if WINDOW > 0:
        middle = tl.maximum(oldest - WINDOW + 1, 0) // BN * BN
    else:
        middle = oldest // BN * BN  # all of these keys are seen by all of these queries
        acc, total, top = _range(acc, total, top, qt, k, v, k_row, v_row, at, 0, middle, keys, scale, 0, False, BN, D)
    acc, total, top = _range(
        acc, total, top, qt, k, v, k_row, v_row, at, middle, last, keys, scale, WINDOW, True, BN, D
    )
    sink = tl.load(sinks + h).to(tl.float32) * 1.4426950408889634
    most = tl.maximum(top, sink)
    shrink = tl.exp2(top - most)
    y = acc * (shrink / (total * shrink + tl.exp2(sink - most)))[:, None]
    place = out + ((b * queries + i.to(tl.int64)[:, None]) * heads + h) * D + d[None, :]
    tl.store(place, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def sinks_decode(
    q, k, v, sinks, partial, stats, q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row, kv_heads, keys,
    chunk, scale, GROUP: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One query of all heads that share keys, over one chunk of them. Partial sums [B, KV, splits, GROUP, D].

    WHOLE: the chunk is all keys, and `partial` the output [B, KV * GROUP, D].
    """
    b, kv, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    g, d = tl.arange(0, 16), tl.arange(0, D)
    live = g < GROUP
    qt = tl.load(q + b * q_batch + (kv * GROUP + g)[:, None] * q_head + d[None, :], mask=live[:, None], other=0.0)
    acc = tl.zeros((16, D), tl.float32)
    total = tl.zeros((16,), tl.float32)
    top = tl.full((16,), -1.0e30, tl.float32)
    first = split * chunk
    acc, total, top = _range(
        acc, total, top, qt, k + b * k_batch + kv * k_head, v + b * v_batch + kv * v_head, k_row, v_row,
        tl.zeros((16,), tl.int32) + keys, first, tl.minimum(first + chunk, keys), keys, scale, 0, True, BN, D,
    )  # fmt: skip
    row = ((b * kv_heads + kv) * tl.num_programs(2) + split) * GROUP + g
    if WHOLE:
        sink = tl.load(sinks + kv * GROUP + g, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        most = tl.maximum(top, sink)
        shrink = tl.exp2(top - most)
        acc *= (shrink / (total * shrink + tl.exp2(sink - most)))[:, None]
    else:
        tl.store(stats + row * 2, top, mask=live)
        tl.store(stats + row * 2 + 1, total, mask=live)
    tl.store(partial + row[:, None] * D + d[None, :], acc.to(partial.dtype.element_ty), mask=live[:, None])


@triton.jit
def sinks_combine(partial, stats, sinks, out, kv_heads, splits, GROUP: tl.constexpr, GP: tl.constexpr, D: tl.constexpr):
    """Sum the splits of one group of heads and add its sinks to the denominators."""
    group = tl.program_id(0).to(tl.int64)
    g, d = tl.arange(0, GP), tl.arange(0, D)
    live = g < GROUP
    kv = group % kv_heads
    most = tl.load(sinks + kv * GROUP + g, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
    total = tl.full((GP,), 1.0, tl.float32)
    acc = tl.zeros((GP, D), tl.float32)
    for s in range(splits):
        row = (group * splits + s) * GROUP + g
        top = tl.load(stats + row * 2, mask=live, other=0.0)
        new = tl.maximum(most, top)
        old, mine = tl.exp2(most - new), tl.exp2(top - new)
        part = tl.load(partial + row[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        acc = acc * old[:, None] + part * mine[:, None]
        total = total * old + tl.load(stats + row * 2 + 1, mask=live, other=0.0) * mine
        most = new
    place = out + (group * GROUP + g)[:, None] * D + d[None, :]
    tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=live[:, None])


def _base2(d: int) -> float:
    return float(d**-0.5 * 1.4426950408889634)


def prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int,
    shape: tuple[int, int, int, int, int | None] = (128, 64, 8, 3, 128),
) -> torch.Tensor:  # fmt: skip
    """`shape`: queries and keys of a tile, warps, stages, most registers of a thread."""
    (b, h, t, d), (_, kv, c, _) = query.shape, key.shape
    out = torch.empty(b, t, h, d, dtype=query.dtype, device=query.device)
    rows, columns, warps, stages, registers = shape if query.is_cuda else (16, 16, 4, 3, None)
    sinks_prefill[(b * h, triton.cdiv(t, rows))](
        query, key, value, sinks, out, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], h, h // kv, t, c,
        _base2(d), WINDOW=window, BM=rows, BN=columns, D=d, num_warps=warps, num_stages=stages,
        maxnreg=registers,
    )  # fmt: skip
    return out


def decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, programs: int = 528
) -> torch.Tensor:
    """`programs`: how many run at a time, four on each of 132 multiprocessors."""
    (b, h, _, d), (_, kv, c, _) = query.shape, key.shape
    tile, group = 64 if query.is_cuda else 16, h // kv
    splits = max(1, min(programs // (b * kv), c // (2 * tile)))
    chunk = triton.cdiv(triton.cdiv(c, splits), tile) * tile
    splits = triton.cdiv(c, chunk)
    out = torch.empty(b, 1, h, d, dtype=query.dtype, device=query.device)
    partial, stats = out, out
    if splits > 1:
        partial = torch.empty(b, kv, splits, group, d, dtype=torch.float32, device=query.device)
        stats = torch.empty(b, kv, splits, group, 2, dtype=torch.float32, device=query.device)
    sinks_decode[(b, kv, splits)](
        query, key, value, sinks, partial, stats, *query.stride()[:2], *key.stride()[:3], *value.stride()[:3], kv, c,
        chunk, _base2(d), GROUP=group, BN=tile, D=d, WHOLE=splits == 1, num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        width = triton.next_power_of_2(group)
        sinks_combine[(b * kv,)](partial, stats, sinks, out, kv, splits, GROUP=group, GP=width, D=d, num_warps=4)
    return out
