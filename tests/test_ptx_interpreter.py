"""The interpreter computes what numpy computes; what it sees of a launch lies inside the static answer."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import ptx_launches as launches
import ptx_truth as truth
import pytest
from ptx_interpreter import Fault, Machine, launch
from ptx_text import Unsupported

from tesserasim.deps.ptx import analyse, intervals

TEXTS = {n: (truth.DATA / f"{n}.ptx").read_text() for n in ("kernels", "triton")}
HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
ONE = (1, 1, 1)


def run(
    text: str, entry: str, grid: launches.Triple, block: launches.Triple, arrays: list[Any], **numbers: int
) -> Machine:
    """Arrays and numbers (`p2=…`) by position."""
    buffers = {f"{entry}_param_{i}": x.tobytes() for i, x in enumerate(arrays) if x is not None}
    named = {f"{entry}_param_{k[1:]}": x for k, x in numbers.items()}
    return launch(TEXTS[text], entry, grid, block, buffers, numbers=named)


@pytest.fixture
def numbers() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.quick
def test_vector_sum_with_a_guard(numbers: np.random.Generator) -> None:
    x, y = numbers.random((2, 300), np.float32)
    m = run("triton", "add", (3, 1, 1), (128, 1, 1), [x, y, np.zeros(400, np.float32)], p3=290)
    assert np.array_equal(m.contents("add_param_2", "f4", 400), np.r_[(x + y)[:290], np.zeros(110, np.float32)])
    assert m.observed()["add_param_2"] == ("W", 0, 1160, 1160)


@pytest.mark.quick
def test_reduction_through_shuffles_and_shared_memory(numbers: np.random.Generator) -> None:
    x = numbers.random((2, 1024), np.float32)
    m = run("triton", "row_sum", (2, 1, 1), (128, 1, 1), [x, np.zeros(2, np.float32)], p2=1024)
    assert np.allclose(m.contents("row_sum_param_1", "f4", 2), x.sum(1), rtol=1e-5)
    m = run("triton", "softmax", (2, 1, 1), (128, 1, 1), [x, x], p2=1024, p3=1000)
    e = np.exp(x[:, :1000])
    assert np.allclose(m.contents("softmax_param_1", "f4", 2048).reshape(2, -1)[:, :1000], e / e.sum(1)[:, None], 1e-4)


@pytest.mark.quick
def test_transpose_and_reversal(numbers: np.random.Generator) -> None:
    x = numbers.random((64, 64), np.float32)
    m = run("triton", "transpose", (2, 2, 1), (128, 1, 1), [x, x], p2=64)
    assert np.array_equal(m.contents("transpose_param_1", "f4", 4096).reshape(64, 64), x.T)
    m = run("kernels", "reverse_block", ONE, (256, 1, 1), [np.zeros(256, np.float32), x])
    assert np.array_equal(m.contents("reverse_block_param_0", "f4", 256), x.ravel()[255::-1])


@pytest.mark.quick
def test_product_of_tiles_with_loops_and_barriers(numbers: np.random.Generator) -> None:
    a, b = numbers.random((2, 32, 32), np.float32)
    m = run("kernels", "tiled_product", (2, 2, 1), (16, 16, 1), [a, b, np.zeros(1024, np.float32)], p3=32)
    assert np.allclose(m.contents("tiled_product_param_2", "f4", 1024).reshape(32, 32), a @ b, rtol=1e-4)


@pytest.mark.quick
def test_atomics_functions_halves_and_structs(numbers: np.random.Generator) -> None:
    data = numbers.integers(0, 256, 777).astype(np.uint8)
    m = run("kernels", "histogram", (2, 1, 1), (64, 1, 1), [np.zeros(256, np.int32), data], p2=777)
    assert np.array_equal(m.contents("histogram_param_0", "i4", 256), np.bincount(data, minlength=256))
    m = run("kernels", "recursive", ONE, ONE, [np.zeros(10, np.float32), None, np.zeros(1, np.int32)], p1=6)
    assert list(m.contents("recursive_param_0", "f4", 8)) == [0, 1, 2, 3, 4, 5, 6, 0]
    g, u = (numbers.random((2, 256), np.float32) * 4).view(np.uint32) >> 16
    wide = [(x << 16).astype(np.uint32).view(np.float32) for x in (g, u)]
    m = run("triton", "swiglu", ONE, (128, 1, 1), [*(x.astype(np.uint16) for x in (g, u)), np.zeros(256, "u2")], p3=256)
    got = (m.contents("swiglu_param_2", "u2", 256).astype(np.uint32) << 16).view(np.float32)
    assert np.allclose(got, wide[0] / (1 + np.exp(-wide[0])) * wide[1], rtol=0.01)
    x = numbers.random(128).astype(np.float32)
    m = run("kernels", "slow_sine", ONE, (128, 1, 1), [x * 10])
    assert np.allclose(m.contents("slow_sine_param_0", "f4", 128), np.sin(x * 10), atol=1e-5)


def integers(body: str, *values: int) -> int:
    """What `body` leaves in %r9, or in %rd9, given %r1, %r2, … or %rd1, …"""
    wide = "%rd9" in body
    given = "".join(f"mov.b64 %rd{i}, {v}; cvt.u32.u64 %r{i}, %rd{i};" for i, v in enumerate(values, 1))
    text = (f"{HEAD}.entry k(.param .u64 a) {{ .reg .b64 %rd<19>; .reg .b32 %r<19>; .reg .pred %p<4>;\n"
            f"ld.param.u64 %rd10, [a]; {given}\n{body}\nst.u{64 if wide else 32} [%rd10], %r{'d' * wide}9; ret; }}")  # fmt: skip
    return int(launch(text, "k", ONE, ONE, {"a": bytes(8)}).contents("a", "u8" if wide else "u4", 1)[0])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("body", "values", "want"),
    [
        ("bfe.u32 %r9, %r1, 4, 8;", (0xABCD,), 0xBC),
        ("bfe.s32 %r9, %r1, 4, 8;", (0xABCD,), 0xFFFFFFBC),
        ("bfi.b32 %r9, %r1, %r2, 8, 4;", (0xF5, 0x1234), 0x1534),
        ("prmt.b32 %r9, %r1, %r2, 0x5410;", (0x11223344, 0x55667788), 0x77883344),
        ("lop3.b32 %r9, %r1, %r2, %r3, 0x96;", (12, 10, 7), 12 ^ 10 ^ 7),
        ("shf.l.wrap.b32 %r9, %r1, %r2, 8;", (0x11223344, 0xAABBCCDD), 0xBBCCDD11),
        ("mul.wide.s32 %rd9, %r1, %r2;", (-3, 5), 2**64 - 15),
        ("mul.hi.u32 %r9, %r1, %r2;", (0xFFFFFFFF, 16), 15),
        ("div.s32 %r9, %r1, %r2;", (-7, 2), 2**32 - 3),
        ("rem.s32 %r9, %r1, %r2;", (-7, 2), 2**32 - 1),
        ("shr.s32 %r9, %r1, 40;", (-7,), 2**32 - 1),
        ("setp.lt.s32 %p1|%p2, %r1, %r2; selp.b32 %r9, 1, 2, %p2;", (-7, 2), 2),
        ("setp.lt.u32 %p1, %r1, %r2; selp.b32 %r9, 1, 2, %p1;", (-7, 2), 2),
        ("popc.b32 %r9, %r1; clz.b32 %r8, %r2; add.s32 %r9, %r9, %r8;", (0xF0F, 1), 8 + 31),
        ("cvt.rzi.s32.f32 %r9, 0fC0200000;", (), 2**32 - 2),
        ("mov.u32 %r9, %laneid; vote.sync.ballot.b32 %r9, 1, 1;", (), 1),
    ],
)  # fmt: skip
def test_integer_instructions(body: str, values: tuple[int, ...], want: int) -> None:
    assert integers(body, *values) == want


@pytest.mark.quick
def test_what_it_cannot_run_is_said() -> None:
    for body, kind in (("frobnicate.u32 %r1, %r1;", Unsupported), ("tex.1d.v4.f32.s32 {%r1}, [%rd1, {%r1}];", Unsupported),
                       ("L: bra L;", Fault), ("mov.u64 %rd1, 0x900000000000; ld.u32 %r9, [%rd1];", Fault)):  # fmt: skip
        with pytest.raises(kind):
            integers(body + " mov.u32 %r9, 1;", 1)
    with pytest.raises(Unsupported):  # the address depends on the product of a tensor core
        integers("mma.sync.m {%r1}, {%r1}, {%r1}, {%r1}; ld.shared.u32 %r9, [%r1];", 1)


# What the kept kernels need that the interpreter does not have.
NOT_RUN = {
    "through_calls": "function outside without a body",
    "by_prototype": "an indirect call",
    "indirect": "an indirect call",
    "textures": "instruction tex.1d.v4.f32.s32",
}


def test_what_is_seen_lies_inside_the_answer() -> None:
    """Modes and bytes of random launches of every kernel with truth, those of the installed package included.

    Fails if an atomic operation counts as a read, or an interval ends before the last byte of its last access.
    """
    ran, skipped = 0, {}
    for kernel, seen in launches.runnable(launches.kernels(package=True)):
        if isinstance(seen, str):
            skipped[kernel.name] = seen
            continue
        assert [s for s in seen if not s.sound] == [], kernel.name
        ran += bool(seen)
    assert skipped == NOT_RUN
    assert ran >= 60


# fmt: off
STEPS = [
    "add.s32 {d}, {a}, {b};", "sub.s32 {d}, {a}, {b};", "mul.lo.s32 {d}, {a}, {c};", "and.b32 {d}, {a}, {c};",
    "or.b32 {d}, {a}, {b};", "xor.b32 {d}, {a}, {b};", "shl.b32 {d}, {a}, {n};", "shr.u32 {d}, {a}, {n};",
    "shr.s32 {d}, {a}, {n};", "min.s32 {d}, {a}, {b};", "max.s32 {d}, {a}, {b};", "min.u32 {d}, {a}, {c};",
    "div.u32 {d}, {a}, {c};", "rem.u32 {d}, {a}, {c};", "div.s32 {d}, {a}, {c};", "rem.s32 {d}, {a}, {c};",
    "bfe.u32 {d}, {a}, {n}, {m};", "bfe.s32 {d}, {a}, {n}, {m};", "bfi.b32 {d}, {a}, {b}, {n}, {m};", "not.b32 {d}, {a};",
    "neg.s32 {d}, {a};", "abs.s32 {d}, {a};", "setp.lt.s32 %p1, {a}, {b}; selp.b32 {d}, {a}, {b}, %p1;",
    "setp.lt.s32 %p1, {a}, {c}; @%p1 mov.b32 {d}, {b};", "mad.lo.s32 {d}, {a}, {c}, {b};", "popc.b32 {d}, {a};",
    "prmt.b32 {d}, {a}, {b}, 0x3210;", "lop3.b32 {d}, {a}, {b}, {c}, 0xE8;", "clz.b32 {d}, {a};",
]
# fmt: on


@pytest.mark.quick
def test_intervals_of_random_arithmetic_hold_what_is_seen() -> None:
    """Index arithmetic at random, seen and said: an interval may be missing, but must never be too short.

    Fails if a wrap of 32 bits is forgotten, if a remainder of a negative number counts as positive, or if `or` is
    taken for a sum of numbers that share bits.
    """
    said = 0
    for seed in range(400):
        chance = random.Random(seed)
        lines = []
        for i in range(4, 4 + chance.randint(1, 6)):
            pick = {k: f"%r{chance.randrange(1, i)}" for k in "ab"}
            pick |= {"d": f"%r{i}", "c": chance.choice(["3", "7", "12", "16", "96", "255"]), "n": str(chance.randrange(9))}
            lines.append(chance.choice(STEPS).format(**pick, m=chance.randrange(1, 9)))
        text = (f"{HEAD}.entry k(.param .u64 a, .param .u32 n) {{ .reg .b64 %rd<9>; .reg .b32 %r<19>; .reg .pred %p<3>;\n"
                f"ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; ld.param.u32 %r3, [n];\n"
                f"{chr(10).join(lines)}\nmul.wide.{chance.choice('su')}32 %rd2, %r{i}, 4; add.s64 %rd3, %rd1, %rd2;\n"
                f"st.global.u32 [%rd3], %r1; ret; }}")  # fmt: skip
        grid, block, n = (chance.randint(1, 4), 1, 1), (chance.choice([1, 8, 33]), 1, 1), chance.choice([0, 5, 1000])
        found = intervals(analyse(text)["k"], grid, block, {"n": n})["a"]
        try:
            seen = launch(text, "k", grid, block, {"a": bytes(64)}, numbers={"n": n}).observed()["a"]
        except Fault:  # far outside: bytes are not seen, but what is said must not be within reach
            assert found is None or found[0] < -(1 << 18) or found[1] > 1 << 18, text
            continue
        said += found is not None
        assert found is None or (found[0] <= seen[1] and seen[2] <= found[1]), (text, found, seen, grid, block, n)
    assert said >= 150


@pytest.mark.quick
def test_guards_of_random_launches_hold() -> None:
    """Conditions that cut intervals: loops with any start, step and end, guards of any comparison."""
    said = 0
    for seed in range(200):
        chance = random.Random(seed)
        how, sign = chance.choice(["lt", "le", "gt", "ge", "ne", "eq"]), chance.choice("su")
        step, start, end = chance.randint(-5, 5), chance.randint(-40, 40), chance.randint(-40, 40)
        guard = f"setp.{chance.choice(['lt', 'ge', 'le', 'gt'])}.{sign}32 %p2, %r3, %r4; @{chance.choice(['!', ''])}%p2 "
        text = (f"{HEAD}.entry k(.param .u64 a, .param .u32 n) {{ .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .pred %p<3>;\n"
                f"ld.param.u64 %rd1, [a]; ld.param.u32 %r4, [n]; mov.u32 %r2, {start}; mov.u32 %r1, %tid.x; mov.u32 %r7, 0;\n"
                f"L: mad.lo.s32 %r3, %r2, 3, %r1; mul.wide.s32 %rd2, %r3, 4; add.s64 %rd3, %rd1, %rd2;\n"
                f"{guard} st.global.u32 [%rd3], %r1;\nadd.s32 %r2, %r2, {step}; add.s32 %r7, %r7, 1;\n"
                f"setp.{how}.{sign}32 %p1, %r2, {end if sign == 's' else abs(end)}; @%p1 bra L; ret; }}")  # fmt: skip
        n = chance.randint(-50, 200)
        found = intervals(analyse(text)["k"], ONE, (8, 1, 1), {"n": n})["a"]
        try:
            seen = launch(text, "k", ONE, (8, 1, 1), {"a": bytes(64)}, numbers={"n": n}).observed().get("a")
        except Fault:
            assert found is None or found[1] - found[0] > 1 << 18, (text, found)
            continue
        said += found is not None
        assert found is None or seen is None or (found[0] <= seen[1] and seen[2] <= found[1]), (text, n, found, seen)
    assert said >= 60


def test_the_interpreter_shares_nothing_with_the_package() -> None:
    folder = truth.DATA.parents[1]
    for name in ("text", "arithmetic", "instructions", "memory", "interpreter"):
        assert not re.search(r"import tesserasim|from tesserasim", (folder / f"ptx_{name}.py").read_text())
