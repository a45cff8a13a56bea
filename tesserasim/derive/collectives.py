"""What a collective costs inside a group: bytes over the group's link and one latency.

    all-reduce   t = latency + 2 (N - 1) / N * bytes / bandwidth      (ring: Patarasuk and Yuan, JPDC 69, 2009)
    all-gather   t = latency + (N - 1) / N * bytes / bandwidth        (bytes: of the whole result)

Bandwidth and latency are those of the link catalogue, as reached by copies: one direction's bandwidth, and the cost of
one hop inside a CUDA graph. Reduction in the switch (NVLink SHARP) is not modelled.
"""

from __future__ import annotations

from tesserasim.cluster.catalogue import link_kinds
from tesserasim.cluster.model import GpuSpec, LinkKind
from tesserasim.errors import InputError
from tesserasim.files import did_you_mean

FORMULA = "latency + 2 (N - 1) / N * bytes / bandwidth"


def group_link(gpu: GpuSpec, name: str | None = None) -> LinkKind:
    """The link inside a group of `gpu`: the one named, else its NVLink, else its PCIe."""
    kinds = link_kinds()
    if name is not None:
        if name not in kinds:
            raise InputError(f"--link {name[:40]!r} is no kind of link{did_you_mean(name, list(kinds))}")
        return kinds[name]
    for kind in kinds.values():
        if gpu.nvlink_gbs and kind.name.startswith("nvlink") and kind.nominal_gbps == 8 * gpu.nvlink_gbs:
            return kind
    found = kinds.get(f"pcie{gpu.pcie_gen}")
    if found is None:
        raise InputError(f"{gpu.name}: its link is not in the catalogue; name one with --link ({', '.join(kinds)})")
    return found


def all_reduce_us(nbytes: float, ranks: int, link: LinkKind) -> float:
    return link.latency_us + 2.0 * (ranks - 1) / ranks * nbytes / (link.gbps / 8.0 * 1e3)


def all_gather_us(nbytes: float, ranks: int, link: LinkKind) -> float:
    return link.latency_us + (ranks - 1) / ranks * nbytes / (link.gbps / 8.0 * 1e3)
