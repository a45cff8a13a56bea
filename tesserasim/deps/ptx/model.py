"""What a PTX file is made of: module variables, functions with parameters, instructions with resolved names.

A name in an instruction is resolved when it is read: a register of an inner scope that shadows an outer one
has a number of its own, and so has a variable. Everything after the parser works on numbers and objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Variable:
    """A variable in a state space (`param`, `global`, `const`, `shared`, `local`, `tex`); compared by identity."""

    name: str
    space: str
    type: str  # element type without the dot: u64, b8, texref
    nbytes: int  # 0: size not declared
    annotated: bool = False  # declared `.ptr`: the compiler says that it is a pointer
    private: bool = True  # no other module can name it
    array: bool = False


@dataclass(frozen=True, slots=True)
class Reg:
    """A register: its number within the function."""

    number: int


@dataclass(frozen=True, slots=True)
class Imm:
    """A number; floating-point literals have the value None."""

    value: int | None


@dataclass(frozen=True, slots=True)
class Special:
    """A predefined register such as `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, a function or a label, plus a constant."""

    name: str
    variable: Variable | None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`; tensor and texture operands carry coordinates in `more`."""

    base: Operand
    offset: int = 0
    more: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, …}` and the argument lists of calls."""

    items: tuple[Operand, ...]


def words(text: str) -> frozenset[str]:
    """A set of words, for tables of opcodes."""
    return frozenset(text.split())


Operand = Reg | Imm | Special | Symbol | Address | Vector


@dataclass(slots=True)
class Instr:
    """One instruction; `parts` is the opcode split at its dots."""

    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | None
    negated: bool
    where: int  # position in the text, for messages
    targets: tuple[str, ...] = ()  # labels that a branch may reach

    @property
    def op(self) -> str:
        return self.parts[0]


@dataclass(slots=True)
class Function:
    """An entry or a function; `body` is None for a declaration."""

    name: str
    entry: bool
    params: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=dict)  # parameters in registers, by name
    body: list[Instr] | None = None
    labels: dict[str, int] = field(default_factory=dict)  # resolved label → index of the next instruction


@dataclass(slots=True)
class Module:
    """A parsed file."""

    name: str
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    pointer_bytes: int = 8
    text: str = ""

    @property
    def entries(self) -> list[Function]:
        return [f for f in self.functions.values() if f.entry and f.body is not None]

    def function(self, name: str) -> Function | None:
        return self.functions.get(self.aliases.get(name, name))
