"""Qwen2.5-VL-7B as a serving engine runs it: a vision tower over one image, and a language model that reads the
image's tokens among the prompt's.

Shapes: Qwen/Qwen2.5-VL-7B-Instruct. Text: 28 layers, hidden 3584, 28 query and 4 KV heads of 128, feed-forward
18944, vocabulary 152064, QKV bias, rotary angles from three positions (time, height, width) in sections of
16/24/24. Vision: 32 layers, hidden 1280, 16 heads of 80, gated feed-forward 3420, attention within windows of
112 pixels except in layers 7, 15, 23 and 31, and a merger of 2 x 2 patches to one token. An image of 784 x 784
pixels makes 3136 patches of 14 in 49 equal windows, and 784 tokens. Weights are random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hw.workloads.base import NamedTensor, UnitSpec, Workload, decode_grid, functions, prefill_grid, under
from hw.workloads.language import attend, cached_tensors, head, rms_norm, rope


@dataclass(frozen=True)
class QwenVLConfig:
    layers: int = 28
    hidden: int = 3584
    heads: int = 28
    kv_heads: int = 4
    head_dim: int = 128
    ffn: int = 18944
    vocab: int = 152064
    theta: float = 1e6
    sections: tuple[int, ...] = (16, 24, 24)
    eps: float = 1e-6
    vision_layers: int = 32
    vision_hidden: int = 1280
    vision_heads: int = 16
    vision_ffn: int = 3420
    full_layers: tuple[int, ...] = (7, 15, 23, 31)
    patch: int = 14
    frames: int = 2  # a still image is shown twice
    side: int = 28  # image height and width in tokens of 2 x 2 patches
    window: int = 4  # in tokens: 112 pixels
    image_at: int = 16  # prompt tokens before the image

    @property
    def image_tokens(self) -> int:
        return self.side**2

    @property
    def patch_width(self) -> int:
        return 3 * self.frames * self.patch**2

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter of the model."""
        d, v = self.hidden, self.vision_hidden
        q_width, qkv = self.heads * self.head_dim, (self.heads + 2 * self.kv_heads) * self.head_dim
        text = {
            "norm1": (d,), "wqkv": (qkv, d), "bqkv": (qkv,), "wo": (d, q_width), "norm2": (d,),
            "w13": (2 * self.ffn, d), "w2": (d, self.ffn),
        }  # fmt: skip
        vision = {
            "norm1": (v,), "wqkv": (3 * v, v), "bqkv": (3 * v,), "wo": (v, v), "bo": (v,), "norm2": (v,),
            "w13": (2 * self.vision_ffn, v), "b13": (2 * self.vision_ffn,), "w2": (v, self.vision_ffn), "b2": (v,),
        }  # fmt: skip
        return {
            "embed": (self.vocab, d), "norm": (d,), "lm_head": (self.vocab, d), "patch.w": (v, self.patch_width),
            "merger.norm": (v,), "merger.w1": (4 * v, 4 * v), "merger.b1": (4 * v,), "merger.w2": (d, 4 * v),
            "merger.b2": (d,), **{f"layers.{i}.{k}": s for i in range(self.layers) for k, s in text.items()},
            **{f"vision.{i}.{k}": s for i in range(self.vision_layers) for k, s in vision.items()},
        }  # fmt: skip


W = dict[str, torch.Tensor]


def _aligned(name: str, w: torch.Tensor) -> torch.Tensor:
    """Zeros after the vision tower's feed-forward channels: rows of 3420 would break the GEMMs' 16-byte accesses.

    They add nothing, as silu(0) 0 = 0 and their weights are 0.
    """
    leaf = name.rsplit(".", 1)[-1] if name.startswith("vision.") else ""
    if leaf == "w2":
        return F.pad(w, (0, -w.shape[1] % 8))
    if leaf in ("w13", "b13"):  # gate, then up
        halves = w.unflatten(0, (2, -1))
        return F.pad(halves, (0,) * (2 * w.dim() - 1) + (-halves.shape[1] % 8,)).flatten(0, 1)
    return w


def windows(cfg: QwenVLConfig) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Order of the image's tokens that makes windows contiguous, large ones first, and (count, tokens) by size."""
    grid = torch.arange(cfg.image_tokens).view(cfg.side, cfg.side)
    tiles = [t.flatten() for rows in grid.split(cfg.window, 0) for t in rows.split(cfg.window, 1)]
    tiles.sort(key=len, reverse=True)
    sizes = [len(t) for t in tiles]
    return torch.cat(tiles), [(sizes.count(n), n) for n in dict.fromkeys(sizes)]


def patch_positions(cfg: QwenVLConfig) -> torch.Tensor:
    """(row, column) of every patch [N, 2], in the order in which patches arrive: by token, 2 x 2 inside it."""
    n = 2 * cfg.side
    row, column = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    by_token = torch.stack((row, column), -1).view(cfg.side, 2, cfg.side, 2, 2)
    return by_token.transpose(1, 2).reshape(-1, 2)


def text_positions(cfg: QwenVLConfig, tokens: int, image: bool) -> torch.Tensor:
    """Time, height and width position of every token [3, tokens]; an image advances the text by its side."""
    at, n, side = cfg.image_at, cfg.image_tokens, cfg.side
    if not image:
        return torch.arange(tokens).expand(3, -1)
    i = torch.arange(n)
    inside = at + torch.stack((torch.zeros_like(i), i // side, i % side))
    after = at + side + torch.arange(tokens - at - n)
    return torch.cat((torch.arange(at).expand(3, -1), inside, after.expand(3, -1)), dim=1)


def _angles(positions: torch.Tensor, width: int, theta: float, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = theta ** (-torch.arange(0, width, 2, device=device).float() / width)
    angle = positions.to(device).float()[..., None] * inverse
    return angle.cos(), angle.sin()


def vision_embed(pixels: torch.Tensor, order: torch.Tensor, w: W) -> torch.Tensor:
    """Patches [images, N, patch_width] to [images, N, hidden], in window order."""
    return F.linear(pixels, w["w"])[:, order]


def vision_block(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    w: W,
    groups: tuple[tuple[int, int], ...],
    cfg: QwenVLConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One vision layer, x [images, N, hidden]; attention within `groups` of (windows, patches each).

    Returns what the layer adds, and the residual it is to be added to: the next layer does that with its norm.
    """
    b, n, d = x.shape
    x = x if residual is None else residual + x
    qkv = F.linear(rms_norm(x, w["norm1"], cfg.eps), w["wqkv"], w["bqkv"]).view(b, n, 3, cfg.vision_heads, -1)
    both, v = qkv.permute(2, 0, 3, 1, 4).split([2, 1])  # [2 or 1, images, heads, N, head_dim]
    (q, k), v = rope(both, cos, sin).unbind(0), v[0]
    done, at = [], 0
    for count, size in groups:
        part = [t[:, :, at : at + count * size].unflatten(2, (count, size)).transpose(1, 2) for t in (q, k, v)]
        y = F.scaled_dot_product_attention(*(t.flatten(0, 1) for t in part))  # [images windows, heads, size, dim]
        done.append(y.transpose(1, 2).reshape(b, count * size, d))
        at += count * size
    x = x + F.linear(torch.cat(done, dim=1) if len(done) > 1 else done[0], w["wo"], w["bo"])
    gate, up = F.linear(rms_norm(x, w["norm2"], cfg.eps), w["w13"], w["b13"]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w["w2"], w["b2"]), x


def merge(
    x: torch.Tensor, residual: torch.Tensor, order: torch.Tensor, w: W, image: torch.Tensor, cfg: QwenVLConfig
) -> None:
    """Every 2 x 2 patches become one token of `image` [images, tokens, hidden], in reading order."""
    h = rms_norm(residual + x, w["norm"], cfg.eps).unflatten(1, (-1, 4)).flatten(2)
    h = F.linear(F.gelu(F.linear(h, w["w1"], w["b1"])), w["w2"], w["b2"])
    image.copy_(h[:, order])


def embed(token: torch.Tensor, table: torch.Tensor, image: torch.Tensor | None, at: int) -> torch.Tensor:
    """Token embeddings; the image's tokens replace those from position `at` on."""
    x = F.embedding(token, table)
    return x if image is None else torch.cat((x[:, :at], image, x[:, at + image.shape[1] :]), dim=1)


def block(
    x: torch.Tensor, position: torch.Tensor, place: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor, w: W, cfg: QwenVLConfig, prefill: bool,
) -> torch.Tensor:  # fmt: skip
    """One decoder layer. x [B, T, hidden]; position [T] in the caches, `place` [3, T] in time, height, width."""
    b, t, _ = x.shape
    q_width, kv_width = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    qkv = F.linear(rms_norm(x, w["norm1"], cfg.eps), w["wqkv"], w["bqkv"])
    q, k, v = qkv.split([q_width, kv_width, kv_width], dim=-1)
    c, s = (
        torch.cat([part[i] for i, part in enumerate(table[place].split(cfg.sections, dim=-1))], dim=-1)
        for table in (cos, sin)
    )
    q = rope(q.view(b, t, cfg.heads, cfg.head_dim).transpose(1, 2), c, s)
    k = rope(k.view(b, t, cfg.kv_heads, cfg.head_dim).transpose(1, 2), c, s)
    k_cache.index_copy_(2, position, k)
    v_cache.index_copy_(2, position, v.view(b, t, cfg.kv_heads, cfg.head_dim).transpose(1, 2))
    y = attend(q, k_cache, v_cache, prefill)
    x = x + F.linear(y.transpose(1, 2).reshape(b, t, q_width), w["wo"])
    gate, up = F.linear(rms_norm(x, w["norm2"], cfg.eps), w["w13"]).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, w["w2"])


class QwenVL(Workload):
    name = "qwen2.5-vl-7b"
    model = "Qwen2.5-VL-7B"

    def __init__(self, device: str = "cuda", cfg: QwenVLConfig | None = None, compiled: bool = True) -> None:
        super().__init__(device)
        self.cfg = cfg = cfg or QwenVLConfig()
        generator = torch.Generator(device=device).manual_seed(0)
        self.weights: W = {}
        for name, shape in cfg.shapes().items():
            w = torch.empty(shape, dtype=torch.bfloat16, device=device)
            if len(shape) == 2:
                w.normal_(0, shape[-1] ** -0.5, generator=generator)
            else:
                w.fill_(1 if "norm" in name else 0)
            self.weights[name] = _aligned(name, w)
        # Lookup tables: fixed, and wherever a layer runs.
        tokens, self.groups = windows(cfg)
        patches = (4 * tokens[:, None] + torch.arange(4)).flatten()
        width = cfg.vision_hidden // cfg.vision_heads
        axes = _angles(patch_positions(cfg)[patches], width // 2, 1e4, device)
        self.weights |= {f"vision.{n}": a.flatten(1).contiguous() for n, a in zip(("cos", "sin"), axes, strict=True)}
        cos, sin = _angles(torch.arange(18688), cfg.head_dim, cfg.theta, device)
        self.weights |= {"rope.cos": cos, "rope.sin": sin}
        self.weights |= {"vision.order": patches.to(device), "vision.back": tokens.argsort().to(device)}
        self._fn = functions(
            compiled, vision_embed=vision_embed, vision_block=vision_block, merge=merge, embed=embed, block=block,
            head=head,
        )  # fmt: skip
        self.inputs: W = {}
        self.kv: list[tuple[torch.Tensor, torch.Tensor]] = []

    def units(self) -> Sequence[UnitSpec]:
        extra = {"height": 28 * self.cfg.side, "width": 28 * self.cfg.side, "image_tokens": self.cfg.image_tokens}
        # At most 60 GB of KV beside 17 GB of weights.
        decode = decode_grid(lambda b, c: b * c <= 128 * 8192)
        return [UnitSpec("encode", "encode", 1, extra=extra), *prefill_grid(), *decode]

    def has_image(self, unit: UnitSpec) -> bool:
        """A prompt long enough holds an image; a later chunk finds it in the cache."""
        return unit.tokens == unit.context and unit.tokens >= self.cfg.image_at + self.cfg.image_tokens

    def prepare(self, unit: UnitSpec) -> Callable[[], Any]:
        cfg, b, t = self.cfg, unit.batch, unit.tokens
        self.kv.clear()
        self.inputs = {}
        generator = torch.Generator(device=self.device).manual_seed(b * 65537 + unit.context)
        dtype = self.weights["embed"].dtype

        def random(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device).normal_(0, 1, generator=generator)

        if unit.name == "encode":
            self.inputs["pixels"] = random(b, 4 * cfg.image_tokens, cfg.patch_width)
            self.inputs["image"] = random(b, cfg.image_tokens, cfg.hidden)
            return lambda: self._encode()
        shape = (b, cfg.kv_heads, unit.context, cfg.head_dim)
        self.kv.extend((random(*shape), random(*shape)) for _ in range(cfg.layers))
        tokens = torch.randint(cfg.vocab, (b, t), device=self.device, generator=generator)
        first = unit.context - t
        seen = unit.context >= cfg.image_at + cfg.image_tokens  # the image is in the prompt or in the past
        self.inputs["next_token"] = tokens if t == 1 else torch.zeros(b, 1, dtype=torch.int64, device=self.device)
        self.inputs["position"] = torch.arange(first, unit.context, device=self.device)
        self.inputs["place"] = text_positions(cfg, unit.context, seen)[:, first:].contiguous().to(self.device)
        if t > 1:
            self.inputs["prompt"] = tokens
        if self.has_image(unit):
            self.inputs["image"] = random(b, cfg.image_tokens, cfg.hidden)
        return lambda: self._step(unit)

    @torch.no_grad()
    def _encode(self) -> torch.Tensor:
        w, i = self.weights, self.inputs
        with self.scope("patch"):
            x, residual = self._fn["vision_embed"](i["pixels"], w["vision.order"], under(w, "patch")), None
        for n in range(self.cfg.vision_layers):
            with self.scope(f"vision.{n}"):
                whole = n in self.cfg.full_layers
                groups = ((1, x.shape[1]),) if whole else tuple((count, 4 * size) for count, size in self.groups)
                tables = (w["vision.cos"], w["vision.sin"])
                x, residual = self._fn["vision_block"](x, residual, *tables, under(w, f"vision.{n}"), groups, self.cfg)
        with self.scope("merger"):
            self._fn["merge"](x, residual, w["vision.back"], under(w, "merger"), i["image"], self.cfg)
        return i["image"]

    @torch.no_grad()
    def _step(self, unit: UnitSpec) -> torch.Tensor:
        w, i, cfg, prefill = self.weights, self.inputs, self.cfg, unit.tokens > 1
        with self.scope("embed"):
            x = self._fn["embed"](i["prompt" if prefill else "next_token"], w["embed"], i.get("image"), cfg.image_at)
        for n in range(cfg.layers):
            with self.scope(f"layers.{n}"):
                x = self._fn["block"](
                    x, i["position"], i["place"], *self.kv[n], w["rope.cos"], w["rope.sin"],
                    under(w, f"layers.{n}"), cfg, prefill,
                )  # fmt: skip
        with self.scope("head"):
            logits: torch.Tensor = self._fn["head"](x, w["norm"], w["lm_head"], i["next_token"], cfg.eps)
        return logits

    def named_tensors(self) -> Iterable[NamedTensor]:
        image = self.cfg.image_tokens * self.cfg.hidden * 2
        return cached_tensors(self.weights, self.kv, self.inputs, {"image": image})

    def weights_of(self, module: str) -> str:
        leaf = module.rsplit(".", 1)[-1]
        if module in ("embed",) or module.startswith("patch"):
            return "embed"
        if module in ("norm", "lm_head", "head"):
            return "head"
        if module.startswith(("merger", "vision")):
            return "other"
        return "attention" if leaf in ("norm1", "wqkv", "bqkv", "wo", "cos", "sin") else "ffn"
