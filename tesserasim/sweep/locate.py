"""Where the shipped mixes, traces and sweep specs lie.

They belong to the checkout, not to the package: an installed package looks in the working directory first and
then beside its own source. `TESSERASIM_TRACES` names a directory of mixes for every other case.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from tesserasim.errors import InputError

TRACES_VARIABLE = "TESSERASIM_TRACES"


def _homes() -> list[Path]:
    """Directories that may hold `traces/` and `experiments/`, nearest first."""
    return list(dict.fromkeys([Path.cwd(), Path(__file__).resolve().parents[2]]))


def trace_directories() -> list[Path]:
    """Directories with shipped mixes that exist, in search order."""
    named = os.environ.get(TRACES_VARIABLE)
    places = [Path(named)] if named else [home / "traces" for home in _homes()]
    return [p for p in places if p.is_dir()]


def shipped_mixes() -> dict[str, Path]:
    """Mix name (the file's stem) -> TOML file, the first directory winning."""
    found: dict[str, Path] = {}
    for directory in trace_directories():
        for path in sorted(directory.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def find_mix(text: str, relative_to: Path | None = None) -> Path:
    """The mix file that `text` means: a TOML path, or the name of a shipped mix."""
    if text.endswith(".toml") or "/" in text or os.sep in text:
        path = Path(text)
        return path if path.is_absolute() or relative_to is None else relative_to / path
    shipped = shipped_mixes()
    if text in shipped:
        return shipped[text]
    if not shipped:
        searched = os.environ.get(TRACES_VARIABLE) or ", ".join(str(h / "traces") for h in _homes())
        raise InputError(
            f"mix {text!r}: no mixes found in {searched}; run inside a checkout of tesserasim, "
            f"set {TRACES_VARIABLE} to its traces directory, or give a mix .toml file"
        )
    near = difflib.get_close_matches(text, shipped, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(f"mix {text!r}: {hint}known mixes: {', '.join(sorted(shipped))} (or give a .toml file)")


def default_spec() -> Path:
    """experiments/default.toml of the checkout."""
    for home in _homes():
        path = home / "experiments" / "default.toml"
        if path.is_file():
            return path
    looked = ", ".join(str(h) for h in _homes())
    raise InputError(
        f"no experiments/default.toml in {looked}; run inside a checkout of tesserasim or give a spec file"
    )
