"""FLOPs and bytes from the shapes that a profile recorded, and the bound where it recorded none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_cases import SHARED, call, cpu_op, document, kernel, needs_shared, write

from tesserasim.api import import_profile as import_to_file
from tesserasim.trace.bounds import with_bounds
from tesserasim.trace.importer import import_profile
from tesserasim.trace.model import Kernel, Trace, TraceMeta
from tesserasim.trace.parquet import read_trace
from tesserasim.trace.shapes import recorded

pytestmark = pytest.mark.quick
BF16, F32 = "c10::BFloat16", "float"


def arguments(*tensors: tuple[list[int], str], values: tuple[str, ...] = (), strides: Any = None) -> dict[str, Any]:
    args: dict[str, Any] = {"Input Dims": [list(d) for d, _ in tensors], "Input type": [t for _, t in tensors]}
    return args | {"Concrete Inputs": list(values)} | ({"Input Strides": strides} if strides else {})


Q, K = ([2, 8, 64, 128], BF16), ([2, 4, 64, 128], BF16)
CASES: list[tuple[str, dict[str, Any], tuple[int, int, int]]] = [
    ("aten::mm", arguments(([3, 5], BF16), ([5, 7], BF16)), (210, 100, 42)),
    ("aten::addmm", arguments(([7], F32), ([3, 5], F32), ([5, 7], F32)), (210, 228, 84)),
    ("aten::bmm", arguments(([2, 3, 5], F32), ([2, 5, 7], F32)), (420, 400, 168)),
    ("aten::linear", arguments(([2, 3, 5], BF16), ([7, 5], BF16), ([7], BF16)), (420, 144, 84)),
    ("aten::_scaled_mm", arguments(([3, 5], "c10::Float8_e4m3fn"), ([5, 7], "c10::Float8_e4m3fn")), (210, 50, 42)),
    ("aten::_scaled_dot_product_flash_attention", arguments(Q, K, K), (33554432, 524288, 262144)),
    ("aten::_scaled_dot_product_flash_attention",
     arguments(Q, K, K, ([], ""), ([], ""), values=("", "", "", "0.", "True")), (17039360, 524288, 262144)),
    ("aten::cudnn_convolution", arguments(([1, 3, 8, 8], F32), ([4, 3, 3, 3], F32), values=(
        "", "", "[1, 1]", "[2, 2]", "[1, 1]", "1")), (3456, 1200, 256)),
    ("aten::add", arguments(([4, 1, 8], F32), ([5, 1], F32)), (160, 148, 640)),
    ("aten::add", arguments(([4, 8], F32), strides=[[0, 1]]), (32, 32, 128)),
    ("aten::eq", arguments(([10], "long int"), ([], "long int")), (10, 88, 10)),
    ("aten::copy_", arguments(([10], BF16), ([10], F32)), (0, 40, 20)),
    ("aten::fill_", arguments(([10], F32), ([], "Scalar")), (0, 0, 40)),
    ("aten::mean", arguments(([4, 8], F32), values=("", "[-1]")), (32, 128, 16)),
    ("aten::embedding", arguments(([1000, 16], BF16), ([4], "long int")), (0, 160, 128)),
    ("triton_poi_fused_add_0", arguments(([64], BF16), ([64], BF16), ([], "Scalar"), values=("", "", "64")),
     (0, 128, 128)),
    ("_C::silu_and_mul", arguments(([4, 8], BF16), ([4, 16], BF16)), (32, 128, 64)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "args", "expected"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_work_of_operators(op: str, args: dict[str, Any], expected: tuple[int, int, int]) -> None:
    """FLOPs, bytes read, bytes written; by hand.

    Mutation tried: `stored` counts dimensions of stride 0 too → the broadcast add reads 128 bytes, fails.
    """
    work = recorded(op, args)
    assert work is not None and (work.flops, work.read_bytes, work.write_bytes) == expected


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten::mm", arguments(([3, 5], BF16), ([6, 7], BF16))), ("aten::mm", arguments(([3, 5], BF16))),
        ("aten::mm", {}), ("aten::mm", {"Input Dims": "x", "Input type": 5}), ("mine::op", arguments(([3], F32))),
        ("aten::cat", arguments(([3], "TensorList"))), ("aten::add", arguments(([0, 4], F32))),
        ("aten::cudnn_convolution", arguments(([1, 3, 8, 8], F32), ([4, 3, 3, 3], F32))),
        ("aten::mm", arguments(([1 << 39, 1 << 39], BF16), ([1 << 39, 1 << 39], BF16))),
    ],
)  # fmt: skip
def test_shapes_that_do_not_tell(op: str, args: dict[str, Any]) -> None:
    assert recorded(op, args) is None


junk = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=5), st.sampled_from([F32, BF16, "", 4])),
    lambda inner: st.lists(inner, max_size=4), max_leaves=8,
)  # fmt: skip


@given(st.sampled_from([case[0] for case in CASES]), st.dictionaries(
    st.sampled_from(["Input Dims", "Input type", "Input Strides", "Concrete Inputs"]), junk))  # fmt: skip
def test_whatever_was_recorded(op: str, args: dict[str, Any]) -> None:
    work = recorded(op, args)
    assert work is None or min(work.flops, work.read_bytes, work.write_bytes) >= 0


def test_the_kernel_that_does_the_work_gets_it(tmp_path: Path) -> None:
    """A split-K GEMM and its reduce are one call; a kernel launched by nobody has no shapes.

    Mutation tried: every kernel of the call gets the work → the reduce has FLOPs too, fails.
    """
    events = [
        cpu_op("aten::mm", 0, 50, **arguments(([3, 5], BF16), ([5, 7], BF16))),
        call("cudaLaunchKernel", 5, 1), call("cudaLaunchKernel", 9, 2),
        kernel("splitKreduce_kernel", 80, 9, correlation=2), kernel("nvjet_gemm", 60, 5, correlation=1),
        kernel("mystery", 99, 10),
    ]  # fmt: skip
    path = write(tmp_path / "p.json", document(events))
    gemm, reduce, _ = import_profile(path).kernels
    assert (gemm.flops, gemm.read_bytes, gemm.write_bytes) == (210, 100, 42)
    assert (gemm.shape, gemm.act_dtype) == ({"m": 3, "n": 7, "k": 5, "batch": 1}, "bf16")
    assert (reduce.flops, reduce.read_bytes) == (0, 0)
    facts = import_to_file(path, tmp_path / "t.parquet")
    assert facts["work"]["recorded"] == pytest.approx(5 / 24, abs=1e-6)
    assert facts["work"]["bounded"] == pytest.approx(19 / 24, abs=1e-6)
    assert read_trace(tmp_path / "t.parquet").meta.extra["work"] == json.loads(json.dumps(facts["work"]))


def test_bounds_are_time_times_peak() -> None:
    """Mutation tried: `_bounded` gives every kind FLOPs → the norm has some, fails."""
    rows = (
        Kernel(0, "g", "a#0", kind="gemm", duration_ns=100, block=(1, 1, 1)),
        Kernel(1, "n", "b#0", kind="norm", duration_ns=100, block=(1, 1, 1)),
        Kernel(2, "memset", "c#0", kind="memset", duration_ns=7),
        Kernel(3, "g", "d#0", kind="gemm", duration_ns=200, block=(1, 1, 1), flops=5, read_bytes=6),
    )
    trace = Trace(TraceMeta("imported", "m", {"name": "u"}, "X"), rows)
    bounded = with_bounds(trace, 2000.0, 900_000.0)
    assert [(k.flops, k.read_bytes, k.write_bytes) for k in bounded] == [
        (90_000_000, 200_000, 0), (0, 100_000, 100_000), (0, 0, 0), (5, 6, 0),
    ]  # fmt: skip
    assert bounded.meta.extra["work"] == {
        "recorded": 0.5, "bounded": 0.5, "unknown": 0.0, "bounded_kinds": {"gemm": 0.25, "norm": 0.25},
    }  # fmt: skip
    unknown = with_bounds(trace, None, None)
    assert unknown.kernels == trace.kernels and unknown.meta.extra["work"]["unknown"] == 0.5


@needs_shared
@pytest.mark.parametrize("name", ["tracelens-h100-bert-small", "tracelens-torch-compile-triton"])
def test_recorded_work_of_real_profiles_is_possible(name: str) -> None:
    """No GEMM and no attention kernel is faster than the GPU's peak (dense bf16: 990 TFLOP/s, 1307 on MI300X)."""
    trace = import_profile(SHARED / "data" / "traces" / f"{name}.json.gz")
    rates = [k.flops / k.duration_ns for k in trace if k.kind in ("gemm", "attention_prefill")]
    assert rates and max(rates) < 1_307_000
    assert sum(k.read_bytes + k.write_bytes > 0 for k in trace if k.kind != "copy") >= len(trace) - 2
