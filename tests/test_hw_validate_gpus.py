"""Devices of a unit: parts of one GPU share its DRAM, parts of two do not."""

from __future__ import annotations

import pytest
from validate_cases import HOP, trace

from hw.validate import Unit, bench
from tesserasim.trace.model import Trace

pytestmark = pytest.mark.quick


def on(name: str, index: int | None) -> Trace:
    """The toy unit as measured on a device."""
    return trace((1000, 2000, 3000), gpu=name, **({} if index is None else {"gpu_index": index}))


@pytest.mark.parametrize(("first", "second", "domains"), [
    (("H200-SXM/64sm", 0), ("H200-SXM/64sm", 0), (("a", "b"),)),
    (("H200-SXM/64sm", 0), ("H200-SXM/64sm", 1), ()),
    (("H200-SXM/132sm", 0), ("H200-SXM/100sm~32", 1), ()),
    (("H200-SXM/64sm", None), ("H200-SXM/68sm", None), (("a", "b"),)),  # before traces had the number
    (("H200-SXM/132sm", None), ("H200-SXM/132sm", None), ()),
])  # fmt: skip
def test_who_shares_a_dram(
    first: tuple[str, int | None], second: tuple[str, int | None], domains: tuple[tuple[str, ...], ...]
) -> None:
    unit = Unit("toy", {"a": on(*first), "b": on(*second)}, HOP)
    assert bench(unit)[1].dram_domains == domains


def test_a_throttle_does_not_change_the_multiprocessors() -> None:
    unit = Unit("toy", {"a": on("H200-SXM/132sm", 0), "b": on("H200-SXM/100sm~32", 1)}, HOP)
    assert unit.parts == {"b": 100} and [d.sm_count for d in bench(unit)[1].devices] == [132, 100]
