"""Kernel times of a mix: grids and site tables, made once per cost model and shared by every batch and cluster.

`build_workload` and `lower` both take their launches from here, so the sums that policies see are the sums
that an engine executes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tesserasim.cluster.model import GpuSpec
from tesserasim.costs.base import CostModel, KernelTimes
from tesserasim.deps.cohort import Launch
from tesserasim.deps.graph import unit_flow
from tesserasim.trace.grid import Grid, SiteTable
from tesserasim.trace.mix import Mix, UnitInstance
from tesserasim.trace.model import Trace
from tesserasim.trace.profile import ProfileRun


class MixTimes:
    """Grids and site tables of one mix under one cost model: made once, used for every batch and cluster."""

    def __init__(self, mix: Mix, costs: CostModel) -> None:
        self.mix, self.costs = mix, costs
        self.grids = {unit: Grid(mix.traces[unit]) for unit in mix.units}
        self._tables: dict[tuple[str, GpuSpec], SiteTable] = {}
        self._times: dict[tuple[int, GpuSpec], KernelTimes] = {}

    def times(self, trace: Trace, gpu: GpuSpec) -> KernelTimes:
        key = (id(trace), gpu)
        if key not in self._times:
            self._times[key] = self.costs.kernel_ns(trace, gpu)
        return self._times[key]

    def runs(
        self, unit: str, instances: Sequence[UnitInstance], gpu: GpuSpec, allow_extrapolation: bool
    ) -> list[ProfileRun]:
        """Launches of one unit on one GPU, in order."""
        key = (unit, gpu)
        if key not in self._tables:
            self._tables[key] = self.grids[unit].table(lambda t: self.times(t, gpu).ns)
        return self.grids[unit].profiles(instances, self._tables[key], allow_extrapolation)

    def cohort_runs(self, batch: int, gpu: GpuSpec, allow_extrapolation: bool = False) -> list[ProfileRun]:
        """All launches of a cohort of `batch` requests on one GPU, in program order."""
        found: list[ProfileRun] = []
        pending: list[UnitInstance] = []
        for instance in [*self.mix.cohort(batch), None]:
            if pending and (instance is None or instance.unit != pending[0].unit):
                found += self.runs(pending[0].unit, pending, gpu, allow_extrapolation)
                pending = []
            if instance is not None:
                pending.append(instance)
        return found


def mix_times(mix: Mix, costs: CostModel) -> MixTimes:
    """The `MixTimes` of a mix and a cost model, kept with the mix."""
    kept: MixTimes | None = mix.__dict__.get("_times")
    if kept is None or kept.costs is not costs:
        kept = MixTimes(mix, costs)
        mix.__dict__["_times"] = kept
    return kept


def launches_of(runs: Iterable[ProfileRun], batch: int, expand: bool) -> list[Launch]:
    """The launches of a cohort; `expand` lists equal launches that see nothing of each other one by one."""
    found: list[Launch] = []
    for run in runs:
        flow = unit_flow(run.trace)
        for i, scale, own in zip(run.instances, run.byte_scale, run.batch_scale, strict=True):
            whole = i.batch >= batch
            repeat, count = (i.count, 1) if whole or expand else (1, i.count)
            found += [Launch(flow, whole, count, scale, own, i.part)] * repeat
    return found
