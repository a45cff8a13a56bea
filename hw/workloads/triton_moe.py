"""Triton bodies of the operators in `moe`: imported only where they run.

The grouped GEMM computes its tile transposed, weights [BN, 64] times rows [64, BM]: weights are then the operand
that tensor cores take from registers, where they are dequantised, and few rows do not waste the tile.
"""
# mypy: disable-error-code="no-untyped-def, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hw.workloads.moe import ALPHA, LIMIT, block_limit

#: Four packed bytes to 4 + 4 bf16 (low halves, high halves): the three value bits become exponent and mantissa
#: of a bf16 (2^-126 of the value), which a product with the scale puts right. $4 bytes, $5-$8 scales.
DEQUANTISE = """{
.reg .b32 a, b, t, u;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shl.b32 t, a, 6;
and.b32 t, t, 0x01C001C0;
shl.b32 u, a, 12;
and.b32 u, u, 0x80008000;
or.b32 t, t, u;
mul.rn.bf16x2 $0, t, $5;
shl.b32 t, b, 6;
and.b32 t, t, 0x01C001C0;
shl.b32 u, b, 12;
and.b32 u, u, 0x80008000;
or.b32 t, t, u;
mul.rn.bf16x2 $1, t, $6;
shl.b32 t, a, 2;
and.b32 t, t, 0x01C001C0;
shl.b32 u, a, 8;
and.b32 u, u, 0x80008000;
or.b32 t, t, u;
mul.rn.bf16x2 $2, t, $7;
shl.b32 t, b, 2;
and.b32 t, t, 0x01C001C0;
shl.b32 u, b, 8;
and.b32 u, u, 0x80008000;
or.b32 t, t, u;
mul.rn.bf16x2 $3, t, $8;
}"""
_DEQUANTISE = tl.constexpr(DEQUANTISE)


@triton.jit
def moe_topk(logits, gain, chosen, tokens, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr):
    """The K largest of E logits per token, and their softmax. KP: K rounded up to a power of two."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    expert, slot = tl.arange(0, E), tl.arange(0, KP)
    live = token < tokens
    v = tl.load(logits + token[:, None] * E + expert[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    top = tl.full((BT, KP), float("-inf"), tl.float32)
    index = tl.zeros((BT, KP), tl.int32)
    for j in tl.static_range(K):
        best, at = tl.max(v, axis=1), tl.argmax(v, axis=1).to(tl.int32)
        top = tl.where(slot[None, :] == j, best[:, None], top)
        index = tl.where(slot[None, :] == j, at[:, None], index)
        v = tl.where(expert[None, :] == at[:, None], float("-inf"), v)
    p = tl.exp(top - tl.max(top, axis=1)[:, None])
    p = p / tl.sum(p, axis=1)[:, None]
    place = token[:, None] * K + slot[None, :]
    keep = live[:, None] & (slot[None, :] < K)
    tl.store(gain + place, p, mask=keep)
    tl.store(chosen + place, index, mask=keep)


@triton.jit
def moe_sort(chosen, order, owner, choices, limit, E: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """One program per expert: all count all choices, each writes its own, so none waits for another."""
    me = tl.program_id(0)
    expert, lane, row = tl.arange(0, E), tl.arange(0, STEP), tl.arange(0, BLOCK)
    count = tl.zeros((E,), tl.int32)
    for start in range(0, choices, STEP):
        e = tl.load(chosen + start + lane, mask=start + lane < choices, other=-1)
        count += tl.sum((e[:, None] == expert[None, :]).to(tl.int32), axis=0)
    blocks = (count + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(expert < me, blocks, 0), axis=0)
    mine = tl.sum(tl.where(expert == me, blocks, 0), axis=0)
    at = first * BLOCK
    for start in range(0, choices, STEP):
        e = tl.load(chosen + start + lane, mask=start + lane < choices, other=-1)
        hit = (e == me).to(tl.int32)
        tl.store(order + at + tl.cumsum(hit, axis=0) - 1, start + lane, mask=hit > 0)
        at += tl.sum(hit, axis=0)
    tl.store(order + at + row, choices, mask=at + row < (first + mine) * BLOCK)
    for start in range(0, mine, STEP):
        tl.store(owner + first + start + lane, me, mask=start + lane < mine)
    if me == E - 1:
        for start in range(first + mine, limit, STEP):
            tl.store(owner + start + lane, -1, mask=start + lane < limit)


@triton.jit
def _weights(w, s, PACKED: tl.constexpr, ASM: tl.constexpr, kind: tl.constexpr):
    """Two [BN, 32] tiles of weights: values 0-31 and 32-63 of a group of 64."""
    if PACKED:
        q = tl.load(w)
        low, high = tl.load(s), tl.load(s + 1)
        if ASM:
            low = ((low.to(tl.uint16) + 126) << 7).to(tl.bfloat16, bitcast=True)
            high = ((high.to(tl.uint16) + 126) << 7).to(tl.bfloat16, bitcast=True)
            a, b = tl.inline_asm_elementwise(
                _DEQUANTISE, "=r,=r,=r,=r,r,r,r,r,r", [q, low, high], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
                pack=4,
            )  # fmt: skip
        else:  # the same in float32
            v = q.to(tl.uint32)
            low = ((low.to(tl.uint32) + 126) << 23).to(tl.float32, bitcast=True)
            high = ((high.to(tl.uint32) + 126) << 23).to(tl.float32, bitcast=True)
            a = (((v & 7) << 22) | ((v & 8) << 28)).to(tl.float32, bitcast=True) * low
            b = (((v & 0x70) << 18) | ((v & 0x80) << 24)).to(tl.float32, bitcast=True) * high
        return a.to(kind), b.to(kind)
    else:  # noqa: RET505
        return tl.load(w).to(kind), tl.load(w + 32).to(kind)


@triton.jit
def moe_gemm(
    x, weight, scale, bias, order, owner, gain, out, n, k, choices, PER_ROW: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, ASM: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Block `program_id(1)` of rows times BN outputs of its expert, then activation (GATED) or gain."""
    expert = tl.load(owner + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(order + tl.program_id(1) * BM + tl.arange(0, BM))
    live = row < choices
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = tl.minimum(column, n - 1)  # rows beyond the last are computed and dropped
    rows = expert * (2 * n if GATED else n) + inside
    depth = tl.arange(0, 32)
    width: tl.constexpr = 32 if PACKED else 64
    a = x + (tl.where(live, row, 0) // PER_ROW).to(tl.int64)[:, None] * k + depth[None, :]
    w = weight + rows[:, None] * (k // 64 * width) + depth[None, :]
    s = scale + rows[:, None] * (k // 32)
    up = n.to(tl.int64)
    acc = tl.zeros((BN, BM), tl.float32)
    acc_up = tl.zeros((BN, BM), tl.float32)
    kind = x.dtype.element_ty
    for _ in range(k // 64):
        low, high = tl.trans(tl.load(a)), tl.trans(tl.load(a + 32))
        w0, w1 = _weights(w, s, PACKED, ASM, kind)
        acc = tl.dot(w1, high, tl.dot(w0, low, acc))
        if GATED:
            w0, w1 = _weights(w + up * (k // 64 * width), s + up * (k // 32), PACKED, ASM, kind)
            acc_up = tl.dot(w1, high, tl.dot(w0, low, acc_up))
        a += 64
        w += width
        s += 2
    acc += tl.load(bias + rows).to(tl.float32)[:, None]
    if GATED:
        acc_up += tl.load(bias + rows + up).to(tl.float32)[:, None]
        gate = tl.minimum(acc, LIMIT)
        acc = (tl.minimum(tl.maximum(acc_up, -LIMIT), LIMIT) + 1) * gate * tl.sigmoid(ALPHA * gate)
    else:
        acc *= tl.load(gain + row, mask=live, other=0.0)[None, :]
    place = out + row.to(tl.int64)[None, :] * n + column[:, None]
    tl.store(place, acc.to(kind), mask=live[None, :] & (column < n)[:, None])


def route(
    logits: torch.Tensor, k: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits.contiguous()
    tokens, experts = logits.shape
    limit = block_limit(tokens * k, experts, block)
    gain = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    chosen, order, owner = (
        torch.empty(shape, dtype=torch.int32, device=logits.device) for shape in ((tokens, k), limit * block, limit)
    )
    moe_topk[(triton.cdiv(tokens, 16),)](
        logits, gain, chosen, tokens, E=experts, K=k, KP=triton.next_power_of_2(k), BT=16, num_warps=4
    )
    step = min(1024, max(64, triton.next_power_of_2(tokens * k)))
    moe_sort[(experts,)](chosen, order, owner, tokens * k, limit, E=experts, BLOCK=block, STEP=step, num_warps=8)
    return gain, chosen, order, owner


def grouped_gemm(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor, order: torch.Tensor,
    owner: torch.Tensor, gain: torch.Tensor | None, per_row: int,
) -> torch.Tensor:  # fmt: skip
    """`gain` None: the first layer with its activation; else the second."""
    x = x.contiguous()
    choices, k, n = x.shape[0] * per_row, x.shape[1], bias.shape[1] // (2 if gain is None else 1)
    out = torch.empty(choices, n, dtype=x.dtype, device=x.device)
    rows = len(order) // len(owner)
    wide = rows == 128
    columns = 128 if wide and gain is not None else 64
    moe_gemm[(triton.cdiv(n, columns), len(owner))](
        x, weight, weight if scale is None else scale, bias, order, owner, bias if gain is None else gain, out, n, k,
        choices, PER_ROW=per_row, GATED=gain is None, PACKED=scale is not None, ASM=x.is_cuda, LIMIT=LIMIT,
        ALPHA=ALPHA, BM=rows, BN=columns, num_warps=8 if wide else 4, num_stages=3 if wide else 5,
    )  # fmt: skip
    return out
