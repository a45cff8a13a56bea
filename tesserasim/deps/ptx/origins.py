"""Where an address may come from: a fixed point over the value graph, then one mode per pointer.

A value carries sets of origins (bit masks), in classes that say how it was made from them:

- *direct*: copied, aligned, or moved by an offset: the value may be a pointer into what the origin points to;
- *scaled*: times an even constant (an index times an element size): no sum of such values is that pointer again;
- *piece*: bits taken or mixed (tagged, packed, hashed pointers), or times a number that may be 1 (`p*c + q*(1-c)`)
  or odd, which another product may undo: still may be that pointer;
- *small*: at most 32 bits of it, which is a pointer again only after it was packed or shifted up;
- *raised*: small, and shifted up once by less than half a pointer.

Two marks go along: *subtracted*, and *firm*: one of several values that meet where one of them is a pointer.

An address with a direct origin is based on that origin or on one of its pieces; its scaled, small and raised ones
are only offsets. If the compiler marked exactly one of them as a pointer, that one is direct and nothing was
subtracted, then that one is the base; what is firm always stays.
In every other case each origin stays. A class only ever grows, so the fixed point exists and is reached fast.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from tesserasim.deps.ptx.graph import Access, Graph
from tesserasim.deps.ptx.model import Variable, words

Masks = tuple[int, int, int, int, int, int]  # direct, scaled, piece, small, subtracted, raised
NOTHING: Masks = (0, 0, 0, 0, 0, 0)
FOREIGN, SHARED, LOCAL, FUNCTION = 1, 2, 4, 8
_SLOT, _WHOLE, _MODULE = "slot", "whole", "module"
MAX_SLOTS = 4096  # parameters are 32 KiB at most
PAGE = 4096
_ALTERNATIVES = frozenset(("phi", "join", "cell", "load", "selp", "min", "max", "slct"))
_PIECES = words(
    "shr piece xor not lop3 bfe bfi prmt shf div rem popc clz brev bfind fns sad abs cnot szext bmsk dp4a dp2a and or"
)
MODES = {"none": 0, "R": 1, "W": 2, "RW": 3, "unknown": 7}
NAMES = {0: "none", 1: "R", 2: "W", 3: "RW"}


@dataclass(frozen=True, slots=True)
class Origin:
    """What a bit stands for: a pointer in a parameter, the address of a parameter, or of a module variable."""

    kind: str
    variable: Variable
    offset: int = 0

    @property
    def name(self) -> str:
        return f"{self.variable.name}+{self.offset}" if self.variable.array else self.variable.name


def _source(mask: int, whole: bool = True) -> Masks:
    """Where a value starts: as a pointer may, or as a part of one."""
    return (mask, 0, 0, 0, 0, 0) if whole else (0, 0, 0, mask, 0, 0)


class Origins:
    """The fixed point of one entry."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bits: dict[Origin, int] = {}
        self.by_bit: list[Origin | None] = [None, None, None, None]
        self.trusted = 0  # origins known to be pointers
        self.full: set[Origin] = set()  # loaded as wide as a pointer
        self.whole = 0  # addresses of parameters
        self.module = 0  # addresses of module variables
        self.values: list[Masks] = [NOTHING] * len(graph.ops)
        self.firm: list[int] = []
        self.users: list[list[int]] = []
        self._connect()
        self._solve(range(len(graph.ops)))
        self._memory()

    def bit(self, kind: str, variable: Variable, offset: int = 0) -> int:
        origin = Origin(kind, variable, offset)
        found = self.bits.get(origin)
        if found is None:
            found = self.bits[origin] = 1 << len(self.by_bit)
            self.by_bit.append(origin)
            if kind == _SLOT and variable.annotated:
                self.trusted |= found
            if kind == _WHOLE:
                self.whole |= found
            if kind == _MODULE:
                self.module |= found
        return found

    def slot(self, variable: Variable, offset: int) -> int:
        if not variable.array:
            return self.bit(_SLOT, variable)
        step = self.graph.module.pointer_bytes
        return self.bit(_SLOT, variable, offset - offset % step)

    def slots(self, variable: Variable) -> int:
        """All the pointers that a parameter can hold."""
        step = self.graph.module.pointer_bytes
        if not variable.array:
            return self.slot(variable, 0)
        if variable.nbytes > step * MAX_SLOTS:
            self.graph.everything = True
        found = 0
        for at in range(0, min(max(variable.nbytes, step), step * MAX_SLOTS), step):
            found |= self.slot(variable, at)
        return found

    # fixed point

    def _connect(self) -> None:
        g = self.graph
        self.users = [[] for _ in g.ops]
        for i, inputs in enumerate(g.inputs):
            for n in inputs:
                self.users[n].append(i)
        # A loaded parameter that is converted from generic to global at once: the compiler knew a pointer.
        for i, op in enumerate(g.ops):
            if op == "cvta" and "to" in g.data[i] and "global" in g.data[i]:
                n = g.inputs[i][0]
                while g.ops[n] in ("phi", "mov") and len(g.inputs[n]) == 1:
                    n = g.inputs[n][0]
                if g.ops[n] == "param":
                    variable, offset = g.data[n][:2]
                    self.trusted |= self.slot(variable, offset)

    def _solve(self, start: range | list[int]) -> None:
        values, users, transfer = self.values, self.users, self._transfer
        todo = deque(start)
        waiting = set(start)
        while todo:
            i = todo.popleft()
            waiting.discard(i)
            new = transfer(i)
            if new != values[i]:
                values[i] = new
                for u in users[i]:
                    if u not in waiting:
                        waiting.add(u)
                        todo.append(u)

    def _transfer(self, i: int) -> Masks:
        g = self.graph
        op, inputs = g.ops[i], g.inputs[i]
        if not inputs and op in ("foreign", "load", "param", "address", "function"):
            return self._source(op, g.data[i])
        values = self.values
        d = s = p = q = n = r = 0
        for k, x in enumerate(inputs):
            if op == "selp" and k == 2:
                continue
            v = values[x]
            if (op == "sub" and k == 1) or op == "neg":
                n |= v[0] | v[1] | v[2]
            d, s, p, q, n, r = d | v[0], s | v[1], p | v[2], q | v[3], n | v[4], r | v[5]
        return self._shaped(op, i, (d, s, p, q, n, r))

    def _settle(self) -> None:
        """Which origins are firm: a second fixed point, over classes that no longer change."""
        g, values = self.graph, self.values
        self.firm = [0] * len(values)
        todo = []
        for i, (op, inputs) in enumerate(zip(g.ops, g.inputs, strict=True)):
            if len(inputs) > 1 and (op in _ALTERNATIVES or op in _PIECES):
                self.firm[i] = self._alternatives(op, inputs)
                if self.firm[i]:
                    todo.append(i)
        while todo:
            i = todo.pop()
            for u in self.users[i]:
                new = self.firm[u] | self.firm[i]
                # An index or a number of 32 bits made from an address is no address.
                if new != self.firm[u] and values[u][0] | values[u][2]:
                    self.firm[u] = new
                    todo.append(u)

    def _alternatives(self, op: str, inputs: list[int]) -> int:
        """Where values meet and one of them is a pointer, each of the others may be the pointer as well."""
        values = [self.values[x] for x in (inputs[:2] if op == "selp" else inputs)]
        bases = direct = 0
        for v in values:
            bases, direct = bases | v[0] | v[2], direct | v[0]
        if bases & self.trusted:
            if op in _PIECES:
                return bases
            firm = 0
            for v in values:
                firm |= self._based(v)
            return firm
        firm = 0
        for v in values:
            if direct and v[1] and not v[0] and not v[2]:
                firm |= v[1]
        return firm

    def _shaped(self, op: str, i: int, v: Masks) -> Masks:
        """The class of a result, given the union of its operands."""
        d, s, p, q, n, r = v
        word = self.graph.module.pointer_bytes
        data = self.graph.data[i]
        if op in ("mul", "shl"):
            return self._scaled(op, i, v)
        if op in _PIECES:
            if op in ("and", "or") and self._aligns(op, i):
                return v
            return (0, 0, d | s | p | q | r, 0, n, 0) if op == "bfi" else (0, 0, d | s | p, q, n, r)
        if op in ("cvt", "load", "unpack"):
            wide = self._cvt_bytes(data) if op == "cvt" else data[1] if op == "unpack" else data
            return (0, 0, 0, d | s | p | q | r, n, 0) if wide < word else v
        if op == "pack":
            return d | p | q | r, s, 0, 0, n, 0
        if op == "test":
            return NOTHING
        if op == "cvta":
            words = " ".join(data)
            return d | (SHARED if "shared" in words else LOCAL if "local" in words else 0), s, p, q, n, r
        return v

    def _aligns(self, op: str, i: int) -> bool:
        """Whether only the last bits change: as if the value was moved by less than a page."""
        constants = [self.graph.data[x] for x in self.graph.inputs[i] if self.graph.ops[x] == "const"]
        if len(constants) != 1 or not isinstance(constants[0], int):
            return False
        c = constants[0] if op == "or" else ~constants[0] & ((1 << 64) - 1)
        return 0 <= c < PAGE

    def _scaled(self, op: str, i: int, v: Masks) -> Masks:
        """A product or a shift to the left: an index, unless it may be undone or moves the bits up high."""
        d, s, p, q, n, r = v
        g = self.graph
        kinds = g.data[i]
        constants = [g.data[x] for x in g.inputs[i] if g.ops[x] == "const"]
        factor = constants[-1] if constants else None
        anything: Masks = (0, 0, d | s | p | q | r, 0, n, 0)
        if op == "mul" and "hi" in kinds:
            return anything
        wide = bool(kinds) and (kinds[-1].endswith("64") or "wide" in kinds)
        if not isinstance(factor, int):
            # The other factor may be 1, or so great that half a pointer comes up high.
            return (0, s, d | p | q | r, 0, n, 0) if wide and "wide" not in kinds else (0, s, d | p, q, n, r)
        if factor == (0 if op == "shl" else 1):
            return v
        if op == "mul" and factor == -1:
            return d, s, p, q, n | d | p, r
        if factor >= 31 if op == "shl" else not -(1 << 31) < factor < 1 << 31:
            return anything
        if wide:
            p, q, r = p | r, 0, q
        return (0, s, d | p, q, n, r) if op == "mul" and factor % 2 else (0, d | s, p, q, n, r)

    def _cvt_bytes(self, parts: tuple[str, ...]) -> int:
        """The narrower side of a conversion."""
        from tesserasim.deps.ptx.parse import width

        sizes = [w for part in parts if (w := width(part))]
        return min(sizes[-2:], default=8)

    def _source(self, op: str, data: Any) -> Masks:
        size = self.graph.module.pointer_bytes
        if op == "foreign" or op == "load":
            return _source(FOREIGN, data >= size)
        if op == "param":
            variable, offset, nbytes, _ = data
            bit = self.slot(variable, offset)
            if nbytes >= size:
                self.full.update(o for o in self.origins(bit))
            return _source(bit, nbytes >= size)
        if op == "address":
            variable, _ = data
            if variable.space == "shared":
                return _source(SHARED)
            if variable.space == "local":
                return _source(LOCAL)
            return _source(self.bit(_WHOLE if variable.space == "param" else _MODULE, variable))
        return _source(FUNCTION)

    # memory that values pass through

    def _edge(self, source: int, target: int) -> bool:
        if source in self.graph.inputs[target]:
            return False
        self.graph.inputs[target].append(source)
        self.users[source].append(target)
        return True

    def _memory(self) -> None:
        """Connect loads and stores to the cells that their addresses may reach, until nothing changes."""
        for _ in range(len(self.graph.accesses) + 2):
            self._settle()
            changed: set[int] = set()
            for a in self.graph.accesses:
                if (a.into or a.value) and a.mode != "none":
                    self._connect_access(a, changed)
            if not changed:
                return
            self._solve(sorted(changed))
        self.graph.everything = True

    def _connect_access(self, a: Access, changed: set[int]) -> None:
        g = self.graph
        reach = self.base(a.address)
        shared = a.space == "shared" or (a.space == "generic" and bool(reach & (SHARED | FOREIGN) or not reach))
        local = a.space == "local" or (a.space == "generic" and bool(reach & (LOCAL | FOREIGN) or not reach))
        if shared:
            changed.update(g.shared for v in a.value if self._edge(v, g.shared))
            changed.update(t for t in a.into if self._edge(g.shared, t))
        if local:
            self._local(a, changed)
        for target in a.into:  # what only parameters can give comes as it is
            (g.passed.discard if reach & ~self.whole or not reach else g.passed.add)(target)
        if a.space in ("generic", "param") and reach & self.whole and a.into:
            self._from_parameters(a, reach & self.whole, changed)
        outside = reach & ~(SHARED | LOCAL | self.whole) or not reach
        if outside and a.space in ("global", "generic", "const"):
            changed.update(t for t in a.into if self._edge(g.foreign, t))

    def _local(self, a: Access, changed: set[int]) -> None:
        """Local memory word by word where the address is a constant one, else all of it."""
        g = self.graph
        exact = g.resolve(a.address)
        if exact is None or exact[0].space != "local" or not a.nbytes:
            changed.update(g.blur for v in a.value if self._edge(v, g.blur))
            changed.update(t for t in a.into if self._edge(g.local, t))
            return
        each = max(1, a.nbytes // max(1, len(a.value) + len(a.into)))
        for k, node in enumerate(a.value + a.into):
            first = exact[1] + a.offset + k * each
            for word in range(first // 8, (first + each - 1) // 8 + 1):
                cell = self._added("cell", (exact[0], word))
                if k < len(a.value):
                    changed.update(c for c in (cell, g.local) if self._edge(node, c))
                else:
                    changed.update(node for c in (cell, g.blur) if self._edge(c, node))

    def _added(self, op: str, data: Any) -> int:
        """A node that is needed only now."""
        g = self.graph
        if (op, data) not in g.interned:
            node = g.once(op, data)
            self.values.append(NOTHING)
            self.firm.append(0)
            self.users.append([])
            self._solve([node])
        return g.interned[op, data]

    def _from_parameters(self, a: Access, reach: int, changed: set[int]) -> None:
        """A load through the address of a parameter: from the bytes it names, or from any of them."""
        g = self.graph
        exact = g.resolve(a.address)
        for origin in self.origins(reach):
            v = origin.variable
            at = exact[1] + a.offset if exact and exact[0] is v else None
            each = a.nbytes // max(1, len(a.into))
            if v.nbytes > g.module.pointer_bytes * MAX_SLOTS:
                g.everything = True
            for k, target in enumerate(a.into):
                for slot in self._places(v) if at is None else (at + k * each,):
                    if self._edge(self._added("param", (v, slot, each, "b")), target):
                        changed.add(target)

    def _places(self, v: Variable) -> range:
        step = self.graph.module.pointer_bytes
        return range(0, min(v.nbytes, step * MAX_SLOTS), step)

    # answers

    def base(self, node: int) -> int:
        """The origins that an address may be based on."""
        v = self.values[node]
        return self._based(v) | self.firm[node]

    def _based(self, v: Masks) -> int:
        d, s, p, q, n, r = v
        if not d:
            return s | p | q | r
        keep = d | p | (s & self.trusted)
        known = (d | p) & self.trusted
        if known & d and known & (known - 1) == 0 and not n & keep:
            # One pointer plus numbers. What only this thread block can name is never such a number.
            return known | (keep & (SHARED | LOCAL | FUNCTION | self.whole))
        return keep

    def origins(self, mask: int) -> list[Origin]:
        out = []
        while mask:
            low = mask & -mask
            origin = self.by_bit[low.bit_length() - 1]
            if origin is not None:
                out.append(origin)
            mask ^= low
        return out
