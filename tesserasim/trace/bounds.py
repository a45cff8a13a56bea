"""A bound on the work of kernels whose shapes nobody recorded, from the time they took.

In its measured time a kernel moves at most time × memory bandwidth and computes at most time × peak rate. For
kernels without recorded work these bounds stand in for it, so that a cost model can scale their time to another GPU:
by bandwidth for kinds that are limited by memory, and by the slower of bandwidth and rate for the others. The share
of kernel time so treated is printed by `import` and kept in `meta.extra["work"]`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from tesserasim.trace.inspect import is_memcpy
from tesserasim.trace.model import KINDS, Kernel, Trace


class Bound(NamedTuple):
    """How the bound of a kind is stated."""

    written: float  # share of the bytes that is written
    compute: bool  # whether FLOPs are bounded too


#: Kinds limited by memory alone have no FLOPs in their bound.
_HALF, _READ = Bound(0.5, False), Bound(0.0, False)
BOUNDS: Mapping[str, Bound] = {
    "gemm": Bound(0.0, True), "attention_prefill": Bound(0.0, True), "attention_decode": _READ,
    "moe": Bound(0.0, True), "ssm_scan": Bound(0.5, True), "conv": Bound(0.0, True), "norm": _HALF,
    "elementwise": _HALF, "reduction": _READ, "copy": _HALF, "memset": Bound(1.0, False), "collective": _HALF,
    "sampling": _READ, "other": Bound(0.5, True),
}  # fmt: skip
assert set(BOUNDS) == set(KINDS)


def with_bounds(trace: Trace, bytes_per_ns: float | None, flops_per_ns: float | None) -> Trace:
    """`trace` with a bound for every kernel without recorded work.

    The rates are the GPU's peaks: bytes and FLOPs per ns; None (an unknown GPU) leaves those kernels without work.
    `meta.extra["work"]` gets the shares of kernel time: `recorded`, `bounded`, `unknown`, and `bounded_kinds`.
    """
    time: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    rows = []
    for kernel in trace.kernels:
        row = kernel
        if kernel.kind != "memset" and not is_memcpy(kernel):
            how = "recorded"
            if not kernel.read_bytes + kernel.write_bytes + kernel.flops:
                how = "unknown" if bytes_per_ns is None or flops_per_ns is None else "bounded"
                kinds[kernel.kind] += kernel.duration_ns
                if bytes_per_ns is not None and flops_per_ns is not None:
                    row = _bounded(kernel, bytes_per_ns, flops_per_ns)
            time[how] += kernel.duration_ns
        rows.append(row)
    total = sum(time.values())

    def share(part: int) -> float:
        return round(part / total, 6) if total else 0.0

    work: dict[str, Any] = {how: share(time[how]) for how in ("recorded", "bounded", "unknown")}
    work["bounded_kinds"] = {kind: share(ns) for kind, ns in kinds.most_common()}
    meta = dataclasses.replace(trace.meta, extra={**trace.meta.extra, "work": work})
    return dataclasses.replace(trace, meta=meta, kernels=tuple(rows))


def _bounded(kernel: Kernel, bytes_per_ns: float, flops_per_ns: float) -> Kernel:
    bound = BOUNDS[kernel.kind]
    moved = int(kernel.duration_ns * bytes_per_ns)
    written = int(moved * bound.written)
    flops = int(kernel.duration_ns * flops_per_ns) if bound.compute else 0
    return dataclasses.replace(kernel, read_bytes=moved - written, write_bytes=written, flops=flops)


def describe_work(work: Mapping[str, Any]) -> str:
    """How the work of the kernels is known, by share of their time."""
    parts = [f"{work['recorded']:.1%} of kernel time with work from recorded shapes"]
    kinds = ", ".join(f"{kind} {share:.1%}" for kind, share in list(work["bounded_kinds"].items())[:6])
    if work["bounded"]:
        parts.append(f"{work['bounded']:.1%} with a bound from the time ({kinds})")
    if work["unknown"]:
        parts.append(f"{work['unknown']:.1%} without any: no GPU of the catalogue, name one with --gpu ({kinds})")
    return "; ".join(parts)
