"""Triton bodies of the operators in `sinks`: a prompt in tiles of queries, a decode step split over the keys."""
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
    """Online softmax of queries at positions `at` over keys [first, last), later ones hidden if MASK."""
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
            # A row that has seen no key yet sums nonsense, which its first key multiplies with 0.
            age = at[:, None] - j[None, :]
            if WINDOW > 0:  # as unsigned numbers: future keys are the oldest
                s = tl.where(age.to(tl.uint32, bitcast=True) < WINDOW, s, -1.0e30)
            else:
                s = tl.where(age >= 0, s, -1.0e30)
        new = tl.maximum(top, tl.max(s, axis=1) * scale)
        p = tl.exp2(s * scale - new[:, None])
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
    queries, keys, scale, WINDOW: tl.constexpr, PACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """BM / PACK queries of PACK heads that share keys; logits and sinks in base 2. Those that see most start first."""
    BQ: tl.constexpr = BM // PACK
    packs = heads // PACK
    b, h0 = (tl.program_id(0) // packs).to(tl.int64), (tl.program_id(0) % packs).to(tl.int64) * PACK
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    r = tl.arange(0, BM)
    i, h = tile * BQ + r // PACK, h0 + r % PACK
    d = tl.arange(0, D)
    live = (i < queries)[:, None]
    place = b * q_batch + h[:, None] * q_head + i.to(tl.int64)[:, None] * q_row + d[None, :]
    qt = tl.load(q + place, mask=live, other=0.0)
    k += b * k_batch + h0 // group * k_head
    v += b * v_batch + h0 // group * v_head
    at = keys - queries + i
    oldest = keys - queries + tile * BQ
    last = tl.minimum(oldest + BQ, keys)
    acc = tl.zeros((BM, D), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), -1.0e30, tl.float32)
    if WINDOW > 0:
        middle = tl.maximum(oldest - WINDOW + 1, 0)
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
    place = ((b * queries + i.to(tl.int64)) * heads + h)[:, None] * D + d[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=live)


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
    last = tl.minimum(first + chunk, keys)
    acc, total, top = _range(
        acc, total, top, qt, k + b * k_batch + kv * k_head, v + b * v_batch + kv * v_head, k_row, v_row,
        tl.zeros((16,), tl.int32) + last - 1, first, last, keys, scale, 0, True, BN, D,
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
def rope_kv_index_copy(
    qkv, cos, sin, position, k_cache, v_cache, out, k_batch, k_head, k_row, v_batch, v_head, v_row, heads, kv_heads,
    tokens, H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One token: all heads of queries rotated into `out`, of keys into the cache, and of values copied there.

    H: a power of two, heads at a time. What a program loads it stores rotated: no key is read.
    """
    b, t = tl.program_id(0).to(tl.int64) // tokens, tl.program_id(0) % tokens
    h = tl.program_id(1) * H + tl.arange(0, H)
    half: tl.constexpr = D // 2
    d = tl.arange(0, half)
    at = tl.load(position + t)
    every = h < heads + 2 * kv_heads
    source = qkv + tl.program_id(0).to(tl.int64) * (heads + 2 * kv_heads) * D + h[:, None] * D + d[None, :]
    x = tl.load(source, mask=every[:, None], other=0.0).to(tl.float32)
    y = tl.load(source + half, mask=every[:, None], other=0.0).to(tl.float32)
    turned = (h < heads + kv_heads)[:, None]
    c = tl.where(turned, tl.load(cos + at * half + d)[None, :], 1.0)
    s = tl.where(turned, tl.load(sin + at * half + d)[None, :], 0.0)
    low, high = (x * c - y * s).to(qkv.dtype.element_ty), (y * c + x * s).to(qkv.dtype.element_ty)
    is_q, is_v = (h < heads)[:, None], (every & (h >= heads + kv_heads))[:, None]
    is_k = turned & (h >= heads)[:, None]
    q_at = out + (tl.program_id(0).to(tl.int64) * heads + h)[:, None] * D + d[None, :]
    tl.store(q_at, low, mask=is_q)
    tl.store(q_at + half, high, mask=is_q)
    k_at = k_cache + b * k_batch + (h - heads).to(tl.int64)[:, None] * k_head + at * k_row + d[None, :]
    tl.store(k_at, low, mask=is_k)
    tl.store(k_at + half, high, mask=is_k)
    v_at = v_cache + b * v_batch + (h - heads - kv_heads).to(tl.int64)[:, None] * v_head + at * v_row + d[None, :]
    tl.store(v_at, low, mask=is_v)
    tl.store(v_at + half, high, mask=is_v)


@triton.jit
def sinks_combine(partial, stats, sinks, out, kv_heads, splits, GROUP: tl.constexpr, SP: tl.constexpr, D: tl.constexpr):
    """Sum the splits of one head, all at once, and add its sink to the denominator."""
    group, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, d = tl.arange(0, SP), tl.arange(0, D)
    live = s < splits
    row = (group * splits + s) * GROUP + g
    sink = tl.load(sinks + group % kv_heads * GROUP + g).to(tl.float32) * 1.4426950408889634
    top = tl.load(stats + row * 2, mask=live, other=-1.0e30)
    part = tl.load(partial + row[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
    most = tl.maximum(tl.max(top, axis=0), sink)
    weight = tl.exp2(top - most)
    total = tl.sum(weight * tl.load(stats + row * 2 + 1, mask=live, other=0.0), axis=0) + tl.exp2(sink - most)
    y = tl.sum(part * weight[:, None], axis=0) / total
    tl.store(out + (group * GROUP + g) * D + d, y.to(out.dtype.element_ty))


def _base2(d: int) -> float:
    return float(d**-0.5 * 1.4426950408889634)


def _tile(queries: int, window: int) -> tuple[int, int, int, int, int | None]:
    """Few keys of a window are in vain with 32 at a time; few queries fill the GPU in small tiles: the fastest of
    `experiments/bench/moe_kernels.py` on an H200."""
    if window:
        return 64, 32, 4, 3, 128
    return (64, 64, 4, 2, None) if queries <= 512 else (128, 64, 8, 3, 128)


def prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int,
    shape: tuple[int, int, int, int, int | None] | None = None,
) -> torch.Tensor:  # fmt: skip
    """`shape`: rows (queries times the heads of a group) and keys of a tile, warps, stages, registers of a thread."""
    (b, h, t, d), (_, kv, c, _) = query.shape, key.shape
    out = torch.empty(b, t, h, d, dtype=query.dtype, device=query.device)
    rows, columns, warps, stages, registers = shape or (_tile(t, window) if query.is_cuda else (16, 16, 4, 3, None))
    pack = h // kv if rows % (h // kv) == 0 else 1
    sinks_prefill[(b * h // pack, triton.cdiv(t * pack, rows))](
        query, key, value, sinks, out, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], h, h // kv, t, c,
        _base2(d), WINDOW=window, PACK=pack, BM=rows, BN=columns, D=d, num_warps=warps, num_stages=stages,
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
        most = triton.next_power_of_2(splits)
        sinks_combine[(b * kv, group)](
            partial, stats, sinks, out, kv, splits, GROUP=group, SP=most, D=d, num_warps=1 if most <= 8 else 4
        )
    return out


def rotate_and_append(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor, heads: int,
) -> torch.Tensor:  # fmt: skip
    (b, t, width), (_, kv, _, d) = qkv.shape, k_cache.shape
    if not (qkv.is_contiguous() and k_cache.stride(3) == v_cache.stride(3) == 1):
        raise ValueError(f"values of a head must be contiguous: {qkv.stride()}, {k_cache.stride()}, {v_cache.stride()}")
    out = torch.empty(b, t, heads, d, dtype=qkv.dtype, device=qkv.device)
    rope_kv_index_copy[(b * t, triton.cdiv(width // d, 16))](
        qkv, cos, sin, position, k_cache, v_cache, out, *k_cache.stride()[:3], *v_cache.stride()[:3], heads, kv, t,
        H=16, D=d, num_warps=2,
    )  # fmt: skip
    return out
