"""Mamba-Codestral-7B (Mamba-2) as a serving engine runs it: a chunked SSD scan for prompts, the recurrence for
decode steps, convolution and SSM state updated in place.

Shapes: mistralai/Mamba-Codestral-7B-v0.1 (64 layers, hidden 4096, inner width 8192 = 128 heads of 64, state 128,
8 groups, convolution over 4 tokens, chunks of 256, vocabulary 32768). Weights are random. The state of a
sequence does not grow with its context: the contexts of the decode grid are labels that place it in a mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hw.workloads.base import NamedTensor, UnitSpec, Workload, decode_grid, functions, prefill_grid, under
from hw.workloads.language import embed, head, rms_norm


@dataclass(frozen=True)
class Mamba2Config:
    layers: int = 64
    hidden: int = 4096
    heads: int = 128
    head_dim: int = 64
    state: int = 128
    groups: int = 8
    conv: int = 4
    chunk: int = 256
    vocab: int = 32768
    eps: float = 1e-5

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels the convolution mixes over time: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter of the model."""
        layer = {
            "norm": (self.hidden,), "in_proj": (self.inner + self.conv_width + self.heads, self.hidden),
            "conv": (self.conv_width, self.conv), "conv_bias": (self.conv_width,), "dt_bias": (self.heads,),
            "a_log": (self.heads,), "skip": (self.heads,), "gate_norm": (self.inner,),
            "out_proj": (self.hidden, self.inner),
        }  # fmt: skip
        layers = {f"layers.{i}.{k}": v for i in range(self.layers) for k, v in layer.items()}
        ends = {"norm": (self.hidden,), "lm_head": (self.vocab, self.hidden)}
        return {"embed": (self.vocab, self.hidden), **layers, **ends}


W = dict[str, torch.Tensor]


def _gated_norm(y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, cfg: Mamba2Config) -> torch.Tensor:
    """RMS norm within each group, after the gate."""
    h = (y.float() * F.silu(z.float())).unflatten(-1, (cfg.groups, -1))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + cfg.eps)
    return h.flatten(-2).to(z.dtype) * weight


def scan(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor | None,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Chunked SSD scan of h[t] = exp(dt a) h[t-1] + dt x[t] b[t]^T, y[t] = h[t] c[t].

    x [B, T, H, P]; dt [B, T, H] and a [H] in float32; b, c [B, T, G, N]; state [B, H, P, N] before the first
    token, None for zero. Returns y [B, T, H, P] and the last state. Within a chunk the scan is a masked product
    as in attention; between chunks it is a sum over earlier chunks. All cumulative sums are products with a
    triangle of ones.
    """
    (batch, t, h, p), g, n = x.shape, b.shape[2], b.shape[3]
    pad = -t % chunk
    if pad:
        x, b, c = (F.pad(v, (0, 0, 0, 0, 0, pad)) for v in (x, b, c))
        dt = F.pad(dt, (0, 0, 0, pad))
    k, r = (t + pad) // chunk, h // g
    x = x.view(batch, k, chunk, g, r, p)
    b, c = (v.view(batch, k, chunk, g, n).transpose(2, 3) for v in (b, c))  # [B, K, G, L, N]
    dt = dt.view(batch, k, chunk, h).transpose(2, 3)  # [B, K, H, L]
    ones = torch.ones(chunk, chunk, dtype=torch.float32, device=x.device)
    total = (dt * a[:, None]) @ ones.triu()  # log decay from the chunk's start through token l
    last = total[..., -1]  # [B, K, H]
    keep = torch.exp((total[..., :, None] - total[..., None, :]).masked_fill(ones.triu(1) > 0, float("-inf")))
    mix = (c @ b.transpose(-1, -2)).unsqueeze(3) * (keep * dt[..., None, :]).unflatten(2, (g, r))
    within = mix.to(x.dtype) @ x.permute(0, 1, 3, 4, 2, 5)  # [B, K, G, R, L, P]
    # What every chunk adds to the state, decayed to its end: [B, K, H, P, N].
    fade = (dt * torch.exp(last[..., None] - total)).view(batch, k, g, r, chunk)
    faded = (x.permute(0, 1, 3, 4, 5, 2) * fade[..., None, :]).to(x.dtype)  # [B, K, G, R, P, L]
    added = (faded.flatten(3, 4) @ b).view(batch, k, h, p * n).float()
    # State at each chunk's start and at the end: the sum of earlier additions, each decayed since.
    steps = torch.ones(k + 1, k, dtype=torch.float32, device=x.device)
    gone = steps.tril(-1) @ last  # [B, K + 1, H], log decay through chunk j - 1
    since = (gone.transpose(1, 2)[..., :, None] - gone.transpose(1, 2)[..., None, 1:]).masked_fill(
        steps.triu() > 0, float("-inf")
    )
    states = torch.exp(since) @ added.transpose(1, 2)  # [B, H, K + 1, P N]
    if state is not None:
        states = states + torch.exp(gone.transpose(1, 2))[..., None] * state.float().flatten(2)[:, :, None]
    before = states[:, :, :-1].view(batch, g, r, k, p, n).permute(0, 3, 1, 2, 4, 5).to(x.dtype)
    across = c @ before.flatten(3, 4).transpose(-1, -2)  # [B, K, G, L, R P]
    across = across.unflatten(-1, (r, p)) * torch.exp(total).view(batch, k, g, r, chunk).transpose(3, 4)[..., None]
    y = within.permute(0, 1, 4, 2, 3, 5) + across.permute(0, 1, 3, 2, 4, 5)
    return y.reshape(batch, k * chunk, h, p)[:, :t].to(x.dtype), states[:, :, -1].view(batch, h, p, n)


def _split(x: torch.Tensor, w: W, cfg: Mamba2Config) -> tuple[torch.Tensor, ...]:
    """Gate, convolution input and time steps of a layer."""
    y = F.linear(rms_norm(x, w["norm"], cfg.eps), w["in_proj"])
    z, mixed, dt = y.split([cfg.inner, cfg.conv_width, cfg.heads], dim=-1)
    return z, mixed, F.softplus(dt.float() + w["dt_bias"].float())


def _finish(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, w: W, cfg: Mamba2Config) -> torch.Tensor:
    return x + F.linear(_gated_norm(y, z, w["gate_norm"], cfg), w["out_proj"])


def prefill_block(x: torch.Tensor, conv: torch.Tensor, ssm: torch.Tensor, w: W, cfg: Mamba2Config, past: bool) -> (
    torch.Tensor
):  # fmt: skip
    """One layer over a prompt [B, T, hidden]; `past`: the state holds earlier chunks of it."""
    t = x.shape[1]
    z, mixed, dt = _split(x, w, cfg)
    # The last inputs of the convolution, oldest first, are its state: [B, conv_width, conv].
    earlier = conv.transpose(1, 2)[:, 1:] if past else torch.zeros_like(conv.transpose(1, 2)[:, 1:])
    window = torch.cat((earlier, mixed), dim=1)
    conv.copy_(torch.cat((torch.zeros_like(window[:, :1]), window), dim=1)[:, -cfg.conv :].transpose(1, 2))
    taps = w["conv"]
    mixed = F.silu(sum((window[:, i : i + t] * taps[:, i] for i in range(cfg.conv)), w["conv_bias"]))
    u, b, c = mixed.split([cfg.inner, cfg.groups * cfg.state, cfg.groups * cfg.state], dim=-1)
    u = u.unflatten(-1, (cfg.heads, cfg.head_dim))
    b, c = (v.unflatten(-1, (cfg.groups, cfg.state)) for v in (b, c))
    y, state = scan(u, dt, -torch.exp(w["a_log"].float()), b, c, ssm if past else None, cfg.chunk)
    ssm.copy_(state)
    return _finish(x, (y + u * w["skip"][:, None]).flatten(2), z, w, cfg)


def decode_block(x: torch.Tensor, conv: torch.Tensor, ssm: torch.Tensor, w: W, cfg: Mamba2Config) -> torch.Tensor:
    """One layer for one token of every sequence, x [B, 1, hidden]: the recurrence itself."""
    z, mixed, dt = _split(x, w, cfg)
    window = torch.cat((conv[:, :, 1:], mixed.transpose(1, 2)), dim=-1)
    conv.copy_(window)
    mixed = F.silu((window * w["conv"]).sum(-1) + w["conv_bias"])
    u, b, c = mixed.split([cfg.inner, cfg.groups * cfg.state, cfg.groups * cfg.state], dim=-1)
    u = u.unflatten(-1, (cfg.heads, cfg.head_dim))
    each = cfg.heads // cfg.groups
    b, c = (v.unflatten(-1, (cfg.groups, 1, cfg.state)).expand(-1, -1, each, -1).flatten(1, 2) for v in (b, c))
    step = dt[:, 0]  # [B, H]
    decay = torch.exp(step * -torch.exp(w["a_log"].float()))
    state = ssm * decay[..., None, None] + (step[..., None] * u.float())[..., None] * b.float()[:, :, None]
    ssm.copy_(state)
    y = (state * c.float()[:, :, None]).sum(-1).to(x.dtype) + u * w["skip"][:, None]
    return _finish(x, y.flatten(1)[:, None], z, w, cfg)


class Mamba2(Workload):
    name = "mamba-codestral-7b"
    model = "Mamba-Codestral-7B"

    def __init__(self, device: str = "cuda", cfg: Mamba2Config | None = None, compiled: bool = True) -> None:
        super().__init__(device)
        self.cfg = cfg or Mamba2Config()
        generator = torch.Generator(device=device).manual_seed(0)
        self.weights: W = {}
        for name, shape in self.cfg.shapes().items():
            w = torch.empty(shape, dtype=torch.bfloat16, device=device)
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "a_log":  # decay rates 1 to 16 and time steps around 0.01, as the model is initialised
                w.uniform_(1, 16, generator=generator).log_()
            elif leaf == "dt_bias":
                w.uniform_(-6.9, -2.3, generator=generator)
            elif len(shape) == 2:
                w.normal_(0, shape[-1] ** -0.5, generator=generator)
            else:
                w.fill_(0 if leaf.endswith("bias") else 1)
            self.weights[name] = w
        self._fn = functions(compiled, embed=embed, prefill=prefill_block, decode=decode_block, head=head)
        self.inputs: W = {}
        self.state: list[tuple[torch.Tensor, torch.Tensor]] = []  # per layer: convolution, SSM

    def units(self) -> Sequence[UnitSpec]:
        return [*prefill_grid(), *decode_grid(lambda _b, _c: True, contexts=(512, 2048, 8192))]

    def prepare(self, unit: UnitSpec) -> Callable[[], Any]:
        cfg, b, t = self.cfg, unit.batch, unit.tokens
        self.state.clear()
        generator = torch.Generator(device=self.device).manual_seed(b * 65537 + unit.context)
        dtype = self.weights["embed"].dtype

        def state(kind: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(b, *shape, dtype=kind, device=self.device).normal_(0, 1, generator=generator)

        for _ in range(cfg.layers):
            ssm = state(torch.float32, cfg.heads, cfg.head_dim, cfg.state)
            self.state.append((state(dtype, cfg.conv_width, cfg.conv), ssm))
        tokens = torch.randint(cfg.vocab, (b, t), device=self.device, generator=generator)
        token = tokens if t == 1 else torch.zeros(b, 1, dtype=torch.int64, device=self.device)
        self.inputs = {"next_token": token} if t == 1 else {"next_token": token, "prompt": tokens}
        return lambda: self._step(unit)

    @torch.no_grad()
    def _step(self, unit: UnitSpec) -> torch.Tensor:
        w, prefill = self.weights, unit.tokens > 1
        with self.scope("embed"):
            x = self._fn["embed"](self.inputs["prompt" if prefill else "next_token"], w["embed"])
        for i in range(self.cfg.layers):
            with self.scope(f"layers.{i}"):
                arguments = (x, *self.state[i], under(w, f"layers.{i}"), self.cfg)
                if prefill:
                    x = self._fn["prefill"](*arguments, unit.context > unit.tokens)
                else:
                    x = self._fn["decode"](*arguments)
        with self.scope("head"):
            logits: torch.Tensor = self._fn["head"](x, w["norm"], w["lm_head"], self.inputs["next_token"], self.cfg.eps)
        return logits

    def named_tensors(self) -> Iterable[NamedTensor]:
        for name, tensor in self.weights.items():
            yield NamedTensor(name, tensor, "weight")
        for i, pair in enumerate(self.state):
            for kind, tensor in zip(("conv", "ssm"), pair, strict=True):
                size = tensor.numel() * tensor.element_size() // tensor.shape[0]
                yield NamedTensor(f"layers.{i}.state.{kind}", tensor, "state", bytes_per_sequence=size)
        for name, tensor in self.inputs.items():
            state = name == "next_token"
            yield NamedTensor(name, tensor, "state" if state else "input", bytes_per_sequence=8 if state else 0)

    def weights_of(self, module: str) -> str:
        if module == "embed":
            return "embed"
        # A layer has no feed-forward part: all of it mixes over time, as attention does.
        return "head" if module in ("norm", "lm_head", "head") else "attention"
