"""Mamba-Codestral-7B (Mamba-2) as a serving engine runs it: a chunked scan for prompts, the recurrence for decode
steps, convolution and SSM state updated in place; the operators are in `ssm`.

Shapes: mistralai/Mamba-Codestral-7B-v0.1 (64 layers, hidden 4096, inner width 8192 = 128 heads of 64, state 128,
8 groups, convolution over 4 tokens, vocabulary 32768). Weights are random. The state of a sequence, 257 MB in
float32, does not grow with its context: the contexts of the decode grid are labels that place it in a mix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hw.workloads.base import NamedTensor, UnitSpec, Work, Workload, decode_grid, functions, prefill_grid, under
from hw.workloads.language import embed, head, rms_norm
from hw.workloads.ssm import conv, conv_first, gated_norm, scan, scan_first


@dataclass(frozen=True)
class Mamba2Config:
    layers: int = 64
    hidden: int = 4096
    heads: int = 128
    head_dim: int = 64
    state: int = 128
    groups: int = 8
    conv: int = 4
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
            "conv": (self.conv, self.conv_width), "conv_bias": (self.conv_width,), "dt_bias": (self.heads,),
            "a_log": (self.heads,), "skip": (self.heads,), "gate_norm": (self.inner,),
            "out_proj": (self.hidden, self.inner),
        }  # fmt: skip
        layers = {f"layers.{i}.{k}": v for i in range(self.layers) for k, v in layer.items()}
        ends = {"norm": (self.hidden,), "lm_head": (self.vocab, self.hidden)}
        return {"embed": (self.vocab, self.hidden), **layers, **ends}


W = dict[str, torch.Tensor]
CHUNK = 64  # tokens whose scan is one masked product, as in `triton_ssm`


def _enter(
    x: torch.Tensor, residual: torch.Tensor | None, w: W, cfg: Mamba2Config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate, convolution input, time steps of a layer, and the residual with `x`, what the last layer added."""
    residual = x if residual is None else residual + x
    y = F.linear(rms_norm(residual, w["norm"], cfg.eps), w["in_proj"])
    z, mixed, dt = y.split([cfg.inner, cfg.conv_width, cfg.heads], dim=-1)
    return z, mixed, dt, residual


def _heads(mixed: torch.Tensor, cfg: Mamba2Config) -> tuple[torch.Tensor, ...]:
    """x [B, T, H, P], B and C [B, T, G, N] as views of the convolution's output."""
    width = cfg.groups * cfg.state
    u, b, c = mixed.split([cfg.inner, width, width], dim=-1)
    u = u.unflatten(-1, (cfg.heads, cfg.head_dim))
    b, c = (v.unflatten(-1, (cfg.groups, cfg.state)) for v in (b, c))
    return u, b, c


def block(
    x: torch.Tensor, residual: torch.Tensor | None, tail: torch.Tensor, ssm: torch.Tensor, w: W, cfg: Mamba2Config,
    past: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One layer over new tokens, x [B, T, hidden]; `past`: the state holds those before.

    Returns what the layer adds, and the residual it is to be added to: the next layer does that with its norm.
    """
    z, mixed, dt, residual = _enter(x, residual, w, cfg)
    if past:
        u, b, c = _heads(conv(mixed, w["conv"], w["conv_bias"], tail), cfg)
        y = scan(u, dt, w["dt_bias"], w["a_log"], b, c, w["skip"], ssm)
    else:
        u, b, c = _heads(conv_first(mixed, w["conv"], w["conv_bias"], tail), cfg)
        y = scan_first(u, dt, w["dt_bias"], w["a_log"], b, c, w["skip"], state=ssm)
    return F.linear(gated_norm(y, z, w["gate_norm"], cfg.groups, cfg.eps), w["out_proj"]), residual


def finish(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, token: torch.Tensor, eps: float
) -> torch.Tensor:
    return head(x[:, -1:] + residual[:, -1:], norm, weight, token, eps)


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
                w.normal_(0, shape[0 if leaf == "conv" else 1] ** -0.5, generator=generator)
            else:
                w.fill_(0 if leaf.endswith("bias") else 1)
            self.weights[name] = w
        self._fn = functions(compiled, embed=embed, block=block, head=finish)
        self.inputs: W = {}
        self.state: list[tuple[torch.Tensor, torch.Tensor]] = []  # per layer: convolution, SSM

    def units(self) -> Sequence[UnitSpec]:
        # The state of 256 sequences takes 69 GB beside 15 GB of weights.
        batches = (1, 8, 32, 64, 128, 192, 256)
        return [*prefill_grid(), *decode_grid(lambda _b, _c: True, batches=batches, contexts=(512, 8192))]

    def prepare(self, unit: UnitSpec) -> Callable[[], Any]:
        cfg, b, t = self.cfg, unit.batch, unit.tokens
        self.state.clear()
        generator = torch.Generator(device=self.device).manual_seed(b * 65537 + unit.context)
        dtype = self.weights["embed"].dtype

        def state(kind: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(b, *shape, dtype=kind, device=self.device).normal_(0, 1, generator=generator)

        for _ in range(cfg.layers):
            ssm = state(torch.float32, cfg.heads, cfg.head_dim, cfg.state)
            self.state.append((state(dtype, cfg.conv - 1, cfg.conv_width), ssm))
        tokens = torch.randint(cfg.vocab, (b, t), device=self.device, generator=generator)
        token = tokens if t == 1 else torch.zeros(b, 1, dtype=torch.int64, device=self.device)
        self.inputs = {"next_token": token} if t == 1 else {"next_token": token, "prompt": tokens}
        return lambda: self._step(unit)

    @torch.no_grad()
    def _step(self, unit: UnitSpec) -> torch.Tensor:
        w, prefill = self.weights, unit.tokens > 1
        with self.scope("embed"):
            x = self._fn["embed"](self.inputs["prompt" if prefill else "next_token"], w["embed"])
        residual, past = None, not prefill or unit.context > unit.tokens
        for i in range(self.cfg.layers):
            with self.scope(f"layers.{i}"):
                x, residual = self._fn["block"](x, residual, *self.state[i], under(w, f"layers.{i}"), self.cfg, past)
        with self.scope("head"):
            last = (x, residual, w["norm"], w["lm_head"], self.inputs["next_token"], self.cfg.eps)
            logits: torch.Tensor = self._fn["head"](*last)
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

    def work_of(
        self, op: str, shapes: Mapping[str, tuple[int, ...]], scalars: Mapping[str, Any], module: str
    ) -> Work | None:
        """Scan of a prompt: as in chunks, half of each product with the mask. One token: what its state needs."""
        if op in ("ssm_scan", "ssm_scan_first"):
            (b, t, heads, p), (_, _, groups, n) = shapes["x"], shapes["b"]
            shape = {"batch": b, "tokens": t, "heads": heads, "head_dim": p, "state": n, "groups": groups}
            if t == 1:
                return Work("ssm_scan", 6 * b * heads * p * n, shape)
            seen = min(CHUNK, t) // 2  # tokens of its chunk before a token, on average
            products = groups * 2 * seen * n + heads * (2 * seen * p + 4 * p * n)  # C B^T; with x; state in and out
            return Work("ssm_scan", b * t * products, shape)
        if op in ("ssm_conv", "ssm_conv_first"):
            elements = math.prod(shapes["x"])
            return Work("conv", (2 * shapes["weight"][0] + 4) * elements, {"elements": elements})
        if op == "ssm_gated_rms_norm":
            elements = math.prod(shapes["y"])
            return Work("norm", 8 * elements, {"elements": elements})
        return None

    def weights_of(self, module: str) -> str:
        if module == "embed":
            return "embed"
        # A layer has no feed-forward part: all of it mixes over time, as attention does.
        return "head" if module in ("norm", "lm_head", "head") else "attention"
