"""What lies in an arena before a run: poison wherever nothing true belongs, true values where they are read.

A right answer must not be there already. So before every run each byte of activations, workspace and state becomes
a NaN of every float format, inputs and state get values that the capture did not see, and only devices that read
them get the true ones. Integers steer addresses: token numbers are other valid ones where they are not true, since a
stale index must give a wrong answer, not a fault; positions are the same everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from cuda.bindings import driver as cuda

from hw.capture.driver import call
from hw.replay.arena import Arena
from hw.replay.cut import Remains
from hw.replay.rows import Rows, appended


class _Bytes:
    """GPU memory at an address, for torch."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def bytes_at(address: int, nbytes: int, device: int = 0) -> torch.Tensor:
    """A view of raw memory as uint8 [nbytes]."""
    return torch.as_tensor(_Bytes(address, nbytes), device=f"cuda:{device}")


def nan_word(seed: int) -> int:
    """Four bytes that are NaN as fp32, and as two bf16 or fp16: 0xFFC1 to 0xFFFF twice."""
    half = 0xFFC1 + zlib.crc32(str(seed).encode()) % 0x3E
    return half << 16 | half


def poison(arena: Arena, seed: int) -> None:
    """NaN over every activation and workspace of an arena, but for integers. In order of the current stream."""
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    kept = [
        (n.tensor.untyped_storage().data_ptr(), n.tensor.untyped_storage().nbytes())
        for n in arena.tensors if n.role == "weight" or not n.tensor.is_floating_point()
    ]  # fmt: skip
    ranges = set()
    for b, address in zip(arena.found.buffers, arena.found.addresses, strict=True):
        if b.role in ("weight", "input", "state") or address in arena.integers:
            continue
        if any(address < p + n and p < address + b.nbytes for p, n in kept):
            continue  # a workspace's segment may hold other things
        ranges.add((address, b.nbytes))
    word = nan_word(seed)
    for address, nbytes in sorted(ranges):
        if nbytes >= 4:
            call(cuda.cuMemsetD32Async(cuda.CUdeviceptr(address), word, nbytes // 4, stream), "cuMemsetD32Async")


def fill(arena: Arena, seed: int, true: Collection[int]) -> None:
    """State and inputs of an arena: values of `seed` in the buffers `true`, other ones elsewhere."""
    names = {b.name: b.id for b in arena.found.buffers}
    for n in arena.tensors:
        if n.role == "weight" or n.name not in names:
            continue
        right = names[n.name] in true
        if n.tensor.is_floating_point():
            if right:
                n.tensor.normal_(generator=_generator(n.tensor, seed, n.name))
            else:
                n.tensor.fill_(float("nan"))
            continue
        original = arena.originals[n.name]
        if n.name not in arena.free:
            n.tensor.copy_(original)  # positions and the like steer what is written where
            continue
        top = max(2, int(original.max()) + 1)
        generator = _generator(n.tensor, seed if right else seed + 1, n.name)
        n.tensor.copy_(torch.randint(top, original.shape, device=n.tensor.device, generator=generator))


def _generator(tensor: torch.Tensor, seed: int, name: str) -> torch.Generator:
    return torch.Generator(device=tensor.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def delta_rows(arena: Arena) -> dict[int, Rows]:
    """Where the unit's new rows lie in every cache that grows, by buffer."""
    names = {b.name: b.id for b in arena.found.buffers}
    return {
        names[n.name]: appended(
            n.tensor.shape, n.tensor.stride(), n.tensor.element_size(), arena.unit.tokens, arena.unit.context
        )
        for n in arena.tensors if n.name in names and n.role == "state" and n.bytes_per_token
    }  # fmt: skip


def gather(arenas: Mapping[str, Arena], left: Sequence[Remains], rows: Mapping[int, Rows]) -> list[torch.Tensor]:
    """Copies of what a run has made, each from the device that wrote it."""
    out = []
    for r in left:
        arena = arenas[r.device]
        at = arena.address(r.buffer)
        if not r.delta:
            out.append(bytes_at(at + r.start, r.end - r.start, arena.partition.device).clone())
            continue
        parts = []
        for row in rows[r.buffer]:
            memory = bytes_at(at + row.offset, (row.count - 1) * row.pitch + row.nbytes, arena.partition.device)
            parts.append(memory.as_strided((row.count, row.nbytes), (row.pitch, 1)).clone())
        out.append(torch.cat([p.flatten() for p in parts]))
    return out


def differing(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> list[int]:
    """Indices of the outputs that are not equal to the bit."""
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if not torch.equal(a, b.to(a.device))]


_CHUNK = 64 << 20


def mark(memory: torch.Tensor) -> int:
    """A number that differs if one word of some bytes [n] differs, and hardly ever is equal if more do."""
    total = 0
    for at in range(0, memory.numel(), _CHUNK):
        part = memory[at : at + _CHUNK]
        words = torch.nn.functional.pad(part, (0, -part.numel() % 8)).view(torch.int64)
        places = torch.arange(at, at + words.numel(), device=memory.device) * 2 + 1  # odd: no bit of a word is lost
        total += int((words * places).sum())
    return total


def holds_nan(outputs: Iterable[torch.Tensor], seed: int) -> bool:
    """Whether the poison of `seed` shows in an output."""
    half = nan_word(seed) & 0xFFFF
    return any(bool((o[: o.numel() // 2 * 2].view(torch.int16).int() & 0xFFFF == half).any()) for o in outputs)
