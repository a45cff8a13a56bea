"""Instructions of PTX as functions of a thread, for the interpreter of the tests.

Each function returns None, or the `Wait` that stops the thread until others have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ptx_arithmetic as arithmetic
from ptx_text import Func, Op, Unsupported, width

WINDOWS = {"shared": 0x7001 << 32, "local": 0x7002 << 32, "param": 0x7003 << 32, "global": 0, "const": 0}
Step = Callable[[Any], Any]
Get = Callable[[Any], Any]
# Nothing that a launch of one block after another could see.
QUIET = ("membar", "fence", "griddepcontrol", "nanosleep", "pmevent", "brkpt", "setmaxnreg", "prefetch", "prefetchu",
         "applypriority", "createpolicy")  # fmt: skip


@dataclass
class Wait:
    kind: str  # "bar" or "warp"
    key: Any
    mask: int  # lanes; number of threads of a barrier, 0 for all
    value: Any = None
    finish: Callable[[Any, int, dict[int, Any]], None] = lambda t, lane, values: None


def build(machine: Any, function: Func, op: Op) -> Step:
    """One instruction; raises Unsupported only when a thread arrives at one that is not known."""
    try:
        made = _Builder(machine, function, op).build()
    except Unsupported as error:
        reason = str(error)

        def made(t: Any) -> None:
            raise Unsupported(reason)

    if op.guard is None:
        return made
    guard, wanted = op.guard, not op.negated

    def guarded(t: Any) -> Any:
        p = t.r[guard]
        if p is None:
            raise Unsupported("a condition made of a value that is not computed")
        return made(t) if bool(p) == wanted else None

    return guarded


class _Builder:
    def __init__(self, machine: Any, function: Func, op: Op) -> None:
        self.machine, self.function, self.op = machine, function, op
        self.parts, self.operands = op.parts, op.operands

    def unsupported(self) -> Unsupported:
        return Unsupported(f"instruction {'.'.join(self.parts)}")

    def build(self) -> Step:
        name = self.parts[0]
        handler = getattr(self, f"do_{name}", None)
        if name in QUIET or (name == "mbarrier" and "try_wait" not in self.parts and "test_wait" not in self.parts):
            return lambda t: None
        if handler is not None:
            return handler()
        if any(o[0] == "at" for o in self.operands):
            raise self.unsupported()
        return self.assign(arithmetic.compute(self.parts), self.operands[0], self.operands[1:])

    # operands

    def get(self, operand: Any, nbytes: int = 8) -> Get:
        what = operand[0]
        if what == "reg":
            n = operand[1]
            return lambda t: t.r[n]
        if what == "imm":
            x = operand[1]
            if operand[2] and nbytes == 4:  # a decimal number stands for the type it is used as
                x = arithmetic.pattern(arithmetic.value(x, ("f", 64)), ("f", 32))
            return lambda t: x
        if what == "special":
            return special(self.machine, operand[1])
        if what == "not":
            inner = self.get(operand[1])
            return lambda t: None if (x := inner(t)) is None else int(not x)
        if what == "var":
            return self.address_of(*operand[1:])
        if what == "none":
            return lambda t: 0
        raise Unsupported(f"operand {what} of {'.'.join(self.parts)}")

    def address_of(self, v: Any, offset: int) -> Get:
        if v.space == "local":
            return lambda t: int.from_bytes(t.frames[-1].variables[v], "little") + offset
        if v.space == "param" and v not in self.machine.entry.params:
            raise Unsupported("the address of a parameter of a function")
        return lambda t: v.at + offset

    def put(self, operand: Any) -> Callable[[Any, Any], None]:
        if operand[0] == "none":
            return lambda t, x: None
        if operand[0] != "reg":
            raise self.unsupported()
        n = operand[1]

        def write(t: Any, x: Any) -> None:
            t.r[n] = x

        return write

    def assign(self, f: Callable[..., int], target: Any, sources: list[Any]) -> Step:
        size = width(self.parts[-1])
        put, gets = self.put(target), [self.get(s, size) for s in sources]

        def run(t: Any) -> None:
            values = [g(t) for g in gets]
            put(t, None if None in values else f(*values))

        return run

    def items(self, operand: Any) -> list[Any]:
        return operand[1] if operand[0] == "list" else [operand]

    def size(self) -> int:
        found = width(self.parts[-1])
        if not found:
            raise self.unsupported()
        return found

    def space(self, first: int = 1) -> str:
        for part in self.parts[first:]:
            if part.split("::")[0] in WINDOWS:
                return part.split("::")[0]
        return "generic"

    def where(self, operand: Any, space: str) -> tuple[Get, str]:
        """The address of an operand, and the space that it counts in."""
        inner, offset = operand[1], operand[2]
        if inner[0] == "var":
            space = inner[1].space if space == "generic" else space
        get = self.get(inner)
        return (lambda t: None if (x := get(t)) is None else x + offset), space

    # values

    def do_mov(self) -> Step:
        to, source = self.operands
        if to[0] == "list":
            each = width(self.parts[-1]) * 8 // len(to[1])
            puts, get = [self.put(x) for x in to[1]], self.get(source)

            def unpack(t: Any) -> None:
                x = get(t)
                for i, put in enumerate(puts):
                    put(t, None if x is None else x >> each * i & ((1 << each) - 1))

            return unpack
        if source[0] == "list":
            each = width(self.parts[-1]) * 8 // len(source[1])
            return self.assign(
                lambda *xs: sum((x & ((1 << each) - 1)) << each * i for i, x in enumerate(xs)), to, source[1]
            )
        mask = (1 << 8 * self.size()) - 1
        return self.assign(lambda x: x & mask, to, [source])

    def do_cvt(self) -> Step:
        return self.assign(arithmetic.convert(self.parts), self.operands[0], self.operands[1:])

    def do_cvta(self) -> Step:
        base = WINDOWS[self.space()]
        sign = -1 if "to" in self.parts else 1
        return self.assign(lambda x: x + sign * base & ((1 << 64) - 1), self.operands[0], self.operands[1:])

    def do_isspacep(self) -> Step:
        window = WINDOWS[self.space()] >> 32
        return self.assign(lambda x: int(x >> 32 == window if window else x >> 32 < 0x7001), *_rest(self.operands))

    def do_setp(self) -> Step:
        k = arithmetic.kinds(self.parts)[-1]
        test = arithmetic.compare(self.parts, k)
        to = self.operands[0]
        targets = to[1:] if to[0] == "pair" else (to, ("none",))
        first, second = (self.put(x) for x in targets)
        gets = [self.get(x, k[1] // 8) for x in self.operands[1:]]
        join = self.parts[2] if self.parts[2] in ("and", "or", "xor") else ""
        combine = {"and": lambda a, b: a and b, "or": lambda a, b: a or b, "xor": lambda a, b: a != b}.get(join)

        def run(t: Any) -> None:
            values = [g(t) for g in gets]
            if None in values:
                first(t, None)
                second(t, None)
                return
            yes, no = (x := test(*values[:2])), not x
            if combine is not None:
                yes, no = combine(yes, bool(values[2])), combine(no, bool(values[2]))
            first(t, int(yes))
            second(t, int(no))

        return run

    def do_selp(self) -> Step:
        put = self.put(self.operands[0])
        a, b, p = (self.get(x, width(self.parts[-1])) for x in self.operands[1:])

        def run(t: Any) -> None:
            chosen = p(t)
            put(t, None if chosen is None else a(t) if chosen else b(t))

        return run

    # control

    def do_bra(self) -> Step:
        label, labels = self.operands[-1][1], self.function.labels

        def run(t: Any) -> None:
            t.frames[-1].pc = labels[label]

        return run

    def do_brx(self) -> Step:
        get = self.get(self.operands[0])
        targets, labels = self.function.targets[self.operands[1][1]], self.function.labels

        def run(t: Any) -> None:
            t.frames[-1].pc = labels[targets[get(t)]]

        return run

    def do_ret(self) -> Step:
        return lambda t: t.leave()

    def do_exit(self) -> Step:
        def run(t: Any) -> None:
            t.done = True

        return run

    def do_trap(self) -> Step:
        raise Unsupported("trap")

    def do_call(self) -> Step:
        operands = list(self.operands)
        back = self.items(operands.pop(0)) if operands[0][0] == "list" else []
        target = operands.pop(0)
        given = self.items(operands[0]) if operands else []
        if target[0] != "function":
            raise Unsupported("an indirect call")
        name = target[1]
        if name == "vprintf":
            return self.printed(back)
        if name not in self.machine.program.functions or self.machine.program.functions[name].ops is None:
            raise Unsupported(f"function {name} without a body")
        function = self.machine.program.functions[name]
        gets = [self.argument(x) for x in given]
        results = [(x[0], x[1]) for x in back]

        def run(t: Any) -> None:
            t.enter(function, [g(t) for g in gets], results)

        return run

    def argument(self, operand: Any) -> Get:
        if operand[0] == "var":
            v = operand[1]
            return lambda t: t.frames[-1].variables.setdefault(v, bytearray(v.nbytes))
        return self.get(operand)

    def printed(self, back: list[Any]) -> Step:
        def run(t: Any) -> None:
            for what, v in ((x[0], x[1]) for x in back):
                if what == "var":
                    t.frames[-1].variables[v] = bytearray(v.nbytes)

        return run

    def do_bar(self) -> Step:
        if "warp" in self.parts:
            return self.warp(self.operands[0], [], lambda t, lane, values: None)
        if "arrive" in self.parts or "red" in self.parts or "cluster" in self.parts:
            raise self.unsupported()
        gets = [self.get(x) for x in self.operands]
        return lambda t: Wait("bar", gets[0](t) if gets else 0, gets[1](t) if len(gets) > 1 else 0)

    do_barrier = do_bar

    # warps

    def warp(self, mask: Any, sources: list[Any], finish: Callable[[Any, int, dict[int, Any]], None]) -> Step:
        gets, mask_of, key = [self.get(x, width(self.parts[-1])) for x in sources], self.get(mask), id(self.op)

        def run(t: Any) -> Wait:
            return Wait("warp", key, mask_of(t) & 0xFFFFFFFF, [g(t) for g in gets], finish)

        return run

    def do_shfl(self) -> Step:
        to, source, how, clamp, mask = self.operands
        put, valid = (self.put(x) for x in (to[1:] if to[0] == "pair" else (to, ("none",))))
        mode = self.parts[2]

        def finish(t: Any, lane: int, values: dict[int, Any]) -> None:
            _, n, c = values[lane]
            segment = c >> 8 & 31
            most, n = (lane & segment) | (c & 31 & ~segment), n & 31
            least = lane & segment
            at = {"bfly": lane ^ n, "up": lane - n, "down": lane + n, "idx": least | (n & ~segment)}[mode]
            inside = at >= (c & 31 | least) if mode == "up" else at <= most
            at = at if inside else lane
            put(t, values[at][0] if at in values else None)
            valid(t, int(inside))

        return self.warp(mask, [source, how, clamp], finish)

    def do_vote(self) -> Step:
        put, mode = self.put(self.operands[0]), self.parts[2]

        def finish(t: Any, lane: int, values: dict[int, Any]) -> None:
            yes = {n: bool(v[0]) for n, v in values.items()}
            ballot = sum(1 << n for n, y in yes.items() if y)
            put(t, {"ballot": ballot, "all": int(all(yes.values())), "any": int(any(yes.values())),
                    "uni": int(len(set(yes.values())) == 1)}[mode])  # fmt: skip

        return self.warp(self.operands[2], [self.operands[1]], finish)

    def do_redux(self) -> Step:
        put = self.put(self.operands[0])
        f = arithmetic.compute((self.parts[2], self.parts[-1]))

        def finish(t: Any, lane: int, values: dict[int, Any]) -> None:
            total, *more = (v[0] for v in values.values())
            for x in more:
                total = f(total, x)
            put(t, total)

        return self.warp(self.operands[2], [self.operands[1]], finish)

    def do_elect(self) -> Step:
        put, chosen = (self.put(x) for x in self.operands[0][1:])

        def finish(t: Any, lane: int, values: dict[int, Any]) -> None:
            put(t, min(values))
            chosen(t, int(lane == min(values)))

        return self.warp(self.operands[1], [], finish)

    def do_activemask(self) -> Step:
        return self.assign(lambda: 0xFFFFFFFF, self.operands[0], [])

    def __getattr__(self, name: str) -> Any:
        """Instructions that touch memory are in a module of their own."""
        import ptx_memory

        handler = ptx_memory.HANDLERS.get(name.removeprefix("do_")) if name.startswith("do_") else None
        if handler is None:
            raise AttributeError(name)
        return lambda: handler(self)


def _rest(operands: list[Any]) -> tuple[Any, list[Any]]:
    return operands[0], operands[1:]


def special(machine: Any, name: str) -> Get:
    """A predefined register."""
    word, _, axis = name.lstrip("%").partition(".")
    i = "xyz".find(axis) if axis else -1
    sizes = {"ntid": machine.block, "nctaid": machine.grid, "cluster_nctaid": machine.cluster,
             "nclusterid": tuple(g // c for g, c in zip(machine.grid, machine.cluster, strict=True))}  # fmt: skip
    cluster = machine.cluster
    if word in sizes and i >= 0:
        return lambda t: sizes[word][i]
    x, y, z = cluster
    simple: dict[str, Get] = {
        "laneid": lambda t: t.number % 32, "warpid": lambda t: t.number // 32, "WARP_SZ": lambda t: 32,
        "nwarpid": lambda t: -(-len(t.block.threads) // 32), "smid": lambda t: 0, "nsmid": lambda t: 1,
        "gridid": lambda t: 1, "clock": lambda t: machine.steps & 0xFFFFFFFF, "clock64": lambda t: machine.steps,
        "globaltimer": lambda t: machine.steps, "lanemask_lt": lambda t: (1 << t.number % 32) - 1,
        "lanemask_eq": lambda t: 1 << t.number % 32, "lanemask_le": lambda t: (2 << t.number % 32) - 1,
        "lanemask_gt": lambda t: 0xFFFFFFFF & -(2 << t.number % 32),
        "lanemask_ge": lambda t: 0xFFFFFFFF & -(1 << t.number % 32),
        "is_explicit_cluster": lambda t: int(x * y * z > 1), "cluster_nctarank": lambda t: x * y * z,
        "cluster_ctarank": lambda t: t.block.ctaid[0] % x + x * (t.block.ctaid[1] % y + y * (t.block.ctaid[2] % z)),
    }  # fmt: skip
    if word in simple:
        return simple[word]
    by_axis: dict[str, Get] = {
        "tid": lambda t: t.tid[i], "ctaid": lambda t: t.block.ctaid[i],
        "cluster_ctaid": lambda t: t.block.ctaid[i] % cluster[i], "clusterid": lambda t: t.block.ctaid[i] // cluster[i],
    }  # fmt: skip
    if word in by_axis and i >= 0:
        return by_axis[word]
    raise Unsupported(f"register {name}")
