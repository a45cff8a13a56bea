"""PTX as evidence: what the kernel of a graph node may do with each pointer that it was given.

Triton keeps the PTX of every variant that it compiled. The recorder notes the text of the variant that a launch
ran; a node takes it only if its function has the name of an entry and its parameters have the entry's sizes.
Everything here fails soft: without a text, or with one that does not fit, there is no evidence from PTX and the
declared modes stand.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hw.capture.driver import Node
from tesserasim.deps.ptx.analysis import EVERYTHING, analyse
from tesserasim.deps.ptx.parse import parse
from tesserasim.errors import TesserasimError

#: Modes as sets of effects; `unknown` contains them all.
_EFFECTS = {"none": 0, "R": 1, "W": 2, "RW": 3, "unknown": 7}
_NAMES = {v: k for k, v in _EFFECTS.items()}


@dataclass(frozen=True)
class Compiled:
    """PTX of what a launch ran, for the graph nodes `first` to `last` - 1."""

    first: int
    last: int
    ptx: str


@dataclass(frozen=True)
class PointerModes:
    """What one node may do, by the addresses in its parameters."""

    modes: Mapping[int, str]  # address -> none | R | W | RW | unknown
    everything: bool = False  # memory that no parameter names is touched


def union(*modes: str) -> str:
    """The least mode that allows what each of `modes` allows."""
    effects = 0
    for mode in modes:
        effects |= _EFFECTS[mode]
    return _NAMES[effects]


def minus(mode: str, allowed: str) -> str:
    """The effects of `mode` that `allowed` does not allow."""
    return _NAMES[_EFFECTS[mode] & ~_EFFECTS[allowed]]


def within(mode: str, allowed: str) -> bool:
    """Whether `allowed` allows everything that `mode` does."""
    return not _EFFECTS[mode] & ~_EFFECTS[allowed]


def text_of(kernel: Any) -> str:
    """PTX of a compiled Triton kernel; "" where it is not at hand."""
    try:
        return str((getattr(kernel, "asm", None) or {}).get("ptx", ""))
    except Exception:  # read from files on demand: no evidence, no failure
        return ""


def tuned_text(tuner: Any) -> str:
    """PTX of the variant that an Inductor kernel ran last; "" where several could be it or it is not at hand.

    Inductor's static launcher keeps no text, only the key of its folder in Triton's cache, where the PTX lies.
    """
    try:
        launchers = list(getattr(tuner, "launchers", None) or ())
        if len(launchers) != 1:
            return ""
        text = text_of(getattr(launchers[0], "bin", None))
        return text or _cached(launchers[0].cache_hash, int(tuner.compile_results[0].compile_meta.get("device") or 0))
    except Exception:  # other versions keep it elsewhere
        return ""


def _cached(key: str, device: int) -> str:
    from torch._inductor.runtime.runtime_utils import triton_cache_dir

    found = list((Path(triton_cache_dir(device)) / key).glob("*.ptx"))
    return found[0].read_text() if len(found) == 1 else ""


@dataclass(frozen=True)
class _Entry:
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    arrays: tuple[bool, ...]
    modes: Mapping[str, str]


@functools.lru_cache(maxsize=4096)
def _entries(ptx: str) -> Mapping[str, _Entry]:
    """Parameters and modes per entry; empty for a text that cannot be analysed."""
    try:
        module = parse(ptx, "<ptx>")
        modes = {name: effects.modes for name, effects in analyse(ptx).items()}
    except (TesserasimError, RecursionError):
        return {}
    return {
        e.name: _Entry(
            tuple(p.nbytes for p in e.params), tuple(p.name for p in e.params), tuple(p.array for p in e.params),
            modes[e.name],
        )
        for e in module.entries
    }  # fmt: skip


def pointer_modes(node: Node, number: int, compiled: Sequence[Compiled]) -> PointerModes | None:
    """Modes of the pointers that graph node `number` was given; None without a text that fits it."""
    for c in compiled:
        if c.first <= number < c.last:
            entry = _entries(c.ptx).get(node.name)
            if entry is not None and tuple(len(p) for p in node.params) == entry.sizes:
                return _modes(node, entry)
    return None


def _modes(node: Node, entry: _Entry) -> PointerModes:
    found: dict[int, str] = {}
    for name, array, data in zip(entry.names, entry.arrays, node.params, strict=True):
        for key, mode in entry.modes.items():
            parameter, _, offset = key.partition("+")
            if parameter != name:
                continue
            if offset:
                places = [int(offset)]
            else:
                # A tensor map keeps the address of its tensor somewhere in its 128 bytes.
                places = list(range(0, len(data) - 7, 4)) if array else [0]
            for at in places:
                address = int.from_bytes(data[at : at + 8], "little")
                if len(data) >= at + 8 and address:
                    found[address] = union(found.get(address, "none"), mode)
    return PointerModes(found, EVERYTHING in entry.modes)
