"""Operators of a recorded step, each run on its device, with exactly the transfers that a cut demands.

Every device has an *arena*: memory of its own for every storage of the recording. Before a run all of it but the
weights is poison, other poison in every arena: NaN where floats lie, other valid values where integers do, since a
stale index must give a wrong answer and not a fault. Inputs and state get values that the recording did not see,
and only devices that read them before anything writes them get the true ones. So an answer can be right only by way
of the transfers.

Each arena also knows which version (writer) of every byte it holds. An operator that reads a version that is not the
newest one in program order is an error, whatever `cut` says: the two derive from the accesses alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hw.errors import HardwareError
from hw.replay.aten_record import EMPTY, INTEGERS, Home, Op, Recorded, Sample, View, eager
from hw.replay.cut import BEFORE, Launch, Move, Step, cut
from tesserasim.deps.graph import CARRIED
from tesserasim.trace.model import Trace

POISON = -2  # a version that nobody made

Values = Mapping[int, torch.Tensor]  # buffer -> all bytes of its storage


class StaleReadError(HardwareError):
    """An operator reads bytes whose newest version is not on its device."""


class Arena:
    """Memory of one device: `memory[i]` are the bytes of storage i."""

    def __init__(self, recorded: Recorded, name: str, device: torch.device) -> None:
        self.recorded, self.name, self.device = recorded, name, device
        main = recorded.homes[0].device.type if recorded.homes else device.type
        if device.type != main:
            raise HardwareError(f"device {name} is of type {device.type}, but the step was recorded on {main}")
        self.memory = [
            torch.empty(h.nbytes, dtype=torch.uint8, device=device if h.device.type == main else h.device)
            for h in recorded.homes
        ]
        for i, storage in recorded.constants.items():
            self.memory[i].copy_(as_bytes(storage))
        self._tensors: dict[View, torch.Tensor] = {}

    def tensor(self, view: View) -> torch.Tensor:
        """The tensor that a view is in this arena."""
        found = self._tensors.get(view)
        if found is None:
            found = self._tensors[view] = typed(self.memory[view.storage], view)
        return found

    def fill(self, seed: int, true: Values) -> None:
        """Poison everything but the weights; true bytes for the buffers `true`."""
        for i, home in enumerate(self.recorded.homes):
            if home.role != "weight":
                if i in true:
                    self.memory[i].copy_(true[i])
                else:
                    poison(self.memory[i], home, zlib.crc32(f"{seed} {self.name} {i}".encode()))

    def run(self, op: Op) -> None:
        """Run an operator on what lies here. HardwareError if its results have not the recorded sizes."""
        if op.name in EMPTY:
            return  # its result is whatever lies there
        leaves = [
            self.tensor(v) if isinstance(v, View) else self.place(v) if isinstance(v, torch.device) else v
            for v in op.leaves
        ]
        args, kwargs = tree_unflatten(leaves, op.spec)
        with self._current():
            made = tree_flatten(op.func(*args, **kwargs))[0]
            for i, view in op.fresh:
                if tuple(made[i].shape) != view.size:
                    raise HardwareError(
                        f"{op.module or 'step'}/{op.name}: sizes of a result depend on values; it was recorded with "
                        f"{view.size} and is {tuple(made[i].shape)} now"
                    )
                self.tensor(view).copy_(made[i])

    def place(self, device: torch.device) -> torch.device:
        """Where a result goes that was recorded on `device`."""
        return self.device if device.type == self.device.type else device

    def _current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def typed(memory: torch.Tensor, view: View) -> torch.Tensor:
    """Bytes (a whole storage) as the tensor that `view` describes."""
    new = torch.empty(0, dtype=view.dtype, device=memory.device)
    return new.set_(memory.untyped_storage(), view.offset, view.size, view.stride)


def poison(memory: torch.Tensor, home: Home, seed: int) -> None:
    """Other NaN everywhere for floats of every size; for integers values in the range that they had."""
    generator = torch.Generator(device=memory.device).manual_seed(seed)
    if home.dtype.is_floating_point or home.dtype.is_complex:
        memory.fill_(0xFF)
        if home.dtype.itemsize > 1:  # 0xFFC1 to 0xFFFE: NaN as fp16 and bf16, two of them as fp32, four as fp64
            memory[: len(memory) // 2 * 2].view(torch.int16).random_(-0x3F, -1, generator=generator)
        return
    if home.dtype not in (*INTEGERS, torch.bool):
        memory.fill_(seed % 251)
        return
    low, high = (0, 1) if home.dtype == torch.bool else (home.low or 0, home.high or 0)
    low = min(low, 0) if low == high else low  # one value alone would be the true one
    n = len(memory) // home.dtype.itemsize
    values = torch.randint(low, high + 1, (n,), generator=generator, device=memory.device)
    memory[: n * home.dtype.itemsize].view(home.dtype).copy_(values)


def new_values(recorded: Recorded, seed: int) -> dict[int, torch.Tensor]:
    """Inputs, state and outputs before a run: values by `seed` that look like the recorded ones."""
    found: dict[int, torch.Tensor] = {}
    for s in recorded.samples:
        b, home = s.view.storage, recorded.homes[s.view.storage]
        if b not in found:
            found[b] = torch.zeros(home.nbytes, dtype=torch.uint8, device=home.device)
        typed(found[b], s.view).copy_(_drawn(s, zlib.crc32(f"{seed} {home.name} {s.view.offset}".encode())))
    return found


def _drawn(s: Sample, seed: int) -> torch.Tensor:
    size, device = s.view.size, s.tensor.device
    if s.ramp:
        return torch.arange(s.low, s.high + 1, device=device).reshape(size)
    generator = torch.Generator(device=device).manual_seed(seed)
    if s.view.dtype.is_floating_point:
        return torch.randn(size, generator=generator, device=device) * s.spread + s.mean
    return torch.randint(s.low, s.high + 1, size, generator=generator, device=device)


class Versions:
    """Which kernel wrote each byte range last, in program order and in every arena. Ranges are cut where any access
    or move begins or ends."""

    def __init__(self, trace: Trace, steps: Sequence[Step], names: Collection[str]) -> None:
        marks: list[set[int]] = [{0, b.nbytes} for b in trace.buffers]
        for k in trace.kernels:
            for a in k.accesses:
                marks[a.buffer] |= {a.offset, a.offset + a.nbytes}
        for s in steps:
            if isinstance(s, Move):
                marks[s.buffer] |= {s.start, s.end}
        self.marks = [np.array(sorted(m)) for m in marks]
        self.newest = [np.full(len(m) - 1, BEFORE) for m in self.marks]
        self.held = {n: [np.full(len(m) - 1, POISON) for m in self.marks] for n in names}

    def range(self, buffer: int, start: int, end: int) -> slice:
        first, last = np.searchsorted(self.marks[buffer], (start, end))
        return slice(int(first), int(last))

    def stale(self, buffer: int, part: slice, device: str) -> int | None:
        """A version that is needed and not there; None if all are."""
        newest = self.newest[buffer][part]
        wrong = newest[self.held[device][buffer][part] != newest]
        return int(wrong[0]) if len(wrong) else None


class Replay:
    """A recorded step under one placement.

    `placement`: device of a site, as a mapping or a function; `devices`: where each device name is. `arenas`: those of
    another replay of the same recording on the same devices, to be used again.
    """

    def __init__(
        self, recorded: Recorded, placement: Mapping[str, str] | Callable[[str], str],
        devices: Mapping[str, torch.device], arenas: Mapping[str, Arena] | None = None,
    ) -> None:  # fmt: skip
        place = placement if callable(placement) else placement.get
        self.recorded, self.devices = recorded, dict(devices)
        self.device_of = [place(k.site) or "" for k in recorded.trace.kernels]
        if "" in self.device_of:
            lost = recorded.trace.kernels[self.device_of.index("")].site
            raise HardwareError(f"the placement leaves out site {lost}")
        unknown = sorted(set(self.device_of) - set(devices))
        if unknown:
            raise HardwareError(f"the placement uses device {unknown[0]}; known: {', '.join(devices)}")
        self.steps = cut(recorded.trace, self.device_of)
        order = [(s.kernel, s.device) for s in self.steps if isinstance(s, Launch)]
        if order != list(enumerate(self.device_of)):
            raise HardwareError("the cut does not launch every operator once, in order, on its device")
        self.arenas = arenas or {n: Arena(recorded, n, d) for n, d in devices.items()}
        self.first_readers = self._first_readers()

    @property
    def moves(self) -> list[Move]:
        return [s for s in self.steps if isinstance(s, Move)]

    def unsplit(self, device: str = "") -> Replay:
        """The same operators through the same executor, all on one device (the first if none is named)."""
        home = device or next(iter(self.devices))
        return Replay(self.recorded, lambda _site: home, self.devices, self.arenas)

    def _first_readers(self) -> set[tuple[int, str]]:
        """(buffer, device) of named tensors that a device reads while their content is from before the step."""
        versions = Versions(self.recorded.trace, (), ())
        found = set()
        for k, device in zip(self.recorded.trace.kernels, self.device_of, strict=True):
            for a in k.accesses:
                part = versions.range(a.buffer, a.offset, a.offset + a.nbytes)
                named = self.recorded.trace.buffers[a.buffer].role in CARRIED
                if a.reads and named and bool((versions.newest[a.buffer][part] == BEFORE).any()):
                    found.add((a.buffer, device))
            for a in k.accesses:
                if a.writes:
                    versions.newest[a.buffer][versions.range(a.buffer, a.offset, a.offset + a.nbytes)] = k.id
        return found

    def run(self, seed: int, drop: Collection[int] = (), checks: bool = True) -> list[torch.Tensor]:
        """Run once on values of `seed`; copies of the results on the CPU, in order of `recorded.results`.

        `drop`: numbers of moves (in order of `moves`) that are left out; `checks`: whether a stale read is an error.
        """
        before = new_values(self.recorded, seed)
        versions = Versions(self.recorded.trace, self.steps, self.arenas)
        for name, arena in self.arenas.items():
            true = {b: v for b, v in before.items() if (b, name) in self.first_readers}
            arena.fill(seed, true)
            for b in (*true, *self.recorded.constants):
                versions.held[name][b][:] = BEFORE
        number = 0
        with eager():
            for s in self.steps:
                if isinstance(s, Launch):
                    self._launch(s, versions, checks)
                    continue
                if number not in drop:
                    self._move(s, versions)
                number += 1
        return self._results(before, versions)

    def _launch(self, s: Launch, versions: Versions, checks: bool) -> None:
        kernel = self.recorded.trace.kernels[s.kernel]
        touched = [(a, versions.range(a.buffer, a.offset, a.offset + a.nbytes)) for a in kernel.accesses]
        for a, part in touched:
            stale = versions.stale(a.buffer, part, s.device) if checks and a.reads else None
            if stale is not None:
                writer = "content from before the step" if stale < 0 else self.recorded.trace.kernels[stale].site
                name = self.recorded.trace.buffers[a.buffer].name
                raise StaleReadError(f"{kernel.site} on {s.device} reads {name}, but {writer} was not sent there")
        self.arenas[s.device].run(self.recorded.ops[s.kernel])
        for a, part in touched:
            if a.writes:
                versions.newest[a.buffer][part] = versions.held[s.device][a.buffer][part] = s.kernel

    def _move(self, s: Move, versions: Versions) -> None:
        if s.delta:
            raise HardwareError(f"a move of {self.recorded.trace.buffers[s.buffer].name} does not say which bytes")
        memory = self.arenas[s.target].memory[s.buffer], self.arenas[s.source].memory[s.buffer]
        memory[0][s.start : s.end].copy_(memory[1][s.start : s.end])
        part = versions.range(s.buffer, s.start, s.end)
        versions.held[s.target][s.buffer][part] = versions.held[s.source][s.buffer][part]

    def _results(self, before: Values, versions: Versions) -> list[torch.Tensor]:
        """Every result from the devices that wrote its newest bytes."""
        found = []
        for _, view, _ in self.recorded.results:
            b = view.storage
            start = before[b].cpu() if b in before else torch.zeros(self.recorded.homes[b].nbytes, dtype=torch.uint8)
            memory = start.clone()
            for i, writer in enumerate(versions.newest[b]):
                if writer >= 0:
                    at, end = versions.marks[b][i : i + 2]
                    memory[at:end] = self.arenas[self.device_of[writer]].memory[b][at:end].cpu()
            found.append(typed(memory, view).clone())
        return found


def outside(recorded: Recorded, seed: int) -> list[torch.Tensor]:
    """What the step itself makes of values of `seed`, without any of this: the reference of every replay."""
    before = new_values(recorded, seed)
    with eager():
        for s in recorded.samples:
            s.tensor.copy_(typed(before[s.view.storage], s.view))
        returned = tree_flatten(recorded.step())[0]
        left = [returned[at] if isinstance(at, int) else at for _, _, at in recorded.results]
        return [t.cpu().clone() for t in left]


def differing(recorded: Recorded, one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> list[str]:
    """Names of the results that are not equal to the bit."""
    pairs = zip(recorded.results, one, other, strict=True)
    return [name for (name, _, _), a, b in pairs if a.shape != b.shape or not torch.equal(_bits(a), _bits(b))]


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().flatten().view(torch.uint8)
