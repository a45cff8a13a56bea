"""What the profiler saw, replay by replay.

All records of one launch of a graph share a correlation id. Counting records would do as well only if the profiler
kept them all: it may lose some while it starts and before it stops, and one that is lost moves all that follow.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

SPIN = "spin_kernel"  # the pause before a measured replay


class Record(NamedTuple):
    """A kernel, copy or set as the profiler stamped it: ns."""

    start: int
    duration: int
    name: str
    launch: int = 0  # correlation id

    @property
    def type(self) -> str:
        return "memset" if self.name.startswith("Memset") else "memcpy" if self.name.startswith("Memcpy") else "kernel"


def device_records(prof: Any) -> list[Record]:
    """Records of a profile that ran on the device, pauses included, sorted by start."""
    found = []
    for e in prof.profiler.kineto_results.events():
        name = e.name()
        if e.device_type() != torch.autograd.DeviceType.CUDA or e.duration_ns() <= 0:
            continue
        if name.startswith(("ProfilerStep", "## ")) or "gpu_user_annotation" in name:
            continue
        found.append(Record(int(e.start_ns()), int(e.duration_ns()), name, int(e.correlation_id())))
    return sorted(found)


def replays(records: Sequence[Record], types: Sequence[str]) -> list[list[Record]]:
    """The measured replays that are complete, each in the order of nodes of these types.

    Measured: those after the first pause. Records of one launch belong together; where launches cannot be told apart
    (no id, or one id for all) what lies between two pauses does.
    """
    begin = next((r.start for r in records if SPIN in r.name), -1)
    found = _of_launches([r for r in records if SPIN not in r.name], begin, types)
    return found or _between_pauses(records, types)


def _of_launches(records: Sequence[Record], begin: int, types: Sequence[str]) -> list[list[Record]]:
    groups: dict[int, list[Record]] = {}
    for r in records:
        groups.setdefault(r.launch, []).append(r)
    # A set may be stamped long before its kernels: a replay began when its first kernel did.
    measured = [g for g in groups.values() if max(r.start for r in g) > begin]
    return [g for g in (in_node_order(g, types) for g in measured) if g is not None]


def _between_pauses(records: Sequence[Record], types: Sequence[str]) -> list[list[Record]]:
    kernels = [r for r in records if r.type == "kernel"]
    others = [r for r in records if r.type != "kernel"]
    starts = [i for i, r in enumerate(kernels) if SPIN in r.name]
    found = [kernels[i + 1 : j] for i, j in itertools.pairwise([*starts, len(kernels)])]
    wanted = Counter(t for t in types if t != "kernel")
    queues = {t: [r for r in others if r.type == t][-n * len(found) :] for t, n in wanted.items()}
    if any(len(queues[t]) != n * len(found) for t, n in wanted.items()):
        return []
    whole = []
    for k, group in enumerate(found):
        more = [r for t, n in wanted.items() for r in queues[t][k * n : (k + 1) * n]]
        ordered = in_node_order([*group, *more], types)
        whole += [ordered] if ordered is not None else []
    return whole


def in_node_order(records: Sequence[Record], types: Sequence[str]) -> list[Record] | None:
    """Records of one replay in the order of nodes of these types; None if some are missing or too many.

    Sets and copies of a partition are stamped by another engine than kernels, and may seem to run long before or after
    the kernel that they wait for: so each type is in order by itself. Where the types do not fit but the number does
    (a driver may set memory by a kernel) records are taken as they are stamped.
    """
    if len(records) != len(types):
        return None
    ordered = sorted(records)
    if Counter(r.type for r in ordered) != Counter(types):
        return ordered
    left = {kind: iter([r for r in ordered if r.type == kind]) for kind in set(types)}
    return [next(left[kind]) for kind in types]
