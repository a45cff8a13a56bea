"""Journals of `python -m hw replay` as `python -m hw validate` reads them: timed plans, hops, and the split.

A line counts only with the types and ranges that a run writes. What a killed run left of its last line is passed
over; any other line that is not what it should be is an InputError with its number.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tesserasim.errors import InputError
from tesserasim.files import path_text, read_text

MAX_JOURNAL_BYTES = 256 << 20
MAX_DEPTH, MAX_KERNELS = 256, 5_000_000
MAX_LAUNCHES, MAX_GPUS, MAX_SMS = 10**9, 1024, 4096
#: What lies outside (exclusive) was not measured: units per second, ms of a launch, joules of a unit.
PER_S, MS, JOULES = (1e-9, 1e12), (1e-9, 1e9), (0.0, 1e9)
NS = (-1e9, 1e9)
MAX_LATENCY_NS, MIN_GBS, MAX_GBS = 1e9, 1e-3, 1e5


@dataclass(frozen=True)
class Hop:
    """A link as it was measured: one direction is like the other.

    A copy occupies the link for `setup_ns` and its bytes, and arrives `latency_ns` later. `in_order`: copies of both
    directions go through one queue in the order of the graph's nodes (two chains at once take as long as one after the
    other).
    """

    latency_ns: float
    gbs: float
    setup_ns: float = 0.0
    in_order: bool = False


@dataclass(frozen=True)
class Machine:
    """Where a session ran; "" and {} for what its line does not say."""

    gpu: str = ""
    driver: str = ""
    torch: str = ""
    gpu_of: Mapping[str, int] = field(default_factory=dict)  # device -> GPU that it is, or is a part of
    sms: Mapping[str, int] = field(default_factory=dict)  # device -> multiprocessors


@dataclass(frozen=True)
class Measured:
    """One timed combination of a journal: bursts of launches in a closed loop of `depth` slots."""

    model: str
    unit: str
    plan: str  # hash of the devices of its kernels
    lane: str
    device_of: tuple[str, ...]
    depth: int
    units_per_s: float  # the median burst
    samples: tuple[float, ...]  # units per second, a figure per burst
    energy_j: float | None  # of one unit, by the counters of `energy_gpus`; None: unknown
    latency_ms: tuple[float, ...] = ()  # median time of a launch in its slot, a figure per burst; (): unknown
    launches: int | None = None  # per slot and burst
    segments: bool = False  # ordered by events of the host, since the driver refused one graph
    machine: Machine = Machine()
    stagger_us: float = 0.0  # from the start of one slot to that of the next
    energy_gpus: tuple[int, ...] = (0,)

    @property
    def key(self) -> str:
        """What the split goes by."""
        return f"{self.plan}:{self.depth}"


@dataclass(frozen=True)
class Check:
    """Whether a plan's outputs were those of the unsplit unit, to the bit. `equal` None: the check was void."""

    plan: str
    lane: str
    switches: int
    equal: bool | None


@dataclass(frozen=True)
class Mutations:
    """A plan broken on purpose, one fault a run: whether the outputs showed it."""

    plan: str
    lost_moves: tuple[bool, ...]
    lost_waits: tuple[bool, ...]
    controls: tuple[bool, ...]  # with the late producer of a lost wait and nothing lost: outputs unchanged


@dataclass(frozen=True)
class Journal:
    """All of a unit's journal. Of equal lines the last counts; a plan once found unequal stays so."""

    model: str
    unit: str
    measured: tuple[Measured, ...]
    checks: tuple[Check, ...]
    mutations: tuple[Mutations, ...]
    point: Mapping[str, Any]  # what the unit was: batch, tokens, context ...; {} if the journal does not say
    plain: Mapping[str, float]  # device -> units per second of the captured graph itself, one slot
    copies: str = "engine"  # what moved bytes between devices


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
    return list(read_whole(path).measured)


def read_whole(path: Path) -> Journal:
    """Everything in a replay's journal. InputError names the file and the line that no run writes."""
    reader = _Reader(path.stem)
    for number, row in journal_lines(path, "replay's journal"):
        try:
            reader.add(row)
        except (ValueError, KeyError, TypeError, OverflowError):
            raise InputError(f"{path_text(path)}: line {number} is no line of a replay's journal") from None
    return Journal(
        reader.model, path.stem, tuple(reader.measured.values()), tuple(reader.checks.values()),
        tuple(reader.mutations.values()), reader.point, reader.plain, reader.copies,
    )  # fmt: skip


class _Reader:
    """Lines one by one; ValueError, KeyError, TypeError or OverflowError for what no run writes."""

    def __init__(self, unit: str) -> None:
        self.unit, self.model, self.machine, self.copies = unit, "", Machine(), "engine"
        self.point: dict[str, Any] = {}
        self.placed: dict[str, tuple[str, ...]] = {}
        self.measured: dict[tuple[str, int], Measured] = {}
        self.checks: dict[str, Check] = {}
        self.mutations: dict[str, Mutations] = {}
        self.plain: dict[str, float] = {}

    def add(self, row: dict[str, Any]) -> None:
        kind = _text(row["kind"])
        if "device_of" in row:
            self.placed[_text(row["plan"])] = _devices(row["device_of"])
        if kind == "session":
            self.model, self.machine, self.point = _text(row["model"]), _machine(row), dict(row.get("unit", {}))
            self.copies = _text(row.get("copies", "engine"))
        elif kind == "timing":
            m = self._timing(row)
            self.measured[m.plan, m.depth] = m
        elif kind == "plain":
            rate, _ = _rates(row)
            self.plain[_text(row["plan"])] = rate
        elif kind == "check":
            found = self._check(row)
            before = self.checks.get(found.plan)
            if before is None or before.equal is not False:
                self.checks[found.plan] = found
        elif kind == "mutations":
            plan = _text(row["plan"])
            early = [(_flag(shows), _flag(control)) for _, shows, control in row["early"]]
            lost = tuple(_flag(shows) for _, shows in row["lost"])
            self.mutations[plan] = Mutations(plan, lost, tuple(s for s, _ in early), tuple(c for _, c in early))

    def _timing(self, row: dict[str, Any]) -> Measured:
        rate, samples = _rates(row)
        plan = _text(row["plan"])
        if not self.model:
            raise KeyError("session")
        latency = tuple(_within(x, *MS) for x in row["latency_ms_all"]) if "latency_ms_all" in row else ()
        return Measured(
            self.model, self.unit, plan, _text(row["lane"]), self.placed[plan], _whole(row["depth"], MAX_DEPTH), rate,
            samples, None if row["energy_j"] is None else _within(row["energy_j"], *JOULES), latency,
            _whole(row["launches"], MAX_LAUNCHES) if "launches" in row else None,
            _flag(row.get("segments", False)), self.machine, _within(row.get("stagger_us", 0), -1e-9, 1e9),
            tuple(_whole(g, MAX_GPUS, 0) for g in row.get("energy_gpus", [0])),
        )  # fmt: skip

    def _check(self, row: dict[str, Any]) -> Check:
        plan = _text(row["plan"])
        device_of = self.placed[plan]
        equal = None if "void" in row else _flag(row["equal"])
        return Check(plan, _text(row["lane"]), sum(a != b for a, b in itertools.pairwise(device_of)), equal)


def _machine(row: dict[str, Any]) -> Machine:
    machine, devices = row.get("machine", {}), row.get("devices", {})
    named = {k: _text(machine[k]) for k in ("gpu", "driver", "torch") if k in machine}
    parts = {_text(d): x for d, x in devices.items() if not isinstance(x, str)}  # a string: a device of torch
    gpu_of = {d: _whole(x["gpu"], MAX_GPUS, 0) for d, x in parts.items()}
    return Machine(**named, gpu_of=gpu_of, sms={d: _whole(x["sms"], MAX_SMS) for d, x in parts.items()})


def _rates(row: dict[str, Any]) -> tuple[float, tuple[float, ...]]:
    """The median burst and all bursts, in units per second."""
    samples = tuple(_within(x, *PER_S) for x in row["units_per_s_all"])
    rate = _within(row["units_per_s"], *PER_S)
    if not min(samples) * (1 - 1e-9) <= rate <= max(samples) * (1 + 1e-9):
        raise ValueError(rate)
    return rate, samples


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


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(value)
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(value)
    return float(value)


def _within(value: Any, low: float, high: float) -> float:
    number = _number(value)
    if not low < number < high:  # nor NaN
        raise ValueError(value)
    return number


def _whole(value: Any, most: int, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(value)
    return value


#: Two chains of hops at once that take this many times as long as one are carried one after the other.
SERIAL = 1.6


def _serial(row: dict[str, Any]) -> bool:
    """Whether two chains of small copies, one each way, hold each other up wholly."""
    if "hop_both_ns" not in row:
        return False
    kernel = statistics.mean(_within(x, *NS) for x in row["stay_ns"].values())
    one, both = (kernel + _within(row[k][0], *NS) for k in ("hop_ns", "hop_both_ns"))
    return both >= SERIAL * one


def read_hop(path: Path, copies: str = "engine") -> Hop:
    """The link with copies by `copies` that was measured last. InputError for a journal without one, or with one that
    cannot be."""
    hop = None
    for number, row in journal_lines(path, "journal of python -m hw replay --links"):
        if row.get("kind") != "link" or row.get("copies_by", "engine") != copies:
            continue
        try:
            link = row["link"]
            setup = _number(link.get("setup_ns", 0))
            hop = Hop(_number(link["latency_ns"]) - setup, _number(link["gbs"]), setup, _serial(row))
        except (KeyError, TypeError, OverflowError, AttributeError, ValueError):
            raise InputError(f"{path_text(path)}: line {number}: a link needs numbers latency_ns and gbs") from None
        fits = all(0 <= x <= MAX_LATENCY_NS for x in (hop.setup_ns, hop.latency_ns))  # nor NaN
        if not fits or not MIN_GBS <= hop.gbs <= MAX_GBS:
            raise InputError(
                f"{path_text(path)}: line {number}: no link has {hop.latency_ns:g} ns and {hop.gbs:g} GB/s"
            )
    if hop is None:
        raise InputError(f"{path_text(path)}: holds no measured link with copies by {copies}")
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
