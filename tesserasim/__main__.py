"""`python -m tesserasim`."""

from __future__ import annotations

import sys

from tesserasim.cli import main

if __name__ == "__main__":
    sys.exit(main())
