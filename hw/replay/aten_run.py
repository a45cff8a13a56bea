"""Replay a plan operator by operator and say whether it gives what the model itself gives."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hw.errors import HardwareError
from hw.replay.aten import Arena, Replay, differing, outside
from hw.replay.aten_record import Recorded, record_unit
from hw.workloads.base import UnitSpec, Workload
from tesserasim.plans import Lane, Plan


@dataclass(frozen=True)
class Report:
    """One plan of one unit: whether all that the step leaves behind is right to the bit, and what the plan moved."""

    equal: bool  # to the replay on one device, and to the model's own step
    differing: tuple[str, ...]  # results that are not
    results: int
    operators: int
    moves: int
    moved_bytes: int
    switches: int  # changes of device along program order
    devices: dict[str, int]  # operators on each


def lane_of(plan: Plan, lane: Lane | str) -> Lane:
    """A lane of a plan, by name. HardwareError if there is none."""
    found = [x for x in plan.lanes if x is lane or x.name == lane or x == lane]
    if not found:
        name = lane if isinstance(lane, str) else lane.name
        raise HardwareError(f"the plan has no lane {name!r}; it has {', '.join(x.name for x in plan.lanes)}")
    return found[0]


def placement(recorded: Recorded, unit: str, lane: Lane) -> dict[str, str]:
    """Device of every site. HardwareError names a unit or site that the lane leaves out."""
    if unit not in lane.assignment:
        raise HardwareError(f"lane {lane.name} places no unit {unit!r}; it places {', '.join(lane.assignment)}")
    found = {}
    for site in recorded.trace.sites:
        try:
            found[site] = lane.device_of(unit, site)
        except KeyError:
            raise HardwareError(f"lane {lane.name} leaves out site {site} of unit {unit}") from None
    return found


def replay_lane(
    recorded: Recorded, unit: str, lane: Lane, devices: Mapping[str, torch.device], seed: int = 1,
    arenas: Mapping[str, Arena] | None = None,
) -> Report:  # fmt: skip
    """Run a recorded unit under a lane and compare with the replay on one device and with the model's own step."""
    split = Replay(recorded, placement(recorded, unit, lane), devices, arenas)
    got = split.run(seed)
    wrong = differing(recorded, got, split.unsplit().run(seed)) + differing(recorded, got, outside(recorded, seed))
    return Report(
        equal=not wrong, differing=tuple(dict.fromkeys(wrong)), results=len(got), operators=len(recorded.ops),
        moves=len(split.moves), moved_bytes=sum(m.nbytes for m in split.moves),
        switches=sum(a != b for a, b in itertools.pairwise(split.device_of)),
        devices={n: split.device_of.count(n) for n in devices},
    )  # fmt: skip


def replay_plan(
    workload: Workload, unit: UnitSpec, plan: Plan, lane: Lane | str,
    devices: Mapping[str, torch.device] | None = None, seed: int = 1,
) -> Report:  # fmt: skip
    """Record a unit and run it under a lane of a plan.

    `devices`: where each device of the lane is; left out, all are arenas on the workload's own device. State and
    inputs of the workload change. HardwareError for a lane that does not place the unit, and for a step that cannot
    be recorded; StaleReadError if a transfer is missing.
    """
    chosen = lane_of(plan, lane)
    recorded = record_unit(workload, unit)
    where = devices or {n: torch.device(workload.device) for n in chosen.devices}
    return replay_lane(recorded, unit.name, chosen, where, seed)
