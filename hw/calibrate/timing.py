"""How long one launch takes: event-timed replays of a graph of many launches.

*Warm*, as the shipped tables were measured: the same six weights of a GEMM, one set of operands of anything else, in
turn, without a flush of the L2. *Cold*: so many weights or caches take turns that none is left in the L2 when its turn
comes; as a model finds them. A graph holds enough launches that its own start does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hw.calibrate.cases import Case, Operands
from hw.capture.timing import end_to_end_ns, warm_up
from hw.errors import HardwareError

GRAPH_NS = 400_000  # a graph takes at least this long, if MOST_LAUNCHES are enough for that
SAMPLE_NS = 1_200_000  # so does a sample, of one or more replays
MOST_LAUNCHES = 128
SAMPLES = 7
GRAPHS = 4  # of growing length, at most
SETTLE_S = 0.02  # of uninterrupted replays before the samples
#: Operands that take turns are cold if they are this many times the L2.
COLD_L2 = 2.5
#: Memory that is left free.
SPARE_BYTES = 1 << 30


@dataclass(frozen=True)
class Timing:
    """us per launch: median and deciles of the samples."""

    us: float
    low_us: float
    high_us: float
    turns: int  # operands that took turns

    @property
    def spread(self) -> float:
        return (self.high_us - self.low_us) / self.us


@dataclass(frozen=True)
class Measured:
    warm: Timing
    cold: Timing | None  # None: the operation has nothing that a model finds cold, or it is too small to be made so
    kernels: tuple[str, ...]  # of one launch, as far as the driver tells


def cold_turns(case: Case, l2_bytes: int, free_bytes: int) -> int | None:
    """How many operands must take turns so that all are cold; None if that is not to be had."""
    if not case.cold:
        return None
    wanted = max(1, math.ceil(COLD_L2 * l2_bytes / case.turn_bytes))
    fits = (free_bytes - SPARE_BYTES - case.bytes) // case.held_bytes
    return wanted if wanted <= min(MOST_LAUNCHES, fits) else None


def launches(turns: int, each_ns: float) -> int:
    """Launches of a graph: whole turns, long enough, and not too many."""
    wanted = min(MOST_LAUNCHES, math.ceil(GRAPH_NS / max(each_ns, 1.0)))
    return turns * max(1, math.ceil(wanted / turns))


def measure(case: Case) -> Measured:
    """Warm and, if the case has it, cold times on the current device. torch.OutOfMemoryError if it does not fit."""
    free, _ = torch.cuda.mem_get_info()
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    wanted = case.turn * case.held_bytes + case.bytes
    if wanted > free - SPARE_BYTES:
        raise torch.OutOfMemoryError(f"{wanted >> 20} MiB wanted, {free >> 20} MiB free")
    turn = case.turn
    operands = [case.make() for _ in range(turn)]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, plans, allocates workspaces
            case.launch(operands[0])
        torch.cuda.synchronize()
        kernels = _kernels(case, operands[0])
        warm = _time(case, operands)
        turns = cold_turns(case, l2, free)
        if turns is None:
            return Measured(warm, None, kernels)
        if turns <= turn:  # the warm ones are cold already
            return Measured(warm, warm, kernels)
        operands += [case.make() for _ in range(turns - turn)]
        return Measured(warm, _time(case, operands), kernels)


def _graph(case: Case, operands: Sequence[Operands], count: int, keep: bool = False) -> Any:
    graph = torch.cuda.CUDAGraph(keep_graph=keep)
    graph.capture_begin()
    try:
        for i in range(count):
            case.launch(operands[i % len(operands)])
    finally:
        graph.capture_end()
    return graph


def _time(case: Case, operands: Sequence[Operands]) -> Timing:
    graph: Any = None
    wanted = len(operands)
    for _ in range(GRAPHS):  # a short graph's own start hides how short a launch is
        count, graph = wanted, _graph(case, operands, wanted)
        graph.replay()
        each = float(np.median(end_to_end_ns(graph.replay, 3))) / count
        wanted = launches(len(operands), each)
        if wanted < 1.5 * count:
            break
    repeats = max(1, math.ceil(SAMPLE_NS / (each * count)))

    def sample() -> None:
        for _ in range(repeats):
            graph.replay()

    warm_up(graph.replay, SETTLE_S)
    us = np.array(end_to_end_ns(sample, SAMPLES)) / (1e3 * repeats * count)
    low, middle, high = np.quantile(us, [0.1, 0.5, 0.9])
    return Timing(float(middle), float(low), float(high), len(operands))


def _kernels(case: Case, operands: Operands) -> tuple[str, ...]:
    """Names of the kernels of one launch; nothing if the driver does not say."""
    try:
        from hw.capture.driver import graph_nodes, graph_of

        graph = _graph(case, [operands], 1, keep=True)  # owns its nodes
        return tuple(n.name or n.type for n in graph_nodes(graph_of(graph)))
    except (ImportError, HardwareError):
        return ()


def settle(seconds: float) -> None:
    """Multiply matrices until the clocks have come up from idle."""
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    warm_up(lambda: torch.mm(a, a), seconds)
