"""Puts what the scripts print into docs/costs.md.

    python experiments/validation/costs_docs.py [NAME…] [--check]

A block between `<!-- generated: NAME -->` and `<!-- end -->` is the output of experiments/validation/NAME.py. Without
names all blocks are made again (costs_choices reads the large GEMM table and takes a minute); `--check` writes nothing
and exits with 1 if a block differs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "costs.md"
BLOCK = re.compile(r"<!-- generated: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)


def block(name: str) -> str:
    """What the script prints."""
    script = Path(__file__).with_name(f"{name}.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, cwd=REPO)
    return f"\n{done.stdout.strip()}\n\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    known = [found.group(1) for found in BLOCK.finditer(text)]
    if set(options.names) - set(known):
        parser.error(f"no such block; there are: {', '.join(known)}")
    made = {name: block(name) for name in options.names or known}

    def replaced(found: re.Match[str]) -> str:
        name = found.group(1)
        return f"<!-- generated: {name} -->\n{made.get(name, found.group(2))}<!-- end -->"

    new = BLOCK.sub(replaced, text)
    if options.check:
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
