"""Does a plan fit? What lies on every device, against 0.9 of its memory.

On a device lie: every weight that a site placed there reads (once, however many lanes), the state of every
layer whose sites run there for all d * B requests in flight, and the workspace of each cohort in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tesserasim.errors import DoesNotFitError
from tesserasim.metrics.predict import IntArray
from tesserasim.workload import FloatArray, Workload

#: Share of a device's memory that a plan may fill; the rest is context, fragmentation and the runtime.
USABLE = 0.9
MAX_SEQS = 256


@dataclass(frozen=True)
class PlacedLane:
    """A lane's placement on its own workload (lanes of one plan may have different batches)."""

    workload: Workload
    x: IntArray
    depth: int


def usable_bytes(workload: Workload) -> FloatArray:
    """[device] bytes a plan may fill."""
    return np.array([USABLE * d.gpu.memory_bytes for d in workload.cluster.devices])


def placed_bytes(lanes: Sequence[PlacedLane]) -> FloatArray:
    """[device] bytes that lie there."""
    n = lanes[0].workload.time_ns.shape[1]
    total = np.zeros(n)
    weights: set[tuple[str, int]] = set()
    for lane in lanes:
        w = lane.workload
        for r in w.residents:
            for d in set(lane.x[list(r.sites)].tolist()):
                if r.state:
                    total[d] += r.nbytes * w.batch * lane.depth
                elif (r.name, d) not in weights:
                    weights.add((r.name, d))
                    total[d] += r.nbytes
        for d in set(lane.x.tolist()):
            total[d] += w.workspace_bytes * lane.depth
    return total


class Room:
    """Whether placements of one lane fit, as `overflow` says, on flat arrays: for who asks thousands of times."""

    def __init__(self, workload: Workload, depth: int) -> None:
        residents = workload.residents
        self.size = np.array([float(r.nbytes * (workload.batch * depth if r.state else 1)) for r in residents])
        self.resident = np.repeat(np.arange(len(residents)), [len(r.sites) for r in residents] or 0).astype(np.int64)
        self.site = np.array([i for r in residents for i in r.sites], dtype=np.int64)
        self.workspace = float(workload.workspace_bytes * depth)
        self.usable = usable_bytes(workload)
        self.always = float(self.size.sum()) + self.workspace <= float(self.usable.min())

    def fits(self, x: IntArray) -> bool:
        """`x` [site] -> device."""
        return self.always or bool((self.placed(x) <= self.usable).all())

    def placed(self, x: IntArray) -> FloatArray:
        """[device] bytes that lie there."""
        there = np.zeros((len(self.size), len(self.usable)), dtype=bool)
        there[self.resident, x[self.site]] = True
        used = np.bincount(x, minlength=len(self.usable)) > 0
        found: FloatArray = self.size @ there + used * self.workspace
        return found


def overflow(lanes: Sequence[PlacedLane]) -> tuple[str, int] | None:
    """(device id, bytes too many) of the worst device, or None if everything fits."""
    over = placed_bytes(lanes) - usable_bytes(lanes[0].workload)
    worst = int(np.argmax(over))
    return (lanes[0].workload.devices[worst], int(np.ceil(over[worst]))) if over[worst] > 0 else None


def why_not(lanes: Sequence[PlacedLane]) -> str:
    """One line: the device that overflows, what lies there, and by how much; "" if everything fits."""
    found = overflow(lanes)
    if found is None:
        return ""
    name, over = found
    k = lanes[0].workload.devices.index(name)
    placed, room = placed_bytes(lanes)[k], usable_bytes(lanes[0].workload)[k]
    flight = " + ".join(f"{lane.depth} x {lane.workload.batch}" for lane in lanes if k in lane.x)
    return (
        f"{name}: {placed / 1e9:.1f} GB of weights, state of {flight} requests and workspace "
        f"exceed {room / 1e9:.1f} GB ({USABLE:.0%} of its memory) by {over / 1e9:.2f} GB"
    )


def require_fit(lanes: Sequence[PlacedLane]) -> None:
    """Raise DoesNotFitError with `why_not` if a device overflows."""
    reason = why_not(lanes)
    if reason:
        raise DoesNotFitError(reason)


def could_fit(workload: Workload, depth: int = 1) -> bool:
    """The weakest sense of "fits": everything once, over all devices together.

    No placement fits if this fails, so a maximum over the batches that pass it is still a bound.
    """
    weights = sum(r.nbytes for r in workload.residents if not r.state)
    state = sum(r.nbytes for r in workload.residents if r.state)
    need = weights + depth * (workload.batch * state + workload.workspace_bytes)
    return need <= float(usable_bytes(workload).sum())


def max_sequences(n_gpus: int, max_seqs: int = MAX_SEQS) -> int:
    """Most sequences in flight for a lane that spans `n_gpus`."""
    return max_seqs * n_gpus
