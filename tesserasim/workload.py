"""The workload: what one cohort of B requests asks of every device, site by site.

This is the only view that policies, planners and the bound have of a mix: site times per device, the
bytes that flow between sites, and what must lie in memory. It is exact for the sums an engine would
execute (per cohort, whole launches), so a closed-form prediction and a simulation start from equal numbers:
times are sums of the rounded nanoseconds that `lower` hands to the engine, and for any placement the bytes
and transfers of the flows are those of the lowered program.

The sites are those of the whole captured grid, whatever the batch, so workloads of one mix line up; a site
that the kernels of this batch do not have takes no time and has no flows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tesserasim.cluster.model import Cluster, GpuSpec
from tesserasim.costs.base import CostModel
from tesserasim.deps.cohort import place_flows
from tesserasim.deps.graph import unit_flow
from tesserasim.mixtimes import MixTimes, launches_of, mix_times
from tesserasim.trace.mix import Mix
from tesserasim.trace.model import Buffer, Trace
from tesserasim.trace.profile import ProfileRun

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
    #: [site, device] log-sd of the factor shared by a (GPU, kind), and of the site's own; weighted by time
    sigma_systematic: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))
    sigma_site: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))
    sources: tuple[str, ...] = ()  # per device: where its times come from ("captured", "roofline-ratio", ...)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(d.id for d in self.cluster.devices)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """[site] kind of the kernel with most time."""
        return tuple(s.kind for s in self.sites)


def build_workload(
    mix: Mix, cluster: Cluster, costs: CostModel, batch: int, allow_extrapolation: bool = False
) -> Workload:
    """The workload of one cohort of `batch` requests.

    Raises InputError for a batch or length more than a factor of two outside the captured grid, unless allowed.
    """
    return _Build(mix_times(mix, costs), cluster, batch, allow_extrapolation).workload()


class _Build:
    def __init__(self, times: MixTimes, cluster: Cluster, batch: int, allow: bool) -> None:
        self.times, self.cluster, self.batch, self.mix = times, cluster, batch, times.mix
        self.runs = {d.gpu: times.cohort_runs(batch, d.gpu, allow) for d in cluster.devices}
        self.first = self.runs[cluster.devices[0].gpu]  # kernel lists, gaps and launch costs are the same on all
        self.index: dict[tuple[str, str], int] = {}
        for unit, grid in times.grids.items():
            for name in grid.sites:
                self.index[unit, name] = len(self.index)
        self.place = {
            id(run.trace): np.array([self.index[run.trace.unit, k.site] for k in run.trace.kernels], dtype=np.int64)
            for run in self.first
        }

    def workload(self) -> Workload:
        n, devices = len(self.index), self.cluster.devices
        by_gpu = {gpu: self._gpu_columns(gpu, runs) for gpu, runs in self.runs.items()}
        gap, launch = np.zeros(n), dict.fromkeys(self.mix.units, 0.0)
        launches = dict.fromkeys(self.mix.units, 0)
        for run in self.first:
            exact = run.integers()
            gap += self._sites(run, run.counts @ exact.delay)
            launch[run.trace.unit] += float(run.counts @ exact.launch)
            launches[run.trace.unit] += int(run.counts.sum())
        return Workload(
            self.mix, self.cluster, self.batch, self._site_refs(),
            np.stack([by_gpu[d.gpu][0] for d in devices], axis=1), gap, sum(launch.values()),
            tuple(launches.items()), tuple((u, launch[u] / launches[u]) for u in launches),
            self._flows(), self._residents(), self._workspace(),
            extrapolated=tuple(sorted({r.trace.unit for r in self.first if any(r.extrapolated)})),
            residual_share=self._residual_share(),
            sigma_systematic=np.stack([by_gpu[d.gpu][1] for d in devices], axis=1),
            sigma_site=np.stack([by_gpu[d.gpu][2] for d in devices], axis=1),
            sources=tuple(by_gpu[d.gpu][3] for d in devices),
        )  # fmt: skip

    def _sites(self, run: ProfileRun, per_kernel: NDArray[np.generic]) -> FloatArray:
        weights = np.asarray(per_kernel, dtype=np.float64)
        return np.bincount(self.place[id(run.trace)], weights=weights, minlength=len(self.index)).astype(np.float64)

    def _gpu_columns(self, gpu: GpuSpec, runs: Sequence[ProfileRun]) -> tuple[FloatArray, FloatArray, FloatArray, str]:
        """(time, systematic sigma, site sigma) per site on one GPU, and the sources of its times."""
        time, systematic, site = (np.zeros(len(self.index)) for _ in range(3))
        sources: dict[str, None] = {}
        for run in runs:
            exact, known = run.integers(), self.times.times(run.trace, gpu)
            # On one device a kernel's stream predecessor is the kernel before it, whatever its captured stream.
            shaved = run.follows == np.arange(len(run.trace)) - 1
            total = run.counts @ (exact.duration - exact.shave * shaved)
            time += self._sites(run, total)
            systematic += self._sites(run, total * known.sigma_systematic)
            site += self._sites(run, total * known.sigma_site)
            sources[known.source] = None
        safe = np.where(time > 0, time, 1.0)
        return time, systematic / safe, site / safe, "+".join(sorted(sources))

    def _traces(self) -> list[Trace]:
        """All traces of the grid, those whose kernels run first."""
        used = {id(r.trace): r.trace for r in self.first}
        rest = [t for unit in self.mix.units for t in self.mix.traces[unit] if id(t) not in used]
        return [*used.values(), *rest]

    def _site_refs(self) -> tuple[SiteRef, ...]:
        described: dict[int, tuple[str, str]] = {}
        for trace in self._traces():
            longest: dict[int, int] = {}
            for k in trace.kernels:
                i = self.index[trace.unit, k.site]
                new = i not in described or i in longest
                if new and k.duration_ns > longest.get(i, -1):
                    described[i], longest[i] = (k.part, k.kind), k.duration_ns
        group, why = self._groups()
        return tuple(
            SiteRef(unit, name, *described[i], group.get(i, -1), why.get(group.get(i, -1), ""))
            for (unit, name), i in self.index.items()
        )

    def _groups(self) -> tuple[dict[int, int], dict[int, str]]:
        """(site -> group, group -> why), joined over the kernel lists that run."""
        parent: dict[int, int] = {}
        why: dict[int, dict[str, None]] = {}

        def root(i: int) -> int:
            while parent.setdefault(i, i) != i:
                i = parent[i]
            return i

        for run in self.first:
            flow = unit_flow(run.trace)
            head: dict[int, int] = {}
            for name, g in zip(run.trace.sites, flow.group_of, strict=True):
                if g >= 0:
                    a, b = root(head.setdefault(g, self.index[run.trace.unit, name])), self.index[run.trace.unit, name]
                    b = root(b)
                    parent[max(a, b)] = min(a, b)
                    reasons = {**why.pop(max(a, b), {}), flow.group_why[g]: None}
                    why.setdefault(min(a, b), {}).update(reasons)
        number: dict[int, int] = {}
        group = {i: number.setdefault(root(i), len(number)) for i in sorted(parent)}
        return group, {g: "; ".join(why[r]) for r, g in number.items()}

    def _flows(self) -> tuple[Flow, ...]:
        launches = launches_of(self.first, self.batch, expand=False)
        places = {id(unit_flow(r.trace)): self.place[id(r.trace)].tolist() for r in self.first}
        return tuple(
            Flow(f.writer, f.readers, float(f.nbytes), float(f.count), f.name, f.state)
            for f in place_flows(launches, places)
        )

    def _residents(self) -> tuple[Resident, ...]:
        """Weights and state by name, with the sites that read them (that write them, if none reads)."""
        readers: dict[str, set[int]] = {}
        writers: dict[str, set[int]] = {}
        size: dict[str, tuple[int, bool]] = {}
        tokens = self.mix.input_tokens + self.mix.output_tokens
        for trace in {id(r.trace): r.trace for r in self.first}.values():
            place = self.place[id(trace)].tolist()
            for k in trace.kernels:
                for a in k.accesses:
                    b = trace.buffers[a.buffer]
                    if b.role in ("weight", "state"):
                        (readers if a.reads else writers).setdefault(b.name, set()).add(place[k.id])
                        if b.name not in size:
                            state = b.role == "state"
                            size[b.name] = (_per_request(b, trace, tokens) if state else b.nbytes, state)
        return tuple(
            Resident(name, nbytes, tuple(sorted(readers.get(name) or writers[name])), state)
            for name, (nbytes, state) in size.items()
        )

    def _workspace(self) -> int:
        """Largest over the launches: captured peak of activations and workspace, scaled to the point."""
        peak = 0.0
        for run in self.first:
            base = run.trace.meta.workspace_bytes or live_peak(run.trace.buffers)
            peak = max(peak, base * max(run.byte_scale))
        return int(peak + 0.5)

    def _residual_share(self) -> float:
        """|end-to-end - durations - gaps - launch| over end-to-end, where it was measured."""
        left = total = 0.0
        for run in self.first:
            for trace_residual, count, row in zip(run.residual_ns, run.counts, range(len(run)), strict=True):
                if trace_residual is not None:
                    left += abs(trace_residual) * float(count)
                    unit = run.captured_ns[row] + trace_residual
                    total += unit * float(count)
        return left / total if total else 0.0


def _per_request(b: Buffer, trace: Trace, tokens: int) -> int:
    """Bytes of a state buffer for one request of `tokens` tokens."""
    if b.bytes_per_token or b.bytes_per_sequence:
        return b.bytes_per_token * tokens + b.bytes_per_sequence
    return -(-b.nbytes // max(1, int(trace.meta.unit.get("batch", 1))))


def live_peak(buffers: Sequence[Buffer]) -> int:
    """Most bytes of activations and workspace alive at one time, from first and last use; for traces without it."""
    change: dict[int, int] = {}
    for b in buffers:
        if b.role in ("activation", "workspace") and b.first_use >= 0:
            change[b.first_use] = change.get(b.first_use, 0) + b.nbytes
            change[b.last_use + 1] = change.get(b.last_use + 1, 0) - b.nbytes
    live = peak = 0
    for at in sorted(change):
        live += change[at]
        peak = max(peak, live)
    return peak
