"""What a hop between two devices costs: a kernel, a copy, and a kernel on the other device that waits for it.

Chains of small kernels inside one graph, as in a replay: on one device (`stay`), on alternating devices without
copies (`cross`: what waiting for the other device costs), and with a copy of `n` bytes at every change (`hop`). As in
a replay, a kernel also waits for the one before it on its own device: the driver makes that a wait between two of its
queues, which a chain without it does not have. A link is fitted to the hops alone, by bytes; no plan and no model has
a part in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver as cuda

from hw.capture.driver import call
from hw.capture.timing import end_to_end_ns
from hw.partition import Partition
from hw.replay.arena import handles
from hw.replay.graph import ENGINE, KERNEL, add_copy, add_kernel, captured_copies

#: Copies between one kernel and the next, of the smallest size, from which what each costs is fitted.
COPIES = (1, 2, 4, 8)
SIZES = (4096, 65536, 262144, 1 << 20, 4 << 20, 16 << 20)
HOPS = 64
HANG_S = 60.0


@dataclass(frozen=True)
class Link:
    """Fitted cost of one direction: a hop of n bytes takes `latency_ns` + n / `gbs`."""

    source: str
    target: str
    latency_ns: float
    gbs: float  # GB/s, 1e9 bytes
    worst: float  # largest relative residual of the fit
    setup_ns: float = 0.0  # of the latency, what every copy costs that goes before another to the same place

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source, "target": self.target, "latency_ns": round(self.latency_ns, 1),
            "gbs": round(self.gbs, 2), "setup_ns": round(self.setup_ns, 1), "worst_residual": round(self.worst, 4),
        }  # fmt: skip


def fit_link(source: str, target: str, sizes: Sequence[int], hop_ns: Sequence[float]) -> Link:
    """Least squares of hop = latency + bytes / rate, weighted so that every size counts alike."""
    n, t = np.asarray(sizes, dtype=float), np.asarray(hop_ns, dtype=float)
    a = np.stack([np.ones_like(n), n], axis=1) / t[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(a, np.ones_like(t), rcond=None)
    latency, per_byte = max(0.0, float(latency)), max(1e-9, float(per_byte))
    fitted = latency + per_byte * n
    return Link(source, target, latency, 1.0 / per_byte, float(np.max(np.abs(fitted / t - 1))))


def fit_setup(copies: Sequence[int], change_ns: Sequence[float]) -> float:
    """ns that one more copy adds to a change of devices: the slope, by least squares; at least 0."""
    return max(0.0, float(np.polyfit(np.asarray(copies, dtype=float), np.asarray(change_ns, dtype=float), 1)[0]))


class _Tiny:
    """A kernel of one element on a device, and memory to copy from and to."""

    def __init__(self, partition: Partition, nbytes: int) -> None:
        self.partition = partition
        with torch.cuda.device(partition.device):
            self.memory = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
            self.cell = torch.zeros(1, device="cuda")
            self.stream = partition.stream()
            with torch.cuda.stream(self.stream):
                self.cell.add_(1)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.stream(self.stream):
                self.graph.capture_begin(capture_error_mode="thread_local")
                self.cell.add_(1)
                self.graph.capture_end()
        self.node = handles(self.graph)[0]


@dataclass(frozen=True)
class _Chain:
    """HOPS kernels over `devices` in turn, with `copies` of `nbytes` each between two of them (None: without);
    `both`: two chains at once, one each way; `by`: what copies."""

    devices: Sequence[_Tiny]
    nbytes: int | None
    by: str
    both: bool = False
    copies: int = 1


def _chain_ns(chain: _Chain) -> float:
    """Nanoseconds per change."""
    devices, nbytes = chain.devices, chain.nbytes
    context = call(cuda.cuCtxGetCurrent(), "cuCtxGetCurrent")
    graph = call(cuda.cuGraphCreate(0), "cuGraphCreate")
    kept = []
    for offset in (0, 1) if chain.both else (0,):
        after: list[Any] = []
        last: dict[str, Any] = {}  # kernel before on each device
        for i in range(HOPS):
            here, before = devices[(i + offset) % len(devices)], devices[(i + offset - 1) % len(devices)]
            if nbytes is not None and i:
                first = nbytes * chain.copies * offset  # the two chains copy other bytes
                parts = [
                    (before.memory.data_ptr() + at, here.memory.data_ptr() + at, nbytes, 1, nbytes)
                    for at in range(first, first + nbytes * chain.copies, nbytes)
                ]
                if chain.by == KERNEL:
                    made = captured_copies(parts, here.stream, here.partition.device)
                    kept.append(made)
                    own = here.partition.driver_context
                    after = [add_kernel((graph, after or None, len(after)), n, own) for n in made.nodes]
                else:
                    apart = here.partition.device != before.partition.device
                    home = before.partition.primary or context
                    after = [add_copy(graph, part, after, home, apart) for part in parts]
            after += [last[here.partition.name]] if here.partition.name in last and len(devices) > 1 else []
            after = [add_kernel((graph, after or None, len(after)), here.node, here.partition.driver_context)]
            last[here.partition.name] = after[0]
    executable = call(cuda.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        times = end_to_end_ns(
            lambda: call(cuda.cuGraphLaunch(executable, cuda.CUstream(stream.cuda_stream)), "cuGraphLaunch"), 9
        )
    call(cuda.cuGraphExecDestroy(executable), "cuGraphExecDestroy")
    call(cuda.cuGraphDestroy(graph), "cuGraphDestroy")
    return statistics.median(times) / (HOPS - 1)


def measure(one: Partition, other: Partition, by: str = ENGINE, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Hops between two devices, by size, one way at a time and both at once, and the link fitted to them. `by`: what
    copies."""
    a, b = pair = [_Tiny(p, 2 * max(sizes)) for p in (one, other)]
    stay = {p.partition.name: _chain_ns(_Chain([p], None, by)) for p in (a, b)}
    cross = _chain_ns(_Chain(pair, None, by))
    kernel = (stay[one.name] + stay[other.name]) / 2
    hops = [_chain_ns(_Chain(pair, n, by)) - kernel for n in sizes]
    duplex = [_chain_ns(_Chain(pair, n, by, both=True)) - kernel for n in sizes]
    more = [_chain_ns(_Chain(pair, min(sizes), by, copies=k)) - kernel for k in COPIES]
    link = replace(fit_link(one.name, other.name, sizes, hops), setup_ns=fit_setup(COPIES, more))
    return {
        "kind": "link", "copies_by": by, "devices": [one.name, other.name], "sizes": list(sizes), "stay_ns": stay,
        "cross_ns": cross,
        "hop_ns": hops, "hop_both_ns": duplex, "copies": list(COPIES), "hop_copies_ns": more, "link": link.as_dict(),
    }  # fmt: skip
