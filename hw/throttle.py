"""Takes DRAM bandwidth away from a GPU: copies that loop on multiprocessors of their own while something runs.

So a GPU becomes poorer in bandwidth than in arithmetic, and unequal pairs exist on equal machines. How much is taken
depends on the multiprocessors (seen on an H200: 32 of 132 make DRAM-bound work 1.35 to 1.4 times slower).
"""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from hw.partition import Partition

# Captures are local to their thread, or what this one does would end those of others.
_BYTES = 256 << 20  # far more than an L2 holds
_COPIES = 8  # a graph's copies: some milliseconds
_AHEAD = 2  # graphs that wait while one runs


class Throttle:
    """A context: while it is open, copies loop on a partition. One thread keeps a few graphs of copies submitted, so a
    stop takes effect within some ten milliseconds."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Throttle:
        with torch.cuda.device(self.partition.device):
            source = torch.zeros(_BYTES // 8, dtype=torch.int64, device="cuda")
            target = torch.empty_like(source)
            stream = self.partition.stream()
            torch.cuda.synchronize()
            self._memory = (source, target)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                for _ in range(_COPIES):
                    torch.bitwise_or(source, 0, out=target)  # a kernel: a plain copy would be the copy engine's
                graph.capture_end()
        self._thread = threading.Thread(target=self._loop, args=(graph, stream), daemon=True)
        self._thread.start()
        return self

    def _loop(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        with torch.cuda.device(self.partition.device), torch.cuda.stream(stream):
            ends = [torch.cuda.Event(blocking=True) for _ in range(_AHEAD + 1)]
            turn = 0
            while not self._stop.is_set():
                ends[turn].synchronize()  # of the launch that used it before, if one did
                graph.replay()
                ends[turn].record(stream)
                turn = (turn + 1) % len(ends)
            stream.synchronize()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=30.0)
