"""Loops and conditions for `affine`: how far a counter runs, what a branch says about an address."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tesserasim.deps.ptx.graph import Access

if TYPE_CHECKING:
    from tesserasim.deps.ptx.affine import Affine, _Launch

_OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq",
             "lo": "hs", "ls": "hi", "hi": "ls", "hs": "lo"}  # fmt: skip
_ORDER = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
MAX_NEST = 6
Place = tuple[int, int]


def wide(kind: str, most: int) -> bool:
    """Whether a number is beyond the greatest of a signed type."""
    return most >= 1 << (int(kind[1:] or 32) - 1)


class Loops:
    """Works on the values of one launch."""

    def __init__(self, launch: _Launch) -> None:
        self.launch = launch
        self.open = 0
        self.counts: dict[Place, int | None] = {}
        self.phis: dict[Place, list[int]] = {}
        for node, place in launch.graph.phi_block.items():
            self.phis.setdefault(place, []).append(node)

    def phi(self, node: int) -> Affine | None:
        """A value that a loop carries: start + step · k, k from 0 to the number of repeats."""
        from tesserasim.deps.ptx.affine import Affine

        place = self.launch.graph.phi_block[node]
        moved = self._moves(node)
        if moved is None:
            return None
        start, step = moved
        if step == 0:
            return start
        if place not in self.counts:
            self.counts[place] = None  # while it is being found: not known
            self.counts[place] = self._count(place)
        count = self.counts[place]
        if count is None:
            return None
        self.launch.ranges["loop", node] = (0, count)
        term = ("loop", min(self.phis[place]))
        self.launch.ranges[term] = (0, count)
        return start.plus(Affine("", 0, {term: step} if count else {}))

    def _marked(self, nodes: list[int], wanted: list[int]) -> list[Affine | None]:
        """The values of `wanted` where each of `nodes` is a term of its own."""
        from tesserasim.deps.ptx.affine import Affine

        launch = self.launch
        if self.open >= MAX_NEST:
            return [None] * len(wanted)
        before, launch.memo, ranges = launch.memo, {}, dict(launch.ranges)
        self.open += 1
        try:
            for n in nodes:
                launch.ranges["phi", n] = (0, 0)
                launch.memo[n] = Affine("", 0, {("phi", n): 1})
            return [launch.value(w) for w in wanted]
        finally:
            launch.memo, launch.ranges = before, {**launch.ranges, **ranges}
            self.open -= 1

    def _moves(self, node: int) -> tuple[Affine, int] | None:
        """(start, step) of a value that every turn of a loop moves by the same constant."""
        inputs = sorted(set(self.launch.graph.inputs[node]) - {node})
        starts, step = [], None
        before, self.launch.dropped = self.launch.dropped, False
        marked = self._marked([node], inputs)
        dropped, self.launch.dropped = self.launch.dropped, before or self.launch.dropped
        for x, v in zip(inputs, marked, strict=True):
            if v is not None and dict(v.terms) == {("phi", node): 1} and not v.base:
                if step not in (None, v.constant):
                    return None
                step = v.constant
            elif v is not None and any(t[0] == "phi" for t in v.terms):
                return None
            else:
                starts.append(x)
        values = [self.launch.value(x) for x in starts]
        if not values or values[0] is None or any(v != values[0] for v in values):
            return None
        if dropped and values[0].base != self.launch.only:
            return None  # a number that is a pointer in some turns
        return values[0], step or 0

    def _count(self, place: Place) -> int | None:
        """The greatest number of times that control comes back to the head of a loop."""
        number, head = place
        me = self.launch.graph.instances[number]
        latches = [p for p in me.parts[head].before if self._reaches(number, head, p)]
        if len(latches) != 1:
            return None
        inside = self._body(number, head, latches[0])
        found = []
        for b in {head, latches[0]}:
            test = me.branches.get(b)
            after = me.parts[b].next
            if test is None or len(after) != 2 or (after[0] in inside) == (after[1] in inside):
                continue
            stays = after[0] in inside  # the first one is where the branch goes when it is taken
            n = self._repeats(place, test[0], test[1] != (not stays))
            if n is not None:
                found.append(n)
        return min(found, default=None)

    def _reaches(self, number: int, start: int, goal: int) -> bool:
        parts = self.launch.graph.instances[number].parts
        seen, todo = set(), [start]
        while todo:
            b = todo.pop()
            if b == goal:
                return True
            if b not in seen:
                seen.add(b)
                todo += parts[b].next
        return False

    def _body(self, number: int, head: int, latch: int) -> set[int]:
        parts = self.launch.graph.instances[number].parts
        inside, todo = {head}, [latch]
        while todo:
            b = todo.pop()
            if b not in inside:
                inside.add(b)
                todo += parts[b].before
        return inside

    def _repeats(self, place: Place, test: int, negated: bool) -> int | None:
        """How many turns a comparison grants: a counter against a number that does not change."""
        compared = self._comparison(test, negated)
        if compared is None:
            return None
        how, left, right = compared
        unsigned = self._unsigned(test)
        a, b = self._marked(self.phis[place], [left, right])
        if a is not None and b is not None and any(t[0] == "phi" for t in b.terms):
            a, b, how = b, a, {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}.get(how, how)
        marks = [t for t in a.terms if t[0] == "phi"] if a is not None else []
        if a is None or b is None or len(marks) != 1 or a.terms[marks[0]] != 1 or len(a.terms) != 1 or b.base:
            return None
        moved = self._moves(marks[0][1])
        if moved is None or moved[0].base or any(t[0] == "phi" for t in (*moved[0].terms, *b.terms)):
            return None
        start, step = moved
        (lo, hi), (least, most) = self.launch.span(start), self.launch.span(b)
        lo, hi = lo + a.constant, hi + a.constant
        if unsigned and (lo < 0 or least < 0 or step < 0):
            return None  # it may run below zero, which is a great number
        if how in ("lt", "le") and step > 0 and most + step < 1 << 31:
            return max(0, -(-(most - lo + (how == "le")) // step))
        if how in ("gt", "ge") and step < 0:
            return max(0, -(-(hi - least + (how == "ge")) // -step))
        if how == "ne" and step and lo == hi and least == most and (most - lo) % step == 0 and (most - lo) // step >= 0:
            return (most - lo) // step
        return None

    def _comparison(self, test: int, negated: bool) -> tuple[str, int, int] | None:
        """(comparison, left, right) that holds when the predicate is true, or false if `negated`."""
        g = self.launch.graph
        while g.ops[test] in ("phi", "mov", "join") and len(set(g.inputs[test])) == 1:
            test = g.inputs[test][0]
        if g.ops[test] != "test" or len(g.inputs[test]) != 2 or g.data[test][0] != "setp" or len(g.data[test]) != 3:
            return None
        how, kind = g.data[test][1], g.data[test][2]
        if how not in _OPPOSITE or kind[:1] not in "us":
            return None
        left, right = g.inputs[test]
        for x in (left, right):
            # Unsigned comparison and signed values agree only where nothing is negative.
            v = self.launch.value(x)
            size = None if v is None else self.launch.span(v)
            wrong = size is not None and (size[0] < 0 if kind[0] == "u" else wide(kind, size[1]))
            if wrong and how not in ("eq", "ne"):
                return None
        how = _OPPOSITE[how] if negated else how
        return _ORDER.get(how, how), left, right

    def _unsigned(self, test: int) -> bool:
        g = self.launch.graph
        while g.ops[test] in ("phi", "mov", "join") and len(set(g.inputs[test])) == 1:
            test = g.inputs[test][0]
        return bool(g.data[test][2][:1] == "u" and g.data[test][1] not in ("eq", "ne"))

    def limits(self, a: Access, v: Affine) -> Iterator[tuple[int | None, int | None]]:
        """Bounds on an address that hold wherever the access happens."""
        tests = [a.guard] if a.guard is not None else []
        number, block = a.place
        me = self.launch.graph.instances[number]
        for _ in range(8):
            before = me.parts[block].before
            if len(before) != 1 or before[0] == block:
                break
            after, test = me.parts[before[0]].next, me.branches.get(before[0])
            if test is not None and len(after) == 2 and after[0] != after[1]:
                tests.append((test[0], test[1] != (after[0] != block)))
            block = before[0]
        for node, negated in tests:
            compared = self._comparison(node, negated)
            if compared is not None:
                yield self._limit(v, *compared)

    def _limit(self, v: Affine, how: str, left: int, right: int) -> tuple[int | None, int | None]:
        """What `left how right` says about `v`, if `v` is a multiple of the difference plus a constant."""
        a, b = self.launch.value(left), self.launch.value(right)
        apart = None if a is None or b is None or a.base or b.base else a.plus(b, -1)
        if apart is None or not apart.terms or set(apart.terms) != set(v.terms):
            return None, None
        ratios = {v.terms[t] / c for t, c in apart.terms.items()}
        factor = ratios.pop()
        if ratios or factor != int(factor) or factor <= 0:
            return None, None
        q = int(factor)
        at = v.constant - q * apart.constant  # v when the difference is 0
        low = {"gt": 1, "ge": 0, "eq": 0}.get(how)
        high = {"lt": -1, "le": 0, "eq": 0}.get(how)
        return None if low is None else at + q * low, None if high is None else at + q * high
