"""What arithmetic instructions of PTX compute, on bit patterns, for the interpreter of the tests."""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Callable

from ptx_text import Unsupported

Kind = tuple[str, int]
Compute = Callable[..., int]


def kind(word: str) -> Kind | None:
    """("s", 32) of s32; None if the word is no type."""
    if word == "pred":
        return "p", 1
    found = re.fullmatch(r"(bf|tf|[busf])(\d+)(x2)?", word)
    if found is None:
        return None
    return (found[1] + "2", 32) if found[3] else (found[1], int(found[2]))


def kinds(parts: tuple[str, ...]) -> list[Kind]:
    return [k for p in parts[1:] if (k := kind(p))]


def value(bits: int, k: Kind) -> int | float:
    """The number that a bit pattern stands for."""
    letter, size = k
    bits &= (1 << size) - 1
    if letter == "s":
        return bits - (1 << size) if bits >> (size - 1) else bits
    if letter == "f":
        code = {16: "<e", 32: "<f", 64: "<d"}[size]
        return float(struct.unpack(code, bits.to_bytes(size // 8, "little"))[0])
    if letter == "bf":
        return float(struct.unpack("<f", (bits << 16).to_bytes(4, "little"))[0])
    return bits


def pattern(x: int | float, k: Kind) -> int:
    """The bit pattern of a number, rounded to the nearest where the type is floating-point."""
    letter, size = k
    if letter == "f":
        code = {16: "<e", 32: "<f", 64: "<d"}[size]
        try:
            return int.from_bytes(struct.pack(code, x), "little")
        except OverflowError:
            return int.from_bytes(struct.pack(code, math.copysign(math.inf, x)), "little")
    if letter == "bf":
        bits = pattern(x, ("f", 32))
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF if not math.isnan(x) else 0x7FC0
    return int(x) & ((1 << size) - 1)


def _quotient(a: float, b: float) -> float:
    if b == 0:
        return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)
    return a / b


def _int_div(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _least(a: float, b: float) -> float:
    return b if math.isnan(a) else a if math.isnan(b) else min(a, b)


def _most(a: float, b: float) -> float:
    return b if math.isnan(a) else a if math.isnan(b) else max(a, b)


def _guarded(f: Callable[[float], float]) -> Callable[[float], float]:
    def run(x: float) -> float:
        try:
            return f(x)
        except OverflowError:
            return math.inf
        except ValueError:
            return math.nan

    return run


FLOAT: dict[str, Callable[..., float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _quotient, "min": _least, "max": _most,
    "neg": operator.neg, "abs": abs, "fma": lambda a, b, c: a * b + c, "mad": lambda a, b, c: a * b + c,
    "ex2": _guarded(lambda x: 2.0**x), "lg2": _guarded(lambda x: -math.inf if x == 0 else math.log2(x)),
    "sqrt": _guarded(math.sqrt), "rsqrt": _guarded(lambda x: math.inf if x == 0 else 1 / math.sqrt(x)),
    "rcp": lambda x: _quotient(1.0, x), "sin": _guarded(math.sin), "cos": _guarded(math.cos), "tanh": math.tanh,
    "copysign": lambda a, b: math.copysign(b, a),
}  # fmt: skip
INTEGER: dict[str, Callable[..., int]] = {
    "add": operator.add, "sub": operator.sub, "min": min, "max": max, "neg": operator.neg, "abs": abs,
    "div": _int_div, "rem": lambda a, b: a - b * _int_div(a, b) if b else a,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.invert,
    "popc": lambda a: a.bit_count(), "sad": lambda a, b, c: c + abs(a - b), "cnot": lambda a: int(a == 0),
}  # fmt: skip
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip


def _typed(f: Callable[..., int | float], k: Kind) -> Compute:
    if k[0] in ("f2", "bf2"):
        half = (k[0][:-1], 16)

        def both(*bits: int) -> int:
            low = pattern(f(*(value(b & 0xFFFF, half) for b in bits)), half)
            return low | pattern(f(*(value(b >> 16, half) for b in bits)), half) << 16

        return both
    return lambda *bits: pattern(f(*(value(b, k) for b in bits)), k)


def compute(parts: tuple[str, ...]) -> Compute:
    """The function of bit patterns that an arithmetic instruction computes; raises Unsupported."""
    op, found = parts[0], kinds(parts)
    if op in ("setp", "set", "selp", "cvt", "mov") or not found:
        raise Unsupported(".".join(parts))
    k = found[-1]
    special = _SPECIAL.get(op)
    if op in ("mul", "mad", "mul24", "mad24") and k[0] in "us":
        return _product(parts, k)
    if special is not None:
        return special(parts, k)
    table = FLOAT if k[0].startswith(("f", "bf")) else INTEGER
    if op not in table or ("sat" in parts and table is INTEGER):
        raise Unsupported(".".join(parts))
    f = table[op]
    if "sat" in parts:
        return _typed(lambda *a: min(1.0, max(0.0, f(*a))), k)
    return _typed(f, k)


def _product(parts: tuple[str, ...], k: Kind) -> Compute:
    size = k[1]
    out = size * 2 if "wide" in parts else size
    down = size if "hi" in parts else 16 if parts[0].endswith("24") and "hi" in parts else 0

    def run(a: int, b: int, c: int = 0) -> int:
        return ((int(value(a, k)) * int(value(b, k)) >> down) + c) & ((1 << out) - 1)

    return run


def _shift(parts: tuple[str, ...], k: Kind) -> Compute:
    size = k[1]
    if parts[0] == "shl":
        return lambda a, b: a << b & ((1 << size) - 1) if b & 0xFFFFFFFF < size else 0
    return lambda a, b: int(value(a, k)) >> min(b & 0xFFFFFFFF, size) & ((1 << size) - 1)


def _funnel(parts: tuple[str, ...], k: Kind) -> Compute:
    def run(a: int, b: int, c: int) -> int:
        n = c & 31 if "wrap" in parts else min(c & 0xFFFFFFFF, 32)
        both = (b & 0xFFFFFFFF) << 32 | (a & 0xFFFFFFFF)
        return (both >> n if "r" in parts else both << n >> 32) & 0xFFFFFFFF

    return run


def _extract(parts: tuple[str, ...], k: Kind) -> Compute:
    size = k[1]

    def run(a: int, b: int, c: int) -> int:
        at, n = b & 255, c & 255
        bits = (a & ((1 << size) - 1)) >> at & ((1 << n) - 1)
        if k[0] == "s" and n and (a >> min(at + n - 1, size - 1)) & 1:
            bits |= -1 << n if at + n <= size else -1 << max(0, size - at)
        return bits & ((1 << size) - 1)

    return run


def _insert(parts: tuple[str, ...], k: Kind) -> Compute:
    size = k[1]

    def run(a: int, b: int, c: int, d: int) -> int:
        mask = ((1 << (d & 255)) - 1) << (c & 255) & ((1 << size) - 1)
        return (b & ~mask | a << (c & 255) & mask) & ((1 << size) - 1)

    return run


def _permute(parts: tuple[str, ...], k: Kind) -> Compute:
    if len(parts) != 2:
        raise Unsupported(".".join(parts))

    def run(a: int, b: int, c: int) -> int:
        pool, out = (b & 0xFFFFFFFF) << 32 | a & 0xFFFFFFFF, 0
        for i in range(4):
            n = c >> 4 * i & 15
            byte = pool >> 8 * (n & 7) & 255
            out |= ((255 if byte >> 7 else 0) if n & 8 else byte) << 8 * i
        return out

    return run


def _lop3(parts: tuple[str, ...], k: Kind) -> Compute:
    def run(a: int, b: int, c: int, table: int) -> int:
        out = 0
        for i in range(8):
            if table >> i & 1:
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return out & 0xFFFFFFFF

    return run


def _bits(parts: tuple[str, ...], k: Kind) -> Compute:
    size = k[1]
    if parts[0] == "clz":
        return lambda a: size - (a & ((1 << size) - 1)).bit_length()
    if parts[0] == "brev":
        return lambda a: int(f"{a & ((1 << size) - 1):0{size}b}"[::-1], 2)
    if "shiftamt" in parts or k[0] == "s":
        raise Unsupported(".".join(parts))
    return lambda a: (a.bit_length() - 1) & 0xFFFFFFFF  # bfind


_SPECIAL: dict[str, Callable[[tuple[str, ...], Kind], Compute]] = {
    "shl": _shift, "shr": _shift, "shf": _funnel, "bfe": _extract, "bfi": _insert, "prmt": _permute, "lop3": _lop3,
    "clz": _bits, "brev": _bits, "bfind": _bits,
}  # fmt: skip


def compare(parts: tuple[str, ...], k: Kind) -> Callable[[int, int], bool]:
    """The comparison of `setp` and `set`."""
    how = parts[1]
    if how in ("num", "nan"):
        wanted = how == "nan"
        return lambda a, b: (math.isnan(value(a, k)) or math.isnan(value(b, k))) == wanted
    floating = k[0].startswith(("f", "bf"))
    unordered = floating and how.endswith("u") and len(how) == 3
    f = COMPARE.get(how[:2])
    if f is None:
        raise Unsupported(".".join(parts))

    def run(a: int, b: int) -> bool:
        x, y = value(a, k), value(b, k)
        if floating and (math.isnan(x) or math.isnan(y)):
            return unordered
        return f(x, y)

    return run


def convert(parts: tuple[str, ...]) -> Compute:
    """The function of `cvt`."""
    found = kinds(parts)
    if len(found) != 2:
        raise Unsupported(".".join(parts))
    to, source = found
    if to[0] in ("f2", "bf2"):
        half = (to[0][:-1], 16)
        return lambda a, b: pattern(value(a, source), half) << 16 | pattern(value(b, source), half)
    whole = next((p for p in parts if p in ("rni", "rzi", "rmi", "rpi")), "")
    rounding = {"rni": round, "rmi": math.floor, "rpi": math.ceil}.get(whole, math.trunc)
    out_float, in_float = to[0] in ("f", "bf"), source[0] in ("f", "bf")

    def run(a: int) -> int:
        x = value(a, source)
        if in_float and (whole or not out_float):
            if math.isnan(x):
                return pattern(x, to) if out_float else 0
            x = x if math.isinf(x) else rounding(x)
        if not out_float and (in_float or "sat" in parts):
            least, most = (-(1 << (to[1] - 1)), (1 << (to[1] - 1)) - 1) if to[0] == "s" else (0, (1 << to[1]) - 1)
            x = int(min(max(x, least), most))
        elif "sat" in parts:
            x = min(1.0, max(0.0, x))
        return pattern(float(x) if out_float else x, to)

    return run
