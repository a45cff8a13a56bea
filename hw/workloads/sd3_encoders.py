"""What Stable Diffusion 3.5 runs around its denoising steps: three text encoders and the VAE decoder.

Shapes: CLIP-L (12 layers, width 768, 12 heads, quick GELU), OpenCLIP bigG (32 layers, 1280, 20 heads, GELU), both
over 77 tokens; T5-XXL encoder (24 layers, 4096, 64 heads of 64, gated feed-forward 10240) over 256 tokens;
AutoencoderKL decoder (16 latent channels, widths 512, 512, 256, 128, three blocks a level, group norm of 32).
Guidance encodes two prompts per image. The results carry the names under which the denoising step reads them:
`text` [2 N, 333, 4096] and `pooled` [2 N, 2048]; the decoder reads `latent`. Weights are random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hw.workloads.base import NamedTensor, UnitSpec, Workload, functions, under

W = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ClipConfig:
    layers: int
    width: int
    heads: int
    quick: bool  # x sigmoid(1.702 x) instead of GELU
    vocab: int = 49408
    tokens: int = 77

    def shapes(self) -> Shapes:
        d = self.width
        layer = {
            "norm1": (d,), "norm1_bias": (d,), "qkv": (3 * d, d), "qkv_bias": (3 * d,), "out": (d, d),
            "out_bias": (d,), "norm2": (d,), "norm2_bias": (d,), "fc1": (4 * d, d), "fc1_bias": (4 * d,),
            "fc2": (d, 4 * d), "fc2_bias": (d,),
        }  # fmt: skip
        ends = {"embed": (self.vocab, d), "pos": (self.tokens, d), "norm": (d,), "norm_bias": (d,), "proj": (d, d)}
        return {**ends, **{f"{i}.{k}": s for i in range(self.layers) for k, s in layer.items()}}


@dataclass(frozen=True)
class T5Config:
    layers: int = 24
    width: int = 4096
    heads: int = 64
    head_dim: int = 64
    ffn: int = 10240
    vocab: int = 32128
    tokens: int = 256
    buckets: int = 32
    distance: int = 128

    def shapes(self) -> Shapes:
        d, inner = self.width, self.heads * self.head_dim
        layer = {
            "norm1": (d,), "qkv": (3 * inner, d), "out": (d, inner), "norm2": (d,), "wi": (2 * self.ffn, d),
            "wo": (d, self.ffn),
        }  # fmt: skip
        ends = {"embed": (self.vocab, d), "bias": (self.buckets, self.heads), "norm": (d,)}
        return {**ends, **{f"{i}.{k}": s for i in range(self.layers) for k, s in layer.items()}}


@dataclass(frozen=True)
class VaeConfig:
    channels: int = 16
    widths: tuple[int, ...] = (512, 512, 256, 128)
    blocks: int = 3
    groups: int = 32
    scale: float = 1.5305
    shift: float = 0.0609

    def shapes(self) -> Shapes:
        found: Shapes = {}

        def layer(name: str, *shape: int) -> None:
            found[name] = shape
            found[f"{name}_bias"] = shape[:1]

        def residual(name: str, a: int, b: int) -> None:
            layer(f"{name}.norm1", a)
            layer(f"{name}.conv1", b, a, 3, 3)
            layer(f"{name}.norm2", b)
            layer(f"{name}.conv2", b, b, 3, 3)
            if a != b:
                layer(f"{name}.skip", b, a, 1, 1)

        d = self.widths[0]
        layer("in.conv", d, self.channels, 3, 3)
        for name in ("mid0", "mid1"):
            residual(name, d, d)
        layer("attn.norm", d)
        layer("attn.qkv", 3 * d, d)
        layer("attn.out", d, d)
        for i, width in enumerate(self.widths):
            for j in range(self.blocks):
                residual(f"up{i}.{j}", d, width)
                d = width
            if i < len(self.widths) - 1:
                layer(f"up{i}.conv", d, d, 3, 3)
        layer("out.norm", d)
        layer("out.conv", 3, d, 3, 3)
        return found


def _heads(x: torch.Tensor, heads: int) -> list[torch.Tensor]:
    b, t, _ = x.shape
    return list(x.view(b, t, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0))


def clip_embed(tokens: torch.Tensor, table: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return F.embedding(tokens, table) + pos


def clip_block(x: torch.Tensor, w: W, cfg: ClipConfig) -> torch.Tensor:
    """One causal layer, x [B, T, width]."""
    h = F.layer_norm(x, (cfg.width,), w["norm1"], w["norm1_bias"])
    q, k, v = _heads(F.linear(h, w["qkv"], w["qkv_bias"]), cfg.heads)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(y.transpose(1, 2).flatten(2), w["out"], w["out_bias"])
    h = F.linear(F.layer_norm(x, (cfg.width,), w["norm2"], w["norm2_bias"]), w["fc1"], w["fc1_bias"])
    return x + F.linear(h * torch.sigmoid(1.702 * h) if cfg.quick else F.gelu(h), w["fc2"], w["fc2_bias"])


def clip_pool(x: torch.Tensor, tokens: torch.Tensor, w: W, pooled: torch.Tensor) -> None:
    """Projection of the end token, which has the largest id, into `pooled`."""
    row = x[torch.arange(x.shape[0], device=x.device), tokens.argmax(-1)]
    pooled.copy_(F.linear(F.layer_norm(row, (x.shape[-1],), w["norm"], w["norm_bias"]), w["proj"]))


def t5_buckets(cfg: T5Config) -> torch.Tensor:
    """Bucket of every (query, key) distance [T, T]: exact when near, logarithmic when far, a half per side."""
    at = torch.arange(cfg.tokens)
    distance = at[None, :] - at[:, None]
    half, near = cfg.buckets // 2, cfg.buckets // 4
    size = distance.abs()
    far = torch.log(size.clamp(min=1).float() / near) / math.log(cfg.distance / near) * (half - near)
    return (distance > 0) * half + torch.where(size < near, size, (near + far.long()).clamp(max=half - 1))


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def t5_embed(
    tokens: torch.Tensor, table: torch.Tensor, bias: torch.Tensor, buckets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings, and the position bias [1, heads, T, T] that all layers add to their logits."""
    return F.embedding(tokens, table), F.embedding(buckets, bias).permute(2, 0, 1)[None].contiguous()


def t5_block(x: torch.Tensor, bias: torch.Tensor, w: W, cfg: T5Config) -> torch.Tensor:
    q, k, v = _heads(F.linear(_rms(x, w["norm1"]), w["qkv"]), cfg.heads)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(x.shape[0], -1, -1, -1), scale=1.0)
    x = x + F.linear(y.transpose(1, 2).flatten(2), w["out"])
    gate, up = F.linear(_rms(x, w["norm2"]), w["wi"]).chunk(2, dim=-1)
    return x + F.linear(F.gelu(gate, approximate="tanh") * up, w["wo"])


def join(left: torch.Tensor, right: torch.Tensor, t5: torch.Tensor, norm: torch.Tensor, text: torch.Tensor) -> None:
    """Both CLIP sequences side by side, padded to T5's width, then T5's tokens."""
    clip = torch.cat((left, right), dim=-1)
    text.copy_(torch.cat((F.pad(clip, (0, text.shape[-1] - clip.shape[-1])), _rms(t5, norm)), dim=1))


def _residual(x: torch.Tensor, w: W, groups: int) -> torch.Tensor:
    h = F.silu(F.group_norm(x, groups, w["norm1"], w["norm1_bias"], 1e-6))
    h = F.conv2d(h, w["conv1"], w["conv1_bias"], padding=1)
    h = F.silu(F.group_norm(h, groups, w["norm2"], w["norm2_bias"], 1e-6))
    h = F.conv2d(h, w["conv2"], w["conv2_bias"], padding=1)
    return h + (F.conv2d(x, w["skip"], w["skip_bias"]) if "skip" in w else x)


def vae_middle(latent: torch.Tensor, w: W, cfg: VaeConfig) -> torch.Tensor:
    """latent [N, C, H, W] to features of the first width, through residual, attention, residual."""
    x = F.conv2d(latent / cfg.scale + cfg.shift, w["in.conv"], w["in.conv_bias"], padding=1)
    x = _residual(x.contiguous(memory_format=torch.channels_last), under(w, "mid0"), cfg.groups)
    h = F.group_norm(x, cfg.groups, w["attn.norm"], w["attn.norm_bias"], 1e-6).flatten(2).transpose(1, 2)
    q, k, v = _heads(F.linear(h, w["attn.qkv"], w["attn.qkv_bias"]), 1)
    y = F.scaled_dot_product_attention(q, k, v).squeeze(1)
    x = x + F.linear(y, w["attn.out"], w["attn.out_bias"]).transpose(1, 2).view_as(x)
    return _residual(x, under(w, "mid1"), cfg.groups)


def vae_up(x: torch.Tensor, w: W, cfg: VaeConfig) -> torch.Tensor:
    for j in range(cfg.blocks):
        x = _residual(x, under(w, str(j)), cfg.groups)
    if "conv" not in w:
        return x
    return F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest"), w["conv"], w["conv_bias"], padding=1)


def vae_out(x: torch.Tensor, w: W, image: torch.Tensor, cfg: VaeConfig) -> None:
    h = F.silu(F.group_norm(x, cfg.groups, w["norm"], w["norm_bias"], 1e-6))
    image.copy_(F.conv2d(h, w["conv"], w["conv_bias"], padding=1))


class Sd3Encoders(Workload):
    name = "sd3.5-encoders"
    model = "SD3.5-medium"

    def __init__(
        self, device: str = "cuda", clip_l: ClipConfig | None = None, clip_g: ClipConfig | None = None,
        t5: T5Config | None = None, vae: VaeConfig | None = None, latent: int = 128, compiled: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(device)
        left, right = clip_l or ClipConfig(12, 768, 12, True), clip_g or ClipConfig(32, 1280, 20, False)
        self.clips = {"clip_l": left, "clip_g": right}
        self.t5, self.vae, self.latent = t5 or T5Config(), vae or VaeConfig(), latent
        generator = torch.Generator(device=device).manual_seed(0)
        self.weights: W = {}
        shapes = {k: c.shapes() for k, c in self.clips.items()} | {"t5": self.t5.shapes(), "vae": self.vae.shapes()}
        for prefix, parameters in shapes.items():
            for name, shape in parameters.items():
                w = torch.empty(shape, dtype=torch.bfloat16, device=device)
                if len(shape) > 1:
                    w.normal_(0, math.prod(shape[1:]) ** -0.5, generator=generator)
                    w = w.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else w
                else:
                    w.fill_(0 if name.endswith("_bias") else 1)
                self.weights[f"{prefix}.{name}"] = w
        self.weights["t5.buckets"] = t5_buckets(self.t5).to(device)
        self._fn = functions(
            compiled, clip_embed=clip_embed, clip_block=clip_block, clip_pool=clip_pool, t5_embed=t5_embed,
            t5_block=t5_block, join=join, vae_middle=vae_middle, vae_up=vae_up, vae_out=vae_out,
        )  # fmt: skip
        self.inputs: W = {}

    def units(self) -> Sequence[UnitSpec]:
        extra = {"height": 8 * self.latent, "width": 8 * self.latent, "cfg": True}
        tokens = {"clip_tokens": self.clips["clip_l"].tokens, "t5_tokens": self.t5.tokens}
        text = UnitSpec("encode-text", "encode", 1, extra=extra | tokens)
        return [text, UnitSpec("vae-decode", "other", 1, extra=extra)]

    def prepare(self, unit: UnitSpec) -> Callable[[], Any]:
        n, dtype = unit.batch, self.weights["t5.embed"].dtype
        generator = torch.Generator(device=self.device).manual_seed(n)

        def random(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device).normal_(0, 1, generator=generator)

        if unit.name == "vae-decode":
            self.inputs = {"latent": random(n, self.vae.channels, self.latent, self.latent)}
            side = self.latent * 2 ** (len(self.vae.widths) - 1)
            self.inputs["image"] = random(n, 3, side, side).contiguous(memory_format=torch.channels_last)
            return lambda: self._decode()
        left = self.clips["clip_l"]
        ids = [torch.randint(v, (2 * n, t), device=self.device, generator=generator)
               for v, t in ((left.vocab, left.tokens), (self.t5.vocab, self.t5.tokens))]  # fmt: skip
        width = sum(c.width for c in self.clips.values())
        self.inputs = {
            "clip_tokens": ids[0], "t5_tokens": ids[1], "pooled": random(2 * n, width),
            "text": random(2 * n, left.tokens + self.t5.tokens, self.t5.width),
        }  # fmt: skip
        return lambda: self._encode()

    @torch.no_grad()
    def _encode(self) -> tuple[torch.Tensor, torch.Tensor]:
        w, i, fn, hidden, at = self.weights, self.inputs, self._fn, [], 0
        for name, cfg in self.clips.items():
            with self.scope(f"{name}.embed"):
                x = before = fn["clip_embed"](i["clip_tokens"], w[f"{name}.embed"], w[f"{name}.pos"])
            for n in range(cfg.layers):
                with self.scope(f"{name}.{n}"):
                    before, x = x, fn["clip_block"](x, under(w, f"{name}.{n}"), cfg)
            hidden.append(before)  # the sequence comes from the last layer but one
            with self.scope(f"{name}.pool"):
                fn["clip_pool"](x, i["clip_tokens"], under(w, name), i["pooled"][:, at : at + cfg.width])
            at += cfg.width
        with self.scope("t5.embed"):
            x, bias = fn["t5_embed"](i["t5_tokens"], w["t5.embed"], w["t5.bias"], w["t5.buckets"])
        for n in range(self.t5.layers):
            with self.scope(f"t5.{n}"):
                x = fn["t5_block"](x, bias, under(w, f"t5.{n}"), self.t5)
        with self.scope("join"):
            fn["join"](*hidden, x, w["t5.norm"], i["text"])
        return i["text"], i["pooled"]

    @torch.no_grad()
    def _decode(self) -> torch.Tensor:
        w, i = under(self.weights, "vae"), self.inputs
        with self.scope("vae.middle"):
            x = self._fn["vae_middle"](i["latent"], w, self.vae)
        for n in range(len(self.vae.widths)):
            with self.scope(f"vae.up{n}"):
                x = self._fn["vae_up"](x, under(w, f"up{n}"), self.vae)
        with self.scope("vae.out"):
            self._fn["vae_out"](x, under(w, "out"), i["image"], self.vae)
        return i["image"]

    def named_tensors(self) -> Iterable[NamedTensor]:
        for name, tensor in self.weights.items():
            yield NamedTensor(name, tensor, "weight")
        for name, tensor in self.inputs.items():
            size = tensor.numel() * tensor.element_size() // tensor.shape[0]
            role = {"latent": "state", "text": "output", "pooled": "output", "image": "output"}.get(name, "input")
            yield NamedTensor(name, tensor, role, bytes_per_sequence=size if role == "state" else 0)

    def weights_of(self, module: str) -> str:
        if ".embed" in module:
            return "embed"
        return "ffn" if module.rsplit(".", 1)[-1].startswith(("fc", "wi", "wo")) else "other"
