"""The closed form: what a placement should give, without simulating it.

One cohort of B requests loads every device (sum of its site times there) and every link direction (bytes
over rate), and takes a *latency* from entry to exit. If no cohort ever waited for another, one would leave every

    ideal period = max(largest device load, largest link load, latency / d)

with d cohorts in flight. They do wait: cohorts meet on devices and links in every decode step. The expected
period counts, for each of the d - 1 others, QUEUEING times the bottleneck's load on top of the latency
(the form of the balanced job bounds for closed queueing networks, Zahorjan et al. 1982, whose extremes are 0:
nobody waits, and 1: everybody waits for everybody at the bottleneck):

    period = (latency + q (d - 1) period) / d   =>   period = latency / (1 + (1 - q) (d - 1))

if that is more than the loads, with q = QUEUEING (1 - 1 / launches in a cohort). Where every unit is whole on its
device a cohort passes each device once per unit, as on an assembly line, and nobody waits (QUEUEING_WHOLE);
on one device alone nobody waits for anything but that device (q = 0). With one cohort, or with depth to spare,
ideal and expected period agree. Throughput = B / period. The form is pessimistic about hiding: every gap,
launch and transfer is in the latency. The engine has the last word.

Units: nanoseconds and bytes per cohort; rates in requests per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tesserasim.plans import Lane
from tesserasim.workload import FloatArray, Workload

IntArray = NDArray[np.int64]
NS = 1e9
#: Relative difference below which two predictions count as equal.
EQUAL = 1e-9
#: Share of the bottleneck's load that a cohort waits for each other cohort in flight. Fitted to settled runs of the
#: engine over 49 placements on captured traces (both mixes, two clusters, 25 and 200 Gb/s, depth 2-8): where a unit
#: is cut often (14-128 changes of device), the value that reproduces the throughput lies between 0.56 and 0.86.
QUEUEING = 0.8
#: The same where units are whole but on several devices (prefill here, decode there): a staggered pipeline settles
#: where nobody waits (within 1 % in all such placements).
QUEUEING_WHOLE = 0.0
#: Placements that keep units whole are told apart only where all of them can be listed.
MOST_WHOLE = 256


@dataclass(frozen=True)
class Prediction:
    """The closed form of one lane that has the machines to itself."""

    batch: int
    depth: int
    divisor: float  # by which the latency may be divided: `depth` less the expected waiting
    loads_ns: FloatArray  # [device]
    link_ns: FloatArray  # [source, destination]
    latency_ns: float  # one cohort that waits for no other, entry to exit
    period_ns: float  # expected

    @property
    def ideal_ns(self) -> float:
        """Period if cohorts never waited for each other."""
        return max(float(self.loads_ns.max()), float(self.link_ns.max(initial=0.0)), self.latency_ns / self.depth)

    @property
    def per_s(self) -> float:
        """Requests per second."""
        return self.batch * NS / self.period_ns

    @property
    def bottleneck(self) -> str:
        """"device", "link" or "latency": the largest of the three terms."""
        terms = {
            "device": float(self.loads_ns.max()),
            "link": float(self.link_ns.max()),
            "latency": self.latency_ns / self.divisor,
        }
        return max(terms, key=lambda name: terms[name])


class ClosedForm:
    """Flat arrays of one Workload, made once, on which any placement is priced in about 0.1 ms.

    A placement is an integer vector x with x[site] = index of the device.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.batch = workload.batch
        self.n_sites, self.n_devices = workload.time_ns.shape
        names = [name for name, _ in workload.unit_launches]
        self.launches = dict(workload.unit_launches)
        each = dict(workload.launch_each_ns)
        self.unit_of: IntArray = np.array([names.index(s.unit) for s in workload.sites], dtype=np.int64)
        self.unit_launch_ns = np.array([self.launches[u] * each.get(u, 0.0) for u in names])
        self.queueing = QUEUEING * (1.0 - 1.0 / max(1, sum(self.launches.values())))
        self.gap_total_ns = float(workload.gap_ns.sum())
        self._index_flows()
        self.rate, self.latency, self.linked = _link_matrices(workload)

    def _index_flows(self) -> None:
        w, flows = self.workload, self.workload.flows
        self.writer: IntArray = np.array([f.writer for f in flows], dtype=np.int64)
        self.flow_bytes = np.array([f.nbytes for f in flows], dtype=float)
        self.flow_count = np.array([f.count for f in flows], dtype=float)
        self.reader: IntArray = np.array([r for f in flows for r in f.readers], dtype=np.int64)
        self.reader_flow: IntArray = np.repeat(
            np.arange(len(flows), dtype=np.int64), [len(f.readers) for f in flows] or 0
        ).astype(np.int64)
        # What of a flow's time a cohort must wait for. Bytes handed to a *later* unit (the KV of a prefill)
        # travel while the writer's unit still runs, all but those of its last launch.
        self.exposed = np.ones(len(flows))
        for i, f in enumerate(flows):
            mine = self.unit_of[f.writer]
            if f.readers and all(self.unit_of[r] > mine for r in f.readers):
                self.exposed[i] = 1.0 / max(1, self.launches[w.sites[f.writer].unit])

    def effective_depth(self, depth: int) -> float:
        """What a latency may be divided by at `depth` if units are split: 1 at depth 1, less than `depth` after."""
        return 1.0 + (1.0 - self.queueing) * (depth - 1)

    @property
    def lists_whole(self) -> bool:
        """The placements that keep units whole are few enough to list."""
        return bool(self.n_devices ** len(self.unit_launch_ns) <= MOST_WHOLE)

    def whole_units(self) -> list[IntArray]:
        """Every placement with each unit on one device (the first of them: all on one device); [] if too many."""
        if not self.lists_whole:
            return []
        choices = product(range(self.n_devices), repeat=len(self.unit_launch_ns))
        return [np.array(c, dtype=np.int64)[self.unit_of] for c in choices]

    def divisor(self, x: IntArray, depth: int) -> float:
        """By what the latency of placement `x` may be divided."""
        used = np.zeros((len(self.unit_launch_ns), self.n_devices), dtype=bool)
        used[self.unit_of, x] = True
        if used.any(axis=0).sum() == 1:
            return float(depth)
        if self.lists_whole and int(used.sum()) == len(np.unique(self.unit_of)):
            return max(self.effective_depth(depth), 1.0 + (1.0 - QUEUEING_WHOLE) * (depth - 1))
        return self.effective_depth(depth)

    def crossings(self, x: IntArray) -> NDArray[np.bool_]:
        """[flow, device]: the value must be sent to that device."""
        need = np.zeros((len(self.writer), self.n_devices), dtype=bool)
        need[self.reader_flow, x[self.reader]] = True
        need[np.arange(len(self.writer)), x[self.writer]] = False
        return need

    def loads(self, x: IntArray) -> FloatArray:
        """[device] busy nanoseconds per cohort."""
        picked = self.workload.time_ns[np.arange(self.n_sites), x]
        return np.bincount(x, weights=picked, minlength=self.n_devices).astype(float)

    def launch_cost(self, x: IntArray) -> float:
        """Launch cost of a cohort: every unit pays on every device that runs a part of it."""
        used = np.zeros((len(self.unit_launch_ns), self.n_devices), dtype=bool)
        used[self.unit_of, x] = True
        return float((used.sum(axis=1) * self.unit_launch_ns).sum())

    def transfers(self, x: IntArray) -> tuple[FloatArray, float]:
        """([source, destination] link occupation, nanoseconds of transfer that a cohort waits for)."""
        occupied = np.zeros((self.n_devices, self.n_devices))
        if not len(self.writer):
            return occupied, 0.0
        flow, dst = np.nonzero(self.crossings(x))
        src = x[self.writer[flow]]
        time = self.flow_bytes[flow] / self.rate[src, dst]
        np.add.at(occupied, (src, dst), time)
        waits = (time + self.flow_count[flow] * self.latency[src, dst]) * self.exposed[flow]
        return occupied, float(waits.sum())

    def predict(self, x: IntArray, depth: int) -> Prediction:
        """Price placement `x` with `depth` cohorts in flight. A pair without a link gives period = inf."""
        loads = self.loads(x)
        links, waits = self.transfers(x)
        latency = float(loads.sum()) + self.gap_total_ns + self.launch_cost(x) + waits
        divisor = self.divisor(x, depth)
        period = max(float(loads.max()), float(links.max(initial=0.0)), latency / divisor)
        return Prediction(self.batch, depth, divisor, loads, links, latency, period)

    def cut(self, x: IntArray) -> tuple[int, int]:
        """(bytes sent per cohort, changes of device along the program order of one launch of every unit)."""
        need = self.crossings(x).sum(axis=1) if len(self.writer) else np.zeros(0)
        return round(float((need * self.flow_bytes).sum())), int(np.count_nonzero(np.diff(x)))

    def assignment(self, x: IntArray) -> dict[str, dict[str, str]]:
        """The placement in a plan's words: unit -> site -> device; a unit on one device is {"*": device}."""
        devices = self.workload.devices
        found: dict[str, dict[str, str]] = {}
        for site, d in zip(self.workload.sites, x, strict=True):
            found.setdefault(site.unit, {})[site.name] = devices[int(d)]
        return {u: {"*": next(iter(v.values()))} if len(set(v.values())) == 1 else v for u, v in found.items()}

    def vector(self, lane: Lane) -> IntArray:
        """The placement of a lane as x; KeyError if the plan leaves a site out or names an unknown device."""
        index = {d: i for i, d in enumerate(self.workload.devices)}
        return np.array([index[lane.device_of(s.unit, s.name)] for s in self.workload.sites], dtype=np.int64)


def _link_matrices(workload: Workload) -> tuple[FloatArray, FloatArray, NDArray[np.bool_]]:
    """[source, destination] bytes per ns, latency in ns, and whether there is a link (without: time ~ forever)."""
    devices = workload.devices
    n = len(devices)
    rate, latency = np.full((n, n), 1e-12), np.zeros((n, n))
    linked = np.eye(n, dtype=bool)
    for i, a in enumerate(devices):
        for j, b in enumerate(devices):
            link = workload.cluster.link(a, b) if i != j else None
            if link is not None:
                rate[i, j], latency[i, j], linked[i, j] = link.bytes_per_ns, link.latency_us * 1000.0, True
    np.fill_diagonal(rate, np.inf)
    return rate, latency, linked


@dataclass(frozen=True)
class LaneLoad:
    """One lane as the sharing of machines sees it: what a request costs on every device and link direction."""

    use_ns: FloatArray  # [device + source*destination] nanoseconds per request
    cap_per_s: float  # B * divisor / latency: more is not expected however idle the machines are
    share: float = 1.0
    priority: int = 0


def lane_load(p: Prediction, share: float = 1.0, priority: int = 0) -> LaneLoad:
    """The closed form of a lane, per request, for `share_machines`."""
    use = np.concatenate([p.loads_ns, p.link_ns.ravel()]) / p.batch
    return LaneLoad(use, p.batch * p.divisor * NS / p.latency_ns, share, priority)


def share_machines(lanes: Sequence[LaneLoad], dispatch: str = "free") -> list[float]:
    """Requests per second of every lane of a plan when all run at once.

    dispatch "static": every lane gets exactly its share of the requests, so the slowest sets the pace.
    dispatch "free": lanes take requests as they finish them (closed loop). Lower priority numbers are served
    first; inside a priority, rates grow in proportion to the shares until a machine or the lane's own
    latency stops a lane (progressive filling).
    """
    left = np.ones(len(lanes[0].use_ns))  # share of each machine's time still free
    if dispatch == "static":
        scale = min(c.cap_per_s / c.share for c in lanes)
        total = sum((c.share * c.use_ns for c in lanes), np.zeros_like(left)) / NS
        return [c.share * min(scale, 1.0 / float(total.max())) for c in lanes]
    rates = [0.0] * len(lanes)
    for level in sorted({c.priority for c in lanes}):
        active = [i for i, c in enumerate(lanes) if c.priority == level]
        while active:
            growth = sum((lanes[i].share * lanes[i].use_ns for i in active), np.zeros_like(left)) / NS
            busy = growth > 0
            step = float((left[busy] / growth[busy]).min()) if busy.any() else np.inf
            step = min(step, *((lanes[i].cap_per_s - rates[i]) / lanes[i].share for i in active))
            step = max(step, 0.0)
            left = left - step * growth
            for i in active:
                rates[i] += step * lanes[i].share
            full = left <= 1e-12
            active = [
                i for i in active
                if rates[i] < lanes[i].cap_per_s * (1 - 1e-12) and not (full & (lanes[i].use_ns > 0)).any()
            ]  # fmt: skip
    return rates
