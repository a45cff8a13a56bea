"""A layer of experts: routing on the GPU, two grouped products, the weighted sum; shared experts beside them.

The measured operation (tesserasim.costs, kind `moe`) is the whole of both products, with what sorts the tokens and
what sums the results; the sum is a kernel of its own here and taken off. Tokens are spread evenly at random, so that
T tokens wake E (1 - (1 - k / E)^T) of E experts.
"""

from __future__ import annotations

from dataclasses import replace

from tesserasim.derive.model import Experts
from tesserasim.derive.ops import linear
from tesserasim.derive.shard import Format
from tesserasim.derive.unit import BF16, Cost, Unit, bytes_cost, cost

_F32 = 4


def active(tokens: int, f: Experts) -> float:
    """Experts that get a token, in the mean."""
    return f.count * (1.0 - (1.0 - f.topk / f.count) ** tokens)


def experts_part(
    u: Unit, form: Format, hidden: int, m: str, f: Experts, h: str, tp: int, residual: tuple[str, ...] = ()
) -> str:
    """From the normed input `h` to the sum over the chosen experts and the residual."""
    rows, part = u.rows, "ffn"
    scores = linear(u, m, "router", part, h, rows, f.count, hidden, "bf16", form, f.bias)
    choices = rows * f.topk * 2 * _F32
    route = u.kernel(m, "moe_route", "elementwise", part, reads=[scores], out=choices,
                     shape={"elements": rows * f.count})  # fmt: skip
    wide = rows * f.topk * hidden * BF16
    summed = bytes_cost(wide + 3 * rows * hidden * BF16)
    columns = {"tokens": rows, "hidden": hidden, "inter": f.inter, "topk": f.topk, "experts": f.count}
    bits = {"bf16": 16.0, "fp8": 8.0, "mxfp4": 4.0}[form.expert]
    if form.expert == "mxfp4":  # that benchmark routes, too
        whole = cost("mxfp4", (summed, u.costs[-1]), 2, **columns)
    else:
        rest = {"skew": 0, "w_bits": bits, "a_bits": bits, "block": 0, "tp": tp, "ep": 1}
        columns["inter"] *= tp  # the benchmark names the whole width and its share
        whole = cost("moe", (summed,), 2, **columns, **rest)
    up = _grouped(u, form, m, "up", f, [h, route], 2 * f.inter, hidden, rows * f.topk * f.inter * BF16, whole)
    down = _grouped(u, form, m, "down", f, [up, route], hidden, f.inter, wide, whole)
    more = [down, *residual]
    if f.shared:
        more.append(_shared(u, form, hidden, m, f, h))
    return u.kernel(m, "moe_sum", "elementwise", part, reads=more, out=rows * hidden * BF16,
                    shape={"elements": rows * hidden * f.topk})  # fmt: skip


def _grouped(
    u: Unit, form: Format, m: str, name: str, f: Experts, reads: list[str], n: int, k: int, out: int, whole: Cost
) -> str:
    """One grouped product over [n, k] weights of every expert; two thirds of the work are in the first."""
    one = form.nbytes(n * k, form.expert)
    weight = u.weight(f"{m}.{name}", f.count * one)
    bias = [u.weight(f"{m}.{name}_bias", f.count * n * BF16)] if f.bias else []
    used = {weight: min(f.count * one, int(active(u.rows, f) * one + 0.5))}
    act = "bf16" if form.expert == "mxfp4" else form.expert
    what = replace(whole, share=2 / 3 if name == "up" else 1 / 3)
    return u.kernel(m, f"moe_{name}", "moe", "ffn", reads=[*reads, *bias], some=used, out=out,
                    flops=2 * u.rows * f.topk * n * k, shape={"n": n, "k": k, "experts": f.count, "topk": f.topk},
                    what=what, dtypes=(form.expert, act))  # fmt: skip


def _shared(u: Unit, form: Format, hidden: int, m: str, f: Experts, h: str) -> str:
    up = linear(u, m, "shared_w13", "ffn", h, u.rows, 2 * f.shared, hidden, form.linear, form)
    act = u.kernel(m, "shared_silu_mul", "elementwise", "ffn", reads=[up], out=u.rows * f.shared * BF16)
    return linear(u, m, "shared_w2", "ffn", act, u.rows, hidden, f.shared, form.linear, form)
