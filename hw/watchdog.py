"""The end of a run that hangs.

A kernel that waits for ever cannot be stopped, and who waits for it sits in the driver and hears no signal. So a
thread ends the process, after it has said where.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def watchdog(seconds: float, what: str, last_words: Callable[[], None] | None = None) -> Iterator[None]:
    """End the process with code 1 if the block takes longer, after `last_words` and a line that names `what`."""

    def ring() -> None:
        try:
            if last_words is not None:
                last_words()
        finally:
            print(f"hw: {what}: no end after {seconds:g} s, given up", file=sys.stderr, flush=True)
            os._exit(1)

    timer = threading.Timer(seconds, ring)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
