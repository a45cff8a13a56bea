"""How two kernels slow each other down: every pair of a few kernels of a unit, each looped on a stream of its own.

This is what the simulator's shared devices are calibrated on: single kernels, never plans. Two streams of one device
compete for its multiprocessors and for DRAM, two partitions of one GPU for DRAM alone.

A kernel is looped with all that its site launches, in order: one that counts blocks in memory which a memset before it
clears would wait for ever the second time.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from cuda.bindings import driver as cuda

from hw.capture.driver import Node, call
from hw.replay.arena import Arena
from hw.replay.graph import Nodes
from hw.replay.session import Session
from hw.watchdog import watchdog
from tesserasim.trace.model import Trace

LOOP_NS = 2_000_000.0
REPEATS = 5
HANG_S = 30.0
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


class Known(Protocol):
    """What choosing must know of an arena."""

    @property
    def nodes(self) -> Sequence[Node]: ...

    @property
    def trace(self) -> Trace: ...


def chosen(arena: Known, durations: Sequence[int], count: int) -> list[range]:
    """Stretches of kernels to pair, each all that one site launches in a row: of all different ones (functions, grids)
    those with the largest sums of `durations`, in order."""
    total: dict[Any, int] = {}
    first: dict[Any, range] = {}
    at = 0
    for _, group in itertools.groupby(arena.trace.kernels, key=lambda k: k.site):
        stretch = range(at, at + len(list(group)))
        at = stretch.stop
        nodes = [arena.nodes[i] for i in stretch]
        if all(n.type != "kernel" for n in nodes):
            continue
        key = tuple((n.name, n.grid) for n in nodes)
        total[key] = total.get(key, 0) + sum(durations[i] for i in stretch)
        first.setdefault(key, stretch)
    best = sorted(total, key=lambda k: -total[k])[:count]
    return sorted((first[k] for k in best), key=lambda r: r.start)


class Loop:
    """`count` launches of a stretch of captured kernels, all in a row, as a graph."""

    def __init__(self, arena: Arena, stretch: range, count: int) -> None:
        device = arena.partition.name
        nodes = Nodes({device: arena}, {})
        self.count, self.stream = count, torch.cuda.Stream()
        self.graph = call(cuda.cuGraphCreate(0), "cuGraphCreate")
        after: list[Any] = []
        for _ in range(count):
            for i in stretch:
                after = [nodes.add(self.graph, nodes.handles[device][i], after, device)]
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


def measure(
    session: Session, durations: Sequence[int], count: int = 6, known: Callable[[str], bool] = lambda pair: False
) -> Iterator[dict[str, Any]]:
    """Rows of all pairs of `count` kernels: on the first device alone (two slots), and across the first two devices.
    `known`: whether a pair, as rows name it, is not wanted any more."""
    names = [p.name for p in session.partitions]
    session.deepen(2)
    one = session.slots[0][names[0]]
    places = [(one, session.slots[1][names[0]], "same")]
    if len(names) > 1 and len({p.device for p in session.partitions[:2]}) == 1:  # two GPUs share nothing
        places.append((one, session.slots[0][names[1]], "across"))
    kernels = chosen(one, durations, count)
    sizes = {k: max(1, round(LOOP_NS / max(1, sum(durations[i] for i in k)))) for k in kernels}
    alone: dict[tuple[int, range], float] = {}
    for here, there, where in places:
        for a, b in itertools.product(kernels, kernels):
            pair = f"{where} {a.start} {b.start}"
            if (where == "across" or a.start <= b.start) and not known(pair):
                loops = [Loop(here, a, sizes[a]), Loop(there, b, sizes[b])]
                with watchdog(HANG_S, f"kernels {a.start} and {b.start} together"):
                    for loop, key in zip(loops, ((id(here), a), (id(there), b)), strict=True):
                        if key not in alone:
                            together_ns([loop])  # warm
                            alone[key] = together_ns([loop])[0] / loop.count
                    end_a, end_b = together_ns(loops)
                alone_a, alone_b = alone[id(here), a], alone[id(there), b]
                now_a, now_b = corun(end_a, end_b, sizes[a], sizes[b], alone_a, alone_b)
                yield {
                    "kind": "pair", "plan": pair, "where": where, "kernels": [list(a), list(b)],
                    "alone_ns": [alone_a, alone_b], "together_ns": [now_a, now_b],
                }  # fmt: skip
                for loop in loops:
                    loop.close()
