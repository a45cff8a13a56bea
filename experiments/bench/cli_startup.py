"""How long `python -m tesserasim --help` takes: best and worst of 10 starts, in seconds.

    python experiments/bench/cli_startup.py
"""

from __future__ import annotations

import subprocess
import sys
import time

RUNS = 10
LIMIT_S = 0.5


def main() -> int:
    times = []
    for _ in range(RUNS):
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "tesserasim", "--help"], stdout=subprocess.DEVNULL, check=True)
        times.append(time.monotonic() - started)
    print(f"--help: best {min(times):.3f} s, worst {max(times):.3f} s of {RUNS} (limit {LIMIT_S} s)")
    return 0 if max(times) <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
