"""Shapes of sites in the words of the measured tables."""

from __future__ import annotations

import pytest

from tesserasim.costs.sites import site_rows
from tesserasim.costs.times import captured_times
from tesserasim.trace.model import Kernel, Trace, TraceMeta

pytestmark = pytest.mark.quick


def rows(op: str, n: int, k: int, experts: int = 128, topk: int = 8, tokens: int = 64) -> dict[str, float]:
    """What the tables are asked for a grouped GEMM of `tokens`, [k] to [n] per expert."""
    shape = {"n": n, "k": k, "experts": experts}
    kernel = Kernel(
        0, "grouped", f"layers.0/{op}#0", kind="moe", op=op, flops=2 * tokens * topk * n * k, shape=shape,
        weight_dtype="bf16", act_dtype="bf16", read_bytes=n * k * 2, duration_ns=1000,
    )  # fmt: skip
    meta = TraceMeta(origin="synthetic", model="toy", unit={"name": "u"}, gpu="H200-SXM", moe={"top_k": topk})
    (found,) = site_rows(Trace(meta, buffers=(), kernels=(kernel,)))
    assert found.kind == "moe"
    return {name: float(found.shape[name][0]) for name in ("hidden", "inter", "tokens")}


def test_projections_are_told_apart_by_name_where_experts_are_narrower_than_the_model() -> None:
    """Qwen3-235B-A22B: 4096 to twice 1536 and back. Mutation: a matrix with n > k is the first one."""
    want = {"hidden": 4096, "inter": 1536, "tokens": 64}
    assert rows("moe_up", 2 * 1536, 4096) == want
    assert rows("moe_down", 4096, 1536) == want


def test_a_group_is_not_an_up_projection() -> None:
    """Mutation: look for "up" anywhere in the name: "grouped_mm" has it."""
    assert rows("_grouped_mm", 2880, 5760)["hidden"] == 2880
    assert rows("_grouped_mm", 5760, 2880)["hidden"] == 2880


def test_derived_times_are_not_called_captured_and_keep_their_models_error() -> None:
    """Mutation: the error of a captured time, 1.5 %, for a time that a model made to within 20 %."""
    kernel = Kernel(0, "k", "a#0", kind="gemm", duration_ns=1000, duration_p10_ns=774, duration_p90_ns=1292)
    for origin, source, shared, own in (("derived", "derived", 0.2, 0.0), ("captured", "captured", 0.015, 0.2)):
        meta = TraceMeta(origin=origin, model="toy", unit={"name": "u"}, gpu="H200-SXM")
        found = captured_times(Trace(meta, buffers=(), kernels=(kernel,)))
        assert found.source == source and found.ns.tolist() == [1000]
        assert found.sigma_systematic[0] == pytest.approx(shared, abs=0.01)
        assert found.sigma_site[0] == pytest.approx(own, abs=0.01)
