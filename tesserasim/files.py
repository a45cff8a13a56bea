"""Opening what a user names: regular files of sensible size, and one line for everything else.

Pipes, devices and directories are refused before they are opened, so no reader waits or reads without end.
"""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from collections.abc import Sequence
from typing import Any

from tesserasim.errors import InputError

MAX_TEXT_BYTES = 64 << 20
MAX_TOML_BYTES = 1 << 20
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def shown(value: Any, limit: int = 60) -> str:
    """The value as it is quoted in an error: on one line, cut at `limit` characters."""
    if isinstance(value, int) and value.bit_length() > 4 * limit:
        return f"a number of {value.bit_length()} bits"  # int -> str has a limit of its own
    try:
        text = repr(value if not isinstance(value, str) else value[: limit + 1])
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= limit + 2 else f"{text[: limit - 1]}..."


def path_text(path: str | os.PathLike[str]) -> str:
    """The path as errors name it: as it is if it is one readable line, else quoted and cut."""
    text = os.fspath(path)
    return text if text.isprintable() and len(text) <= 400 else shown(text)


def check_regular(path: str | os.PathLike[str], what: str) -> int:
    """The size of the file in bytes; InputError unless `path` is a regular file."""
    name = path_text(path)
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{name}: no such {what}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: not the path of a {what} ({getattr(error, 'strerror', None) or error})") from None
    if not stat.S_ISREG(status.st_mode):
        found = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise InputError(f"{name}: {found}, not a {what}; name a regular file")
    return status.st_size


def read_text(path: str | os.PathLike[str], what: str, limit: int = MAX_TEXT_BYTES) -> str:
    """The UTF-8 text of a regular file (a byte-order mark is dropped); InputError in one line for anything else."""
    try:
        return read_bytes(path, what, limit).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path_text(path)}: not UTF-8 text, so not a {what}") from None


def read_bytes(path: str | os.PathLike[str], what: str, limit: int = MAX_TEXT_BYTES) -> bytes:
    """The content of a regular file of at most `limit` bytes; InputError in one line for anything else."""
    check_regular(path, what)
    name = path_text(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror})") from None
    if len(raw) > limit:
        raise InputError(f"{name}: larger than {limit >> 20} MiB, so not a {what}")
    return raw


def read_toml(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """The file as a dict; InputError in one line for anything that is not a TOML file of sensible size."""
    text, name = read_text(path, f"{what} file", MAX_TOML_BYTES), path_text(path)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{name}: nested too deeply to be a {what} file") from None
    except ValueError as error:
        first = (str(error).splitlines() or ["unreadable"])[0]
        raise InputError(f"{name}: not valid TOML, so not a {what} file ({first[:120]})") from None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word[:80], known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
