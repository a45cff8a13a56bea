"""Closed loops of slots on a GPU, timed: each slot launches its graph again when the last launch has ended.

Everything is submitted ahead, behind a pause, so that the host's own time is in no figure. Slots begin together, or one
after the other where a plan staggers them: cohorts of equal stages that begin together stay together, and then two
devices are busy in turn. A rate is that of the middle of a burst, when all slots are under way.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hw.power import EnergyMeter, joules
from hw.replay.arena import Arena

_CYCLES_PER_S = 2e9  # about
_AHEAD_CYCLES = 2_000_000
_SETTLE_S = 0.15


class Launchable(Protocol):
    """A built placement."""

    def launch(self, stream: torch.cuda.Stream) -> None: ...


@dataclass(frozen=True)
class Timing:
    """Measured closed loop of one placement: bursts of `launches` per slot."""

    depth: int
    launches: int
    stagger_us: float  # from the start of one slot to that of the next
    per_s: tuple[float, ...]  # units completed per second, a figure per burst
    latency_ms: tuple[float, ...]  # median time of a launch in its slot, a figure per burst
    energy_j: float | None  # of one unit
    energy_gpus: tuple[int, ...] = (0,)  # whose counters it is of

    def as_dict(self) -> dict[str, Any]:
        return {
            "depth": self.depth, "launches": self.launches, "stagger_us": self.stagger_us,
            "units_per_s": statistics.median(self.per_s),
            "units_per_s_all": list(self.per_s), "latency_ms": statistics.median(self.latency_ms),
            "latency_ms_all": list(self.latency_ms), "energy_j": self.energy_j, "energy_gpus": list(self.energy_gpus),
        }  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Measured closed loops of slots with placements of their own."""

    launches: tuple[int, ...]  # per slot and burst
    per_s: tuple[tuple[float, ...], ...]  # per slot: units completed per second, a figure per burst
    energy_j: float | None  # of one unit

    @property
    def total_per_s(self) -> tuple[float, ...]:
        """Units per second of all slots, a figure per burst."""
        return tuple(map(sum, zip(*self.per_s, strict=True)))

    def as_dict(self) -> dict[str, Any]:
        return {
            "launches": list(self.launches), "units_per_s": statistics.median(self.total_per_s),
            "units_per_s_all": list(self.total_per_s), "slot_per_s_all": [list(x) for x in self.per_s],
            "energy_j": self.energy_j,
        }  # fmt: skip


class Plain:
    """A captured graph as it is, launched like a split one."""

    def __init__(self, arena: Arena) -> None:
        self.graph = arena.graphed.graph

    def launch(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            self.graph.replay()


def turns(launches: Sequence[int]) -> list[int]:
    """Slots in the order in which their launches are submitted: each spread evenly over the whole."""
    due = [((k + 0.5) / n, slot) for slot, n in enumerate(launches) for k in range(n)]
    return [slot for _, slot in sorted(due)]


def steady_per_s(ends: Sequence[Sequence[float]]) -> float:
    """Units per second of slots whose launches ended at `ends` [slot][launch], s: from the completion with which every
    slot may have had one, to the last before slots may run out of launches."""
    depth, times = len(ends), sorted(t for slot in ends for t in slot)
    first, last = depth - 1, len(times) - depth
    if last <= first:
        return len(times) / times[-1]
    return (last - first) / (times[last] - times[first])


def burst(
    graphs: Sequence[Launchable], streams: Sequence[torch.cuda.Stream], launches: Sequence[int], stagger_s: float = 0.0
) -> list[list[float]]:
    """[slot][launch] seconds from the common start to the end of every launch."""
    torch.cuda.synchronize()
    begin = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_AHEAD_CYCLES)
    begin.record()
    marks: list[list[torch.cuda.Event]] = [[] for _ in graphs]
    for slot, (_, s) in enumerate(zip(graphs, streams, strict=False)):
        s.wait_event(begin)
        if slot and stagger_s:
            with torch.cuda.stream(s):
                torch.cuda._sleep(int(slot * stagger_s * _CYCLES_PER_S))
    for slot in turns(launches):
        graphs[slot].launch(streams[slot])
        end = torch.cuda.Event(enable_timing=True)
        end.record(streams[slot])
        marks[slot].append(end)
    torch.cuda.synchronize()
    return [[begin.elapsed_time(e) * 1e-3 for e in m] for m in marks]


def latencies(ends: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of every launch after the first of its slot: each begins when the one before has ended."""
    return [b - a for slot in ends for a, b in itertools.pairwise(slot)]


def settle(graphs: Sequence[Launchable], streams: Sequence[torch.cuda.Stream]) -> None:
    until = time.monotonic() + _SETTLE_S
    while time.monotonic() < until:
        burst(graphs, streams, [2] * len(graphs))


def closed_loop(
    graphs: Sequence[Launchable], streams: Sequence[torch.cuda.Stream], bursts: int, burst_s: float,
    stagger_us: float = 0.0, gpus: Sequence[int] = (0,),
) -> Timing:  # fmt: skip
    """Slots of one placement: as many launches each."""
    once = max(s[-1] for s in burst(graphs, streams, [2] * len(graphs))) / 2
    launches = max(4, int(burst_s / once))
    settle(graphs, streams)
    meter = EnergyMeter(gpus)
    rates, late = [], []
    before = meter.millijoules()
    for _ in range(bursts):
        ends = burst(graphs, streams, [launches] * len(graphs), stagger_us * 1e-6)
        rates.append(steady_per_s(ends))
        late.append(statistics.median(latencies(ends)) * 1e3)
    energy = joules(before, meter.millijoules())
    units = bursts * len(graphs) * launches
    per_unit = energy / units if energy is not None else None
    return Timing(len(graphs), launches, stagger_us, tuple(rates), tuple(late), per_unit, tuple(gpus))


def together(
    graphs: Sequence[Launchable], streams: Sequence[torch.cuda.Stream], bursts: int, burst_s: float,
    gpus: Sequence[int] = (0,),
) -> Group:  # fmt: skip
    """Slots of several placements: so many launches each that all end at about the same time, as far as a first burst
    can tell; a slot's rate counts to its own end."""
    counts = [3] * len(graphs)
    for _ in range(2):  # at equal counts the slower slots run alone in the end: once more with counts that fit
        ends = [s[-1] for s in burst(graphs, streams, counts)]
        counts = [max(3, round(burst_s * n / end)) for n, end in zip(counts, ends, strict=True)]
    settle(graphs, streams)
    meter = EnergyMeter(gpus)
    rates = []
    before = meter.millijoules()
    for _ in range(bursts):
        ends = [s[-1] for s in burst(graphs, streams, counts)]
        rates.append([n / end for n, end in zip(counts, ends, strict=True)])
    energy = joules(before, meter.millijoules())
    per_unit = energy / (bursts * sum(counts)) if energy is not None else None
    return Group(tuple(counts), tuple(zip(*rates, strict=True)), per_unit)
