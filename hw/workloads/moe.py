"""Mixture-of-experts operators: routing without the host, and a grouped GEMM over MXFP4 or bf16 experts.

Every operator has two bodies: plain PyTorch on the CPU, which says what it means and serves the tests, and
Triton on the GPU. As PyTorch operators they keep their schema: what they read and write is what it says.

Order of rows: choice c = token * k + slot. `moe_route` lays the choices out by expert, each expert padded to
whole blocks, so that a block of rows multiplies with one expert. The number of blocks has a static upper limit;
blocks beyond the last one used carry expert -1.

MXFP4: values of 4 bits (e2m1) that share a scale 2^(s - 127) per 32, 1 <= s <= 128. Both lie in memory as the tensor
cores take them, in tiles of 64 rows and 64 columns ([E, N / 64, K / 64, ...]): see `tiles`. The rows of a first layer
alternate: 8 rows of the gate, then the 8 rows of `up` that belong to them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LIMIT, ALPHA = 7.0, 1.702  # of the gated activation


#: Where bits (sign, exponent high, exponent low, mantissa) of the four values lie in each half of a word, counted from
#: its lowest bit and around its end: a rotation and a mask make a pair of bf16 of three of them, two make the fourth.
PLACES = ((19, 12, 11, 10), (25, 18, 17, 16), (29, 22, 21, 20), (15, 8, 7, 14))
BIAS = 126  # of the stored scales: the values come out of their bits times 2^-126

# Axes of a tile: 64 rows are (warp 4, half 2, lane row 8), 64 columns (group 2, step 2, half 2, lane column 4, pair 2).
# A word of 8 values belongs to a lane (warp, lane row, lane column), a row half and a group of 32 columns.
_ROWS, _COLUMNS = (4, 2, 8), (2, 2, 2, 4, 2)


def tiles(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0-15 [..., N, K] and scales [..., N, K / 32] to int32 words [..., N / 64, K / 64, 128, 4] and
    [..., N / 64, K / 64, 32] (four scales each). N and K are multiples of 64."""
    lead = codes.dim() - 2
    c = codes.long().unflatten(-2, (-1, *_ROWS)).unflatten(-1, (-1, *_COLUMNS))
    # N / 64, warp, half, row | K / 64, group, step, half, column, pair
    order = (0, 4, 1, 3, 8, 2, 5, 6, 7, 9)
    c = c.permute(*range(lead), *(lead + i for i in order)).flatten(-3, -2)  # ..., value 4, pair 2
    words = torch.zeros(c.shape[:-2], dtype=torch.int64, device=codes.device)
    for value, places in enumerate(PLACES):
        for pair in (0, 1):
            for bit, place in zip((3, 2, 1, 0), places, strict=True):
                words |= (c[..., value, pair] >> bit & 1) << (place + 16 * pair) % 32
    t = (scale.long() + BIAS).unflatten(-2, (-1, *_ROWS)).unflatten(-1, (-1, 2))
    t = t.permute(*range(lead), *(lead + i for i in (0, 4, 1, 3, 2, 5))).flatten(-2)  # ..., warp, row, (half, group)
    both = words.flatten(-5, -3).flatten(-2), (t << torch.arange(0, 32, 8, device=t.device)).sum(-1).flatten(-2)
    return both[0].to(torch.int32), both[1].to(torch.int32)


def dequantise(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Tiles [..., N / 64, K / 64, 128, 4] with their scales [..., 32] to float32 [..., N, K]."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=packed.device)
    words, device = packed.long() & 0xFFFFFFFF, packed.device
    place = torch.tensor(PLACES, device=device)[:, None, :] + torch.tensor((0, 16), device=device)[:, None]  # 4, 2, 4
    bits = words[..., None, None, None] >> place % 32 & 1
    codes = (bits << torch.tensor((3, 2, 1, 0), device=device)).sum(-1)
    byte = (scale.long() & 0xFFFFFFFF)[..., None] >> torch.arange(0, 32, 8, device=device) & 255
    factor = torch.exp2(byte.float() - BIAS - 127).unflatten(-1, (2, 2)).unflatten(-3, (4, 8, 1))
    y = table[codes].unflatten(-3, (2, 2)).unflatten(-5, (4, 8, 4)) * factor[..., None, None]
    y = y.unflatten(-2, (2, 2))  # N / 64, K / 64, warp, row, column, half, group, step, half, pair
    lead = y.dim() - 10
    y = y.permute(*range(lead), *(lead + i for i in (0, 2, 5, 3, 1, 6, 7, 8, 4, 9)))
    return y.flatten(-6).flatten(-5, -2)


def quantise(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest MXFP4 of [..., N, K] as tiles and their scales; the inverse of `dequantise` up to rounding."""
    groups = w.float().unflatten(-1, (-1, 32))
    scale = (torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=2.0**-100))) - 2 + 127).clamp(1, 128)
    scaled = groups * torch.exp2(127 - scale)[..., None]
    index = (scaled.abs()[..., None] - torch.tensor(E2M1, device=w.device)).abs().argmin(-1)
    return tiles((index + 8 * (scaled < 0)).flatten(-2), scale)


def block_rows(choices: int, experts: int) -> int:
    """Rows of a block: about what an expert gets, as far as larger blocks are faster on an H200."""
    each = choices // experts
    return 16 if each <= 8 else 32 if each <= 22 else 64 if each <= 80 else 128 if each <= 300 else 256


def block_limit(choices: int, experts: int, block: int) -> int:
    """Most blocks that any routing can need."""
    return choices // block + min(choices, experts)


@torch.library.custom_op("tesserasim::moe_route", mutates_args=(), device_types="cpu")
def moe_route(
    logits: torch.Tensor, k: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose k of E experts per token from `logits` [T, E].

    Returns the gains [T, k] (softmax over the chosen), the chosen experts [T, k], the choices in expert order
    [blocks * block] (T * k where a row is padding), and the expert of every block, -1 if unused.
    """
    (tokens, experts), device = logits.shape, logits.device
    value, chosen = logits.float().topk(k, dim=-1)
    limit = block_limit(tokens * k, experts, block)
    order = torch.full((limit * block,), tokens * k, dtype=torch.int32, device=device)
    owner = torch.full((limit,), -1, dtype=torch.int32, device=device)
    at = 0
    for e in range(experts):
        mine = (chosen.flatten() == e).nonzero().flatten().int()
        order[at * block : at * block + len(mine)] = mine
        blocks = -(-len(mine) // block)
        owner[at : at + blocks] = e
        at += blocks
    return value.softmax(-1), chosen.int(), order, owner


@moe_route.register_fake
def _(logits: torch.Tensor, k: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    limit = block_limit(tokens * k, experts, block)
    new = logits.new_empty
    return (
        new((tokens, k), dtype=torch.float32), new((tokens, k), dtype=torch.int32),
        new(limit * block, dtype=torch.int32), new(limit, dtype=torch.int32),
    )  # fmt: skip


@moe_route.register_kernel("cuda")
def _(logits: torch.Tensor, k: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from hw.workloads.triton_moe import route

    return route(logits, k, block)


def _expert(weight: torch.Tensor, scale: torch.Tensor | None, e: int, dtype: torch.dtype) -> torch.Tensor:
    return (weight[e] if scale is None else dequantise(weight[e], scale[e])).to(dtype)


@torch.library.custom_op("tesserasim::moe_up", mutates_args=(), device_types="cpu")
def moe_up(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor, order: torch.Tensor,
    owner: torch.Tensor, k: int,
) -> torch.Tensor:  # fmt: skip
    """First expert layer and its activation: x [T, D] to [T * k, F], a row per choice.

    `weight` [E, 2 F, D] (bf16, or tiles with `scale`) and `bias` [E, 2 F]: rows of gate and up alternate in eights.
    """
    choices, block = x.shape[0] * k, len(order) // len(owner)
    out = x.new_empty(choices, bias.shape[1] // 2)
    for e in owner.unique().tolist():
        rows = order.view(-1, block)[owner == e].flatten().long()
        rows = rows[rows < choices]
        if e < 0 or not len(rows):
            continue
        y = F.linear(x[rows // k], _expert(weight, scale, e, x.dtype), bias[e].to(x.dtype)).float()
        gate, up = (part.flatten(-2) for part in y.unflatten(-1, (-1, 2, 8)).unbind(-2))
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        out[rows] = ((up + 1) * gate * torch.sigmoid(ALPHA * gate)).to(x.dtype)
    return out


@moe_up.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor, order: torch.Tensor,
    owner: torch.Tensor, k: int,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty(x.shape[0] * k, bias.shape[1] // 2)


@moe_up.register_kernel("cuda")
def _(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor, order: torch.Tensor,
    owner: torch.Tensor, k: int,
) -> torch.Tensor:  # fmt: skip
    from hw.workloads.triton_moe import grouped_gemm

    return grouped_gemm(x, weight, scale, bias, order, owner, None, k)


@torch.library.custom_op("tesserasim::moe_down", mutates_args=(), device_types="cpu")
def moe_down(
    h: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor, order: torch.Tensor,
    owner: torch.Tensor, gain: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Second expert layer times the router's gain: h [T * k, F] to [T * k, D]; `weight` [E, D, F]."""
    block = len(order) // len(owner)
    out = h.new_empty(len(h), bias.shape[1])
    for e in owner.unique().tolist():
        rows = order.view(-1, block)[owner == e].flatten().long()
        rows = rows[rows < len(h)]
        if e < 0 or not len(rows):
            continue
        y = F.linear(h[rows], _expert(weight, scale, e, h.dtype), bias[e].to(h.dtype)).float()
        out[rows] = (y * gain.flatten()[rows, None]).to(h.dtype)
    return out


@moe_down.register_fake
def _(
    h: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor, order: torch.Tensor,
    owner: torch.Tensor, gain: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    return h.new_empty(len(h), bias.shape[1])


@moe_down.register_kernel("cuda")
def _(
    h: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor, order: torch.Tensor,
    owner: torch.Tensor, gain: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    from hw.workloads.triton_moe import grouped_gemm

    return grouped_gemm(h, weight, scale, bias, order, owner, gain, 1)
