"""How two kernels slow each other down: every pair of a few kernels of a unit, each looped on a stream of its own.

This is what the simulator's shared devices are calibrated on: single kernels, never plans. Two streams of one device
compete for its multiprocessors and for DRAM, two partitions of one GPU for DRAM alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver as cuda

from hw.capture.driver import call
from hw.replay.arena import Arena, handles
from hw.replay.graph import add_kernel
from hw.replay.session import Session

LOOP_NS = 2_000_000.0
REPEATS = 5
_AHEAD_CYCLES = 1_000_000


def corun(
    loop_a: float, loop_b: float, count_a: int, count_b: int, alone_a: float, alone_b: float
) -> tuple[float, float]:
    """ns of one kernel of either loop while both run, from the times at which two loops that began together end.

    What the longer loop does after the end of the other runs at its speed alone.
    """
    if loop_a <= loop_b:
        rest = min(count_b - 1e-9, (loop_b - loop_a) / alone_b)
        return loop_a / count_a, loop_a / (count_b - rest)
    b, a = corun(loop_b, loop_a, count_b, count_a, alone_b, alone_a)
    return a, b


def chosen(arena: Arena, durations: Sequence[int], count: int) -> list[int]:
    """Kernels to pair: of all different ones (function, grid) those with the largest sums of `durations`, ascending."""
    total: dict[tuple[str, Any], int] = {}
    first: dict[tuple[str, Any], int] = {}
    for i, (node, ns) in enumerate(zip(arena.nodes, durations, strict=True)):
        if node.type == "kernel":
            key = (node.name, node.grid)
            total[key] = total.get(key, 0) + ns
            first.setdefault(key, i)
    best = sorted(total, key=lambda k: -total[k])[:count]
    return sorted(first[k] for k in best)


class Loop:
    """`count` launches of one captured kernel in a row, as a graph."""

    def __init__(self, arena: Arena, kernel: int, count: int) -> None:
        node = handles(arena.graphed.graph)[kernel]
        self.count, self.stream = count, torch.cuda.Stream()
        self.graph = call(cuda.cuGraphCreate(0), "cuGraphCreate")
        after: list[Any] = []
        for _ in range(count):
            after = [add_kernel((self.graph, after or None, len(after)), node, arena.partition.driver_context)]
        self.executable = call(cuda.cuGraphInstantiate(self.graph, 0), "cuGraphInstantiate")

    def launch(self) -> None:
        call(cuda.cuGraphLaunch(self.executable, cuda.CUstream(self.stream.cuda_stream)), "cuGraphLaunch")

    def close(self) -> None:
        call(cuda.cuGraphExecDestroy(self.executable), "cuGraphExecDestroy")
        call(cuda.cuGraphDestroy(self.graph), "cuGraphDestroy")


def together_ns(loops: Sequence[Loop]) -> list[float]:
    """Median ns from a common start to the end of each loop."""
    found: list[list[float]] = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_AHEAD_CYCLES)
        begin.record()
        ends = []
        for loop in loops:
            loop.stream.wait_event(begin)
            loop.launch()
            end = torch.cuda.Event(enable_timing=True)
            end.record(loop.stream)
            ends.append(end)
        torch.cuda.synchronize()
        found.append([begin.elapsed_time(e) * 1e6 for e in ends])
    return [statistics.median(f[i] for f in found) for i in range(len(loops))]


def measure(session: Session, durations: Sequence[int], count: int = 6) -> list[dict[str, Any]]:
    """Rows of all pairs of `count` kernels: on the first device alone (two slots), and across the first two devices."""
    names = [p.name for p in session.partitions]
    session.deepen(2)
    one = session.slots[0][names[0]]
    places = [(one, session.slots[1][names[0]], "same")]
    if len(names) > 1:
        places.append((one, session.slots[0][names[1]], "across"))
    kernels = chosen(one, durations, count)
    sizes = {k: max(1, round(LOOP_NS / max(1, durations[k]))) for k in kernels}
    alone: dict[tuple[int, int], float] = {}
    rows = []
    for here, there, where in places:
        for i, a in enumerate(kernels):
            for b in kernels if where == "across" else kernels[i:]:
                loops = [Loop(here, a, sizes[a]), Loop(there, b, sizes[b])]
                for loop, key in zip(loops, ((id(here), a), (id(there), b)), strict=True):
                    if key not in alone:
                        together_ns([loop])  # warm
                        alone[key] = together_ns([loop])[0] / loop.count
                end_a, end_b = together_ns(loops)
                alone_a, alone_b = alone[id(here), a], alone[id(there), b]
                now_a, now_b = corun(end_a, end_b, sizes[a], sizes[b], alone_a, alone_b)
                rows.append({
                    "kind": "pair", "where": where, "kernels": [a, b], "alone_ns": [alone_a, alone_b],
                    "together_ns": [now_a, now_b],
                })  # fmt: skip
                for loop in loops:
                    loop.close()
    return rows
