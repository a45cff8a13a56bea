"""The plan: the one file that the simulator and the hardware both run.

A plan is a set of *lanes*. A lane is a stream of cohorts with one placement: `single` has one lane,
`replicas` one per GPU, `pd` one plus an overflow lane of whole requests, `kernel` one. That makes every
policy, hybrids included, the same kind of object for the engine, the bound and the hardware.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tesserasim.errors import InputError
from tesserasim.files import path_text, read_text
from tesserasim.writing import write_whole

PLAN_VERSION = 1
MAX_STAGGER_US = 3.6e9  # an hour
MAX_LANES, MAX_PRIORITY, MAX_COUNT = 256, 1000, 1_000_000
SHARE_SLACK = 1e-6
MOST_NUMBER = 1e300
#: In an assignment, the site that stands for every site not named.
ANY_SITE = "*"


@dataclass(frozen=True)
class Lane:
    """Cohorts of `batch` requests, `depth` of them in flight, all placed alike."""

    name: str
    batch: int
    depth: int
    assignment: Mapping[str, Mapping[str, str]]  # unit -> {site or "*": device id}
    share: float = 1.0  # of the requests, over the lanes of the plan
    priority: int = 0  # lower runs first; inside a priority the older cohort runs first
    #: Slot k takes its first cohort at k * stagger. Cohorts that enter together may go through the machines
    #: together for ever, each stage idle while they are in the next; a pipeline is filled one by one.
    stagger_us: float = 0.0

    def device_of(self, unit: str, site: str) -> str:
        """Device of a site; KeyError names the unit and site that the plan leaves out."""
        sites = self.assignment[unit]
        return sites[site] if site in sites else sites[ANY_SITE]

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(sorted({d for sites in self.assignment.values() for d in sites.values()}))


@dataclass(frozen=True)
class Plan:
    """Placement + (B, d) per lane, what it was made for, and what the planner claims about it."""

    mix: str
    cluster: str
    policy: str
    lanes: tuple[Lane, ...]
    objective: str = "throughput"
    status: str = ""  # "optimal" (gap proven below the tolerance) | "feasible" | "heuristic" | "fixed"
    objective_us: float | None = None  # time per request by the closed form
    bound_us: float | None = None  # proven lower limit of objective_us, free communication excluded
    gap: float | None = None
    limited_by: str = ""  # what stopped a larger (B, d): "memory of L40S", "max_seqs", "grid", "given batch"
    prediction: Mapping[str, float] = field(default_factory=dict)  # depth -> requests per second
    cut_bytes: int = 0  # per cohort
    switches: int = 0  # per cohort: changes of device along program order
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    trace_hashes: tuple[str, ...] = ()
    cluster_hash: str = ""
    notes: tuple[str, ...] = ()
    version: int = PLAN_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True, indent=1)


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan; the file appears whole or not at all. InputError if it cannot be written."""
    write_whole(path, plan.to_json().encode() + b"\n")


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file; InputError names the file and the key that is missing or wrong."""
    where = path_text(path)
    data = _document(path, where)
    if not isinstance(data, dict) or type(data.get("version")) is not int or data["version"] != PLAN_VERSION:
        raise InputError(f"{where}: not a plan of version {PLAN_VERSION}; make one with 'plan --out'")
    lanes = data.pop("lanes", None)
    if not isinstance(lanes, list) or not all(isinstance(lane, dict) for lane in lanes):
        raise InputError(f"{where}: 'lanes' must be a list of lanes")
    for key in ("trace_hashes", "notes"):
        if isinstance(data.get(key), list):
            data[key] = tuple(data[key])
    for i, lane in enumerate(lanes):
        _check_keys(lane, Lane, f"{where}: lane {i + 1}")
    _check_keys(data, Plan, where)
    plan = Plan(lanes=tuple(Lane(**lane) for lane in lanes), **data)
    check_plan(plan, where)
    return plan


def _document(path: str | os.PathLike[str], where: str) -> Any:
    """The JSON of a plan file, without what JSON proper does not have: NaN, and one key twice."""
    try:
        return json.loads(read_text(path, "plan file"), parse_constant=_no_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise InputError(f"{where}: not a plan file (nested too deeply)") from None
    except ValueError as error:
        raise InputError(f"{where}: not a plan file ({error})") from None


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(k for i, (k, _) in enumerate(pairs) if k in dict(pairs[:i]))
        raise ValueError(f"key {twice[:40]!r} twice")
    return found


def _check_keys(data: Mapping[str, Any], kind: type[Lane] | type[Plan], where: str) -> None:
    fields = {f.name: f for f in dataclasses.fields(kind) if f.name != "lanes"}
    for key in data:
        if key not in fields:
            raise InputError(f"{where}: unknown key {key[:40]!r}")
    for name, f in fields.items():
        if f.default is f.default_factory is dataclasses.MISSING and name not in data:
            raise InputError(f"{where}: {name!r} is missing")


def check_plan(plan: Plan, where: str = "plan") -> None:
    """InputError unless every field of a plan has its type and range. `where` begins the message.

    Whether units, sites and devices exist is for the mix and the cluster to say (`evaluate_plan`).
    """
    for name in ("mix", "cluster", "policy"):
        _words(getattr(plan, name), f"{where}: {name}", least=1)
    for name in ("objective", "status", "limited_by", "cluster_hash"):
        _words(getattr(plan, name), f"{where}: {name}")
    for name, low in (("objective_us", 1e-9), ("bound_us", 0.0), ("gap", -1e-6)):
        if getattr(plan, name) is not None:
            _number(getattr(plan, name), f"{where}: {name}", low, 1.0 if name == "gap" else MOST_NUMBER)
    for name in ("cut_bytes", "switches"):
        _number(getattr(plan, name), f"{where}: {name}", 0, 2**63 - 1, whole=True)
    for name in ("trace_hashes", "notes"):
        words = getattr(plan, name)
        if not isinstance(words, tuple) or not all(isinstance(w, str) for w in words):
            raise InputError(f"{where}: {name} must be a list of texts")
    for name in ("prediction", "memory_bytes"):
        for key, value in _mapping(getattr(plan, name), f"{where}: {name}").items():
            _number(value, f"{where}: {name} of {key[:40]}", 0, MOST_NUMBER, whole=name == "memory_bytes")
    if not isinstance(plan.lanes, tuple) or not 1 <= len(plan.lanes) <= MAX_LANES:
        raise InputError(f"{where}: a plan has 1 to {MAX_LANES} lanes")
    names = set()
    for i, lane in enumerate(plan.lanes):
        _check_lane(lane, f"{where}: lane {i + 1}")
        if lane.name in names:
            raise InputError(f"{where}: two lanes are called {lane.name!r}; every lane needs a name of its own")
        names.add(lane.name)
    total = sum(lane.share for lane in plan.lanes)
    if abs(total - 1.0) > SHARE_SLACK:
        raise InputError(f"{where}: the shares of the lanes sum to {total:g}; they must sum to 1")


def _check_lane(lane: Lane, where: str) -> None:
    _words(lane.name, f"{where}: name", least=1, most=200)
    for name in ("batch", "depth"):
        _number(getattr(lane, name), f"{where}: {name}", 1, MAX_COUNT, whole=True)
    _number(lane.share, f"{where}: share", 0.0, 1.0)
    if lane.share <= 0:
        raise InputError(f"{where}: share must be above 0")
    _number(lane.priority, f"{where}: priority", -MAX_PRIORITY, MAX_PRIORITY, whole=True)
    _number(lane.stagger_us, f"{where}: stagger_us", 0.0, MAX_STAGGER_US)
    if not _mapping(lane.assignment, f"{where}: assignment"):
        raise InputError(f"{where}: assignment is empty; it names a device for every unit")
    for unit, sites in lane.assignment.items():
        place = f"{where}: assignment of unit {unit[:40]!r}"
        if not _mapping(sites, place):
            raise InputError(f'{place} is empty; write {{"*": DEVICE}} to place all of it')
        for site, device in sites.items():
            _words(device, f"{place}, site {site[:40]!r}", least=1)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{where} must be an object of names, not {str(value)[:40]!r}")
    return value


def _words(value: Any, where: str, least: int = 0, most: int = 10_000) -> None:
    if not isinstance(value, str) or not least <= len(value) <= most or not value.isprintable():
        raise InputError(f"{where} must be a text of {least} to {most} printable characters, not {str(value)[:40]!r}")


def _number(value: Any, where: str, low: float, high: float, whole: bool = False) -> None:
    kind = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        what = "a whole number" if whole else "a number"
        raise InputError(f"{where} must be {what} from {low:g} to {high:g}, not {_brief(value)}")


def _brief(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return "one of more than 40 digits"
    return repr(value)[:40]
