"""How long the PTX analysis takes: the kept nvcc kernels, repeated under other names to 10,000 lines and more.

    python experiments/bench/ptx_speed.py
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from tesserasim.deps.ptx import modes

TEXT = (Path(__file__).resolve().parents[2] / "tests" / "data" / "ptx" / "kernels.ptx").read_text()


def main() -> None:
    head, body = TEXT.split(".address_size 64")
    names = set(re.findall(r"(?:\.entry|\.func(?:\s*\([^)]*\))?)\s+(\w+)\s*\(", body)) - {"vprintf"}
    for lines in (2_500, 10_000, 40_000):
        copies = range(lines // body.count("\n") + 1)
        pattern = re.compile(rf"\b({'|'.join(names)})\b")
        text = head + ".address_size 64" + "".join(pattern.sub(rf"\1_{i}", body) for i in copies)
        began = time.perf_counter()
        found = modes(text)
        print(f"{text.count(chr(10)):>7} lines {len(found):>5} kernels {time.perf_counter() - began:6.2f} s")


if __name__ == "__main__":
    main()
