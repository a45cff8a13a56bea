"""What each instruction does: the values it computes and the memory it touches.

Opcodes are listed where they are known; any other opcode with an address operand may do everything, and one
without keeps, in its result, the provenance of all operands.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tesserasim.deps.ptx.cfg import Definitions, results
from tesserasim.deps.ptx.graph import Access, Graph, Instance
from tesserasim.deps.ptx.model import Address, Imm, Instr, Operand, Reg, Symbol, Variable, Vector, words
from tesserasim.deps.ptx.parse import width

SPACES = ("global", "shared", "local", "param", "const")
# Instructions with an address whose memory, if any, is not global: or that move no data.
HARMLESS = words(
    "ldmatrix mbarrier barrier bar fence membar griddepcontrol nanosleep createpolicy isspacep istypep wgmma "
    "clusterlaunchcontrol mapa getctarank elect stackrestore applypriority"
)
_QUIET = words("bar barrier fence membar griddepcontrol nanosleep pmevent brkpt setmaxnreg trap ret exit")
_COPIES = words("mov cvta shfl activemask mapa")
_JOINS = words("and or min max selp slct")
_PIECES = words("xor not lop3 bfe bfi prmt shf div rem popc clz brev bfind fns sad abs neg cnot szext bmsk dp4a dp2a")


class Step:
    """One instruction being executed on the value graph."""

    def __init__(self, graph: Graph, me: Instance, definitions: Definitions, block: int, instr: Instr) -> None:
        self.graph, self.me, self.definitions, self.block, self.instr = graph, me, definitions, block, instr
        self.guard: tuple[int, bool] | None = None
        if instr.guard is not None:
            self.guard = definitions.read(block, instr.guard.number), instr.negated

    def value(self, operand: Operand) -> int:
        return self.graph.value(self.me, self.definitions, self.block, operand)

    def write(self, operand: Operand, node: int) -> None:
        if not isinstance(operand, Reg):
            return
        definitions, number = self.definitions, operand.number
        if self.guard is not None and number not in definitions.single:
            old = definitions.read(self.block, number)
            node = self.graph.node("join", [old, node])
        definitions.write(self.block, number, node, self.graph.inputs)

    def access(
        self, mode: str, address: Operand, space: str, nbytes: int = 0, via: str = "",
        value: tuple[int, ...] = (), into: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Record a touch of memory; `value` nodes are stored, `into` nodes are loaded."""
        g = self.graph
        base, offset = (address.base, address.offset) if isinstance(address, Address) else (address, 0)
        if isinstance(base, Symbol) and base.variable is not None:
            if space == "generic" and base.variable.space in SPACES:
                space = base.variable.space
            if base.variable.space == "param" and base.variable not in g.own and space == "param":
                cell = g.cell(self.me, base.variable)
                at = base.offset + offset
                cell.stores += [(at, nbytes or 1 << 20, v) for v in value]
                cell.loads += [(at, nbytes or 1 << 20, v) for v in into]
                return
        node = self.value(base)
        g.accesses.append(
            Access(mode, node, offset, nbytes, space, (self.me.number, self.block), self.guard, via, value, into)
        )

    def loaded(self, targets: tuple[Operand, ...], nbytes: int) -> tuple[int, ...]:
        """A node per register that a load fills."""
        made = []
        for target in targets:
            node = self.graph.node("load", data=nbytes)
            self.write(target, node)
            made.append(node)
        return tuple(made)

    def space(self) -> str:
        for part in self.instr.parts[1:]:
            if (word := part.split("::")[0]) in SPACES:
                return word
        return "generic"

    def addresses(self) -> list[Address]:
        return [x for x in self.instr.operands if isinstance(x, Address)]


def execute(graph: Graph, me: Instance, definitions: Definitions, block: int, instr: Instr) -> None:
    """Add one instruction to the graph."""
    step = Step(graph, me, definitions, block, instr)
    op = instr.parts[0]
    if op in _QUIET and not any(isinstance(x, Address) for x in instr.operands):
        return
    if op in ("bra", "brx"):
        if step.guard is not None:
            me.branches[block] = step.guard
        return
    if op == "call":
        graph.call(me, definitions, block, instr)
        return
    handler = _HANDLERS.get(op)
    if handler is not None:
        handler(step)
    elif op.startswith("tcgen05"):
        _tensor_memory(step)
    else:
        _compute(step)


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _element(instr: Instr) -> int:
    """Bytes of one element of a load or store."""
    return width(instr.parts[-1]) or 8


def _load(step: Step) -> None:
    instr = step.instr
    if len(instr.operands) < 2:
        return _unknown(step)
    size = _element(instr)
    targets, address = _items(instr.operands[0]), instr.operands[1]
    space = step.space()
    base = address.base if isinstance(address, Address) else address
    if isinstance(base, Symbol) and base.variable in step.graph.own and space in ("param", "generic"):
        assert isinstance(address, Address)
        for i, target in enumerate(targets):
            at = base.offset + address.offset + i * size
            step.write(target, step.graph.once("param", (base.variable, at, size, instr.parts[-1])))
        return None
    if space == "param":
        _parameters(step, targets, address, size)
        return None
    into = step.loaded(targets, size)
    step.access("R", address, space, size * len(targets), into=into)
    return None


def _parameters(step: Step, targets: tuple[Operand, ...], address: Operand, size: int) -> None:
    """`ld.param` element by element: the bytes of a call's parameter are told apart."""
    for i, target in enumerate(targets):
        at = Address(address.base, address.offset + i * size) if isinstance(address, Address) else address
        step.access("R", at, "param", size, into=step.loaded((target,), size))


def _store(step: Step) -> None:
    operands = step.instr.operands
    if len(operands) < 2:
        return _unknown(step)
    size, address = _element(step.instr), operands[0]
    values = tuple(step.value(x) for x in _items(operands[1]))
    if step.space() == "param" and isinstance(address, Address):
        for i, v in enumerate(values):
            step.access("W", Address(address.base, address.offset + i * size), "param", size, value=(v,))
        return None
    step.access("W", address, step.space(), size * len(values), value=values)
    return None


def _atomic(step: Step) -> None:
    """`atom` and `red`: what was there is read, and anything given may be stored."""
    operands, instr = step.instr.operands, step.instr
    at = next((i for i, x in enumerate(operands) if isinstance(x, Address)), None)
    if at is None:
        return _unknown(step)
    values = tuple(step.value(y) for x in operands[at + 1 :] for y in _items(x))
    targets = tuple(y for x in operands[:at] for y in _items(x))
    size = _element(instr) * max([len(_items(x)) for x in operands])
    into = step.loaded(targets, _element(instr))
    step.access("RW", operands[at], step.space(), size, value=values, into=into)
    return None


def _copy_async(step: Step) -> None:
    """`cp.async` in all its forms, and `cp.reduce.async`."""
    parts, addresses = step.instr.parts, step.addresses()
    spaces = [w for p in parts[1:] if (w := p.split("::")[0]) in SPACES]
    if len(addresses) < 1 or any(p in ("commit_group", "wait_group", "wait_all", "mbarrier") for p in parts):
        if addresses and "arrive" in parts:
            return None
        return None if not addresses else _unknown(step)
    tensor, prefetch, reduce = "tensor" in parts, "prefetch" in parts, "reduce" in parts
    foreign = (step.graph.foreign,)
    if prefetch:
        step.access("map" if tensor else "R", addresses[0], "generic", via="R")
        return None
    if len(addresses) < 2 or len(spaces) < 2:
        return _unknown(step)
    to, source = addresses[0], addresses[1]
    length = step.instr.operands[2] if len(step.instr.operands) > 2 and not tensor else None
    size = (length.value or 0) if isinstance(length, Imm) else 0
    mode = "RW" if reduce or "cp_mask" in parts else "W"
    if spaces[0] == "global":
        step.access("map" if tensor else mode, to, "global", size, via="RW" if reduce else "W", value=foreign)
    else:
        step.graph.inputs[step.graph.shared].append(step.graph.foreign)
    if spaces[1] == "global":
        step.access("map" if tensor else "R", source, "global", size, via="R")
    return None


def _matrix(step: Step) -> None:
    """`wmma.load`, `wmma.store`, `stmatrix`; products without memory go the general way."""
    parts, addresses = step.instr.parts, step.addresses()
    if not addresses:
        return _compute(step)
    space = "shared" if parts[0] in ("stmatrix", "ldmatrix", "movmatrix") else step.space()
    size = _fragment(step.instr)
    if "load" in parts or parts[0] == "ldmatrix":
        step.access("R", addresses[0], space, size, into=step.loaded(_items(step.instr.operands[0]), 4))
    elif "store" in parts or parts[0] == "stmatrix":
        values = tuple(step.value(y) for x in step.instr.operands[1:] for y in _items(x))
        step.access("W", addresses[0], space, size, value=values)
    else:
        return _unknown(step)
    return None


def _fragment(instr: Instr) -> int:
    """Bytes from the first to the last element of a matrix that `wmma` moves; 0 where its stride is not written."""
    shape = next((x for p in instr.parts if (x := re.fullmatch(r"m(\d+)n(\d+)k(\d+)", p))), None)
    stride, size = instr.operands[-1], width(instr.parts[-1])
    if shape is None or not isinstance(stride, Imm) or stride.value is None or stride.value < 0 or not size:
        return 0
    m, n, k = (int(x) for x in shape.groups())
    rows, columns = {"a": (m, k), "b": (k, n)}.get(instr.parts[2], (m, n))
    lines, length = (columns, rows) if "col" in instr.parts else (rows, columns)
    return ((lines - 1) * stride.value + length) * size


def _tensor_memory(step: Step) -> None:
    """tcgen05: tensor memory and shared descriptors; values in tensor memory are kept as if shared."""
    g = step.graph
    op = step.instr.parts[1] if len(step.instr.parts) > 1 else ""
    if op == "ld":
        for target in results(step.instr):
            step.write(target, g.node("join", [g.shared]))
    else:
        g.inputs[g.shared] += [step.value(y) for x in step.instr.operands[1:] for y in _items(x)]


def _multimem(step: Step) -> None:
    kind = step.instr.parts[1] if len(step.instr.parts) > 1 else ""
    if kind == "ld_reduce":
        return _load(step)
    if kind == "st":
        return _store(step)
    if kind == "red":
        return _atomic(step)
    if kind == "cp":
        for a in step.addresses()[:1]:
            step.access("RW", a, "generic")
        for a in step.addresses()[1:2]:
            step.access("R", a, "generic")
        return None
    return _unknown(step)


def _hint(step: Step) -> None:
    """Prefetches move no data that the program sees; taken as reads. A discard destroys what was there."""
    mode = "W" if step.instr.parts[0] == "discard" else "R"
    tensormap = "tensormap" in step.instr.parts
    last = step.instr.operands[-1] if step.instr.operands else None
    size = (last.value or 0) if mode == "W" and isinstance(last, Imm) else 0
    for a in step.addresses()[:1]:
        step.access("none" if tensormap else mode, a, step.space(), size)


def _texture(step: Step) -> None:
    """A texture or surface handle names memory in a way that no pointer does."""
    for target in results(step.instr):
        step.write(target, step.graph.node("load", [], 4))
    for a in step.addresses()[:1]:
        step.access("handle", a, "generic")
    if not step.addresses() and not step.instr.parts[0].startswith(("txq", "suq")):
        _unknown(step)


def _tensormap(step: Step) -> None:
    """`tensormap.replace` rewrites a descriptor; `tensormap.cp_fenceproxy` copies one from shared memory."""
    a = step.addresses()
    if "replace" in step.instr.parts:
        step.access("RW", a[0], step.space()) if a else _unknown(step)
        values = [step.value(x) for x in step.instr.operands[1:]]
        step.graph.inputs[step.graph.shared] += values
        step.graph.mapped += values if "global_address" in step.instr.parts else []
    elif a:
        step.access("W", a[0], "generic")


def _unknown(step: Step) -> None:
    """Not known what this does: it may do anything with its operands."""
    g = step.graph
    operands = [y for x in step.instr.operands for y in _items(x)]
    given = g.node("piece", [step.value(x) for x in operands] + [g.foreign])
    g.accesses.append(Access("unknown", given, 0, 0, "generic", (step.me.number, step.block), via="opcode"))
    g.everything = True
    for x in operands:
        step.write(x, given)


def _harmless(step: Step) -> None:
    g = step.graph
    inputs = [step.value(y) for x in step.instr.operands for y in _items(x) if not isinstance(x, Address)]
    inputs += [step.value(a) for a in step.addresses()]
    op = step.instr.parts[0]
    if op in ("isspacep", "createpolicy", "mbarrier", "elect"):
        inputs = []
    for target in results(step.instr):
        step.write(target, g.node("piece", list(inputs)))


def _alloca(step: Step) -> None:
    for target in results(step.instr):
        step.write(target, step.graph.once("address", (Variable("alloca", "local", "b8", 0), 0)))


def _compute(step: Step) -> None:
    """Arithmetic, and whatever else has no address."""
    if any(isinstance(x, Address) for x in step.instr.operands):
        return _unknown(step)
    instr, g = step.instr, step.graph
    if not instr.operands:
        return None
    op, kind = instr.parts[0], instr.parts[-1]
    targets = results(instr)
    arguments = [step.value(x) for x in instr.operands[1:]]
    if len(arguments) < _OPERANDS.get(op, 0):
        op = "piece"  # no assembler takes it; the result is made of what there is
    if op == "mov" and isinstance(instr.operands[0], Vector):
        for i, target in enumerate(targets):
            step.write(target, g.node("unpack", list(arguments), (i, width(kind) // max(1, len(targets)))))
        return None
    if op in ("mad", "fma") and len(arguments) >= 3:
        product = g.node("mul", arguments[:2], instr.parts[1:])
        node = g.node("add", [product, arguments[2]], ("lo", "64") if "wide" in instr.parts else instr.parts[1:])
    elif op in ("setp", "set", "testp", "vote", "match"):
        node = g.node("test", arguments, instr.parts)
    elif op == "isspacep":
        node = g.node("test", [], instr.parts)
    elif op == "cvta":
        node = g.node("cvta", arguments, instr.parts[1:])
    elif op == "selp":
        node = g.node("selp", arguments[:3], instr.parts[1:])
    else:
        node = g.node(op if op in _KNOWN else "piece", arguments, instr.parts[1:])
    for target in targets:
        step.write(target, node)
    return None


_KNOWN = _COPIES | _JOINS | _PIECES | frozenset(("add", "sub", "mul", "shl", "shr", "cvt"))
#: Operands behind the result that the rules of these instructions count on.
_OPERANDS = {
    **dict.fromkeys(("mov", "cvta", "cvt", "not", "neg", "abs", "popc", "clz"), 1),
    **dict.fromkeys(("add", "sub", "mul", "shl", "shr", "div", "rem", "and", "or", "xor", "min", "max"), 2),
    **dict.fromkeys(("selp", "bfe", "lop3"), 3), "bfi": 4,
}  # fmt: skip
_HANDLERS: dict[str, Callable[[Step], None]] = {
    "ld": _load, "ldu": _load, "st": _store, "atom": _atomic, "red": _atomic, "cp": _copy_async,
    "wmma": _matrix, "ldmatrix": _matrix, "stmatrix": _matrix, "multimem": _multimem,
    "prefetch": _hint, "prefetchu": _hint, "discard": _hint, "applypriority": _hint, "tensormap": _tensormap,
    "tex": _texture, "tld4": _texture, "txq": _texture, "suld": _texture, "sust": _texture, "sured": _texture,
    "suq": _texture, "alloca": _alloca,
    **{op: _harmless for op in HARMLESS if op not in ("ldmatrix", "applypriority")},
}  # fmt: skip
