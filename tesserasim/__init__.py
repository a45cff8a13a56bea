"""tesserasim: which policy wins on a mixed set of GPUs, by how much, and how sure are we.

The package is imported in `--help`, so nothing heavy is imported here; the public functions load on
first use (PEP 562).
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "compare", "load_mix", "load_trace", "plan", "simulate"]


def __getattr__(name: str) -> Any:
    if name in {"compare", "load_mix", "load_trace", "plan", "simulate"}:
        from tesserasim import api

        return getattr(api, name)
    raise AttributeError(f"module 'tesserasim' has no attribute {name!r}")
