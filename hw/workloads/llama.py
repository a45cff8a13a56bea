"""Llama-3-8B as a serving engine runs it: fused QKV and gate/up projections, GQA without expanded heads,
one token appended to a static KV cache per step, one compiled block for all layers.

Shapes: meta-llama/Meta-Llama-3-8B config.json (32 layers, hidden 4096, 32 query and 8 KV heads of 128,
feed-forward 14336, vocabulary 128256, RoPE theta 5e5). Weights are random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hw.workloads.base import NamedTensor, UnitSpec, Workload, allow_recompiles, decode_grid, prefill_grid
from hw.workloads.language import attend, cached_tensors, embed, head, rms_norm, rope


@dataclass(frozen=True)
class LlamaConfig:
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 14336
    vocab: int = 128256
    theta: float = 5e5
    eps: float = 1e-5


def block(
    x: torch.Tensor, position: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor,
    norm1: torch.Tensor, wqkv: torch.Tensor, wo: torch.Tensor, norm2: torch.Tensor, w13: torch.Tensor,
    w2: torch.Tensor, cfg: LlamaConfig, prefill: bool,
) -> torch.Tensor:  # fmt: skip
    """One decoder layer. x [B, T, hidden], position [T], caches [B, kv_heads, C, head_dim], written in place."""
    b, t, _ = x.shape
    q_width, kv_width = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    qkv = F.linear(rms_norm(x, norm1, cfg.eps), wqkv)
    q, k, v = qkv.split([q_width, kv_width, kv_width], dim=-1)
    c, s = cos[position], sin[position]
    q = rope(q.view(b, t, cfg.heads, cfg.head_dim).transpose(1, 2), c, s)
    k = rope(k.view(b, t, cfg.kv_heads, cfg.head_dim).transpose(1, 2), c, s)
    v = v.view(b, t, cfg.kv_heads, cfg.head_dim).transpose(1, 2)
    k_cache.index_copy_(2, position, k)
    v_cache.index_copy_(2, position, v)
    # The whole cache is valid: a decode step is captured at the end of its context, a prefill fills it.
    y = attend(q, k_cache, v_cache, prefill)
    x = x + F.linear(y.transpose(1, 2).reshape(b, t, q_width), wo)
    gate, up = F.linear(rms_norm(x, norm2, cfg.eps), w13).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, w2)


_BATCHES, _CONTEXTS = (1, 8, 32, 64, 128, 256), (512, 2048, 4096, 8192)


class Llama(Workload):
    name = "llama-3-8b"
    model = "Llama-3-8B"

    def __init__(self, device: str = "cuda", cfg: LlamaConfig | None = None, compiled: bool = True) -> None:
        super().__init__(device)
        self.cfg = cfg = cfg or LlamaConfig()
        generator = torch.Generator(device=device).manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            scale = shape[-1] ** -0.5
            w = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return w.normal_(0, scale, generator=generator)

        q_width, kv_width = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        ones = lambda: torch.ones(cfg.hidden, dtype=torch.bfloat16, device=device)  # noqa: E731
        self.weights: dict[str, torch.Tensor] = {"embed": weight(cfg.vocab, cfg.hidden)}
        for i in range(cfg.layers):
            self.weights |= {
                f"layers.{i}.norm1": ones(), f"layers.{i}.wqkv": weight(q_width + 2 * kv_width, cfg.hidden),
                f"layers.{i}.wo": weight(cfg.hidden, q_width), f"layers.{i}.norm2": ones(),
                f"layers.{i}.w13": weight(2 * cfg.ffn, cfg.hidden), f"layers.{i}.w2": weight(cfg.hidden, cfg.ffn),
            }  # fmt: skip
        self.weights |= {"norm": ones(), "lm_head": weight(cfg.vocab, cfg.hidden)}
        self._angles("rope", 8448)
        self._angles("rope_long", 18688)  # of its own, so that units on a short context keep their table
        self._fn: dict[str, Callable[..., Any]] = {"embed": embed, "block": block, "head": head}
        if compiled:
            allow_recompiles()
            self._fn = {k: torch.compile(f, fullgraph=True, dynamic=False) for k, f in self._fn.items()}
        self.inputs: dict[str, torch.Tensor] = {}
        self.kv: list[tuple[torch.Tensor, torch.Tensor]] = []  # per layer: key cache, value cache

    def _angles(self, name: str, positions: int) -> None:
        d = self.cfg.head_dim
        inverse = self.cfg.theta ** (-torch.arange(0, d, 2, device=self.device).float() / d)
        angle = torch.arange(positions, device=self.device).float()[:, None] * inverse[None]
        # Lookup tables are weights in all but name: fixed, and wherever a layer runs.
        self.weights |= {f"{name}.cos": angle.cos(), f"{name}.sin": angle.sin()}

    def units(self) -> Sequence[UnitSpec]:
        # At most 64 GiB of KV beside 15 GiB of weights.
        return [*prefill_grid(), *decode_grid(lambda b, c: b * c <= 256 * 2048, _BATCHES, _CONTEXTS)]

    def prepare(self, unit: UnitSpec) -> Callable[[], Any]:
        cfg, b, t = self.cfg, unit.batch, unit.tokens
        self.kv.clear()
        generator = torch.Generator(device=self.device).manual_seed(unit.batch * 65537 + unit.context)
        shape = (b, cfg.kv_heads, unit.context, cfg.head_dim)

        def cache() -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(0, 1, generator=generator)

        self.kv.extend((cache(), cache()) for _ in range(cfg.layers))
        first = unit.context - t
        tokens = torch.randint(cfg.vocab, (b, t), device=self.device, generator=generator)
        self.inputs = {
            "position": torch.arange(first, first + t, device=self.device),
            "next_token": tokens if t == 1 else torch.zeros(b, 1, dtype=torch.int64, device=self.device),
        }
        if t > 1:
            self.inputs["prompt"] = tokens
        return lambda: self._step(unit)

    @torch.no_grad()
    def _step(self, unit: UnitSpec) -> None:
        w, prefill = self.weights, unit.tokens > 1
        rope = "rope" if unit.context <= w["rope.cos"].shape[0] else "rope_long"
        with self.scope("embed"):
            x = self._fn["embed"](self.inputs["prompt" if prefill else "next_token"], w["embed"])
        for i in range(self.cfg.layers):
            p = f"layers.{i}"
            with self.scope(p):
                names = ("norm1", "wqkv", "wo", "norm2", "w13", "w2")
                x = self._fn["block"](
                    x, self.inputs["position"], *self.kv[i], w[f"{rope}.cos"], w[f"{rope}.sin"],
                    *(w[f"{p}.{n}"] for n in names), self.cfg, prefill,
                )  # fmt: skip
        with self.scope("head"):
            self._fn["head"](x, w["norm"], w["lm_head"], self.inputs["next_token"], self.cfg.eps)

    def named_tensors(self) -> Iterable[NamedTensor]:
        return cached_tensors(self.weights, self.kv, self.inputs)

    def weights_of(self, module: str) -> str:
        leaf = module.rsplit(".", 1)[-1]
        if module in ("embed",):
            return "embed"
        if module in ("norm", "lm_head", "head"):
            return "head"
        return "attention" if leaf in ("norm1", "wqkv", "wo", "cos", "sin") else "ffn"
