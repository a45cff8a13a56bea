"""The devices that plans are replayed on: whole GPUs, parts of them, and GPUs whose bandwidth is taken in part.

A list like `0:64,1~32`: GPU 0 with 64 multiprocessors, and GPU 1 with all but 32, on which copies loop
(hw/throttle.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hw.errors import HardwareError

if TYPE_CHECKING:  # lists are read without PyTorch
    from hw.partition import Partition

_SPEC = re.compile(r"(\d{1,3})(?::(\d{1,4}))?(?:~(\d{1,4}))?")
MOST = 26


@dataclass(frozen=True)
class DeviceSpec:
    """A device as asked for: multiprocessors of a GPU (None: all that nothing else takes), and those of a throttle."""

    gpu: int
    sms: int | None = None
    throttle: int = 0


def parse_devices(text: str) -> tuple[DeviceSpec, ...]:
    """Devices of a list. ValueError for what is none, and for a GPU with two devices that take what is left."""
    found = []
    for part in text.split(","):
        match = _SPEC.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part[:40]!r}: a device is GPU, GPU:SMS, GPU~SMS or GPU:SMS~SMS, e.g. 0:64 or 1~32")
        gpu, sms, throttle = match.groups()
        found.append(DeviceSpec(int(gpu), None if sms is None else int(sms), int(throttle or 0)))
    for gpu in {d.gpu for d in found}:
        own = [d for d in found if d.gpu == gpu]
        if sum(d.sms is None for d in own) > 1:
            raise ValueError(f"GPU {gpu}: two devices without a number of multiprocessors")
        if any(d.sms == 0 for d in own):
            raise ValueError(f"GPU {gpu}: a device needs at least one multiprocessor")
    if len(found) > MOST:
        raise ValueError(f"{len(found)} devices; at most {MOST}")
    return tuple(found)


@dataclass(frozen=True)
class Devices:
    """Partitions in the order asked for, and those on which throttles run."""

    parts: tuple[Partition, ...]
    throttles: Mapping[str, Partition]  # device -> partition

    def facts(self) -> dict[str, dict[str, Any]]:
        """What journals say of the devices."""
        return {
            p.name: {"sms": p.sms, "gpu": p.device}
            | ({"throttle": self.throttles[p.name].sms} if p.name in self.throttles else {})
            for p in self.parts
        }  # fmt: skip

    def gpu_name(self, gpu: str, part: Partition) -> str:
        """The name of the GPU in a trace of one device: H200-SXM/64sm, with ~32 if a throttle runs beside."""
        beside = f"~{self.throttles[part.name].sms}" if part.name in self.throttles else ""
        return f"{gpu}/{part.sms}sm{beside}"

    @contextmanager
    def throttled(self) -> Iterator[None]:
        """While open, throttles run."""
        from hw.throttle import Throttle

        with ExitStack() as stack:
            for part in self.throttles.values():
                stack.enter_context(Throttle(part))
            yield


def names(specs: Sequence[DeviceSpec]) -> list[str]:
    """A whole GPU, or the only device of one, is gpu0, gpu1 ...; parts of one GPU are a, b, c ..."""
    alone = [sum(d.gpu == s.gpu for d in specs) == 1 for s in specs]
    if all(alone):
        return [f"gpu{s.gpu}" for s in specs]
    return [chr(ord("a") + i) for i in range(len(specs))]


def make_devices(specs: Sequence[DeviceSpec], gpus: int) -> Devices:
    """Devices of this machine, which has `gpus`. HardwareError if it has not what is asked for."""
    from hw.partition import GRANULE, connect, split, whole

    labels = names(specs)
    if len({s.gpu for s in specs if s.gpu < gpus}) > 1:
        connect(sorted({s.gpu for s in specs if s.gpu < gpus}))
    parts: dict[int, Partition] = {}
    throttles: dict[str, Partition] = {}
    for gpu in sorted({s.gpu for s in specs}):
        if gpu >= gpus:
            raise HardwareError(f"no GPU {gpu} here: there are {gpus}")
        own = [i for i, s in enumerate(specs) if s.gpu == gpu]
        if len(own) == 1 and specs[own[0]].sms is None and not specs[own[0]].throttle:
            parts[own[0]] = whole(gpu, labels[own[0]])
            continue
        # What takes the rest comes last; throttles first, since their number is exact.
        wanted = [(labels[i], specs[i].throttle, True, i) for i in own if specs[i].throttle]
        wanted += [(labels[i], specs[i].sms or 0, False, i) for i in sorted(own, key=lambda i: specs[i].sms is None)]
        rest = specs[wanted[-1][3]].sms is None
        counts = [n for _, n, _, _ in wanted]
        counts[-1] = GRANULE if rest else counts[-1]  # of the rest, at least this
        made = split(counts, gpu, [f"{name}~" if quiet else name for name, _, quiet, _ in wanted], rest)
        for piece, (name, _, quiet, i) in zip(made, wanted, strict=True):
            if quiet:
                throttles[name] = piece
            else:
                parts[i] = piece
    return Devices(tuple(parts[i] for i in range(len(specs))), throttles)
