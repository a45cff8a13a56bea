"""Records of a replay in the order of its nodes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hw.capture.timing import in_node_order


@pytest.mark.quick
def test_a_set_that_seems_early_goes_behind_the_kernel_before_it() -> None:
    a, b, c = (10, 5, "gemm"), (20, 5, "split"), (30, 5, "reduce")
    early = (9, 1, "Memset (Device)")
    types = ["kernel", "memset", "kernel", "kernel"]
    assert in_node_order([early, a, b, c], types) == [a, early, b, c]
    right = [a, (16, 1, "Memset (Device)"), b, c]
    assert in_node_order(right, types) == right


@pytest.mark.quick
def test_no_record_is_lost_where_types_do_not_fit() -> None:
    rows = [(i, 1, f"k{i}") for i in range(6)]
    assert in_node_order(rows, ["memset", *["kernel"] * 5]) == rows
