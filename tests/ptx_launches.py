"""Random small launches of the kernels with established truth, and what they show about the static answer."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ptx_compilers as compilers
import ptx_truth as truth
from ptx_interpreter import Machine
from ptx_text import Func, Program, Unsupported, read

from tesserasim.deps.ptx import KernelEffects, analyse, intervals

Triple = tuple[int, int, int]
BYTES = 1 << 14  # of every buffer
HIDDEN = "hidden"  # fill a buffer with the address of memory that no parameter names
# What a kernel needs beyond the common rules: `numbers` of 64 bits and where they come from, `fill` of a buffer by
# position, threads of a block, ranges of numbers by position or position+offset.
SPECIAL: dict[str, dict[str, Any]] = {
    "shifted": {"numbers": {"1": (0, 9)}},
    "histogram": {"numbers": {"2": (0, 500)}},
    "unused": {"numbers": {"2": (-100, 900)}},
    "bytes_of": {"numbers": {"2": (-100, 900)}},
    "pointer_table": {"fill": {"0": HIDDEN}},
    "table": {"fill": {"0": HIDDEN}},
    "linked_list": {"fill": {"0": HIDDEN}},
    "checked": {"fill": {"0": 1}},
    "lock": {"fill": {"0": 0}},
    "recursive": {"numbers": {"1": (-2, 20)}},
    "reverse_block": {"blocks": [(32, 1, 1), (200, 1, 1), (256, 1, 1)]},
    "tiled_product": {"blocks": [(16, 16, 1)], "numbers": {"3": [16, 32]}, "grid": 2},
    "tensor_core": {"blocks": [(32, 1, 1)]},
    "matmul": {"numbers": {p: [64, 128] for p in "345"}, "grid": 2},
    "transpose": {"grid": 2, "numbers": {"2": (1, 100)}},
    "by_struct": {"pointers": ["0+0", "0+8"], "numbers": {"0+16": (0, 140), "0+24": (-9, 9)}},
    "multi_tensor": {"pointers": [f"0+{8 * i}" for i in range(8)]},
    "jump_table": {"numbers": {"2": (0, 1)}},
    "warp_shuffle": {"blocks": [(32, 1, 1), (64, 1, 1)]},
    "byte_shared": {"blocks": [(64, 1, 1)]},
    "module_variable": {"blocks": [(32, 1, 1), (64, 1, 1)]},
    **{n: {"numbers": {"2": (0, 1)}} for n in ("predicated", "branches", "conditional", "returns_pointer", "choose")},
    "arithmetic_select": {"numbers": {"2": (0, 1), "3": (0, 64)}},
    "shift_select": {"numbers": {"2": [0, 64], "3": (0, 64)}},
    "halves_shifted_twice": {"numbers": {"1": (0, 64)}},
    "aligned_beside_a_number": {"numbers": {"1": (0, 64)}},
    "rows": {"numbers": {"2": (0, 100)}},
    "mask_select": {"numbers": {"2": (-1, 0), "3": (0, 64)}},
}


@dataclass(frozen=True)
class Kernel:
    """A kernel with truth: its text, where it comes from, what the analysis says about it."""

    name: str
    origin: str
    program: Program
    effects: KernelEffects
    reqntid: int | None

    @property
    def entry(self) -> Func:
        return self.program.functions[self.name]


@dataclass(frozen=True)
class Sight:
    """One pointer in one launch: what was seen and what was said."""

    kernel: str
    name: str
    mode: str
    said: str
    seen: tuple[int, int]
    distinct: int
    bytes: tuple[int, int] | None

    @property
    def sound(self) -> bool:
        if not set(self.mode) <= set(truth.ALLOWED[self.said]):
            return False
        if self.bytes is None or not self.distinct:
            return True
        return self.bytes[0] <= self.seen[0] and self.seen[1] <= self.bytes[1]


def kernels(package: bool = False) -> list[Kernel]:
    """All kernels with truth that are kept, and those of the installed package compiled now."""
    out = []
    for origin, (source, ptx) in truth.SOURCES.items():
        names = truth.truths((truth.DATA / source).read_text())
        out += _of(origin, (truth.DATA / ptx).read_text(), list(names))
    for name, _, ptx in compilers.package() if package else ():
        out += _of("package", ptx, [name])
    return out


def _of(origin: str, text: str, names: list[str]) -> list[Kernel]:
    program, answers = read(text), analyse(text)
    fixed = 128 if origin in ("Triton", "package") else None
    return [Kernel(n, origin, program, answers[n], fixed) for n in names]


def _number(chance: random.Random, wanted: Any) -> int:
    return chance.choice(wanted) if isinstance(wanted, list) else chance.randint(*wanted)


def _filled(chance: random.Random, fill: object) -> bytes:
    if isinstance(fill, int):
        return struct.pack("<i", fill) * (BYTES // 4)
    return b"".join(struct.pack("<q", chance.randrange(64)) for _ in range(BYTES // 8))


def launch(kernel: Kernel, seed: int) -> tuple[Machine, Triple, Triple, dict[str, int]]:
    """A random launch, not yet run: the machine, grid, block and the numbers among the parameters."""
    chance = random.Random(seed)
    special = SPECIAL.get(kernel.name, {})
    width = special.get("grid", 3)
    grid = (chance.randint(1, width), chance.randint(1, 2) if width == 2 else 1, 1)
    block = chance.choice(special.get("blocks", [(32, 1, 1), (64, 1, 1), (128, 1, 1), (40, 1, 1)]))
    if kernel.reqntid:
        block = (kernel.reqntid, 1, 1)
    buffers: dict[str, bytes] = {}
    numbers: dict[str, int] = {}
    given: Mapping[str, Any] = special.get("numbers", {})
    for i, v in enumerate(kernel.entry.params):
        offsets = [k for k in (*given, *special.get("pointers", ())) if k.startswith(f"{i}+")]
        for key in offsets or [str(i)]:
            name = v.name + key[len(str(i)) :]
            if key in given:
                numbers[name] = _number(chance, given[key])
            elif v.nbytes == 8 or key in special.get("pointers", ()):
                buffers[name] = _filled(chance, special.get("fill", {}).get(key))
            elif v.nbytes == 4 and v.kind == "f32":
                numbers[name] = struct.unpack("<I", struct.pack("<f", chance.random()))[0]
            elif v.nbytes == 4:
                numbers[name] = chance.randint(0, 1100)
    machine = Machine(kernel.program, kernel.name, grid, block, buffers, numbers)
    for key, fill in special.get("fill", {}).items():
        if fill == HIDDEN:
            name = kernel.entry.params[int(key)].name
            region = machine.regions[machine.addresses[name] >> 32]
            words = struct.pack("<q", machine.addresses["*"]) * (BYTES // 8)
            region.data[region.origin : region.origin + BYTES] = words
    floats = {v.name for v in kernel.entry.params if v.kind == "f32"}
    return machine, grid, block, {n: x for n, x in numbers.items() if n not in floats}


def sights(kernel: Kernel, seed: int) -> list[Sight]:
    """Run one random launch and hold it against the answer; raises Unsupported or Fault if it cannot be run."""
    machine, grid, block, numbers = launch(kernel, seed)
    machine.run()
    said = intervals(kernel.effects, grid, block, numbers)
    modes = kernel.effects.modes
    out = []
    for name, (mode, lo, hi, distinct) in machine.observed().items():
        if name == "*":
            out.append(Sight(kernel.name, name, "RW", modes.get("*", "none"), (0, 0), 0, None))
            continue
        # What is touched through a pointer that lay in memory is covered by "*".
        answer = modes.get(name, "unknown" if "*" in modes and name not in modes else "none")
        missing = said.get(name, (0, 0))
        out.append(Sight(kernel.name, name, mode, answer, (lo, hi), distinct, missing))
    return out


def runnable(found: list[Kernel], seeds: Callable[[str], Iterator[int]] | None = None) -> Iterator[Any]:
    """(kernel, sights) of each kernel, or (kernel, reason) where the interpreter cannot run it."""
    for kernel in found:
        seen: list[Sight] = []
        try:
            for seed in seeds(kernel.name) if seeds else range(3):
                seen += sights(kernel, seed)
        except Unsupported as error:
            yield kernel, str(error)
            continue
        yield kernel, seen
