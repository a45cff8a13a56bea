"""Co-run times from the ends of two loops: against a fluid model written out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from hw.capture.driver import Node
from hw.replay.pairs import chosen, corun
from tesserasim.trace.model import Kernel, Trace, TraceMeta


@pytest.mark.quick
@pytest.mark.parametrize(("alone", "slow", "count"), [
    ((10.0, 20.0), (15.0, 26.0), (100, 70)), ((10.0, 20.0), (15.0, 26.0), (300, 30)),
    ((5.0, 5.0), (10.0, 10.0), (50, 50)), ((10.0, 40.0), (10.0, 44.0), (7, 90)),
])  # fmt: skip
def test_the_times_that_made_the_ends(
    alone: tuple[float, float], slow: tuple[float, float], count: tuple[int, int]
) -> None:
    whole = [n * s for n, s in zip(count, slow, strict=True)]
    first = 0 if whole[0] <= whole[1] else 1
    other = 1 - first
    done = whole[first] / slow[other]  # kernels of the other loop when the first ends
    ends = [0.0, 0.0]
    ends[first] = whole[first]
    ends[other] = whole[first] + (count[other] - done) * alone[other]
    assert corun(*ends, *count, *alone) == pytest.approx(slow)


@pytest.mark.quick
def test_a_kernel_is_looped_with_all_that_its_site_launches() -> None:
    """A memset, the GEMM that counts in what it clears, and a reduction; then a norm, and the same GEMM again."""
    sites = ["gemm#0", "gemm#0", "gemm#0", "norm#0", "gemm#1", "gemm#1", "gemm#1", "set#0"]
    names = ["", "gemm", "reduce", "norm", "", "gemm", "reduce", ""]
    nodes = [Node("kernel" if n else "memset", n, (8, 1, 1)) for n in names]
    trace = Trace(
        TraceMeta(origin="synthetic", model="toy", unit={"name": "u"}, gpu=""), buffers=(),
        kernels=tuple(Kernel(i, n, s) for i, (n, s) in enumerate(zip(names, sites, strict=True))),
    )  # fmt: skip
    arena = SimpleNamespace(nodes=nodes, trace=trace)
    assert chosen(arena, [1, 30, 4, 50, 1, 30, 4, 900], 4) == [range(3), range(3, 4)]
    assert chosen(arena, [1, 30, 4, 50, 1, 30, 4, 900], 1) == [range(3)]  # 70 over both against 50
