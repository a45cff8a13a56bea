"""Small language models of hw/workloads, run step by step on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from hw.workloads.base import UnitSpec


def run_tokens(model: Any, tokens: torch.Tensor, past: int = 0, image: torch.Tensor | None = None) -> torch.Tensor:
    """Logits after `tokens` [B, T] at position `past`, on the caches of the last run."""
    b, t = tokens.shape
    before = model.kv[:]
    step = model.prepare(UnitSpec("prefill" if t > 1 else "decode", "prefill", b, t, past + t))
    for new, old in zip(model.kv, before, strict=False):
        for n, o in zip(new, old, strict=True):
            n[:, :, :past] = o[:, :, :past]
    model.inputs["prompt" if t > 1 else "next_token"].copy_(tokens)
    if "image" in model.inputs:
        model.inputs["image"].copy_(image)
    return step()[:, -1]
