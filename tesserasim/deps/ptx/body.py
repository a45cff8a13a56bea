"""The inside of a function: scopes, declarations, labels, instructions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from typing import NoReturn

_STATEMENT = re.compile(
    r"""\s*(?:
      (?P<open>\{) | (?P<close>\})
      | (?P<skip>\.loc\s+\d+\s+\d+\s+\d+(?:\s*,\s*function_name\s+[\w$.]+(?:\s*\+\s*\d+)?
              \s*,\s*inlined_at\s+\d+\s+\d+\s+\d+)?
          | \.file\s+\d+\s+"[^"]*"(?:\s*,\s*\w+\s*,\s*\w+)? | \.section\s+[\w.$]+\s*\{[^{}]*\}
          | \.pragma\s+"[^"]*"(?:\s*,\s*"[^"]*")*\s*;
          | @@[^\n]* | ;)
      | (?P<label>[A-Za-z_$%][\w$]*)\s*:(?!:)
      | \.(?P<directive>[a-z_]+)(?P<rest>[^;]*);
      | (?:@\s*(?P<neg>!?)\s*(?P<guard>%?[\w$]+)\s+)?(?P<opcode>[a-z][\w]*(?:(?:\.|::)[\w]+)*)(?P<operands>[^;]*);
    )""",
    re.X,
)
_OPERAND = re.compile(
    r"\s*+(\[[^\[\]]*\]|\{[^{}]*\}(?:\s*+\|\s*+[%\w$]++)?|\([^()]*\)"
    r"|(?:!\s*+)?(?:-\s*+)?[\w%$.]++(?:\s*+[+|-]\s*+(?:-\s*+)?[\w%$.]++)*+)\s*+(,|$)"
)
_PARAMETRIC = re.compile(r"\s*+([A-Za-z_$%][\w$]*+)\s*+(?:<\s*+(\d++)\s*+>)?\s*+$")
_DIGITS = re.compile(r"^(.*?)(0|[1-9]\d*)$")
_SUM = re.compile(r"^\s*+([\w%$.]++)\s*+(?:\+\s*+(-?\s*+\w++)|-\s*+(\w++))?\s*+$")
_IMMEDIATE = re.compile(r"^-?\s*(?:0[xX][\da-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT = re.compile(r"^-?(?:0[fFdD][\da-fA-F]+|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)$")
_COMPONENT = re.compile(r"^(.*)\.([xyzwrgba]|[bh]\d)$")
_SPECIAL = re.compile(
    r"^(?:%(?:n?tid|n?ctaid|laneid|n?warpid|n?smid|gridid|(?:is_explicit_)?cluster\w*|n?clusterid|lanemask_\w+"
    r"|clock\w*|pm\d\w*|envreg\d+|globaltimer\w*|reserved_smem\w*|total_smem_size|aggr_smem_size"
    r"|dynamic_smem_size|current_graph_exec)|WARP_SZ)(?:\.[xyzw])?$"
)


class _Scope:
    def __init__(self, number: int) -> None:
        self.number = number
        self.prefixes: dict[str, int] = {}
        self.registers: dict[str, Operand] = {}
        self.variables: dict[str, Variable] = {}


class BodyParser:
    """Reads one function; names resolve to the innermost scope that declares them."""

    def __init__(self, module: Module, function: Function, text: str) -> None:
        self.module, self.function, self.text = module, function, text
        self.scopes = [_Scope(0)]
        self.scope_count, self.register_count = 1, 0
        self.lists: dict[str, tuple[str, ...]] = {}  # .branchtargets by name
        self.pending: list[str] = []
        self.branches: list[tuple[Instr, tuple[int, ...], str]] = []
        self.parsed: dict[str, Operand] = {}

    def fail(self, at: int, what: str) -> NoReturn:
        from tesserasim.deps.ptx.parse import fail

        fail(self.module, at, what)

    def declare(self, variable: Variable) -> None:
        self.scopes[-1].variables[variable.name] = variable
        self.parsed = {}

    def declare_register(self, name: str) -> int:
        self.register_count += 1
        self.scopes[-1].registers[name] = Reg(self.register_count)
        self.parsed = {}
        return self.register_count

    def parse(self, at: int) -> int:
        """Read from behind the opening brace to behind the closing one."""
        body: list[Instr] = []
        match, start = _STATEMENT.match, at
        while True:
            found = match(self.text, at)
            if found is None:
                if not self.text[at:].strip():
                    self.fail(start, f"{self.function.name} does not end: a closing brace is missing")
                self._unreadable(at)
            at = found.end()
            if found["opcode"]:
                body.append(self._instruction(found))
            elif found["label"]:
                self.function.labels[self._label(found["label"], self._path())] = len(body)
                self.pending = [found["label"]]
            elif found["directive"]:
                self._directive(found)
            elif found["open"]:
                self.scopes.append(_Scope(self.scope_count))
                self.scope_count += 1
                self.parsed = {}
            elif found["close"]:
                self.scopes.pop()
                self.parsed = {}
                if not self.scopes:
                    break
        self.function.body = body
        self._link()
        return at

    def _unreadable(self, at: int) -> NoReturn:
        at += len(self.text[at:]) - len(self.text[at:].lstrip())
        self.fail(at, f"cannot read {' '.join(self.text[at : at + 100].split())[:50]!r}")

    def _path(self) -> tuple[int, ...]:
        return tuple(s.number for s in self.scopes)

    @staticmethod
    def _label(name: str, path: tuple[int, ...]) -> str:
        return f"{name}@{path[-1]}"

    def _directive(self, found: re.Match[str]) -> None:
        word, rest, at = found["directive"], found["rest"], found.start("directive")
        if word == "reg":
            self._registers(rest, at)
        elif word in ("local", "shared", "param", "global", "const"):
            from tesserasim.deps.ptx.parse import declared

            for v in declared(f".{word}{rest}", self.module, at):
                counted = re.search(re.escape(v.name) + r"\s*<", rest)
                if counted:
                    self.fail(at, f"cannot read the declaration of {v.name}")
                self.declare(v)
        elif word in ("branchtargets", "calltargets"):
            names = tuple(n.strip() for n in rest.split(","))
            for name in self.pending:
                self.lists[name] = names
        elif word not in ("callprototype", "pragma", "attribute", "noreturn", "minnctapersm", "maxntid", "maxnreg"):
            self.fail(at, f"unknown directive .{word}")

    def _registers(self, rest: str, at: int) -> None:
        names = re.sub(r"^(?:\s*\.[\w]+)+", "", rest, count=1)
        scope = self.scopes[-1]
        self.parsed = {}
        for one in names.split(","):
            name = _PARAMETRIC.match(one)
            if name is None:
                self.fail(at, f"cannot read the declaration of registers {rest.strip()[:40]!r}")
            if name[2]:
                scope.prefixes[name[1]] = max(scope.prefixes.get(name[1], 0), int(name[2][:9]))
            else:
                self.declare_register(name[1])

    def _instruction(self, found: re.Match[str]) -> Instr:
        text, at = found["operands"], found.start("opcode")
        operands: list[Operand] = []
        position, end = 0, len(text)
        if text and not text.isspace():
            if not (text[0].isspace() or text[0] in "[{("):
                self._unreadable(at)
            step = _OPERAND.match
            while position < end:
                one = step(text, position)
                if one is None:
                    self._unreadable(at)
                operands.append(self._operand(one[1], at))
                position = one.end()
                if position >= end and one[2] == ",":
                    self._unreadable(at)
        guard = self._operand(found["guard"], at) if found["guard"] else None
        parts = tuple(found["opcode"].split("."))
        if guard is not None and not isinstance(guard, Reg):
            self.fail(at, f"{found['guard']} is no predicate")
        instr = Instr(parts, tuple(operands), guard, bool(found["neg"]), at)
        if parts[0] in ("bra", "brx"):
            self.branches.append((instr, self._path(), text.split(",")[-1].strip()))
        elif parts[0] == "call":
            instr.targets = tuple(re.findall(r"[\w$%]+", re.sub(r"\([^()]*\)", " ", text)))
        return instr

    def _operand(self, text: str, at: int) -> Operand:
        kept = self.parsed.get(text)
        if kept is None:
            kept = self.parsed[text] = self._read(text.strip(), at)
        return kept

    def _read(self, text: str, at: int) -> Operand:
        first = text[0]
        if first == "[":
            return self._address(text[1:-1], at)
        if first in "{(":
            inner, _, tail = text.partition("}" if first == "{" else ")")
            items = [self._operand(t, at) for t in inner[1:].split(",") if t.strip()]
            if "|" in tail:
                items.append(self._operand(tail.replace("|", " ").strip(), at))
            return Vector(tuple(items))
        if "|" in text:
            return Vector(tuple(self._operand(t, at) for t in text.split("|") if t.strip()))
        if first == "!":
            return self._operand(text[1:].strip(), at)
        if _IMMEDIATE.match(text):
            return Imm(_integer(text))
        if _FLOAT.match(text):
            return Imm(None)
        parts = _SUM.match(text)
        if parts is None:
            if first == "-":
                return self._operand(text[1:].strip(), at)
            self.fail(at, f"cannot read the operand {text[:40]!r}")
        offset = _offset(parts)
        if offset is None:
            self.fail(at, f"cannot read the operand {text[:40]!r}")
        base = self._name(parts[1])
        if isinstance(base, Symbol) and offset:
            return Symbol(base.name, base.variable, offset)
        return base

    def _address(self, text: str, at: int) -> Address:
        base, _, rest = text.partition(",")
        parts = _SUM.match(base)
        offset = _offset(parts) if parts else None
        if parts is None or offset is None:
            self.fail(at, f"cannot read the address [{text[:40]}]")
        more = tuple(self._name(t) for t in re.findall(r"[%\w$.]+", rest))
        if _IMMEDIATE.match(parts[1]):
            return Address(Imm(_integer(parts[1])), offset, more)
        return Address(self._name(parts[1]), offset, more)

    def _name(self, name: str) -> Operand:
        if _IMMEDIATE.match(name):
            return Imm(_integer(name))
        if name == "_":
            return Imm(None)
        split = _DIGITS.match(name)
        for scope in reversed(self.scopes):
            if (known := scope.registers.get(name)) is not None:
                return known
            if (variable := scope.variables.get(name)) is not None:
                return Symbol(name, variable)
            if split and int(split[2][:9]) < scope.prefixes.get(split[1], 0):
                self.register_count += 1
                made = scope.registers[name] = Reg(self.register_count)
                return made
        if (found := self.module.variables.get(name)) is not None:
            return Symbol(name, found)
        if _SPECIAL.match(name):
            return Special(name)
        if component := _COMPONENT.match(name):
            return self._name(component[1])
        if name.startswith("%"):
            # Not declared anywhere: one register for the whole function, as an assembler's error would say.
            self.register_count += 1
            made = self.scopes[0].registers[name] = Reg(self.register_count)
            return made
        return Symbol(name, None)

    def _link(self) -> None:
        """Branches to the label of the innermost scope that has it."""
        labels = self.function.labels
        for instr, path, name in self.branches:
            wanted = self.lists.get(name) if instr.op == "brx" else (name,)
            found = []
            for target in wanted or ():
                for i in range(len(path), 0, -1):
                    if (key := self._label(target, path[:i])) in labels:
                        found.append(key)
                        break
                else:
                    self.fail(instr.where, f"a branch to {target[:40]!r}, which is not there")
            if wanted is None:
                self.fail(instr.where, f"no list of branch targets is called {name[:40]!r}")
            instr.targets = tuple(found)


def _integer(text: str) -> int:
    text = text.replace(" ", "").rstrip("U")
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("-")
    if len(digits) > 1 and digits[0] == "0" and digits.isdigit():
        return sign * (int(digits, 8) if set(digits) <= set("01234567") else int(digits[:40]))
    return sign * int(digits[:40], 0)


def _offset(parts: re.Match[str]) -> int | None:
    text = parts[2] or (f"-{parts[3]}" if parts[3] else "0")
    return _integer(text) if _IMMEDIATE.match(text) else None
