"""Strict reading of TOML, as the sweep uses it: the readers of `files` and `tables` under one name."""

from __future__ import annotations

from tesserasim.files import did_you_mean, read_toml
from tesserasim.tables import Table

__all__ = ["Table", "did_you_mean", "read_toml"]
