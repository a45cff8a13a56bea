"""Text encoders and VAE decoder against reference implementations, and their published sizes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from hw.workloads import sd3_encoders as sd  # noqa: E402
from hw.workloads.base import UnitSpec, under  # noqa: E402

LEFT, RIGHT = sd.ClipConfig(2, 32, 2, True, 50, 9), sd.ClipConfig(2, 48, 3, False, 50, 9)
T5 = sd.T5Config(layers=2, width=96, heads=2, head_dim=16, ffn=64, vocab=50, tokens=40)
VAE = sd.VaeConfig(widths=(64, 64, 32), blocks=3)


def tiny() -> sd.Sd3Encoders:
    model = sd.Sd3Encoders("cpu", LEFT, RIGHT, T5, VAE, latent=8, compiled=False)
    generator = torch.Generator().manual_seed(1)
    for name, w in model.weights.items():
        if w.is_floating_point():
            w = w.float()
            model.weights[name] = w + 0.2 * torch.randn(w.shape, generator=generator) if w.dim() == 1 else w
    return model


@pytest.mark.quick
def test_published_sizes() -> None:
    count = lambda cfg: sum(torch.Size(s).numel() for s in cfg.shapes().values())  # noqa: E731
    assert round(count(sd.ClipConfig(12, 768, 12, True)) / 1e6) in (123, 124)
    assert round(count(sd.ClipConfig(32, 1280, 20, False)) / 1e6) == 695
    assert round(count(sd.T5Config()) / 1e9, 2) == 4.76


@pytest.mark.quick
def test_parts_trace_without_breaks() -> None:
    model = tiny()
    model.prepare(UnitSpec("encode-text", "encode", 1))
    x, bias = torch.randn(2, 40, 96), torch.randn(1, 2, 40, 40)
    for f, args in (
        (sd.clip_block, (torch.randn(2, 9, 32), under(model.weights, "clip_l.0"), LEFT)),
        (sd.t5_block, (x, bias, under(model.weights, "t5.0"), T5)),
        (sd.vae_middle, (torch.randn(1, 16, 8, 8), under(model.weights, "vae"), VAE)),
        (sd.vae_up, (torch.randn(1, 64, 8, 8), under(under(model.weights, "vae"), "up0"), VAE)),
    ):
        traced = torch.compile(f, fullgraph=True, dynamic=False, backend="aot_eager")
        torch.testing.assert_close(traced(*args), f(*args))


def clip_reference(model: sd.Sd3Encoders, name: str, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import transformers

    cfg, w = model.clips[name], under(model.weights, name)
    m = transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(
        hidden_size=cfg.width, num_hidden_layers=cfg.layers, num_attention_heads=cfg.heads, vocab_size=cfg.vocab,
        intermediate_size=4 * cfg.width, projection_dim=cfg.width, max_position_embeddings=cfg.tokens, eos_token_id=2,
        bos_token_id=0, pad_token_id=1, hidden_act="quick_gelu" if cfg.quick else "gelu",
    )).eval().float()  # fmt: skip
    state = {
        "text_model.embeddings.token_embedding.weight": w["embed"], "text_projection.weight": w["proj"],
        "text_model.embeddings.position_embedding.weight": w["pos"],
        "text_model.final_layer_norm.weight": w["norm"], "text_model.final_layer_norm.bias": w["norm_bias"],
    }  # fmt: skip
    for i in range(cfg.layers):
        p = f"text_model.encoder.layers.{i}"
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            for x, part in zip("qkv", w[f"{i}.qkv{suffix}"].chunk(3), strict=True):
                state[f"{p}.self_attn.{x}_proj.{kind}"] = part
            names = {"self_attn.out_proj": "out", "layer_norm1": "norm1", "layer_norm2": "norm2", "mlp.fc1": "fc1",
                     "mlp.fc2": "fc2"}  # fmt: skip
            state |= {f"{p}.{a}.{kind}": w[f"{i}.{b}{suffix}"] for a, b in names.items()}
    m.load_state_dict(state, strict=False)
    out = m(tokens, output_hidden_states=True)
    return out.hidden_states[-2], out.text_embeds


def t5_reference(model: sd.Sd3Encoders, tokens: torch.Tensor) -> torch.Tensor:
    import transformers

    w = under(model.weights, "t5")
    m = transformers.T5EncoderModel(transformers.T5Config(
        d_model=96, d_kv=16, num_heads=2, d_ff=64, num_layers=2, vocab_size=50, feed_forward_proj="gated-gelu",
    )).eval().float()  # fmt: skip
    state = {"shared.weight": w["embed"], "encoder.embed_tokens.weight": w["embed"],
             "encoder.final_layer_norm.weight": w["norm"]}  # fmt: skip
    state["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = w["bias"]
    for i in range(2):
        p = f"encoder.block.{i}.layer"
        for x, part in zip("qkv", w[f"{i}.qkv"].chunk(3), strict=True):
            state[f"{p}.0.SelfAttention.{x}.weight"] = part
        state |= {f"{p}.1.DenseReluDense.wi_{j}.weight": part for j, part in enumerate(w[f"{i}.wi"].chunk(2))}
        names = {"0.SelfAttention.o": "out", "0.layer_norm": "norm1", "1.layer_norm": "norm2",
                 "1.DenseReluDense.wo": "wo"}  # fmt: skip
        state |= {f"{p}.{a}.weight": w[f"{i}.{b}"] for a, b in names.items()}
    m.load_state_dict(state)
    return m(tokens).last_hidden_state


def test_text_encoders_equal_the_reference_implementations() -> None:
    pytest.importorskip("transformers")
    model = tiny()
    step = model.prepare(UnitSpec("encode-text", "encode", 1))
    text, pooled = step()
    with torch.no_grad():
        left, left_pooled = clip_reference(model, "clip_l", model.inputs["clip_tokens"])
        right, right_pooled = clip_reference(model, "clip_g", model.inputs["clip_tokens"])
        t5 = t5_reference(model, model.inputs["t5_tokens"])
    close = lambda a, b: torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)  # noqa: E731
    close(pooled, torch.cat((left_pooled, right_pooled), -1))
    close(text[:, :9, :80], torch.cat((left, right), -1))
    assert not text[:, :9, 80:].any()
    close(text[:, 9:], t5)


def test_vae_decoder_equals_the_reference_implementation() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = tiny()
    m = diffusers.AutoencoderKL(
        block_out_channels=(32, 64, 64), latent_channels=16, layers_per_block=2, norm_num_groups=32,
        up_block_types=("UpDecoderBlock2D",) * 3, down_block_types=("DownEncoderBlock2D",) * 3,
        use_quant_conv=False, use_post_quant_conv=False,
    ).eval().float()  # fmt: skip
    state, w = {}, under(model.weights, "vae")
    places = {"mid0": "mid_block.resnets.0", "mid1": "mid_block.resnets.1"}
    places |= {f"up{i}.{j}": f"up_blocks.{i}.resnets.{j}" for i in range(3) for j in range(3)}
    pairs = {"conv_in": "in.conv", "conv_norm_out": "out.norm", "conv_out": "out.conv"}
    pairs |= {f"up_blocks.{i}.upsamplers.0.conv": f"up{i}.conv" for i in range(2)}
    pairs |= {"mid_block.attentions.0.group_norm": "attn.norm", "mid_block.attentions.0.to_out.0": "attn.out"}
    for ours, theirs in places.items():
        pairs |= {f"{theirs}.{x}": f"{ours}.{x}" for x in ("norm1", "conv1", "norm2", "conv2")}
        if f"{ours}.skip" in w:
            pairs[f"{theirs}.conv_shortcut"] = f"{ours}.skip"
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        state |= {f"{theirs}.{kind}": w[f"{ours}{suffix}"] for theirs, ours in pairs.items()}
        for x, part in zip("qkv", w[f"attn.qkv{suffix}"].chunk(3), strict=True):
            state[f"mid_block.attentions.0.to_{x}.{kind}"] = part
    m.decoder.load_state_dict(state)
    step = model.prepare(UnitSpec("vae-decode", "other", 1))
    image = step()
    with torch.no_grad():
        want = m.decode(model.inputs["latent"] / VAE.scale + VAE.shift).sample
    torch.testing.assert_close(image, want, atol=2e-4, rtol=2e-4)
