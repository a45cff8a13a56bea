"""A reader of PTX for the interpreter of the tests: text → functions whose names are resolved.

Independent of the package on purpose: what the two make of the same text is compared. It reads what compilers
emit and what the kept files hold; what else there is raises `Unsupported` and is never skipped.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Any

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
WORD = r"[A-Za-z_$%][\w$]*"


class Unsupported(Exception):
    """Something that the interpreter does not know; the message says what."""


@dataclass(eq=False)
class Var:
    """A variable: state space, bytes (0: as many as the launch gives), alignment, initial bytes."""

    name: str
    space: str
    kind: str
    nbytes: int
    align: int = 1
    initial: bytes = b""
    symbols: list[tuple[int, str]] = field(default_factory=list)  # addresses of variables in the initial bytes
    visible: bool = False  # other modules can name it
    at: int = 0  # where the launch placed it


@dataclass
class Op:
    """One instruction. Operands: ("reg", n) ("imm", value) ("special", name) ("var", Var, offset)
    ("function", name) ("at", operand, offset) ("list", [operands]) ("label", name) ("none",)."""

    parts: tuple[str, ...]
    operands: list[Any]
    guard: int | None = None
    negated: bool = False
    text: str = ""


@dataclass
class Func:
    name: str
    entry: bool
    params: list[Var] = field(default_factory=list)
    results: list[Var] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=dict)  # parameters that are registers
    ops: list[Op] | None = None
    labels: dict[str, int] = field(default_factory=dict)
    targets: dict[str, list[str]] = field(default_factory=dict)
    count: int = 0
    local: list[Var] = field(default_factory=list)
    shared: list[Var] = field(default_factory=list)


@dataclass
class Program:
    functions: dict[str, Func] = field(default_factory=dict)
    variables: dict[str, Var] = field(default_factory=dict)


def width(kind: str) -> int:
    """Bytes of a type such as u32, bf16 or f16x2."""
    if kind in ("f16x2", "bf16x2"):
        return 4
    found = re.fullmatch(r"(?:[busf]|bf|tf)(\d+)", kind)
    if found is None or found[1] not in SIZES:
        return 1 if kind == "pred" else 0
    return SIZES[found[1]]


def read(text: str) -> Program:
    """Read a whole file."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    lines = []
    for line in text.split("\n"):
        kept = re.sub(r'("(?:[^"\\]|\\.)*")|//.*', lambda m: m[1] or "", line)
        lines.append("" if re.match(r"\s*\.(?:loc|file)\b", kept) else kept)
    text = re.sub(r"\.section\s+[\w.$]+\s*\{[^{}]*\}", " ", "\n".join(lines))
    text = re.sub(r"\.(?:version\s+[\d.]+|target[^\n]*|address_size\s+\d+)", " ", text)
    program, at = Program(), 0
    head = re.compile(
        rf"\s*(?:\.(?:visible|extern|weak|common)\s+)*\.(entry|func)\s*(?:\(([^()]*)\))?\s*({WORD})\s*"
        r"(?:\(([^()]*)\))?([^{;]*)([{;])"
    )
    while text[at:].strip():
        found = head.match(text, at)
        if found is None:
            end = text.index(";", at)
            for v in declared(text[at:end]):
                program.variables[v.name] = v
            at = end + 1
            continue
        function = Func(found[3], found[1] == "entry")
        body = _Body(program, function)
        for part, kept in ((found[4], function.params), (found[2], function.results)):
            for one in (part or "").split(","):
                if one.strip():
                    v = declared(one)[0]
                    kept.append(v)
                    if v.space == "reg":
                        function.registers[v.name] = body.register(v.name)
                    else:
                        body.scopes[-1][v.name] = v
        at = found.end()
        if found[6] == "{":
            at = body.read(text, at)
        if function.name not in program.functions or function.ops is not None:
            program.functions[function.name] = function
    return program


def declared(text: str) -> list[Var]:
    """The variables of one declaration."""
    linked = re.match(r"\s*(?:\.(?:visible|extern|weak|common)\s+)+", text)
    text = text[linked.end() :] if linked else text
    head, _, value = text.partition("=")
    align = re.search(r"\.align\s+(\d+)", head)
    head = re.sub(r"\.align\s+\d+|\.attribute\s*\([^()]*\)", " ", head)
    dots = re.findall(r"\.(\w+)", head)
    names = re.sub(r"\.\w+", " ", head)
    space = dots[0]
    kind = next((d for d in reversed(dots) if width(d) or d == "pred"), "")
    if space not in ("global", "const", "shared", "local", "param", "reg") or not kind:
        raise Unsupported(f"declaration {text[:60]!r}")
    vector = next((int(d[1:]) for d in dots if d in ("v2", "v4")), 1)
    out = []
    for one in names.split(","):
        name = re.match(rf"\s*({WORD})", one)
        if name is None:
            raise Unsupported(f"declaration {text[:60]!r}")
        size = width(kind) * vector
        for d in re.findall(r"\[\s*(\d*)\s*\]", one):
            size *= int(d or 0)
        v = Var(name[1], space, kind, size, int(align[1]) if align else max(1, width(kind)))
        v.visible = linked is not None
        _initial(v, value)
        out.append(v)
    return out


def _initial(v: Var, value: str) -> None:
    each = width(v.kind)
    data = bytearray()
    for one in re.findall(r"[^\s{},]+", value):
        if re.match(r"[A-Za-z_$]", one):
            v.symbols.append((len(data), re.sub(r"generic\(|\)", "", one)))
            data += bytes(each)
        else:
            data += (number(one) & ((1 << 8 * each) - 1)).to_bytes(each, "little")
    v.initial = bytes(data)


def number(text: str) -> int:
    """The value of a literal; of a floating-point one the bits."""
    text = text.replace(" ", "").rstrip("U")
    negative, digits = text.startswith("-"), text.lstrip("-")
    if re.fullmatch(r"0[fF][\da-fA-F]{8}", digits):
        return int(digits[2:], 16) ^ (1 << 31 if negative else 0)
    if re.fullmatch(r"0[dD][\da-fA-F]{16}", digits):
        return int(digits[2:], 16) ^ (1 << 63 if negative else 0)
    if re.fullmatch(r"\d+\.\d*(?:[eE][+-]?\d+)?", digits):
        return int.from_bytes(struct.pack("<d", float(text)), "little")
    if re.fullmatch(r"0[0-7]+", digits):
        return int(digits, 8) * (-1 if negative else 1)
    return int(digits, 0) * (-1 if negative else 1)


class _Body:
    """Reads one function; inner scopes hide outer names."""

    def __init__(self, program: Program, function: Func) -> None:
        self.program, self.function = program, function
        self.scopes: list[dict[str, Any]] = [{}]
        self.families: list[dict[str, int]] = [{}]

    def register(self, name: str, scope: int = -1) -> int:
        self.scopes[scope][name] = self.function.count
        self.function.count += 1
        return self.function.count - 1

    def read(self, text: str, at: int) -> int:
        """From behind the opening brace to behind the closing one."""
        f = self.function
        f.ops, depth = [], 1
        label = re.compile(rf"\s*({WORD})\s*:(?!:)")
        while depth:
            at += len(text[at : at + 4096]) - len(text[at : at + 4096].lstrip())
            found = label.match(text, at)
            if text[at] == "{":
                depth, at = depth + 1, at + 1
                self.scopes.append({})
                self.families.append({})
            elif text[at] == "}":
                depth, at = depth - 1, at + 1
                self.scopes.pop()
                self.families.pop()
            elif text[at] in "; \n\t":
                at += 1
            elif found:
                f.labels[found[1]] = len(f.ops)
                at = found.end()
            else:
                end = text.index(";", at)
                self.statement(text[at:end].strip(), text[:at])
                at = end + 1
        return at

    def statement(self, text: str, before: str) -> None:
        if not text.startswith("."):
            self.function.ops.append(self.instruction(text))  # type: ignore[union-attr]
        elif text.startswith(".reg"):
            for one in re.sub(r"^(?:\s*\.\w+)+", "", text).split(","):
                many = re.fullmatch(rf"\s*({WORD}?)\s*<\s*(\d+)\s*>\s*", one)
                if many:
                    self.families[-1][many[1]] = int(many[2])
                else:
                    self.register(one.strip())
        elif text.startswith(".branchtargets"):
            name = re.findall(rf"({WORD})\s*:\s*$", before)[0]
            self.function.targets[name] = [t.strip() for t in text[14:].split(",")]
        elif text.startswith((".param", ".local", ".shared")):
            for v in declared(text):
                self.scopes[-1][v.name] = v
                if v.space in ("local", "shared"):
                    getattr(self.function, v.space).append(v)
        elif not text.startswith((".callprototype", ".pragma")):
            raise Unsupported(f"directive {text[:40]!r}")

    def instruction(self, text: str) -> Op:
        guard = re.match(r"@\s*(!?)\s*([%\w$]+)\s+", text)
        rest = text[guard.end() :] if guard else text
        opcode = re.match(r"[a-z]\w*(?:(?:\.|::)\w+)*", rest)
        if opcode is None:
            raise Unsupported(f"statement {text[:40]!r}")
        parts = tuple(opcode[0].split("."))
        operands = [self.operand(x, parts[0]) for x in _split(rest[opcode.end() :])]
        op = Op(parts, operands, text=text)
        if guard:
            op.guard, op.negated = self.name(guard[2], "")[1], bool(guard[1])
        return op

    def operand(self, text: str, op: str) -> Any:
        if text[0] == "[":
            inner = _split(text[1:-1])
            base = re.fullmatch(r"(.+?)(?:\s*([+-])\s*(-?\s*\w+))?", inner[0])
            assert base is not None
            offset = number(base[3]) * (-1 if base[2] == "-" else 1) if base[3] else 0
            return ("at", self.operand(base[1], op), offset)
        if text[0] in "{(":
            inner, _, tail = text[1:].partition("}" if text[0] == "{" else ")")
            items = [self.operand(x, op) for x in _split(inner)]
            made = ("list", items)
            return made if not tail.strip() else ("pair", made, self.operand(tail[1:].strip(), op))
        if "|" in text:
            a, b = text.split("|")
            return ("pair", self.operand(a.strip(), op), self.operand(b.strip(), op))
        if text[0] == "!":
            return ("not", self.operand(text[1:].strip(), op))
        if re.match(r"-?\s*\d", text):
            return ("imm", number(text), bool(re.search(r"\d\.", text)))
        moved = re.fullmatch(r"([%\w$]+)\s*\+\s*(\w+)", text)
        if moved:
            found = self.name(moved[1], op)
            return (*found[:2], found[2] + number(moved[2]))
        return self.name(text, op)

    def name(self, name: str, op: str) -> Any:
        if name == "_":
            return ("none",)
        split = re.fullmatch(r"(.*?)(0|[1-9]\d*)", name)
        for i in range(len(self.scopes) - 1, -1, -1):
            if name in self.scopes[i]:
                found = self.scopes[i][name]
                return ("reg", found) if isinstance(found, int) else ("var", found, 0)
            if split and int(split[2]) < self.families[i].get(split[1], 0):
                return ("reg", self.register(name, i))
        if name in self.program.variables:
            return ("var", self.program.variables[name], 0)
        if op in ("bra", "brx"):
            return ("label", name)
        if name in self.program.functions or name == self.function.name or op == "call":
            return ("function", name)
        if name.startswith("%") or name == "WARP_SZ":
            return ("special", name)
        raise Unsupported(f"name {name!r}")


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{(") - (c in "]})")
        if c == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    out.append(text[start:].strip())
    return [x for x in out if x]
