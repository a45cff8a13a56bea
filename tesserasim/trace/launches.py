"""Who launched a kernel: the runtime call that shares its correlation id, and the operator around that call.

Rules learnt from profiles in the field. Correlation ids are shared by all kernels of one graph launch, so
they identify a call and never a kernel. "External id" is the operator's id in some versions and a copy of
the correlation id in others, so it is asked only when there is no call, and believed only if that operator
began before the kernel. AMD profiles have other names for the calls and may lack correlation ids.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from tesserasim.trace.shapes import Work


class Call(NamedTuple):
    """A launching call of the runtime or the driver."""

    start_ns: int
    thread: str
    graph: bool  # cudaGraphLaunch, cuGraphLaunch, hipGraphLaunch


class Op(NamedTuple):
    """One executed operator (`aten::mm`) on a CPU thread."""

    start_ns: int
    end_ns: int
    name: str
    work: Work | None = None  # what its recorded shapes tell


class Annotation(NamedTuple):
    """A range that the program (or the profiler) named: `ProfilerStep#3`, an NVTX range."""

    start_ns: int
    end_ns: int
    name: str
    process: str  # the program's process; on the GPU: (device, stream)
    gpu: bool = False


class Launch(NamedTuple):
    """When and by which process something was launched."""

    start_ns: int
    process: str


@dataclass
class Launches:
    """Calls and operators of one profile; add everything first, then `resolve`."""

    calls: dict[int, Call] = field(default_factory=dict)  # by correlation id
    ops: dict[str, list[Op]] = field(default_factory=lambda: defaultdict(list))  # by thread
    by_external: dict[int, Op] = field(default_factory=dict)
    _op_of_call: dict[int, Op] = field(default_factory=dict)

    def add_call(self, correlation: int, name: str, start_ns: int, thread: str) -> None:
        """Note a call. Of nested calls (runtime over driver) with one id the outer one counts."""
        graph = "graphlaunch" in name.lower()
        old = self.calls.get(correlation)
        if old is None:
            self.calls[correlation] = Call(start_ns, thread, graph)
        elif graph or start_ns < old.start_ns:
            first = min(old, Call(start_ns, thread, graph))
            self.calls[correlation] = first._replace(graph=graph or old.graph)

    def add_op(self, op: Op, thread: str, external: int | None) -> None:
        self.ops[thread].append(op)
        if external is not None:
            self.by_external.setdefault(external, op)

    def resolve(self) -> None:
        """Find for every call the innermost operator around it on its thread."""
        by_thread: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for correlation, call in self.calls.items():
            by_thread[call.thread].append((call.start_ns, correlation))
        for thread, calls in by_thread.items():
            ops = sorted(self.ops.get(thread, ()), key=lambda op: (op.start_ns, -op.end_ns))
            calls.sort()
            open_ops: list[Op] = []
            at = 0
            for start, correlation in calls:
                while at < len(ops) and ops[at].start_ns <= start:
                    while open_ops and open_ops[-1].end_ns <= ops[at].start_ns:
                        open_ops.pop()
                    open_ops.append(ops[at])
                    at += 1
                while open_ops and open_ops[-1].end_ns < start:
                    open_ops.pop()
                if open_ops:
                    self._op_of_call[correlation] = open_ops[-1]

    def is_graph(self, correlation: int | None) -> bool:
        call = self.calls.get(correlation) if correlation is not None else None
        return call is not None and call.graph

    def op(self, correlation: int | None, external: int | None, start_ns: int) -> Op | None:
        """The operator that launched what began on the GPU at `start_ns`; None if unknown.

        A graph launch has no operator per kernel, so for it the answer is None too.
        """
        if correlation is not None and correlation in self.calls:
            return None if self.calls[correlation].graph else self._op_of_call.get(correlation)
        op = self.by_external.get(external) if external is not None else None
        return op if op is not None and op.start_ns <= start_ns else None

    def launch(self, correlation: int | None) -> Launch | None:
        """The launching call of a row, None if the profile has none for it."""
        call = self.calls.get(correlation) if correlation is not None else None
        return Launch(call.start_ns, process_of(call.thread)) if call is not None else None


def process_of(thread: str) -> str:
    """The process in "process/thread"."""
    return thread.partition("/")[0]
