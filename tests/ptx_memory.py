"""Instructions of PTX that touch memory, for the interpreter of the tests."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ptx_arithmetic as arithmetic
from ptx_text import Unsupported, width

Step = Callable[[Any], Any]


def _parameter(b: Any, operand: Any) -> Callable[[Any], tuple[bytearray, int]] | None:
    """Where `[name + offset]` in parameter space lies; None if the operand is no parameter's name."""
    inner, offset = operand[1], operand[2]
    if inner[0] != "var" or inner[1].space != "param":
        return None
    v, at = inner[1], inner[2] + offset
    if v in b.machine.entry.params:
        return lambda t: (b.machine.params, v.at + at)
    return lambda t: (t.frames[-1].variables.setdefault(v, bytearray(v.nbytes)), at)


def _load(b: Any) -> Step:
    size = b.size()
    puts = [b.put(x) for x in b.items(b.operands[0])]
    k = arithmetic.kinds(b.parts)[-1]
    bits = 32 if size < 4 and k[0] == "s" else size * 8
    place = _parameter(b, b.operands[1])

    def widened(x: int | None) -> int | None:
        return x if x is None or k[0] != "s" else int(arithmetic.value(x, k)) & ((1 << bits) - 1)

    if place is not None:

        def from_parameters(t: Any) -> None:
            data, at = place(t)
            for i, put in enumerate(puts):
                put(t, widened(int.from_bytes(data[at + i * size : at + (i + 1) * size], "little")))

        return from_parameters
    get, space = b.where(b.operands[1], b.space())
    space = "generic" if space in ("global", "const") else space
    load = b.machine.load
    if space == "param":
        space, get = "generic", _moved(get, 0x7003 << 32)

    def run(t: Any) -> None:
        address = get(t)
        for i, put in enumerate(puts):
            put(t, widened(load(t, space, None if address is None else address + i * size, size)))

    return run


def _moved(get: Callable[[Any], Any], by: int) -> Callable[[Any], Any]:
    return lambda t: None if (x := get(t)) is None else (x & ((1 << 32) - 1)) + by


def _store(b: Any) -> Step:
    size = b.size()
    gets = [b.get(x, size) for x in b.items(b.operands[1])]
    place = _parameter(b, b.operands[0])
    if place is not None:

        def into_parameters(t: Any) -> None:
            data, at = place(t)
            for i, get in enumerate(gets):
                x = get(t)
                if x is None:
                    raise Unsupported("a value that is not computed as an argument")
                data[at + i * size : at + (i + 1) * size] = (x & ((1 << 8 * size) - 1)).to_bytes(size, "little")

        return into_parameters
    where, space = b.where(b.operands[0], b.space())
    space = "generic" if space in ("global", "const") else space
    store = b.machine.store

    def run(t: Any) -> None:
        address = where(t)
        for i, get in enumerate(gets):
            store(t, space, None if address is None else address + i * size, size, get(t))

    return run


def _atomic(b: Any) -> Step:
    """`atom`, `red`, `multimem.red`: element by element."""
    place = next(i for i, x in enumerate(b.operands) if x[0] == "at")
    size = b.size()
    given = [[b.get(y, size) for y in b.items(x)] for x in b.operands[place + 1 :]]
    puts = [b.put(y) for x in b.operands[:place] for y in b.items(x)]
    names = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    how = next((p for p in b.parts[1:] if p in names), "")
    if not how:
        raise b.unsupported()
    k = arithmetic.kinds(b.parts)[-1]
    plain = None if how in ("exch", "cas", "inc", "dec") else arithmetic.compute((how, f"{k[0]}{k[1]}"))
    where, space = b.where(b.operands[place], b.space())
    space = "generic" if space == "global" else space
    machine = b.machine

    def changed(old: int, *x: int) -> int:
        if plain is not None:
            return plain(old, x[0])
        if how == "cas":
            return x[1] if old == x[0] & ((1 << 8 * size) - 1) else old
        if how == "exch":
            return x[0]
        return (0 if old >= x[0] else old + 1) if how == "inc" else (x[0] if old == 0 or old > x[0] else old - 1)

    def run(t: Any) -> None:
        address = where(t)
        for i in range(len(given[0])):
            at = None if address is None else address + i * size
            old, values = machine.load(t, space, at, size), [g[i](t) for g in given]
            machine.store(t, space, at, size, None if old is None or None in values else changed(old, *values))
            if puts:
                puts[i](t, old)

    return run


def _copy(b: Any) -> Step:
    """`cp.async`, `cp.async.bulk`, `cp.reduce.async.bulk`: done at once."""
    if "commit_group" in b.parts or "wait_group" in b.parts or "wait_all" in b.parts or "arrive" in b.parts:
        return lambda t: None
    if "tensor" in b.parts:
        return _tensor(b)
    spaces = [p.split("::")[0] for p in b.parts[1:] if p.split("::")[0] in ("shared", "global")]
    if len(spaces) != 2 or "prefetch" in b.parts or "multicast::cluster" in b.parts:
        raise b.unsupported()
    to, source = (b.where(x, s)[0] for x, s in zip(b.operands[:2], spaces, strict=True))
    kinds = ["generic" if s == "global" else s for s in spaces]
    sizes = [b.get(x) for x in b.operands[2:4] if x[0] != "at"]
    reduce, machine, bulk = "reduce" in b.parts, b.machine, "bulk" in b.parts

    def run(t: Any) -> None:
        nbytes, at, start = sizes[0](t), to(t), source(t)
        given = nbytes if bulk or len(sizes) < 2 else sizes[1](t)
        if reduce:
            machine.load(t, kinds[0], at, nbytes)
            machine.store(t, kinds[0], at, nbytes, None)
        elif nbytes:
            machine.store(t, kinds[0], at, nbytes, machine.load(t, kinds[1], start, given) if given else 0)

    return run


def _tensor(b: Any) -> Step:
    """A copy by a tensor map: which parameter the map is; the bytes of its tensor are not known."""
    first = next(p.split("::")[0] for p in b.parts[1:] if p.split("::")[0] in ("shared", "global"))
    mode = "R" if first == "shared" else "RW" if "reduce" in b.parts else "W"
    get, _ = b.where(next(x for x in b.operands if x[0] == "at" and (first == "global" or x is not b.operands[0])), "")
    machine = b.machine

    def run(t: Any) -> None:
        address = get(t)
        if address >> 32 != 0x7003:
            machine.load(t, "generic", address, 128)
            machine.regions[machine.addresses["*"] >> 32].maps.add(mode)
            return
        at = address & 0xFFFFFFFF
        v = next(v for v in machine.entry.params if v.at <= at < v.at + v.nbytes)
        name = v.name if v.nbytes <= 128 else f"{v.name}+{at - v.at}"
        if name not in machine.addresses:
            machine.place(name, b"", 0)
        machine.regions[machine.addresses[name] >> 32].maps.add(mode)

    return run


def _fragment(b: Any) -> Step:
    """`wmma`: the bytes of loads and stores; products are not computed."""
    what = b.parts[1]
    if what == "mma":
        return _not_computed(b, b.items(b.operands[0]))
    shape = next(re.fullmatch(r"m(\d+)n(\d+)k(\d+)", p) for p in b.parts if re.fullmatch(r"m\d+n\d+k\d+", p))
    m, n, k = (int(x) for x in shape.groups())  # type: ignore[union-attr]
    lines, length = {"a": (m, k), "b": (k, n)}.get(b.parts[2], (m, n))
    if "col" in b.parts:
        lines, length = length, lines
    size = width(b.parts[-1])
    address, data = (0, 1) if what == "store" else (1, 0)
    where, space = b.where(b.operands[address], b.space())
    space = "generic" if space == "global" else space
    stride = b.get(b.operands[2]) if len(b.operands) > 2 else lambda t: length
    puts = [b.put(x) for x in b.items(b.operands[data])] if what == "load" else []
    machine = b.machine
    machine.opaque.add("wmma")

    def run(t: Any) -> None:
        start = where(t)
        for i in range(lines):
            at = start + i * stride(t) * size
            if what == "load":
                machine.load(t, space, at, length * size)
            else:
                machine.store(t, space, at, length * size, None)
        for put in puts:
            put(t, None)

    return run


def _not_computed(b: Any, targets: list[Any]) -> Step:
    puts = [b.put(x) for x in targets]
    b.machine.opaque.add(b.parts[0])

    def run(t: Any) -> None:
        for put in puts:
            put(t, None)

    return run


def _group_product(b: Any) -> Step:
    if b.parts[1] != "mma_async":
        return lambda t: None
    return _not_computed(b, b.items(b.operands[0]))


def _matrix(b: Any) -> Step:
    """`ldmatrix` and `stmatrix`: rows of 16 bytes in shared memory, one address a lane."""
    if b.parts[0] == "ldmatrix":
        return _not_computed(b, b.items(b.operands[0]))
    rows = 8 * len(b.items(b.operands[1]))
    where, _ = b.where(b.operands[0], "shared")
    machine = b.machine

    def run(t: Any) -> None:
        if t.number % 32 < rows:
            machine.store(t, "shared", where(t), 16, None)

    return run


def _multicast(b: Any) -> Step:
    handler = {"ld_reduce": _load, "st": _store, "red": _atomic}.get(b.parts[1])
    if handler is None:
        raise b.unsupported()
    return handler(b)


def _discard(b: Any) -> Step:
    where, _ = b.where(b.operands[0], "generic")
    size = b.get(b.operands[1])
    return lambda t: b.machine.store(t, "generic", where(t), size(t), 0)


def _waited(b: Any) -> Step:
    """`mbarrier.try_wait`, `mbarrier.test_wait`: copies are done at once, so the phase is over."""
    put = b.put(b.operands[0])
    return lambda t: put(t, 1)


HANDLERS: dict[str, Callable[[Any], Step]] = {
    "ld": _load, "ldu": _load, "st": _store, "atom": _atomic, "red": _atomic, "cp": _copy, "wmma": _fragment,
    "mma": lambda b: _not_computed(b, b.items(b.operands[0])), "wgmma": _group_product, "ldmatrix": _matrix,
    "stmatrix": _matrix, "multimem": _multicast, "discard": _discard, "mbarrier": _waited,
}  # fmt: skip
