"""The interpreter computes what numpy computes; what it sees of a launch lies inside the static answer."""

from __future__ import annotations

import contextlib
import random
import re
from typing import Any

import numpy as np
import ptx_launches as launches
import ptx_truth as truth
import pytest
from ptx_interpreter import Fault, Machine, launch
from ptx_text import Unsupported, read

from tesserasim.deps.ptx import analyse, intervals

TEXTS = {n: (truth.DATA / f"{n}.ptx").read_text() for n in ("kernels", "triton")}
HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
ONE = (1, 1, 1)
REGISTERS = ".reg .b64 %rd<19>; .reg .b32 %r<19>; .reg .pred %p<4>;"


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
    stored = "st.u64 [%rd10], %rd9;" if wide else "st.u32 [%rd10], %r9;"
    text = f"{HEAD}.entry k(.param .u64 a) {{ {REGISTERS}\nld.param.u64 %rd10, [a]; {given}\n{body}\n{stored} ret; }}"
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
    for body, kind in (("frobnicate.u32 %r1, %r1;", Unsupported), ("L: bra L;", Fault),
                       ("tex.1d.v4.f32.s32 {%r1}, [%rd1, {%r1}];", Unsupported),
                       ("mov.u64 %rd1, 0x900000000000; ld.u32 %r9, [%rd1];", Fault)):  # fmt: skip
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
    assert ran >= 70  # and a dozen more where the package is installed


def holds(
    text: str, grid: launches.Triple, block: launches.Triple, n: int, cluster: launches.Triple = ONE, known: bool = True
) -> bool:
    """Whether something is said about the bytes of a launch of `k`; fails if a byte that is seen is not in it.

    A launch is watched up to where it leaves the memory that there is, or runs for long.
    """
    effects = analyse(text)["k"]
    said = intervals(effects, grid, block, {"n": n}, cluster if known else None)
    program = read(text)
    pointers = {v.name: bytes(64) for v in program.functions["k"].params if v.name in "abc"}
    m = Machine(program, "k", grid, block, pointers, {"n": n}, limit=20_000, cluster=cluster)
    with contextlib.suppress(Fault):
        m.run()
    for name, (mode, lo, hi, _) in m.observed().items():
        if name == "*":
            continue  # an index far outside
        assert set(mode) <= set(truth.ALLOWED[effects.modes.get(name, "none")]), (text, name, mode, effects.modes)
        found = said[name]
        assert found is None or (found[0] <= lo and hi <= found[1]), (text, grid, block, n, name, found, (lo, hi))
    return any(x is not None for x in said.values())


# fmt: off
STEPS = [
    "add.s32 {d}, {a}, {b};", "sub.s32 {d}, {a}, {b};", "mul.lo.s32 {d}, {a}, {c};", "and.b32 {d}, {a}, {c};",
    "or.b32 {d}, {a}, {b};", "xor.b32 {d}, {a}, {b};", "shl.b32 {d}, {a}, {n};", "shr.u32 {d}, {a}, {n};",
    "shr.s32 {d}, {a}, {n};", "min.s32 {d}, {a}, {b};", "max.s32 {d}, {a}, {b};", "min.u32 {d}, {a}, {c};",
    "div.u32 {d}, {a}, {c};", "rem.u32 {d}, {a}, {c};", "div.s32 {d}, {a}, {c};", "rem.s32 {d}, {a}, {c};",
    "bfe.u32 {d}, {a}, {n}, {m};", "bfe.s32 {d}, {a}, {n}, {m};", "bfi.b32 {d}, {a}, {b}, {n}, {m};",
    "not.b32 {d}, {a};", "and.b32 {d}, {a}, -{m}8;", "max.u32 {d}, {a}, {c};", "mul.hi.u32 {d}, {a}, 715827883;",
    "mul.wide.u32 %rd5, {a}, {c}; shr.u64 %rd5, %rd5, {n}; cvt.u32.u64 {d}, %rd5;", "and.b32 {d}, {a}, {b};",
    "neg.s32 {d}, {a};", "abs.s32 {d}, {a};", "setp.lt.s32 %p1, {a}, {b}; selp.b32 {d}, {a}, {b}, %p1;",
    "mov.b32 {d}, {a}; setp.lt.s32 %p1, {a}, {c}; @%p1 mov.b32 {d}, {b};",
    "mad.lo.s32 {d}, {a}, {c}, {b};", "popc.b32 {d}, {a};", "lop3.b32 {d}, {a}, {b}, {c}, 0x3C;",
    "mul.lo.s32 {d}, {a}, 268435456;", "shl.b32 {d}, {a}, 30;", "add.u32 {d}, {a}, 4294967290;",
    "sub.s32 {d}, {a}, 9; max.u32 {d}, {d}, 7; shr.u32 {d}, {d}, 28;",
    "sub.s32 {d}, {a}, 9; div.u32 {d}, {d}, 858993459;", "sub.s32 {d}, {a}, 9; rem.u32 {d}, {d}, 31;",
    "prmt.b32 {d}, {a}, {b}, 0x3210;", "lop3.b32 {d}, {a}, {b}, {c}, 0xE8;", "clz.b32 {d}, {a};",
]
# fmt: on
INDEX = [
    "mul.wide.s32 %rd2, %r{i}, 4;",
    "mul.wide.u32 %rd2, %r{i}, 4;",
    "cvt.s64.s32 %rd2, %r{i}; shl.b64 %rd2, %rd2, 2;",
    "cvt.u64.u32 %rd2, %r{i}; shl.b64 %rd2, %rd2, 2;",
]


@pytest.mark.quick
def test_intervals_of_random_arithmetic_hold_what_is_seen() -> None:
    """Index arithmetic at random, seen and said: an interval may be missing, but must never be too short.

    Fails if a wrap of 32 bits is forgotten, if a remainder of a negative number counts as positive, or if `or` is
    taken for a sum of numbers that share bits.
    """
    said = 0
    for seed in range(600):
        chance = random.Random(seed)
        lines = []
        for i in range(4, 4 + chance.randint(1, 6)):
            pick = {k: f"%r{chance.randrange(1, i)}" for k in "ab"}
            pick |= {"d": f"%r{i}", "c": chance.choice(["3", "7", "12", "16", "96", "255"])}
            lines.append(chance.choice(STEPS).format(**pick, n=chance.randrange(9), m=chance.randrange(1, 9)))
        text = (f"{HEAD}.entry k(.param .u64 a, .param .u32 n) {{ {REGISTERS}\n"
                f"ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; ld.param.u32 %r3, [n];\n"
                f"{chr(10).join(lines)}\n{chance.choice(INDEX).format(i=i)} add.s64 %rd3, %rd1, %rd2;\n"
                f"st.global.u32 [%rd3], %r1; ret; }}")  # fmt: skip
        grid, block, n = (chance.randint(1, 4), 1, 1), (chance.choice([1, 8, 33]), 1, 1), chance.choice([0, 5, 1000])
        said += holds(text, grid, block, n)
    assert said >= 150


@pytest.mark.quick
def test_guards_of_random_launches_hold() -> None:
    """Conditions that cut intervals: loops with any start, step and end, guards of any comparison."""
    said = 0
    for seed in range(200):
        chance = random.Random(seed)
        how, sign = chance.choice(["lt", "le", "gt", "ge", "ne", "eq"]), chance.choice("su")
        step, start, end = chance.randint(-5, 5), chance.randint(-40, 40), chance.randint(-40, 40)
        other, negated = chance.choice(["lt", "ge", "le", "gt"]), chance.choice(["!", ""])
        guard = f"setp.{other}.{sign}32 %p2, %r3, %r4; @{negated}%p2 "
        text = (f"{HEAD}.entry k(.param .u64 a, .param .u32 n) {{ {REGISTERS}\n"
                f"ld.param.u64 %rd1, [a]; ld.param.u32 %r4, [n]; mov.u32 %r2, {start};\n"
                f"mov.u32 %r1, %tid.x; mov.u32 %r7, 0;\n"
                f"L: mad.lo.s32 %r3, %r2, 3, %r1; mul.wide.s32 %rd2, %r3, 4; add.s64 %rd3, %rd1, %rd2;\n"
                f"{guard} st.global.u32 [%rd3], %r1;\nadd.s32 %r2, %r2, {step}; add.s32 %r7, %r7, 1;\n"
                f"setp.{how}.{sign}32 %p1, %r2, {end if sign == 's' else abs(end)}; @%p1 bra L; ret; }}")  # fmt: skip
        said += holds(text, ONE, (8, 1, 1), chance.randint(-50, 200))
    assert said >= 60


POINTERS = [
    "selp.b64 {d}, {a}, {b}, {p};", "mov.b64 {d}, {a}; @{p} mov.b64 {d}, {b};", "add.s64 {d}, {a}, %rd4;",
    "sub.s64 {d}, {a}, %rd5;", "add.s64 {d}, {a}, 8;", "and.b64 {d}, {a}, -16;", "mov.b64 {d}, {b};",
    "mov.b64 {d}, {a}; @{p} bra L{i}; add.s64 {d}, {b}, 12; L{i}:", "min.u64 {d}, {a}, {b};",
    "mov.b64 {d}, {a}; M{i}: add.s64 {d}, {d}, 4; add.s32 %r3, %r3, 1; setp.lt.s32 %p3, %r3, 9; @%p3 bra M{i};",
    "mov.u64 %rd7, pool; st.shared.u64 [%rd7], {a}; ld.shared.u64 {d}, [%rd7];", "xor.b64 {d}, {a}, 4;",
    "mul.lo.s64 %rd7, {a}, %rd6; add.s64 %rd8, %rd6, -1; mul.lo.s64 %rd8, {b}, %rd8; sub.s64 {d}, %rd7, %rd8;",
    "{{ .param .b64 x; .param .b64 y; st.param.b64 [x], {a}; call (y), same, (x); ld.param.b64 {d}, [y]; }}",
    "selp.b64 %rd7, {b}, 0, {p}; selp.b64 %rd8, {a}, 0, {p}; sub.s64 %rd7, %rd7, %rd8; add.s64 {d}, {a}, %rd7;",
    "add.s64 %rd9, {b}, 8; selp.b64 %rd7, %rd9, 0, {p}; selp.b64 %rd8, {b}, 0, {p}; sub.s64 %rd7, %rd7, %rd8;"
    "add.s64 {d}, {a}, %rd7;",
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("marked", ["", ".ptr .global .align 1"])
def test_pointers_chosen_and_moved_at_random(marked: str) -> None:
    """Modes and bytes where an address may be based on any of three pointers.

    Fails if a difference of pointers, or the loop that carries one of them, is left out beside another one.
    """
    said = 0
    for seed in range(250):
        chance = random.Random(seed)
        lines = []
        for i in range(11, 11 + chance.randint(1, 5)):
            pick = {k: f"%rd{chance.choice([1, 2, 3, *range(11, i)])}" for k in "ab"}
            lines.append(chance.choice(POINTERS).format(**pick, d=f"%rd{i}", p=f"%p{chance.choice('12')}", i=i))
        text = (f"{HEAD}.shared .align 8 .b8 pool[64];\n.func (.param .b64 r) same(.param .b64 x) {{ .reg .b64 %q;"
                f" ld.param.b64 %q, [x]; st.param.b64 [r], %q; ret; }}\n"
                f".entry k(.param .u64 {marked} a, .param .u64 {marked} b, .param .u64 {marked} c, .param .u32 n) {{\n"
                f"{REGISTERS} ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [c];\n"
                f"mov.u32 %r1, %tid.x; ld.param.u32 %r2, [n]; mul.wide.u32 %rd4, %r1, 4; mul.wide.s32 %rd5, %r2, 4;\n"
                f"setp.lt.s32 %p1, %r1, 3; setp.gt.s32 %p2, %r2, 5; mov.u32 %r3, 0; selp.b64 %rd6, 1, 0, %p1;\n"
                f"{chr(10).join(lines)}\n{chance.choice(['st.u32 [%rd', 'st.v2.u32 [%rd'])}{i}], "
                f"{{%r1}}; ret; }}")  # fmt: skip
        text = re.sub(r"(st\.v2\.u32 \[%rd\d+\], )\{%r1\}", r"\1{%r1, %r1}", text)
        said += holds(text, ONE, (8, 1, 1), chance.randint(-9, 20))
    assert said >= 80


@pytest.mark.quick
def test_clusters() -> None:
    """Blocks of a cluster: exact where its size is given, else what the grid allows."""
    for seed in range(60):
        chance = random.Random(seed)
        cluster = (chance.choice([1, 2, 4]), chance.choice([1, 2]), 1)
        grid = (cluster[0] * chance.randint(1, 3), cluster[1] * chance.randint(1, 2), 1)
        word = chance.choice(["cluster_ctaid.x", "cluster_nctaid.x", "clusterid.x", "clusterid.y", "nclusterid.y",
                              "cluster_ctarank", "cluster_nctarank", "cluster_ctaid.y"])  # fmt: skip
        text = (f"{HEAD}.entry k(.param .u64 a, .param .u32 n) {{ {REGISTERS} ld.param.u64 %rd1, [a];\n"
                f"mov.u32 %r1, %{word}; mul.wide.u32 %rd2, %r1, 4; "
                f"add.s64 %rd3, %rd1, %rd2; st.u32 [%rd3], %r1; ret; }}")  # fmt: skip
        for known in (True, False):
            assert holds(text, grid, (2, 1, 1), 0, cluster, known)


def test_the_interpreter_shares_nothing_with_the_package() -> None:
    folder = truth.DATA.parents[1]
    for name in ("text", "arithmetic", "instructions", "memory", "interpreter"):
        assert not re.search(r"import tesserasim|from tesserasim", (folder / f"ptx_{name}.py").read_text())
