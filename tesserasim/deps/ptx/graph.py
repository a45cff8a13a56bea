"""The value graph of an entry: a node per value, called functions inlined, and every memory access.

Nodes
    `ops[i]` says what the node computes, `inputs[i]` from which nodes, `data[i]` holds constants. Memory that
    a thread can name only by space (shared, local, the parameters of a call) is a *cell*: a join of all that
    is stored there. Loads from anywhere else are `foreign`.

Accesses
    Each instruction that touches memory leaves `Access` records: mode, address node and offset, size, space.
    `unknown` is what a function without a body may do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tesserasim.deps.ptx.cfg import Block, Definitions, blocks, call_results
from tesserasim.deps.ptx.model import (
    Address,
    Function,
    Imm,
    Instr,
    Module,
    Operand,
    Reg,
    Special,
    Symbol,
    Variable,
    Vector,
)  # fmt: skip

MAX_NODES = 200_000
MAX_INSTANCES = 3_000
MAX_DEPTH = 16


@dataclass(slots=True)
class Access:
    """One touch of memory."""

    mode: str  # R, W, RW, unknown, handle (texture), map (tensor map; `via` is its direction)
    address: int  # node
    offset: int
    nbytes: int  # 0: not known
    space: str  # global, shared, local, param, const or generic
    place: tuple[int, int]  # (instance, block)
    guard: tuple[int, bool] | None = None  # (predicate node, negated)
    via: str = ""
    value: tuple[int, ...] = ()  # nodes stored
    into: tuple[int, ...] = ()  # nodes that receive what is loaded


@dataclass(slots=True)
class Cell:
    """The bytes of a `.param` variable of a call."""

    stores: list[tuple[int, int, int]] = field(default_factory=list)  # (offset, bytes, node)
    loads: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Instance:
    """One function at one call site."""

    number: int
    function: Function
    parts: list[Block]
    cells: dict[Variable, Cell]
    depth: int
    stack: tuple[str, ...]
    branches: dict[int, tuple[int, bool]] = field(default_factory=dict)  # block → (predicate, negated) of its branch


class Graph:
    """Builds the value graph of one entry; the result is in its fields."""

    def __init__(self, module: Module, entry: Function) -> None:
        self.module, self.entry = module, entry
        self.ops: list[str] = []
        self.inputs: list[list[int]] = []
        self.data: list[Any] = []
        self.places: list[tuple[int, int]] = []
        self.accesses: list[Access] = []
        self.instances: list[Instance] = []
        self.own = set(entry.params)
        self.everything = False  # memory that nothing names is touched
        self.interned: dict[tuple[str, object], int] = {}
        self.cells: list[Cell] = []
        self.mapped: list[int] = []  # nodes that are put into tensor maps as addresses
        self.passed: set[int] = set()  # loads that get one of the stored values as it is
        self.phi_block: dict[int, tuple[int, int]] = {}
        self.foreign = self.node("foreign", data=8)
        self.shared = self.node("cell", data="shared")
        self.blur = self.node("cell", data="local")  # stored somewhere in local memory
        self.local = self.node("cell", [self.blur], "local")  # all of local memory
        self.here = (0, 0)
        self.run(entry, {}, {}, 0, ())
        self.link()

    # nodes

    def node(self, op: str, inputs: list[int] | None = None, data: object = None) -> int:
        self.ops.append(op)
        self.inputs.append(inputs if inputs is not None else [])
        self.data.append(data)
        return len(self.ops) - 1

    @property
    def full(self) -> bool:
        """Whether functions are inlined no more: what they do counts as unknown."""
        return len(self.ops) > MAX_NODES or len(self.instances) > MAX_INSTANCES

    def once(self, op: str, data: object) -> int:
        key = (op, data)
        found = self.interned.get(key)
        if found is None:
            found = self.interned[key] = self.node(op, data=data)
        return found

    # functions

    def run(
        self, function: Function, cells: dict[Variable, Cell], registers: dict[int, int], depth: int,
        stack: tuple[str, ...],
    ) -> tuple[Instance, Definitions]:  # fmt: skip
        """Add one function instance; `cells` are its parameters and results."""
        from tesserasim.deps.ptx.effects import execute

        parts = blocks(function)
        me = Instance(len(self.instances), function, parts, cells, depth, (*stack, function.name))
        self.instances.append(me)

        def phi(block: int) -> int:
            made = self.node("phi")
            self.phi_block[made] = (me.number, block)
            return made

        definitions = Definitions(function, parts, phi)
        for register, value in registers.items():
            definitions.write(0, register, value, self.inputs)
        body = function.body or []
        for i, b in enumerate(parts):
            if not b.reachable:
                continue
            for instr in body[b.first : b.end]:
                self.here = (me.number, i)
                execute(self, me, definitions, i, instr)
        definitions.close(self.inputs)
        return me, definitions

    def call(self, me: Instance, definitions: Definitions, block: int, instr: Instr) -> None:
        operands = list(instr.operands)
        back = call_results(instr)
        if len(operands) > 1 and isinstance(operands[0], Vector):
            operands.pop(0)
        target = operands.pop(0) if operands else None
        given = operands[0].items if operands and isinstance(operands[0], Vector) else ()
        function = self.module.function(target.name) if isinstance(target, Symbol) and target.variable is None else None
        args = [self.cell_of(me, definitions, block, a) for a in given]
        outs = [self.cell_of(me, definitions, block, r, result=True) for r in back]
        fits = function is not None and function.body is not None and function.name not in me.stack
        if function is None or not fits or me.depth >= MAX_DEPTH or self.full:
            self.unknown_call(target, args, outs)
        elif len(args) != len(function.params) or len(outs) != len(function.results):
            self.unknown_call(None, args, outs)
        else:
            self.inline(me, function, args, outs)
        self.here = (me.number, block)
        for r, cell in zip(call_results(instr), outs, strict=False):
            if isinstance(r, Reg):
                value = self.node("join")
                cell.loads.append((0, 16, value))
                definitions.write(block, r.number, value, self.inputs)

    def inline(self, me: Instance, function: Function, args: list[Cell], outs: list[Cell]) -> None:
        cells: dict[Variable, Cell] = {}
        registers: dict[int, int] = {}
        for v, cell in zip(function.params, args, strict=True):
            cells[v] = cell
            if v.space == "reg":
                registers[function.registers[v.name]] = value = self.node("join")
                cell.loads.append((0, 16, value))
        cells.update(zip(function.results, outs, strict=True))
        _, inner = self.run(function, cells, registers, me.depth + 1, me.stack)
        for v, cell in zip(function.results, outs, strict=True):
            if v.space == "reg":
                # A result in a register: whatever was ever written to it.
                cell.stores.append((0, 16, inner.home(function.registers[v.name])))

    def cell_of(
        self, me: Instance, definitions: Definitions, block: int, operand: Operand, result: bool = False
    ) -> Cell:
        if isinstance(operand, Symbol) and operand.variable is not None and operand.variable.space == "param":
            return self.cell(me, operand.variable)
        cell = Cell()
        self.cells.append(cell)
        if not result:
            cell.stores.append((0, 16, self.value(me, definitions, block, operand)))
        return cell

    def cell(self, me: Instance, variable: Variable) -> Cell:
        found = me.cells.get(variable)
        if found is None:
            found = me.cells[variable] = Cell()
            self.cells.append(found)
        return found

    def unknown_call(self, target: Operand | None, args: list[Cell], outs: list[Cell]) -> None:
        """A function that cannot be seen may do anything with what it is given and with what memory holds."""
        name = target.name if isinstance(target, Symbol) else ""
        given = self.node("join")
        for cell in args:
            cell.loads.append((0, 1 << 20, given))
        if name == "__assertfail":
            return
        self.inputs[given] += [self.local, self.shared]
        mode = "R" if name == "vprintf" else "unknown"
        self.accesses.append(Access(mode, given, 0, 0, "generic", self.here, via="call"))
        back = given if name == "vprintf" else self.node("join", [given, self.foreign])
        if name != "vprintf":
            self.everything = True
            self.inputs[self.blur].append(back)
            self.inputs[self.shared].append(back)
        for cell in outs:
            cell.stores.append((0, 1 << 20, back))

    # operands

    def value(self, me: Instance, definitions: Definitions, block: int, operand: Operand) -> int:
        if isinstance(operand, Reg):
            return definitions.read(block, operand.number)
        if isinstance(operand, Imm):
            return self.once("const", operand.value)
        if isinstance(operand, Special):
            return self.once("special", operand.name)
        if isinstance(operand, Symbol):
            return self.symbol(me, operand)
        if isinstance(operand, Address):
            return self.value(me, definitions, block, operand.base)
        return self.node("pack", [self.value(me, definitions, block, x) for x in operand.items])

    def symbol(self, me: Instance, symbol: Symbol) -> int:
        v = symbol.variable
        if v is None:
            return self.once("function", symbol.name)
        if v.space == "param" and v not in self.own:
            # The address of a parameter of a call: its bytes live among the local ones.
            cell = self.cell(me, v)
            value = self.node("join")
            cell.loads.append((0, 1 << 20, value))
            self.inputs[self.blur].append(value)
            cell.stores.append((0, 1 << 20, self.local))
            return self.once("address", (Variable(v.name, "local", v.type, v.nbytes), symbol.offset))
        return self.once("address", (v, symbol.offset))

    def link(self) -> None:
        """What was stored into each cell of a call reaches what loads the same bytes."""
        for cell in self.cells:
            for at, size, node in cell.loads:
                met = [(off, width, n) for off, width, n in cell.stores if off < at + size and at < off + width]
                self.inputs[node] += [n for _, _, n in met if n != node]
                if all((off, width) == (at, size) for off, width, _ in met):
                    self.passed.add(node)

    def resolve(self, node: int, limit: int = 64) -> tuple[Variable, int] | None:
        """The variable and offset that an address node names, if it is a constant one."""
        offset = 0
        for _ in range(limit):
            op, inputs, data = self.ops[node], self.inputs[node], self.data[node]
            if op == "address":
                variable, more = data
                return variable, offset + more
            if op in ("mov", "cvta", "join", "phi") and len(set(inputs)) == 1:
                node = inputs[0]
            elif op in ("add", "sub") and self.ops[inputs[1]] == "const" and isinstance(self.data[inputs[1]], int):
                offset += self.data[inputs[1]] * (1 if op == "add" else -1)
                node = inputs[0]
            elif op == "add" and self.ops[inputs[0]] == "const" and isinstance(self.data[inputs[0]], int):
                offset += self.data[inputs[0]]
                node = inputs[1]
            else:
                return None
        return None
