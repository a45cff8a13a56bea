"""What a run returns: completions per lane, use of devices and links, and the slices if asked for.

Times are integer nanoseconds from the start of the run. A run of a component (lanes that share devices or
links) ends at the moment its last lane has its window; everything that ends at that moment counts, nothing
starts at it. Use of a device or link is clipped to [0, end]; "window" figures to [window start, end].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tesserasim.errors import InputError
from tesserasim.sim.program import LaneProgram, Program

NS_PER_S = 1_000_000_000


class DeadlockError(InputError):
    """A kernel waits for a transfer that can never come: names lane, device and kernel."""


class StarvedError(InputError):
    """A lane never gets its turn, because others of higher priority keep its devices busy."""


#: A run is given up when a lane has this many times its goal while another has not reached its own.
STARVED_AFTER = 100


@dataclass(slots=True)
class LaneResult:
    """What became of one lane's cohorts. Cohorts are numbered per lane in order of entry, from 0."""

    name: str
    batch: int
    depth: int
    warmup: int  # completions before the window
    window: int  # completions in the window
    entry_ns: list[int] = field(default_factory=list)  # by cohort number
    completion_ns: list[int] = field(default_factory=list)  # in order; also those after the window
    cohorts: list[int] = field(default_factory=list)  # the cohort number of each completion

    @property
    def goal(self) -> int:
        """Completions that the run waits for."""
        return self.warmup + self.window

    @property
    def window_start_ns(self) -> int:
        """The completion before the window (0 without warm-up)."""
        return self.completion_ns[self.warmup - 1] if self.warmup else 0

    @property
    def window_end_ns(self) -> int:
        return self.completion_ns[self.goal - 1]

    @property
    def steady_per_s(self) -> float:
        """Requests per second in the window: B W / (last completion - completion before the window)."""
        return self.batch * self.window * NS_PER_S / (self.window_end_ns - self.window_start_ns)

    def before_per_s(self, completions: int) -> float:
        """Requests per second over that many completions right before the window."""
        first = self.completion_ns[self.warmup - completions - 1]
        return self.batch * completions * NS_PER_S / (self.window_start_ns - first)

    @property
    def end_to_end_per_s(self) -> float:
        """Requests per second from the empty machine to the end of the window, ramp-up included."""
        return self.batch * self.goal * NS_PER_S / self.window_end_ns

    def latencies_ns(self, window_only: bool = True) -> list[int]:
        """Entry to completion of each cohort, in order of completion."""
        first, last = (self.warmup, self.goal) if window_only else (0, len(self.cohorts))
        return [
            done - self.entry_ns[c]
            for done, c in zip(self.completion_ns[first:last], self.cohorts[first:last], strict=True)
        ]


@dataclass(slots=True)
class DeviceResult:
    """Use of one device."""

    name: str
    busy_ns: int = 0
    span_ns: int = 0  # length of the run of its component; 0 if no lane uses the device
    window_busy_ns: int = 0
    window_ns: int = 0  # from the last lane's window start to the end: every lane is past its warm-up
    kernels: int = 0  # ended

    @property
    def utilisation(self) -> float:
        """Share of the window in which a kernel ran."""
        return self.window_busy_ns / self.window_ns if self.window_ns else 0.0


@dataclass(slots=True)
class ChannelResult:
    """Use of one direction of a link."""

    name: str
    nbytes: int = 0  # of the transfers whose occupation ended
    transfers: int = 0
    busy_ns: int = 0
    span_ns: int = 0
    window_busy_ns: int = 0
    window_ns: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """One kernel on a device, or one transfer on a channel; its end may lie after the end of the run."""

    start_ns: int
    end_ns: int
    kind: str  # "kernel" | "transfer"
    resource: int  # index of the device, or of the channel
    lane: int
    slot: int
    cohort: int  # number within the lane
    device: int  # where the kernel ran; for a transfer, where its producer ran
    index: int  # of the kernel (or producer) on its stream
    order: int  # its position in the cohort's program
    token: int = -1  # transfers only
    nbytes: int = 0  # transfers only
    arrival_ns: int = 0  # transfers only: end of occupation + latency
    label: str = ""


class Rate(NamedTuple):
    """From `at_ns` on a kernel of a shared device runs at `rate` (units of 2^-20), until its next entry or end."""

    at_ns: int
    device: int
    lane: int
    cohort: int
    kernel: int  # index on its stream
    rate: int


@dataclass(slots=True)
class SimResult:
    lanes: list[LaneResult]
    devices: list[DeviceResult]
    channels: list[ChannelResult]
    engine: str
    end_ns: int = 0
    timeline: list[Slice] | None = None  # everything that started before its component's end, by start
    rates: list[Rate] | None = None  # with the timeline of shared devices: every change of a kernel's rate

    @classmethod
    def blank(cls, program: Program, cohorts: int | None, engine: str) -> SimResult:
        return cls(
            lanes=[_lane_goal(program, lane, cohorts) for lane in program.lanes],
            devices=[DeviceResult(name) for name in program.devices],
            channels=[ChannelResult(c.name) for c in program.channels],
            engine=engine,
        )

    @property
    def kernels(self) -> int:
        """Kernels that ended, over all devices."""
        return sum(d.kernels for d in self.devices)

    @property
    def steady_per_s(self) -> float:
        """Requests per second in the windows, summed over lanes."""
        return sum(lane.steady_per_s for lane in self.lanes)

    @property
    def end_to_end_per_s(self) -> float:
        return sum(lane.end_to_end_per_s for lane in self.lanes)

    def latencies_ns(self) -> list[int]:
        """Latency of every cohort in a window, lane by lane."""
        return [ns for lane in self.lanes for ns in lane.latencies_ns()]


def starved(result: SimResult, lanes: list[int]) -> StarvedError:
    """The error for a run of these lanes in which one has completed STARVED_AFTER times its goal."""
    quick = max(lanes, key=lambda i: len(result.lanes[i].completion_ns) / result.lanes[i].goal)
    slow = min(lanes, key=lambda i: len(result.lanes[i].completion_ns) / result.lanes[i].goal)
    return StarvedError(
        f"lane {result.lanes[slow].name} has {len(result.lanes[slow].completion_ns)} of "
        f"{result.lanes[slow].goal} completions when lane {result.lanes[quick].name} has "
        f"{len(result.lanes[quick].completion_ns)}: priorities leave it no turn on their common devices"
    )


def _lane_goal(program: Program, lane: LaneProgram, cohorts: int | None) -> LaneResult:
    """How long a lane is watched. An explicit count gives at most its first half to the warm-up."""
    warmup, window = program.warmup(lane), program.window(lane)
    if cohorts is not None:
        if cohorts < 1:
            raise InputError(f"cohorts must be at least 1, not {cohorts}")
        warmup = min(warmup, cohorts // 2)
        window = cohorts - warmup
    return LaneResult(lane.name, lane.batch, lane.depth, warmup, window)
