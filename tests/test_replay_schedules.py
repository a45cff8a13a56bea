"""Real traces under random placements, run in random orders that respect the waits, in arenas that reuse addresses.

Memory is cells between all addresses that anything touches; a kernel writes a hash of what it reads. Whatever the
order, what remains must be what the unsplit unit leaves. No GPU, and no code of the graph builder, is involved.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import pytest

from hw.replay.cut import Launch, Move, Step, brought, cut, remains
from hw.replay.order import order
from tesserasim.deps.graph import needs_old_bytes
from tesserasim.trace.model import Access, Trace
from tesserasim.trace.parquet import read_trace

TRACES = Path(__file__).resolve().parents[1] / "traces"
SHIPPED = [
    "llama-3-8b/decode-b8-c512", "llama-3-8b/prefill-b1-t512", "gpt-oss-20b/decode-b32-c2048",
    "mamba-codestral-7b/decode-b32-c512", "qwen2.5-vl-7b/encode-b1", "sd3.5-medium/denoise-b1",
    "sd3.5-encoders/vae-decode-b1",
]  # fmt: skip
FAR = 1 << 44  # between the storages of an arena, and 1 << 56 between arenas


class Memory:
    """One device's arena: cells of the trace's storages."""

    def __init__(self, trace: Trace, device: str, marks: dict[int, list[int]]) -> None:
        self.trace, self.marks = trace, marks
        self.base = (ord(device) - 96) << 56
        self.cells: dict[int, list[int]] = {
            s: [hash(("poison", device, s, i)) for i in range(len(m))] for s, m in marks.items()
        }

    def address(self, buffer: int) -> int:
        b = self.trace.buffers[buffer]
        return self.base + storage(self.trace, buffer) * FAR + b.storage_offset

    def span(self, buffer: int, start: int, end: int) -> tuple[int, int, int]:
        """Storage, first cell and end cell of bytes of a buffer."""
        s, offset = storage(self.trace, buffer), self.trace.buffers[buffer].storage_offset
        m = self.marks[s]
        return s, bisect_left(m, offset + start), bisect_left(m, offset + end)

    def read(self, buffer: int, start: int, end: int) -> list[int]:
        s, i, j = self.span(buffer, start, end)
        return self.cells[s][i:j]

    def write(self, buffer: int, start: int, end: int, values: Sequence[int]) -> None:
        s, i, j = self.span(buffer, start, end)
        self.cells[s][i:j] = values


def storage(trace: Trace, buffer: int) -> int:
    """Number of a buffer's storage. One of its own for buffers of unknown storage and for workspaces: a trace knows
    the allocator's segment that a workspace lies in, not which part of it."""
    b = trace.buffers[buffer]
    return b.storage if b.storage >= 0 and b.role != "workspace" else 100_000 + buffer


class Unit:
    """A trace with what its kernels do to memory."""

    def __init__(self, name: str) -> None:
        self.trace = read_trace(TRACES / f"{name}.parquet")

    @cached_property
    def marks(self) -> dict[int, list[int]]:
        """Per storage the borders between cells."""
        found: dict[int, set[int]] = defaultdict(set)
        for b in self.trace.buffers:
            found[storage(self.trace, b.id)] |= {b.storage_offset, b.storage_offset + b.nbytes}
        for k in self.trace.kernels:
            for a in k.accesses:
                start, end = self.extent(a)
                offset = self.trace.buffers[a.buffer].storage_offset
                found[storage(self.trace, a.buffer)] |= {offset + start, offset + end}
        return {s: sorted(m) for s, m in found.items()}

    def extent(self, a: Access) -> tuple[int, int]:
        b = self.trace.buffers[a.buffer]
        return (0, b.nbytes) if a.extent == "unknown" else (a.offset, a.offset + a.nbytes)

    def memory(self, device: str, true: set[tuple[int, str]]) -> Memory:
        m = Memory(self.trace, device, self.marks)
        for b in self.trace.buffers:
            if b.role == "weight" or (b.id, device) in true:
                s, i, j = m.span(b.id, 0, b.nbytes)
                m.cells[s][i:j] = [hash(("true", b.id, n)) for n in range(j - i)]
        return m

    @cached_property
    def reads(self) -> list[list[tuple[int, int]]]:
        """Per kernel the (storage, cell) that it reads and that hold a value: what nobody wrote has none."""
        written: dict[int, set[int]] = defaultdict(set)  # buffer -> cells
        m = Memory(self.trace, "a", self.marks)
        out = []
        for k in self.trace.kernels:
            found: list[tuple[int, int]] = []
            for a in k.accesses:
                b = self.trace.buffers[a.buffer]
                if not needs_old_bytes(a, b):
                    continue
                carried = b.role in ("state", "input", "output")
                s, i, j = m.span(a.buffer, *((0, b.nbytes) if carried else self.extent(a)))
                known = carried or b.role == "weight"
                found += [(s, c) for c in range(i, j) if known or c in written[a.buffer]]
            for a in k.accesses:
                if a.writes:
                    _, i, j = m.span(a.buffer, *self.extent(a))
                    written[a.buffer].update(range(i, j))
            out.append(found)
        return out

    def launch(self, m: Memory, kernel: int) -> None:
        k = self.trace.kernels[kernel]
        value = hash((kernel, tuple(m.cells[s][c] for s, c in self.reads[kernel])))
        for a in k.accesses:
            if a.writes and self.trace.buffers[a.buffer].role != "weight":
                start, end = self.extent(a)
                _, i, j = m.span(a.buffer, start, end)
                m.write(a.buffer, start, end, [hash((value, a.buffer, n)) for n in range(j - i)])

    def run(self, steps: Sequence[Step], memories: dict[str, Memory], rng: random.Random | None) -> None:
        """All steps, in order or in any order that the waits allow."""
        if rng is None:
            schedule: list[int] = list(range(len(steps)))
        else:
            schedule = random_order(order(steps, memories), rng)
        for i in schedule:
            step = steps[i]
            if isinstance(step, Launch):
                self.launch(memories[step.device], step.kernel)
            else:
                values = memories[step.source].read(step.buffer, step.start, step.end)
                memories[step.target].write(step.buffer, step.start, step.end, values)

    def left(self, device_of: Sequence[str], memories: dict[str, Memory]) -> list[tuple[int, ...]]:
        return [
            tuple(memories[r.device].read(r.buffer, r.start, r.end)) for r in remains(self.trace, device_of)
        ]


def random_order(needs: Sequence[Sequence[int]], rng: random.Random) -> list[int]:
    """A topological order; half of the time it hurries on with what became ready last."""
    open_of = [len(n) for n in needs]
    after: list[list[int]] = [[] for _ in needs]
    for i, n in enumerate(needs):
        for j in n:
            after[j].append(i)
    ready = [i for i, n in enumerate(open_of) if n == 0]
    out = []
    while ready:
        i = ready.pop(-1 if rng.random() < 0.5 else rng.randrange(len(ready)))
        out.append(i)
        for j in after[i]:
            open_of[j] -= 1
            if open_of[j] == 0:
                ready.append(j)
    assert len(out) == len(needs)
    return out


def placements(trace: Trace, rng: random.Random) -> list[list[str]]:
    found = []
    for devices, often in (("ab", 0.5), ("ab", 0.05), ("abc", 0.2)):
        now, site_device = rng.choice(devices), []
        for _ in trace.sites:
            now = rng.choice(devices) if rng.random() < often else now
            site_device.append(now)
        found.append([site_device[s] for s in trace.site_of])
    return found


@pytest.mark.parametrize("name", SHIPPED)
def test_any_order_within_the_waits_leaves_what_the_unsplit_unit_leaves(name: str) -> None:
    """Mutations tried: no waits for readers of overwritten bytes; no waits of launches for their moves."""
    unit, rng = Unit(name), random.Random(name)
    alone = ["a"] * len(unit.trace.kernels)
    memories = {"a": unit.memory("a", brought(unit.trace, alone))}
    unit.run(cut(unit.trace, alone), memories, None)
    want = unit.left(alone, memories)
    assert want
    for device_of in placements(unit.trace, rng):
        true = brought(unit.trace, device_of)
        for attempt in range(3):
            memories = {d: unit.memory(d, true) for d in sorted(set(device_of))}
            unit.run(cut(unit.trace, device_of), memories, rng if attempt else None)
            assert unit.left(device_of, memories) == want


def test_a_move_that_is_left_out_shows() -> None:
    """In the first order already: the poison of the arena reaches what remains."""
    unit, rng = Unit("llama-3-8b/decode-b8-c512"), random.Random(3)
    alone = ["a"] * len(unit.trace.kernels)
    memories = {"a": unit.memory("a", brought(unit.trace, alone))}
    unit.run(cut(unit.trace, alone), memories, None)
    want = unit.left(alone, memories)
    device_of = placements(unit.trace, rng)[0]
    steps = cut(unit.trace, device_of)
    moves = [i for i, s in enumerate(steps) if isinstance(s, Move)]
    caught = 0
    for i in rng.sample(moves, 25):
        memories = {d: unit.memory(d, brought(unit.trace, device_of)) for d in sorted(set(device_of))}
        unit.run([*steps[:i], *steps[i + 1 :]], memories, None)
        caught += unit.left(device_of, memories) != want
    assert caught >= 24
