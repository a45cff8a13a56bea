"""Kind, part, shape, FLOPs and bytes of a call, from its operator and its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from hw.capture.recorder import Argument, Call
from hw.workloads.base import UnitSpec
from tesserasim.trace.model import Access, Buffer

_GEMM = ("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "bias_addmm", "_scaled_mm")


def kind_of(call: Call, unit: UnitSpec) -> str:
    """Kernel kind of a call (copies and sets inside it are told apart by their node type)."""
    op = call.op
    if op in _GEMM or call.meta.get("triton_name", "").startswith("triton_tem"):
        return "gemm"
    library = call.door != "triton"
    if library and any(word in op for word in ("scaled_dot_product", "flash_attention", "efficient_attention")):
        return "attention_decode" if unit.phase == "decode" else "attention_prefill"
    if op.startswith(("ssm_conv", "ssm_scan")):
        return "ssm_scan"
    if "conv" in op and library:
        return "conv"
    if "argmax" in op or "multinomial" in op:
        return "sampling"
    if any(word in op for word in ("rsqrt", "layer_norm", "rms_norm", "group_norm", "var_mean")):
        return "norm"
    if call.meta.get("triton_name", "").startswith(("triton_red", "triton_per")) or op in ("sum", "amax", "mean"):
        return "reduction"
    if op in ("copy_", "clone"):
        return "copy"
    return "elementwise" if call.door == "triton" or op else "other"


def weight_leaf(call: Call, weight_at: Callable[[int], str]) -> str:
    """Name, within its module, of the matrix a GEMM multiplies with; "" without one.

    `weight_at` gives the weight's full name at a storage address, or "".
    """
    for a in call.arguments:
        name = weight_at(a.storage) if len(a.shape) == 2 else ""
        if name:
            return name.removeprefix(call.module + ".")
    return ""


def shape_of(call: Call, kind: str, written_bytes: int) -> dict[str, int]:
    """Shape fields of GEMMs and attention; elements written (2 bytes each) otherwise."""
    if kind == "gemm":
        dims = [a.shape for a in call.arguments if a.mode == "R" and len(a.shape) >= 2]
        out = next((a.shape for a in call.arguments if a.mode != "R" and len(a.shape) >= 2), None)
        if len(dims) >= 2 and out:
            m, n = math.prod(out[:-1]), out[-1]
            k = next((d[-1] for d in dims if math.prod(d[:-1]) == m), dims[0][-1])
            return {"m": m, "n": n, "k": k}
    if kind.startswith("attention"):
        queries, keys = (next((a.shape for a in call.arguments if a.name == n), ()) for n in ("query", "key"))
        if len(queries) == 4 and len(keys) == 4:
            names = ("batch", "heads", "seq_q", "head_dim", "kv_heads", "seq_kv")
            return dict(zip(names, (*queries, keys[1], keys[2]), strict=True))
    return {"elements": written_bytes // 2}


def flops_of(kind: str, shape: Mapping[str, int], causal: bool) -> int:
    """Multiply-adds count 2. A causal query sees the keys up to its own, the queries being the last of the keys."""
    if kind == "gemm" and "m" in shape:
        return 2 * shape["m"] * shape["n"] * shape["k"]
    if kind.startswith("attention") and "seq_q" in shape:
        q, kv = shape["seq_q"], shape["seq_kv"]
        pairs = q * kv - (q * (q - 1) // 2 if causal and kv >= q else 0)
        return 4 * shape["batch"] * shape["heads"] * shape["head_dim"] * pairs
    return shape.get("elements", 0)


def bytes_of(
    accesses: Sequence[Access], buffers: Sequence[Buffer], gathers: bool = False, weight_share: float = 1.0
) -> tuple[int, int]:
    """(read, written) bytes of one kernel, workspace aside; what two accesses share counts once.

    `gathers`: a pointwise kernel that reads a table larger than all else it touches (embedding, rotary
    angles) looks up rows of it, at most as many bytes as it moves otherwise.
    `weight_share`: share of the weights that is read (the experts that were chosen).
    """
    role = [buffers[a.buffer].role for a in accesses]
    limit = max((a.nbytes for a, r in zip(accesses, role, strict=True) if r not in ("workspace", "weight")), default=0)
    reads: dict[int, list[tuple[int, int]]] = {}
    writes: dict[int, list[tuple[int, int]]] = {}
    for a, r in zip(accesses, role, strict=True):
        if r == "workspace":
            continue
        if a.writes:
            writes.setdefault(a.buffer, []).append((a.offset, a.offset + a.nbytes))
        if a.reads:
            nbytes = a.nbytes
            if r == "weight":
                nbytes = min(nbytes, limit) if gathers and limit else round(nbytes * weight_share)
            reads.setdefault(a.buffer, []).append((a.offset, a.offset + nbytes))
    return sum(map(_union, reads.values())), sum(map(_union, writes.values()))


def _union(spans: list[tuple[int, int]]) -> int:
    """Bytes that the spans cover together."""
    total, end = 0, 0
    for first, last in sorted(spans):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def parts(calls: Sequence[Call], leaves: Sequence[str], weights_of: Callable[[str], str]) -> list[str]:
    """Attention or FFN, per call: within a block everything up to the last attention projection is attention."""
    out = ["other"] * len(calls)
    by_module: dict[str, list[int]] = {}
    for i, c in enumerate(calls):
        by_module.setdefault(c.module, []).append(i)
    for module, members in by_module.items():
        if not module.startswith("layers."):
            kind = weights_of(module)
            for i in members:
                out[i] = kind if kind in ("embed", "head") else "other"
            continue
        marks = [weights_of(f"{module}.{leaves[i]}") if leaves[i] else "" for i in members]
        last_attention = max((j for j, m in enumerate(marks) if m == "attention"), default=-1)
        for j, i in enumerate(members):
            out[i] = marks[j] or ("attention" if j < last_attention else "ffn")
    return out


def dtype_names(arguments: Sequence[Argument]) -> tuple[str, str]:
    """(weight dtype, activation dtype) in short form, from a call's tensors."""
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int64": "i64", "uint8": "u8"}
    reads = [short.get(a.dtype, a.dtype) for a in arguments if a.mode == "R"]
    writes = [short.get(a.dtype, a.dtype) for a in arguments if a.mode != "R"]
    return (reads[-1] if reads else ""), (writes[0] if writes else (reads[0] if reads else ""))
