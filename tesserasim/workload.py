"""The workload: what one cohort of B requests asks of every device, site by site.

This is the only view that policies, planners and the bound have of a mix: site times per device, the
bytes that flow between sites, and what must lie in memory. It is exact for the sums an engine would
execute (per cohort, whole launches), so a closed-form prediction and a simulation start from equal numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tesserasim.cluster.model import Cluster
from tesserasim.trace.mix import Mix

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SiteRef:
    """One placeable site. `group` >= 0: all sites of that group must share a device (reason in `why`)."""

    unit: str
    name: str
    part: str  # attention | ffn | embed | head | other
    kind: str  # kind of the kernel with most time
    group: int = -1
    why: str = ""


@dataclass(frozen=True, slots=True)
class Flow:
    """A value written at one site and read at others; it crosses a link once per other device that reads it.

    State that stays where it is read is a flow too: from the site that writes the new bytes to the sites that
    read the state, `nbytes` being only the new bytes.
    """

    writer: int  # index into Workload.sites
    readers: tuple[int, ...]
    nbytes: float  # per cohort and destination, all launches together
    count: float  # transfers per cohort and destination (each pays the link's latency)
    name: str
    state: bool = False


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that must lie on every device that runs one of `sites`: a weight, or the state of one layer."""

    name: str
    nbytes: int  # weights: once per device. state: for ONE request at its full length
    sites: tuple[int, ...]
    state: bool = False


@dataclass(frozen=True)
class Workload:
    """One cohort of `batch` requests of `mix` on the devices of `cluster`."""

    mix: Mix
    cluster: Cluster
    batch: int
    sites: tuple[SiteRef, ...]  # all units, in program order
    time_ns: FloatArray  # [site, device] durations per cohort, all launches; negative gaps already taken off
    gap_ns: FloatArray  # [site] positive gaps per cohort
    launch_ns: float  # launch cost per cohort if everything runs on one device
    unit_launches: tuple[tuple[str, int], ...]  # unit -> launches per cohort
    launch_each_ns: tuple[tuple[str, float], ...]  # unit -> launch cost of one launch on one device
    flows: tuple[Flow, ...]
    residents: tuple[Resident, ...]
    workspace_bytes: int  # per cohort in flight and device (activations, workspace of the largest unit)
    extrapolated: tuple[str, ...] = ()  # units that left the captured grid
    residual_share: float = 0.0  # |residual| / end-to-end of the captured units, weighted by time

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(d.id for d in self.cluster.devices)
