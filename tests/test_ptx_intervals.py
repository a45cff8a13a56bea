"""Byte intervals of a launch, worked out by hand from the sources."""

from __future__ import annotations

import ptx_truth as truth
import pytest

from tesserasim.deps.ptx import analyse, intervals
from tesserasim.errors import InputError

pytestmark = pytest.mark.quick
NVCC = analyse((truth.DATA / "kernels.ptx").read_text())
TRITON = analyse((truth.DATA / "triton.ptx").read_text())
HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


@pytest.mark.parametrize(
    ("entry", "grid", "block", "params", "want"),
    [
        (NVCC["axpy"], (8, 1, 1), (128, 1, 1), {"axpy_param_3": 1000}, [(0, 4000), (0, 4000)]),  # cut by its condition
        (NVCC["axpy"], (8, 1, 1), (128, 1, 1), {"axpy_param_3": 5000}, [(0, 4096), (0, 4096)]),
        (NVCC["axpy"], (8, 1, 1), (128, 1, 1), {}, [(0, 4096), (0, 4096)]),  # no value: no cut
        (NVCC["reverse_block"], (1, 1, 1), (256, 1, 1), {}, [(0, 1024), (0, 1024)]),
        (NVCC["by_struct"], (1, 1, 1), (128, 1, 1), {"by_struct_param_0+16": 100, "by_struct_param_0+24": 3},
         [(0, 99 * 12 + 4), (0, 400)]),
        (NVCC["tiled_product"], (2, 1, 1), (16, 16, 1), {"tiled_product_param_3": 32},
         [(0, 2048), (0, 4096), (0, 2048)]),
        (NVCC["gather"], (1, 1, 1), (64, 1, 1), {}, [(0, 256), None, (0, 512)]),  # an index from memory
        (NVCC["pointer_table"], (1, 1, 1), (8, 1, 1), {}, [None, (0, 64)]),  # "*" sorts first
        (TRITON["add"], (8, 1, 1), (128, 1, 1), {"add_param_3": 1000}, [(0, 4000)] * 3),
        (TRITON["loop_sum"], (1, 1, 1), (128, 1, 1), {"loop_sum_param_2": 1024}, [(0, 4096), (0, 512)]),
    ],
)  # fmt: skip
def test_intervals_by_hand(entry, grid, block, params, want) -> None:  # type: ignore[no-untyped-def]
    """Fails if a loop counts one turn less, or a condition cuts without the size of the access."""
    assert list(intervals(entry, grid, block, params).values()) == want


@pytest.mark.parametrize(
    ("body", "want"),
    [
        # 32 bits that wrap, unsigned numbers below zero, a counter that other numbers move: nothing is claimed
        ("mul.lo.u32 %r2, %r1, 1073741824; mul.wide.u32 %rd2, %r2, 4;", None),
        ("sub.u32 %r2, %r1, 5; mul.wide.u32 %rd2, %r2, 4;", None),
        ("sub.s32 %r2, %r1, 5; mul.wide.s32 %rd2, %r2, 4;", (-20, 12)),
        ("and.b32 %r2, %clock, 7; mul.wide.u32 %rd2, %r2, 4;", (0, 32)),
        ("mov.u32 %r2, 0; L: add.u32 %r2, %r2, 3; setp.lt.u32 %p1, %r2, 10; @%p1 bra L; mul.wide.u32 %rd2, %r2, 4;",
         (48, 52)),
        ("mov.u32 %r2, 10; L: sub.u32 %r2, %r2, 3; setp.gt.u32 %p1, %r2, 0; @%p1 bra L; mul.wide.u32 %rd2, %r2, 4;",
         None),
        ("mov.u32 %r2, 1; L: shl.b32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 10; @%p1 bra L; mul.wide.u32 %rd2, %r2, 4;",
         None),
    ],
)  # fmt: skip
def test_only_what_is_proven(body: str, want: tuple[int, int] | None) -> None:
    """Fails if neither the factors nor the results of 32 bits are checked for their range."""
    text = (f"{HEAD}.visible .entry k(.param .u64 a) {{ .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .pred %p<3>;\n"
            f"ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; {body} add.s64 %rd3, %rd1, %rd2;\n"
            f"ld.global.u32 %r3, [%rd3]; ret; }}")  # fmt: skip
    found = intervals(analyse(text)["k"], (1, 1, 1), (8, 1, 1), {})["a"]
    assert found is None if want is None else found is not None and found[0] <= want[0] and found[1] >= want[1]


def test_every_kernel_has_intervals_or_none() -> None:
    for entry in (*NVCC.values(), *TRITON.values()):
        found = intervals(entry, (2, 1, 1), (32, 1, 1), {})
        assert set(found) == {n for n, m in entry.modes.items() if m != "none"}
    with pytest.raises(InputError):
        intervals(NVCC["axpy"], (0, 1, 1), (32, 1, 1), {})
