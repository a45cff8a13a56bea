"""What a command meets outside: streams that are closed or speak no Unicode, and signals to stop."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from tesserasim.errors import TesserasimError

DONE, SOME_FAILED, BAD_INPUT, BUG, INTERRUPTED, PIPE_CLOSED, STOPPED = 0, 1, 2, 3, 130, 141, 143
DEBUG = "TESSERASIM_DEBUG"


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


def outcome(program: str, run: Callable[[], int]) -> int:
    """What `run` returns; for what escapes it one line on standard error and the exit code that goes with it."""
    with prepared():
        try:
            code = run()
            put(end="")  # what is still buffered is a result too
            return code
        except TesserasimError as error:
            if isinstance(error, OutputError):
                drop_output()
            return _complain(program, str(error), BAD_INPUT)
        except KeyboardInterrupt:
            return _complain(program, "interrupted; what is finished is saved", INTERRUPTED)
        except Stopped:
            return _complain(program, "stopped; what is finished is saved", STOPPED)
        except BrokenPipeError:
            drop_output()
            return PIPE_CLOSED
        except OSError as error:
            where = error.filename or "a file or standard output"
            try:
                sys.stdout.flush()
            except (OSError, ValueError):
                where = "standard output"
                drop_output()
            return _complain(program, f"{where}: {error.strerror or error}", BAD_INPUT)
        except MemoryError:
            return _complain(program, "not enough memory for this input; give a smaller one", BAD_INPUT)
        except Exception as error:
            text = f"internal error: {type(error).__name__}: {error} (set {DEBUG}=1 for the traceback)"
            return _complain(program, text, BUG)


def _complain(program: str, text: str, code: int) -> int:
    if os.environ.get(DEBUG):
        import traceback

        traceback.print_exc()
    say(program, text)
    return code


def say(program: str, text: str) -> None:
    """One line on standard error, without what would steer a terminal; one that is gone is no reason to stop."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    with contextlib.suppress(OSError):
        print(f"{program}: {line}", file=sys.stderr, flush=True)


def drop_output() -> None:
    """Python flushes standard output at exit: with nobody to take it, let it flush into nothing."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def takes_any_character() -> bool:
    """Standard output writes every character as it is."""
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
