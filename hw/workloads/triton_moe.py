"""Triton bodies of the operators in `moe`: imported only where they run.

The grouped GEMM computes its tile transposed, weights [BN, 64] times rows [64, BM]: weights are then the operand
that tensor cores take from registers, where they are dequantised, and few rows do not waste the tile. Packed
weights lie in memory in the order of that operand (see `moe.tiles`): a thread reads 16 contiguous bytes, which
hold its own part of a tile, so weights never pass between threads.
"""
# mypy: disable-error-code="no-untyped-def, no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hw.workloads.moe import ALPHA, LIMIT, block_limit

#: A product of two bf16 at once, and one half of a word in both halves.
MULTIPLY = tl.constexpr("mul.rn.bf16x2 $0, $1, $2;")
LOW_TWICE = tl.constexpr("prmt.b32 $0, $1, 0, 0x1010;")
HIGH_TWICE = tl.constexpr("prmt.b32 $0, $1, 0, 0x3232;")


#: Most tokens that one program routes.
ONE_PROGRAM = 128


@dataclass(frozen=True)
class Variant:
    """Shape of one launch of `moe_gemm`: `columns` weight rows per program, `step` tiles of 64 per iteration."""

    columns: int
    warps: int
    stages: int
    step: int = 1
    fewest: int = 1024  # a half-empty block multiplies half of its rows, if those are not fewer
    registers: int | None = None  # at most, per thread

    @property
    def name(self) -> str:
        more = f"f{self.fewest}" * (self.fewest < 1024) + f"r{self.registers}" * bool(self.registers)
        return f"n{self.columns}w{self.warps}s{self.stages}x{self.step}{more}"


#: By rows of a block; [first layer, second layer]: the fastest of `experiments/bench/moe_kernels.py` on an H200.
CHOSEN: dict[int, tuple[Variant, Variant]] = {
    16: (Variant(128, 4, 3, 3), Variant(64, 4, 3, 3)),
    32: (Variant(128, 4, 3, 3, 16), Variant(64, 4, 3, 3, 16)),
    64: (Variant(128, 4, 4, 1, 16, 168), Variant(128, 4, 4, 1, 16, 168)),
    128: (Variant(128, 8, 3, 1, 32), Variant(128, 4, 3, 1, 32)),
    256: (Variant(128, 8, 4, 1, 64), Variant(128, 8, 4, 1, 64)),
}
#: Of a step that has fewer programs than an H200 would run at once.
SMALL = Variant(64, 4, 3, 3), Variant(64, 4, 4, 3)


@triton.jit
def _choose(logits, gain, chosen, token, tokens, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr):
    """The K largest of E logits of each token [BT], and their softmax, stored; the slot of each expert [BT, E], -1
    where a token has not chosen it."""
    expert, slot = tl.arange(0, E), tl.arange(0, KP)
    live = token < tokens
    # The minimum changes nothing, except that the compiler no longer sees neighbours: it would read several at once,
    # and its layout of the choices would pass the addresses of `_place` between threads, where no analysis follows.
    at = token[:, None] * E + tl.minimum(expert, E - 1)[None, :]
    v = tl.load(logits + at, mask=live[:, None], other=0.0).to(tl.float32)
    top = tl.full((BT, KP), float("-inf"), tl.float32)
    index = tl.zeros((BT, KP), tl.int32)
    mine = tl.full((BT, E), -1, tl.int32)
    for j in tl.static_range(K):
        best, which = tl.max(v, axis=1, return_indices=True)
        top = tl.where(slot[None, :] == j, best[:, None], top)
        index = tl.where(slot[None, :] == j, which.to(tl.int32)[:, None], index)
        hit = expert[None, :] == which.to(tl.int32)[:, None]
        mine = tl.where(hit & live[:, None], j, mine)
        v = tl.where(hit, float("-inf"), v)
    p = tl.exp(top - tl.max(top, axis=1)[:, None])
    p = p / tl.sum(p, axis=1)[:, None]
    place = token[:, None] * K + slot[None, :]
    keep = live[:, None] & (slot[None, :] < K)
    tl.store(gain + place, p, mask=keep)
    tl.store(chosen + place, index, mask=keep)
    return mine


@triton.jit
def _place(order, mine, token, at, K: tl.constexpr):
    """Write the choices of tokens [BT] where the rows of their experts continue: `at` [E], in order of tokens. A token
    chooses an expert at most once, so that its rank is the count of tokens before it."""
    hit = (mine >= 0).to(tl.int32)
    place = at[None, :] + tl.cumsum(hit, axis=0) - 1
    tl.store(order + place, token[:, None] * K + mine, mask=mine >= 0)


@triton.jit
def _blocks(order, owner, total, choices, limit, E: tl.constexpr, BLOCK: tl.constexpr, LP: tl.constexpr):
    """Fill the blocks of experts with `total` [E] rows with padding, name the owner of every block.

    Padding is written from the end of the last block: addresses that do not rise along a tile leave the compiler no
    reason to pass them between threads, where no analysis follows them.
    """
    expert, row = tl.arange(0, E), tl.arange(0, BLOCK)
    blocks = (total + BLOCK - 1) // BLOCK
    first = tl.cumsum(blocks, axis=0) - blocks
    left = blocks * BLOCK - total
    at = ((first + blocks) * BLOCK - 1)[None, :] - row[:, None]
    tl.store(order + at, tl.zeros_like(at) + choices, mask=row[:, None] < left[None, :])
    used = tl.sum(blocks, axis=0)
    for start in range(0, limit, LP):
        i = start + tl.arange(0, LP)
        inside = (i[:, None] >= first[None, :]) & (i[:, None] < (first + blocks)[None, :])
        who = tl.max(tl.where(inside, expert[None, :], -1), axis=1)
        tl.store(owner + i, tl.where(i < used, who, -1), mask=i < limit)


@triton.jit
def moe_route_few(
    logits, gain, chosen, order, owner, tokens, limit, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BT: tl.constexpr, BLOCK: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """All of the routing of at most BT tokens, in one program."""
    token = tl.arange(0, BT)
    mine = _choose(logits, gain, chosen, token, tokens, E, K, KP, BT)
    total = tl.sum((mine >= 0).to(tl.int32), axis=0)
    blocks = (total + BLOCK - 1) // BLOCK
    _place(order, mine, token, (tl.cumsum(blocks, axis=0) - blocks) * BLOCK, K)
    _blocks(order, owner, total, tokens * K, limit, E, BLOCK, LP)


@triton.jit
def moe_topk(
    logits, gain, chosen, counts, tokens, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr
):
    """Choices of BT tokens, and how many each expert got of them: counts [programs, E]."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    mine = _choose(logits, gain, chosen, token, tokens, E, K, KP, BT)
    tl.store(counts + tl.program_id(0) * E + tl.arange(0, E), tl.sum((mine >= 0).to(tl.int32), axis=0))


@triton.jit
def moe_sort(
    chosen, counts, order, owner, tokens, limit, parts, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BT: tl.constexpr, BLOCK: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """A program per part of `moe_topk` writes its choices in expert order; one more, padding and owners."""
    me, expert = tl.program_id(0), tl.arange(0, E)
    total, before = tl.zeros((E,), tl.int32), tl.zeros((E,), tl.int32)
    for start in range(0, parts, 64):
        part = start + tl.arange(0, 64)
        n = tl.load(counts + part[:, None] * E + expert[None, :], mask=(part < parts)[:, None], other=0)
        total += tl.sum(n, axis=0)
        before += tl.sum(tl.where((part < me)[:, None], n, 0), axis=0)
    if me < parts:
        token = me * BT + tl.arange(0, BT)
        mine = tl.full((BT, E), -1, tl.int32)
        for j in tl.static_range(K):
            at = tl.load(chosen + token * K + j, mask=token < tokens, other=-1)
            mine = tl.where(expert[None, :] == at[:, None], j, mine)
        blocks = (total + BLOCK - 1) // BLOCK
        first = tl.cumsum(blocks, axis=0) - blocks
        _place(order, mine, token, first * BLOCK + before, K)
    else:
        _blocks(order, owner, total, tokens * K, limit, E, BLOCK, LP)


@triton.jit
def _word(at):
    return tl.load(at).to(tl.uint32, bitcast=True)


@triton.jit
def _spread(q):
    """A word of 8 values to 4 pairs of bf16, as 2^-126 times the values: bits `moe.PLACES` in their own halves."""
    mask: tl.constexpr = 0x81C081C0
    p0 = ((q >> 4) | (q << 28)) & mask
    p1 = ((q >> 10) | (q << 22)) & mask
    p2 = ((q >> 14) | (q << 18)) & mask
    p3 = (q & 0x81808180) | ((q >> 8) & 0x00400040)
    return p0, p1, p2, p3


@triton.jit
def _halves(p, s, ASM: tl.constexpr):
    """Two bf16 in each of `p` times the scale: [..., 2]."""
    if ASM:
        y = tl.inline_asm_elementwise(MULTIPLY, "=r,r,r", [p, s], dtype=tl.uint32, is_pure=True, pack=1)
        low = (y & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (y >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:  # the same in float32
        low = (p << 16).to(tl.float32, bitcast=True) * s
        high = (p & 0xFFFF0000).to(tl.float32, bitcast=True) * s
    return tl.join(low, high)


@triton.jit
def _scales(w, ASM: tl.constexpr):
    """Four scales in each word of `w` to [..., 4]: bf16 in both halves, or float32."""
    even = (w << 7) & 0x7F807F80
    odd = (w >> 1) & 0x7F807F80
    if ASM:
        s0 = tl.inline_asm_elementwise(LOW_TWICE, "=r,r", [even], dtype=tl.uint32, is_pure=True, pack=1)
        s1 = tl.inline_asm_elementwise(LOW_TWICE, "=r,r", [odd], dtype=tl.uint32, is_pure=True, pack=1)
        s2 = tl.inline_asm_elementwise(HIGH_TWICE, "=r,r", [even], dtype=tl.uint32, is_pure=True, pack=1)
        s3 = tl.inline_asm_elementwise(HIGH_TWICE, "=r,r", [odd], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        s0 = (even << 16).to(tl.float32, bitcast=True)
        s1 = (odd << 16).to(tl.float32, bitcast=True)
        s2 = (even & 0xFFFF0000).to(tl.float32, bitcast=True)
        s3 = (odd & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(tl.join(s0, s2), tl.join(s1, s3)), (w.shape[0], 4))


@triton.jit
def _unpack(q, w, R: tl.constexpr, ASM: tl.constexpr):
    """R tiles: words `q` [R * 128, 4] with scales `w` [R * 128] to weights [R * 64, 64]; see `moe.tiles`."""
    p0, p1, p2, p3 = _spread(q)
    s = _scales(w, ASM)
    a = tl.join(_halves(p0, s, ASM), _halves(p1, s, ASM))
    b = tl.join(_halves(p2, s, ASM), _halves(p3, s, ASM))
    y = tl.reshape(tl.join(a, b), (R * 4, 8, 4, 2, 2, 2, 2, 2))  # warp, row, lane, row half, group, pair, half, step
    return tl.reshape(tl.permute(y, (0, 3, 1, 4, 7, 6, 2, 5)), (R * 64, 64))


@triton.jit
def _finish(
    acc, row, choices, gain, out, n, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Activation or gain of the sums [BN, BM], and their rows of `out`."""
    live = row < choices
    if GATED:  # rows alternate in eights
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BM)), (0, 2, 3, 1)))
        gate = tl.minimum(tl.reshape(gate, (BN // 2, BM)), LIMIT)
        up = tl.minimum(tl.maximum(tl.reshape(up, (BN // 2, BM)), -LIMIT), LIMIT)
        y = (up + 1) * gate * tl.sigmoid(ALPHA * gate)
        width = n // 2
        place = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    else:
        y = acc * tl.load(gain + row, mask=live, other=0.0)[None, :]
        width = n
        place = tl.program_id(0) * BN + tl.arange(0, BN)
    to = out + row.to(tl.int64)[:, None] * width + place[None, :]
    tl.store(to, tl.trans(y.to(out.dtype.element_ty)), mask=live[:, None] & (place < width)[None, :])


@triton.jit
def _rows(
    x, weight, scale, bias, order, gain, out, expert, n, choices, k: tl.constexpr, PER_ROW: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, ASM: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BM: tl.constexpr, MORE: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """BM rows from `order` on, and MORE after them, times BN rows of the weights of `expert`; see `moe_gemm`."""
    kind = x.dtype.element_ty
    depth = tl.arange(0, 64)
    row = tl.load(order + tl.arange(0, BM))
    live = row < choices
    a = x + (tl.where(live, row, 0) // PER_ROW).to(tl.int64)[:, None] * k + depth[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    if MORE:
        row2 = tl.load(order + BM + tl.arange(0, MORE))
        live2 = row2 < choices
        a2 = x + (tl.where(live2, row2, 0) // PER_ROW).to(tl.int64)[:, None] * k + depth[None, :]
        acc2 = tl.zeros((BN, MORE), tl.float32)
    column = tl.minimum(tl.program_id(0) * BN + tl.arange(0, BN), n - 1)  # beyond the last: computed and dropped
    tiles = k // 64
    R: tl.constexpr = BN // 64
    if PACKED:
        lane = tl.arange(0, R * 128)
        tile = tl.minimum(tl.program_id(0) * R + lane // 128, n // 64 - 1)
        first = (expert * (n // 64) + tile) * tiles
        w = weight + (first * 512 + lane % 128 * 4)[:, None] + tl.arange(0, 4)[None, :]
        s = scale + first * 32 + lane % 128 // 4
    else:
        w = weight + (expert * n + column)[:, None] * k + depth[None, :]
        s = scale
    for _ in range(tiles // STEP):
        for i in tl.static_range(STEP):
            rows = tl.load(a + i * 64, mask=live[:, None], other=0.0)
            if PACKED:
                y = _unpack(_word(w + i * 512), _word(s + i * 32), R, ASM)
            else:
                y = tl.load(w + i * 64)
            acc = tl.dot(y.to(kind), tl.trans(rows), acc)
            if MORE:
                rows2 = tl.load(a2 + i * 64, mask=live2[:, None], other=0.0)
                acc2 = tl.dot(y.to(kind), tl.trans(rows2), acc2)
        a += STEP * 64
        if MORE:
            a2 += STEP * 64
        w += STEP * (512 if PACKED else 64)
        s += STEP * 32
    b = tl.load(bias + expert * n + column).to(tl.float32)[:, None]
    _finish(acc + b, row, choices, gain, out, n, GATED, LIMIT, ALPHA, BM, BN)
    if MORE:
        _finish(acc2 + b, row2, choices, gain, out, n, GATED, LIMIT, ALPHA, MORE, BN)


@triton.jit(do_not_specialize=["choices"])
def moe_gemm(
    x, weight, scale, bias, order, owner, gain, out, n, choices, k: tl.constexpr, PER_ROW: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, ASM: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, FEWEST: tl.constexpr,
):  # fmt: skip
    """Block `program_id(1)` of rows times BN rows of its expert's weights, then activation (GATED) or gain.

    `n`: weight rows of an expert; the width of `out` is half of that if GATED. `k` is constant: with a loop that might
    not run, the assembler waits for every product before it starts the next.

    Padding is at the end of a block, and a block multiplies whole parts of it alone: halves, or quarters if those
    have at least FEWEST rows. Its weights are unpacked once.
    """
    expert = tl.load(owner + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    order += tl.program_id(1) * BM
    HALF: tl.constexpr = BM // 2
    FOURTH: tl.constexpr = BM // 4
    if HALF < FEWEST:
        _rows(x, weight, scale, bias, order, gain, out, expert, n, choices, k, PER_ROW, GATED, PACKED, ASM, LIMIT,
              ALPHA, BM, 0, BN, STEP)  # fmt: skip
    elif FOURTH < FEWEST:
        if tl.load(order + HALF) < choices:
            _rows(x, weight, scale, bias, order, gain, out, expert, n, choices, k, PER_ROW, GATED, PACKED, ASM, LIMIT,
                  ALPHA, BM, 0, BN, STEP)  # fmt: skip
        else:
            _rows(x, weight, scale, bias, order, gain, out, expert, n, choices, k, PER_ROW, GATED, PACKED, ASM, LIMIT,
                  ALPHA, HALF, 0, BN, STEP)  # fmt: skip
    else:
        if tl.load(order + HALF) < choices:
            if tl.load(order + HALF + FOURTH) < choices:
                _rows(x, weight, scale, bias, order, gain, out, expert, n, choices, k, PER_ROW, GATED, PACKED, ASM,
                      LIMIT, ALPHA, BM, 0, BN, STEP)  # fmt: skip
            else:
                _rows(x, weight, scale, bias, order, gain, out, expert, n, choices, k, PER_ROW, GATED, PACKED, ASM,
                      LIMIT, ALPHA, HALF, FOURTH, BN, STEP)  # fmt: skip
        else:
            if tl.load(order + FOURTH) < choices:
                _rows(x, weight, scale, bias, order, gain, out, expert, n, choices, k, PER_ROW, GATED, PACKED, ASM,
                      LIMIT, ALPHA, HALF, 0, BN, STEP)  # fmt: skip
            else:
                _rows(x, weight, scale, bias, order, gain, out, expert, n, choices, k, PER_ROW, GATED, PACKED, ASM,
                      LIMIT, ALPHA, FOURTH, 0, BN, STEP)  # fmt: skip


def route(logits: torch.Tensor, k: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits.contiguous()
    tokens, experts = logits.shape
    limit = block_limit(tokens * k, experts, block)
    gain = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    chosen, order, owner = (
        torch.empty(shape, dtype=torch.int32, device=logits.device) for shape in ((tokens, k), limit * block, limit)
    )
    sizes = {"E": experts, "K": k, "KP": triton.next_power_of_2(k)}
    blocks = {"BLOCK": block, "LP": min(64, max(16, triton.next_power_of_2(limit)))}
    if tokens <= ONE_PROGRAM:
        few = max(16, triton.next_power_of_2(tokens))
        moe_route_few[(1,)](
            logits, gain, chosen, order, owner, tokens, limit, **sizes, **blocks, BT=few, num_warps=4 if few < 64 else 8
        )
        return gain, chosen, order, owner
    few = 16 if tokens <= 1024 else 64
    parts = triton.cdiv(tokens, few)
    counts = torch.empty(parts, experts, dtype=torch.int32, device=logits.device)
    moe_topk[(parts,)](logits, gain, chosen, counts, tokens, **sizes, BT=few, num_warps=4)
    moe_sort[(parts + 1,)](
        chosen, counts, order, owner, tokens, limit, parts, **sizes, **blocks, BT=few, num_warps=4 if few < 64 else 8
    )  # fmt: skip
    return gain, chosen, order, owner


def grouped_gemm(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor, order: torch.Tensor,
    owner: torch.Tensor, gain: torch.Tensor | None, per_row: int, variant: Variant | None = None,
) -> torch.Tensor:  # fmt: skip
    """`gain` None: the first layer with its activation; else the second. `variant` None: the chosen one."""
    x = x.contiguous()
    gated, rows = gain is None, len(order) // len(owner)
    choices, k, n = x.shape[0] * per_row, x.shape[1], bias.shape[1]
    small = len(owner) * n < 132 * 4 * 128
    v = variant or (SMALL if small and rows == 16 else CHOSEN[rows])[0 if gated else 1]
    step = v.step if k // 64 % v.step == 0 else 1
    out = torch.empty(choices, n // 2 if gated else n, dtype=x.dtype, device=x.device)
    moe_gemm[(triton.cdiv(n, v.columns), len(owner))](
        x, weight, weight if scale is None else scale, bias, order, owner, bias if gain is None else gain, out, n,
        choices, k=k, PER_ROW=per_row, GATED=gated, PACKED=scale is not None, ASM=x.is_cuda, LIMIT=LIMIT, ALPHA=ALPHA,
        BM=rows, BN=v.columns, STEP=step, FEWEST=v.fewest, num_warps=v.warps, num_stages=v.stages, maxnreg=v.registers,
    )  # fmt: skip
    return out
