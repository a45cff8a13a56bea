"""Kernels that every kind of layer has: norms and matrix products; and what attention counts."""

from __future__ import annotations

from tesserasim.costs.mechanisms import COLD
from tesserasim.derive.shard import Format
from tesserasim.derive.unit import BF16, Unit, cost

#: Blocks of (sequence, KV head) that fill a large GPU (132 to 148 SMs), and keys that are not worth a split.
FEW_BLOCKS, KEYS_OF_A_BLOCK = 128, 256


def norm(u: Unit, hidden: int, m: str, part: str, number: int, *inputs: str) -> str:
    """RMS norm of the sum of the inputs."""
    weight = u.weight(f"{m}.norm{number}", hidden * BF16)
    elements = u.rows * hidden
    return u.kernel(m, f"norm{number}", "norm", part, reads=[*inputs, weight], out=elements * BF16,
                    shape={"elements": elements})  # fmt: skip


def linear(
    u: Unit, m: str, name: str, part: str, x: str, rows: int, n: int, k: int, dtype: str, form: Format,
    bias: bool = False, weight: str = "",
) -> str:  # fmt: skip
    """x [rows, k] times a weight [n, k]. 8-bit weights multiply 8-bit activations, quantised in the same operation."""
    w = u.weight(weight or f"{m}.{name}", form.nbytes(n * k, dtype))
    reads = [x, w] + ([u.weight(f"{m}.b{name.removeprefix('w')}", n * BF16)] if bias else [])
    width = 8 if dtype == "fp8" else 16
    what = cost("gemm", m=rows, n=n, k=k, w_bits=width, a_bits=width, block=0, copies=COLD)
    return u.kernel(m, f"{'addmm' if bias else 'mm'}.{name}", "gemm", part, reads=reads, out=rows * n * BF16,
                    flops=2 * rows * n * k, shape={"m": rows, "n": n, "k": k}, what=what,
                    dtypes=(dtype, dtype))  # fmt: skip


def pairs(u: Unit, window: int = 0) -> int:
    """Pairs of query and key under the causal mask and the window, over all sequences, per head."""
    span = min(window, u.context) if window else u.context
    past = u.context - u.tokens
    ramp = min(u.tokens, max(span - past, 0))  # queries that see fewer keys than the span
    return u.batch * (past * ramp + ramp * (ramp + 1) // 2 + (u.tokens - ramp) * span)


def launches(u: Unit, kv_heads: int, span: int) -> int:
    """Kernels of an attention: two where few sequences leave the GPU idle, so that the keys are split and combined."""
    return 2 if u.phase == "decode" and u.batch * kv_heads < FEW_BLOCKS and span > KEYS_OF_A_BLOCK else 1
