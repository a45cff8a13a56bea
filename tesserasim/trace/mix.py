"""The mix: the units of one kind of request, and how often each is launched.

A *cohort* is what flows through the machines: B requests that share their decode steps. `Mix.cohort(B)`
lists its unit instances in program order, in whole launches; the planner alone uses launches per request.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tesserasim.errors import InputError
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import read_trace


@dataclass(frozen=True, slots=True)
class UnitInstance:
    """`count` consecutive launches of one unit at one point of its grid."""

    unit: str  # "prefill", "decode", "denoise"
    batch: int  # sequences (images) in this launch
    tokens: int  # new tokens per sequence
    context: int  # KV length at the end of this launch, new tokens included
    count: int = 1


@dataclass(frozen=True)
class Mix:
    """One kind of request.

    kind "llm": ceil(B / prefill_batch) prefills, then output_tokens - 1 decode steps at batch B whose KV
    length grows from input_tokens + 1 to input_tokens + output_tokens - 1 (the prefill gives token 1).
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
        if self.kind == "llm":
            return ("prefill", "decode") if self.output_tokens > 1 else ("prefill",)
        return tuple(name for name, _ in self.stages)

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
        steps = [UnitInstance("prefill", size, s, s, full)]
        if rest:
            steps.append(UnitInstance("prefill", rest, s, s, 1))
        steps += [UnitInstance("decode", batch, 1, s + j) for j in range(1, self.output_tokens)]
        return tuple(steps)

    def launches(self, batch: int) -> int:
        """Unit launches in one cohort of `batch` requests."""
        return sum(u.count for u in self.cohort(batch))

    def validate(self) -> None:
        """Raise InputError if lengths are absurd, a unit has no trace, or shared buffers disagree."""
        if self.kind not in ("llm", "image", "stages"):
            raise InputError(f"mix {self.name}: kind {self.kind!r} is none of llm, image, stages")
        if self.kind == "llm" and (self.input_tokens < 1 or self.output_tokens < 1 or self.prefill_batch < 1):
            raise InputError(f"mix {self.name}: input_tokens, output_tokens and prefill_batch must be at least 1")
        if self.kind != "llm" and (not self.stages or any(n < 1 for _, n in self.stages)):
            raise InputError(f"mix {self.name}: stages must name units with at least one launch each")
        shared: dict[str, tuple[int, str]] = {}
        for unit in self.units:
            if not self.traces.get(unit):
                raise InputError(f"mix {self.name}: no trace for unit {unit!r}; add one under 'traces'")
            for trace in self.traces[unit]:
                for b in trace.buffers:
                    if b.role != "weight":
                        continue
                    size, first = shared.setdefault(b.name, (b.nbytes, unit))
                    if size != b.nbytes:
                        raise InputError(
                            f"mix {self.name}: weight {b.name} has {size} bytes in {first} but {b.nbytes} in {unit}"
                        )


def with_lengths(mix: Mix, input_tokens: int | None = None, output_tokens: int | None = None) -> Mix:
    """The same mix at other request lengths (llm only)."""
    import dataclasses

    if mix.kind != "llm":
        if input_tokens is not None or output_tokens is not None:
            raise InputError(f"mix {mix.name}: token lengths apply to language models only")
        return mix
    changed = dataclasses.replace(
        mix, input_tokens=input_tokens or mix.input_tokens, output_tokens=output_tokens or mix.output_tokens
    )
    changed.validate()
    return changed


def load_mix(path: str | os.PathLike[str]) -> Mix:
    """Read a mix TOML; trace paths (globs allowed) are relative to the file.

    Raises InputError with file and key for anything missing or wrong.
    """
    where = Path(path)
    try:
        data = tomllib.loads(where.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{where}: no such mix file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise InputError(f"{where}: not a mix file ({error})") from None
    try:
        name, model, kind = str(data["name"]), str(data["model"]), str(data["kind"])
        patterns = data["traces"]
    except KeyError as error:
        raise InputError(f"{where}: key {error} is missing") from None
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise InputError(f"{where}: 'traces' must be a list of file names")
    traces = _collect(where, patterns)
    try:
        stages = tuple((str(unit), int(n)) for unit, n in data.get("stages", []))
        mix = Mix(
            name, model, kind, traces,
            input_tokens=int(data.get("input_tokens", 0)), output_tokens=int(data.get("output_tokens", 0)),
            prefill_batch=int(data.get("prefill_batch", 1)), stages=stages,
            incomplete=tuple(map(str, data.get("incomplete", []))),
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from None
    mix.validate()
    return mix


def _collect(where: Path, patterns: Sequence[str]) -> dict[str, tuple[Trace, ...]]:
    found: dict[str, list[Trace]] = {}
    for pattern in patterns:
        paths = sorted(where.parent.glob(pattern)) if any(c in pattern for c in "*?[") else [where.parent / pattern]
        if not paths:
            raise InputError(f"{where}: no trace matches {pattern!r}")
        for path in paths:
            trace = read_trace(path)
            found.setdefault(trace.unit, []).append(trace)
    order = {unit: sorted(ts, key=lambda t: sorted(map(str, t.meta.unit.items()))) for unit, ts in found.items()}
    return {unit: tuple(ts) for unit, ts in order.items()}
