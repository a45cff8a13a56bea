"""Files that a user names for output: written whole or not at all.

A path that cannot be written is refused by `check_output` before anything is computed. Errors name the path that was
given, never the hidden file that is written first.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tesserasim.errors import InputError
from tesserasim.files import path_text

PathLike = str | os.PathLike[str]


def check_output(path: PathLike, *inputs: PathLike) -> None:
    """InputError unless a file can be written at `path`: new, or in place of a regular file that is no input."""
    where = os.fspath(path)
    with naming(where):
        real = os.path.realpath(where)
        mode = _mode(real)
        if mode is not None and stat.S_ISDIR(mode):
            raise InputError(f"{where}: is a directory; name a file to write")
        if mode is not None and not stat.S_ISREG(mode):
            raise InputError(f"{where}: is not a regular file and is not replaced; name another file to write")
        directory = os.path.dirname(real)
        above = _mode(directory)
        if above is None:
            raise InputError(f"{where}: there is no directory {directory}; make it first")
        if not stat.S_ISDIR(above):
            raise InputError(f"{where}: {directory} is not a directory")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise InputError(f"{where}: directory {directory} is not writable; name a file elsewhere")
        for given in inputs:
            if mode is not None and os.path.exists(given) and os.path.samefile(given, real):
                raise InputError(f"{where}: is read by this command; name another file to write")


def check_directory(path: PathLike) -> None:
    """InputError unless `path` is a directory that can be written, or one can be made there."""
    where = os.fspath(path)
    with naming(where):
        place = os.path.realpath(where)
        while (mode := _mode(place)) is None and place != os.path.dirname(place):
            place = os.path.dirname(place)
        if mode is None or not stat.S_ISDIR(mode):
            raise InputError(f"{where}: {place} is not a directory; name another directory to write")
        if not os.access(place, os.W_OK | os.X_OK):
            raise InputError(f"{where}: {place} is not writable; name another directory to write")


def write_whole(path: PathLike, content: bytes) -> None:
    """Write `path` so that it appears whole or not at all, even if the machine stops; makes its directory.

    Through a link the file that it leads to is written. InputError names `path` if it cannot be.
    """
    where = os.fspath(path)
    with naming(where):
        target = Path(os.path.realpath(where))
        target.parent.mkdir(parents=True, exist_ok=True)
        check_output(where)
        partial = target.with_name(f".{target.name[:40]}.{os.getpid()}.tmp")
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextlib.contextmanager
def naming(path: PathLike) -> Iterator[None]:
    """Turn an error of the file system into an InputError about `path`."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path_text(path)}: cannot be written ({reason(error)})") from None


def reason(error: Exception) -> str:
    """Why, without the name of a file."""
    return (isinstance(error, OSError) and error.strerror) or (str(error).splitlines() or ["unknown"])[0]


def _mode(path: str) -> int | None:
    """What lies at `path`; None if nothing."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
