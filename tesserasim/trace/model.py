"""The trace: one unit of work (a prefill, a decode step, a denoising step) captured on one GPU.

A trace is a list of kernels in launch order, the buffers they touch, and what was measured about the
whole. It is the only thing the simulator knows about the real world, so it carries where it came from
(`origin`) and never forgets it.

Sites and kernels
    A *site* is one call of one operation: module path + op + ordinal. It may launch several kernels
    (split-K GEMM and its reduce). Sites are placed and cost-predicted; kernels are simulated and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tesserasim.errors import InputError

SCHEMA_VERSION = 1

KINDS = (
    "gemm", "attention_prefill", "attention_decode", "moe", "ssm_scan", "conv", "norm", "elementwise",
    "reduction", "copy", "memset", "collective", "sampling", "other",
)  # fmt: skip
PHASES = ("prefill", "decode", "denoise", "encode", "other")
PARTS = ("attention", "ffn", "embed", "head", "other")
MODES = ("R", "W", "RW")
EXTENTS = ("exact", "superset", "unknown")
EVIDENCE = ("ptx", "params", "schema", "library", "oracle", "unknown")
ROLES = ("weight", "activation", "state", "workspace", "input", "output")
ORIGINS = ("captured", "imported", "derived", "synthetic")

#: Fields of `Kernel.shape`; an absent one is missing from the mapping. All are counts, never bytes.
SHAPE_FIELDS = (
    "m", "n", "k", "batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "window", "hidden", "inter",
    "topk", "experts", "elements",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes of one buffer that one kernel reads or writes."""

    buffer: int  # Buffer.id
    mode: str  # R, W or RW
    offset: int  # first byte, from the start of the buffer
    nbytes: int  # bytes touched from there on (an upper limit unless extent is "exact")
    extent: str = "exact"  # exact | superset | unknown
    covers: bool = False  # a write proven to write every byte of [offset, offset + nbytes)
    evidence: str = "unknown"

    @property
    def reads(self) -> bool:
        return self.mode != "W"

    @property
    def writes(self) -> bool:
        return self.mode != "R"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A logical buffer: one value's home. Weights and state keep their name in every unit of a mix."""

    id: int
    name: str  # stable across units for weights (module path) and state ("layers.3.kv")
    nbytes: int
    role: str
    storage: int = -1  # allocator block, for aliasing; -1: unknown
    storage_offset: int = 0
    first_use: int = -1  # kernel id
    last_use: int = -1
    bytes_per_token: int = 0  # state only: what one more token of one sequence adds
    bytes_per_sequence: int = 0  # state only: fixed part of one sequence


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, copy or set, in launch order."""

    id: int
    name: str
    site: str
    kind: str = "other"
    op: str = ""
    module: str = ""
    phase: str = "other"
    part: str = "other"
    stream: int = 0
    device: int = 0  # of the profile; 0 in a captured trace
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    registers: int = 0
    weight_dtype: str = ""
    act_dtype: str = ""
    shape: Mapping[str, int] = field(default_factory=dict)
    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    duration_ns: int = 0  # median of the repeats
    duration_p10_ns: int = 0
    duration_p90_ns: int = 0
    gap_ns: int = 0  # signed: start minus the end of the kernel before it on the stream; 0 for the first
    start_ns: int = 0  # imported profiles: start relative to the profile's first event
    group: int = -1  # sites that must stay together share a group; -1: free
    group_reason: str = ""
    accesses: tuple[Access, ...] = ()


@dataclass(frozen=True)
class TraceMeta:
    """Everything about the unit that is not a kernel. Written as one JSON object in the file's metadata."""

    origin: str
    model: str
    unit: Mapping[str, Any]  # {"name": "decode", "phase": "decode", "batch": 32, "tokens": 1, "context": 2048}
    gpu: str  # canonical catalogue name where known, else as the source says
    driver: str = ""
    torch: str = ""
    tp_size: int = 1
    tp_rank: int = 0
    repeats: int = 0
    e2e_ns: Mapping[str, int] | None = None  # median, p10, p90 of the graph without the profiler
    #: empty_graph_ns; kernel_overhead_ns and memset_overhead_ns: what the profiler added per node; fitted_on
    launch: Mapping[str, Any] | None = None
    structure_sha256: str = ""
    workspace_bytes: int = 0  # peak bytes of activations and workspace of one execution
    moe: Mapping[str, Any] | None = None  # routing statistics and seed
    tool_version: str = ""
    captured_at: str = ""
    source: str = ""  # imported: file name
    warnings: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Trace:
    """Kernels in launch order + buffers + metadata. Immutable; identity by content, not by file."""

    meta: TraceMeta
    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...] = ()

    def __len__(self) -> int:
        return len(self.kernels)

    def __iter__(self) -> Iterator[Kernel]:
        return iter(self.kernels)

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """Distinct sites in order of their first kernel."""
        return tuple(dict.fromkeys(k.site for k in self.kernels))

    @cached_property
    def site_of(self) -> tuple[int, ...]:
        """For each kernel the index of its site in `sites`."""
        index = {name: i for i, name in enumerate(self.sites)}
        return tuple(index[k.site] for k in self.kernels)

    @property
    def unit(self) -> str:
        return str(self.meta.unit.get("name", "unit"))

    @property
    def busy_ns(self) -> int:
        return sum(k.duration_ns for k in self.kernels)

    @property
    def span_ns(self) -> int:
        """Sum of durations and signed gaps as profiled: the span of a single-stream unit under the profiler."""
        return sum(k.duration_ns + k.gap_ns for k in self.kernels)

    @cached_property
    def replay_gaps_ns(self) -> tuple[int, ...]:
        """Signed gaps of a replay without the profiler: the profiled ones less what the profiler adds.

        The profiler lengthens the step from one graph node to the next, and most of all the step from a
        memset to a kernel. Both constants belong to the machine and are fitted on units of their own
        (hw/capture/launch.py); without them the profiled gaps stand.
        """
        launch = self.meta.launch or {}
        step, after_set = launch.get("kernel_overhead_ns", 0), launch.get("memset_overhead_ns", 0)
        if not step and not after_set:
            return tuple(k.gap_ns for k in self.kernels)
        gaps = [k.gap_ns for k in self.kernels[:1]]
        for before, k in zip(self.kernels, self.kernels[1:], strict=False):
            gaps.append(round(k.gap_ns - step - (after_set if before.kind == "memset" else 0)))
        return tuple(gaps)

    @property
    def launch_ns(self) -> int:
        """Launch cost: the measured time of an empty graph + ns per node, at least 0; 0 if not measured."""
        launch = self.meta.launch or {}
        return max(0, int(launch.get("empty_graph_ns", 0) + launch.get("per_node_ns", 0) * len(self.kernels) + 0.5))

    @property
    def replay_ns(self) -> int:
        """Durations + replay gaps + launch cost: the unit alone on its own GPU."""
        return self.busy_ns + sum(self.replay_gaps_ns) + self.launch_ns

    @property
    def residual_ns(self) -> int | None:
        """Measured end-to-end time minus durations, replay gaps and launch cost; None if it was not measured."""
        if not self.meta.e2e_ns:
            return None
        return int(self.meta.e2e_ns["median"]) - self.replay_ns

    def validate(self, where: str = "") -> None:
        """Raise InputError at the first broken rule: ids in order, known words, accesses inside buffers.

        `where` is what the error names: the file, if there is one.
        """
        where = where or self.meta.source or f"{self.meta.model} {self.unit}"
        if self.meta.origin not in ORIGINS:
            raise InputError(f"{where}: origin {self.meta.origin[:60]!r} is not one of {', '.join(ORIGINS)}")
        for i, b in enumerate(self.buffers):
            if b.id != i or b.role not in ROLES or b.nbytes < 0:
                raise InputError(f"{where}: buffer {i} ({b.name[:60]!r}) has a wrong id, role or size")
            if not (-1 <= b.first_use < len(self.kernels) and -1 <= b.last_use < len(self.kernels)):
                raise InputError(f"{where}: buffer {i} ({b.name[:60]!r}) is used by a kernel that does not exist")
            if b.bytes_per_token + b.bytes_per_sequence > b.nbytes:
                raise InputError(f"{where}: buffer {i} ({b.name[:60]!r}) is smaller than its state of one token")
        for i, k in enumerate(self.kernels):
            if k.id != i:
                raise InputError(f"{where}: kernel {i} carries id {k.id}; rows must be in launch order")
            if k.kind not in KINDS or k.phase not in PHASES or k.part not in PARTS:
                raise InputError(f"{where}: kernel {i} ({k.name[:60]!r}) has an unknown kind, phase or part")
            if k.duration_ns < 0:
                raise InputError(f"{where}: kernel {i} ({k.name[:60]!r}) has a negative duration")
            for a in k.accesses:
                if not 0 <= a.buffer < len(self.buffers) or a.mode not in MODES:
                    raise InputError(f"{where}: kernel {i} ({k.name[:60]!r}) has an access to no buffer")
                if a.extent not in EXTENTS or a.evidence not in EVIDENCE:
                    raise InputError(f"{where}: kernel {i} ({k.name[:60]!r}) has an unknown extent or evidence")
                if a.offset < 0 or a.nbytes < 0 or a.offset + a.nbytes > self.buffers[a.buffer].nbytes:
                    outside = self.buffers[a.buffer].name[:60]
                    raise InputError(f"{where}: kernel {i} ({k.name[:60]!r}) touches bytes outside {outside!r}")


def structure_sha256(kernels: tuple[Kernel, ...]) -> str:
    """Hash over (name, grid, block, cluster, shared) in launch order: what a replay must find again."""
    import hashlib

    h = hashlib.sha256()
    for k in kernels:
        h.update(repr((k.name, k.grid, k.block, k.cluster, k.shared_bytes)).encode())
    return h.hexdigest()
