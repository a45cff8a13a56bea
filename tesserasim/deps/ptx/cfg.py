"""Basic blocks of a function: which instructions can run, and which definition of a register reaches a use.

Registers that are written once need no analysis. For the others a use looks for definitions backwards through
the predecessors; where several meet, a phi node of the value graph joins them. Unreachable code has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from tesserasim.deps.ptx.model import Function, Instr, Operand, Reg, Vector, words

ENDS = frozenset(("bra", "brx", "ret", "exit", "trap"))
NO_RESULT = words(
    "st red bar barrier bra brx ret exit trap fence membar call prefetch prefetchu discard applypriority "
    "stmatrix cp griddepcontrol nanosleep pmevent brkpt sust sured setmaxnreg stackrestore clusterlaunchcontrol "
    "tensormap multimem_st multimem_red"
)
MAX_PHIS = 200_000


@dataclass(slots=True)
class Block:
    """Instructions first to end - 1, and where control goes from there."""

    first: int
    end: int
    next: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    reachable: bool = False


def blocks(function: Function) -> list[Block]:
    """The basic blocks in the order of the text; block 0 is the start."""
    body = function.body or []
    cuts = {0, len(body)} | set(function.labels.values())
    cuts.update(i + 1 for i, instr in enumerate(body) if instr.parts[0] in ENDS)
    marks = sorted(cuts)
    made = [Block(a, b) for a, b in pairwise(marks)] or [Block(0, 0)]
    at = {b.first: i for i, b in enumerate(made)}
    for i, b in enumerate(made):
        last = body[b.end - 1] if b.end > b.first else None
        if last is not None and last.parts[0] in ENDS:
            b.next = [at[t] for name in last.targets if (t := function.labels[name]) in at]
            if last.guard is not None and i + 1 < len(made):
                b.next.append(i + 1)
        elif i + 1 < len(made):
            b.next = [i + 1]
    todo = [0]
    while todo:
        i = todo.pop()
        if not made[i].reachable:
            made[i].reachable = True
            todo += made[i].next
    for i, b in enumerate(made):
        if b.reachable:
            for n in dict.fromkeys(b.next):
                made[n].before.append(i)
    return made


def results(instr: Instr) -> tuple[Operand, ...]:
    """The operands that the instruction writes."""
    operands = instr.operands
    op = instr.parts[0]
    if not operands or op in NO_RESULT:
        return ()
    if op == "multimem" and len(instr.parts) > 1 and instr.parts[1] != "ld_reduce":
        return ()
    if op in ("wmma", "tcgen05", "mbarrier") and not isinstance(operands[0], Reg | Vector):
        return ()
    first = operands[0]
    return first.items if isinstance(first, Vector) else (first,)


def call_results(instr: Instr) -> tuple[Operand, ...]:
    """Registers that a call in the old form, with register arguments, writes."""
    if len(instr.operands) > 1 and isinstance(instr.operands[0], Vector):
        return instr.operands[0].items
    return ()


class Definitions:
    """Reaching definitions of one function instance, found on demand while its value graph is built."""

    def __init__(self, function: Function, parts: list[Block], phi: Callable[[int], int]) -> None:
        self.parts, self.phi = parts, phi
        count: dict[int, int] = dict.fromkeys(function.registers.values(), 1)
        for b in parts:
            if b.reachable:
                for instr in (function.body or [])[b.first : b.end]:
                    for r in (*results(instr), *(call_results(instr) if instr.op == "call" else ())):
                        if isinstance(r, Reg):
                            count[r.number] = count.get(r.number, 0) + 1
        self.single = {r for r, n in count.items() if n == 1}
        self.homes: dict[int, int] = {}  # registers written once (or never): their node
        self.ends: list[dict[int, int]] = [{} for _ in parts]
        self.phis: dict[tuple[int, int], int] = {}
        self.open: list[tuple[int, int]] = []
        self.counted = count

    def home(self, register: int) -> int:
        node = self.homes.get(register)
        if node is None:
            node = self.homes[register] = self.phi(-1)
        return node

    def read(self, block: int, register: int) -> int:
        """The node that a use sees at this point of `block`."""
        if register in self.single or register not in self.counted:
            return self.home(register)
        node = self.ends[block].get(register)
        return self.entry(block, register) if node is None else node

    def entry(self, block: int, register: int) -> int:
        if len(self.phis) > MAX_PHIS:
            return self.home(register)
        node = self.phis.get((block, register))
        if node is None:
            node = self.phis[block, register] = self.phi(block)
            self.open.append((block, register))
        return node

    def write(self, block: int, register: int, node: int, inputs: list[list[int]]) -> None:
        """`node` is the new value; past the limit on phis, one joint value holds all definitions."""
        if register in self.single:
            inputs[self.home(register)].append(node)
            return
        inputs[self.home(register)].append(node)
        self.ends[block][register] = node

    def close(self, inputs: list[list[int]]) -> None:
        """Connect every phi to what its predecessors leave behind."""
        while self.open:
            block, register = self.open.pop()
            node = self.phis[block, register]
            for p in self.parts[block].before:
                found = self.ends[p].get(register)
                inputs[node].append(self.entry(p, register) if found is None else found)
