"""Journals of `python -m hw replay` as `python -m hw validate` reads them: timed plans, hops, and the split.

A line counts only with the types and ranges that a run writes. What a killed run left of its last line is passed
over; any other line that is not what it should be is an InputError with its number.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tesserasim.errors import InputError
from tesserasim.files import path_text, read_text

MAX_JOURNAL_BYTES = 256 << 20
MAX_DEPTH, MAX_KERNELS = 256, 5_000_000
MAX_LATENCY_NS, MIN_GBS, MAX_GBS = 1e9, 1e-3, 1e5


@dataclass(frozen=True)
class Hop:
    """A link as it was measured: one direction is like the other."""

    latency_ns: float
    gbs: float


@dataclass(frozen=True)
class Measured:
    """One timed combination of a journal."""

    model: str
    unit: str
    plan: str  # hash of the devices of its kernels
    lane: str
    device_of: tuple[str, ...]
    depth: int
    units_per_s: float
    samples: tuple[float, ...]
    energy_j: float | None

    @property
    def key(self) -> str:
        """What the split goes by."""
        return f"{self.plan}:{self.depth}"


def journal_lines(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of every line of a journal. InputError for one that is no object; half a last line is none."""
    # Texts may hold the other line ends of Unicode.
    lines = read_text(path, what, MAX_JOURNAL_BYTES).rstrip("\n").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):  # nothing, or what a killed run left
                return
            row = None
        if not isinstance(row, dict):
            raise InputError(f"{path_text(path)}: line {number} is no line of a {what}")
        yield number, row


def read_journal(path: Path) -> list[Measured]:
    """Timed combinations of a replay's journal, the last of equal ones. InputError names the file and the line."""
    session: dict[str, Any] = {}
    placed: dict[str, tuple[str, ...]] = {}
    found: dict[tuple[str, int], Measured] = {}
    for number, row in journal_lines(path, "replay's journal"):
        try:
            kind = _text(row["kind"])
            if kind == "session":
                session = row
            if "device_of" in row:
                placed[_text(row["plan"])] = _devices(row["device_of"])
            if kind == "timing":
                m = _measured(path.stem, session, row, placed)
                found[m.plan, m.depth] = m
        except (ValueError, KeyError, TypeError, OverflowError):
            raise InputError(f"{path_text(path)}: line {number} is no line of a replay's journal") from None
    return [m for m in found.values() if m.units_per_s > 0 and math.isfinite(m.units_per_s)]


def _measured(unit: str, session: dict[str, Any], row: dict[str, Any], placed: dict[str, tuple[str, ...]]) -> Measured:
    """A line of kind "timing"; ValueError, KeyError or TypeError for what no run writes."""
    rate, samples = _number(row["units_per_s"]), tuple(_number(x) for x in row["units_per_s_all"])
    valid = rate > 0 and math.isfinite(rate)
    if not samples or (valid and not all(1e-9 < x < 1e12 for x in (rate, *samples))):
        raise ValueError(row["units_per_s_all"])
    depth, energy = row["depth"], row["energy_j"]
    if type(depth) is not int or not 1 <= depth <= MAX_DEPTH:
        raise ValueError(depth)
    plan = _text(row["plan"])
    return Measured(
        _text(session["model"]), unit, plan, _text(row["lane"]), placed[plan], depth, rate, samples,
        None if energy is None else _number(energy),
    )  # fmt: skip


def _devices(runs: Any) -> tuple[str, ...]:
    """Runs of [device, count] as a device per kernel."""
    if not isinstance(runs, list) or not all(type(n) is int and n > 0 for _, n in runs):
        raise TypeError(runs)
    if sum(n for _, n in runs) > MAX_KERNELS:
        raise ValueError(runs)
    return tuple(_text(d) for d, n in runs for _ in range(n))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise TypeError(value)
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(value)
    return float(value)


def read_hop(path: Path) -> Hop:
    """The link that was measured last. InputError for a journal without one, or with one that cannot be."""
    hop = None
    for number, row in journal_lines(path, "journal of python -m hw replay --links"):
        if row.get("kind") != "link":
            continue
        try:
            hop = Hop(_number(row["link"]["latency_ns"]), _number(row["link"]["gbs"]))
        except (KeyError, TypeError, OverflowError):
            raise InputError(f"{path_text(path)}: line {number}: a link needs numbers latency_ns and gbs") from None
        if not 0 <= hop.latency_ns <= MAX_LATENCY_NS or not MIN_GBS <= hop.gbs <= MAX_GBS:
            raise InputError(
                f"{path_text(path)}: line {number}: no link has {hop.latency_ns:g} ns and {hop.gbs:g} GB/s"
            )
    if hop is None:
        raise InputError(f"{path_text(path)}: holds no measured link")
    return hop


@dataclass(frozen=True)
class Split:
    """Which combinations judge: whole models, and half of the others by hash."""

    models: tuple[str, ...]

    def held_out(self, m: Measured) -> bool:
        return m.model in self.models or int(hashlib.sha256(m.key.encode()).hexdigest()[:8], 16) % 2 == 0


def read_split(path: Path) -> Split:
    """The split of a file; InputError unless it lists names of models."""
    data = read_json(path, "split")
    models = data.get("held_out_models")
    if not isinstance(models, list) or not all(isinstance(x, str) for x in models):
        raise InputError(f"{path_text(path)}: no split ({{'held_out_models': [...]}})")
    return Split(tuple(models))


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file; InputError in one line for anything else."""
    try:
        data = json.loads(read_text(path, f"{what} file"))
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise InputError(f"{path_text(path)}: not a {what} file (a JSON object)")
    return data
