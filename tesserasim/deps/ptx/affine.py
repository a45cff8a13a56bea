"""Byte intervals of a launch: where an address is a pointer plus a sum of bounded terms.

Given grid, block and the values of the numbers among the parameters, every value that is affine in thread and
block indices and in loop counters becomes `base + constant + Σ coefficient · term`, each term with a range.
A loop counter is a value that a loop moves by a constant; how often, the comparison says that leaves the loop.
Conditions on the way to an access (its own predicate, the branch before its block) cut the interval further.
What is not of this form has no interval: None, never a guess. Arithmetic of 32 bits counts only where the
values provably fit, so that nothing wraps.
"""

from __future__ import annotations

from collections.abc import Mapping

from tesserasim.deps.ptx.analysis import KernelEffects
from tesserasim.deps.ptx.arithmetic import EXACT, Affine, Term, computed
from tesserasim.deps.ptx.graph import Access
from tesserasim.deps.ptx.loops import Loops
from tesserasim.errors import InputError

MAX_DEPTH = 150
MAX_VALUES = 200_000  # evaluations of one launch
MAX_BASES = 16  # pointers that one address may be based on
ELSEWHERE = "!"  # the base of every pointer but the one that is looked at
Triple = tuple[int, int, int]


def intervals(
    entry: KernelEffects, grid: Triple, block: Triple, params: Mapping[str, int], cluster: Triple | None = None
) -> dict[str, tuple[int, int] | None]:
    """Bytes [lo, hi) of every pointer that the entry touches in this launch, from the pointer on.

    `params` names the numbers (parameter, or parameter+offset in a struct). `cluster` are the blocks of a cluster;
    where it is not known, each of its registers has the range that the grid allows. None: touched, bytes not
    known. An entry that touches memory without a name gives "*": None. Raises InputError for an empty launch.
    """
    if min(*grid, *block, *(cluster or (1,))) < 1:
        raise InputError(f"{entry.entry}: a launch of {grid} blocks of {block} threads is empty")
    found: dict[str, tuple[int, int] | None] = {}
    touched = {name for name, mode in entry.modes.items() if mode != "none"}
    spaces: dict[str, _Launch] = {}
    for a in entry.graph.accesses:
        if a.space not in ("global", "generic") or a.mode == "none":
            continue
        reach = entry.origins.base(a.address)
        names = {o.name for o in entry.origins.origins(reach) if o.kind == "slot"}
        if a.mode not in ("R", "W", "RW") or len(names) > MAX_BASES:
            found.update(dict.fromkeys(names))
            continue
        for name in names:
            only = name if reach & (reach - 1) else ""
            if only not in spaces:
                spaces[only] = _Launch(entry, grid, block, params, cluster, only)
            where = spaces[only].interval(a)
            if where is None or where[0] not in (name, ELSEWHERE):
                found[name] = None
            elif where[1] < where[2] and where[0] == name:
                old = found.get(name, (where[1], where[2]))
                found[name] = None if old is None else _hull(old, where[1:])
            else:
                touched.add(name)
                found.setdefault(name, (0, 0))
    return {name: found.get(name) for name in sorted(touched)}


def _hull(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The least interval that holds both; an empty one holds nothing."""
    if a[0] == a[1]:
        return b
    return min(a[0], b[0]), max(a[1], b[1])


class _Launch:
    """The values of one launch. With `only`, other pointers than this one have the base `ELSEWHERE`, and where
    values meet they are left out: the address then is what it is whenever it is based on that pointer."""

    def __init__(
        self, entry: KernelEffects, grid: Triple, block: Triple, params: Mapping[str, int],
        cluster: Triple | None = None, only: str = "",
    ) -> None:  # fmt: skip
        self.graph, self.params, self.only = entry.graph, params, only
        self.pointers = {n for n, m in entry.modes.items() if m != "none"}
        self.sizes = {"ntid": block, "nctaid": grid}
        self.ranges: dict[Term, tuple[int, int]] = {}
        for name, size in (("tid", block), ("ctaid", grid)):
            for i, n in enumerate(size):
                self.ranges[name, i] = (0, n - 1)
        self.clusters(grid, cluster)
        self.memo: dict[int, Affine | None] = {}
        self.depth, self.budget = 0, MAX_VALUES
        self.dropped = False  # a pointer to elsewhere was left out beside what a loop carries
        self.loops = Loops(self)

    def clusters(self, grid: Triple, cluster: Triple | None) -> None:
        """Ranges of the registers about clusters, the two without axes under axis 0."""
        total = grid[0] * grid[1] * grid[2]
        for i, n in enumerate(grid):
            least, most = (cluster[i], cluster[i]) if cluster else (1, n)
            self.ranges["cluster_nctaid", i] = (least, most)
            self.ranges["cluster_ctaid", i] = (0, most - 1)
            self.ranges["nclusterid", i] = (-(-n // most), -(-n // least))
            self.ranges["clusterid", i] = (0, -(-n // least) - 1)
        size = cluster[0] * cluster[1] * cluster[2] if cluster else total
        self.ranges["cluster_nctarank", 0] = (size if cluster else 1, size)
        self.ranges["cluster_ctarank", 0] = (0, size - 1)
        self.ranges["laneid", 0] = (0, 31)

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

    def between(self, node: int, lo: int, hi: int, step: int = 1) -> Affine:
        """Some number from lo to hi, which `step` divides as it divides them."""
        if lo == hi:
            return Affine("", lo)
        self.ranges["node", node] = (lo // step, hi // step)
        return Affine("", 0, {("node", node): step})

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
        distinct = set(inputs) - {node}
        if self.only and (op == "address" or (op == "load" and data == 8 and distinct == {g.foreign})):
            return Affine(ELSEWHERE, 0)
        if op in ("phi", "join", "load", "cell"):
            if len(distinct) == 1 and op != "load":
                return self.value(distinct.pop())
            if op == "phi" and node in g.phi_block and (carried := self.loops.phi(node)) is not None:
                return carried
            return self._either(node, sorted(distinct)) if op in ("phi", "join") or node in g.passed else None
        if op == "selp":
            return self._either(node, inputs[:2])
        made = computed(self, node, op, [self.value(x) for x in inputs], data or ())
        return self._fits(made, op, data or ())

    def _special(self, name: str) -> Affine | None:
        word, _, axis = name.lstrip("%").partition(".")
        i = "xyz".find(axis or "?")
        if word in self.sizes and i >= 0:
            return Affine("", self.sizes[word][i])
        term = (word, max(i, 0))
        if term in self.ranges and (i >= 0) != (word in ("laneid", "cluster_ctarank", "cluster_nctarank")):
            a, b = self.ranges[term]
            return Affine("", 0, {term: 1}) if a < b else Affine("", a)
        return Affine("", 32) if word == "WARP_SZ" else None

    def _param(self, data: tuple[object, int, int, str]) -> Affine | None:
        variable, offset, nbytes, _ = data
        array, name = variable.array, variable.name  # type: ignore[attr-defined]
        name = f"{name}+{offset}" if array else name
        if name in self.pointers:
            base = name if self.only in ("", name) else ELSEWHERE
            return Affine(base, 0) if nbytes == self.graph.module.pointer_bytes else None
        given = self.params.get(name)
        return None if given is None else Affine("", given)

    def _either(self, node: int, inputs: list[int]) -> Affine | None:
        """One of several values: the hull of numbers; of pointers only where they are one."""
        values = self._here([self.value(x) for x in inputs])
        if values and all(v == values[0] for v in values):
            return values[0]
        known = [v for v in values if v is not None and not any(t[0] == "phi" for t in v.terms)]
        if len(known) < len(values) or len({v.base for v in known}) != 1:
            return None
        spans = [self.span(v) for v in known]
        hull = self.between(node, min(a for a, _ in spans), max(b for _, b in spans))
        return hull.plus(Affine(known[0].base, 0))

    def _here(self, values: list[Affine | None]) -> list[Affine | None]:
        """The values beside which pointers to elsewhere do not matter, without those: the pointer that is looked
        at, which is the whole address then and never an offset. So is what a loop carries of it."""
        rest = [v for v in values if v is None or v.base != ELSEWHERE]
        if not self.only or len(rest) in (0, len(values)):
            return values
        if all(v is not None and v.base == self.only for v in rest):
            return rest
        if all(v is not None and not v.base and [t[0] for t in v.terms] == ["phi"] for v in rest):
            self.dropped = True
            return rest
        return values

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
            exact = op in EXACT or "wide" in kinds
            least = 0 if kind[0] == "u" and exact else -1
            most = bits - (1 if kind[0] == "s" else 0)
            if lo < least << (bits - 1) or hi >= 1 << most or (lo < 0 and hi >= 1 << (bits - 1)):
                return None
        return v
