"""Names of sites over batches and backends."""

from __future__ import annotations

import pytest

from hw.capture.names import site_names, stable_op

ALONE = {"addmm", "mm", "moe_up", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("op", "stable"),
    [
        ("fused__to_copy_add_addmm_mean_mul_pow_rsqrt", "fused__to_copy_add_mean_mul_pow_rsqrt"),
        ("fused__to_copy_add_addmm_mean_moe_up_mul_pow_rsqrt_view", "fused__to_copy_add_mean_mul_pow_rsqrt"),
        ("fused__scaled_dot_product_cudnn_attention__to_copy_cat_view", "fused__to_copy_cat"),
        ("fused__scaled_dot_product_flash_attention__to_copy_cat_view", "fused__to_copy_cat"),
        ("fused_add__unsafe_view", "fused_add__unsafe_view"),  # reads what a GEMM wrote
        ("fused_commute_summ", "fused_commute_summ"),  # mm is no word of it
        ("addmm", "addmm"),
        ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention"),
    ],
)
def test_a_fused_name_holds_what_the_kernel_computes(op: str, stable: str) -> None:
    assert stable_op(op, ALONE) == stable


@pytest.mark.quick
def test_ordinals_count_within_module_and_stable_name() -> None:
    calls = [("layers.0", "fused_add_view"), ("layers.0", "mm"), ("layers.0", "fused_add"), ("", "fused_add_mm")]
    names = ["layers.0/fused_add#0", "layers.0/mm.wo#0", "layers.0/fused_add#1", "unit/fused_add#0"]
    assert site_names(calls, ["", "wo", "", ""], {"mm"}) == names
