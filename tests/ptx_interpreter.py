"""A small interpreter of PTX: runs a launch thread by thread and records the bytes that it reads and writes.

Independent of the package: what it observes is held against what the static analysis says. Threads of a block run
one after another up to a barrier or a warp operation; blocks run one after another. Values that it does not compute
(products of tensor cores, say) are None: they may be stored, but never used as an address or a condition. What it
cannot run raises `Unsupported` with the reason; a program that leaves its buffers or does not end raises `Fault`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ptx_instructions as instructions
from ptx_text import Func, Program, Unsupported, Var, read

Triple = tuple[int, int, int]
MARGIN = 1 << 19  # bytes before and behind every buffer that still count as its own
WINDOW = 1 << 32  # each region of generic memory has a window of its own
SHARED, LOCAL, PARAM = 0x7001, 0x7002, 0x7003
MAX_STEPS = 3_000_000  # instructions of all threads


class Fault(Exception):
    """The program does something that no launch may do."""


@dataclass
class Region:
    """Memory with one name; `origin` is where the pointer that was passed points to."""

    name: str
    data: bytearray
    origin: int
    read: bytearray = field(default_factory=bytearray)
    written: bytearray = field(default_factory=bytearray)
    unknown: set[int] = field(default_factory=set)  # positions whose value was not computed
    maps: set[str] = field(default_factory=set)  # directions of the tensor maps that stand for this parameter

    def __post_init__(self) -> None:
        self.read, self.written = bytearray(len(self.data)), bytearray(len(self.data))

    def observed(self) -> tuple[str, int, int, int]:
        """(mode, first byte, end, number of distinct bytes), counted from the pointer."""
        r, w = np.frombuffer(self.read, np.uint8), np.frombuffer(self.written, np.uint8)
        at = np.flatnonzero(r | w)
        mode = ("R" if r.any() else "") + ("W" if w.any() else "")
        mode = "".join(sorted(set(mode) | {c for m in self.maps for c in m}))
        if not len(at):
            return mode or "none", 0, 0, 0
        return mode, int(at[0]) - self.origin, int(at[-1]) + 1 - self.origin, len(at)


@dataclass
class Frame:
    function: Func
    code: list[Callable[[Thread], Any]]
    registers: list[int | None]
    variables: dict[Var, bytearray]
    pc: int = 0
    results: list[Any] = field(default_factory=list)  # where the caller wants them
    base: int = 0  # of its local variables


class Thread:
    """One thread: its frames, its local memory, what it waits for."""

    def __init__(self, block: Block, tid: Triple, number: int) -> None:
        self.block, self.tid, self.number = block, tid, number
        self.machine = block.machine
        self.local = Region("local", bytearray(1 << 14), 0)
        self.top = 0
        self.frames: list[Frame] = []
        self.r: list[int | None] = []
        self.done = False
        self.wait: Any = None
        self.enter(block.machine.entry, [], [])

    def enter(self, function: Func, values: list[bytes | int | None], results: list[Any]) -> None:
        """Call a function; bytes fill parameters in memory, numbers those in registers."""
        if len(self.frames) > 200:
            raise Fault("calls without end")
        frame = Frame(function, self.machine.code(function), [0] * (function.count + 1), {}, results=results)
        frame.base = self.top
        for v in function.local:
            self.top = -(-self.top // v.align) * v.align
            frame.variables[v] = self.top.to_bytes(8, "little")  # type: ignore[assignment]
            self.top += v.nbytes
        for v, given in zip(function.params, values, strict=False):
            if v.space == "reg":
                frame.registers[function.registers[v.name]] = given  # type: ignore[assignment]
            else:
                frame.variables[v] = bytearray(given)  # type: ignore[arg-type]
        for v in function.results:
            frame.variables[v] = bytearray(v.nbytes)
        self.frames.append(frame)
        self.r = frame.registers

    def leave(self) -> None:
        frame = self.frames.pop()
        if not self.frames:
            self.done = True
            return
        self.top, self.r = frame.base, self.frames[-1].registers
        for v, (what, where) in zip(frame.function.results, frame.results, strict=False):
            if what == "reg":
                self.r[where] = (
                    frame.registers[frame.function.registers[v.name]]
                    if v.space == "reg"
                    else int.from_bytes(frame.variables[v], "little")
                )
            else:
                self.frames[-1].variables[where] = bytearray(frame.variables[v])

    def run(self) -> None:
        """Up to the next barrier or warp operation, or to the end."""
        while not self.done:
            frame = self.frames[-1]
            if frame.pc >= len(frame.code):
                self.leave()
                continue
            frame.pc += 1
            self.machine.steps += 1
            self.wait = frame.code[frame.pc - 1](self)
            if self.wait is not None:
                return
            if self.machine.steps > self.machine.limit:
                raise Fault("the program does not end")


class Block:
    def __init__(self, machine: Machine, ctaid: Triple) -> None:
        self.machine, self.ctaid = machine, ctaid
        self.shared = Region("shared", bytearray(1 << 18), 0)
        x, y, z = machine.block
        self.threads = [Thread(self, (i % x, i // x % y, i // (x * y)), i) for i in range(x * y * z)]

    def run(self) -> None:
        while live := [t for t in self.threads if not t.done]:
            for t in live:
                if t.wait is None:
                    t.run()
            live = [t for t in self.threads if not t.done]
            if live and not self.release(live):
                raise Fault("threads wait for each other without end")

    def release(self, live: list[Thread]) -> bool:
        """Let go whoever has all the partners that it waits for."""
        moved = False
        for number in {t.wait.key for t in live if t.wait.kind == "bar"}:
            here = [t for t in live if t.wait.kind == "bar" and t.wait.key == number]
            if len(here) == (here[0].wait.mask or len(live)):
                for t in here:
                    t.wait, moved = None, True
        for warp in {t.number // 32 for t in live}:
            lanes = {t.number % 32: t for t in live if t.number // 32 == warp}
            for t in list(lanes.values()):
                if t.wait is None or t.wait.kind != "warp":
                    continue
                wanted = {n for n in lanes if t.wait.mask >> n & 1}
                group = {n: lanes[n] for n in wanted if lanes[n].wait and lanes[n].wait.key == t.wait.key}
                if len(group) == len(wanted):
                    values = {n: x.wait.value for n, x in group.items()}
                    for n, x in group.items():
                        x.wait.finish(x, n, values)
                        x.wait, moved = None, True
        return moved


class Machine:
    """One launch. `buffers` are the bytes behind pointers, by parameter or `parameter+offset`; `hidden` is memory
    that no parameter names, whose address the buffers may hold; `numbers` are the other parameters."""

    def __init__(
        self, program: Program, entry: str, grid: Triple, block: Triple, buffers: Mapping[str, bytes],
        numbers: Mapping[str, int] | None = None, hidden: bytes = b"", cluster: Triple = (1, 1, 1),
        limit: int = MAX_STEPS,
    ) -> None:  # fmt: skip
        self.program, self.entry = program, program.functions[entry]
        self.grid, self.block, self.cluster = grid, block, cluster
        self.regions: dict[int, Region] = {}
        self.addresses: dict[str, int] = {}
        self.steps, self.limit = 0, limit
        self.opaque: set[str] = set()  # instructions whose values are not computed
        self.compiled: dict[str, list[Callable[[Thread], Any]]] = {}
        for name, data in {**buffers, "*": hidden or bytes(256)}.items():
            self.place(name, data, MARGIN)
        self.regions[0] = Region("*", bytearray(1 << 13), 0)  # what small numbers as addresses mean
        self.shared_size = 0
        self.public: set[str] = set()  # module variables that other modules can name
        for v in program.variables.values():
            self.variable(v)
        for f in program.functions.values():
            for v in f.shared:
                self.variable(v)
        self.params = bytearray()
        self.names: dict[int, str] = {}  # offset in the parameter block → the pointer that lies there
        self.fill(numbers or {})

    def place(self, name: str, data: bytes, margin: int) -> int:
        number = max(self.regions, default=0) + 1
        self.regions[number] = Region(name, bytearray(margin) + data + bytearray(margin), margin)
        self.addresses[name] = number * WINDOW + margin
        return self.addresses[name]

    def variable(self, v: Var) -> None:
        if v.space == "shared":
            self.shared_size = -(-self.shared_size // v.align) * v.align
            v.at, self.shared_size = self.shared_size, self.shared_size + v.nbytes
        else:
            data = bytearray(v.initial.ljust(max(v.nbytes, 8), b"\0"))
            for at, symbol in v.symbols:
                data[at : at + 8] = self.addresses[f"${symbol}"].to_bytes(8, "little")
            v.at = self.place(f"${v.name}", bytes(data), 0)
            if v.space == "global" and v.visible:
                self.public.add(f"${v.name}")

    def fill(self, numbers: Mapping[str, int]) -> None:
        for v in self.entry.params:
            v.at = -(-len(self.params) // v.align) * v.align
            self.params += bytes(v.at + v.nbytes - len(self.params))
            for offset in range(0, v.nbytes, 4):
                for name in (f"{v.name}+{offset}", *([v.name] if offset == 0 else [])):
                    wide = name in self.addresses or v.nbytes == 8 or f"{v.name}+{offset + 4}" not in numbers
                    size = min(8 if wide else 4, v.nbytes - offset)
                    given = self.addresses.get(name, numbers.get(name))
                    if given is not None:
                        value = given & ((1 << 8 * size) - 1)
                        self.params[v.at + offset : v.at + offset + size] = value.to_bytes(size, "little")

    def code(self, function: Func) -> list[Callable[[Thread], Any]]:
        if function.name not in self.compiled:
            if function.ops is None:
                raise Unsupported(f"function {function.name} without a body")
            self.compiled[function.name] = made = []
            made += [instructions.build(self, function, op) for op in function.ops]
        return self.compiled[function.name]

    def run(self) -> Machine:
        x, y, z = self.grid
        for i in range(x * y * z):
            Block(self, (i % x, i // x % y, i // (x * y))).run()
        return self

    # memory

    def find(self, t: Thread, space: str, address: int | None, nbytes: int) -> tuple[Region, int]:
        """The region and the position in it that an address of a state space means."""
        if address is None:
            raise Unsupported("an address made of a value that is not computed")
        if space in ("shared", "local"):
            region, at = (t.block.shared if space == "shared" else t.local), address & (WINDOW - 1)
        else:
            window, at = address // WINDOW, address % WINDOW
            special = {SHARED: t.block.shared, LOCAL: t.local}.get(window)
            found = special or self.regions.get(window)
            if window == PARAM:
                return Region("", self.params, 0), at
            if found is None:
                raise Fault(f"address {address:#x} lies in no buffer")
            region = found
        if at + nbytes > len(region.data):
            raise Fault(f"byte {at - region.origin} lies outside {region.name}")
        return region, at

    def load(self, t: Thread, space: str, address: int | None, nbytes: int) -> int | None:
        region, at = self.find(t, space, address, nbytes)
        region.read[at : at + nbytes] = b"\1" * nbytes
        if region.unknown and not region.unknown.isdisjoint(range(at, at + nbytes)):
            return None
        return int.from_bytes(region.data[at : at + nbytes], "little")

    def store(self, t: Thread, space: str, address: int | None, nbytes: int, value: int | None) -> None:
        region, at = self.find(t, space, address, nbytes)
        region.written[at : at + nbytes] = b"\1" * nbytes
        if value is None:
            region.unknown.update(range(at, at + nbytes))
            return
        if region.unknown:
            region.unknown.difference_update(range(at, at + nbytes))
        region.data[at : at + nbytes] = (value & ((1 << 8 * nbytes) - 1)).to_bytes(nbytes, "little")

    # answers

    def observed(self) -> dict[str, tuple[str, int, int, int]]:
        """(mode, first byte, end, distinct bytes) of every pointer parameter that was touched; under "*" the mode
        of memory that none names: module variables that are written or public, addresses that lay in memory."""
        out: dict[str, tuple[str, int, int, int]] = {}
        for region in self.regions.values():
            seen = region.observed()
            if seen[0] == "none" or (region.name[0] == "$" and region.name not in self.public and "W" not in seen[0]):
                continue
            name = "*" if region.name[0] in "$*" else region.name
            mode = "".join(sorted(set(seen[0]) | set(out.get(name, ("",))[0])))
            out[name] = (mode, *seen[1:])
        return out

    def contents(self, name: str, dtype: str, count: int) -> np.ndarray[Any, Any]:
        region = self.regions[self.addresses[name] // WINDOW]
        return np.frombuffer(bytes(region.data), dtype, count, region.origin)


def launch(text: str, entry: str, grid: Triple, block: Triple, buffers: Mapping[str, bytes], **more: Any) -> Machine:
    """Run one launch of a PTX text."""
    return Machine(read(text), entry, grid, block, buffers, **more).run()
