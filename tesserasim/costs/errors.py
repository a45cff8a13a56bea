"""The measured error of the roofline-ratio model, as shipped in `data/roofline_errors.json`.

The file is written by experiments/validation/costs_roofline.py from public kernel tables: predictions for GPUs
from the row of a reference GPU, against the row measured there. Per kind it holds

    systematic  root mean square, over GPUs and what limits the kernel there (floor, memory, compute), of the
                mean of log(predicted / measured)
    site        standard deviation of log(predicted / measured) around that mean

The site factor belongs to a shape: sites that repeat it (the layers of a model) share it, so whoever samples
errors must draw it once for all of them, or it averages out over the layers and promises too much.

GPUs that were never measured get the same figures. Kinds without a table get the worst of each (`fallback`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tesserasim.trace.model import KINDS


@dataclass(frozen=True)
class RooflineErrors:
    """Log-sd per kernel kind; `measured` names the kinds that have a table of their own."""

    by_kind: Mapping[str, tuple[float, float]]  # kind -> (systematic, site)
    measured: frozenset[str]
    source: str
    date: str

    def systematic(self, kind: str) -> float:
        return self.by_kind[kind][0]

    def site(self, kind: str) -> float:
        return self.by_kind[kind][1]

    def sigmas(self) -> dict[str, tuple[float, float]]:
        return dict(self.by_kind)


def from_table(table: Mapping[str, Any]) -> RooflineErrors:
    """The error table from the file's content; every known kind gets an entry."""
    kinds = table["kinds"]
    fallback = (float(table["fallback"]["systematic"]), float(table["fallback"]["site"]))
    by_kind = {
        k: (float(kinds[k]["systematic"]), float(kinds[k]["site"])) if k in kinds else fallback for k in KINDS
    }
    return RooflineErrors(by_kind, frozenset(kinds), table["source"], table["date"])


@cache
def load_errors() -> RooflineErrors:
    text = resources.files("tesserasim.costs").joinpath("data", "roofline_errors.json").read_text("utf-8")
    return from_table(json.loads(text))
