"""The machines: GPU types, devices of a cluster, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU type. Peak rates are dense; bandwidth is what the vendor states unless `effective_gbs` is set."""

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
    unverified: str = ""

    @property
    def dram_gbs(self) -> float:
        """Bandwidth to compute with: measured if known, else the datasheet's."""
        return self.effective_gbs or self.bandwidth_gbs


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


@dataclass(frozen=True, slots=True)
class Link:
    """A duplex link between two devices: each direction has the whole bandwidth."""

    a: str  # device ids
    b: str
    gbps: float  # gigabit per second and direction
    latency_us: float
    kind: str = ""
    source: str = ""

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
