"""Qwen2.5-VL: tower, positions and text model against a reference implementation; decoding against prefill."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from language_cases import run_tokens  # noqa: E402

from hw.workloads.base import UnitSpec, under  # noqa: E402
from hw.workloads.qwen_vl import QwenVL, QwenVLConfig, _aligned, block, merge, vision_block, windows  # noqa: E402

TINY = QwenVLConfig(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=48, vocab=64, sections=(2, 3, 3), vision_layers=3,
    vision_hidden=32, vision_heads=2, vision_ffn=40, full_layers=(1,), patch=2, side=5, image_at=3,
)  # fmt: skip


def tiny() -> QwenVL:
    model = QwenVL("cpu", TINY, compiled=False)
    generator = torch.Generator().manual_seed(1)
    for name, shape in TINY.shapes().items():
        w = model.weights[name].float()
        assert w.shape == shape
        model.weights[name] = w + 0.2 * torch.randn(w.shape, generator=generator) if w.dim() == 1 else w
    return model


@pytest.mark.quick
@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("new", [1, 4])
def test_decode_and_chunks_continue_the_prompt(image: bool, new: int) -> None:
    model = tiny()
    t = 36 if image else 14
    pixels = torch.randn(2, TINY.image_tokens, TINY.hidden) if image else None
    tokens = torch.randint(TINY.vocab, (2, t), generator=torch.Generator().manual_seed(0))
    whole = run_tokens(model, tokens, image=pixels)
    run_tokens(model, tokens[:, :-new], image=pixels)
    torch.testing.assert_close(run_tokens(model, tokens[:, -new:], t - new), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.quick
def test_published_sizes() -> None:
    cfg = QwenVLConfig()
    assert sum(torch.Size(s).numel() for s in cfg.shapes().values()) == 8_292_166_656
    tower = [s for k, s in cfg.shapes().items() if k.startswith(("vision", "patch", "merger"))]
    assert round(sum(torch.Size(s).numel() for s in tower) / 1e6, 1) == 676.6
    assert (cfg.image_tokens, windows(cfg)[1]) == (784, [(49, 16)])
    assert windows(replace(cfg, side=18))[1] == [(16, 16), (8, 8), (1, 4)]
    assert 2 * 2 * cfg.layers * cfg.kv_heads * cfg.head_dim == 57344


@pytest.mark.quick
def test_aligned_feed_forward_equals_the_plain_one() -> None:
    w13, b13, w2, x = torch.randn(2 * 13, 6), torch.randn(2 * 13), torch.randn(5, 13), torch.randn(4, 6)
    results = []
    for change in (_aligned, lambda _name, w: w):
        up, bias, down = (change(f"vision.0.{n}", w) for n, w in (("w13", w13), ("b13", b13), ("w2", w2)))
        gate, y = torch.nn.functional.linear(x, up, bias).chunk(2, dim=-1)
        results.append(torch.nn.functional.silu(gate) * y @ down.T)
        width = down.shape[1]
    assert width == 13 and _aligned("vision.0.w2", w2).shape == (5, 16)
    torch.testing.assert_close(*results)
    assert _aligned("layers.0.w2", w2) is w2


@pytest.mark.quick
def test_blocks_trace_without_breaks() -> None:
    model = tiny()
    w = model.weights
    x, n = torch.randn(1, 4 * TINY.image_tokens, TINY.vision_hidden), tuple((c, 4 * s) for c, s in model.groups)
    args = (x, torch.randn_like(x), w["vision.cos"], w["vision.sin"], under(w, "vision.0"), n, TINY)
    traced = torch.compile(vision_block, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(traced(*args), vision_block(*args))
    image = torch.zeros(1, TINY.image_tokens, TINY.hidden)
    torch.compile(merge, fullgraph=True, dynamic=False, backend="aot_eager")(
        x, torch.randn_like(x), w["vision.back"], under(w, "merger"), image, TINY
    )
    assert image.abs().sum() > 0
    for t, c in ((6, 6), (4, 9), (1, 9)):
        caches = [torch.randn(2, TINY.kv_heads, c, TINY.head_dim) for _ in range(2)]
        position = torch.arange(c - t, c)
        rest = (w["rope.cos"], w["rope.sin"], under(w, "layers.0"), TINY, t > 1)
        x = torch.randn(2, t, TINY.hidden)
        expected = block(x, position, position.expand(3, -1), *(k.clone() for k in caches), *rest)
        traced = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
        torch.testing.assert_close(traced(x, position, position.expand(3, -1), *caches, *rest), expected)


def test_whole_model_equals_the_reference_implementation() -> None:
    """Encode an image, put its tokens into a prompt, compare image tokens and logits."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "hidden_size": 64, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 2,
            "window_size": 16, "out_hidden_size": 64, "fullatt_block_indexes": [1],
        },
        image_token_id=60, vision_start_token_id=61, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    reference = transformers.Qwen2_5_VLForConditionalGeneration(config).eval().float()
    source = dict(reference.named_parameters())
    with torch.no_grad():
        for p in source.values():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
    model = tiny()
    copy_weights(model, {k: v.detach() for k, v in source.items()})
    at, n = TINY.image_at, TINY.image_tokens
    tokens = torch.randint(50, (1, at + n + 5))
    tokens[:, at : at + n] = 60
    pixels = torch.randn(4 * n, TINY.patch_width)
    kind = (tokens == 60).int()
    grid = torch.tensor([[1, 2 * TINY.side, 2 * TINY.side]])
    with torch.no_grad():
        tower = reference.model.visual(pixels, grid).pooler_output
        out = reference(input_ids=tokens, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=kind)
    step = model.prepare(UnitSpec("encode", "encode", 1))
    model.inputs["pixels"].copy_(pixels)
    image = step().clone()
    torch.testing.assert_close(image[0], tower, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run_tokens(model, tokens, image=image), out.logits[:, -1], atol=1e-4, rtol=1e-4)


def copy_weights(model: QwenVL, source: dict[str, torch.Tensor]) -> None:
    w = model.weights
    for i in range(TINY.layers):
        p, a = f"model.language_model.layers.{i}", "self_attn"
        get = lambda name, p=p: source[f"{p}.{name}"]  # noqa: E731
        w |= {
            f"layers.{i}.norm1": get("input_layernorm.weight"), f"layers.{i}.wo": get(f"{a}.o_proj.weight"),
            f"layers.{i}.wqkv": torch.cat([get(f"{a}.{x}_proj.weight") for x in "qkv"]),
            f"layers.{i}.bqkv": torch.cat([get(f"{a}.{x}_proj.bias") for x in "qkv"]),
            f"layers.{i}.norm2": get("post_attention_layernorm.weight"),
            f"layers.{i}.w13": torch.cat([get(f"mlp.{x}_proj.weight") for x in ("gate", "up")]),
            f"layers.{i}.w2": get("mlp.down_proj.weight"),
        }  # fmt: skip
    for i in range(TINY.vision_layers):
        p = f"model.visual.blocks.{i}"
        names = {
            "norm1": "norm1.weight", "wqkv": "attn.qkv.weight", "bqkv": "attn.qkv.bias", "wo": "attn.proj.weight",
            "bo": "attn.proj.bias", "norm2": "norm2.weight", "w2": "mlp.down_proj.weight", "b2": "mlp.down_proj.bias",
        }  # fmt: skip
        w |= {f"vision.{i}.{ours}": source[f"{p}.{theirs}"] for ours, theirs in names.items()}
        for ours, theirs in (("w13", "weight"), ("b13", "bias")):
            w[f"vision.{i}.{ours}"] = torch.cat([source[f"{p}.mlp.{x}_proj.{theirs}"] for x in ("gate", "up")])
    w |= {
        "embed": source["model.language_model.embed_tokens.weight"], "norm": source["model.language_model.norm.weight"],
        "lm_head": source["lm_head.weight"], "patch.w": source["model.visual.patch_embed.proj.weight"].flatten(1),
        "merger.norm": source["model.visual.merger.ln_q.weight"],
        **{f"merger.{x}{j}": source[f"model.visual.merger.mlp.{2 * j - 2}.{n}"]
           for j in (1, 2) for x, n in (("w", "weight"), ("b", "bias"))},
    }  # fmt: skip
