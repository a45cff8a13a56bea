"""The catalogue: GPU types, link kinds and prices, each figure with its source.

The tables are CSV files beside this module (`data/`), small enough to read in an editor. A GPU has one
canonical name ("A100-80GB-PCIe") and aliases, among them what the driver reports ("NVIDIA A100 80GB PCIe").
Names are compared without case, blanks, dashes and the vendor's words, so "h100 sxm" finds "H100-SXM". A name
that fits several types ("A100") is refused with the candidates: a silent choice would hide a factor of two.
"""

from __future__ import annotations

import csv
import difflib
import math
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from tesserasim.cluster.model import GpuSpec, LinkKind, Price
from tesserasim.errors import InputError
from tesserasim.files import check_regular, read_text, read_toml, shown

PRICE_CHOICES = ("median", "min", "max", "paper")
MAX_USD_PER_HOUR = 10_000.0  # an hourly price of one GPU beyond this is a typing error
MIB = 1 << 20
_VENDOR_WORDS = frozenset({"nvidia", "amd", "tesla", "geforce", "instinct"})


def _rows(name: str) -> list[dict[str, str]]:
    text = resources.files("tesserasim.cluster").joinpath("data", name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _number(text: str) -> float | None:
    return float(text) if text else None


def _split(text: str) -> tuple[str, ...]:
    return tuple(x for x in text.split(";") if x)


def _key(name: str) -> str:
    """The name as it is compared: lower case, letters and digits only, without the vendor's words."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return "".join(w for w in words if w and w not in _VENDOR_WORDS)


def _spec(row: dict[str, str]) -> GpuSpec:
    source = f"{row['source']}; memory: {row['memory_source']}; L2 rate: {row['l2_rate_source']}"
    return GpuSpec(
        name=row["name"],
        aliases=_split(row["aliases"]),
        architecture=row["architecture"],
        compute_capability=row["compute_capability"],
        sms=int(row["sms"]),
        clock_mhz=int(row["clock_mhz"]),
        bf16_tflops=float(row["bf16_tflops"]),
        fp8_tflops=_number(row["fp8_tflops"]),
        memory_bytes=int(row["memory_bytes"]),
        bandwidth_gbs=float(row["bandwidth_gbs"]),
        l2_bytes=int(row["l2_mb"]) * MIB,
        tdp_w=float(row["tdp_w"]),
        effective_gbs=_number(row["effective_gbs"]),
        pcie_gen=int(row["pcie_gen"]),
        nvlink_gbs=_number(row["nvlink_gbs"]),
        source=source,
        unverified=row["unverified"],
        l2_gbs=_number(row["l2_gbs"]),
        notes=row["notes"],
    )


@cache
def _catalogue() -> dict[str, GpuSpec]:
    return {row["name"]: _spec(row) for row in _rows("gpus.csv")}


@cache
def _index() -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Compared name -> canonical name, and compared name -> candidates for names that fit several types."""
    index: dict[str, str] = {}
    wide: dict[str, list[str]] = {}
    for row in _rows("gpus.csv"):
        for alias in (row["name"], *_split(row["aliases"])):
            if index.setdefault(_key(alias), row["name"]) != row["name"]:
                raise ValueError(f"gpus.csv: {alias!r} names both {index[_key(alias)]} and {row['name']}")
        for alias in _split(row["too_wide"]):
            wide.setdefault(_key(alias), []).append(row["name"])
    return index, {k: tuple(v) for k, v in wide.items()}


def gpus() -> dict[str, GpuSpec]:
    """All GPU types, canonical name -> figures, in the catalogue's order."""
    return dict(_catalogue())


def find_gpu(name: str) -> GpuSpec:
    """The GPU type that `name` means: a canonical name or an alias, whatever its case, dashes and blanks.

    Raises InputError for a name that fits several types (lists them) and for an unknown one (near matches).
    """
    index, wide = _index()
    key = _key(name)
    if key in index:
        return _catalogue()[index[key]]
    if key in wide:
        raise InputError(f"GPU {name[:60]!r} fits several types: write one of {', '.join(wide[key])}")
    near = difflib.get_close_matches(key, list(index), n=5, cutoff=0.5)
    names = list(dict.fromkeys(index[k] for k in near)) or list(_catalogue())
    hint = "did you mean" if near else "the catalogue has"
    raise InputError(f"unknown GPU {name[:60]!r}: {hint} {', '.join(names)}?")


def link_kinds() -> dict[str, LinkKind]:
    """NVLink 2-5, PCIe 4 and 5 (16 lanes) and RDMA ports, name -> figures with a source each."""
    return dict(_link_kinds())


@cache
def _link_kinds() -> dict[str, LinkKind]:
    return {
        r["name"]: LinkKind(
            r["name"],
            float(r["gbps"]),
            float(r["nominal_gbps"]),
            float(r["latency_us"]),
            r["gbps_source"],
            r["latency_source"],
        )
        for r in _rows("links.csv")
    }


def prices(which: str = "median") -> dict[str, Price]:
    """US dollars per GPU hour, GPU name -> price. A GPU without a known price is absent, never 0.

    `which`: "median", "min" or "max" of the on-demand offers collected, "paper" for the prices the published
    planner assumed, or the path of a table with columns `gpu, usd_per_hour` (CSV) or of a TOML file with
    `"GPU" = usd_per_hour` lines. Raises InputError for an unreadable file or a price that is not a positive
    number.
    """
    if which in ("median", "min", "max"):
        return {r["gpu"]: _offer_price(r, which) for r in _rows("prices.csv")}
    if which == "paper":
        rows = _rows("prices_paper.csv")
        return {r["gpu"]: _single(float(r["usd_per_hour"]), r["date"], r["source"]) for r in rows}
    return _price_file(which)


def _single(usd: float, date: str, source: str) -> Price:
    return Price(usd, usd, usd, date, source)


def _offer_price(row: dict[str, str], which: str) -> Price:
    low, high = float(row["low"]), float(row["high"])
    usd = {"median": float(row["median"]), "min": low, "max": high}[which]
    source = {
        "median": f"median of {row['offers']} on-demand offers: {row['providers']}",
        "min": row["low_source"],
        "max": row["high_source"],
    }[which]
    return Price(usd, low, high, row["dates"], source)


def _price_file(which: str) -> dict[str, Price]:
    path = Path(which)
    try:
        check_regular(path, "price table")
    except InputError:
        raise InputError(f"prices {shown(which)}: neither {', '.join(PRICE_CHOICES)} nor a file") from None
    try:
        pairs = _toml_prices(path) if path.suffix == ".toml" else _csv_prices(read_text(path, "price table"))
    except csv.Error as e:
        raise InputError(f"prices {which}: cannot be read: {e}") from e
    except KeyError as e:
        raise InputError(f"prices {which}: no column {e}; needed: gpu, usd_per_hour") from e
    if not pairs:
        raise InputError(f"prices {which}: no prices found; needed: columns gpu, usd_per_hour")
    return {find_gpu(gpu).name: price_of(usd, f"prices {which}: {gpu}", path.name) for gpu, usd in pairs}


def _csv_prices(text: str) -> list[tuple[str, Any]]:
    lines = [x for x in text.splitlines() if x.strip() and not x.lstrip().startswith("#")]
    return [(r["gpu"], r["usd_per_hour"]) for r in csv.DictReader(lines, skipinitialspace=True)]


def _toml_prices(path: Path) -> list[tuple[str, Any]]:
    table = read_toml(path, "price")
    inner = table.get("prices", table)
    return list(inner.items()) if isinstance(inner, dict) else []


def price_of(value: Any, where: str, source: str) -> Price:
    """A price a user stated; InputError (naming `where`) unless it is a positive, finite, sensible number."""
    try:
        plain = not isinstance(value, str) or re.fullmatch(r"[0-9.eE+-]+", value.strip())
        usd = float(value) if plain and not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        usd = math.nan
    if not 0 < usd <= MAX_USD_PER_HOUR:
        limit = f"0 < price <= {MAX_USD_PER_HOUR:g}"
        raise InputError(f"{where}: {shown(value)} is not a price in US dollars per hour ({limit})")
    return _single(usd, "given", source)


def describe_gpus(which: str = "median") -> list[dict[str, Any]]:
    """The catalogue as plain rows, for `gpus --json`; prices as in `prices(which)`, None where unknown."""
    known = prices(which)
    rows = []
    for g in _catalogue().values():
        p = known.get(g.name)
        rows.append(
            {
                "name": g.name,
                "aliases": list(g.aliases),
                "architecture": g.architecture,
                "compute_capability": g.compute_capability,
                "sms": g.sms,
                "clock_mhz": g.clock_mhz,
                "bf16_tflops": g.bf16_tflops,
                "fp8_tflops": g.fp8_tflops,
                "memory_bytes": g.memory_bytes,
                "bandwidth_gbs": g.bandwidth_gbs,
                "effective_gbs": g.effective_gbs,
                "l2_bytes": g.l2_bytes,
                "l2_gbs": g.l2_gbs,
                "tdp_w": g.tdp_w,
                "pcie_gen": g.pcie_gen,
                "nvlink_gbs": g.nvlink_gbs,
                "usd_per_hour": p.usd_per_hour if p else None,
                "usd_per_hour_low": p.low if p else None,
                "usd_per_hour_high": p.high if p else None,
                "price_date": p.date if p else None,
                "price_source": p.source if p else None,
                "source": g.source,
                "unverified": g.unverified,
                "notes": g.notes,
            }
        )
    return rows
