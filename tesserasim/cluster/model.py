"""The machines: GPU types, devices of a cluster, and the links between them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU type. Peak rates are dense; bandwidth is the vendor's unless `effective_gbs` is set."""

    name: str  # canonical: "A100-80GB-PCIe"
    aliases: tuple[str, ...]
    architecture: str
    compute_capability: str
    sms: int
    clock_mhz: int
    bf16_tflops: float
    fp8_tflops: float | None
    memory_bytes: int
    bandwidth_gbs: float  # GB/s, 1e9 bytes
    l2_bytes: int
    tdp_w: float
    effective_gbs: float | None = None  # measured, where it differs from the datasheet by > 5 %
    pcie_gen: int | None = None
    nvlink_gbs: float | None = None  # per direction
    source: str = ""
    unverified: str = ""  # fields whose sources are weak or disagree
    l2_gbs: float | None = None  # read bandwidth of the L2 cache, GB/s; None: unknown
    notes: str = ""

    @property
    def dram_gbs(self) -> float:
        """Bandwidth to compute with: measured if known, else the datasheet's."""
        return self.effective_gbs or self.bandwidth_gbs


@dataclass(frozen=True, slots=True)
class LinkKind:
    """A kind of link as the catalogue knows it: what one direction carries and what one hop costs.

    `latency_us` is the cost of a hop beyond the bytes, as a program sees it: from the end of the kernel that
    made the value to the moment the kernel on the other GPU may start, several times the wire's latency.
    """

    name: str  # "nvlink4", "pcie4", "rdma200"
    gbps: float  # gigabit per second and direction, as reached (RDMA: the line rate, which names it)
    nominal_gbps: float
    latency_us: float
    gbps_source: str
    latency_source: str


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per GPU hour, with the sources' spread."""

    usd_per_hour: float
    low: float
    high: float
    date: str
    source: str


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU of a cluster. `id` is the GPU's name if it is the only one of its type, else "name#k"."""

    id: str
    gpu: GpuSpec
    sms: int | None = None  # of a partition; None: the whole GPU

    @property
    def sm_count(self) -> int:
        return self.sms or self.gpu.sms


@dataclass(frozen=True, slots=True)
class Link:
    """A duplex link between two devices: each direction has the whole bandwidth."""

    a: str  # device ids
    b: str
    gbps: float  # gigabit per second and direction
    latency_us: float
    kind: str = ""
    source: str = ""
    setup_us: float = 0.0  # every transfer occupies the link for this long besides its bytes
    #: copies of captured graphs: one copy engine a direction, or one for all devices of a DRAM, carries them in the
    #: order in which their readers were launched, each holding up those behind until its producer has ended
    in_order: bool = False

    @property
    def bytes_per_ns(self) -> float:
        return self.gbps / 8.0


@dataclass(frozen=True)
class Cluster:
    """Devices in order, links between every pair that can talk, and the price of each GPU type used."""

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    prices: Mapping[str, Price] = field(default_factory=dict)  # GPU name -> price; a missing one is unknown
    #: device id -> Gb/s per direction of its port, shared by all its links; a missing one is no limit
    nic_gbps: Mapping[str, float] = field(default_factory=dict)
    #: ids of devices that share one DRAM (partitions of one GPU); others have their own. Shared devices only
    dram_domains: tuple[tuple[str, ...], ...] = ()

    @property
    def dram_of(self) -> tuple[int, ...]:
        """[device] its DRAM: the index of the first device on it."""
        first = {d.id: i for i, d in enumerate(self.devices)}
        for domain in self.dram_domains:
            first.update(dict.fromkeys(domain, min(first[d] for d in domain)))
        return tuple(first[d.id] for d in self.devices)

    def device(self, device_id: str) -> Device:
        for d in self.devices:
            if d.id == device_id:
                return d
        raise KeyError(device_id)

    def link(self, a: str, b: str) -> Link | None:
        for x in self.links:
            if {x.a, x.b} == {a, b}:
                return x
        return None

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all devices together; None if one is unknown (never 0 in its place)."""
        try:
            return sum(self.prices[d.gpu.name].usd_per_hour for d in self.devices)
        except KeyError:
            return None


#: Words about a figure, not the figure itself: they may be corrected without a cluster becoming another one.
_PROSE = ("aliases", "source", "unverified", "notes", "date")


def cluster_hash(cluster: Cluster) -> str:
    """SHA-256 over every figure of the cluster: devices in order, links, ports and prices; no prose.

    Two clusters with equal hashes give equal results; the same text parsed on another machine hashes alike.
    """

    def figures(thing: GpuSpec | Link | Price) -> dict[str, object]:
        rare = ("setup_us", "in_order")  # as below
        return {k: v for k, v in asdict(thing).items() if k not in _PROSE and (v or k not in rare)}

    content: dict[str, object] = {
        "devices": [[d.id, figures(d.gpu)] for d in cluster.devices],
        "links": sorted((figures(x) for x in cluster.links), key=lambda f: (str(f["a"]), str(f["b"]))),
        "nic_gbps": dict(sorted(cluster.nic_gbps.items())),
        "prices": {name: figures(p) for name, p in sorted(cluster.prices.items())},
    }
    # Only where they are used, so that other clusters keep their hashes.
    if cluster.dram_domains:
        content["dram_domains"] = sorted(sorted(x) for x in cluster.dram_domains)
    if any(d.sms for d in cluster.devices):
        content["sms"] = [d.sms for d in cluster.devices]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
