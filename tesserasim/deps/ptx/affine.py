"""Byte intervals of a launch: where an address is a pointer plus a sum of bounded terms.

Given grid, block and the values of the numbers among the parameters, every value that is affine in thread and
block indices and in loop counters becomes `base + constant + Σ coefficient · term`, each term with a range.
A loop counter is a value that a loop moves by a constant; how often, the comparison says that leaves the loop.
Conditions on the way to an access (its own predicate, the branch before its block) cut the interval further.
What is not of this form has no interval: None, never a guess. Arithmetic of 32 bits counts only where the
values provably fit, so that nothing wraps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tesserasim.deps.ptx.analysis import KernelEffects
from tesserasim.deps.ptx.graph import Access
from tesserasim.deps.ptx.loops import Loops
from tesserasim.errors import InputError

MAX_DEPTH = 150
MAX_VALUES = 200_000  # evaluations of one launch
Triple = tuple[int, int, int]
Term = tuple[str, int]


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


def intervals(
    entry: KernelEffects, grid: Triple, block: Triple, params: Mapping[str, int]
) -> dict[str, tuple[int, int] | None]:
    """Bytes [lo, hi) of every pointer that the entry touches in this launch, from the pointer on.

    `params` names the numbers (parameter, or parameter+offset in a struct). None: touched, bytes not known. An
    entry that touches memory without a name gives "*": None. Raises InputError for an empty launch.
    """
    if min(*grid, *block) < 1:
        raise InputError(f"{entry.entry}: a launch of {grid} blocks of {block} threads is empty")
    found: dict[str, tuple[int, int] | None] = {}
    touched = {name for name, mode in entry.modes.items() if mode != "none"}
    space = _Launch(entry, grid, block, params)
    for a in entry.graph.accesses:
        if a.space not in ("global", "generic") or a.mode == "none":
            continue
        names = {o.name for o in entry.origins.origins(entry.origins.base(a.address)) if o.kind == "slot"}
        if a.mode not in ("R", "W", "RW"):
            found.update(dict.fromkeys(names))
            continue
        where = space.interval(a)
        for name in names:
            if where is None or names != {where[0]}:
                found[name] = None
            elif where[1] < where[2]:
                old = found.get(name, (where[1], where[2]))
                found[name] = None if old is None else (min(old[0], where[1]), max(old[1], where[2]))
            else:
                touched.add(name)
                found.setdefault(name, (0, 0))
    return {name: found.get(name) for name in sorted(touched)}


class _Launch:
    def __init__(self, entry: KernelEffects, grid: Triple, block: Triple, params: Mapping[str, int]) -> None:
        self.graph, self.params = entry.graph, params
        self.pointers = {n for n, m in entry.modes.items() if m != "none"}
        self.sizes = {"ntid": block, "nctaid": grid}
        self.ranges: dict[Term, tuple[int, int]] = {}
        for name, size in (("tid", block), ("ctaid", grid)):
            for i, n in enumerate(size):
                self.ranges[name, i] = (0, n - 1)
        self.memo: dict[int, Affine | None] = {}
        self.depth, self.budget = 0, MAX_VALUES
        self.loops = Loops(self)

    # ranges

    def bounds(self, v: Affine | None) -> tuple[int, int] | None:
        """The least and the greatest value of a number."""
        if v is None or v.base or any(t[0] == "phi" for t in v.terms):
            return None
        return self.span(v)

    def span(self, v: Affine) -> tuple[int, int]:
        lo = hi = v.constant
        for t, c in v.terms.items():
            a, b = self.ranges[t]
            lo, hi = lo + min(c * a, c * b), hi + max(c * a, c * b)
        return lo, hi

    def between(self, node: int, lo: int, hi: int) -> Affine:
        """Some number from lo to hi."""
        if lo == hi:
            return Affine("", lo)
        self.ranges["node", node] = (lo, hi)
        return Affine("", 0, {("node", node): 1})

    def interval(self, a: Access) -> tuple[str, int, int] | None:
        v = self.value(a.address)
        if v is None or not v.base or not a.nbytes:
            return None
        lo, hi = self.span(v)
        for low, high in self.loops.limits(a, v):
            lo = lo if low is None else max(lo, low)
            hi = hi if high is None else min(hi, high)
        return v.base, lo + a.offset, hi + a.offset + a.nbytes if hi >= lo else lo + a.offset

    # values

    def value(self, node: int) -> Affine | None:
        if node in self.memo:
            return self.memo[node]
        if self.depth > MAX_DEPTH or self.budget <= 0:
            return None
        self.depth, self.budget = self.depth + 1, self.budget - 1
        self.memo[node] = None  # a value that depends on itself is known only through a loop
        try:
            made = self._value(node)
        finally:
            self.depth -= 1
        self.memo[node] = made
        return made

    def _value(self, node: int) -> Affine | None:
        g = self.graph
        op, inputs, data = g.ops[node], g.inputs[node], g.data[node]
        if op == "const":
            return None if data is None else Affine("", data)
        if op == "special":
            return self._special(data)
        if op == "param":
            return self._param(data)
        if op in ("phi", "join", "load", "cell"):
            distinct = set(inputs) - {node}
            if len(distinct) == 1 and op != "load":
                return self.value(distinct.pop())
            if op == "phi" and node in g.phi_block and (carried := self.loops.phi(node)) is not None:
                return carried
            return self._either(node, sorted(distinct)) if op in ("phi", "join") else None
        if op == "and" and len(inputs) == 2:
            return self._and(node, inputs)
        if op == "selp":
            return self._either(node, inputs[:2])
        arguments = [self.value(x) for x in inputs]
        if any(x is None for x in arguments):
            return self._remainder(node, op, arguments)
        known = [x for x in arguments if x is not None]
        made = self._computed(node, op, known, data or ())
        return self._fits(made, op, data or ())

    def _special(self, name: str) -> Affine | None:
        word, _, axis = name.lstrip("%").partition(".")
        i = "xyz".find(axis or "?")
        if word in self.sizes and i >= 0:
            return Affine("", self.sizes[word][i])
        if word in ("tid", "ctaid") and i >= 0:
            a, b = self.ranges[word, i]
            return Affine("", 0, {(word, i): 1}) if a < b else Affine("", 0)
        if word == "laneid":
            self.ranges["laneid", 0] = (0, 31)
            return Affine("", 0, {("laneid", 0): 1})
        return Affine("", 32) if word == "WARP_SZ" else None

    def _param(self, data: tuple[object, int, int, str]) -> Affine | None:
        variable, offset, nbytes, _ = data
        array, name = variable.array, variable.name  # type: ignore[attr-defined]
        name = f"{name}+{offset}" if array else name
        if name in self.pointers:
            return Affine(name, 0) if nbytes == self.graph.module.pointer_bytes else None
        given = self.params.get(name)
        return None if given is None else Affine("", given)

    def _either(self, node: int, inputs: list[int]) -> Affine | None:
        """One of several values: the hull of numbers; of pointers only where they are one."""
        values = [self.value(x) for x in inputs]
        if values and all(v == values[0] for v in values):
            return values[0]
        known = [v for v in values if v is not None and not any(t[0] == "phi" for t in v.terms)]
        if len(known) < len(values) or len({v.base for v in known}) != 1:
            return None
        spans = [self.span(v) for v in known]
        hull = self.between(node, min(a for a, _ in spans), max(b for _, b in spans))
        return hull.plus(Affine(known[0].base, 0))

    def _and(self, node: int, inputs: list[int]) -> Affine | None:
        mask = next((self.graph.data[x] for x in inputs if self.graph.ops[x] == "const"), None)
        if mask is None or mask < 0:
            return None
        v = self.value(inputs[0] if self.graph.ops[inputs[1]] == "const" else inputs[1])
        size = self.bounds(v)
        if size and size[0] >= 0 and size[1] <= mask and not mask & (mask + 1):
            return v
        return self.between(node, 0, min(mask, size[1]) if size and size[0] >= 0 else mask)

    def _remainder(self, node: int, op: str, arguments: list[Affine | None]) -> Affine | None:
        """Of a division of what is not known: known by its divisor, if unsigned."""
        divisor = self.bounds(arguments[-1]) if op == "rem" else None
        kind = (self.graph.data[node] or ("",))[-1]
        if divisor and divisor[0] > 0 and kind.startswith("u"):
            return self.between(node, 0, divisor[1] - 1)
        return None

    def _computed(self, node: int, op: str, v: list[Affine], kinds: tuple[str, ...]) -> Affine | None:
        if op in ("mov", "cvta", "cvt"):
            return v[0]
        if op in ("add", "sub") and len(v) == 2:
            return v[0].plus(v[1], 1 if op == "add" else -1)
        if len(v) != 2:
            return None
        a, b = self.bounds(v[0]), self.bounds(v[1])
        if op == "mul" and "hi" not in kinds:
            if "wide" in kinds and not all(x and _holds(kinds[-1], *x) for x in (a, b)):
                return None
            if a and a[0] == a[1]:
                return v[1].times(a[0])
            if b and b[0] == b[1]:
                return v[0].times(b[0])
            if not a or not b:
                return None
            corners = [x * y for x in a for y in b]
            return self.between(node, min(corners), max(corners))
        if op == "shl" and b and b[0] == b[1] and 0 <= b[0] < 64:
            return v[0].times(1 << b[0])
        if not a or not b:
            return None
        if op == "or" and a[0] >= 0 and b[0] >= 0:
            for x, y in ((v[0], b), (v[1], a)):
                step = math.gcd(x.constant, *x.terms.values())
                if y[1] < step & -step:  # no bit in common
                    return v[0].plus(v[1])
            return self.between(node, max(a[0], b[0]), a[1] + b[1])
        if op in ("min", "max"):
            pick = min if op == "min" else max
            return self.between(node, pick(a[0], b[0]), pick(a[1], b[1]))
        if a[0] >= 0 and b[0] == b[1] and b[0] > 0 and op in ("shr", "div", "rem"):
            if op == "rem":
                return v[0] if a[1] < b[0] else self.between(node, 0, b[0] - 1)
            by = 1 << min(b[0], 64) if op == "shr" else b[0]
            return self.between(node, a[0] // by, a[1] // by)
        return None

    def _fits(self, v: Affine | None, op: str, kinds: tuple[str, ...]) -> Affine | None:
        """Nothing where the value does not fit the type, or is read as another one than it was made as."""
        if v is None or v.base or any(t[0] == "phi" for t in v.terms):
            return v
        if any((k[0] in "fet" and k[1:2].isdigit()) or k.startswith("bf") for k in kinds):
            return None
        lo, hi = self.span(v)
        sizes = [k for k in kinds if k[:1] in "usb" and k[1:].isdigit()]
        if not sizes:
            return v if op in ("mov", "cvta") else None
        for kind in sizes:
            bits = int(kind[1:]) * (2 if "wide" in kinds else 1)
            exact = op in ("cvt", "shr", "div", "rem", "min", "max") or "wide" in kinds
            least = 0 if kind[0] == "u" and exact else -1
            most = bits - (1 if kind[0] == "s" else 0)
            if lo < least << (bits - 1) or hi >= 1 << most or (lo < 0 and hi >= 1 << (bits - 1)):
                return None
        return v


def _holds(kind: str, lo: int, hi: int) -> bool:
    """Whether all values from lo to hi are values of this integer type."""
    bits = int(kind[1:]) if kind[1:].isdigit() else 32
    return lo >= 0 and hi < 1 << bits if kind[:1] == "u" else lo >= -(1 << (bits - 1)) and hi < 1 << (bits - 1)
