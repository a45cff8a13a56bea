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
from pathlib import Path
from typing import Any

from tesserasim.errors import InputError

PLAN_VERSION = 1
MAX_STAGGER_US = 3.6e9  # an hour
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
    limited_by: str = ""  # what stopped a larger (B, d): "memory of L40S", "max_seqs", "grid", "throughput"
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
    """Write a plan; the file appears whole or not at all."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    partial.write_text(plan.to_json() + "\n", encoding="utf-8")
    os.replace(partial, target)


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file; InputError names the file and the key that is missing or wrong."""
    where = Path(path)
    try:
        data: dict[str, Any] = json.loads(where.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{where}: no such plan file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: not a plan file ({error})") from None
    if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
        raise InputError(f"{where}: not a plan of version {PLAN_VERSION}; make one with 'plan --out'")
    try:
        lanes = tuple(Lane(**lane) for lane in data.pop("lanes"))
        for key in ("trace_hashes", "notes"):
            data[key] = tuple(data.get(key, ()))
        plan = Plan(lanes=lanes, **data)
    except (KeyError, TypeError) as error:
        raise InputError(f"{where}: damaged plan ({error})") from None
    for lane in plan.lanes:
        if not isinstance(lane.batch, int) or not isinstance(lane.depth, int) or lane.batch < 1 or lane.depth < 1:
            raise InputError(f"{where}: lane {lane.name}: batch and depth must be whole numbers of at least 1")
        if not isinstance(lane.stagger_us, int | float) or not 0 <= lane.stagger_us <= MAX_STAGGER_US:
            raise InputError(f"{where}: lane {lane.name}: stagger_us must be between 0 and {MAX_STAGGER_US:g}")
    if not plan.lanes:
        raise InputError(f"{where}: the plan has no lanes")
    return plan
