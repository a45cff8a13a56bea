"""What co-running costs: four constants, one per mechanism, each with its source (sharing.json).

All are 1 unless measured: nothing is then lost by sharing, beyond the resources themselves. None of them
touches a kernel that runs alone on its device and DRAM, which takes exactly its duration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from tesserasim.errors import InputError

#: Rates and demands are whole multiples of 2^-20: a rate of ONE is a kernel that runs as if alone, a demand
#: of ONE all multiprocessors of a device, or all the bandwidth of a DRAM.
ONE = 1 << 20


@dataclass(frozen=True, slots=True)
class Sharing:
    """The constants, in units of 2^-20 (1 to ONE)."""

    sm_efficiency: int = ONE
    dram_efficiency: int = ONE
    corun_rate: int = ONE
    dram_byte_share: int = ONE  # used where demands are made (tesserasim/demands.py), not by an engine


def sharing_of(document: Mapping[str, Any], where: str = "sharing") -> Sharing:
    """Constants from the content of a file like sharing.json. InputError names the constant that is wrong."""
    values: dict[str, int] = {}
    for name in (f.name for f in fields(Sharing)):
        entry = document.get(name)
        value = entry.get("value") if isinstance(entry, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 / ONE <= value <= 1:
            raise InputError(f"{where}: {name} needs a value from 2^-20 to 1")
        values[name] = round(value * ONE)
    return Sharing(**values)


@cache
def load_sharing() -> Sharing:
    """The shipped constants."""
    text = resources.files("tesserasim.sim").joinpath("sharing.json").read_text(encoding="utf-8")
    return sharing_of(json.loads(text), "sharing.json")
