"""What several language models share, written once: normalisation, rotary positions, attention, embedding, head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F

from hw.workloads.base import NamedTensor


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2). x [B, H, T, D]; cos, sin [T, D/2] in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Grouped-query attention over a whole cache; the last query sees the last key."""
    new, context = q.shape[2], k.shape[2]
    if not causal or new == context:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    if q.is_cuda:  # `is_causal` of the public function counts from the first key, the flash kernel from the last
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    mask = torch.ones(new, context, dtype=torch.bool, device=q.device).tril(context - new)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def embed(token: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.embedding(token, table)


def head(x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, token: torch.Tensor, eps: float) -> torch.Tensor:
    """Greedy sampling of the last position into `token` [B, 1]; returns the logits."""
    logits = F.linear(rms_norm(x[:, -1:], norm, eps), weight)
    token.copy_(logits.argmax(dim=-1))
    return logits


def cached_tensors(
    weights: Mapping[str, torch.Tensor], kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
    inputs: Mapping[str, torch.Tensor], state_bytes: Mapping[str, int] | None = None,
) -> Iterable[NamedTensor]:  # fmt: skip
    """Named tensors of a model with a KV cache: weights, key and value caches [B, heads, C, head_dim], inputs.

    `state_bytes`: inputs that one launch hands to the next, with their bytes per sequence; the sampled token
    always is one.
    """
    for name, tensor in weights.items():
        yield NamedTensor(name, tensor, "weight")
    for i, pair in enumerate(kv):
        for name, cache in zip("kv", pair, strict=True):
            per_token = cache.shape[1] * cache.shape[3] * 2  # bf16
            yield NamedTensor(f"layers.{i}.kv.{name}", cache, "state", bytes_per_token=per_token)
    known = {"next_token": 8, **(state_bytes or {})}
    for name, tensor in inputs.items():
        size = known.get(name, 0)
        yield NamedTensor(name, tensor, "state" if size else "input", bytes_per_sequence=size)
