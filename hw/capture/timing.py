"""Timing of a captured graph: end to end without the profiler, and kernel by kernel with it.

Both are taken in the same process, replay by replay with a synchronisation between, and alternate, so that
clocks and temperature are the same for both. Nothing is scaled to make one fit the other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hw.capture.records import device_records, replays
from hw.errors import HardwareError

_REST_S = 0.25  # idle before each burst
_SETTLE_S = 0.1  # of uninterrupted replays at the start of each burst
_BURST_S = 0.2  # measured part of a burst
_ROUNDS = (2, 4)  # fewest and most rounds of bursts
_TRIES = 3  # of a round whose profile is not usable
_AHEAD_CYCLES = 2_000_000  # about 1 ms: longer than the host takes to submit a graph of a thousand nodes


@dataclass(frozen=True)
class NodeTimes:
    """Per node in launch order, over the profiled replays: ns."""

    names: list[str]
    duration: np.ndarray  # [replays, nodes]
    gap: np.ndarray  # [replays, nodes]; start minus the end of the node before it; first column 0

    def spans(self) -> list[int]:
        """Span of each profiled replay, ns."""
        return [int(x) for x in (self.duration + self.gap).sum(axis=1)]


def warm_up(replay: Callable[[], None], seconds: float) -> None:
    """Replay without pause until clocks and power have settled (an idle GPU needs some tenths of a second)."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(4):
            replay()
        torch.cuda.synchronize()


def measure(graph: Any, nodes: Sequence[str], replays: int = 24) -> tuple[list[int], NodeTimes]:
    """Alternate timed and profiled bursts of a `CUDAGraph(keep_graph=True)` with these types of `nodes`, about
    `replays` of each.

    A power-limited GPU (seen on an H200) runs a burst of GEMMs at full speed for about 0.4 s, then its power
    control overshoots by 15-20 % for 0.15 s. So every burst has the same history: a rest, a stretch of
    uninterrupted replays, and then no more measured replays than end before the overshoot. Each round
    instantiates the graph anew, since two executables of one graph can differ. A unit so long that a burst
    holds few replays gets fewer in all.
    """
    graph.instantiate()
    warm_up(graph.replay, 0.3)
    once = end_to_end_ns(graph.replay, 3)[-1]
    each = max(2, min(replays // _ROUNDS[0], int(_BURST_S * 1e9 / once)))
    e2e: list[int] = []
    parts: list[NodeTimes] = []
    for _ in range(min(-(-replays // each), _ROUNDS[1])):
        graph.instantiate()
        time.sleep(_REST_S)
        warm_up(graph.replay, _SETTLE_S)
        e2e += end_to_end_ns(graph.replay, each)
        parts.append(_profiled(graph.replay, nodes, each, parts[0].names if parts else None))
    duration, gap = (np.concatenate([getattr(p, f) for p in parts]) for f in ("duration", "gap"))
    return e2e, NodeTimes(parts[0].names, duration, gap)


def _profiled(replay: Callable[[], None], nodes: Sequence[str], repeats: int, names: list[str] | None) -> NodeTimes:
    """`profile_nodes`, again if a record was lost or the kernels are not `names`, a few times."""
    why = ""
    for _ in range(_TRIES):
        time.sleep(_REST_S)
        try:
            found = profile_nodes(replay, nodes, repeats)
        except HardwareError as error:
            why = str(error)
            continue
        if names is None or found.names == names:
            return found
        k = next(i for i, (x, y) in enumerate(zip(names, found.names, strict=True)) if x != y)
        why = (f"replays of one graph ran different kernels, so the profile is not usable: record {k} is "
               f"{names[k][:60]} first and {found.names[k][:60]} later")  # fmt: skip
    raise HardwareError(f"{why} (tried {_TRIES} times)")


def end_to_end_ns(replay: Callable[[], None], repeats: int, ahead: bool = True) -> list[int]:
    """Event-timed replays, one at a time.

    `ahead`: the GPU spins while the host submits, as it computes the step before in a serving loop, so the
    host's own time (0.1-0.3 ms for 450 nodes, and noisy) is not in the figure. Without, it is.
    """
    out = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if ahead:
            torch.cuda._sleep(_AHEAD_CYCLES)
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        out.append(round(start.elapsed_time(end) * 1e6))
    return out


def profile_nodes(replay: Callable[[], None], types: Sequence[str], repeats: int) -> NodeTimes:
    """Profile `repeats` replays of a graph whose nodes on one stream have these `types` (kernel, memcpy, memset)."""
    nodes = len(types)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        warm_up(replay, _SETTLE_S)
        for _ in range(repeats):
            torch.cuda.synchronize()
            # As in `end_to_end_ns`: a power-limited GPU gains some percent of speed from a pause of a millisecond.
            torch.cuda._sleep(_AHEAD_CYCLES)
            replay()
        torch.cuda.synchronize()
    seen = device_records(prof)
    found = replays(seen, types)
    if len(found) < max(1, repeats // 2):
        often = Counter(r.name[:60] for r in seen).most_common(3)
        sizes = Counter(Counter(r.launch for r in seen).values()).most_common(4)  # of launches
        raise HardwareError(
            f"the profiler saw {len(found)} whole replays of {repeats} ({nodes} nodes each): {len(seen)} records, "
            f"launches by their records {sizes}, mostly {often}"
        )
    names = [r.name for r in found[0]]
    for i, replayed in enumerate(found):
        k = next((k for k, r in enumerate(replayed) if r.name != names[k]), None)
        if k is not None:
            raise HardwareError(
                f"replays of one graph ran different kernels, so the profile is not usable: record {k} is "
                f"{names[k][:60]} first and {replayed[k].name[:60]} in replay {i}"
            )
    stamps = np.array([[(r.start, r.duration) for r in g] for g in found], dtype=np.int64)
    start, duration = stamps[:, :, 0], stamps[:, :, 1]
    start = between_neighbours(start, duration, types)
    gap = np.zeros_like(start)
    gap[:, 1:] = start[:, 1:] - (start[:, :-1] + duration[:, :-1])
    return NodeTimes(names, duration, gap)


def between_neighbours(start: np.ndarray, duration: np.ndarray, types: Sequence[str]) -> np.ndarray:
    """[replays, nodes] starts, those of sets and copies moved to where the kernels beside them leave room.

    Another engine stamps them, and its stamps may lie outside of what the order of one stream allows.
    """
    start = start.copy()
    for k, kind in enumerate(types):
        if kind == "kernel":
            continue
        if k + 1 < len(types) and types[k + 1] == "kernel":
            start[:, k] = np.minimum(start[:, k], start[:, k + 1] - duration[:, k])
        if k > 0:
            start[:, k] = np.maximum(start[:, k], start[:, k - 1] + duration[:, k - 1])
    return start


def percentiles(samples: Any) -> dict[str, int]:
    p10, p50, p90 = np.percentile(np.asarray(samples, dtype=np.float64), [10, 50, 90])
    return {"median": round(p50), "p10": round(p10), "p90": round(p90)}


def copy_gbs(nbytes: int = 4 << 30, repeats: int = 10) -> float:
    """Device copy bandwidth in GB/s, bytes read plus bytes written (the DRAM ceiling of this GPU)."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy()
    times = end_to_end_ns(copy, repeats)
    return 2 * nbytes / float(np.median(times))


def empty_graph_ns(repeats: int = 50) -> int:
    """Event-timed launch of a graph without nodes: the launch cost every unit pays."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    import warnings

    with warnings.catch_warnings(), torch.cuda.stream(stream):
        warnings.simplefilter("ignore")
        graph.capture_begin()
        graph.capture_end()
        end_to_end_ns(graph.replay, 10)
        times = end_to_end_ns(graph.replay, repeats)
    return round(float(np.median(times)))
