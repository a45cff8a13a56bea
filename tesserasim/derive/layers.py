"""Which kernels a decoder runs, in launch order: those that captured units of serving-grade code run.

    embed      embedding                                            [all-reduce]
    layer      norm · QKV · rope and cache write · attention · output projection [all-reduce]
               norm (adds the attention's output) · gate and up · SwiGLU · down [all-reduce] · add
               or, with experts: router · routing · gate and up and SwiGLU · down · weighted sum and add
    head       norm · lm_head · sampling                            [all-gather of the ranks' best tokens]

In brackets: only in a tensor-parallel group. Norms, rotation and SwiGLU run on bf16 whatever the weights are.
"""

from __future__ import annotations

from dataclasses import dataclass

from tesserasim.cluster.model import LinkKind
from tesserasim.costs.mechanisms import COLD
from tesserasim.derive.collectives import all_gather_us, all_reduce_us
from tesserasim.derive.experts import experts_part
from tesserasim.derive.mla import latent_part
from tesserasim.derive.model import Attention, Dense, Model
from tesserasim.derive.ops import launches, linear, norm, pairs
from tesserasim.derive.shard import Format
from tesserasim.derive.unit import BF16, Unit, cost

TOKEN_BYTES = 8  # a token number or a position


@dataclass(frozen=True)
class Plan:
    """What every part needs to know: the rank's widths, the format of weights, the group."""

    rank: Model
    format: Format
    tp: int
    link: LinkKind


def decoder_unit(plan: Plan, phase: str, batch: int, tokens: int, context: int) -> Unit:
    """One launch: a prefill of `tokens` tokens a sequence, or a decode step (`tokens` 1) ending at `context`."""
    u, model = Unit(phase, batch, tokens, context), plan.rank
    wide = u.rows * model.hidden * BF16
    u.buffer("next_token", batch * TOKEN_BYTES, "state", per_sequence=TOKEN_BYTES)
    u.buffer("position", (1 if phase == "decode" else tokens) * TOKEN_BYTES, "input")
    source = "next_token" if phase == "decode" else u.buffer("prompt", u.rows * TOKEN_BYTES, "input")
    table = u.weight("embed", model.vocab * model.hidden * BF16)
    x = u.kernel("embed", "fused_embedding", "elementwise", "embed", reads=[source], some={table: wide}, out=wide,
                 shape={"elements": u.rows * model.hidden})  # fmt: skip
    x = all_reduce(u, plan, "embed", "embed", x)
    for i, layer in enumerate(model.layers):
        m = f"layers.{i}"
        if isinstance(layer.attention, Attention):
            y = _attention_part(u, plan, m, layer.attention, x)
        else:
            h = norm(u, model.hidden, m, "attention", 1, x)
            y = latent_part(u, plan.format, model.hidden, m, layer.attention, h)
        y = all_reduce(u, plan, m, "attention", y)
        h = norm(u, model.hidden, m, "ffn", 2, x, y)
        if isinstance(layer.ffn, Dense):
            made = _dense_part(u, plan, m, layer.ffn, h)
        elif plan.tp == 1:  # the sum over the chosen experts adds the residual in passing
            x = experts_part(u, plan.format, model.hidden, m, layer.ffn, h, 1, (x, y))
            continue
        else:
            made = experts_part(u, plan.format, model.hidden, m, layer.ffn, h, plan.tp)
        made = all_reduce(u, plan, m, "ffn", made)
        x = u.kernel(m, "add", "elementwise", "ffn", reads=[x, y, made], out=wide,
                     shape={"elements": u.rows * model.hidden})  # fmt: skip
    _head(u, plan, x)
    return u


def all_reduce(u: Unit, plan: Plan, m: str, part: str, x: str) -> str:
    """The sum of `x` over the group; `x` itself where there is none."""
    if plan.tp == 1:
        return x
    nbytes = u.buffers[x].nbytes
    what = cost("collective", us=all_reduce_us(nbytes, plan.tp, plan.link))
    return u.kernel(m, "all_reduce", "collective", part, reads=[x], out=nbytes, what=what,
                    shape={"elements": nbytes // BF16})  # fmt: skip


def _attention_part(u: Unit, plan: Plan, m: str, a: Attention, x: str) -> str:
    model, form = plan.rank, plan.format
    h = norm(u, model.hidden, m, "attention", 1, x)
    qkv_width = a.q_width + 2 * a.kv_width
    qkv = linear(u, m, "wqkv", "attention", h, u.rows, qkv_width, model.hidden, form.linear, form, a.qkv_bias)
    half = a.kv_per_token // 2
    k, v = u.state(f"{m}.kv.k", half), u.state(f"{m}.kv.v", half)
    norms = [u.weight(f"{m}.{n}_norm", a.head_dim * BF16) for n in "qk"] if a.qk_norm else []
    new = u.rows * half
    q = u.kernel(m, "rope_kv_index_copy", "elementwise", "attention", reads=[qkv, "position", *norms],
                 out=u.rows * a.q_width * BF16, appends={k: new, v: new},
                 shape={"elements": u.rows * qkv_width})  # fmt: skip
    sinks = [u.weight(f"{m}.sinks", a.heads * BF16)] if a.sinks else []
    y = _attend(u, m, a, q, k, v, sinks)
    return linear(u, m, "wo", "attention", y, u.rows, model.hidden, a.q_width, form.linear, form, a.o_bias)


def _attend(u: Unit, m: str, a: Attention, q: str, k: str, v: str, sinks: list[str]) -> str:
    shape = {"batch": u.batch, "seq_q": u.tokens, "seq_kv": u.context, "heads": a.heads, "kv_heads": a.kv_heads,
             "head_dim": a.head_dim}  # fmt: skip
    window = a.window if 0 < a.window < u.context else 0
    decode = u.phase == "decode"
    kind = "attention_decode" if decode else "attention_prefill"
    span = window or u.context
    bits = {"q_bits": 16, "kv_bits": 16, "copies": COLD if decode else 1.0}
    what = cost(kind, (), launches(u, a.kv_heads, span), **shape, window=window, **bits)
    if window:
        shape["window"] = window
    seen = u.batch * (min(window, u.context) if window and decode else u.context) * a.kv_per_token // 2
    return u.kernel(m, "attention", kind, "attention", reads=[q, *sinks], some={k: seen, v: seen},
                    out=u.rows * a.q_width * BF16, flops=4 * pairs(u, window) * a.q_width,
                    shape=shape, what=what)  # fmt: skip


def _dense_part(u: Unit, plan: Plan, m: str, f: Dense, h: str) -> str:
    form, hidden = plan.format, plan.rank.hidden
    up = linear(u, m, "w13", "ffn", h, u.rows, 2 * f.inter, hidden, form.linear, form, f.bias)
    act = u.kernel(m, "silu_mul", "elementwise", "ffn", reads=[up], out=u.rows * f.inter * BF16,
                   shape={"elements": u.rows * f.inter})  # fmt: skip
    return linear(u, m, "w2", "ffn", act, u.rows, hidden, f.inter, form.linear, form, f.bias)


def _head(u: Unit, plan: Plan, x: str) -> None:
    model, rows = plan.rank, u.batch
    wide = rows * model.hidden * BF16
    norm_weight = u.weight("norm", model.hidden * BF16)
    last = u.kernel("head", "norm", "norm", "head", reads=[norm_weight], some={x: wide}, out=wide,
                    shape={"elements": rows * model.hidden})  # fmt: skip
    shared = "embed" if model.tied else "lm_head"
    logits = linear(u, "head", "lm_head", "head", last, rows, model.vocab, model.hidden, "bf16", plan.format,
                    weight=shared)  # fmt: skip
    if plan.tp > 1:
        best = u.kernel("head", "argmax", "sampling", "head", reads=[logits], out=rows * 2 * TOKEN_BYTES)
        nbytes = plan.tp * u.buffers[best].nbytes
        what = cost("collective", us=all_gather_us(nbytes, plan.tp, plan.link))
        logits = u.kernel("head", "all_gather", "collective", "head", reads=[best], out=nbytes, what=what)
    u.kernel("head", "sample", "sampling", "head", reads=[logits], out=rows * TOKEN_BYTES, name="next_token",
             shape={"elements": rows * model.vocab})  # fmt: skip
