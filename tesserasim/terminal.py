"""What a command meets outside: streams that are closed or speak no Unicode, and signals to stop."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from tesserasim.errors import TesserasimError


class Stopped(BaseException):
    """SIGTERM: end like an interrupt, so that workers are ended too."""


class OutputError(TesserasimError):
    """Standard output cannot be written."""


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Streams that any text can be printed to, and SIGTERM as an exception (in the main thread)."""
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # standard error replaces by itself
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def _open_streams() -> None:
    """Closed standard streams lead nowhere; left closed, the next file opened would take their place."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            os.set_inheritable(number, True)
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding="utf-8")


def put(text: str = "", end: str = "\n") -> None:
    """Print and flush. BrokenPipeError if nobody reads; OutputError if standard output cannot be written."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output: cannot be written ({error.strerror})") from None


def drop_output() -> None:
    """Python flushes standard output at exit: with nobody to take it, let it flush into nothing."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def takes_any_character() -> bool:
    """Standard output writes every character as it is."""
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
