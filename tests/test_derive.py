"""Derived units against published totals, against captured units, and against arithmetic by hand."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from derive_cases import CONFIGS, TINY, model, write_config

from tesserasim.cluster.catalogue import find_gpu, link_kinds
from tesserasim.costs.mechanisms import specs
from tesserasim.deps.graph import unit_flow
from tesserasim.derive.collectives import all_reduce_us, group_link
from tesserasim.derive.config import parse_config
from tesserasim.derive.layers import Plan, decoder_unit
from tesserasim.derive.model import Attention, Experts, Latent
from tesserasim.derive.run import Options, derive, weight_bytes
from tesserasim.derive.shard import Format, shard
from tesserasim.derive.times import GAP_NS, ReferenceTimes, mxfp4_us
from tesserasim.derive.unit import Unit, bytes_cost, cost
from tesserasim.trace.model import Trace, TraceMeta
from tesserasim.trace.parquet import read_trace

pytestmark = pytest.mark.quick

TRACES = Path(__file__).resolve().parents[1] / "traces"
H200 = find_gpu("H200-SXM")


def unit(name: str, phase: str, batch: int, tokens: int, context: int, weights: str = "bf16", tp: int = 1) -> Unit:
    whole = model(name)
    plan = Plan(shard(whole, tp, weights, name), Format(weights), tp, group_link(H200))
    return decoder_unit(plan, phase, batch, tokens, context)


def small(tmp_path: Path, config: object = TINY, **options: object) -> tuple[Trace, ...]:
    some = Options(prefill=(64,), batches=(1, 4), contexts=(128,), **options)  # type: ignore[arg-type]
    return derive(write_config(tmp_path, config), some).traces


@pytest.mark.parametrize(("name", "total", "active"), [
    # As published: the repository's count of parameters, or the digits of its model card.
    ("Llama-3-8B", 8_030_261_248, 8_030_261_248), ("Mistral-7B-v0.1", 7_241_732_096, 7_241_732_096),
    ("Qwen2.5-7B", 7_615_616_512, 7_615_616_512), ("Qwen3-8B", 8_190_735_360, 8_190_735_360),
    ("Mixtral-8x7B", 46_702_792_704, 12.9e9), ("gpt-oss-20b", 20_914_757_184, 4.19e9),
    ("Qwen3-235B-A22B", 235_093_634_560, 22e9), ("DeepSeek-V3", 671_026_419_200, 37e9),
])  # fmt: skip
def test_parameters_are_the_published_ones(name: str, total: int, active: float) -> None:
    m = model(name)
    # DeepSeek's score correction (256 per expert layer) and gates are in some counts and not in others: 0.001 %.
    assert m.parameters == pytest.approx(total, rel=1e-5)
    assert m.active_parameters == pytest.approx(active, rel=0.02)


def test_gpt_oss_counts_active_parameters_without_its_input_table() -> None:
    """Its model card says 3.6 billion (of 20.9), which leaves out one of the two tables."""
    assert round(model("gpt-oss-20b").multiplied_parameters / 1e9, 1) == 3.6


@pytest.mark.parametrize(("name", "nbytes"), [
    ("Llama-3-8B", 131072), ("gpt-oss-20b", 49152), ("Qwen3-235B-A22B", 192512), ("DeepSeek-V3", 70272),
])  # fmt: skip
def test_cache_bytes_per_token_are_the_published_ones(name: str, nbytes: int) -> None:
    assert model(name).kv_per_token == nbytes
    u = unit(name, "decode", 2, 1, 64)
    state = [b for b in u.buffers.values() if b.bytes_per_token]
    assert sum(b.bytes_per_token for b in state) == nbytes
    assert sum(b.nbytes for b in state) == 2 * 64 * nbytes


@pytest.mark.parametrize("name", ["Llama-3-8B", "Qwen3-235B-A22B", "DeepSeek-V3", "gpt-oss-20b", "Mixtral-8x7B"])
def test_flops_are_two_per_parameter_and_token(name: str) -> None:
    """Mutation: the shared expert left out, top-k forgotten, gate or up dropped -> fails."""
    m, tokens = model(name), 512
    u = unit(name, "prefill", 1, tokens, tokens)
    head = 2 * m.vocab * m.hidden
    products = sum(k.flops for k in u.kernels if k.kind in ("gemm", "moe"))
    blocks = m.multiplied_parameters - (m.vocab * m.hidden)
    assert products == pytest.approx(2 * blocks * tokens + head, rel=2e-3)  # norms and biases do not multiply


def test_weights_and_cache_are_those_of_the_captured_unit() -> None:
    """Names, bytes and FLOPs of Llama-3-8B, kernel kind by kernel kind, as recorded from running code."""
    real = read_trace(TRACES / "llama-3-8b" / "decode-b32-c2048.parquet")
    u = unit("Llama-3-8B", "decode", 32, 1, 2048)
    known = {b.name: (b.nbytes, b.bytes_per_token, b.bytes_per_sequence) for b in real.buffers}
    kept = [b for b in u.buffers.values() if b.role in ("weight", "state", "input")]
    assert len(kept) == 32 * 8 + 3 + 2
    assert {b.name: (b.nbytes, b.bytes_per_token, b.bytes_per_sequence) for b in kept}.items() <= known.items()
    for kind in ("gemm", "attention_decode"):
        assert sum(k.flops for k in u.kernels if k.kind == kind) == sum(k.flops for k in real if k.kind == kind)


def test_experts_and_windows_are_those_of_the_captured_unit() -> None:
    real = read_trace(TRACES / "gpt-oss-20b" / "prefill-b1-t1024.parquet")
    u = unit("gpt-oss-20b", "prefill", 1, 1024, 1024, "mxfp4")
    known = {b.name: b.nbytes for b in real.buffers}
    for name in ("up", "down"):
        assert u.buffers[f"layers.3.{name}"].nbytes == known[f"layers.3.{name}"] + known[f"layers.3.{name}_scale"]
    for kind in ("gemm", "moe", "attention_prefill"):
        assert sum(k.flops for k in u.kernels if k.kind == kind) == sum(k.flops for k in real if k.kind == kind)
    assert {b.name for b in u.buffers.values() if "sinks" in b.name} == {f"layers.{i}.sinks" for i in range(24)}


#: What a kernel does, by a word in its site; the first that fits, in order.
ROLES = (
    ("index_copy", "rope"), ("split_split", "rope"), ("wqkv", "wqkv"), ("attention", "attention"),
    ("clone_transpose", "attention"), (".wo", "wo"), ("w13", "w13"), ("silu", "silu"), ("w2", "w2"),
    ("router", "router"), ("moe_route", "route"), ("moe_up", "up"), ("moe_down", "down"), ("add_sum", "add"),
    ("moe_sum", "add"), ("norm1", "norm1"), ("norm2", "norm2"), ("unsafe_view_add_mean", "norm2"),
    ("rsqrt#1", "norm2"), ("rsqrt", "norm1"), ("add", "add"),
)  # fmt: skip


def role(site: str) -> str:
    return next(name for word, name in ROLES if word in site)


def layer_flow(trace: Trace, layer: str, without: tuple[str, ...] = ()) -> set[tuple[str, str, int]]:
    """(writer, reader, bytes) of every activation that reaches a kernel of the layer."""
    found = set()
    for v in unit_flow(trace).values:
        for r in v.readers if trace.buffers[v.buffer].role == "activation" else ():
            writer, reader = trace.kernels[v.writer], trace.kernels[r]
            if reader.module == layer and role(writer.site) not in without and role(reader.site) != role(writer.site):
                found.add((role(writer.site), role(reader.site), v.nbytes))
    return found


def as_trace(name: str, u: Unit) -> Trace:
    meta = TraceMeta("derived", name, {"name": u.phase}, "H200-SXM")
    return Trace(meta, tuple(u.kernels), u.used_buffers())


@pytest.mark.parametrize(("name", "file", "weights", "without"), [
    ("Llama-3-8B", "llama-3-8b/decode-b32-c2048", "bf16", ()),
    ("Llama-3-8B", "llama-3-8b/prefill-b1-t1024", "bf16", ()),
    # What routing hands on is a matter of the kernel: sorted numbers there, choices and gains here.
    ("gpt-oss-20b", "gpt-oss-20b/decode-b32-c2048", "mxfp4", ("route",)),
    ("gpt-oss-20b", "gpt-oss-20b/prefill-b1-t1024", "mxfp4", ("route",)),
])  # fmt: skip
def test_what_flows_in_a_layer_is_what_flows_in_the_captured_one(
    name: str, file: str, weights: str, without: tuple[str, ...]
) -> None:
    """Mutation: the add without the attention's output, the feed-forward without its norm -> fails."""
    real = read_trace(TRACES / f"{file}.parquet")
    at = real.meta.unit
    made = as_trace(name, unit(name, at["phase"], at["batch"], at["tokens"], at["context"], weights))
    flows = layer_flow(made, "layers.5", without)
    assert flows == layer_flow(real, "layers.5", without) and len(flows) >= 11


@pytest.mark.parametrize(("name", "tp"), [("Llama-3-8B", 1), ("DeepSeek-V3", 8), ("Mixtral-8x7B", 2)])
def test_nothing_is_computed_in_vain_and_every_token_is_cached(name: str, tp: int) -> None:
    """Mutation: the shared experts' output dropped, values not appended -> fails."""
    for phase, tokens in (("decode", 1), ("prefill", 16)):
        u = unit(name, phase, 4, tokens, 16, tp=tp)
        read = {a.buffer for k in u.kernels for a in k.accesses if a.reads}
        assert [b.name for b in u.buffers.values() if b.id not in read and b.role != "state"] == []
        written = {b.name: 0 for b in u.buffers.values() if b.bytes_per_token}
        names = list(u.buffers)
        for a in (a for k in u.kernels for a in k.accesses if a.writes and names[a.buffer] in written):
            written[names[a.buffer]] += a.nbytes
        assert written == {n: 4 * tokens * u.buffers[n].bytes_per_token for n in written}


def test_only_experts_that_get_a_token_are_read() -> None:
    u = unit("Qwen3-235B-A22B", "decode", 1, 1, 16)
    up = next(k for k in u.kernels if k.op == "moe_up")
    assert up.read_bytes == pytest.approx(8 * 2 * 1536 * 4096 * 2, rel=0.01)
    many = next(k for k in unit("Qwen3-235B-A22B", "decode", 256, 1, 16).kernels if k.op == "moe_up")
    assert many.read_bytes == pytest.approx(128 * 2 * 1536 * 4096 * 2, rel=0.01)


def test_a_group_halves_what_it_should() -> None:
    """Mutation: the down projection not split, KV heads not split, the residual split -> fails."""
    one, two = (unit("Llama-3-8B", "decode", 8, 1, 512, tp=n) for n in (1, 2))
    for kind in ("gemm", "attention_decode"):
        whole, half = (sum(k.flops for k in u.kernels if k.kind == kind) for u in (one, two))
        assert whole == 2 * half
    cache = [sum(b.nbytes for b in u.buffers.values() if ".kv." in b.name) for u in (one, two)]
    assert cache[0] == 2 * cache[1]
    weights = [sum(b.nbytes for b in u.buffers.values() if b.role == "weight") for u in (one, two)]
    norms = 65 * 4096 * 2
    assert weights[0] - norms == 2 * (weights[1] - norms)
    assert weights[1] == weight_bytes(shard(model("Llama-3-8B"), 2, "bf16", ""), Format("bf16"))
    added = [k for k in two.kernels if k.op == "add"]
    assert {k.write_bytes for k in added} == {8 * 4096 * 2}
    assert [k.op for k in two.kernels if k.kind == "collective"].count("all_reduce") == 2 * 32 + 1


def test_few_kv_heads_are_on_several_ranks() -> None:
    qwen = shard(model("Qwen3-235B-A22B"), 8, "bf16", "").layers[0].attention
    assert isinstance(qwen, Attention) and (qwen.heads, qwen.kv_heads) == (8, 1)
    latent = shard(model("DeepSeek-V3"), 8, "fp8", "").layers[0].attention
    assert isinstance(latent, Latent) and latent.heads == 16 and latent.kv_per_token == 1152


def test_what_crosses_a_cut_between_layers_is_the_residual(tmp_path: Path) -> None:
    """One value, tokens x hidden numbers of 2 bytes. Mutation: norm1's output handed on -> fails."""
    for trace in small(tmp_path):
        rows = trace.meta.unit["batch"] * trace.meta.unit["tokens"]
        layer = [k.module for k in trace]
        values = unit_flow(trace).values
        cut = [v for v in values if layer[v.writer] == "layers.0" and any(layer[r] == "layers.1" for r in v.readers)]
        assert [v.nbytes for v in cut] == [rows * 256 * 2]


def test_everything_read_was_written_before(tmp_path: Path) -> None:
    moe = {**TINY, "num_local_experts": 8, "num_experts_per_tok": 2, "model_type": "mixtral"}
    for trace in (*small(tmp_path), *small(tmp_path, moe, tp=2)):
        written: set[int] = set()
        for k in trace:
            for a in k.accesses:
                if a.reads and trace.buffers[a.buffer].role == "activation":
                    assert a.buffer in written, k.site
            written |= {a.buffer for a in k.accesses if a.writes}
        assert len(set(trace.sites)) == len(trace.kernels)
        parts = {k.part for k in trace}
        assert parts == {"embed", "attention", "ffn", "head"}


def test_windows_by_model_type() -> None:
    def windows(name: str, **more: object) -> list[int]:
        made = parse_config({**CONFIGS[name], **more}, name, name)
        return [a.window for layer in made.layers if isinstance(a := layer.attention, Attention)]

    assert windows("gpt-oss-20b") == [128, 0] * 12
    assert windows("Mistral-7B-v0.1") == [4096] * 32
    assert set(windows("Qwen2.5-7B")) == {0}
    assert windows("Qwen2.5-7B", use_sliding_window=True, max_window_layers=20) == [0] * 20 + [131072] * 8
    types = ["full_attention", "sliding_attention"] * 16
    assert windows("Mistral-7B-v0.1", layer_types=types) == [0, 4096] * 16


def test_biases_and_norms_by_model_type() -> None:
    def attention(name: str) -> Attention:
        found = model(name).layers[0].attention
        assert isinstance(found, Attention)
        return found

    assert [(a.qkv_bias, a.o_bias, a.qk_norm) for a in map(attention, ("Llama-3-8B", "Qwen2.5-7B", "Qwen3-8B"))] == [
        (False, False, False), (True, False, False), (False, False, True)
    ]  # fmt: skip
    assert attention("gpt-oss-20b").o_bias and attention("gpt-oss-20b").sinks


def test_deepseek_has_dense_layers_first_and_shared_experts() -> None:
    m = model("DeepSeek-V3")
    assert [isinstance(layer.ffn, Experts) for layer in m.layers] == [False] * 3 + [True] * 58
    assert any("analytically" in n for n in m.notes)
    u = unit("DeepSeek-V3", "decode", 4, 1, 100, "fp8")
    scores = [k for k in u.kernels if k.kind == "attention_decode"]
    # 4 sequences x 100 latents x 128 heads x (512 + 64 to score, 512 to sum) x 2
    assert {k.flops for k in scores} == {4 * 100 * 128 * (576 + 512) * 2} and len(scores) == 61
    assert all("head_dim" not in k.shape for k in scores)  # no table of measured kernels speaks for it


def test_the_gap_is_that_of_units_that_nothing_is_compared_with() -> None:
    gaps = []
    for path in sorted((TRACES / "fit" / "llama-3-8b").glob("decode*.parquet")):
        t = read_trace(path)
        steps = zip(t.kernels, t.kernels[1:], t.replay_gaps_ns[1:], strict=False)
        gaps += [gap for a, b, gap in steps if "memset" not in (a.kind, b.kind)]
    assert round(statistics.median(gaps)) == GAP_NS


def test_all_reduce_by_hand() -> None:
    link = replace(link_kinds()["nvlink4"], gbps=800.0, latency_us=10.0)  # 100 GB/s
    assert all_reduce_us(1e6, 4, link) == pytest.approx(10.0 + 1.5 * 10.0)
    assert group_link(H200).name == "nvlink4" and group_link(find_gpu("L40S")).name == "pcie4"


def test_experts_by_mechanism() -> None:
    """No unpacking and no floor leave the memory's time; every 128 rows unpack the weights again."""
    x = {"tokens": np.array([1.0, 1024.0, 2048.0]), "hidden": np.full(3, 1024.0), "inter": np.full(3, 512.0),
         "topk": np.full(3, 1.0), "experts": np.full(3, 8.0)}  # fmt: skip
    s = specs([H200])
    free = mxfp4_us(x, s, np.array([1.0, 8.0, 8.0]), 0.0)
    nbytes = 3 * 1024 * 512 * 4.25 / 8 + (2 * 1024 + 4 * 512) * 2
    assert free[0] == pytest.approx(15.0 + nbytes / 4.3e6 / 0.85, rel=1e-3)
    heavy = mxfp4_us(x, s, np.array([1.0, 8.0, 8.0]), 1e5)
    assert heavy[2] - 15.0 == pytest.approx(2.0 * (heavy[1] - 15.0), rel=1e-3)


def test_times_are_the_fitted_models_and_shared_by_equal_shapes() -> None:
    from tesserasim.costs.shipped import shipped

    columns = {"m": 32, "n": 4096, "k": 4096, "w_bits": 16, "a_bits": 16, "block": 0, "copies": 64}
    times = ReferenceTimes(H200)
    priced = times.price([cost("gemm", (), 1, **columns), bytes_cost(3e6)])
    expected = shipped("gemm", None).predict({k: np.array([float(v)]) for k, v in columns.items()}, H200)
    assert priced.us[0] == pytest.approx(float(expected[0]))
    assert priced.duration_ns[0] == round(float(expected[0]) * 1e3 - GAP_NS)
    assert priced.sources == ("calibrated", "calibrated") and (priced.sigma > 0).all()


def test_traces_say_that_they_are_derived(tmp_path: Path) -> None:
    for t in small(tmp_path, tp=2):
        assert t.meta.origin == "derived" and t.meta.e2e_ns is None and t.meta.extra["tensor_parallel"] == 2
        assert [k.gap_ns for k in t][:3] == [0, GAP_NS, GAP_NS]
        assert all(k.duration_p10_ns < k.duration_ns < k.duration_p90_ns for k in t)
        assert json.dumps(dict(t.meta.extra))
