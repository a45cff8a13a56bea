"""Truth about kernels, declared beside their source, and how an answer compares with it.

A line `//! name: 0=R 2+8=W *=unknown | feature, feature` (in Python sources `#! …`) says what entry `name` does
with its parameters, by position; a pointer that is not listed is untouched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tesserasim.deps.ptx.model import Function
from tesserasim.deps.ptx.parse import parse

DATA = Path(__file__).parent / "data" / "ptx"
ALLOWED = {"none": "", "R": "R", "W": "W", "RW": "RW", "unknown": "RWU"}
# Where truth and PTX lie. What is contrived computes pointers in ways that no compiler would: the numbers used for
# it cannot be told from pointers, so that only soundness is asked there.
SOURCES = {
    "by hand": ("hand.ptx", "hand.ptx"),
    "contrived": ("contrived.ptx", "contrived.ptx"),
    "nvcc": ("kernels.cu", "kernels.ptx"),
    "Triton": ("triton_kernels.py", "triton.ptx"),
}
_LINE = re.compile(r"^\s*(?://|#)! (\w+):([^|\n]*)\|([^\n]*)$", re.M)


@dataclass(frozen=True)
class Truth:
    name: str
    modes: dict[str, str]  # position or position+offset, or "*"
    features: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """How the answer for one kernel compares with the truth."""

    name: str
    unsound: tuple[str, ...]
    plain: int  # plain pointer parameters
    exact: int  # of them, those whose mode is exactly the truth
    coarse: tuple[str, ...]


def truths(source: str) -> dict[str, Truth]:
    found = {}
    for name, body, features in _LINE.findall(source):
        modes = dict(word.split("=") for word in body.split())
        found[name] = Truth(name, modes, tuple(f.strip() for f in features.split(",") if f.strip()))
    return found


def declared(name: str, body: str, *features: str) -> Truth:
    return Truth(name, dict(word.split("=") for word in body.split()), features)


def committed() -> dict[str, list[Verdict]]:
    """The kernels whose PTX lies in the data folder, by where they come from."""
    return {origin: _file(source, ptx) for origin, (source, ptx) in SOURCES.items()}


def _file(source: str, ptx: str) -> list[Verdict]:
    return verdicts((DATA / ptx).read_text(), truths((DATA / source).read_text()))


def features() -> set[str]:
    return {f for s, _ in SOURCES.values() for t in truths((DATA / s).read_text()).values() for f in t.features}


def judge(truth: Truth, entry: Function, answer: Mapping[str, str]) -> Verdict:
    """Every access of the truth must be allowed by the answer; plain pointers are compared exactly."""
    names = [p.name for p in entry.params]
    want = {("*" if k == "*" else names[int(k.split("+")[0])] + (k[k.index("+"):] if "+" in k else "")): m
            for k, m in truth.modes.items()}  # fmt: skip
    unsound = tuple(
        f"{truth.name}: {k} is {m}, answered {answer.get(k, 'none')}"
        for k, m in want.items() if not set(ALLOWED[m]) <= set(ALLOWED[answer.get(k, "none")])
    )  # fmt: skip
    plain = [p.name for p in entry.params if not p.array and p.nbytes == 8]
    wrong = [n for n in plain if answer[n] != want.get(n, "none")]
    coarse = tuple(f"{truth.name}: {n} {answer[n]} for {want.get(n, 'none')}" for n in wrong)
    if "*" in answer and "*" not in want:
        coarse += (f"{truth.name}: * for nothing",)
    return Verdict(truth.name, unsound, len(plain), len(plain) - len(wrong), coarse)


def verdicts(ptx: str, known: Mapping[str, Truth]) -> list[Verdict]:
    """Judge every entry of a PTX text that has a truth; all of `known` must be there."""
    from tesserasim.deps.ptx import modes

    answers = modes(ptx)
    entries = {e.name: e for e in parse(ptx).entries}
    return [judge(t, entries[n], answers[n]) for n, t in known.items()]
