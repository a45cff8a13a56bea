"""One device's own capture of a unit, and whether two captures are the same work on other addresses."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hw.capture import classify
from hw.capture.assemble import Attribution, attribute
from hw.capture.driver import Node
from hw.capture.run import Graphed, capture_graph
from hw.errors import HardwareError
from hw.partition import Partition
from hw.workloads.base import NamedTensor, UnitSpec, Workload
from tesserasim.trace.model import Kernel, Trace, TraceMeta


@dataclass
class Arena:
    """A captured unit with the memory that it runs in. Holds on to its tensors: the graph only knows addresses."""

    partition: Partition
    unit: UnitSpec
    graphed: Graphed
    found: Attribution
    tensors: list[NamedTensor]
    integers: frozenset[int]  # storage addresses that a call used as integers
    trace: Trace
    originals: Mapping[str, torch.Tensor]  # integer inputs and state, as the capture used them
    free: frozenset[str]  # integer inputs and state that may hold any number below their largest: tokens
    ready: bool = False  # the captured graph itself is instantiated

    @property
    def nodes(self) -> list[Node]:
        return self.graphed.nodes

    def address(self, buffer: int) -> int:
        return self.found.addresses[buffer]


def capture_arena(workload: Workload, unit: UnitSpec, partition: Partition, priority: int = 0) -> Arena:
    """Capture `unit` on a new stream of `partition`, with inputs, state and activations of its own. The workload's
    tensors lie on the partition's GPU."""
    with torch.cuda.device(partition.device):
        return _capture_arena(workload, unit, partition, priority)


def _capture_arena(workload: Workload, unit: UnitSpec, partition: Partition, priority: int) -> Arena:
    graphed = capture_graph(workload, unit, partition.stream(priority))
    tensors = list(workload.named_tensors())
    kept = {n.name: n.tensor.clone() for n in tensors if n.role != "weight" and not n.tensor.is_floating_point()}
    found = attribute(workload, unit, graphed.nodes, graphed.recorder.calls, graphed.recorder.borders, _blocks())
    integers = frozenset(a.storage for c in found.calls for a in c.arguments if "int" in a.dtype)
    return Arena(
        partition,
        unit,
        graphed,
        found,
        tensors,
        integers,
        _trace(workload, unit, graphed.nodes, found),
        kept,
        frozenset(workload.token_inputs),
    )


def _blocks() -> list[tuple[int, int]]:
    """Sorted (first, end) of allocated blocks outside of graphs' pools, and of whole segments inside of them.

    Two captures may keep their library workspaces in one segment: taken whole, they would seem to share them.
    """
    found: list[tuple[int, int]] = []
    for s in torch.cuda.memory_snapshot():
        if tuple(s.get("segment_pool_id") or (0, 0)) == (0, 0):
            found += [(b["address"], b["address"] + b["size"]) for b in s["blocks"]]
        else:
            found.append((s["address"], s["address"] + s["total_size"]))
    return sorted(found)


def _trace(workload: Workload, unit: UnitSpec, nodes: Sequence[Node], found: Attribution) -> Trace:
    """Kernels, sites and accesses as a trace without times."""
    kernels = []
    parts = classify.parts(found.calls, found.leaves, workload.weights_of)
    for call, site, part in zip(found.calls, found.sites, parts, strict=True):
        for i in range(call.first, call.last):
            n = nodes[i]
            kernels.append(
                Kernel(i, n.name or n.type, site, kind=n.type if n.type != "kernel" else "other", op=call.op,
                       module=call.module, part=part, grid=n.grid, block=n.block, accesses=tuple(found.rows[i]))
            )  # fmt: skip
    meta = TraceMeta(origin="captured", model=workload.model, unit=unit.as_dict(), gpu="")
    return Trace(meta, buffers=tuple(found.buffers), kernels=tuple(kernels))


def differences(one: Arena, other: Arena) -> dict[int, str]:
    """Kernels that are not the same work in both captures, with what differs. HardwareError if the units differ.

    Captures are paired through the parameter bytes of their nodes: every byte that differs must belong to a pointer
    into a buffer, to the same offset of the same buffer on both sides.
    """
    if len(one.nodes) != len(other.nodes) or one.found.sites != other.found.sites:
        raise HardwareError(f"{one.unit.file_stem}: two captures differ in their kernels or sites")
    if len(one.found.buffers) != len(other.found.buffers):
        raise HardwareError(f"{one.unit.file_stem}: two captures differ in the number of their buffers")
    for x, y in zip(one.found.buffers, other.found.buffers, strict=True):
        if (x.role, x.nbytes) != (y.role, y.nbytes):
            raise HardwareError(
                f"{one.unit.file_stem}: two captures differ in buffer {x.name}: {x.role} of {x.nbytes} bytes, and "
                f"{y.role} of {y.nbytes}"
            )
    places = _Places(one, other)
    out = {}
    for i, (a, b) in enumerate(zip(one.nodes, other.nodes, strict=True)):
        for field in ("type", "name", "grid", "block", "cluster", "shared_bytes"):
            if getattr(a, field) != getattr(b, field):
                out[i] = f"another {field.replace('_bytes', ' memory').replace('name', 'function')}"
                break
        else:
            why = places.unexplained(a, b)
            if why:
                out[i] = why
    return out


class _Places:
    """Distance between the two homes of every buffer, by address of the first."""

    def __init__(self, one: Arena, other: Arena) -> None:
        pairs = zip(one.found.buffers, one.found.addresses, other.found.addresses, strict=True)
        spans = sorted((p, p + b.nbytes, q - p) for b, p, q in pairs)
        self.starts = [s[0] for s in spans]
        self.spans = spans

    def distances(self, address: int) -> set[int]:
        """Of all buffers that contain an address, or end at it."""
        found = set()
        k = bisect_right(self.starts, address)
        for start, end, distance in reversed(self.spans[max(0, k - 64) : k]):
            if start <= address <= end:
                found.add(distance)
        return found

    def unexplained(self, a: Node, b: Node) -> str:
        if [len(p) for p in a.params] != [len(p) for p in b.params]:
            return "other parameters"
        for p, (one, other) in enumerate(zip(a.params, b.params, strict=True)):
            left = {i for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y}
            for at in range(0, len(one) - 7, 4):
                if not left.intersection(range(at, at + 8)):
                    continue
                x, y = (struct.unpack_from("<Q", blob, at)[0] for blob in (one, other))
                if y - x in self.distances(x):
                    left -= set(range(at, at + 8))
            if left:
                return f"parameter {p} differs at byte {min(left)}"
        ours, theirs = ([(q, m, n) for q, m, n in node.pointers] for node in (a, b))
        for (x, m, n), (y, m2, n2) in zip(ours, theirs, strict=True):
            if (m, n) != (m2, n2) or (x != y and y - x not in self.distances(x)):
                return "another copy or set"
        return ""


def handles(graph: Any) -> list[Any]:
    """Node handles of a captured graph in launch order."""
    from cuda.bindings import driver as cuda

    from hw.capture.driver import call, graph_of, node_count

    g = graph_of(graph)
    count = node_count(g)
    return list(call(cuda.cuGraphGetNodes(g, count), "cuGraphGetNodes")[0][:count])
