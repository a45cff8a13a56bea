"""PTX text → `Module`: compiled patterns eat a statement at a time, so that the cost per line stays small.

Comments are blanked first (strings are kept), which leaves every position and line number as it was. What
describes the source for debuggers (`.loc`, `.file`, `.section`) is skipped by its own grammar: file names and
data bytes in it are never taken for code. What does not match is an InputError `file:line: what`.
"""

from __future__ import annotations

import re
from typing import NoReturn

from tesserasim.deps.ptx.body import BodyParser
from tesserasim.deps.ptx.model import Function, Module, Variable
from tesserasim.errors import InputError

_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|/\*', re.S)
_NAME = r"[A-Za-z_$%][\w$]*"
_TOP = re.compile(
    rf"""\s*+(?:
      (?P<skip>\.version\s+\d+\.\d+ | \.target\s++[\w, ]++
        | \.pragma\s+"[^"]*"(?:\s*+,\s*+"[^"]*")*\s*+;
        | \.loc\b[^\n;{{}}]* | \.file\s+\d+\s+"[^"]*"(?:\s*+,\s*+\w+\s*+,\s*+\w+)?
        | \.section\s+[\w.$]+\s*+\{{[^{{}}]*\}} | ; | @@[^\n]*)
      | \.address_size\s+(?P<size>\d{{1,4}})
      | \.alias\s+(?P<alias>{_NAME})\s*+,\s*+(?P<aliased>{_NAME})\s*+;
      | (?P<link>(?:\.(?:visible|extern|weak|common)\s+)*)(?:
            \.(?P<kind>entry|func)\b(?P<attributes>(?:\s*+\.(?:attribute|noreturn|unified)\b(?:\s*+\([^()]*\))?)*)
              \s*+(?:\((?P<results>[^()]*)\))?\s*+(?P<name>{_NAME})\s*+(?:\((?P<params>[^()]*)\))?
              (?P<perf>(?:\s*+\.(?!pragma)[a-z_]+(?:\s+\d+(?:\s*+,\s*+\d+)*|\s*+\([^()]*\))?
                |\s*+\.pragma\s+"[^"]*"\s*+;)*)\s*+(?P<end>[{{;])
          | (?P<variable>\.(?:global|const|shared|tex|local|param|reg|texref|surfref|samplerref)\b(?:[^;"]|"[^"]*")*);)
    )""",
    re.X,
)
_DECLARED = re.compile(rf"\s*+({_NAME}|_)?((?:\s*+\[[^\]]*\])*)\s*+$")
_DOTTED = re.compile(r"\s*\.([\w:]+)((?:\s*\([^()]*\))?)")
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_WIDTH = re.compile(r"[busfe]+(?:f)?(\d+)")


def parse(text: str, name: str = "<ptx>") -> Module:
    """Parse a whole PTX file; raises InputError `name:line: what` if it is malformed."""
    module = Module(name, text=text)
    clean = _COMMENT.sub(_blank, text.replace("\0", " "))
    if "/*" in clean:
        fail(module, clean.index("/*"), "a comment that does not end")
    if not re.match(r"\s*\.version\b", clean):
        fail(module, 0, "not PTX: no .version at its start")
    at, end = 0, len(clean.rstrip())
    while at < end:
        found = _TOP.match(clean, at)
        if found is None or found.end() == at:
            fail(module, at + len(clean[at:]) - len(clean[at:].lstrip()), f"cannot read {_shown(clean, at)}")
        at = found.end()
        if found["size"]:
            module.pointer_bytes = int(found["size"]) // 8 or 8
        elif found["alias"]:
            module.aliases[found["alias"]] = found["aliased"]
        elif found["variable"]:
            for v in declared(found["variable"], module, found.start("variable")):
                v.private = not found["link"].strip()
                module.variables[v.name] = v
        elif found["kind"]:
            at = _function(module, clean, found)
    return module


def fail(module: Module, at: int, what: str) -> NoReturn:
    line = module.text.count("\n", 0, at) + 1
    raise InputError(f"{module.name}:{line}: {what}")


def _blank(found: re.Match[str]) -> str:
    text = found[0]
    if text[0] == '"' or text == "/*":
        return text
    return re.sub(r"[^\n]", " ", text)


def _shown(text: str, at: int) -> str:
    return repr(" ".join(text[at : at + 200].split())[:50])


def _function(module: Module, text: str, found: re.Match[str]) -> int:
    """One entry or function; the position after it."""
    function = Function(found["name"], found["kind"] == "entry")
    at = found.start()
    body = BodyParser(module, function, text)
    for part, kept in (("params", function.params), ("results", function.results)):
        for one in (found[part] or "").split(","):
            if one.strip():
                kept += declared(one, module, at)
    for v in function.params + function.results:
        if v.space == "reg":
            function.registers[v.name] = body.declare_register(v.name)
        else:
            body.declare(v)
    end = found.end()
    if found["end"] == "{":
        end = body.parse(end)
    earlier = module.functions.get(function.name)
    if earlier is None or earlier.body is None:
        module.functions[function.name] = function
    elif function.body is not None:
        fail(module, at, f"{function.name} is defined twice")
    return end


def declared(text: str, module: Module, at: int) -> list[Variable]:
    """The variables of one declaration, initialisers ignored; raises InputError if it cannot be read."""
    text = re.sub(r"=.*", "", text, flags=re.S) if "," not in text.split("=")[0] else _without_values(text)
    space, kind, annotated, position, vector = "", "", False, 0, 1
    while found := _DOTTED.match(text, position):
        word, position = found[1], found.end()
        if word in ("align", "ptr"):
            annotated |= word == "ptr"
            number = re.compile(r"\s*\d+").match(text, position)
            position = number.end() if number and word == "align" else position
        elif word in ("v2", "v4", "v8"):
            vector = int(word[1:])
        elif word.split("::")[0] in ("global", "const", "shared", "local", "param", "reg", "tex") and not space:
            space = word.split("::")[0]
        elif word not in ("attribute", "global", "const", "shared", "local", "managed", "unified"):
            kind = word
            if word in ("texref", "surfref", "samplerref") and space not in ("param", "reg"):
                space = "tex"
    out = []
    for one in text[position:].split(","):
        name = _DECLARED.match(one)
        if name is None or not space or not kind:
            fail(module, at, f"cannot read the declaration {_shown(text, 0)}")
        size = width(kind) * vector
        for dimension in re.findall(r"\[\s*([^\]]*?)\s*\]", name[2]):
            size *= _number(dimension)
        out.append(Variable(name[1] or "_", space, kind, size, annotated, array="[" in name[2]))
    return out


def _without_values(text: str) -> str:
    """A declaration of several variables without what they start from."""
    kept, depth = [], 0
    for part in re.split(r"([{}])", text):
        depth += (part == "{") - (part == "}")
        if depth <= 0 and part not in ("{", "}"):
            kept.append(part)
    return re.sub(r"=[^,]*", "", " ".join(kept))


def _number(text: str) -> int:
    try:
        return int(text.rstrip("Uu"), 0) if text else 0
    except ValueError:
        return 0


def width(kind: str) -> int:
    """Bytes of a type; 0 for what has none (pred, texref)."""
    found = _WIDTH.match(kind)
    return _SIZES.get(found[1], 4) if found else (4 if "x2" in kind or "x4" in kind else 0)
