"""Which kernels are measured: a fixed list of shapes of models that people run, in an order that may be cut anywhere.

Within a kind shapes are sorted by their work and visited in the order of the van der Corput sequence (the middle, the
quarters, the eighths, ...); the kinds take turns in proportion to their numbers. The first n shapes are therefore
spread over all kinds and sizes, whatever n is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KINDS = ("gemm", "attention_prefill", "attention_decode", "moe", "elementwise")

#: (n, k) of Llama-3 8B and 70B, Qwen 2.5 and 3, gpt-oss, DeepSeek-V3, Mamba-Codestral, SD 3.5, and some round ones.
WEIGHTS = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
    (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672),
    (4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944),
    (7168, 5120), (51200, 5120), (5120, 25600),
    (5120, 2880), (2880, 4096),
    (1536, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048),
    (18560, 4096), (1536, 1536), (6144, 1536), (1024, 1024), (512, 4096), (2048, 512),
)  # fmt: skip

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
#: (heads, kv_heads, head_dim): Llama-3 8B and 70B, Qwen 2.5-7B, gpt-oss, Qwen3-235B, 70B on four and eight GPUs, MHA.
HEADS = ((32, 8, 128), (64, 8, 128), (28, 4, 128), (64, 8, 64), (64, 4, 128), (16, 2, 128), (8, 1, 128), (32, 32, 128))
PREFILLS = (
    (1, 128), (1, 512), (1, 2048), (1, 4096), (1, 8192), (1, 16384), (4, 256), (4, 1024), (4, 4096), (16, 128),
    (16, 1024), (64, 256),
)  # fmt: skip
DECODES = (
    (1, 512), (1, 2048), (1, 8192), (1, 32768), (1, 131072), (8, 256), (8, 2048), (8, 16384), (32, 512), (32, 2048),
    (32, 8192), (64, 1024), (128, 512), (128, 2048), (128, 8192), (256, 512), (256, 2048),
)  # fmt: skip
#: (batch, seq_q, seq_kv, heads) of units under traces/: what is measured here can be held against them.
CAPTURED = tuple(
    [(b, 1, c, HEADS[i]) for b, c in ((1, 8192), (8, 512), (32, 2048), (128, 2048)) for i in (0, 2)]
    + [(1, t, t, HEADS[i]) for t in (512, 2048, 8192) for i in (0, 2)]
)
#: (hidden, inter, topk, experts, parts of `inter`, weights): gpt-oss-20b, Qwen3-30B, Mixtral, DeepSeek-V3 on eight.
EXPERTS = (
    (2880, 2880, 4, 32, 1, "w4a16_mxfp4"), (2048, 768, 8, 128, 1, "bfloat16"), (4096, 14336, 2, 8, 1, "bfloat16"),
    (7168, 2048, 8, 256, 8, "bfloat16"),
)  # fmt: skip
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
OPERATIONS = ("scale_matrix", "rmsnorm", "silu_mul", "add", "rope")
WIDTHS = (2880, 4096, 8192, 16384)
LONG = (1, 16, 64, 256, 1024, 4096, 16384)


@dataclass(frozen=True)
class Shape:
    """One operation: `sizes` under the names of the table's columns."""

    kind: str
    dtype: str
    sizes: Mapping[str, int] = field(hash=False)
    op: str = ""
    work: float = field(default=0.0, compare=False)  # what shapes of a kind are sorted by: FLOPs, or bytes

    @property
    def key(self) -> str:
        """What the journal knows it by."""
        return " ".join((self.op or self.kind, self.dtype, *(f"{k}={v}" for k, v in self.sizes.items())))


def _gemm(dtype: str, each: int, shift: int) -> list[Shape]:
    """`each` row counts per pair of widths, evenly over the list, moved on by one from pair to pair."""
    found = []
    for i, (n, k) in enumerate(WEIGHTS):
        for j in range(each):
            at = (shift + i + j * len(ROWS) / each) % len(ROWS)
            m = ROWS[int(at)]
            found.append(Shape("gemm", dtype, {"m": m, "n": n, "k": k}, work=2.0 * m * n * k))
    return found


def _attention() -> list[Shape]:
    found = []
    for i, (batch, seq) in enumerate(PREFILLS * 3):
        h, g, d = HEADS[(i + i // len(PREFILLS)) % len(HEADS)]
        sizes = {"batch": batch, "seq_q": seq, "seq_kv": seq, "heads": h, "kv_heads": g, "head_dim": d}
        work = 2.0 * batch * h * d * seq * seq
        found.append(Shape("attention_prefill", "bfloat16", sizes, work=work))
    for i, (batch, seq) in enumerate(DECODES * 3):
        h, g, d = HEADS[(i + i // len(DECODES)) % len(HEADS)]
        sizes = {"batch": batch, "seq_q": 1, "seq_kv": seq, "heads": h, "kv_heads": g, "head_dim": d}
        found.append(Shape("attention_decode", "bfloat16", sizes, work=4.0 * batch * h * d * seq))
    for batch, q, seq, (h, g, d) in CAPTURED:
        kind = "attention_decode" if q == 1 else "attention_prefill"
        sizes = {"batch": batch, "seq_q": q, "seq_kv": seq, "heads": h, "kv_heads": g, "head_dim": d}
        found.append(Shape(kind, "bfloat16", sizes, work=2.0 * batch * h * d * seq * max(q, 2)))
    return found


def _moe() -> list[Shape]:
    found = []
    for hidden, inter, topk, experts, tp, dtype in EXPERTS:
        for tokens in TOKENS:
            sizes = {
                "num_tokens": tokens, "hidden_size": hidden, "inter_size": inter, "topk": topk, "num_experts": experts,
                "moe_tp_size": tp, "moe_ep_size": 1,
            }  # fmt: skip
            found.append(Shape("moe", dtype, sizes, work=6.0 * tokens * topk * hidden * inter / tp))
    return found


def _elementwise() -> list[Shape]:
    """Twice as many of the operation that the shipped parameters know as of each other one."""
    found = []
    for o, op in enumerate(OPERATIONS):
        for i, m in enumerate(LONG * (2 if op == "scale_matrix" else 1)):
            k = WIDTHS[(i + 2 * (i // len(LONG)) + o) % len(WIDTHS)]
            dtype = "fp8" if op == "scale_matrix" else "bfloat16"
            found.append(Shape("elementwise", dtype, {"m": m, "k": k}, op, work=float(m * k)))
    return found


def van_der_corput(index: int) -> float:
    """The binary digits of `index` mirrored at the point: 0, 1/2, 1/4, 3/4, 1/8, ..."""
    found, weight = 0.0, 0.5
    while index:
        found += weight * (index & 1)
        index, weight = index >> 1, weight / 2
    return found


def _spread(shapes: Sequence[Shape]) -> list[Shape]:
    """Sorted by work, then visited so that any beginning is spread over the whole range."""
    by_work = sorted(shapes, key=lambda s: (s.work, s.key))
    bits = max(1, math.ceil(math.log2(max(len(by_work), 2))))
    places = [van_der_corput(i) * (1 << bits) for i in range(1 << bits)]
    return [by_work[int(p)] for p in places if p < len(by_work)]


def shapes(kinds: Sequence[str] = KINDS) -> list[Shape]:
    """The whole list, in the order in which it is measured."""
    every = [*_gemm("bfloat16", 3, 0), *_gemm("fp8", 2, 1), *_attention(), *_moe(), *_elementwise()]
    every = list({s.key: s for s in every}.values())
    placed = []
    for number, kind in enumerate(KINDS):
        for dtype in sorted({s.dtype for s in every if s.kind == kind}):
            mine = _spread([s for s in every if s.kind == kind and s.dtype == dtype])
            placed += [((i + 0.5) / len(mine), number, dtype, s) for i, s in enumerate(mine)]
    placed.sort(key=lambda p: p[:3])
    return [s for *_, s in placed if s.kind in kinds]
