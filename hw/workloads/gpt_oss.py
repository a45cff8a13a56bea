"""gpt-oss-20b as a serving engine runs it: MXFP4 experts dequantised inside the grouped GEMM, routing on the GPU,
attention with sinks, every other layer over a sliding window.

Shapes: openai/gpt-oss-20b (24 layers, hidden 2880, 64 query and 8 KV heads of 64, window 128 in even layers, 32
experts of width 2880 of which a token takes 4, vocabulary 201088, YaRN rotary angles). Weights are random.

Routing is "balanced" (the router's random weights spread tokens almost evenly, as long as a token's embedding
outweighs what attention, with random weights an average over all tokens, adds to each of them) or "zipf": a fixed
bias on the router's logits favours a seeded order of experts as 1/rank. `moe_statistics` tells what a step chose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hw.workloads.base import NamedTensor, UnitSpec, Work, Workload, decode_grid, functions, prefill_grid, under
from hw.workloads.language import cached_tensors, embed
from hw.workloads.linear import linear
from hw.workloads.moe import BIAS, block_rows, moe_down, moe_route, moe_up
from hw.workloads.sinks import attention_sinks, rope_append


@dataclass(frozen=True)
class GptOssConfig:
    layers: int = 24
    hidden: int = 2880
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    window: int = 128  # of even layers
    experts: int = 32
    top_k: int = 4
    ffn: int = 2880
    vocab: int = 201088
    theta: float = 150000.0
    yarn: float = 32.0  # factor over the original 4096 positions
    eps: float = 1e-5

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter of the model; experts as if they were not packed."""
        d, e, f, qkv = self.hidden, self.experts, self.ffn, (self.heads + 2 * self.kv_heads) * self.head_dim
        layer = {
            "norm1": (d,), "wqkv": (qkv, d), "bqkv": (qkv,), "sinks": (self.heads,),
            "wo": (d, self.heads * self.head_dim), "bo": (d,), "norm2": (d,), "router": (e, d), "router_bias": (e,),
            "up": (e, 2 * f, d), "up_bias": (e, 2 * f), "down": (e, d, f), "down_bias": (e, d),
        }  # fmt: skip
        layers = {f"layers.{i}.{k}": s for i in range(self.layers) for k, s in layer.items()}
        return {"embed": (self.vocab, d), **layers, "norm": (d,), "lm_head": (self.vocab, d)}


W = dict[str, torch.Tensor]


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def yarn_angles(cfg: GptOssConfig, positions: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines: fast dimensions keep their frequency, slow ones are stretched, with a ramp between."""
    d, original, fast, slow = cfg.head_dim, 4096, 32.0, 1.0
    inverse = cfg.theta ** (-torch.arange(0, d, 2, device=device).float() / d)
    low, high = (d * math.log(original / (2 * math.pi * n)) / (2 * math.log(cfg.theta)) for n in (fast, slow))
    low, high = max(low, 0), min(high, d - 1)
    ramp = ((torch.arange(d // 2, device=device).float() - low) / (high - low)).clamp(0, 1)
    angle = torch.arange(positions, device=device).float()[:, None] * (inverse * (1 - ramp) + inverse / cfg.yarn * ramp)
    gain = 0.1 * math.log(cfg.yarn) + 1
    return angle.cos() * gain, angle.sin() * gain


def block(
    x: torch.Tensor, position: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, w: W, cfg: GptOssConfig, window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One layer, x [B, T, hidden], over the last `window` keys (0: all). Also returns the experts chosen."""
    b, t, d = x.shape
    qkv = linear(_norm(x, w["norm1"], cfg.eps), w["wqkv"], w["bqkv"])
    q = rope_append(qkv, cos, sin, position, k_cache, v_cache, cfg.heads).transpose(1, 2)
    # The step is at the end of its context: what the window hides from all its queries is not even named.
    first = max(0, k_cache.shape[2] - t - window + 1) if window else 0
    y = attention_sinks(q, k_cache[:, :, first:], v_cache[:, :, first:], w["sinks"], window if t > 1 else 0)
    x = x + linear(y.flatten(2), w["wo"], w["bo"])
    h = _norm(x, w["norm2"], cfg.eps).view(b * t, d)
    scores = linear(h, w["router"], w["router_bias"])
    gain, chosen, order, owner = moe_route(scores, cfg.top_k, block_rows(b * t * cfg.top_k, cfg.experts))
    up = moe_up(h, w["up"], w.get("up_scale"), w["up_bias"], order, owner, cfg.top_k)
    down = moe_down(up, w["down"], w.get("down_scale"), w["down_bias"], order, owner, gain)
    return x + down.view(b, t, cfg.top_k, d).float().sum(2).to(x.dtype), chosen


def head(x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, token: torch.Tensor, eps: float) -> torch.Tensor:
    """Greedy sampling of the last position into `token` [B, 1]; returns the logits."""
    logits = F.linear(_norm(x[:, -1:], norm, eps), weight)
    token.copy_(first_largest(logits))
    return logits


def first_largest(logits: torch.Tensor, parts: int = 64) -> torch.Tensor:
    """`logits.argmax(-1)` [B, 1] of [B, 1, V] in two stages: few rows leave a GPU idle when each is one reduction."""
    split = logits.unflatten(-1, (parts if logits.shape[-1] % parts == 0 else 1, -1))
    part = split.amax(-1).argmax(-1, keepdim=True)
    return (part * split.shape[-1] + split.argmax(-1).gather(-1, part)).squeeze(-1)


class GptOss(Workload):
    model = "gpt-oss-20b"

    def __init__(
        self, device: str = "cuda", cfg: GptOssConfig | None = None, compiled: bool = True, routing: str = "balanced",
        packed: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(device)
        self.cfg, self.routing, self.packed = cfg or GptOssConfig(), routing, packed
        self.name = "gpt-oss-20b" + ("-zipf" if routing == "zipf" else "") + ("" if packed else "-bf16")
        self.weight_dtype = "mxfp4" if packed else "bf16"
        self._generator = torch.Generator(device=device).manual_seed(0)
        self.weights: W = {}
        for name, shape in self.cfg.shapes().items():
            self._weight(name, shape)
        cos, sin = yarn_angles(self.cfg, 18688, device)
        self.weights |= {"rope.cos": cos, "rope.sin": sin}
        self._fn = functions(compiled, embed=embed, block=block, head=head)
        self.inputs: W = {}
        self.kv: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.chosen: list[torch.Tensor] = []  # per layer: experts of the last step

    def _weight(self, name: str, shape: tuple[int, ...]) -> None:
        make, leaf = {"device": self.device}, name.rsplit(".", 1)[-1]
        if len(shape) == 3 and self.packed:
            (e, n, k), words = shape, {"dtype": torch.int32, **make}
            self.weights[name] = torch.empty((e, n // 64, k // 64, 128, 4), **words)
            self.weights[f"{name}_scale"] = torch.empty((e, n // 64, k // 64, 32), **words)
            self.weights[name].view(torch.uint8).random_(0, 256, generator=self._generator)
            low = 119 + BIAS
            self.weights[f"{name}_scale"].view(torch.uint8).random_(low, low + 2, generator=self._generator)
            return
        w = torch.empty(shape, dtype=torch.bfloat16, **make)
        if leaf == "router_bias" and self.routing == "zipf":
            rank = torch.randperm(shape[0], generator=torch.Generator().manual_seed(len(self.weights)))
            w.copy_(-torch.log(rank.float() + 1))
        elif leaf == "sinks":
            w.normal_(0, 1, generator=self._generator)
        elif leaf == "embed":
            w.normal_(0, 2, generator=self._generator)
        elif len(shape) == 1 or leaf.endswith("bias"):
            w.fill_(1 if "norm" in leaf else 0)
        else:
            w.normal_(0, shape[-1] ** -0.5, generator=self._generator)
        self.weights[name] = w

    def units(self) -> Sequence[UnitSpec]:
        extra = {"routing": self.routing, "experts": self.weight_dtype}
        # At most 52 GB of KV beside 14 GB (bf16: 42 GB) of weights.
        grid = [*prefill_grid(), *decode_grid(lambda b, c: b * c <= 128 * 8192)]
        return [UnitSpec(u.name, u.phase, u.batch, u.tokens, u.context, extra) for u in grid]

    def prepare(self, unit: UnitSpec) -> Callable[[], Any]:
        cfg, b, t = self.cfg, unit.batch, unit.tokens
        self.kv.clear()
        self.chosen.clear()
        generator = torch.Generator(device=self.device).manual_seed(b * 65537 + unit.context)
        dtype = self.weights["embed"].dtype

        def cache(layer: int) -> torch.Tensor:
            """Windowed layers keep tokens outermost, so that a window is one range of bytes."""
            shape = (b, cfg.kv_heads, unit.context, cfg.head_dim)
            order = (2, 0, 1, 3) if layer % 2 == 0 else (0, 1, 2, 3)
            data = torch.empty([shape[i] for i in order], dtype=dtype, device=self.device)
            return data.normal_(0, 1, generator=generator).permute(*(order.index(i) for i in range(4)))

        self.kv.extend((cache(i), cache(i)) for i in range(cfg.layers))
        tokens = torch.randint(cfg.vocab, (b, t), device=self.device, generator=generator)
        self.inputs = {
            "position": torch.arange(unit.context - t, unit.context, device=self.device),
            "next_token": tokens if t == 1 else torch.zeros(b, 1, dtype=torch.int64, device=self.device),
        }
        if t > 1:
            self.inputs["prompt"] = tokens
        return lambda: self._step(unit)

    @torch.no_grad()
    def _step(self, unit: UnitSpec) -> torch.Tensor:
        w, prefill = self.weights, unit.tokens > 1
        self.chosen.clear()
        with self.scope("embed"):
            x = self._fn["embed"](self.inputs["prompt" if prefill else "next_token"], w["embed"])
        for i in range(self.cfg.layers):
            with self.scope(f"layers.{i}"):
                x, chosen = self._fn["block"](
                    x, self.inputs["position"], *self.kv[i], w["rope.cos"], w["rope.sin"],
                    under(w, f"layers.{i}"), self.cfg, self.cfg.window if i % 2 == 0 else 0,
                )  # fmt: skip
                self.chosen.append(chosen)
        with self.scope("head"):
            logits: torch.Tensor = self._fn["head"](x, w["norm"], w["lm_head"], self.inputs["next_token"], self.cfg.eps)
        return logits

    def moe_statistics(self) -> dict[str, Any]:
        """What the last step (or the last replay of its graph) chose; waits for the GPU."""
        counts = [torch.bincount(c.flatten().cpu(), minlength=self.cfg.experts).float() for c in self.chosen]
        shares = torch.stack(counts) / max(1.0, float(counts[0].sum()))
        return {
            "routing": self.routing, "seed": 0, "experts": self.cfg.experts, "top_k": self.cfg.top_k,
            "active_mean": round(float((shares > 0).sum(1).float().mean()), 3),
            "largest_share_mean": round(float(shares.amax(1).mean()), 4),
            "entropy_mean_bits": round(float(-(shares * shares.clamp(min=1e-12).log2()).sum(1).mean()), 4),
            "active": [int((s > 0).sum()) for s in shares],
        }  # fmt: skip

    def named_tensors(self) -> Iterable[NamedTensor]:
        return cached_tensors(self.weights, self.kv, self.inputs)

    def work_of(
        self, op: str, shapes: Mapping[str, tuple[int, ...]], scalars: Mapping[str, Any], module: str
    ) -> Work | None:
        """Experts: every choice multiplies with one expert, and only chosen experts are read. Attention: the pairs
        that a window leaves."""
        if op in ("moe_up", "moe_down"):
            rows, width = shapes["result0"][0], shapes["bias"][1]
            depth = shapes["x" if op == "moe_up" else "h"][1]
            shape = {"tokens": rows // self.cfg.top_k, "n": width, "k": depth, "top_k": self.cfg.top_k}
            share = len(self.chosen[int(module.split(".")[1])].unique()) / self.cfg.experts
            return Work("moe", 2 * rows * width * depth, {**shape, "experts": self.cfg.experts}, share)
        if op == "moe_route":
            tokens, experts = shapes["logits"]
            return Work("elementwise", tokens * experts, {"elements": tokens * experts})
        if op == "rope_kv_index_copy":
            elements = math.prod(shapes["qkv"])
            return Work("elementwise", 3 * elements, {"elements": elements})
        if op == "flash_attention_sinks":
            (b, h, t, d), (_, kv, c, _) = shapes["query"], shapes["key"]
            window = int(scalars.get("window", 0)) or c
            pairs = sum(min(seen, window) for seen in range(c - t + 1, c + 1))
            shape = {"batch": b, "heads": h, "seq_q": t, "head_dim": d, "kv_heads": kv, "seq_kv": c}
            return Work("attention_decode" if t == 1 else "attention_prefill", 4 * b * h * d * pairs, shape)
        return None

    def weights_of(self, module: str) -> str:
        if module == "embed":
            return "embed"
        if module in ("norm", "lm_head", "head"):
            return "head"
        attention = ("norm1", "wqkv", "bqkv", "sinks", "wo", "bo", "cos", "sin")
        return "attention" if module.rsplit(".", 1)[-1] in attention else "ffn"


def zipf(device: str = "cuda") -> GptOss:
    return GptOss(device, routing="zipf")


def bf16(device: str = "cuda") -> GptOss:
    """The same model with experts in bf16."""
    return GptOss(device, packed=False)
