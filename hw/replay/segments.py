"""The split unit as many small graphs, ordered by events: where one graph over all devices is not to be had.

A segment is a stretch of steps on one device, or of moves in one direction, that neither waits for another stretch
in its middle nor keeps one waiting for it. Devices that no driver joins in one graph can run these.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cuda.bindings import driver as cuda

from hw.capture.driver import call
from hw.replay.arena import Arena
from hw.replay.cut import Launch, Step
from hw.replay.graph import ENGINE, KERNEL, Nodes
from hw.replay.order import order
from hw.replay.rows import Rows


@dataclass
class Segment:
    """Steps of one chain, launched as one; `after`: segments that it waits for."""

    chain: Hashable
    steps: list[int]
    after: list[int] = field(default_factory=list)
    asked: bool = False  # another chain waits for it


def segments(chains: Sequence[Hashable], needs: Sequence[Sequence[int]]) -> list[Segment]:
    """Steps in order as segments, by first step. `needs[i]`: steps that step i waits for."""
    asked = {j for i, n in enumerate(needs) for j in n if chains[j] != chains[i]}
    open_of: dict[Hashable, int] = {}
    home: list[int] = []
    found: list[Segment] = []
    for i, chain in enumerate(chains):
        others = [j for j in needs[i] if chains[j] != chain]
        if chain not in open_of or others:
            open_of[chain] = len(found)
            found.append(Segment(chain, [], sorted({home[j] for j in others})))
        s = open_of[chain]
        found[s].steps.append(i)
        home.append(s)
        if i in asked:
            found[s].asked = True
            del open_of[chain]
    return found


class SegmentRun:
    """Executable segments of `steps`; same use as `SplitGraph`."""

    def __init__(
        self, steps: Sequence[Step], arenas: Mapping[str, Arena], rows: Mapping[int, Rows], copies: str = ENGINE
    ) -> None:
        nodes = Nodes(arenas, rows, steps if copies == KERNEL else ())
        self._nodes = nodes  # owns the captured copies
        chains = [s.device if isinstance(s, Launch) else (s.source, s.target) for s in steps]
        self.parts = segments(chains, order(steps, arenas))
        self.streams: dict[Hashable, torch.cuda.Stream] = {}
        self.built: list[tuple[Any, Any]] = []
        for part in self.parts:
            if part.chain not in self.streams:
                new = isinstance(part.chain, tuple)
                self.streams[part.chain] = torch.cuda.Stream() if new else arenas[str(part.chain)].graphed.stream
            graph = call(cuda.cuGraphCreate(0), "cuGraphCreate")
            after: list[Any] = []
            for i in part.steps:
                after = nodes.step(graph, steps[i], after)
            self.built.append((graph, call(cuda.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")))
        self.events = [torch.cuda.Event() for _ in self.parts]

    def launch(self, stream: torch.cuda.Stream) -> None:
        begin = torch.cuda.Event()
        begin.record(stream)
        for s in self.streams.values():
            s.wait_event(begin)
        for part, (_, executable), event in zip(self.parts, self.built, self.events, strict=True):
            on = self.streams[part.chain]
            for j in part.after:
                on.wait_event(self.events[j])
            call(cuda.cuGraphLaunch(executable, cuda.CUstream(on.cuda_stream)), "cuGraphLaunch")
            if part.asked:
                event.record(on)
        for s in self.streams.values():
            end = torch.cuda.Event()
            end.record(s)
            stream.wait_event(end)

    def close(self) -> None:
        for graph, executable in self.built:
            call(cuda.cuGraphExecDestroy(executable), "cuGraphExecDestroy")
            call(cuda.cuGraphDestroy(graph), "cuGraphDestroy")
