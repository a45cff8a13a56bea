"""Operators of a Mamba-2 layer: causal convolution and selective scan, on state kept between calls, and gated norm.

Every operator has two bodies: plain PyTorch on the CPU, which says what it means and serves the tests, and
Triton on the GPU (`triton_ssm`). A call over one token is a decode step, over more a prompt or a chunk of one.

What is kept: the last inputs of the convolution ("tail", in the model's type) and the SSM state in float32, as the
published implementation keeps it: it is multiplied by a decay close to 1 at every token, and bf16 would lose the
small additions. Operators named `first` start from nothing and only write that state; the others update it in place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tail: torch.Tensor, past: bool) -> torch.Tensor:
    window = torch.cat((tail if past else torch.zeros_like(tail), x), dim=1)
    y = sum((window[:, i : i + x.shape[1]].float() * w.float() for i, w in enumerate(weight)), bias.float())
    tail.copy_(window[:, -tail.shape[1] :].clone())
    return F.silu(y).to(x.dtype)


def _scan(
    x: torch.Tensor, dt: torch.Tensor, dt_bias: torch.Tensor, a_log: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    skip: torch.Tensor, state: torch.Tensor, past: bool,
) -> torch.Tensor:  # fmt: skip
    each = x.shape[2] // b.shape[2]
    step = F.softplus(dt.float() + dt_bias.float())  # [B, T, H]
    decay = torch.exp(step * -torch.exp(a_log.float()))
    h = state.clone() if past else torch.zeros_like(state)
    rows = []
    for t in range(x.shape[1]):
        bt, ct = (v[:, t].float().repeat_interleave(each, dim=1)[:, :, None] for v in (b, c))  # [B, H, 1, N]
        xt = x[:, t].float()
        h = h * decay[:, t, :, None, None] + (step[:, t, :, None] * xt)[..., None] * bt
        rows.append((h * ct).sum(-1) + skip.float()[:, None] * xt)
    state.copy_(h)
    return torch.stack(rows, dim=1).flatten(2).to(x.dtype)


@torch.library.custom_op("tesserasim::ssm_conv", mutates_args=("tail",), device_types="cpu")
def conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """silu(causal convolution): x [B, T, C] to [B, T, C], on the inputs before it in `tail` [B, W - 1, C].

    `weight` [W, C], oldest input first; `bias` [C]. `tail` becomes the last inputs, oldest first. Rows of x may
    lie apart.
    """
    return _conv(x, weight, bias, tail, True)


@torch.library.custom_op("tesserasim::ssm_scan", mutates_args=("state",), device_types="cpu")
def scan(
    x: torch.Tensor, dt: torch.Tensor, dt_bias: torch.Tensor, a_log: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    skip: torch.Tensor, state: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Selective scan: h[t] = exp(d a) h[t-1] + d x[t] b[t]^T, y[t] = h[t] c[t] + skip x[t].

    d = softplus(dt + dt_bias), a = -exp(a_log). x [B, T, H, P]; dt [B, T, H]; dt_bias, a_log, skip [H];
    b, c [B, T, G, N], each shared by H / G heads. `state` [B, H, P, N] in float32, the h before x, becomes the
    last h. Returns y [B, T, H P]. Rows (tokens) of x, dt, b and c may lie apart.
    """
    return _scan(x, dt, dt_bias, a_log, b, c, skip, state, True)


@torch.library.custom_op("tesserasim::ssm_gated_rms_norm", mutates_args=(), device_types="cpu")
def gated_norm(y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """RMS norm of y silu(z) within each of `groups` groups of channels; y, z [B, T, C] to [B, T, C].

    An operator, since PyTorch's compiler takes what operators return for unaligned and would read it in 2-byte steps.
    """
    h = (y.float() * F.silu(z.float())).unflatten(-1, (groups, -1))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return h.flatten(-2).to(z.dtype) * weight


@gated_norm.register_fake
def _(y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    return y.new_empty(y.shape)


@gated_norm.register_kernel("cuda")
def _(y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    from hw.workloads.triton_ssm import gate

    return gate(y, z, weight, groups, eps)


@conv.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@scan.register_fake
def _(
    x: torch.Tensor, dt: torch.Tensor, dt_bias: torch.Tensor, a_log: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    skip: torch.Tensor, state: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty(*x.shape[:2], x.shape[2] * x.shape[3])


@conv.register_kernel("cuda")
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    from hw.workloads.triton_ssm import convolve

    return convolve(x, weight, bias, tail, True)


@scan.register_kernel("cuda")
def _(
    x: torch.Tensor, dt: torch.Tensor, dt_bias: torch.Tensor, a_log: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    skip: torch.Tensor, state: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    from hw.workloads.triton_ssm import prompt, step

    if x.shape[1] == 1:
        return step(x, dt, dt_bias, a_log, b, c, skip, state)
    return prompt(x, dt, dt_bias, a_log, b, c, skip, state, True)


# The same from nothing. What they keep is an output alone, which only a schema by hand can say (`*, Tensor(a!)`).
_INPUTS = "Tensor x, Tensor dt, Tensor dt_bias, Tensor a_log, Tensor b, Tensor c, Tensor skip"
torch.library.define(
    "tesserasim::ssm_conv_first", "(Tensor x, Tensor weight, Tensor bias, *, Tensor(a!) tail) -> Tensor"
)
torch.library.define("tesserasim::ssm_scan_first", f"({_INPUTS}, *, Tensor(a!) state) -> Tensor")


@torch.library.impl("tesserasim::ssm_conv_first", "cpu")
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, tail: torch.Tensor) -> torch.Tensor:
    return _conv(x, weight, bias, tail, False)


@torch.library.impl("tesserasim::ssm_conv_first", "cuda")
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, tail: torch.Tensor) -> torch.Tensor:
    from hw.workloads.triton_ssm import convolve

    return convolve(x, weight, bias, tail, False)


@torch.library.register_fake("tesserasim::ssm_conv_first")
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, tail: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.impl("tesserasim::ssm_scan_first", "cpu")
def _(
    x: torch.Tensor, dt: torch.Tensor, dt_bias: torch.Tensor, a_log: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    skip: torch.Tensor, *, state: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    return _scan(x, dt, dt_bias, a_log, b, c, skip, state, False)


@torch.library.impl("tesserasim::ssm_scan_first", "cuda")
def _(
    x: torch.Tensor, dt: torch.Tensor, dt_bias: torch.Tensor, a_log: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    skip: torch.Tensor, *, state: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    from hw.workloads.triton_ssm import prompt

    return prompt(x, dt, dt_bias, a_log, b, c, skip, state, False)


@torch.library.register_fake("tesserasim::ssm_scan_first")
def _(x: torch.Tensor, *_rest: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:2], x.shape[2] * x.shape[3])


def conv_first(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """As `conv`, with zeros before x; `tail` is only written."""
    result: torch.Tensor = torch.ops.tesserasim.ssm_conv_first(x, weight, bias, tail=tail)
    return result


def scan_first(*inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """As `scan`, from zero; `state` is only written."""
    result: torch.Tensor = torch.ops.tesserasim.ssm_scan_first(*inputs, state=state)
    return result
