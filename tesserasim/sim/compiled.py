"""A program prepared for the fast engine: what is looked up per kernel there is computed once here.

A kernel is *special* if its start is known to others: it sends, it is a stream's last, or the next kernel on
its stream waits. Between special kernels a stream touches nothing but its own device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tesserasim.sim.program import Channel, LaneProgram, Program, StreamProgram


class Outgoing(NamedTuple):
    """A send with its channel's arithmetic done."""

    channel: int
    occupation_ns: int
    latency_ns: int
    token: int
    dst: int
    nbytes: int


class Source(NamedTuple):
    """Where a token comes from: kernel `kernel` on `device`, and the least time from its end to the arrival."""

    device: int
    kernel: int
    transfer_ns: int


@dataclass(slots=True)
class Code:
    """One stream program. `offset` and `earliest` index kernels; both have one entry more than the stream."""

    program: StreamProgram
    duration: list[int]
    delay: list[int]
    shave: list[int]
    duration_array: np.ndarray
    shave_array: np.ndarray
    special: list[int]  # indices of special kernels, the last one included
    outgoing: list[tuple[Outgoing, ...]]  # per special kernel
    #: least time from the start of kernel 0 with its delay to the start of kernel i with its delay
    earliest: list[int]
    #: start of kernel i in a run without interruption; exact, as then every shave without delay applies
    offset: np.ndarray
    shaved: np.ndarray | None  # which kernels are shaved in such a run; None if none is


@dataclass(slots=True)
class CompiledLane:
    """One lane. `codes` has an entry per device of the program, None where the lane runs no kernel."""

    index: int
    rank: int  # of its priority among the lanes
    depth: int
    stagger_ns: int
    tokens: int
    codes: list[Code | None]
    used: list[int]  # devices with kernels
    sources: dict[int, Source]


def compile_lane(program: Program, index: int, rank: int) -> CompiledLane:
    lane: LaneProgram = program.lanes[index]
    codes: list[Code | None] = [None] * len(program.devices)
    sources: dict[int, Source] = {}
    for s in lane.streams:
        if s.duration:
            codes[s.device] = _compile(program.channels, s)
            _note_sources(program.channels, s, sources)
    used = [d for d, c in enumerate(codes) if c is not None]
    return CompiledLane(index, rank, lane.depth, lane.stagger_ns, lane.tokens, codes, used, sources)


def _compile(channels: tuple[Channel, ...], s: StreamProgram) -> Code:
    n = len(s.duration)
    special = [i for i in range(n - 1) if s.sends[i] or s.waits[i + 1]]
    special.append(n - 1)
    outgoing = [
        tuple(
            Outgoing(
                x.channel,
                channels[x.channel].occupation_ns(x.nbytes),
                channels[x.channel].latency_ns,
                x.token,
                channels[x.channel].dst,
                x.nbytes,
            )
            for x in s.sends[i] or ()
        )
        for i in special
    ]
    duration = np.array(s.duration, dtype=np.int64)
    delay = np.array(s.delay, dtype=np.int64)
    shave = np.array(s.shave, dtype=np.int64)
    applied = np.where(delay == 0, shave, 0)
    applied[0] = 0  # a cohort's first kernel follows nothing
    earliest = np.concatenate(([0], np.cumsum(delay + duration - shave)))
    ends = np.cumsum(delay + duration - applied)
    return Code(
        s,
        s.duration,
        s.delay,
        s.shave,
        duration,
        shave,
        special,
        outgoing,
        earliest.tolist(),
        ends - (duration - applied),
        applied > 0 if applied.any() else None,
    )


def _note_sources(channels: tuple[Channel, ...], s: StreamProgram, sources: dict[int, Source]) -> None:
    for i, sends in enumerate(s.sends):
        for x in sends or ():
            channel = channels[x.channel]
            transfer = channel.occupation_ns(x.nbytes) + channel.latency_ns
            sources[x.token] = Source(s.device, i, transfer)
