"""Changes that keep the meaning keep the answer; changes at random crash nothing and hang nothing."""

from __future__ import annotations

import random
import re

import ptx_truth as truth
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tesserasim.deps.ptx import modes
from tesserasim.errors import InputError

TEXTS = {n: (truth.DATA / n).read_text() for n in ("hand.ptx", "contrived.ptx", "kernels.ptx", "triton.ptx")}
CLEAN = {n: re.sub(r"//[^\n]*", "", t) for n, t in TEXTS.items()}
ANSWERS = {n: modes(t) for n, t in CLEAN.items()}
SEEDS = st.integers(0, 2**32)


def renamed(text: str, chance: random.Random) -> str:
    """Every register under another name."""
    tag = f"z{chance.randrange(1000)}_"
    registers = r"%(?!tid|ntid|ctaid|nctaid|laneid|warpid|clock|SP\b|SPL\b)([a-z]+\d*)\b(?!\.)"
    return re.sub(registers, lambda m: f"%{tag}{m[1]}", text)


def spread(text: str, chance: random.Random) -> str:
    """Other white space, comments between instructions, blocks that are split by new labels."""
    out = []
    for i, line in enumerate(text.split("\n")):
        if line.endswith(";") and line.startswith("\t") and not line.startswith("\t."):
            split = (f"\n$split{i}:", f"\n\tbra $go{i};\n$go{i}:")
            extra = chance.choice(["", " /* st.global.u32 [%rd1], 1; */", "\n\n", *split])
            line = line.replace(", ", chance.choice([", ", " ,\t", ",\n  "])) + extra
        out.append(line)
    return "\n".join(out)


def with_dead_code(text: str, chance: random.Random) -> str:
    """Unused values, and code behind a return that nothing jumps to."""
    dead = "\n\tret;\n\t{ .reg .b64 %dead; mov.u64 %dead, 64; st.global.u64 [%dead], %dead; }\n\tret;"
    return re.sub(r"(?m)^\s*ret;", lambda m: dead if chance.random() < 0.7 else m[0], text)


def reassociated(text: str, chance: random.Random) -> str:
    """Additions of 64 bits with their operands exchanged, or with a detour."""

    def other(m: re.Match[str]) -> str:
        d, a, b = m[1], m[2], m[3]
        if chance.random() < 0.5:
            return f"add.s64 {d}, {b}, {a};"
        return f"{{ .reg .b64 %t; add.s64 %t, {a}, 16; add.s64 %t, {b}, %t; sub.s64 {d}, %t, 16; }}"

    return re.sub(r"add\.[su]64\s+(%rd\d+), (%rd\d+), (%rd\d+);", other, text)


def reordered(text: str, chance: random.Random) -> str:
    """Loads of parameters in another order."""

    def shuffled(m: re.Match[str]) -> str:
        lines = m[0].strip("\n").split("\n")
        chance.shuffle(lines)
        return "\n".join(lines) + "\n"

    return re.sub(r"(?m)(?:^\s*ld\.param\.\S+\s+%\w+, \[\w+_param_\d+\];\n)+", shuffled, text)


@pytest.mark.quick
@pytest.mark.parametrize("change", [renamed, spread, with_dead_code, reassociated, reordered])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=SEEDS, name=st.sampled_from(sorted(CLEAN)))
def test_meaning_keeping_changes_keep_the_answer(change, seed: int, name: str) -> None:  # type: ignore[no-untyped-def]
    """Fails if code that nothing reaches counts, or if only the first operand of an addition is a pointer."""
    changed = change(CLEAN[name], random.Random(seed))
    assert modes(changed) == ANSWERS[name]


@pytest.mark.quick
@settings(max_examples=120, deadline=None, derandomize=True)
@given(seed=SEEDS, name=st.sampled_from(sorted(CLEAN)))
def test_damaged_files_give_an_answer_or_one_line(seed: int, name: str) -> None:
    """Bytes and lines changed, cut, doubled, moved: an answer or an InputError `file:line: what`, soon.

    Fails if the error of the parser names no line.
    """
    chance = random.Random(seed)
    text = CLEAN[name]
    start = chance.randrange(max(1, len(text) - 6000))
    text = text[:120] + text[start : start + 6000] if chance.random() < 0.5 else text[:6000]
    for _ in range(chance.randrange(1, 8)):
        a = chance.randrange(len(text))
        b = min(len(text), a + chance.choice([1, 2, 10, 80]))
        other = chr(chance.randrange(1, 300))
        middle = chance.choice(["", other, text[a:b] * 2, ";", "{", "}", "[", "%rd1", "st.global"])
        text = text[:a] + middle + text[b:]
    try:
        modes(text, "x.ptx")
    except InputError as error:
        assert re.match(r"x\.ptx:\d+: ", str(error)) and "\n" not in str(error)
