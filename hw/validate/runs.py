"""The runs file of `python -m hw validate`: which journals, traces, links, launch figures and split belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hw.journals import Journal, Split, read_hop, read_json, read_split, read_whole
from hw.validate.bench import Unit, partition_sms
from tesserasim.errors import InputError
from tesserasim.files import did_you_mean, path_text, read_toml, shown
from tesserasim.trace.parquet import read_trace

MAX_LAUNCH_NS = 1e6


@dataclass(frozen=True)
class Runs:
    """Units with the files of their journals, and the split that judges them."""

    split: Split
    units: tuple[tuple[Path, Unit], ...]


def read_runs(path: Path) -> Runs:
    """The split and every unit of a runs file. InputError in one line for anything that is not as it should be."""
    data = read_toml(path, "runs")
    name, here, units = path_text(path), path.parent, data.get("unit")
    if not isinstance(data.get("split"), str) or not isinstance(units, list) or not units:
        raise InputError(f"{name}: needs 'split' and at least one [[unit]]")
    _only(data, ("split", "unit"), name)
    split = read_split(here / data["split"])
    checked = [_checked(u, name) for u in units]
    journals = [(here / u["journal"]).resolve() for u in checked if u["journal"].isprintable()]
    if len(set(journals)) < len(journals):
        raise InputError(f"{name}: two [[unit]]s name one journal, whose runs would count twice")
    return Runs(split, tuple((here / u["journal"], _unit(u, here)) for u in checked))


#: What may have moved bytes between devices.
COPIES = ("engine", "kernel")


def journal_of(path: Path, unit: Unit) -> Journal:
    """The journal of a unit; InputError if it was run at another point or on other partitions than its traces."""
    journal = read_whole(path)
    if journal.copies != unit.copies:
        raise InputError(f"{path_text(path)}: its bytes were moved by {journal.copies} copies, not by {unit.copies}")
    for device, trace in unit.traces.items():
        own = trace.meta.unit
        for key in ("name", "batch", "tokens", "context"):
            if key in own and journal.point.get(key, own[key]) != own[key]:
                raise InputError(
                    f"{path_text(path)}: its {key} was {shown(journal.point[key])}, that of the trace is {own[key]}"
                )
        for m in journal.measured:
            sms = m.machine.sms.get(device)
            if sms is not None and partition_sms(trace) not in (None, sms):
                raise InputError(
                    f"{path_text(path)}: device {device} had {sms} multiprocessors, its trace is of {trace.meta.gpu}"
                )
    return journal


def read_paths(path: Path) -> list[Path]:
    """Every file that a runs file names, whatever else is wrong with it."""
    data, here = read_toml(path, "runs"), path.parent
    named: list[Any] = [data.get("split")]
    for u in data["unit"] if isinstance(data.get("unit"), list) else []:
        table = u if isinstance(u, dict) else {}
        traces = table.get("traces")
        named += [*table.values(), *(traces.values() if isinstance(traces, dict) else ())]
    return [path, *(here / x for x in named if isinstance(x, str) and x.isprintable())]


def _checked(u: Any, name: str) -> dict[str, Any]:
    """A [[unit]] with the keys and types that it must have."""
    if not isinstance(u, dict) or not isinstance(u.get("traces"), dict) or not u["traces"] or "journal" not in u:
        raise InputError(f"{name}: every [[unit]] needs 'journal' and a table 'traces' of devices")
    _only(u, ("journal", "links", "launch", "copies", "traces"), name)
    if u.get("copies", COPIES[0]) not in COPIES:
        raise InputError(f"{name}: copies is one of {', '.join(COPIES)}, not {shown(u['copies'])}")
    for key, value in [*u.items(), *u["traces"].items()]:
        if value is not u["traces"] and (not isinstance(value, str) or not value):
            raise InputError(f"{name}: {shown(key)} must be the path of a file, not {shown(value)}")
    if not all(d and d.isprintable() for d in u["traces"]):
        raise InputError(f"{name}: a device of 'traces' has no readable name")
    return u


def _only(table: Mapping[str, Any], known: Sequence[str], name: str) -> None:
    for key in table:
        if key not in known:
            raise InputError(f"{name}: unknown key {shown(key)}{did_you_mean(key, known)}")


def _unit(u: Mapping[str, Any], here: Path) -> Unit:
    launch = read_json(here / u["launch"], "launch figures") if "launch" in u else None
    for key, value in (launch or {}).items():
        if key.endswith("_ns") and not (type(value) in (int, float) and abs(value) <= MAX_LAUNCH_NS):
            raise InputError(
                f"{path_text(here / u['launch'])}: {key} must be a number of nanoseconds below a millisecond"
            )
    traces = {}
    for device, path in u["traces"].items():
        trace = read_trace(here / path)
        traces[device] = trace if launch is None else replace(trace, meta=replace(trace.meta, launch=launch))
    copies = u.get("copies", COPIES[0])
    hop = read_hop(here / u["links"], copies) if "links" in u else None
    return Unit(next(iter(traces.values())).meta.model, traces, hop, copies)
