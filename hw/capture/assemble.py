"""Put a trace together: recorded calls + graph nodes + profiled times -> kernels, sites, buffers."""

from __future__ import annotations

import dataclasses
import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hw.capture import classify
from hw.capture.accesses import site_accesses
from hw.capture.buffers import BufferTable
from hw.capture.driver import MEMCPY, MEMSET, Node
from hw.capture.names import site_names
from hw.capture.recorder import Call
from hw.capture.timing import NodeTimes
from hw.errors import HardwareError
from hw.workloads.base import UnitSpec, Work, Workload
from tesserasim import __version__
from tesserasim.trace.model import Access, Buffer, Kernel, Trace, TraceMeta, structure_sha256

#: How many warnings a trace keeps, the first in launch order; all are counted.
WARNINGS_KEPT = 20


@dataclass(frozen=True)
class Captured:
    """Everything one capture saw, before it becomes a trace."""

    unit: UnitSpec
    nodes: list[Node]
    calls: list[Call]
    borders: list[tuple[str, int]]
    times: NodeTimes
    e2e_ns: dict[str, int]
    e2e_samples_ns: list[int]
    idle_samples_ns: list[int]  # event-timed with the host's submission inside
    workspace_bytes: int
    segments: list[tuple[int, int]]  # allocator segments, sorted (first, end)


@dataclass(frozen=True)
class Attribution:
    """Who launched which node, and what every node reads and writes."""

    calls: list[Call]  # cover every node once, in order
    leaves: list[str]  # per call: weight of a GEMM, as it is called in its module
    sites: list[str]  # per call
    rows: list[list[Access]]  # per node
    buffers: list[Buffer]
    addresses: list[int]  # of the buffers' first bytes
    warnings: list[str]


def attribute(
    workload: Workload, unit: UnitSpec, nodes: list[Node], calls: Sequence[Call], borders: Sequence[tuple[str, int]],
    segments: list[tuple[int, int]],
) -> Attribution:  # fmt: skip
    """Calls, sites and accesses of a captured unit. HardwareError if nodes and calls do not line up."""
    complete = _complete(nodes, calls, borders)
    table = BufferTable(workload.named_tensors(), unit)
    weights = {n.tensor.untyped_storage().data_ptr(): n.name for n in workload.named_tensors() if n.role == "weight"}
    leaves = [
        classify.weight_leaf(c, lambda p: weights.get(p, "")) if classify.kind_of(c, unit) == "gemm" else ""
        for c in complete
    ]
    rows, buffers, warnings = unit_accesses(complete, nodes, table, segments)
    addresses = [b.storage for b in table.buffers]
    alone = {
        c.op for c in complete
        if classify.kind_of(c, unit) == "gemm" or "attention" in c.op or _own_work(c, workload) is not None
    }  # fmt: skip
    sites = site_names([(c.module, c.op) for c in complete], leaves, alone)
    return Attribution(complete, leaves, sites, rows, buffers, addresses, warnings)


def assemble(workload: Workload, captured: Captured, machine: Mapping[str, Any]) -> Trace:
    """Build the trace. HardwareError if nodes and calls do not line up."""
    found = attribute(
        workload, captured.unit, captured.nodes, captured.calls, captured.borders, captured.segments
    )
    parts = classify.parts(found.calls, found.leaves, workload.weights_of)
    kernels: list[Kernel] = []
    for call, leaf, part, site in zip(found.calls, found.leaves, parts, found.sites, strict=True):
        rows = found.rows[call.first : call.last]
        kernels += _kernels(captured, call, leaf, part, site, rows, found.buffers, workload)
    count = Counter(k.site for k in kernels)
    warnings = list(dict.fromkeys(found.warnings))
    kernels = [
        dataclasses.replace(k, group_reason="kernels of one call" if count[k.site] > 1 else "") for k in kernels
    ]
    meta = TraceMeta(
        origin="captured", model=workload.model, unit=captured.unit.as_dict(), gpu=str(machine["gpu"]),
        driver=str(machine["driver"]), torch=str(machine["torch"]), repeats=captured.times.duration.shape[0],
        e2e_ns=captured.e2e_ns, launch=machine.get("launch"), structure_sha256=structure_sha256(tuple(kernels)),
        workspace_bytes=captured.workspace_bytes, tool_version=__version__, moe=workload.moe_statistics(),
        captured_at=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        warnings=tuple(warnings[:WARNINGS_KEPT]),
        extra={
            "copy_gbs": machine.get("copy_gbs"), "gpu_index": machine.get("gpu_index", 0),
            "borders": captured.borders, "warnings_total": len(warnings),
            "e2e_samples_ns": captured.e2e_samples_ns, "span_samples_ns": captured.times.spans(),
            "e2e_host_included_ns": captured.idle_samples_ns,
        },
    )  # fmt: skip
    return Trace(meta, tuple(kernels), tuple(found.buffers))


def unit_accesses(
    calls: Sequence[Call], nodes: list[Node], table: BufferTable, segments: list[tuple[int, int]]
) -> tuple[list[list[Access]], list[Buffer], list[str]]:
    """Accesses per graph node, the buffers they name, and warnings; `calls` cover every node once, in order."""
    rows: list[list[Access]] = []
    warnings: list[str] = []
    for call in calls:
        label = f"{call.module}@{call.first}"  # short: names of activations need not be stable
        accesses, notes = site_accesses(call, nodes[call.first : call.last], table, segments, label)
        rows += accesses
        warnings += notes
    for node, access in table.late:
        rows[node].append(access)
    buffers, notes = table.finish(rows, segments)
    return rows, buffers, warnings + notes


def _complete(nodes: list[Node], calls: Sequence[Call], borders: Sequence[tuple[str, int]]) -> list[Call]:
    """Calls that cover every node exactly once; a node no call explains becomes a call of its own."""
    out: list[Call] = []
    at = 0
    for call in calls:
        if call.first < at:
            raise HardwareError(f"recorded calls overlap at graph node {call.first}")
        out += _unexplained(nodes, borders, at, call.first)
        out.append(call)
        at = call.last
    return out + _unexplained(nodes, borders, at, len(nodes))


def _unexplained(nodes: list[Node], borders: Sequence[tuple[str, int]], first: int, last: int) -> list[Call]:
    found = []
    for i in range(first, last):
        module = ""
        for name, start in borders:
            if start <= i:
                module = name
        op = nodes[i].type if nodes[i].type != "kernel" else "unknown"
        found.append(Call(module, op, "none", i, i + 1))
    return found


def _own_work(call: Call, workload: Workload) -> Work | None:
    """What the workload says of a call of its own operators."""
    shapes = {a.name: a.shape for a in call.arguments}
    return workload.work_of(call.op, shapes, call.meta.get("scalars", {}), call.module)


def _kernels(
    captured: Captured, call: Call, leaf: str, part: str, site: str, accesses: list[list[Access]],
    buffers: Sequence[Buffer], workload: Workload,
) -> list[Kernel]:  # fmt: skip
    unit = captured.unit
    work = _own_work(call, workload)
    if work is not None:
        kind, shape, flops, weight_share = work.kind, dict(work.shape), work.flops, work.weight_share
    else:
        kind = classify.kind_of(call, unit)
        shape = classify.shape_of(call, kind, sum(classify.bytes_of(a, buffers)[1] for a in accesses))
        flops, weight_share = classify.flops_of(kind, shape, causal=unit.phase == "prefill"), 1.0
    weight_dtype, act_dtype = classify.dtype_names(call.arguments)
    # The call's work belongs to its longest kernel: a split-K reduce or a memset does none of the FLOPs.
    medians = np.median(captured.times.duration[:, call.first : call.last], axis=0)
    main = int(np.argmax(medians))
    out = []
    for j in range(call.last - call.first):
        i = call.first + j
        node = captured.nodes[i]
        read, written = classify.bytes_of(accesses[j], buffers, call.door == "triton", weight_share)
        d, g = captured.times.duration[:, i], captured.times.gap[:, i]
        p10, p50, p90 = (round(float(v)) for v in np.percentile(d, [10, 50, 90]))
        node_kind = {MEMCPY: "copy", MEMSET: "memset"}.get(node.type, kind)
        out.append(
            Kernel(
                i, captured.times.names[i], site, node_kind, call.op, call.module, unit.phase, part,
                grid=node.grid, block=node.block, cluster=node.cluster, shared_bytes=node.shared_bytes,
                registers=node.registers, weight_dtype=weight_dtype if leaf else "", act_dtype=act_dtype,
                shape=shape if j == main else {}, flops=flops if j == main else 0,
                read_bytes=read, write_bytes=written, duration_ns=p50, duration_p10_ns=p10, duration_p90_ns=p90,
                gap_ns=round(float(np.median(g))), accesses=tuple(accesses[j]),
            )
        )  # fmt: skip
    return out
