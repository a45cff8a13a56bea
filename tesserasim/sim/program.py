"""What an engine executes: flat integer programs, one per lane and device.

The engine knows nothing of models, sites or costs. All times are integer nanoseconds, all sizes bytes.
`lower` (tesserasim/lower.py) makes programs from a mix, a plan and kernel times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tesserasim.sim.sharing import Sharing

SERIAL, SHARED = "serial", "shared"
DEVICE_MODELS = (SERIAL, SHARED)


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction of a link. Occupied setup + ceil(bytes / rate); arrival = end of occupation + latency.

    First in first out by the ends of the producers; with a copy engine, in its order (`LaneProgram.copies`).
    """

    name: str
    src: int  # index into Program.devices
    dst: int
    bytes_per_s: int  # integer, so that occupation is exact: ceil(bytes * 1e9 / bytes_per_s)
    latency_ns: int
    setup_ns: int = 0  # every transfer occupies the link for this long besides its bytes
    #: number of the copy engine that carries it; channels of one engine share it. None: the link is free of engines
    engine: int | None = None

    def occupation_ns(self, nbytes: int) -> int:
        return self.setup_ns - (-nbytes * 1_000_000_000 // self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Send:
    """A transfer that starts when the kernel it hangs on ends."""

    channel: int  # index into Program.channels
    nbytes: int
    token: int  # set at arrival, once per cohort


@dataclass(slots=True)
class StreamProgram:
    """One cohort's kernels on one device, in program order; parallel lists, all of equal length.

    Kernel i is ready at max(end of i-1 on this stream + delay[i], arrival of every token in waits[i]).
    The first kernel of a cohort counts from the cohort's entry.
    """

    device: int
    duration: list[int] = field(default_factory=list)  # ns, >= 1
    delay: list[int] = field(default_factory=list)  # ns, >= 0: positive gap + a unit's launch cost
    #: ns, >= 0: how much a negative gap shortens the kernel, applied only if it starts at the very moment its
    #: predecessor on this stream ended on this device. Already clipped so that duration - shave >= 1. Nonzero
    #: only where the predecessor on this stream is the captured predecessor.
    shave: list[int] = field(default_factory=list)
    waits: list[tuple[int, ...] | None] = field(default_factory=list)
    sends: list[tuple[Send, ...] | None] = field(default_factory=list)
    #: index of each kernel in the cohort's program order over all devices (tie rule)
    order: list[int] = field(default_factory=list)
    labels: list[str] | None = None  # names for timelines; None when not wanted
    #: `shared` devices only: what the kernel demands when it runs alone, in units of 2^-20 (sharing.ONE is all)
    sm: list[int] = field(default_factory=list)  # of the device's multiprocessors, >= 1
    dram: list[int] = field(default_factory=list)  # of the bandwidth of the device's DRAM, >= 0


@dataclass(slots=True)
class LaneProgram:
    """`depth` cohorts of `batch` requests in flight, each running every stream program once."""

    name: str
    batch: int
    depth: int
    streams: tuple[StreamProgram, ...]  # one per device used, any order
    tokens: int  # number of tokens a cohort uses
    units: int  # unit launches per cohort (decides the window)
    priority: int = 0
    stagger_ns: int = 0  # slot k opens at k * stagger_ns

    def copies(self, channels: Sequence[Channel]) -> dict[int, list[int]]:
        """Copy engine -> tokens of a cohort in the order in which the engine carries them.

        A graph's copies are queued as its nodes were made: each before the kernel that reads it. So the order is that
        of the first readers, then of the producers; what nobody waits for comes last.
        """
        reader: dict[int, int] = {}
        for s in self.streams:
            for position, waits in zip(s.order, s.waits, strict=True):
                for token in waits or ():
                    reader[token] = min(position, reader.get(token, position))
        last = 1 + max((p for s in self.streams for p in s.order), default=0)
        found: dict[int, list[tuple[int, int, int]]] = {}
        for s in self.streams:
            for position, sends in zip(s.order, s.sends, strict=True):
                for x in sends or ():
                    engine = channels[x.channel].engine
                    if engine is not None:
                        found.setdefault(engine, []).append((reader.get(x.token, last), position, x.token))
        return {engine: [token for _, _, token in sorted(tokens)] for engine, tokens in found.items()}


@dataclass(slots=True)
class Program:
    devices: tuple[str, ...]
    channels: tuple[Channel, ...]
    lanes: tuple[LaneProgram, ...]
    stretch: int = 1  # length of a run after its first 2 d completions, in windows; a power of 2
    device_model: str = SERIAL  # one kernel at a time, or SHARED: kernels of several streams co-run
    domains: tuple[int, ...] = ()  # per device: its DRAM; devices with equal numbers share one. (): each its own
    sharing: Sharing = field(default_factory=Sharing)

    @property
    def has_engines(self) -> bool:
        """Whether copy engines carry any of its channels."""
        return any(c.engine is not None for c in self.channels)

    def domain(self, device: int) -> int:
        """The DRAM of a device."""
        return self.domains[device] if self.domains else device

    def warmup(self, lane: LaneProgram) -> int:
        """Completions before the window: 2 d, and half of a stretched run."""
        return 2 * lane.depth + (self._window(lane) * self.stretch // 2 if self.stretch > 1 else 0)

    def window(self, lane: LaneProgram) -> int:
        """Completions in the window: 2 d for cohorts of >= 100 units, else 8 d; the second half of a stretched run."""
        return self._window(lane) * max(1, self.stretch // 2)

    @staticmethod
    def _window(lane: LaneProgram) -> int:
        return (2 if lane.units >= 100 else 8) * lane.depth
