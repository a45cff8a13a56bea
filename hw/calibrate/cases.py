"""What runs for a shape: operands, one launch of the operation, and which of its bytes a model would find cold.

As in the shipped tables an operation is whole: an FP8 GEMM quantises its activations, a mixture of experts routes,
multiplies twice and adds up the choices. What the shipped rows ran came from SGLang 0.5.10; `source` says what runs
here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hw.calibrate.shapes import Shape
from hw.errors import HardwareError

Operands = Any
E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class Case:
    """`turn`: how many operands of `make` take turns in the shipped tables; `cold`: whether a model would find them
    in DRAM. Bytes: `turn_bytes` a launch reads of an operand, `held_bytes` it occupies, `bytes` is everything else."""

    source: str
    make: Callable[[], Operands]
    launch: Callable[[Operands], object]
    turn: int
    cold: bool
    turn_bytes: int
    held_bytes: int
    bytes: int


class NotHere(HardwareError):
    """This GPU, or this installation, has no such operation."""


def build(shape: Shape, device: str = "cuda") -> Case:
    """The case of a shape. NotHere if there is no such operation, torch.OutOfMemoryError if its operands do not fit."""
    return _BUILD[shape.kind](shape, device)


def _capability(device: str) -> tuple[int, int]:
    return torch.cuda.get_device_capability() if device == "cuda" else (0, 0)


def _random(*sizes: int, device: str) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16, device=device)


def _gemm(shape: Shape, device: str) -> Case:
    m, n, k = (shape.sizes[c] for c in ("m", "n", "k"))
    x = _random(m, k, device=device)
    if shape.dtype == "bfloat16":
        return Case(
            "torch linear", lambda: _random(n, k, device=device).mul_(k**-0.5), lambda w: F.linear(x, w), 6, True,
            2 * n * k, 2 * n * k, 2 * m * (n + k),
        )  # fmt: skip
    if device == "cuda" and _capability(device) < (8, 9):
        raise NotHere("no FP8 tensor cores")
    from hw.calibrate.kernels import scale_matrix

    one = torch.ones(1, device=device)

    def weight() -> torch.Tensor:
        return _random(n, k, device=device).to(torch.float8_e4m3fn)

    def launch(w: torch.Tensor) -> torch.Tensor:
        q = scale_matrix(x, one, torch.float8_e4m3fn)
        return torch._scaled_mm(q, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    source = "triton quantise, torch._scaled_mm per tensor"
    return Case(source, weight, launch, 6, True, n * k, n * k, m * (3 * k + 2 * n))


def _attention(shape: Shape, device: str) -> Case:
    b, q, kv, h, g, d = (shape.sizes[c] for c in ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim"))
    query = _random(b, h, q, d, device=device)
    prefill = shape.kind == "attention_prefill"

    def cache() -> tuple[torch.Tensor, torch.Tensor]:
        return _random(b, g, kv, d, device=device), _random(b, g, kv, d, device=device)

    def launch(x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, *x, is_causal=prefill, enable_gqa=h != g)

    nbytes = 4 * b * g * kv * d
    return Case("torch SDPA", cache, launch, 1, not prefill, nbytes, nbytes, 4 * b * h * q * d)


def balanced_logits(tokens: int, experts: int, k: int, device: str) -> torch.Tensor:
    """Logits [tokens, experts] under which every token's k choices follow on those of the token before."""
    choice = (torch.arange(tokens, device=device)[:, None] * k + torch.arange(k, device=device)) % experts
    logits = torch.zeros(tokens, experts, dtype=torch.bfloat16, device=device)
    return logits.scatter_(1, choice, 4.0)


def _moe(shape: Shape, device: str) -> Case:
    from hw.workloads.moe import block_rows, moe_down, moe_route, moe_up

    t, hidden, full, k, experts, tp = (
        shape.sizes[c] for c in ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size")
    )
    inter, block = full // tp, block_rows(t * k, experts)
    x, logits = _random(t, hidden, device=device), balanced_logits(t, experts, k, device)
    bias_up, bias_down = torch.zeros(experts, 2 * inter, device=device), torch.zeros(experts, hidden, device=device)
    packed = shape.dtype == "w4a16_mxfp4"

    def weight(n: int, depth: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not packed:
            return _random(experts, n, depth, device=device).mul_(depth**-0.5), None
        tiles = (experts, n // 64, depth // 64)
        words = torch.randint(-(1 << 31), 1 << 31, (*tiles, 128, 4), dtype=torch.int32, device=device)
        return words, torch.full((*tiles, 32), 0xF7F7F7F7 - (1 << 32), dtype=torch.int32, device=device)

    def both() -> Operands:
        return *weight(2 * inter, hidden), *weight(hidden, inter)

    def launch(w: Operands) -> torch.Tensor:
        gain, _, order, owner = moe_route(logits, k, block)
        h = moe_up(x, w[0], w[1], bias_up, order, owner, k)
        y = moe_down(h, w[2], w[3], bias_down, order, owner, gain)
        return y.view(t, k, hidden).sum(1)

    expert = int(3 * hidden * inter * (0.53125 if packed else 2))
    rest = 2 * t * (2 * hidden + k * (inter + hidden)) + 4 * experts * (2 * inter + hidden)
    return Case(
        "triton route and grouped GEMM, torch sum", both, launch, 1, True, min(t * k, experts) * expert,
        experts * expert, rest,
    )  # fmt: skip


def _elementwise(shape: Shape, device: str) -> Case:
    from hw.calibrate import kernels

    m, k = shape.sizes["m"], shape.sizes["k"]
    eight = torch.int8 if device == "cuda" and _capability(device) < (8, 9) else torch.float8_e4m3fn
    one = torch.ones(1, device=device)
    weight, half = _random(k, device=device), 32 if k % 128 else 64
    angle = torch.rand(m, half, device=device)
    cos, sin = angle.cos(), angle.sin()
    makes: dict[str, tuple[Callable[[], Operands], Callable[[Operands], object], int]] = {
        "scale_matrix": (lambda: _random(m, k, device=device), lambda x: kernels.scale_matrix(x, one, eight), 1),
        "rmsnorm": (lambda: _random(m, k, device=device), lambda x: kernels.rmsnorm(x, weight), 1),
        "silu_mul": (lambda: _random(m, 2 * k, device=device), kernels.silu_mul, 2),
        "add": (
            lambda: (_random(m, k, device=device), _random(m, k, device=device)), lambda x: kernels.add(*x), 2,
        ),
        "rope": (lambda: _random(m, k, device=device), lambda x: kernels.rope(x, cos, sin), 1),
    }  # fmt: skip
    make, launch, inputs = makes[shape.op]
    return Case(f"triton {shape.op}", make, launch, 1, False, 2 * m * k * inputs, 2 * m * k * inputs, 2 * m * k)


_BUILD: dict[str, Callable[[Shape, str], Case]] = {
    "gemm": _gemm,
    "attention_prefill": _attention,
    "attention_decode": _attention,
    "moe": _moe,
    "elementwise": _elementwise,
}
