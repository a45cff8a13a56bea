"""One unit on several devices: arenas for every slot, placements replayed, checked, broken on purpose, and timed."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hw.errors import DriverError, HardwareError
from hw.partition import Partition
from hw.replay.arena import Arena, capture_arena, differences, handles
from hw.replay.contents import bytes_at, delta_rows, differing, fill, gather, holds_nan, mark, poison
from hw.replay.cut import Move, Step, brought, cut, remains
from hw.replay.graph import ENGINE, KERNEL, SplitGraph
from hw.replay.loop import Group, Plain, Timing, burst, closed_loop, together
from hw.replay.mutate import mutants
from hw.replay.order import order
from hw.replay.segments import SegmentRun
from hw.workloads.base import UnitSpec, Workload
from tesserasim.deps.graph import unit_flow
from tesserasim.plans import Lane
from tesserasim.trace.model import Trace

BURSTS, BURST_S = 4, 0.12  # of a timing
_CYCLES_PER_S = 2_000_000_000  # about
_SPIN_CYCLES = _CYCLES_PER_S // 500  # 2 ms


class Session:
    """Captures of `unit` on every partition, one per slot. `workloads`: the model on every GPU, by number."""

    def __init__(
        self, workloads: Mapping[int, Workload], unit: UnitSpec, partitions: Sequence[Partition], depth: int = 1,
        copies: str = ENGINE,
    ) -> None:  # fmt: skip
        if copies == KERNEL and len({p.device for p in partitions}) > 1:
            raise HardwareError("copies by kernels: the devices must be parts of one GPU")
        self.copies = copies
        self.workloads, self.unit, self.partitions = workloads, unit, list(partitions)
        self.workload = workloads[partitions[0].device]
        self.slots: list[dict[str, Arena]] = []
        self.streams: list[torch.cuda.Stream] = []
        self.pinned: dict[str, str] = {}  # site -> why it must stay on the first device
        self.refused = ""  # why the driver would not take one graph over the devices
        self._spins: dict[str, Any] = {}
        self._unit_s = 0.0  # of the last unsplit run, about
        self.deepen(depth)

    def deepen(self, depth: int) -> None:
        """Capture until there are `depth` slots."""
        while len(self.slots) < depth:
            slot = {p.name: capture_arena(self.workloads[p.device], self.unit, p) for p in self.partitions}
            self.slots.append(slot)
            self.streams.append(torch.cuda.Stream())
            first = slot[self.partitions[0].name]
            if first.found.sites != self.slots[0][self.partitions[0].name].found.sites:
                raise HardwareError(f"{self.unit.file_stem}: two captures differ in their sites")
            for arena in slot.values():
                for kernel, why in differences(first, arena).items():
                    self.pinned.setdefault(first.trace.kernels[kernel].site, f"slot {len(self.slots) - 1}: {why}")
        self.rows = delta_rows(self.slots[0][self.partitions[0].name])

    @property
    def trace(self) -> Trace:
        return self.slots[0][self.partitions[0].name].trace

    def devices(self, lane: Lane) -> list[str]:
        """Device of every kernel under a plan's lane; pinned sites stay on the first device, and a site that reads the
        workspace of another stays with it: where in its segment a workspace lies is not known."""
        home = self.partitions[0].name
        placed = {
            k.site: home if k.site in self.pinned else lane.device_of(self.unit.name, k.site)
            for k in self.trace.kernels
        }  # fmt: skip
        for writer, reader in workspace_pairs(self.trace):
            placed[reader] = placed[writer]
        return [placed[k.site] for k in self.trace.kernels]

    def build(self, device_of: Sequence[str], slot: int = 0, **wrong: Any) -> SplitGraph | SegmentRun:
        """The placement as one graph, or as segments where the driver has refused such a graph before."""
        steps: list[Step] = cut(self.trace, device_of, carry=True)
        if self.refused and not wrong:
            return SegmentRun(steps, self.slots[slot], self.rows, self.copies)
        try:
            return SplitGraph(steps, self.slots[slot], self.rows, copies=self.copies, **wrong)
        except DriverError as error:
            if wrong or self.refused:
                raise
            self.refused = str(error)
            return SegmentRun(steps, self.slots[slot], self.rows, self.copies)

    # Correctness

    def outputs(self, device_of: Sequence[str], seed: int, **wrong: Any) -> list[torch.Tensor]:
        """Poison, set values of `seed`, run once, and collect what was made."""
        graph = self.build(device_of, **wrong)
        try:
            self.prepare(device_of, seed)
            graph.launch(self.streams[0])
            torch.cuda.synchronize()
            return gather(self.slots[0], remains(self.trace, device_of), self.rows)
        finally:
            graph.close()

    def prepare(self, device_of: Sequence[str], seed: int, slot: int = 0) -> None:
        true = brought(self.trace, device_of)
        for name, arena in self.slots[slot].items():
            with torch.cuda.device(arena.partition.device):
                poison(arena, seed)
                fill(arena, seed, {b for b, d in true if d == name})
                torch.cuda.synchronize()

    def unsplit(self, seed: int) -> list[torch.Tensor]:
        """What the captured graph itself makes of the same values on the first device: the reference."""
        home = self.partitions[0].name
        device_of = [home] * len(self.trace.kernels)
        self.prepare(device_of, seed)
        arena = self._ready(self.slots[0][home])
        begun = time.monotonic()
        with torch.cuda.stream(arena.graphed.stream):
            arena.graphed.graph.replay()
        torch.cuda.synchronize()
        self._unit_s = time.monotonic() - begun
        return gather(self.slots[0], remains(self.trace, device_of), self.rows)

    def _ready(self, arena: Arena) -> Arena:
        if not arena.ready:
            arena.graphed.graph.instantiate()
            arena.ready = True
        return arena

    def unstable(self, seed: int, runs: int = 3) -> tuple[int, list[int]] | None:
        """(kernel, ids of buffers) that first differ between runs of the unit kernel by kernel, each after the one
        before has ended: a kernel that does not repeat itself, since its inputs were the same. None if none differs."""
        device_of = [self.partitions[0].name] * len(self.trace.kernels)
        graphs = [SplitGraph([s], self.slots[0], self.rows) for s in cut(self.trace, device_of, carry=True)]
        try:
            found = [self._marks(graphs, device_of, seed) for _ in range(runs)]
        finally:
            for g in graphs:
                g.close()
        for k, each in enumerate(zip(*found, strict=True)):
            wrong = [b for b in each[0] if any(e[b] != each[0][b] for e in each)]
            if wrong:
                return k, wrong
        return None

    def _marks(self, graphs: Sequence[SplitGraph], device_of: Sequence[str], seed: int) -> list[dict[int, int]]:
        """Per kernel, a mark of every buffer that it has written (but workspaces)."""
        self.prepare(device_of, seed)
        arena, out = self.slots[0][self.partitions[0].name], []
        for graph, kernel in zip(graphs, self.trace.kernels, strict=True):
            graph.launch(self.streams[0])
            torch.cuda.synchronize()
            written = {a.buffer for a in kernel.accesses if a.writes} - {
                b.id for b in self.trace.buffers if b.role == "workspace"
            }
            gpu = arena.partition.device
            out.append({
                b: mark(bytes_at(arena.address(b), self.trace.buffers[b].nbytes, gpu)) for b in sorted(written)
            })
        return out

    def check(self, device_of: Sequence[str], seed: int, want: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Whether a placement gives `want` to the bit, and what it moved. If not, whether it does when run again."""
        got = self.outputs(device_of, seed)
        wrong = differing(got, want)
        steps = cut(self.trace, device_of, carry=True)
        moves = [s for s in steps if isinstance(s, Move)]
        report: dict[str, Any] = {
            "equal": not wrong, "outputs": len(want), "wrong_outputs": wrong[:8], "nan": holds_nan(got, seed),
            "moves": len(moves), "moved_bytes": sum(m.nbytes for m in moves),
            "switches": sum(a != b for a, b in itertools.pairwise(device_of)),
            "kernels": {p.name: sum(d == p.name for d in device_of) for p in self.partitions},
        }  # fmt: skip
        if wrong:
            left = remains(self.trace, device_of)
            report["wrong"] = [self.trace.buffers[left[i].buffer].name for i in wrong[:4]]
            report["again"] = [not differing(self.outputs(device_of, seed), want) for _ in range(3)]
        return report

    def mutate(
        self, device_of: Sequence[str], seed: int, want: Sequence[torch.Tensor], count: int, rng: random.Random
    ) -> dict[str, Any]:
        """Drop `count` moves, then `count` waits (with a pause before the producer), one a run: whether the output
        differs, and for waits whether it is right with the pause alone.

        A wait whose moves can be lost without a trace is counted as `unobserved`: its bytes steer no output.
        """
        steps = cut(self.trace, device_of, carry=True)
        arenas = self.slots[0]
        found = mutants(
            steps, order(steps, arenas), lambda m: arenas[m.target].address(m.buffer) in arenas[m.target].integers
        )
        report: dict[str, Any] = {
            "lost": [], "early": [], "implied": found.implied, "integers": found.integers, "unobserved": 0,
        }  # fmt: skip
        for i in rng.sample(found.moves, min(count, len(found.moves))):
            report["lost"].append([i, bool(differing(self.outputs(device_of, seed, lost={i}), want))])
        for w in rng.sample(found.waits, min(count, len(found.waits))):
            step = steps[w.late]
            pause = {"late": {w.late}, "spin": self.spin(step.source if isinstance(step, Move) else step.device)}
            control = not differing(self.outputs(device_of, seed, **pause), want)
            got = self.outputs(device_of, seed, early={(w.reader, j) for j in w.gone}, **pause)
            shows = bool(differing(got, want))
            if not shows and not differing(self.outputs(device_of, seed, lost=w.gone), want):
                report["unobserved"] += 1
                continue
            report["early"].append([w.move, shows, control])
        return report

    def spin(self, device: str) -> Any:
        """A node that keeps one thread of a device busy: 2 ms, or longer than a unit takes where that is more."""
        if device not in self._spins:
            stream = next(p for p in self.partitions if p.name == device).stream()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                torch.cuda._sleep(max(_SPIN_CYCLES, int(self._unit_s * 2 * _CYCLES_PER_S)))
                graph.capture_end()
            self._spins[device] = (graph, stream, handles(graph)[0])
        return self._spins[device][2]

    # Timing

    def time(self, device_of: Sequence[str], depth: int, stagger_us: float = 0.0) -> Timing:
        """Closed loop of `depth` slots, each launching the unit again and again, slot k from k * `stagger_us` on."""
        graphs = [self.build(device_of, slot) for slot in range(depth)]
        try:
            for slot in range(depth):
                self.prepare(device_of, seed=1, slot=slot)
            return closed_loop(graphs, self.streams, BURSTS, BURST_S, stagger_us, self._gpus(device_of))
        finally:
            torch.cuda.synchronize()
            for g in graphs:
                g.close()

    def time_plain(self) -> Timing:
        """The captured graph of the first device itself, not made again: what the builder must not slow down."""
        home = self.partitions[0].name
        self.prepare([home] * len(self.trace.kernels), seed=1)
        plain = Plain(self._ready(self.slots[0][home]))
        return closed_loop([plain], self.streams, BURSTS, BURST_S, gpus=self._gpus([home]))

    def _gpus(self, device_of: Sequence[str]) -> list[int]:
        """The GPUs that a placement uses."""
        used = set(device_of)
        return sorted({p.device for p in self.partitions if p.name in used})

    def time_together(self, placements: Sequence[Sequence[str]]) -> Group:
        """Closed loops of slots with a placement each, all at once: lanes of one plan, or replicas."""
        graphs = [self.build(device_of, slot) for slot, device_of in enumerate(placements)]
        try:
            for slot, device_of in enumerate(placements):
                self.prepare(device_of, seed=1, slot=slot)
            return together(graphs, self.streams, BURSTS, BURST_S, self._gpus([d for x in placements for d in x]))
        finally:
            torch.cuda.synchronize()
            for g in graphs:
                g.close()

    def timeline(self, device_of: Sequence[str], depth: int, path: Path, launches: int = 3) -> None:
        """A few launches per slot as the profiler sees them: a Kineto file, which Perfetto opens and `export` reads."""
        from torch.profiler import ProfilerActivity, profile

        graphs = [self.build(device_of, slot) for slot in range(depth)]
        try:
            for slot in range(depth):
                self.prepare(device_of, seed=1, slot=slot)
            burst(graphs, self.streams, [launches] * depth)
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                burst(graphs, self.streams, [launches] * depth)
            path.parent.mkdir(parents=True, exist_ok=True)
            prof.export_chrome_trace(str(path))
        finally:
            torch.cuda.synchronize()
            for g in graphs:
                g.close()


def workspace_pairs(trace: Trace) -> list[tuple[str, str]]:
    """(writer, reader) of every workspace that goes from one site to another, in program order."""
    sites = [k.site for k in trace.kernels]
    found = {
        (sites[v.writer], sites[r]): None
        for v in unit_flow(trace).values if trace.buffers[v.buffer].role == "workspace"
        for r in v.readers if sites[r] != sites[v.writer]
    }  # fmt: skip
    return list(found)


def random_devices(sites: Sequence[str], names: Sequence[str], switches: int, rng: random.Random) -> dict[str, str]:
    """A device for every site, changing about `switches` times in program order, starting anywhere."""
    order = list(dict.fromkeys(sites))
    if len(names) < 2 or switches >= len(order):
        raise HardwareError(f"{switches} switches over {len(order)} sites and {len(names)} devices")
    changes = set(rng.sample(range(1, len(order)), switches))
    now = rng.choice(list(names))
    placed = {}
    for i, site in enumerate(order):
        if i in changes:
            now = rng.choice([n for n in names if n != now])
        placed[site] = now
    return placed
