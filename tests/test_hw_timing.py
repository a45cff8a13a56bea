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
def test_stamps_of_another_engine_may_be_off_by_many_records() -> None:
    kernels = [(10 * i, 5, f"k{i}") for i in range(12)]
    types = ["kernel", "memset", *["kernel"] * 5] * 2
    sets = [(67, 1, "Memset (Device)"), (500, 1, "Memset (Device)")]
    found = in_node_order(sorted([*kernels, *sets]), types)
    assert [r[2] for r in found] == ["k0", sets[0][2], *(f"k{i}" for i in range(1, 7)), sets[1][2],
                                     *(f"k{i}" for i in range(7, 12))]  # fmt: skip
    assert [found[1], found[8]] == sets


@pytest.mark.quick
def test_replays_are_counted_from_the_end() -> None:
    rows = [(i, 1, f"k{i % 3}") for i in range(2, 9)]  # the first replay lost its first two records
    assert [r[2] for r in in_node_order(rows, ["kernel"] * 6)] == ["k0", "k1", "k2"] * 2


@pytest.mark.quick
def test_records_stay_as_stamped_where_types_do_not_fit() -> None:
    rows = [(i, 1, f"k{i}") for i in range(6)]
    assert in_node_order(rows, ["memset", *["kernel"] * 5]) == rows
