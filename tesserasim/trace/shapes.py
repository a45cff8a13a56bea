"""FLOPs and bytes of an operator from the shapes that its call recorded ("Input Dims", "Input type").

What is counted is the least that the operator must do: every input read once, every output written once, a
multiply-add as two FLOPs. A stride of 0 (a broadcast view) repeats an element without storing it, so such a
dimension counts once. Operators that are not in the tables here, and calls whose shapes do not tell the size
of the result, have no recorded work: `bounds.py` then gives a bound from the time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tesserasim.trace.values import integer, label

#: C++ and numeric names of element types → (our name, bytes).
_TYPES = {
    "float": ("fp32", 4), "double": ("fp64", 8), "c10::bfloat16": ("bf16", 2), "c10::half": ("fp16", 2),
    "int": ("int32", 4), "long int": ("int64", 8), "long": ("int64", 8), "long long": ("int64", 8),
    "short": ("int16", 2), "short int": ("int16", 2), "signed char": ("int8", 1), "char": ("int8", 1),
    "unsigned char": ("uint8", 1), "bool": ("bool", 1), "c10::float8_e4m3fn": ("fp8", 1),
    "c10::float8_e5m2": ("fp8", 1), "c10::float8_e4m3fnuz": ("fp8", 1), "c10::float8_e5m2fnuz": ("fp8", 1),
    "c10::complex<float>": ("complex64", 8), "c10::complex<double>": ("complex128", 16),
}  # fmt: skip
#: Beyond these a recorded shape is damage.
_MOST_DIMS, _MOST_BYTES = 16, 1 << 50


class Tensor(NamedTuple):
    """An argument of an operator: its dimensions, and what its elements are."""

    dims: tuple[int, ...]
    dtype: str
    itemsize: int
    stored: int  # elements that exist in memory: a dimension of stride 0 counts once

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        return self.stored * self.itemsize


class Work(NamedTuple):
    """What one call of an operator does."""

    kinds: tuple[str, ...]  # kinds of kernel that do it, the first the usual one
    flops: int
    read_bytes: int
    write_bytes: int
    shape: Mapping[str, int]  # of Kernel.shape
    act_dtype: str
    weight_dtype: str


class Call(NamedTuple):
    """The recorded arguments of one call, by position; None for what is no tensor or has no known type."""

    tensors: tuple[Tensor | None, ...]
    values: tuple[str, ...]  # "Concrete Inputs": text of scalars and lists, empty for tensors

    def value(self, at: int) -> str:
        return self.values[at] if at < len(self.values) else ""

    def integers(self, at: int) -> list[int]:
        return [int(v) for v in re.findall(r"-?\d{1,9}", self.value(at)[:200])]


def recorded(op: str, arguments: Mapping[str, Any]) -> Work | None:
    """The work of a call of `op` with the profile's `arguments`; None if they do not tell it."""
    rule = _rule(op)
    if rule is None:
        return None
    call = _call(arguments)
    if call is None:
        return None
    try:
        work = rule(op, call)
    except (IndexError, ValueError, ZeroDivisionError):  # fewer arguments or dimensions than the operator takes
        return None
    if work is None or not 0 < work.read_bytes + work.write_bytes < _MOST_BYTES or not 0 <= work.flops < 1 << 62:
        return None
    return work._replace(shape={key: size for key, size in work.shape.items() if 0 <= size < 1 << 62})


def _call(arguments: Mapping[str, Any]) -> Call | None:
    dims = arguments.get("Input Dims", arguments.get("Input dims"))
    types = arguments.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return None
    given_strides = arguments.get("Input Strides")
    strides: list[Any] = given_strides if isinstance(given_strides, list) else []
    tensors = tuple(
        _tensor(size, kind, strides[i] if i < len(strides) else None)
        for i, (size, kind) in enumerate(zip(dims[:64], types[:64], strict=False))
    )
    values = arguments.get("Concrete Inputs")
    texts = tuple(v if isinstance(v, str) else "" for v in values[:64]) if isinstance(values, list) else ()
    return Call(tensors, texts)


def _tensor(dims: Any, kind: Any, strides: Any) -> Tensor | None:
    known = _TYPES.get(kind.lower()) if isinstance(kind, str) else None
    if known is None or not isinstance(dims, list) or len(dims) > _MOST_DIMS:
        return None
    sizes = [integer(size) for size in dims]
    if any(size is None or not 0 <= size < 1 << 40 for size in sizes):
        return None
    whole = tuple(size for size in sizes if size is not None)
    steps = strides if isinstance(strides, list) and len(strides) == len(whole) else [1] * len(whole)
    stored = math.prod(size for size, step in zip(whole, steps, strict=True) if label(step) != 0 or size == 0)
    return Tensor(whole, known[0], known[1], stored)


def _given(call: Call, *places: int) -> list[Tensor]:
    """The tensors at these places; IndexError (no recorded work) if one is missing."""
    found = [call.tensors[at] for at in places]
    tensors = [t for t in found if t is not None]
    if len(tensors) < len(found):
        raise IndexError
    return tensors


def _bytes(tensors: Sequence[Tensor | None]) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


def _gemm(op: str, call: Call) -> Work | None:
    """a × b, with batch dimensions in front of both, plus whatever is added."""
    name = op.rpartition("::")[2].lstrip("_")
    added = name.startswith(("addmm", "baddbmm"))
    a, b = _given(call, 1, 2) if added else _given(call, 0, 1)
    bias = call.tensors[0] if added else (call.tensors[2] if name == "linear" and len(call.tensors) > 2 else None)
    if name == "linear":
        m, k, n, batch = math.prod(a.dims[:-1]), a.dims[-1], b.dims[0], 1
        matching = b.dims[-1] == k
    elif len(a.dims) == len(b.dims) == 2 or len(a.dims) == len(b.dims) == 3:
        (m, k), n, batch = a.dims[-2:], b.dims[-1], math.prod(a.dims[:-2])
        matching = b.dims[-2] == k and a.dims[:-2] == b.dims[:-2]
    else:
        return None
    if not matching:
        return None
    shape = {"m": m, "n": n, "k": k, "batch": batch}
    out = max(a.itemsize, 2) * m * n * batch  # 8-bit inputs give 16-bit results
    return Work(("gemm",), 2 * m * n * k * batch, _bytes([a, b, bias]), out, shape, a.dtype, b.dtype)


#: How a causal mask is recorded: a truth value, or the number of a kind of mask.
_CAUSAL = ("True", "1", "2")
#: Operator → (heads before the sequence?, place of is_causal or of the kind of mask).
_ATTENTION = {
    "aten::scaled_dot_product_attention": (True, 5), "aten::_scaled_dot_product_flash_attention": (True, 4),
    "aten::_scaled_dot_product_efficient_attention": (True, 6),
    "aten::_scaled_dot_product_cudnn_attention": (True, 6),
    "aten::_scaled_dot_product_fused_attention_overrideable": (True, 5), "aten::_flash_attention_forward": (False, 8),
    "aten::_efficient_attention_forward": (False, 9), "aten::_cudnn_attention_forward": (True, 10),
}  # fmt: skip


def _attention(op: str, call: Call) -> Work | None:
    """softmax(q kᵀ) v: two products over the pairs that the mask leaves."""
    heads_first, causal_at = _ATTENTION[op]
    q, k, v = _given(call, 0, 1, 2)
    if not len(q.dims) == len(k.dims) == 4:  # ragged sequences: their lengths are in no shape
        return None
    heads, rows = (1, 2) if heads_first else (2, 1)
    batch, n, sq, dim = q.dims[0], q.dims[heads], q.dims[rows], q.dims[3]
    kv_heads, skv, dim_v = k.dims[heads], k.dims[rows], v.dims[3]
    pairs = sq * (sq + 1) // 2 if call.value(causal_at) in _CAUSAL and sq == skv else sq * skv
    shape = {
        "batch": batch, "heads": n, "kv_heads": kv_heads, "seq_q": sq, "seq_kv": skv, "head_dim": dim,
    }  # fmt: skip
    kind = "attention_decode" if sq == 1 else "attention_prefill"
    flops = 2 * batch * n * pairs * (dim + dim_v)
    written = batch * n * sq * dim_v * q.itemsize
    return Work((kind, "other"), flops, _bytes([q, k, v]), written, shape, q.dtype, "")


#: Operator → places of stride, padding, dilation.
_CONVOLUTIONS = {
    "aten::convolution": (3, 4, 5), "aten::_convolution": (3, 4, 5), "aten::cudnn_convolution": (3, 2, 4),
    "aten::miopen_convolution": (4, 3, 5), "aten::conv2d": (3, 4, 5),
}  # fmt: skip


def _convolution(op: str, call: Call) -> Work | None:
    places = _CONVOLUTIONS[op]
    x, w = _given(call, 0, 1)
    space = len(x.dims) - 2
    stride, padding, dilation = (call.integers(at) for at in places)
    transposed = op.endswith("convolution") and places[0] == 3 and call.value(6) == "True"
    if space < 1 or not len(stride) == len(padding) == len(dilation) == space or transposed:
        return None
    out = [
        (x.dims[2 + i] + 2 * padding[i] - dilation[i] * (w.dims[2 + i] - 1) - 1) // stride[i] + 1
        for i in range(space)
    ]
    elements = x.dims[0] * w.dims[0] * math.prod(out)
    if min(out) < 0:
        return None
    flops = 2 * elements * math.prod(w.dims[1:])
    shape = {"elements": elements}
    return Work(("conv", "gemm"), flops, _bytes([x, w]), elements * x.itemsize, shape, x.dtype, w.dtype)


def _elementwise(op: str, call: Call) -> Work | None:
    """A value per element of the (broadcast) inputs."""
    tensors = [t for t in call.tensors if t is not None]
    name = op.rpartition("::")[2]
    if name in ("fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_"):
        (out,) = _given(call, 0)
        return Work(("elementwise",), 0, 0, out.nbytes, {"elements": out.elements}, out.dtype, "")
    if name == "copy_":
        out, source = _given(call, 0, 1)
        elements = out.elements
        return Work(("elementwise",), 0, source.nbytes, out.nbytes, {"elements": elements}, out.dtype, "")
    largest = max(tensors, key=lambda t: t.elements)
    size = 1 if name.rstrip("_") in _COMPARISONS else largest.itemsize
    dims = [t.dims for t in tensors if t.dims]
    width = max((len(d) for d in dims), default=0)
    elements = math.prod(max((d[-i] for d in dims if len(d) >= i), default=1) for i in range(1, width + 1))
    if any(0 in d for d in dims):
        return None
    return Work(
        ("elementwise",), elements, _bytes(tensors), elements * size, {"elements": elements}, largest.dtype, ""
    )


def _norm(op: str, call: Call) -> Work | None:
    (x,) = _given(call, 0)
    kinds = ("reduction",) if "softmax" in op else ("norm",)
    return Work(kinds, 4 * x.elements, _bytes(call.tensors), x.nbytes, {"elements": x.elements}, x.dtype, "")


def _reduction(op: str, call: Call) -> Work | None:
    """One input, folded over the dimensions of the second argument (all of them if it has none)."""
    (x,) = _given(call, 0)
    folded = {axis % len(x.dims) for axis in call.integers(1)} if x.dims else set()
    kept = math.prod(size for i, size in enumerate(x.dims) if i not in folded) if folded else 1
    return Work(("reduction",), x.elements, x.nbytes, kept * x.itemsize, {"elements": x.elements}, x.dtype, "")


def _rows(op: str, call: Call) -> Work | None:
    """Rows of a table by index: reads the rows that are taken, not the table."""
    table, index = _given(call, 0, 1) if op.endswith("embedding") else _given(call, 0, 2)
    axis = 0 if op.endswith("embedding") else call.integers(1)[0]
    taken = table.elements // table.dims[axis] * index.elements * table.itemsize
    shape = {"elements": taken // table.itemsize}
    return Work(("elementwise", "reduction"), 0, index.nbytes + taken, taken, shape, table.dtype, table.dtype)


def _fused(op: str, call: Call) -> Work | None:
    """A generated kernel: one pass over its pointer arguments, of which the last is the result."""
    tensors = [t for t, text in zip(call.tensors, (*call.values, *[""] * 64), strict=False) if t and not text]
    *read, out = tensors
    kinds = ("elementwise", "norm", "reduction", "other")
    shape = {"elements": max(t.elements for t in tensors)}
    return Work(kinds, 0, _bytes(read or [out]), out.nbytes, shape, out.dtype, "")


#: vLLM's operators write into arguments: operator → (places read, places written).
_OUTPUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "_C::rms_norm": ((1, 2), (0,)), "_C::fused_add_rms_norm": ((0, 1, 2), (0, 1)), "_C::silu_and_mul": ((1,), (0,)),
    "_C::gelu_and_mul": ((1,), (0,)), "_C::static_scaled_fp8_quant": ((1,), (0,)),
    "_C::dynamic_scaled_fp8_quant": ((1,), (0,)), "_C::rotary_embedding": ((0, 1, 2), (1, 2)),
}  # fmt: skip


def _in_place(op: str, call: Call) -> Work | None:
    read, written = (_given(call, *places) for places in _OUTPUTS[op])
    out = written[0]
    kinds = ("norm", "elementwise") if "norm" in op else ("elementwise", "norm")
    return Work(kinds, out.elements, _bytes(read), _bytes(written), {"elements": out.elements}, out.dtype, "")


_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "logical_not", "logical_and", "logical_or"}
_NAMES: dict[Callable[[str, Call], Work | None], str] = {
    _gemm: "mm addmm bmm baddbmm linear matmul _int_mm _scaled_mm _addmm_activation",
    _elementwise: "add sub rsub mul div pow neg exp log sqrt rsqrt abs sin cos tanh sigmoid silu gelu relu erf where"
    " clamp clamp_min clamp_max maximum minimum bitwise_and bitwise_or bitwise_not masked_fill threshold_backward"
    " copy_ fill_ zero_ uniform_ normal_ random_ reciprocal addcmul addcdiv lerp floor ceil round sign "
    + " ".join(sorted(_COMPARISONS)),
    _norm: "native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm miopen_batch_norm rms_norm"
    " _fused_rms_norm _softmax _log_softmax softmax",
    _reduction: "sum mean amax amin any all var std prod argmax argmin",
    _rows: "embedding index_select",
}
_RULES = {f"aten::{name}": rule for rule, names in _NAMES.items() for name in names.split()}
_RULES |= dict.fromkeys(_ATTENTION, _attention) | dict.fromkeys(_CONVOLUTIONS, _convolution)
_RULES |= dict.fromkeys(_OUTPUTS, _in_place)


def _rule(op: str) -> Callable[[str, Call], Work | None] | None:
    if op.startswith("triton_"):
        return _fused
    return _RULES.get(op) or _RULES.get(op.removesuffix("_") if op.endswith("_") else op)
