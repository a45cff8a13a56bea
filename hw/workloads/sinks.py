"""Attention with sinks and a sliding window, and what fills its cache, as PyTorch operators: plain PyTorch on the CPU,
Triton on the GPU.

A sink is a logit per head that takes part in the softmax and adds nothing to the sum. The last query is at the
last key; `window` > 0 lets a query see that many keys, its own included.
"""

from __future__ import annotations

import torch

from hw.workloads.language import rope


@torch.library.custom_op("tesserasim::flash_attention_sinks", mutates_args=(), device_types="cpu")
def attention_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int
) -> torch.Tensor:
    """query [B, H, T, D], key and value [B, KV, C, D], sinks [H] -> [B, T, H, D]."""
    (_, h, t, d), (_, kv, c, _) = query.shape, key.shape
    k, v = (x.float().repeat_interleave(h // kv, dim=1) for x in (key, value))
    logits = query.float() @ k.transpose(-1, -2) * d**-0.5
    age = torch.arange(c - t, c, device=query.device)[:, None] - torch.arange(c, device=query.device)
    seen = (age >= 0) & (age < (window or c + 1))
    logits = logits.masked_fill(~seen, float("-inf"))
    sink = sinks.float()[None, :, None, None].expand(*logits.shape[:3], 1)
    p = torch.cat((logits, sink), dim=-1).softmax(-1)[..., :-1]
    return (p @ v).transpose(1, 2).to(query.dtype).contiguous()


@attention_sinks.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int) -> torch.Tensor:
    b, h, t, d = query.shape
    return query.new_empty(b, t, h, d)


@attention_sinks.register_kernel("cuda")
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int) -> torch.Tensor:
    from hw.workloads.triton_sinks import decode, prefill

    return decode(query, key, value, sinks) if query.shape[2] == 1 else prefill(query, key, value, sinks, window)


@torch.library.custom_op("tesserasim::rope_kv_index_copy", mutates_args=("k_cache", "v_cache"), device_types="cpu")
def rope_append(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor, heads: int,
) -> torch.Tensor:  # fmt: skip
    """Rotated queries [B, T, heads, D]; rotated keys and the values go to their `position` [T] in the caches.

    qkv [B, T, (heads + 2 KV) D], cos and sin [positions, D / 2] in float32, caches [B, KV, C, D] with any strides.
    One operator, since PyTorch's compiler may copy a whole cache for one of two `index_copy_` before an operator.
    """
    (b, t, width), (_, kv, _, d) = qkv.shape, k_cache.shape
    parts = qkv.view(b, t, width // d, d).transpose(1, 2).split([heads, kv, kv], dim=1)
    c, s = cos[position], sin[position]
    k_cache.index_copy_(2, position, rope(parts[1], c, s))
    v_cache.index_copy_(2, position, parts[2])
    return rope(parts[0], c, s).transpose(1, 2).contiguous()


@rope_append.register_fake
def _(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor, heads: int,
) -> torch.Tensor:  # fmt: skip
    return qkv.new_empty(*qkv.shape[:2], heads, k_cache.shape[3])


@rope_append.register_kernel("cuda")
def _(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor, heads: int,
) -> torch.Tensor:  # fmt: skip
    from hw.workloads.triton_sinks import rotate_and_append

    return rotate_and_append(qkv, cos, sin, position, k_cache, v_cache, heads)
