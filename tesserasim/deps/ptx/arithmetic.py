"""Arithmetic on values of a launch: `base + constant + Σ coefficient · term`, each term with a range.

A number stands for a register as it is: equal to it modulo 2^bits, and inside the range of its type wherever an
instruction looks at more than the last bits. Each rule keeps a superset: what cannot be bounded is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Term = tuple[str, int]
Range = tuple[int, int]
Kinds = tuple[str, ...]


@dataclass(frozen=True)
class Affine:
    """`base` (a pointer by name, or "") + `constant` + Σ coefficient · term."""

    base: str
    constant: int
    terms: Mapping[Term, int] = field(default_factory=dict)

    def plus(self, other: Affine, sign: int = 1) -> Affine | None:
        if (self.base and other.base) or (sign < 0 and other.base):
            return None
        terms = dict(self.terms)
        for t, c in other.terms.items():
            terms[t] = terms.get(t, 0) + sign * c
        kept = {t: c for t, c in terms.items() if c}
        return Affine(self.base or other.base, self.constant + sign * other.constant, kept)

    def times(self, factor: int) -> Affine | None:
        if self.base and factor != 1:
            return None
        return Affine(self.base, self.constant * factor, {t: c * factor for t, c in self.terms.items() if factor})

    @property
    def step(self) -> int:
        """A power of two that divides it, as great as is known; 0 for zero."""
        g = math.gcd(self.constant, *self.terms.values())
        return g & -g


Value = Affine | None


class Ranges(Protocol):
    """What arithmetic needs to know of a launch."""

    def bounds(self, v: Value) -> Range | None: ...

    def span(self, v: Affine) -> Range: ...

    def between(self, node: int, lo: int, hi: int, step: int = 1) -> Affine: ...


def bits_of(kinds: Kinds) -> int:
    """Bits of the type that an instruction ends with; 64 if it has none."""
    word = kinds[-1] if kinds else ""
    return int(word[1:]) if word[1:].isdigit() else 64


def holds(kind: str, lo: int, hi: int) -> bool:
    """Whether all values from lo to hi are values of this integer type."""
    bits = int(kind[1:]) if kind[1:].isdigit() else 32
    if kind[:1] == "s":
        return lo >= -(1 << (bits - 1)) and hi < 1 << (bits - 1)
    return lo >= 0 and hi < 1 << bits


def computed(r: Ranges, node: int, op: str, v: Sequence[Value], kinds: Kinds) -> Value:
    """The value of an instruction from those of its operands, None for what is not known."""
    rule = _RULES.get(op)
    return None if rule is None else rule(r, node, v, kinds)


def _typed(r: Ranges, v: Value, kinds: Kinds) -> Range | None:
    """The range of an operand that is read as the type of the instruction."""
    size = r.bounds(v)
    return size if size and holds(kinds[-1] if kinds else "u64", *size) else None


def split(r: Ranges, v: Affine, m: int) -> tuple[Affine, Affine] | None:
    """(quotient, remainder) of `v` by m, where the terms that m does not divide stay inside one multiple of it."""
    great = {t: c // m for t, c in v.terms.items() if c % m == 0}
    rest = Affine("", v.constant, {t: c for t, c in v.terms.items() if c % m})
    size = r.bounds(rest)
    if v.base or size is None or size[0] // m != size[1] // m:
        return None
    q = size[0] // m
    return Affine("", q, great), Affine("", rest.constant - m * q, rest.terms)


def _same(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    return v[0]


def _sum(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    return None if len(v) != 2 or v[0] is None or v[1] is None else v[0].plus(v[1])


def _difference(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    return None if len(v) != 2 or v[0] is None or v[1] is None else v[0].plus(v[1], -1)


def _product(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    a, b = (_typed(r, x, kinds) if {"wide", "hi"} & set(kinds) else r.bounds(x) for x in v[:2])
    if "hi" in kinds:
        if not a or not b or a[0] < 0 or b[0] < 0:
            return None
        return r.between(node, a[0] * b[0] >> bits_of(kinds), a[1] * b[1] >> bits_of(kinds))
    if "wide" in kinds and (a is None or b is None):
        return None
    for one, other in ((a, v[1]), (b, v[0])):
        if one and one[0] == one[1] and other is not None:
            return other.times(one[0])
    if not a or not b:
        return None
    corners = [x * y for x in a for y in b]
    return r.between(node, min(corners), max(corners))


def _left(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    a, by = v[0], r.bounds(v[1])
    if a is None or by is None or not 0 <= by[0] <= by[1] < bits_of(kinds):
        return None
    if by[0] == by[1]:
        return a.times(1 << by[0])
    size = r.bounds(a)
    return r.between(node, size[0] << by[0], size[1] << by[1]) if size and size[0] >= 0 else None


def _right(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    a, by = _typed(r, v[0], kinds), r.bounds(v[1])
    if v[0] is None or a is None or by is None or by[0] < 0:
        return None
    if by[0] == by[1] < bits_of(kinds) and (parts := split(r, v[0], 1 << by[0])):
        return parts[0]
    corners = [x >> min(y, 128) for x in a for y in by]
    return r.between(node, min(corners), max(corners))


def _quotient(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    a, b = _typed(r, v[0], kinds), _typed(r, v[1], kinds)
    if v[0] is None or a is None or b is None or b[0] <= 0:
        return None
    if b[0] == b[1] and a[0] >= 0 and (parts := split(r, v[0], b[0])):
        return parts[0]
    corners = [abs(x) // y * (1 if x >= 0 else -1) for x in a for y in b]
    return r.between(node, min(corners), max(corners))


def _remainder(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    """Known by its divisor; its sign is that of the dividend."""
    a, b = _typed(r, v[0], kinds), _typed(r, v[1], kinds)
    if b is None or b[0] <= 0:
        return None
    if v[0] is not None and a and a[0] >= 0:
        if a[1] < b[0]:
            return v[0]
        if b[0] == b[1] and (parts := split(r, v[0], b[0])):
            return parts[1]
    signed = bool(kinds) and kinds[-1].startswith("s")
    least = 0 if not signed or (a and a[0] >= 0) else max(1 - b[1], a[0] if a else 1 - b[1])
    most = 0 if a and a[1] < 0 else min(b[1] - 1, a[1] if a else b[1] - 1)
    return r.between(node, least, most)


def _and(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    if len(v) != 2:
        return None
    for x, mask in ((v[0], v[1]), (v[1], v[0])):
        if mask is not None and not mask.base and not mask.terms:
            return _masked(r, node, x, mask.constant, bits_of(kinds))
    known = [size[1] for x in v if (size := r.bounds(x)) and size[0] >= 0]
    return r.between(node, 0, min(known)) if known else None


def _masked(r: Ranges, node: int, v: Value, mask: int, bits: int) -> Value:
    low = ~mask & ((1 << bits) - 1)
    size = r.bounds(v)
    if v is not None and low < 1 << (bits - 1) and not low & (low + 1):  # aligned: only the last bits go
        if not low:
            return v
        if size and size[0] >= 0 and (parts := split(r, v, low + 1)):
            return v.plus(parts[1], -1)
        return v.plus(r.between(node, -low, 0)) if v.base or (size and size[0] >= low) else None
    mask &= (1 << bits) - 1
    if mask >> (bits - 1):
        return None
    if v is not None and size and size[0] >= 0:
        if not mask & (mask + 1):
            if size[1] <= mask:
                return v
            if parts := split(r, v, mask + 1):
                return parts[1]
        step = max(mask & -mask, min(v.step or 1, mask + 1))
        return r.between(node, 0, min(mask, size[1]) // step * step, step)
    return r.between(node, 0, mask, max(1, mask & -mask))


def _either_bits(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    """`or` and `xor`: a sum where no bit is in both."""
    a, b = (r.bounds(x) for x in v[:2])
    if v[0] is None or v[1] is None or not a or not b or a[0] < 0 or b[0] < 0:
        return None
    for x, y in ((v[0], b), (v[1], a)):
        if y[1] < x.step or x.step == 0:
            return v[0].plus(v[1])
    most = min(a[1] + b[1], (1 << max(a[1], b[1]).bit_length()) - 1)
    return r.between(node, 0, most)


def _or(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    made = _either_bits(r, node, v, kinds)
    a, b = (r.bounds(x) for x in v[:2])
    if made is None or not a or not b or ("node", node) not in made.terms:
        return made
    return r.between(node, max(a[0], b[0]), r.span(made)[1])


def _not(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    return None if v[0] is None or v[0].base else Affine("", -1).plus(v[0], -1)


def _negative(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    return None if v[0] is None else v[0].times(-1)


def _absolute(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    a = _typed(r, v[0], kinds)
    if a is None or a[0] == -(1 << (bits_of(kinds) - 1)):
        return None
    return v[0] if a[0] >= 0 else r.between(node, 0, max(-a[0], a[1]))


def _least(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    a, b = _typed(r, v[0], kinds), _typed(r, v[1], kinds)
    if not a or not b:
        return None
    return v[0] if a[1] <= b[0] else v[1] if b[1] <= a[0] else r.between(node, min(a[0], b[0]), min(a[1], b[1]))


def _most(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    a, b = _typed(r, v[0], kinds), _typed(r, v[1], kinds)
    if not a or not b:
        return None
    return v[0] if a[0] >= b[1] else v[1] if b[0] >= a[1] else r.between(node, max(a[0], b[0]), max(a[1], b[1]))


def _extract(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    """`bfe`: a number of bits from a place on."""
    at, count = r.bounds(v[1]), r.bounds(v[2])
    if not at or not count or at[0] != at[1] or count[0] != count[1] or not 0 <= at[0] < bits_of(kinds):
        return None
    n = min(count[0] & 255, bits_of(kinds) - at[0])
    size = r.bounds(v[0])
    if v[0] is not None and size and size[0] >= 0:
        moved = split(r, v[0], 1 << at[0])
        q = moved[0] if moved else r.between(node, size[0] >> at[0], size[1] >> at[0])
        most = (1 << n) - 1 if kinds[-1].startswith("u") else (1 << n >> 1) - 1
        if (size[1] >> at[0]) <= most:
            return q
        if kinds[-1].startswith("u") and (parts := split(r, q, 1 << n)):
            return parts[1]
    if kinds[-1].startswith("u"):
        return r.between(node, 0, (1 << n) - 1)
    return r.between(node, -(1 << n >> 1), max(0, (1 << n >> 1) - 1)) if n else Affine("", 0)


def _insert(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    """`bfi a, b`: the last bits of a instead of those of b at a place."""
    at, count, b = r.bounds(v[2]), r.bounds(v[3]), r.bounds(v[1])
    if not at or not count or at[0] != at[1] or count[0] != count[1] or v[1] is None or not b or b[0] < 0:
        return None
    place, n = at[0] & 255, count[0] & 255
    if place + n >= bits_of(kinds):
        return None
    if not n:
        return v[1]
    field = _masked(r, node, v[0], (1 << n) - 1, bits_of(kinds))
    parts = split(r, v[1], 1 << place)
    moved = None if field is None else field.times(1 << place)
    if moved is not None and (b[1] < 1 << place or (parts and (parts[0].step == 0 or parts[0].step >= 1 << n))):
        return v[1].plus(moved)
    return r.between(node, 0, b[1] + (((1 << n) - 1) << place))


def _table(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    """`lop3`: no bit beyond the greatest operand, if three zeros give zero."""
    sizes = [r.bounds(x) for x in v]
    table = sizes[3] if len(sizes) > 3 else None
    if table is None or table[0] & 1 or any(s is None or s[0] < 0 for s in sizes[:3]):
        return None
    return r.between(node, 0, (1 << max(s[1] for s in sizes[:3] if s).bit_length()) - 1)


def _count(r: Ranges, node: int, v: Sequence[Value], kinds: Kinds) -> Value:
    return r.between(node, 0, bits_of(kinds))


_RULES: dict[str, Callable[[Ranges, int, Sequence[Value], Kinds], Value]] = {
    "mov": _same, "cvta": _same, "cvt": _same, "add": _sum, "sub": _difference, "mul": _product, "shl": _left,
    "shr": _right, "div": _quotient, "rem": _remainder, "and": _and, "or": _or, "xor": _either_bits, "not": _not,
    "neg": _negative, "abs": _absolute, "min": _least, "max": _most, "bfe": _extract, "bfi": _insert,
    "lop3": _table, "popc": _count, "clz": _count,
}  # fmt: skip
# Instructions whose result is what the rule says without a wrap: the type must hold it as it is.
EXACT = frozenset(("cvt", "shr", "div", "rem", "min", "max"))
