"""gpt-oss: operators against loops and tables, the model against a reference implementation."""

from __future__ import annotations

import math
import re
import shutil

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from language_cases import run_tokens  # noqa: E402

from hw.workloads import moe  # noqa: E402
from hw.workloads.base import UnitSpec, under  # noqa: E402
from hw.workloads.gpt_oss import GptOss, GptOssConfig, block, first_largest  # noqa: E402
from hw.workloads.sinks import attention_sinks, rope_append  # noqa: E402

TINY = GptOssConfig(
    layers=2, hidden=64, heads=8, kv_heads=2, head_dim=16, window=6, experts=4, top_k=2, ffn=64, vocab=64
)


def tiny(**options: object) -> GptOss:
    model = GptOss("cpu", TINY, compiled=False, **options)
    generator = torch.Generator().manual_seed(1)
    for name, w in model.weights.items():
        if w.dtype == torch.bfloat16:
            w = w.float()
            noisy = name.rsplit(".", 1)[-1] in ("norm1", "norm2", "norm", "bqkv", "bo", "up_bias", "down_bias")
            model.weights[name] = w + 0.2 * torch.randn(w.shape, generator=generator) if noisy else w
    return model


@pytest.mark.quick
def test_mxfp4_against_a_table() -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (2, 64, 128), generator=generator)
    scale = torch.randint(1, 129, (2, 64, 4), dtype=torch.uint8, generator=generator)
    packed, scales = moe.tiles(codes, scale)
    assert packed.numel() * 4 == codes.numel() / 2 and scales.numel() * 4 == scale.numel()
    got = moe.dequantise(packed, scales)
    want = torch.tensor(values)[codes] * torch.exp2(scale.double() - 127).float().repeat_interleave(32, dim=-1)
    assert torch.equal(got, want)
    got = moe.dequantise(*moe.tiles(codes, scale.clamp(min=40)))
    assert torch.equal(moe.dequantise(*moe.quantise(got)), got)


@pytest.mark.quick
def test_a_lane_holds_its_part_of_the_matrix_operand() -> None:
    """A lane's 16 bytes hold rows r and r + 8 of its warp, and columns 2 c, 2 c + 1 of every eight."""
    for lane, row, column in ((0, 0, 0), (1, 8, 3), (37, 17, 10), (127, 63, 63), (6, 1, 20)):
        codes = torch.zeros(64, 64, dtype=torch.long)
        codes[row, column] = 15
        words, _ = moe.tiles(codes, torch.ones(64, 2))
        holder = words[0, 0].ne(0).any(-1).nonzero().item()
        assert holder == row // 16 * 32 + row % 8 * 4 + column % 8 // 2 == lane


@pytest.mark.quick
@pytest.mark.parametrize("tokens,block", [(1, 16), (7, 16), (50, 32)])
def test_experts_against_a_loop_over_tokens(tokens: int, block: int) -> None:
    torch.manual_seed(tokens)
    e, d, f, k = 5, 64, 128, 3
    x, logits = torch.randn(tokens, d), torch.randn(tokens, e)
    (w1, s1), (w2, s2) = moe.quantise(torch.randn(e, 2 * f, d) / 8), moe.quantise(torch.randn(e, d, f) / 8)
    b1, b2 = torch.randn(e, 2 * f), torch.randn(e, d)
    gain, chosen, order, owner = moe.moe_route(logits, k, block)
    down = moe.moe_down(moe.moe_up(x, w1, s1, b1, order, owner, k), w2, s2, b2, order, owner, gain)
    full1, full2 = moe.dequantise(w1, s1), moe.dequantise(w2, s2)
    for t in range(tokens):
        top = logits[t].argsort(descending=True)[:k]
        assert top.tolist() == chosen[t].tolist()
        y = torch.zeros(d)
        for expert, p in zip(top, logits[t][top].softmax(0), strict=True):
            y1 = F.linear(x[t], full1[expert], b1[expert]).view(-1, 2, 8)
            gate, up = y1[:, 0].flatten(), y1[:, 1].flatten()
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            y += p * F.linear(gate * torch.sigmoid(1.702 * gate) * (up + 1), full2[expert], b2[expert])
        torch.testing.assert_close(down.view(tokens, k, d)[t].sum(0), y, atol=1e-4, rtol=1e-4)
    assert sorted(order[order < tokens * k].tolist()) == list(range(tokens * k))


@pytest.mark.quick
@pytest.mark.parametrize("queries,keys,window", [(9, 9, 0), (9, 9, 4), (3, 9, 4), (1, 9, 0)])
def test_attention_against_a_loop(queries: int, keys: int, window: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, queries, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
    sinks = torch.randn(4)
    y = attention_sinks(q, k, v, sinks, window)
    for head in range(4):
        for i in range(queries):
            at = keys - queries + i
            seen = range(max(0, at - window + 1) if window else 0, at + 1)
            weight = [float(torch.exp(q[1, head, i] @ k[1, head // 2, j] / 8**0.5)) for j in seen]
            total = sum(weight) + float(torch.exp(sinks[head]))
            want = sum(w / total * v[1, head // 2, j] for w, j in zip(weight, seen, strict=True))
            torch.testing.assert_close(y[1, i, head], want, atol=1e-5, rtol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("new", [1, 5])
def test_decode_and_chunks_continue_the_prompt(packed: bool, new: int) -> None:
    model = tiny(packed=packed)
    tokens = torch.randint(TINY.vocab, (2, 19), generator=torch.Generator().manual_seed(0))
    whole = run_tokens(model, tokens)
    run_tokens(model, tokens[:, :-new])
    torch.testing.assert_close(run_tokens(model, tokens[:, -new:], 19 - new), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.quick
def test_published_sizes() -> None:
    cfg = GptOssConfig()
    assert sum(torch.Size(s).numel() for s in cfg.shapes().values()) == 20_914_757_184
    assert 2 * 2 * cfg.layers * cfg.kv_heads * cfg.head_dim == 49152


@pytest.mark.quick
def test_a_long_prompt_keeps_the_experts_balanced() -> None:
    """Attention with random weights makes tokens alike, layer by layer: their own part must outweigh it."""
    cfg = GptOssConfig(layers=10, hidden=256, heads=8, kv_heads=2, head_dim=32, window=64, ffn=256, vocab=1000)
    model = GptOss("cpu", cfg, compiled=False, packed=False)
    model.weights = {k: w.float() for k, w in model.weights.items()}
    model.prepare(UnitSpec("prefill", "prefill", 1, 256, 256))()
    assert model.moe_statistics()["largest_share_mean"] < 2 / cfg.experts


def test_zipf_routing_is_skewed_and_reported() -> None:
    cfg = GptOssConfig(layers=1, hidden=128, heads=2, kv_heads=1, head_dim=16, ffn=64, vocab=64)
    found = {}
    for routing in ("balanced", "zipf"):
        model = GptOss("cpu", cfg, compiled=False, routing=routing)
        model.prepare(UnitSpec("prefill", "prefill", 1, 256, 256))()
        found[routing] = model.moe_statistics()
    assert found["balanced"]["active"] == [32] and found["balanced"]["entropy_mean_bits"] > 4.5
    assert found["zipf"]["largest_share_mean"] > 2 * found["balanced"]["largest_share_mean"]


@pytest.mark.quick
def test_blocks_trace_without_breaks() -> None:
    model = tiny()
    for t, c, window in ((7, 7, 6), (3, 9, 0), (1, 9, 6)):
        shape = (2, TINY.kv_heads, c, TINY.head_dim)
        k, v, x = torch.randn(shape), torch.randn(shape), torch.randn(2, t, TINY.hidden)
        position = torch.arange(c - t, c)
        rest = (model.weights["rope.cos"], model.weights["rope.sin"], under(model.weights, "layers.0"), TINY, window)
        want, _ = block(x, position, k.clone(), v.clone(), *rest)
        got, _ = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")(x, position, k, v, *rest)
        torch.testing.assert_close(got, want)


@pytest.mark.quick
def test_work_of_own_operators() -> None:
    model = tiny()
    model.chosen = [torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0, 1], [2, 3]])]
    shapes = {"x": (2, 64), "bias": (4, 128), "result0": (4, 64)}
    work = model.work_of("moe_up", shapes, {"k": 2}, "layers.0")
    assert work is not None and (work.kind, work.flops, work.weight_share) == ("moe", 2 * 4 * 128 * 64, 0.5)
    work = model.work_of("moe_down", {"h": (4, 64), "bias": (4, 64), "result0": (4, 64)}, {}, "layers.1")
    assert work is not None and (work.flops, work.weight_share) == (2 * 4 * 64 * 64, 1.0)
    shapes = {"query": (1, 8, 4, 16), "key": (1, 2, 6, 16)}
    for window, pairs in ((0, 3 + 4 + 5 + 6), (4, 3 + 4 + 4 + 4)):
        work = model.work_of("flash_attention_sinks", shapes, {"window": window}, "layers.0")
        assert work is not None and (work.kind, work.flops) == ("attention_prefill", 4 * 8 * 16 * pairs)
    work = model.work_of("rope_kv_index_copy", {"qkv": (2, 3, 192)}, {"heads": 8}, "layers.0")
    assert work is not None and (work.kind, work.shape) == ("elementwise", {"elements": 1152})
    assert model.work_of("mm", {}, {}, "layers.0") is None


@pytest.mark.quick
@pytest.mark.parametrize("vocab", [64, 640, 100])
def test_sampling_takes_the_first_of_the_largest(vocab: int) -> None:
    logits = torch.randint(0, 9, (50, 1, vocab), generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = logits[:, 0].tolist()
    assert first_largest(logits)[:, 0].tolist() == [row.index(max(row)) for row in rows]


@pytest.mark.quick
def test_keys_are_rotated_and_only_new_rows_written() -> None:
    qkv, position = torch.randn(2, 3, 8 * 4), torch.tensor([5, 1, 4])
    k, v = torch.randn(6, 2, 2, 4).permute(1, 2, 0, 3), torch.randn(2, 2, 6, 4)
    angle = torch.rand(9, 2) * 6
    kept = k.clone(), v.clone()
    q = rope_append(qkv, 1.5 * angle.cos(), 1.5 * angle.sin(), position, k, v, 4)
    heads = qkv.view(2, 3, 8, 4)
    for i, at in enumerate(position.tolist()):
        turn = 1.5 * torch.polar(torch.ones(2), angle[at])
        for head in range(6):
            pairs = torch.complex(heads[:, i, head, :2], heads[:, i, head, 2:]) * turn
            want = torch.cat((pairs.real, pairs.imag), dim=-1)
            torch.testing.assert_close(q[:, i, head] if head < 4 else k[:, head - 4, at], want)
        assert torch.equal(v[:, :, at], heads[:, i, 6:])
    for cache, old in zip((k, v), kept, strict=True):
        assert torch.equal(cache[:, :, [0, 2, 3]], old[:, :, [0, 2, 3]])


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs a C++ compiler on the CPU")
@pytest.mark.parametrize("t,c", [(1, 40), (40, 40), (5, 40)])
@pytest.mark.parametrize("layer", [0, 1])
def test_compiled_blocks_copy_no_cache(t: int, c: int, layer: int) -> None:
    """Caches go to the operators as they are: nothing of their size is allocated, and generated kernels see none."""
    from torch._inductor.utils import run_and_get_code

    model = GptOss("cpu", TINY, compiled=False)
    model.prepare(UnitSpec("prefill", "prefill", 2, t, c))
    k, v = model.kv[layer]
    rest = (model.weights["rope.cos"], model.weights["rope.sin"], under(model.weights, f"layers.{layer}"), TINY)
    x, window = torch.randn(2, t, TINY.hidden).bfloat16(), TINY.window if layer == 0 else 0
    copies = k.clone(), v.clone()
    position = model.inputs["position"]
    want, _ = block(x, position, *copies, *rest, window)
    compile_ = torch.compile(block, fullgraph=True, dynamic=False)
    with torch.no_grad():
        (got, _), code = run_and_get_code(compile_, x, position, k, v, *rest, window)
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)
    assert (copies[0] - k).abs().max() < 0.05 and (copies[1] - v).abs().max() < 0.05
    body = code[0].split("def call")[1]
    call = re.search(r"rope_kv_index_copy\.default\(([^)]*)\)", body)
    assert call is not None
    caches = [a.strip().removeprefix("reinterpret_tensor(") for a in call[1].split(",")][4:6]
    assert all(re.fullmatch(r"arg\d+_1", a) for a in caches), call[0]
    for line in body.splitlines():
        assert not ("cpp_fused" in line and any(re.search(rf"\b{a}\b", line) for a in caches)), line
        made = re.search(r"empty_strided_cpu\(\(([\d, ]*)\)", line)
        size = [int(n) for n in made[1].split(",") if n.strip()] if made else []
        assert math.prod(size) != k.numel(), line


def test_logits_equal_the_reference_implementation() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        num_hidden_layers=2, num_local_experts=4, vocab_size=64, hidden_size=64, intermediate_size=64, head_dim=16,
        num_attention_heads=8, num_key_value_heads=2, sliding_window=6, num_experts_per_tok=2, eos_token_id=0,
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    reference = transformers.GptOssForCausalLM(config).eval().float()
    source = {k: v.detach() for k, v in reference.named_parameters()}
    for p in source.values():
        p.copy_(torch.randn_like(p) * (0.3 if p.dim() == 1 else p.shape[-1] ** -0.5))
    model = tiny(packed=False)
    w = model.weights
    for i in range(2):
        p, a, m = f"model.layers.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        parts = lambda x: x.unflatten(-1, (-1, 8, 2)).transpose(-1, -2).flatten(-3)  # noqa: E731  alternate singly there
        w |= {
            f"layers.{i}.norm1": source[f"{p}.input_layernorm.weight"],
            f"layers.{i}.wqkv": torch.cat([source[f"{a}.{x}_proj.weight"] for x in "qkv"]),
            f"layers.{i}.bqkv": torch.cat([source[f"{a}.{x}_proj.bias"] for x in "qkv"]),
            f"layers.{i}.sinks": source[f"{a}.sinks"], f"layers.{i}.wo": source[f"{a}.o_proj.weight"],
            f"layers.{i}.bo": source[f"{a}.o_proj.bias"],
            f"layers.{i}.norm2": source[f"{p}.post_attention_layernorm.weight"],
            f"layers.{i}.router": source[f"{m}.router.weight"], f"layers.{i}.router_bias": source[f"{m}.router.bias"],
            f"layers.{i}.up": parts(source[f"{m}.experts.gate_up_proj"]).transpose(1, 2).contiguous(),
            f"layers.{i}.up_bias": parts(source[f"{m}.experts.gate_up_proj_bias"]),
            f"layers.{i}.down": source[f"{m}.experts.down_proj"].transpose(1, 2).contiguous(),
            f"layers.{i}.down_bias": source[f"{m}.experts.down_proj_bias"],
        }  # fmt: skip
    w |= {"embed": source["model.embed_tokens.weight"], "norm": source["model.norm.weight"]}
    w["lm_head"] = source["lm_head.weight"]
    tokens = torch.randint(TINY.vocab, (2, 17))
    with torch.no_grad():
        expected = reference(tokens).logits[:, -1]
    torch.testing.assert_close(run_tokens(model, tokens), expected, atol=2e-4, rtol=2e-4)
