"""A process that hangs is ended, and says where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parents[1]
# A lock that nobody gives back keeps the main thread as a driver does; no signal wakes it within the block.
HANGS = """
import sys, threading
from pathlib import Path
from hw.watchdog import watchdog
with watchdog(5.0, "quick"):
    pass
with watchdog(0.2, "plan p", lambda: Path(sys.argv[1]).write_text("last")):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""


def test_a_hang_ends_with_last_words(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path / "words")], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and (tmp_path / "words").read_text() == "last"
    assert done.stderr.splitlines() == ["hw: plan p: no end after 0.2 s, given up"]
