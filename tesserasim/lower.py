"""From a plan to the flat integer programs that an engine executes.

Every lane's cohort is walked once, unit by unit in program order, every kernel on the device of its site:

* A *value* (bytes of a buffer that one kernel wrote) goes to every other device that reads it, once: a `Send`
  hangs on the kernel that wrote it, and the first kernel that reads it there waits for its token. State moves
  as what was written, never as the whole buffer; weights never move.
* A positive *gap* delays its kernel wherever it runs. A negative one shortens it only where the captured
  predecessor is also the one before it on its device.
* The *launch cost* of a unit delays its first kernel on each device, once per launch.

Times and bytes come from the same rounded numbers as `build_workload`. Launches of one kernel list share a
template, so a cohort of 200,000 kernels costs list operations, not a walk over kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tesserasim.cluster.model import Cluster
from tesserasim.costs.base import CostModel
from tesserasim.demands import Demands
from tesserasim.deps.cohort import Launch, carried_versions, value_bytes
from tesserasim.deps.graph import UnitFlow, unit_flow
from tesserasim.errors import InputError
from tesserasim.mixtimes import MixTimes, launches_of, mix_times
from tesserasim.plans import ANY_SITE, Lane, Plan
from tesserasim.sim.program import SERIAL, SHARED, Channel, LaneProgram, Program, Send, StreamProgram
from tesserasim.sim.sharing import load_sharing
from tesserasim.trace.mix import Mix
from tesserasim.trace.profile import IntArray, IntegerTimes, ProfileRun


def lower(
    mix: Mix, plan: Plan, cluster: Cluster, costs: CostModel, labels: bool = False,
    allow_extrapolation: bool = False, device_model: str = SERIAL,
) -> Program:  # fmt: skip
    """The program of `plan` for `mix` on `cluster`. With `labels` every kernel carries "unit launch site"; for
    shared devices also what it demands of SMs and DRAM.

    Raises InputError if the plan leaves out a unit or site, names an unknown device or site, splits a group,
    or sends between devices without a link.
    """
    channels = _Channels(cluster)
    times = mix_times(mix, costs)
    demands = Demands(times) if device_model == SHARED else None
    lanes = tuple(
        _LaneBuilder(lane, times, cluster, channels, allow_extrapolation, labels, demands).program()
        for lane in plan.lanes
    )
    devices = tuple(d.id for d in cluster.devices)
    if demands is None:
        return Program(devices, channels.within_ports(), lanes)
    return Program(
        devices, channels.within_ports(), lanes, device_model=SHARED, domains=cluster.dram_of, sharing=load_sharing()
    )


class _Channels:
    """Channels in order of first use, one per direction between two devices."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.made: list[Channel] = []
        self._index: dict[tuple[int, int], int] = {}

    def between(self, src: int, dst: int) -> int:
        if (src, dst) not in self._index:
            a, b = self.cluster.devices[src].id, self.cluster.devices[dst].id
            link = self.cluster.link(a, b)
            if link is None:
                raise InputError(f"cluster {self.cluster.name}: the plan sends from {a} to {b}, which have no link")
            self._index[src, dst] = len(self.made)
            rate, latency = round(link.gbps * 1e9 / 8), int(link.latency_us * 1000 + 0.5)
            engine = None
            if link.in_order:  # one for all directions inside of a GPU, else one per direction
                dram = self.cluster.dram_of
                engine = dram[src] if dram[src] == dram[dst] else len(dram) + len(self.made)
            setup = int(link.setup_us * 1000 + 0.5)
            self.made.append(Channel(f"{a}->{b}", src, dst, rate, latency, setup, engine))
        return self._index[src, dst]

    def within_ports(self) -> tuple[Channel, ...]:
        """The channels, each slowed to its part of the ports (NICs) at both ends.

        A port's bandwidth is dealt out evenly over the channels of one direction that a plan uses. That is
        exact for two devices; with more it never exceeds a port and may leave some of it idle.
        """
        out, into = Counter(c.src for c in self.made), Counter(c.dst for c in self.made)
        devices, ports = self.cluster.devices, self.cluster.nic_gbps
        slowed = []
        for c in self.made:
            limits = [ports[devices[end].id] / sharing[end]
                      for end, sharing in ((c.src, out), (c.dst, into)) if devices[end].id in ports]  # fmt: skip
            rate = min([c.bytes_per_s, *(round(gbps * 1e9 / 8) for gbps in limits)])
            slowed.append(replace(c, bytes_per_s=rate))
        return tuple(slowed)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One value of a launch on its way to one device; positions count on the launch's stream there."""

    src: int
    writer: int
    dst: int
    reader: int
    channel: int
    nbytes: int


@dataclass(frozen=True)
class _Template:
    """What all launches of one kernel list share under one placement."""

    flow: UnitFlow
    device_of: list[int]  # per kernel
    position: list[int]  # per kernel: index among the unit's kernels on its device
    kernels: Mapping[int, IntArray]  # device -> kernel ids in order


@dataclass
class _Stream:
    """A stream being built, and where each launch begins on it."""

    program: StreamProgram
    start: list[int] = field(default_factory=list)


class _LaneBuilder:
    def __init__(
        self, lane: Lane, times: MixTimes, cluster: Cluster, channels: _Channels, allow: bool, labels: bool,
        demands: Demands | None = None,
    ) -> None:  # fmt: skip
        self.lane, self.cluster, self.channels, self.labels, self.demands = lane, cluster, channels, labels, demands
        self.mix = times.mix
        self.devices = {d.id: i for i, d in enumerate(cluster.devices)}
        self._check_names(times)
        used = {d for unit in self.mix.units for d in lane.assignment[unit].values()}
        gpus = {cluster.device(d).gpu for d in sorted(used)}
        by_gpu = {gpu: times.cohort_runs(lane.batch, gpu, allow) for gpu in gpus}
        #: per run of launches: the profile on every device used
        self.runs: list[dict[int, ProfileRun]] = [
            {self.devices[d]: by_gpu[cluster.device(d).gpu][i] for d in used}
            for i in range(len(next(iter(by_gpu.values()))))
        ]
        self.streams: dict[int, _Stream] = {}
        self.templates: dict[int, _Template] = {}
        self.tokens = 0
        self.kernels = 0
        self.launches = 0

    def program(self) -> LaneProgram:
        places: dict[int, Sequence[int]] = {}
        for run in self.runs:
            trace = next(iter(run.values())).trace
            flow = unit_flow(trace)
            if id(flow) not in self.templates:
                self.templates[id(flow)] = self._template(flow)
                places[id(flow)] = self.templates[id(flow)].device_of
        active = sorted({d for t in self.templates.values() for d in t.kernels})
        self.streams = {d: _Stream(StreamProgram(d, labels=[] if self.labels else None)) for d in active}
        launches = launches_of([next(iter(r.values())) for r in self.runs], self.lane.batch, expand=True)
        for run in self.runs:
            self._add_run(run)
        if len(active) > 1:
            self._add_transfers(launches)
            self._add_carried(launches, places)
        return LaneProgram(
            self.lane.name, self.lane.batch, self.lane.depth, tuple(self.streams[d].program for d in active),
            self.tokens, self.mix.launches(self.lane.batch), self.lane.priority,
            int(self.lane.stagger_us * 1000 + 0.5),
        )  # fmt: skip

    # -- placement ---------------------------------------------------------------------------------------

    def _check_names(self, times: MixTimes) -> None:
        where = f"plan, lane {self.lane.name}"
        for unit in self.mix.units:
            sites = self.lane.assignment.get(unit)
            if not sites:
                raise InputError(f"{where}: no placement for unit {unit!r}")
            known = set(times.grids[unit].sites)
            for site, device in sites.items():
                if device not in self.devices:
                    has = ", ".join(self.devices)
                    raise InputError(f"{where}: unit {unit}, site {site}: no device {device!r}; there are {has}")
                if site != ANY_SITE and site not in known:
                    raise InputError(f"{where}: unit {unit} has no site {site!r}; the plan is for other traces")

    def _template(self, flow: UnitFlow) -> _Template:
        trace = flow.trace
        where = f"plan, lane {self.lane.name}: unit {trace.unit}"
        device_of_site: list[int] = []
        for site in trace.sites:
            try:
                device_of_site.append(self.devices[self.lane.device_of(trace.unit, site)])
            except KeyError:
                raise InputError(f"{where}: no device for site {site!r}") from None
        first: dict[int, int] = {}
        for i, g in enumerate(flow.group_of):
            if g >= 0 and device_of_site[first.setdefault(g, i)] != device_of_site[i]:
                a, b = trace.sites[first[g]], trace.sites[i]
                raise InputError(f"{where}: {a} and {b} must share a device ({flow.group_why[g]})")
        device_of = [device_of_site[s] for s in trace.site_of]
        position: list[int] = []
        kernels: dict[int, list[int]] = {}
        for k, d in enumerate(device_of):
            mine = kernels.setdefault(d, [])
            position.append(len(mine))
            mine.append(k)
        arrays = {d: np.array(ids, dtype=np.int64) for d, ids in kernels.items()}
        return _Template(flow, device_of, position, arrays)

    # -- times -------------------------------------------------------------------------------------------

    def _add_run(self, run: dict[int, ProfileRun]) -> None:
        """Append the kernels of all launches of a run to every stream."""
        one = next(iter(run.values()))
        template = self.templates[id(unit_flow(one.trace))]
        total, n = int(one.counts.sum()), len(one.trace)
        base = self.kernels + n * np.arange(total, dtype=np.int64)
        for d, stream in self.streams.items():
            ids = template.kernels.get(d)
            count = 0 if ids is None else len(ids)
            at = len(stream.program.duration)
            stream.start += range(at, at + total * count, count) if count else [at] * total
            if ids is None:
                continue
            self._add_times(stream.program, one, run[d].integers(), ids)
            stream.program.order += (base[:, None] + ids).ravel().tolist()
            if self.demands is not None:
                sm, dram = self.demands.of(run[d].trace, self.cluster.devices[d])
                stream.program.sm += sm[ids].tolist() * total
                stream.program.dram += dram[ids].tolist() * total
            stream.program.waits += [None] * (total * count)
            stream.program.sends += [None] * (total * count)
            if stream.program.labels is not None:
                names = [one.trace.kernels[k].site for k in ids.tolist()]
                first = self.launches
                stream.program.labels += [f"{one.trace.unit} {first + j} {s}" for j in range(total) for s in names]
        self.kernels += n * total
        self.launches += total

    def _add_times(self, s: StreamProgram, run: ProfileRun, exact: IntegerTimes, ids: IntArray) -> None:
        # The gap's predecessor must also be the one before it on this device for the gap to shorten it.
        before = np.concatenate(([-1], ids[:-1]))
        shave = exact.shave[:, ids] * ((run.follows[ids] == before) & (before >= 0))
        delay = exact.delay[:, ids]
        delay[:, 0] += exact.launch
        for target, rows in ((s.duration, exact.duration[:, ids]), (s.delay, delay), (s.shave, shave)):
            target += np.repeat(rows, run.counts, axis=0).ravel().tolist()

    # -- transfers ---------------------------------------------------------------------------------------

    def _transfers(self, template: _Template, launch: Launch) -> list[_Transfer]:
        """Transfers inside one launch, in order of writer and first reader."""
        found: list[_Transfer] = []
        device_of, position = template.device_of, template.position
        buffers = template.flow.trace.buffers
        for v in template.flow.values:
            src = device_of[v.writer]
            first: dict[int, int] = {}
            for r in v.readers:
                if device_of[r] != src:
                    first.setdefault(device_of[r], r)
            if first:
                nbytes = value_bytes(v, buffers[v.buffer], launch.byte_scale, launch.batch_scale)
                found += [
                    _Transfer(src, position[v.writer], d, position[r], self.channels.between(src, d), nbytes)
                    for d, r in first.items()
                ]
        return found

    def _add_transfers(self, launches: Sequence[Launch]) -> None:
        known: dict[tuple[int, float, float], list[_Transfer]] = {}
        for number, launch in enumerate(launches):
            key = (id(launch.flow), launch.byte_scale, launch.batch_scale)
            if key not in known:
                known[key] = self._transfers(self.templates[key[0]], launch)
            for t in known[key]:
                writer = self.streams[t.src].start[number] + t.writer
                reader = self.streams[t.dst].start[number] + t.reader
                self._send(t.src, writer, t.dst, reader, t.channel, t.nbytes)

    def _add_carried(self, launches: Sequence[Launch], places: Mapping[int, Sequence[int]]) -> None:
        """Transfers from launch to launch: KV, tokens, latents, hung on the kernel that wrote them."""
        for version in carried_versions(launches, places):
            if not version.arrivals:
                continue
            launch, v = launches[version.launch], version.value
            template = self.templates[id(launch.flow)]
            src = template.device_of[v.writer]
            writer = self.streams[src].start[version.launch] + template.position[v.writer]
            buffer = launch.flow.trace.buffers[v.buffer]
            nbytes = value_bytes(v, buffer, launch.byte_scale, launch.batch_scale)
            for dst, number, kernel in version.arrivals:
                there = self.templates[id(launches[number].flow)]
                reader = self.streams[dst].start[number] + there.position[kernel]
                self._send(src, writer, dst, reader, self.channels.between(src, dst), nbytes)

    def _send(self, src: int, writer: int, dst: int, reader: int, channel: int, nbytes: int) -> None:
        sends, waits = self.streams[src].program.sends, self.streams[dst].program.waits
        send, token = Send(channel, nbytes, self.tokens), self.tokens
        sends[writer] = (*(sends[writer] or ()), send)
        waits[reader] = (*(waits[reader] or ()), token)
        self.tokens += 1
