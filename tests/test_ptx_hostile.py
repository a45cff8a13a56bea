"""Texts made to break a parser: an answer or one line, and never a hang."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest

from tesserasim.deps.ptx import analyse, intervals
from tesserasim.errors import InputError

pytestmark = pytest.mark.quick
HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
MEGA, MANY = 1_000_000, 100_000
REGISTERS = ".reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .pred %p<4>;"


def kernel(body: str, before: str = "", more: str = "", registers: str = REGISTERS) -> str:
    return f"{HEAD}{before}.entry k(.param .u64 a{more}) {{ {registers}\nld.param.u64 %rd1, [a];\n{body}\nret; }}\n"


def functions(count: int, calls: int) -> str:
    """Each function calls the next one so many times; the last one stores."""
    inner = (f".func f{i}(.reg .b64 x) {{ {f'call f{i + 1}, (x); ' * calls}ret; }}\n" for i in range(count))
    return "".join(inner) + f".func f{count}(.reg .b64 x) {{ st.u32 [x], 1; ret; }}\n"


LONG = "\n".join(f"add.s64 %rd{i + 1}, %rd{i}, 4;" for i in range(1, MANY))
READ, NONE = {"a": "R"}, {"a": "none"}
# Text and the modes it has, or None for an InputError.
CASES: dict[str, tuple[str, dict[str, str] | None]] = {
    "scopes": (kernel("{" * 20_000 + "ld.u32 %r1, [%rd1];" + "}" * 20_000), READ),
    "scopes that stay open": (kernel("{" * 20_000), None),
    "registers": (kernel(f"{LONG} st.u32 [%rd{MANY}], 1;", registers=".reg .b64 %rd<200000>;"), {"a": "W"}),
    "registers without end": (kernel("ld.u32 %rd2, [%rd1];", registers=".reg .b64 %rd<99999999999999999999>;"), READ),
    "one long line": (kernel("ld.u32 %r1, [%rd1]; " * 50_000), READ),
    "digits": (kernel("mov.b64 %rd2, " + "9" * MEGA + ";"), NONE),
    "a number beyond 64 bits": (kernel(f"mov.b64 %rd2, 0x{'f' * 4000}; add.s64 %rd2, %rd1, %rd2; ld.u32 %r1, [%rd2];"),
                                READ),
    "an offset beyond 64 bits": (kernel(f"ld.u32 %r1, [%rd1+{'9' * 5000}];"), READ),
    "an array beyond 64 bits": (kernel("ld.u32 %r1, [%rd1];", more=f", .param .b8 s[{'9' * 5000}]"),
                                {**READ, "s": "none"}),
    "an address size": (HEAD.replace("64", "9" * 5000), None),
    "spaces in a statement": (kernel("mov.b64" + " " * MEGA + "?;"), None),
    "spaces in an address": (kernel("ld.u32 %r1, [%rd1" + " " * MEGA + "?];"), None),
    "spaces in a declaration": (kernel("", registers=".reg .b64 %rd" + " " * MEGA + "?;"), None),
    "spaces in a head": (HEAD + ".entry" + " " * MEGA + "?", None),
    "spaces in a target": (f".version 8.7\n.target {' ' * MEGA}?", None),
    "sums": (kernel("mov.b64 %rd2, a" + "+1" * 300_000 + " ?;"), None),
    "brackets": (kernel("ld.u32 %r1, " + "[" * MEGA + ";"), None),
    "commas": (kernel("mov.b64 %rd2, " + "," * MEGA + ";"), None),
    "signs": (kernel("mov.b64 %rd2, " + "-" * MEGA + "1;"), None),
    "initial values": (f"{HEAD}.global .b8 g[4] = {{{'{' * MANY}{'}' * MANY}}};\n{kernel('')[len(HEAD):]}", NONE),
    "comments": (kernel("/*" * 300_000), None),
    "labels": (kernel("\n".join(f"L{i}:" for i in range(MANY)) + "ld.u32 %r1, [%rd1];"), READ),
    "targets": (kernel("t: .branchtargets " + ", ".join(["L"] * MANY) + ";\nL: brx.idx %r1, t;"), NONE),
    "a function that calls itself": (
        kernel("call f, (%rd1);", ".func f(.reg .b64 x) { call f, (x); call f, (x); ld.u32 x, [x]; ret; }\n"),
        {"a": "unknown", "*": "unknown"}),
    "2^15 calls": (kernel("call f0, (%rd1);", functions(15, 2)), {"a": "unknown", "*": "unknown"}),
    "10^12 calls": (kernel("call f0, (%rd1);", functions(12, 10)), {"a": "unknown", "*": "unknown"}),
    "a chain of calls": (kernel("call f0, (%rd1);", functions(3000, 1)), {"a": "unknown", "*": "unknown"}),
    "aliases of each other": (kernel("call f, (%rd1);", ".alias f, g;\n.alias g, f;\n"),
                              {"a": "unknown", "*": "unknown"}),
    "letters of other scripts": (kernel("ld.u32 %r1, [%rd1]; // \u2028 \x85 é \ud800"), READ),
    "names of other scripts": (kernel("mov.b64 %rdé, 1; \ud800"), None),
    "NUL": (kernel("ld.u32 \0%r1, [%rd1\0];"), READ),
    "nothing but NUL": ("\0" * 1000, None),
}  # fmt: skip


@pytest.fixture(autouse=True)
def watch() -> Iterator[None]:
    """A hang becomes a failure."""

    def late(*_: object) -> None:
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", CASES)
def test_hostile_texts(name: str) -> None:
    """Fails if a pattern backtracks over a megabyte, or calls that multiply are all followed."""
    text, want = CASES[name]
    try:
        found = analyse(text, "x.ptx")["k"]
    except InputError as error:
        assert want is None
        assert re.match(r"x\.ptx:\d+: ", str(error)) and "\n" not in str(error) and len(str(error)) < 300
        return
    intervals(found, (2, 1, 1), (32, 1, 1), {})
    assert found.modes == want


OPERATIONS = (
    "mov.b64", "cvta.to.global.u64", "cvta.u64", "cvt.u64.u32", "add.s64", "sub.s64", "mul.lo.s64", "mul.wide.u32",
    "mad.lo.s64", "fma.rn.f32", "shl.b64", "shr.u64", "div.s64", "rem.s64", "and.b64", "or.b64", "xor.b64", "not.b64",
    "neg.s64", "abs.s64", "min.s64", "max.u64", "bfe.u64", "bfi.b64", "lop3.b32", "popc.b64", "clz.b64", "selp.b64",
    "setp.lt.s64", "prmt.b32", "shf.l.wrap.b32", "addc.s64", "sad.s64", "isspacep.global", "ld.global.u64",
    "ldu.global.u64", "st.global.u64", "atom.global.add.u64", "red.global.add.u64", "cp.async.ca.shared.global",
    "cp.async.bulk.prefetch.L2.global", "shfl.sync.idx.b32", "call", "bra", "brx.idx", "tex.1d.v4.s32.s32",
    "prefetch.L1", "ldmatrix.sync.aligned.m8n8.x4.shared.b16", "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16",
    "alloca.u64", "multimem.ld_reduce.global.add.f32", "tensormap.replace.tile.global_address.global.b1024.b64",
    "mapa.u64", "vote",
)  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("count", range(5))
def test_operands_that_are_missing(operation: str, count: int) -> None:
    """An answer that promises nothing less than before, or one line. Fails if operands are counted on."""
    operands = ", ".join(("%rd2", "%rd1", "%rd3", "4", "8")[:count])
    text = kernel(f"mov.u64 %rd2, %rd1; {operation} {operands};\nst.u32 [%rd2+4], 1; ld.u32 %r1, [%rd2];")
    try:
        found = analyse(text, "x.ptx")["k"]
    except InputError as error:
        assert re.match(r"x\.ptx:\d+: ", str(error)) and "\n" not in str(error)
        return
    intervals(found, (2, 1, 1), (32, 1, 1), {})
