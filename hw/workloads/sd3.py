"""Stable Diffusion 3.5 medium (MMDiT-X), one denoising step at 1024 x 1024 with classifier-free guidance.

Shapes: stabilityai/stable-diffusion-3.5-medium (24 joint blocks, width 1536, 24 heads of 64, MLP ratio 4, a
second image-only attention in blocks 0-12, RMS-normed queries and keys, the text stream ends in the last
block). 128 x 128 latents in patches of 2 give 4096 image tokens; the prompt is 77 CLIP + 256 T5 tokens of
width 4096, the pooled text 2048 wide. Guidance runs both prompts as one batch of 2 per image, and the step
ends with the Euler update of the latents. Weights are random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hw.workloads.base import NamedTensor, UnitSpec, Workload, allow_recompiles


@dataclass(frozen=True)
class Sd3Config:
    layers: int = 24
    dual_layers: int = 13  # blocks 0-12
    width: int = 1536
    heads: int = 24
    mlp: int = 6144
    latent: int = 128
    channels: int = 16
    patch: int = 2
    text_tokens: int = 333
    text_width: int = 4096
    pooled: int = 2048
    guidance: float = 4.5
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def image_tokens(self) -> int:
        return (self.latent // self.patch) ** 2


W = dict[str, torch.Tensor]


def _layer_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), eps=eps)


def _modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


def _heads(qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, cfg: Sd3Config) -> list[torch.Tensor]:
    """Split a fused projection [B, T, 3 width] into normed q, k and v, each [B, T, heads, head_dim]."""
    b, t, _ = qkv.shape
    q, k, v = qkv.view(b, t, 3, cfg.heads, cfg.head_dim).unbind(2)
    q = F.rms_norm(q, (cfg.head_dim,), q_norm, cfg.eps)
    k = F.rms_norm(k, (cfg.head_dim,), k_norm, cfg.eps)
    return [q, k, v]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return y.transpose(1, 2).flatten(2)


def _mlp(x: torch.Tensor, w: W, p: str) -> torch.Tensor:
    h = F.gelu(F.linear(x, w[f"{p}.fc1"], w[f"{p}.fc1_bias"]), approximate="tanh")
    return F.linear(h, w[f"{p}.fc2"], w[f"{p}.fc2_bias"])


def block(
    x: torch.Tensor, c: torch.Tensor, cond: torch.Tensor, w: W, cfg: Sd3Config, dual: bool, last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One joint block. x [B, image tokens, width], c [B, text tokens, width], cond [B, width] (after SiLU)."""
    xm = F.linear(cond, w["x.mod"], w["x.mod_bias"]).chunk(9 if dual else 6, dim=-1)
    cm = F.linear(cond, w["c.mod"], w["c.mod_bias"]).chunk(2 if last else 6, dim=-1)
    x_n = _layer_norm(x, cfg.eps)
    c_n = _layer_norm(c, cfg.eps)
    xq = _heads(F.linear(_modulate(x_n, xm[0], xm[1]), w["x.qkv"], w["x.qkv_bias"]), w["x.q_norm"], w["x.k_norm"], cfg)
    c_in = _modulate(c_n, cm[1], cm[0]) if last else _modulate(c_n, cm[0], cm[1])
    cq = _heads(F.linear(c_in, w["c.qkv"], w["c.qkv_bias"]), w["c.q_norm"], w["c.k_norm"], cfg)
    q, k, v = (torch.cat((a, b), dim=1) for a, b in zip(xq, cq, strict=True))
    y = _attend(q, k, v)
    image, text = y[:, : x.shape[1]], y[:, x.shape[1] :]
    x = x + xm[2][:, None] * F.linear(image, w["x.proj"], w["x.proj_bias"])
    if dual:
        q2 = _heads(
            F.linear(_modulate(x_n, xm[6], xm[7]), w["x2.qkv"], w["x2.qkv_bias"]), w["x2.q_norm"], w["x2.k_norm"], cfg
        )
        x = x + xm[8][:, None] * F.linear(_attend(*q2), w["x2.proj"], w["x2.proj_bias"])
    x = x + xm[5][:, None] * _mlp(_modulate(_layer_norm(x, cfg.eps), xm[3], xm[4]), w, "x")
    if last:
        return x, c
    c = c + cm[2][:, None] * F.linear(text, w["c.proj"], w["c.proj_bias"])
    c = c + cm[5][:, None] * _mlp(_modulate(_layer_norm(c, cfg.eps), cm[3], cm[4]), w, "c")
    return x, c


def embed(
    latent: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor, sigma: torch.Tensor, w: W, cfg: Sd3Config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """latent [N, C, H, W] of N images; text and pooled of 2 N prompts; sigma [1] -> x, c, cond for batch 2 N."""
    n = cfg.latent // cfg.patch
    patches = latent.unfold(2, cfg.patch, cfg.patch).unfold(3, cfg.patch, cfg.patch)  # N C n n p p
    patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(latent.shape[0], n * n, -1)
    x = (F.linear(patches, w["patch"], w["patch_bias"]) + w["pos"]).repeat(2, 1, 1)
    half = 128
    frequency = torch.exp(-9.210340371976184 * torch.arange(half, device=sigma.device) / half)
    angle = sigma[:, None] * 1000 * frequency[None]
    t = torch.cat((angle.cos(), angle.sin()), dim=-1).to(x.dtype)
    t = F.linear(F.silu(F.linear(t, w["time1"], w["time1_bias"])), w["time2"], w["time2_bias"])
    p = F.linear(F.silu(F.linear(pooled, w["pool1"], w["pool1_bias"])), w["pool2"], w["pool2_bias"])
    return x, F.linear(text, w["context"], w["context_bias"]), F.silu(t + p)


def head(
    x: torch.Tensor, cond: torch.Tensor, latent: torch.Tensor, sigma: torch.Tensor, w: W, cfg: Sd3Config
) -> None:
    """Project to velocity, combine the guided halves, take one Euler step in place."""
    shift, scale = F.linear(cond, w["mod"], w["mod_bias"]).chunk(2, dim=-1)
    y = F.linear(_modulate(_layer_norm(x, cfg.eps), shift, scale), w["out"], w["out_bias"])
    n = cfg.latent // cfg.patch
    y = y.view(x.shape[0], n, n, cfg.patch, cfg.patch, cfg.channels).permute(0, 5, 1, 3, 2, 4).reshape(
        x.shape[0], cfg.channels, cfg.latent, cfg.latent
    )
    text, uncond = y.chunk(2)
    latent.sub_((uncond + cfg.guidance * (text - uncond)) * (sigma / 28).to(y.dtype))


class StableDiffusion3(Workload):
    name = "sd3.5-medium"
    model = "SD3.5-medium"

    def __init__(self, device: str = "cuda", cfg: Sd3Config | None = None, compiled: bool = True) -> None:
        super().__init__(device)
        self.cfg = cfg or Sd3Config()
        self._generator = torch.Generator(device=device).manual_seed(0)
        self.weights: W = {}
        self._make_weights()
        self._fn: dict[str, Callable[..., Any]] = {"embed": embed, "block": block, "head": head}
        if compiled:
            allow_recompiles()
            self._fn = {k: torch.compile(f, fullgraph=True, dynamic=False) for k, f in self._fn.items()}
        self.inputs: dict[str, torch.Tensor] = {}

    def _linear(self, name: str, out: int, into: int) -> None:
        w = torch.empty(out, into, dtype=torch.bfloat16, device=self.device)
        self.weights[name] = w.normal_(0, into**-0.5, generator=self._generator)
        self.weights[f"{name}_bias"] = torch.zeros(out, dtype=torch.bfloat16, device=self.device)

    def _make_weights(self) -> None:
        c = self.cfg
        d = c.width
        self._linear("embed.patch", d, c.channels * c.patch**2)
        pos = torch.empty(1, c.image_tokens, d, dtype=torch.bfloat16, device=self.device)
        self.weights["embed.pos"] = pos.normal_(0, 0.02, generator=self._generator)
        for name, into in (("time1", 256), ("time2", d), ("pool1", c.pooled), ("pool2", d), ("context", c.text_width)):
            self._linear(f"embed.{name}", d, into)
        for i in range(c.layers):
            p = f"layers.{i}"
            last, dual = i == c.layers - 1, i < c.dual_layers
            self._linear(f"{p}.x.mod", (9 if dual else 6) * d, d)
            self._linear(f"{p}.c.mod", (2 if last else 6) * d, d)
            for s in ("x", "c", *(("x2",) if dual else ())):
                self._linear(f"{p}.{s}.qkv", 3 * d, d)
                for n in ("q_norm", "k_norm"):
                    self.weights[f"{p}.{s}.{n}"] = torch.ones(c.head_dim, dtype=torch.bfloat16, device=self.device)
                if not (last and s == "c"):
                    self._linear(f"{p}.{s}.proj", d, d)
                    if s != "x2":
                        self._linear(f"{p}.{s}.fc1", c.mlp, d)
                        self._linear(f"{p}.{s}.fc2", d, c.mlp)
        self._linear("head.mod", 2 * d, d)
        self._linear("head.out", c.patch**2 * c.channels, d)

    def units(self) -> Sequence[UnitSpec]:
        extra = {"height": 8 * self.cfg.latent, "width": 8 * self.cfg.latent, "cfg": True}
        return [UnitSpec("denoise", "denoise", 1, extra=extra)]

    def prepare(self, unit: UnitSpec) -> Callable[[], None]:
        c, n = self.cfg, unit.batch

        def random(*shape: int) -> torch.Tensor:
            x = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            x.normal_(0, 1, generator=self._generator)
            return x

        self.inputs = {
            "latent": random(n, c.channels, c.latent, c.latent), "text": random(2 * n, c.text_tokens, c.text_width),
            "pooled": random(2 * n, c.pooled), "sigma": torch.full((1,), 0.7, device=self.device),
        }  # fmt: skip
        return lambda: self._step()

    def _under(self, prefix: str) -> W:
        return {k[len(prefix) + 1 :]: v for k, v in self.weights.items() if k.startswith(prefix + ".")}

    @torch.no_grad()
    def _step(self) -> None:
        c, i = self.cfg, self.inputs
        with self.scope("embed"):
            x, text, cond = self._fn["embed"](
                i["latent"], i["text"], i["pooled"], i["sigma"], self._under("embed"), c
            )
        for n in range(c.layers):
            with self.scope(f"layers.{n}"):
                dual, last = n < c.dual_layers, n == c.layers - 1
                x, text = self._fn["block"](x, text, cond, self._under(f"layers.{n}"), c, dual, last)
        with self.scope("head"):
            self._fn["head"](x, cond, i["latent"], i["sigma"], self._under("head"), c)

    def named_tensors(self) -> Iterable[NamedTensor]:
        for name, tensor in self.weights.items():
            yield NamedTensor(name, tensor, "weight")
        for name, tensor in self.inputs.items():
            size = tensor.numel() * tensor.element_size()
            if name == "latent":
                yield NamedTensor(name, tensor, "state", bytes_per_sequence=size // tensor.shape[0])
            else:
                yield NamedTensor(name, tensor, "input")

    def weights_of(self, module: str) -> str:
        if module.startswith("embed"):
            return "embed"
        if module.startswith("head"):
            return "head"
        return "ffn" if module.rsplit(".", 1)[-1].startswith(("fc1", "fc2")) else "attention"
