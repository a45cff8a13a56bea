"""Multi-head latent attention, modelled analytically: no table of measured kernels has it.

The cache holds, per token and layer, a latent of `kv_rank` and a rotary key of `rope` numbers, the same for all heads.

    decode    queries are carried into the latent space (W_UK), attend to the latents as one shared KV head, and come
              back (W_UV); per head these are small matrices, one batched product each
    prefill   the latents are expanded to keys and values of every head; plain causal attention

Its times come from FLOPs at 80 % of the tensor rate and bytes at 85 % of the bandwidth, which overlap nearly, above the
floor of its kernels, as the mechanisms of tesserasim.costs have it.
"""

from __future__ import annotations

from tesserasim.derive.model import Latent
from tesserasim.derive.ops import launches, linear, pairs
from tesserasim.derive.shard import Format
from tesserasim.derive.unit import BF16, Cost, Unit, cost


def latent_part(u: Unit, form: Format, hidden: int, m: str, a: Latent, h: str) -> str:
    """The attention of one layer from its normed input to the output projection."""
    rows, part, q_out = u.rows, "attention", a.heads * a.qk_dim
    if a.q_rank:
        down = linear(u, m, "wqkv_a", part, h, rows, a.q_rank + a.latent, hidden, form.linear, form)
        norms = [u.weight(f"{m}.q_a_norm", a.q_rank * BF16), u.weight(f"{m}.kv_a_norm", a.kv_rank * BF16)]
        down = u.kernel(m, "norm_a", "norm", part, reads=[down, *norms], out=u.buffers[down].nbytes)
        q = linear(u, m, "wq_b", part, down, rows, q_out, a.q_rank, form.linear, form)
    else:
        q = linear(u, m, "wq", part, h, rows, q_out, hidden, form.linear, form)
        down = linear(u, m, "wkv_a", part, h, rows, a.latent, hidden, form.linear, form)
        norms = [u.weight(f"{m}.kv_a_norm", a.kv_rank * BF16)]
        down = u.kernel(m, "norm_a", "norm", part, reads=[down, *norms], out=u.buffers[down].nbytes)
    cache = u.state(f"{m}.kv.latent", a.kv_per_token)
    q = u.kernel(m, "rope_kv_index_copy", "elementwise", part, reads=[q, down, "position"], out=rows * q_out * BF16,
                 appends={cache: rows * a.kv_per_token}, shape={"elements": rows * (q_out + a.latent)})  # fmt: skip
    per_head = a.kv_rank * a.heads
    w_k = u.weight(f"{m}.w_uk", form.nbytes(per_head * a.nope, form.linear))
    w_v = u.weight(f"{m}.w_uv", form.nbytes(per_head * a.v_dim, form.linear))
    if u.phase == "decode":
        y = _absorbed(u, m, a, q, cache, w_k, w_v, pairs(u))
    else:
        y = _expanded(u, m, a, q, cache, w_k, w_v, pairs(u))
    return linear(u, m, "wo", part, y, rows, hidden, a.heads * a.v_dim, form.linear, form)


def _analytic(u: Unit, reads: list[str], out: int, flops: int, kernels: int = 1) -> Cost:
    nbytes = sum(u.buffers[n].nbytes for n in reads) + out
    return cost("analytic", (), kernels, flops=flops, nbytes=nbytes)


def _batched(u: Unit, m: str, op: str, a: Latent, reads: list[str], k: int, n: int, out: int) -> str:
    """One product per head: [rows, k] x [k, n]."""
    flops = 2 * u.rows * a.heads * k * n
    return u.kernel(m, op, "gemm", "attention", reads=reads, out=out, flops=flops,
                    shape={"batch": a.heads, "m": u.rows, "n": n, "k": k},
                    what=_analytic(u, reads, out, flops))  # fmt: skip


def _absorbed(u: Unit, m: str, a: Latent, q: str, cache: str, w_k: str, w_v: str, pairs: int) -> str:
    latent_q = u.rows * a.heads * a.latent * BF16
    q = _batched(u, m, "bmm.w_uk", a, [q, w_k], a.nope, a.kv_rank, latent_q)
    out = u.rows * a.heads * a.kv_rank * BF16
    flops = 2 * pairs * a.heads * (a.latent + a.kv_rank)
    y = u.kernel(m, "attention", "attention_decode", "attention", reads=[q, cache], out=out, flops=flops,
                 shape={"batch": u.batch, "seq_q": 1, "seq_kv": u.context, "heads": a.heads},
                 what=_analytic(u, [q, cache], out, flops, launches(u, 1, u.context)))  # fmt: skip
    return _batched(u, m, "bmm.w_uv", a, [y, w_v], a.kv_rank, a.v_dim, u.rows * a.heads * a.v_dim * BF16)


def _expanded(u: Unit, m: str, a: Latent, q: str, cache: str, w_k: str, w_v: str, pairs: int) -> str:
    keys = u.batch * u.context
    wide = keys * a.heads * (a.nope + a.v_dim) * BF16
    flops = 2 * keys * a.kv_rank * a.heads * (a.nope + a.v_dim)
    kv = u.kernel(m, "mm.wkv_b", "gemm", "attention", reads=[cache, w_k, w_v], out=wide, flops=flops,
                  what=_analytic(u, [cache, w_k, w_v], wide, flops))  # fmt: skip
    out = u.rows * a.heads * a.v_dim * BF16
    flops = 2 * pairs * a.heads * (a.qk_dim + a.v_dim)
    return u.kernel(m, "attention", "attention_prefill", "attention", reads=[q, kv, cache], out=out, flops=flops,
                    shape={"batch": u.batch, "seq_q": u.tokens, "seq_kv": u.context, "heads": a.heads},
                    what=_analytic(u, [q, kv], out, flops))  # fmt: skip
