"""Llama: decoding and chunked prefill continue a prompt as if it had been one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from hw.workloads.base import UnitSpec  # noqa: E402
from hw.workloads.language import attend  # noqa: E402
from hw.workloads.llama import Llama, LlamaConfig  # noqa: E402

pytestmark = pytest.mark.quick
TINY = LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64)


def caches(model: Llama, tokens: torch.Tensor, past: int) -> list[torch.Tensor]:
    """Run `tokens` [1, T] at position `past` on the caches of the last run; returns the caches after it."""
    before = model.kv[:]
    step = model.prepare(UnitSpec("prefill", "prefill", 1, tokens.shape[1], past + tokens.shape[1]))
    for new, old in zip(model.kv, before, strict=False):
        for n, o in zip(new, old, strict=True):
            n[:, :, : o.shape[2]] = o
    model.inputs["prompt" if tokens.shape[1] > 1 else "next_token"].copy_(tokens)
    step()
    return [t for pair in model.kv for t in pair]


@pytest.mark.parametrize("first", [5, 8])
def test_chunked_prefill_and_decode_continue_the_prompt(first: int) -> None:
    """The second layer's cache depends on all of the first layer's attention."""
    model = Llama("cpu", TINY, compiled=False)
    model.weights = {k: v.float() for k, v in model.weights.items()}
    tokens = torch.randint(TINY.vocab, (1, 9), generator=torch.Generator().manual_seed(0))
    prepare = model.prepare

    def in_float32(unit: UnitSpec):  # type: ignore[no-untyped-def]
        step = prepare(unit)
        model.kv[:] = [(k.float(), v.float()) for k, v in model.kv]
        return step

    model.prepare = in_float32  # type: ignore[method-assign]
    model.kv.clear()
    whole = caches(model, tokens, 0)
    last = model.inputs["next_token"].clone()
    model.kv.clear()
    caches(model, tokens[:, :first], 0)
    parts = caches(model, tokens[:, first:], first)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)
    assert torch.equal(model.inputs["next_token"], last)


def test_a_chunk_sees_its_past_and_nothing_later() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    y = attend(q, k, v, causal=True)
    for i in range(3):
        alone = attend(q[:, :, i : i + 1], k[:, :, : 5 + i], v[:, :, : 5 + i], causal=False)
        torch.testing.assert_close(y[:, :, i : i + 1], alone)
