"""The answer per entry: a mode for every pointer a parameter can hold.

Modes are *may* modes: `R` and `W` name what can happen at most, `none` is proven, `unknown` promises nothing.
Under "*" stands `unknown` when the entry touches memory that no parameter names: through a pointer loaded
from memory, through a module variable that other kernels can see or that is written, through a function
whose body is not there, through an address made of numbers, or by an instruction that is not known here.
Through such memory the entry may come back to a pointer that it has stored itself, or put into a tensor map: this
parameter is `unknown` then.
Tables that only this module can name and no entry writes are constants, as `.const` variables are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tesserasim.deps.ptx.graph import Access, Graph
from tesserasim.deps.ptx.model import Function, Module, Variable
from tesserasim.deps.ptx.origins import FOREIGN, FUNCTION, LOCAL, MODES, NAMES, SHARED, Origin, Origins
from tesserasim.deps.ptx.parse import parse
from tesserasim.files import path_text, read_bytes

EVERYTHING = "*"


@dataclass
class KernelEffects:
    """What one entry may do."""

    entry: str
    modes: dict[str, str]  # parameter or parameter+offset → mode; "*" if memory without a name is touched
    graph: Graph
    origins: Origins


def analyse_file(path: str | os.PathLike[str]) -> dict[str, KernelEffects]:
    """Analyse a PTX file; raises InputError (`file:line: what`) if it is malformed or cannot be read."""
    return analyse(read_bytes(path, "PTX file").decode("utf-8", errors="replace"), path_text(path))


def analyse(text: str, name: str = "<ptx>") -> dict[str, KernelEffects]:
    """Analyse PTX text, per entry in the order of the text."""
    module = parse(text, name)
    effects = {e.name: _Entry(module, e) for e in module.entries}
    written = {v for e in effects.values() for v in e.written}
    return {n: KernelEffects(n, e.modes(written), e.graph, e.origins) for n, e in effects.items()}


def modes(text: str, name: str = "<ptx>") -> dict[str, dict[str, str]]:
    """`{entry: {parameter: mode}}`, as `deps FILE.ptx --json` prints it."""
    return {n: e.modes for n, e in analyse(text, name).items()}


class _Entry:
    def __init__(self, module: Module, entry: Function) -> None:
        self.entry = entry
        self.graph = Graph(module, entry)
        self.origins = Origins(self.graph)
        self.found: dict[Origin, int] = {}
        self.maps: dict[str, int] = {}
        self.everything = self.graph.everything
        self.read: set[Variable] = set()
        self.written: set[Variable] = set()
        for a in self.graph.accesses:
            self._apply(a)
        for i in self._escaping():
            self.written.update(o.variable for o in self.origins.origins(i & self.origins.module))
        self.everything |= self.graph.everything

    def _escaping(self) -> list[int]:
        """Origins of values that are stored where another thread may pick them up, or given away."""
        values = self.origins.values
        return [d | s | p | q | r for a in self.graph.accesses for n in a.value for d, s, p, q, _, r in (values[n],)]

    def _given(self) -> frozenset[Origin]:
        """Origins of values that are put into memory of the GPU or into a tensor map."""
        nodes = [n for a in self.graph.accesses if a.space not in ("shared", "local", "param") for n in a.value]
        whole = parts = 0
        for n in (*nodes, *self.graph.mapped):
            d, s, p, q, _, r = self.origins.values[n]
            whole, parts = whole | d | p, parts | s | q | r
        size = self.graph.module.pointer_bytes
        wide = [o for o in self.origins.origins(parts) if o.variable.nbytes >= size]  # others are numbers
        return frozenset([*self.origins.origins(whole), *wide])

    def _apply(self, a: Access) -> None:
        if a.mode == "none" or a.space in ("shared", "local", "const", "param"):
            return
        reach = self.origins.base(a.address)
        if a.mode == "map":
            self._tensor_map(a, reach)
            return
        mode = MODES["unknown"] if a.mode in ("unknown", "handle") else MODES[a.mode]
        if a.via == "call":
            d, s, p, q, _, r = self.origins.values[a.address]
            reach = d | s | p | q | r if a.mode == "unknown" else d | p
        elif reach & (FOREIGN | FUNCTION) or not reach or (a.space == "global" and reach & (SHARED | LOCAL)):
            self.everything = True
        for origin in self.origins.origins(reach):
            if origin.kind == "slot":
                self.found[origin] = self.found.get(origin, 0) | mode
            elif origin.kind == "module":
                self._module_variable(origin.variable, mode)

    def _module_variable(self, v: Variable, mode: int) -> None:
        if v.space == "tex":
            self.everything = True
        elif v.space != "const":
            (self.written if mode & 2 else self.read).add(v)
            self.read.add(v)

    def _tensor_map(self, a: Access, reach: int) -> None:
        """A tensor map in a parameter names its tensor; one that lies in memory names nothing."""
        mode = MODES[a.via]
        exact = self.graph.resolve(a.address)
        for origin in self.origins.origins(reach):
            v = origin.variable
            if origin.kind == "whole":
                at = exact[1] + a.offset if exact and exact[0] is v else None
                if v.nbytes <= 128 or not v.array:
                    names = [v.name]
                else:
                    names = [f"{v.name}+{x}" for x in (range(0, v.nbytes, 64) if at is None else (at,))]
                for name in names:
                    self.maps[name] = self.maps.get(name, 0) | mode
            elif origin.kind == "slot":
                self.found[origin] = self.found.get(origin, 0) | MODES["R"]
        if reach & ~self.origins.whole or not reach:
            self.everything = True

    def modes(self, written: set[Variable]) -> dict[str, str]:
        """The table of this entry, given the module variables that some entry writes."""
        out: dict[str, str] = {}
        everything = self.everything or any(not v.private or v in written for v in self.read)
        # What memory without a name leads to may be a pointer that this entry has put there itself.
        given = self._given() if everything else frozenset()
        every = {o: MODES["unknown"] if o in given else self.found.get(o, 0) for o in self.origins.bits
                 if o.kind == "slot"}  # fmt: skip
        for v in self.entry.params:
            slots = sorted((o.offset, o) for o in every if o.variable is v)
            size = self.graph.module.pointer_bytes
            if not v.array and (v.nbytes >= size or any(every[o] for _, o in slots)):
                out[v.name] = NAMES.get(max((every[o] for _, o in slots), default=0), "unknown")
            elif v.array:
                # A number beside the pointers, which is only ever loaded in 4 bytes, is none of them.
                rows = {o.name: NAMES.get(every[o], "unknown") for _, o in slots if every[o] or o in self.origins.full}
                whole = {n: NAMES.get(m, "unknown") for n, m in self.maps.items() if n.partition("+")[0] == v.name}
                out |= {**rows, **whole} or {v.name: "none"}
            elif v.type in ("texref", "surfref", "samplerref"):
                out[v.name] = "unknown"
        if everything:
            out[EVERYTHING] = "unknown"
        return out
