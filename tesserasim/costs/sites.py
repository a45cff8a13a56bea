"""Which measured kind a site of a trace belongs to, and its shape there.

A site is predicted whole and its kernels share the result. The measured kinds are benchmarks of whole operations, so
some sites are translated:

    moe          a grouped GEMM of an expert layer stands for its share of the layer's FLOPs
    norm, reduction, elementwise   bytes, as the bytes of an elementwise kernel of rows of 4096

What has no such translation (convolutions, scans, copies, sampling, batched GEMMs, sites of unknown shape) has no kind
here, and its cost comes from the roofline ratio.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from tesserasim.costs.mechanisms import COLD, Shape
from tesserasim.costs.times import FloatArray
from tesserasim.trace.model import Kernel, Trace

_BITS = (("fp4", 4), ("int4", 4), ("8", 8), ("fp32", 16), ("32", 16))
#: Columns of a shape that the benchmarks have and a kernel does not say.
_ONE_RANK = {"tp": 1.0, "ep": 1.0}
ROW = 4096.0
#: Log-sd that the translation adds to the systematic error of a site.
TRANSLATED = {"moe": 0.1, "norm": 0.15, "reduction": 0.15, "attention_prefill": 0.05, "attention_decode": 0.05}


@dataclass(frozen=True)
class SiteRows:
    """Sites of one measured kind; arrays have one entry per site."""

    kind: str
    sites: np.ndarray[tuple[int], np.dtype[np.int64]]  # indices into Trace.sites
    shape: Shape
    share: FloatArray  # of the measured operation that the site does
    extra: FloatArray  # log-sd of the translation


@cache
def bits(dtype: str, default: float = 16.0) -> float:
    """Bits of one element of a kernel's operands, as the tensor cores see them."""
    word = dtype.lower()
    for part, found in _BITS:
        if part in word:
            return float(found)
    return default


def _gemm(k: Kernel) -> dict[str, float] | None:
    s = k.shape
    if not {"m", "n", "k"} <= set(s) or s.get("batch", 1) > 1:
        return None
    w, a = bits(k.weight_dtype or k.act_dtype), bits(k.act_dtype or k.weight_dtype)
    return {
        "m": s["m"], "n": s["n"], "k": s["k"], "w_bits": w, "a_bits": a, "block": float(w < 8 and a < 16),
        "copies": COLD, "share": 1.0,
    }  # fmt: skip


def _attention(k: Kernel) -> dict[str, float] | None:
    s = k.shape
    if not {"batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim"} <= set(s):
        return None
    found = {c: float(s[c]) for c in ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim")}
    found |= {"window": float(s.get("window", 0)), "q_bits": bits(k.act_dtype), "kv_bits": bits(k.act_dtype)}
    return found | {"copies": COLD if k.kind == "attention_decode" else 1.0, "share": 1.0}


#: "moe_up", "experts.down"; not the "up" of "grouped_mm".
_PROJECTION = re.compile(r"(?<![a-z])(?:up|down)(?![a-z])")


def _moe(k: Kernel, topk: float) -> dict[str, float] | None:
    s = k.shape
    if not {"n", "k", "experts"} <= set(s) or not k.flops:
        return None
    named = _PROJECTION.search(k.op)
    up = named[0] == "up" if named else s["n"] > s["k"]  # without a name: experts are wider than the model
    hidden, inter = (s["k"], s["n"] / 2.0) if up else (s["n"], s["k"])
    topk = float(s.get("topk", topk))
    tokens = max(1.0, k.flops / (2.0 * s["n"] * s["k"]) / topk)
    w = bits(k.weight_dtype) if k.weight_dtype else _weight_bits(k, tokens, topk)
    a = bits(k.act_dtype)
    return {
        "tokens": tokens, "hidden": hidden, "inter": inter, "topk": topk, "experts": s["experts"], "skew": 0.0,
        "w_bits": w, "a_bits": a, "block": float(a < 16), **_ONE_RANK,
        "share": s["n"] * s["k"] / (3.0 * hidden * inter),
    }  # fmt: skip


def _weight_bits(k: Kernel, tokens: float, topk: float) -> float:
    """4, 8 or 16: what the bytes read leave for a weight of the experts that got a token, if the trace has no type."""
    experts = float(k.shape["experts"])
    active = experts * (1.0 - (1.0 - min(topk / experts, 1.0)) ** tokens)
    seen = 8.0 * k.read_bytes / (k.shape["n"] * k.shape["k"] * max(active, 1.0))
    return 16.0 if not k.read_bytes or seen > 12 else 8.0 if seen > 6 else 4.0


def _bytes(k: Kernel) -> dict[str, float] | None:
    elements = (k.read_bytes + k.write_bytes) / 3.0
    if elements < 1:
        return None
    row = min(ROW, elements)
    return {"m": elements / row, "k": row, "share": 1.0}


def _of(k: Kernel, topk: float) -> tuple[str, dict[str, float]] | None:
    """(measured kind, shape) of a kernel; None if it has none."""
    if k.kind == "moe":
        found = _moe(k, topk)
    elif k.kind in ("elementwise", "norm", "reduction"):
        found = _bytes(k)
    elif k.kind == "gemm":
        found = _gemm(k)
    elif k.kind in ("attention_prefill", "attention_decode"):
        found = _attention(k)
    else:
        return None
    measured = "elementwise" if k.kind in ("norm", "reduction") else k.kind
    return (measured, found) if found else None


def _rank(k: Kernel) -> tuple[bool, int]:
    return bool(k.shape), k.duration_ns


def site_rows(trace: Trace) -> tuple[SiteRows, ...]:
    """The sites of a trace that have a measured kind, by kind. The longest kernel with a shape speaks for its site."""
    longest: dict[int, Kernel] = {}
    for k, site in zip(trace.kernels, trace.site_of, strict=True):
        if k.kind != "memset" and (site not in longest or _rank(k) > _rank(longest[site])):
            longest[site] = k
    topk = float((trace.meta.moe or {}).get("top_k", 4))
    known: dict[str, list[tuple[int, Mapping[str, float], float]]] = {}
    for site, k in sorted(longest.items()):
        found = _of(k, topk)
        if found:
            known.setdefault(found[0], []).append((site, found[1], TRANSLATED.get(k.kind, 0.0)))
    return tuple(_columns(kind, rows) for kind, rows in known.items())


def _columns(kind: str, rows: list[tuple[int, Mapping[str, float], float]]) -> SiteRows:
    shape = {c: np.array([float(r[1][c]) for r in rows]) for c in rows[0][1] if c != "share"}
    return SiteRows(
        kind, np.array([r[0] for r in rows], dtype=np.int64), shape,
        np.array([float(r[1]["share"]) for r in rows]), np.array([r[2] for r in rows]),
    )  # fmt: skip
