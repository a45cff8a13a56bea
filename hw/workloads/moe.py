"""Mixture-of-experts operators: routing without the host, and a grouped GEMM over MXFP4 or bf16 experts.

Every operator has two bodies: plain PyTorch on the CPU, which says what it means and serves the tests, and
Triton on the GPU. As PyTorch operators they keep their schema: what they read and write is what it says.

Order of rows: choice c = token * k + slot. `moe_route` lays the choices out by expert, each expert padded to
whole blocks, so that a block of rows multiplies with one expert. The number of blocks has a static upper limit;
blocks beyond the last one used carry expert -1.

MXFP4: values of 4 bits (e2m1) that share a scale 2^(s - 127) per 32. Byte j of every 32 holds value j of a group
of 64 in its low half and value j + 32 in its high half. Scales stay within 1 <= s <= 128.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LIMIT, ALPHA = 7.0, 1.702  # of the gated activation


def dequantise(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """MXFP4 [..., K / 2] with scales [..., K / 32] to float32 [..., K]."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=packed.device)
    groups = packed.unflatten(-1, (-1, 32)).long()
    values = torch.stack((table[groups & 15], table[groups >> 4]), dim=-2).flatten(-3, -2)  # [..., K / 32, 32]
    return (values * torch.exp2(scale.float() - 127)[..., None]).flatten(-2)


def quantise(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest MXFP4 of [..., K]: packed values and scales; the inverse of `dequantise` up to rounding."""
    groups = w.float().unflatten(-1, (-1, 32))
    scale = (torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=2.0**-100))) - 2 + 127).clamp(1, 128)
    scaled = groups * torch.exp2(127 - scale)[..., None]
    index = (scaled.abs()[..., None] - torch.tensor(E2M1, device=w.device)).abs().argmin(-1)
    nibble = (index + 8 * (scaled < 0)).to(torch.uint8).unflatten(-2, (-1, 2))
    return (nibble[..., 0, :] | nibble[..., 1, :] << 4).flatten(-2), scale.to(torch.uint8)


def block_rows(choices: int, experts: int) -> int:
    """Rows of a block: about what an expert gets."""
    each = choices // experts
    return 16 if each <= 16 else 32 if each <= 32 else 64 if each <= 128 else 128


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

    `weight` [E, 2 F, D] (bf16, or packed with `scale`), gate rows before up rows; `bias` [E, 2 F].
    """
    choices, block = x.shape[0] * k, len(order) // len(owner)
    out = x.new_empty(choices, bias.shape[1] // 2)
    for e in owner.unique().tolist():
        rows = order.view(-1, block)[owner == e].flatten().long()
        rows = rows[rows < choices]
        if e < 0 or not len(rows):
            continue
        y = F.linear(x[rows // k], _expert(weight, scale, e, x.dtype), bias[e].to(x.dtype)).float()
        gate, up = y.chunk(2, dim=-1)
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
