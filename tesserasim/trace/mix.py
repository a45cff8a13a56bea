"""The mix: the units of one kind of request, and how often each is launched.

A *cohort* is what flows through the machines: B requests that share their decode steps. `Mix.cohort(B)`
lists its unit instances in program order, in whole launches; the planner alone uses launches per request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tesserasim.errors import InputError
from tesserasim.files import path_text, read_toml, shown
from tesserasim.tables import Table
from tesserasim.trace.filecheck import check_simulated
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import read_trace

KINDS = ("llm", "image", "stages")
MAX_LENGTHS = {"input_tokens": 1_000_000, "output_tokens": 100_000, "prefill_batch": 65_536}
MAX_LAUNCHES = 100_000  # of all stages of one request
MAX_FILES = 10_000
#: What buffers of one name must say alike in every trace of a mix.
_SHARED_FIELDS = {"weight": ("nbytes",), "state": ("bytes_per_token", "bytes_per_sequence")}


@dataclass(frozen=True, slots=True)
class UnitInstance:
    """`count` consecutive launches of one unit at one point of its grid."""

    unit: str  # "prefill", "decode", "denoise"
    batch: int  # sequences (images) in this launch
    tokens: int  # new tokens per sequence
    context: int  # KV length at the end of this launch, new tokens included
    count: int = 1
    part: int = 0  # launches of one part (from 1) work on the same sequences of the cohort; 0: alone on its own


@dataclass(frozen=True)
class Mix:
    """One kind of request.

    kind "llm": ceil(B / prefill_batch) prefills, then output_tokens - 1 decode steps at batch B whose KV
    length grows from input_tokens + 1 to input_tokens + output_tokens - 1 (the prefill gives token 1).
    `stages`, if any, run before each prefill, at its batch (a vision encoder).
    kind "image": `stages`, each (unit, launches), at batch B; results count images.
    kind "stages": the same for any other request (an imported profile); results count requests.
    """

    name: str
    model: str
    kind: str
    traces: Mapping[str, tuple[Trace, ...]]  # unit name -> traces of its grid
    input_tokens: int = 0
    output_tokens: int = 0
    prefill_batch: int = 1
    stages: tuple[tuple[str, int], ...] = ()
    incomplete: tuple[str, ...] = ()  # units a request needs that no trace covers; carried to every result
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def units(self) -> tuple[str, ...]:
        """Unit names in program order."""
        stages = tuple(name for name, _ in self.stages)
        if self.kind == "llm":
            return (*stages, "prefill", "decode") if self.output_tokens > 1 else (*stages, "prefill")
        return stages

    @property
    def throughput_unit(self) -> str:
        return "image/s" if self.kind == "image" else "request/s"

    @property
    def origins(self) -> tuple[str, ...]:
        return tuple(sorted({t.meta.origin for unit in self.units for t in self.traces[unit]}))

    def cohort(self, batch: int) -> tuple[UnitInstance, ...]:
        """Unit instances of a cohort of `batch` requests, in program order."""
        if batch < 1:
            raise InputError(f"mix {self.name}: a cohort needs at least one request, not {batch}")
        if self.kind != "llm":
            return tuple(UnitInstance(unit, batch, 1, 0, count) for unit, count in self.stages)
        size = min(self.prefill_batch, batch)
        full, rest = divmod(batch, size)
        s = self.input_tokens
        steps = self._prefills(size, full) + (self._prefills(rest, 1, full) if rest else [])
        steps += [UnitInstance("decode", batch, 1, s + j) for j in range(1, self.output_tokens)]
        return tuple(steps)

    def _prefills(self, batch: int, count: int, parts: int = 0) -> list[UnitInstance]:
        """`count` prefills, each after its own stages, which hand over to it alone. `parts` came before them."""
        s = self.input_tokens
        if not self.stages:
            return [UnitInstance("prefill", batch, s, s, count)]
        found = []
        for part in range(parts + 1, parts + count + 1):
            found += [UnitInstance(unit, batch, 1, 0, launches, part) for unit, launches in self.stages]
            found.append(UnitInstance("prefill", batch, s, s, 1, part))
        return found

    def launches(self, batch: int) -> int:
        """Unit launches in one cohort of `batch` requests."""
        return sum(u.count for u in self.cohort(batch))

    def validate(self) -> None:
        """Raise InputError if lengths are absurd, a unit has no trace, or its traces disagree."""
        where = f"mix {self.name[:60]}"
        if self.kind not in KINDS:
            raise InputError(f"{where}: kind {shown(self.kind)} is none of {', '.join(KINDS)}")
        lengths = MAX_LENGTHS if self.kind == "llm" else {}
        for key, most in lengths.items():
            _check_count(where, key, getattr(self, key), most)
        if self.kind != "llm" and not self.stages:
            raise InputError(f"{where}: stages must name units with at least one launch each")
        for unit, count in self.stages:
            if self.kind == "llm" and unit in ("prefill", "decode"):
                raise InputError(f"{where}: stages come before the prefill; launches of {unit} follow from the lengths")
            _check_count(where, f"stages: launches of {unit[:60]}", count, MAX_LAUNCHES)
        if sum(count for _, count in self.stages) > MAX_LAUNCHES:
            raise InputError(f"{where}: stages launch more than {MAX_LAUNCHES} units in all")
        for unit in self.units:
            if not self.traces.get(unit):
                raise InputError(f"{where}: no trace for unit {unit[:60]!r}; add one under 'traces'")
        _check_agreement(where, [t for unit in dict.fromkeys(self.units) for t in self.traces[unit]])


def _check_count(where: str, key: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InputError(f"{where}: {key} must be a whole number from 1 to {most}, not {shown(value)}")


def _check_agreement(where: str, traces: Sequence[Trace]) -> None:
    """Traces of one mix are of one model and say the same of the weights and the state that they share."""
    shared: dict[tuple[str, str, str], tuple[int, Trace]] = {}
    phases: dict[str, Any] = {}
    for trace in traces:
        first = traces[0]
        if trace.meta.model != first.meta.model:
            models = f"{_point(first)} is of {first.meta.model[:60]!r}, {_point(trace)} of {trace.meta.model[:60]!r}"
            raise InputError(f"{where}: traces of several models: {models}")
        phase = trace.meta.unit.get("phase")
        if phases.setdefault(trace.unit, phase) != phase:
            raise InputError(f"{where}: traces of unit {trace.unit[:60]} have different phases")
        for b in trace.buffers:
            for name in _SHARED_FIELDS.get(b.role, ()):
                value = getattr(b, name)
                told, other = shared.setdefault((b.role, b.name, name), (value, trace))
                if told != value:
                    both = f"{told} in {_point(other)} but {value} in {_point(trace)}"
                    raise InputError(f"{where}: {b.role} {b.name[:60]}: {name} is {both}; capture them alike")


def _point(trace: Trace) -> str:
    """The trace as errors name it: its unit and where it lies in the grid."""
    at = ", ".join(f"{k} {trace.meta.unit[k]}" for k in ("batch", "tokens", "context") if k in trace.meta.unit)
    return f"{trace.unit[:60]} ({at})" if at else trace.unit[:60]


def with_lengths(mix: Mix, input_tokens: int | None = None, output_tokens: int | None = None) -> Mix:
    """The same mix at other request lengths (llm only)."""
    import dataclasses

    if mix.kind != "llm":
        if input_tokens is not None or output_tokens is not None:
            raise InputError(f"mix {mix.name}: token lengths apply to language models only")
        return mix
    changed = dataclasses.replace(
        mix,
        input_tokens=mix.input_tokens if input_tokens is None else input_tokens,
        output_tokens=mix.output_tokens if output_tokens is None else output_tokens,
    )
    changed.validate()
    return changed


def load_mix(path: str | os.PathLike[str]) -> Mix:
    """Read a mix TOML; trace paths (globs allowed) are relative to the file.

    Raises InputError with file and key for anything missing or wrong.
    """
    file, where = Path(path), path_text(path)
    table = Table(read_toml(file, "mix"), where)
    name, model = table.text("name"), table.text("model")
    kind = table.text("kind", choices=KINDS)
    patterns = table.texts("traces", None)
    stages = _stages(table.take("stages"), where)
    # Only a language model has lengths: a stray one would change nothing.
    least = 1 if kind == "llm" else 0
    lengths = {key: table.integer(key, None, least, most) for key, most in MAX_LENGTHS.items()}
    incomplete = table.texts("incomplete", ())
    table.finish()
    traces = _collect(file, where, patterns)
    launched = [unit for unit, _ in stages] + (["prefill", "decode"] if kind == "llm" else [])
    for unit in traces:
        if unit not in launched:
            known = ", ".join(launched) or "none: stages is missing"
            raise InputError(f"{where}: a trace of unit {shown(unit)}, which no request launches; units: {known[:200]}")
    mix = Mix(
        name, model, kind, traces, lengths["input_tokens"] or 0,
        lengths["output_tokens"] or 0, lengths["prefill_batch"] or 1, stages, incomplete,
    )  # fmt: skip
    try:
        mix.validate()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return mix


def _stages(value: Any, where: str) -> tuple[tuple[str, int], ...]:
    """`[["unit", launches], ...]`; how many launches is for `Mix.validate`."""
    rows = [] if value is None else value
    if not isinstance(rows, list) or len(rows) > MAX_LAUNCHES:
        raise InputError(f'{where}: stages must be a list like [["denoise", 28]], not {shown(value)}')
    stages: list[tuple[str, int]] = []
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], str):
            raise InputError(f'{where}: stages must hold pairs like ["denoise", 28], not {shown(row)}')
        _check_count(where, f"stages: launches of {shown(row[0])}", row[1], MAX_LAUNCHES)
        if row[0] in dict(stages):
            raise InputError(f"{where}: stages names {shown(row[0])} twice; give its launches in one entry")
        stages.append((row[0], row[1]))
    return tuple(stages)


def _collect(file: Path, where: str, patterns: Sequence[str]) -> dict[str, tuple[Trace, ...]]:
    """The traces by unit, each unit's in the order of its grid points; one trace a point."""
    from tesserasim.trace.grid import coordinates  # grid needs UnitInstance from here

    found: dict[str, list[Trace]] = {}
    points: dict[tuple[str, float, float], Path] = {}
    for path in (path for pattern in patterns for path in _matches(file, where, pattern)):
        if len(points) >= MAX_FILES:
            raise InputError(f"{where}: 'traces' names more than {MAX_FILES} files")
        trace = read_trace(path)
        check_simulated(trace, path_text(path))
        point = (trace.unit, *coordinates(trace))
        if point in points:
            both = f"{path_text(points[point])} and {path_text(path)}"
            raise InputError(f"{where}: two traces of {_point(trace)}: {both}; name one of them")
        points[point] = path
        found.setdefault(trace.unit, []).append(trace)
    order = {unit: sorted(ts, key=lambda t: sorted(map(str, t.meta.unit.items()))) for unit, ts in found.items()}
    return {unit: tuple(ts) for unit, ts in order.items()}


def _matches(file: Path, where: str, pattern: str) -> list[Path]:
    if not any(c in pattern for c in "*?["):
        return [file.parent / pattern]
    if "**" in pattern or Path(pattern).is_absolute():
        raise InputError(f"{where}: traces: {shown(pattern)}: a pattern is relative to the mix file, without '**'")
    try:
        paths = sorted(islice(file.parent.glob(pattern), MAX_FILES + 1))
    except (ValueError, NotImplementedError, OSError) as error:
        raise InputError(f"{where}: traces: {shown(pattern)} is not a pattern ({error})") from None
    if len(paths) > MAX_FILES:
        raise InputError(f"{where}: traces: {shown(pattern)} matches more than {MAX_FILES} files")
    if not paths:
        raise InputError(f"{where}: no trace matches {shown(pattern)}")
    return paths
