"""The arguments of the api, checked by name before anything runs: a wrong type is an InputError, never a traceback."""

from __future__ import annotations

import dataclasses
import difflib
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tesserasim.errors import InputError
from tesserasim.sim.engine import check_engine
from tesserasim.sim.program import DEVICE_MODELS
from tesserasim.sweep.bench import Options
from tesserasim.sweep.spec import ENGINES, MAX_TOKENS

#: The largest number an option may be: far beyond any machine, small enough for exact arithmetic.
MOST = 1_000_000
MAX_SEED = 2**63 - 1


def options_of(options: Mapping[str, Any], batch: Any, depth: Any, **more: Any) -> Options:
    """Checked options. Raises InputError for an unknown name and for values that are none."""
    known = [f.name for f in dataclasses.fields(Options)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise InputError(f"unknown option {name!r}; " + (f"did you mean {near[0]}?" if near else ", ".join(known)))
    found = {**options, **more}
    found |= {name: numbers(name, value) for name, value in (("batch", batch), ("depth", depth)) if value is not None}
    if found.get("max_seqs") is not None:
        found["max_seqs"] = whole("max_seqs", found["max_seqs"])
    else:
        found.pop("max_seqs", None)
    if found.get("in_flight") is not None:
        found["in_flight"] = whole("in_flight", found["in_flight"])
    if "seed" in found:
        found["seed"] = whole("seed", found["seed"], 0, MAX_SEED)
    if "engine" in found and found["engine"] not in ENGINES:
        raise InputError(f"engine: {short(found['engine'])} is none of {', '.join(ENGINES)}")
    if "device_model" in found:
        if found["device_model"] not in DEVICE_MODELS:
            raise InputError(f"device_model: {short(found['device_model'])} is none of {', '.join(DEVICE_MODELS)}")
        check_engine(found.get("engine", "auto"), found["device_model"])
    for name in ("allow_extrapolation", "check"):
        if name in found:
            flag(name, found[name])
    return Options(**found)


def numbers(name: str, value: Any) -> tuple[int, ...]:
    """One whole number or several."""
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    values = tuple(whole(name, v) for v in (value if several else (value,)))
    if not values:
        raise InputError(f"{name}: an empty list leaves nothing to choose from")
    return values


def whole(name: str, value: Any, low: int = 1, high: int = MOST) -> int:
    """A whole number, of numpy too."""
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        raise InputError(f"{name}: {short(value)} is not a whole number from {low} to {high}")
    return number


def interval(name: str, value: Any) -> tuple[int, int]:
    """(first, end) with 0 <= first < end."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 2:
        raise InputError(f"{name}: {short(value)} is not (first, end)")
    first = whole(name, value[0], 0, MAX_SEED)
    return first, whole(name, value[1], first + 1, MAX_SEED)


def tokens(name: str, value: Any) -> int | None:
    """A length in tokens; None: the mix's."""
    return None if value is None else whole(name, value, 1, MAX_TOKENS)


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InputError(f"{name}: {short(value)} is neither True nor False")


def text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{name}: {short(value)} is not a text")
    return value


def path(name: str, value: Any) -> Any:
    """The path as it is."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise InputError(f"{name}: {short(value)} is not a path")
    return value


def names(name: str, value: Any) -> list[str] | None:
    """A list of names; None: all."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        raise InputError(f"{name}: {short(value)} is not a list of names")
    return [text(name, v) for v in value]


def short(value: Any) -> str:
    """A value for a message."""
    try:
        return repr(value)[:40]
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__}"
