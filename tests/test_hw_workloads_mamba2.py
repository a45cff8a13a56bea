"""Mamba-2: prompts in pieces against whole ones, and the model against a reference implementation."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from hw.workloads.base import UnitSpec  # noqa: E402
from hw.workloads.mamba2 import Mamba2, Mamba2Config, block  # noqa: E402

pytestmark = pytest.mark.quick
TINY = Mamba2Config(layers=2, hidden=32, heads=8, head_dim=8, state=16, groups=2, conv=4, vocab=64)


def tiny() -> Mamba2:
    model = Mamba2("cpu", TINY, compiled=False)
    generator = torch.Generator().manual_seed(1)
    for name, w in model.weights.items():
        w = w.float()
        if w.dim() == 1 and "a_log" not in name and "dt_bias" not in name:
            w = w + 0.2 * torch.randn(w.shape, generator=generator)
        model.weights[name] = w
    return model


def run(model: Mamba2, tokens: torch.Tensor, past: int = 0, keep: bool = False) -> torch.Tensor:
    """Logits after `tokens` [B, T] at position `past`; `keep` goes on from the state of the last run."""
    b, t = tokens.shape
    state = list(model.state)
    step = model.prepare(UnitSpec("prefill" if t > 1 else "decode", "prefill", b, t, past + t))
    if keep:
        model.state[:] = state
    model.inputs["prompt" if t > 1 else "next_token"].copy_(tokens)
    return step()[:, -1]


@pytest.mark.parametrize("n", [2, 3, 8, 13])
def test_prefill_then_decode_equals_a_longer_prefill(n: int) -> None:
    model = tiny()
    tokens = torch.randint(TINY.vocab, (2, n + 1), generator=torch.Generator().manual_seed(n))
    whole = run(model, tokens)
    run(model, tokens[:, :n])
    torch.testing.assert_close(run(model, tokens[:, n:], n, keep=True), whole, atol=1e-4, rtol=1e-4)


def test_chunked_prefill_equals_whole_prefill() -> None:
    model = tiny()
    tokens = torch.randint(TINY.vocab, (1, 19), generator=torch.Generator().manual_seed(5))
    whole = run(model, tokens)
    run(model, tokens[:, :9])
    torch.testing.assert_close(run(model, tokens[:, 9:], 9, keep=True), whole, atol=1e-4, rtol=1e-4)


def test_parameters_of_the_published_model() -> None:
    shapes = Mamba2Config().shapes()
    assert sum(torch.Size(s).numel() for s in shapes.values()) == 7_285_403_648
    assert shapes["layers.0.in_proj"] == (18560, 4096)


@pytest.mark.parametrize("t,past", [(6, False), (6, True), (1, True)])
def test_blocks_trace_without_breaks(t: int, past: bool) -> None:
    model = tiny()
    w = {k.removeprefix("layers.0."): v for k, v in model.weights.items() if k.startswith("layers.0.")}
    x, residual = torch.randn(2, t, TINY.hidden), torch.randn(2, t, TINY.hidden)
    state = [torch.randn(2, TINY.conv - 1, TINY.conv_width), torch.randn(2, TINY.heads, TINY.head_dim, TINY.state)]
    copy = [s.clone() for s in state]
    expected = block(x, residual, *state, w, TINY, past)
    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(x, residual, *copy, w, TINY, past), expected)
    torch.testing.assert_close(copy, state)


def test_work_of_own_operators() -> None:
    model = tiny()  # 8 heads of 8, state 16, 2 groups
    shapes = {"x": (3, 1, 8, 8), "b": (3, 1, 2, 16)}
    work = model.work_of("ssm_scan", shapes, {}, "layers.0")
    assert work is not None and (work.kind, work.flops) == ("ssm_scan", 3 * 6 * 8 * 8 * 16)
    shapes = {"x": (3, 128, 8, 8), "b": (3, 128, 2, 16)}
    work = model.work_of("ssm_scan_first", shapes, {}, "layers.0")
    causal = 2 * 32 * 16 * 2 + 2 * 32 * 8 * 8  # per token: half a chunk of 64
    assert work is not None and work.flops == 3 * 128 * (causal + 2 * 2 * 8 * 8 * 16)
    work = model.work_of("ssm_conv", {"x": (3, 5, 96), "weight": (4, 96)}, {}, "layers.0")
    assert work is not None and work.kind == "conv" and 8 <= work.flops / (3 * 5 * 96) <= 16
    work = model.work_of("ssm_gated_rms_norm", {"y": (3, 5, 64)}, {}, "layers.0")
    assert work is not None and (work.kind, work.shape) == ("norm", {"elements": 960})
    assert model.work_of("mm", {}, {}, "layers.0") is None


def test_logits_equal_the_reference_implementation() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Mamba2Config(
        num_heads=8, head_dim=8, vocab_size=64, hidden_size=32, state_size=16, num_hidden_layers=2, expand=2,
        conv_kernel=4, n_groups=2, chunk_size=4, rms_norm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    reference = transformers.Mamba2ForCausalLM(config).eval()
    source = dict(reference.named_parameters())
    names = {
        "norm": "norm.weight", "in_proj": "mixer.in_proj.weight", "conv": "mixer.conv1d.weight",
        "conv_bias": "mixer.conv1d.bias", "dt_bias": "mixer.dt_bias", "a_log": "mixer.A_log", "skip": "mixer.D",
        "gate_norm": "mixer.norm.weight", "out_proj": "mixer.out_proj.weight",
    }  # fmt: skip
    model = tiny()
    for i in range(TINY.layers):
        for ours, theirs in names.items():
            with torch.no_grad():  # constants of the initialisation would hide a mistake
                if ours in ("norm", "gate_norm", "skip", "conv_bias"):
                    source[f"backbone.layers.{i}.{theirs}"].add_(
                        torch.randn_like(source[f"backbone.layers.{i}.{theirs}"])
                    )
            w = source[f"backbone.layers.{i}.{theirs}"].detach()
            model.weights[f"layers.{i}.{ours}"] = w.squeeze(1).T.contiguous() if ours == "conv" else w
    for ours, theirs in (("embed", "backbone.embeddings"), ("norm", "backbone.norm_f"), ("lm_head", "lm_head")):
        model.weights[ours] = source[f"{theirs}.weight"].detach()
    tokens = torch.randint(TINY.vocab, (2, 13))
    with torch.no_grad():
        expected = reference(tokens).logits[:, -1]
    torch.testing.assert_close(run(model, tokens), expected, atol=2e-4, rtol=2e-4)
