"""What a profile says about the GPU, whatever its format: rows for kernels, copies and sets, and their launches.

Readers (`kineto.py`, `nsys.py`, `nsys_csv.py`) fill a `Profile`; `assemble.py` makes the trace of it. A row that
cannot be placed in time is dropped by its reader and counted, never guessed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tesserasim.trace.launches import Annotation, Launches, Op
from tesserasim.trace.values import counted

KERNEL, COPY, SET = "kernel", "copy", "memset"


@dataclass(slots=True)
class Row:
    """One kernel, copy or set as the profile tells it. Times in ns on the profile's own clock."""

    role: str  # KERNEL, COPY or SET
    name: str
    start_ns: int
    duration_ns: int
    device: int
    stream: int
    correlation: int | None
    external: int | None
    node: int | None  # graph node id
    index: int  # position in the file
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int
    shared_bytes: int
    nbytes: int  # copies and sets
    graph: bool = False  # launched by a CUDA graph
    op: Op | None = None
    cluster: tuple[int, int, int] = (1, 1, 1)

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass
class Profile:
    """All GPU rows of a file, in file order, and what else importing and inspecting need."""

    rows: list[Row] = field(default_factory=list)
    launches: Launches = field(default_factory=Launches)
    annotations: list[Annotation] = field(default_factory=list)  # named ranges of the program, on CPU or GPU
    header: dict[str, Any] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)  # top-level names of a JSON object, empty for a bare array
    bare_array: bool = False
    host_events: int = 0  # events that are not GPU rows
    dropped: Counter[str] = field(default_factory=Counter)  # reason → rows
    notes: list[str] = field(default_factory=list)  # warnings about the file as a whole
    nothing: str = ""  # why there are no rows, where the reader knows it better than the events tell
    gpu: str | None = None  # None: no device listed; "?": listed without a name

    @property
    def drops(self) -> list[str]:
        """One sentence per reason for which GPU rows were dropped."""
        return [f"dropped {counted(n, 'GPU event')} {reason}" for reason, n in self.dropped.items()]

    def link(self) -> None:
        """Find for every row the operator that launched it, and whether a graph did."""
        launches = self.launches
        launches.resolve()
        for row in self.rows:
            row.graph = row.role == KERNEL and (
                row.graph or row.node is not None or launches.is_graph(row.correlation)
            )
            if not row.graph:
                row.op = launches.op(row.correlation, row.external, row.start_ns)


class Numbers:
    """32-bit numbers for streams and devices, whatever the file calls them; others than such get negative ones."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}

    def __call__(self, value: object) -> int:
        if value is None:
            return 0
        if isinstance(value, int) and -1 <= value < 1 << 31:
            return value
        return self._known.setdefault(value, -2 - len(self._known))
