"""The split unit as one executable graph: captured nodes where the plan puts them, copies at the cuts.

Kernel nodes are rebuilt from the captures with their parameters and attributes (without the attributes clusters
are lost), each from the capture of its own device: that is what makes the addresses and the multiprocessors right.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver as cuda

from hw.capture.driver import call
from hw.errors import DriverError
from hw.replay.arena import Arena, handles
from hw.replay.contents import bytes_at
from hw.replay.cut import Launch, Move, Step
from hw.replay.order import order
from hw.replay.rows import Rows

_KERNEL = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
_MEMSET = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET


#: Who moves bytes: the copy engine, one copy after the other in the order of the graph's nodes, after those of all
#: graphs that were launched before; or a small kernel on the device that reads them.
ENGINE, KERNEL = COPIES_BY = ("engine", "kernel")


class Nodes:
    """Adds the nodes of steps to graphs. `copied`: moves that kernels make."""

    def __init__(self, arenas: Mapping[str, Arena], rows: Mapping[int, Rows], copied: Sequence[Step] = ()) -> None:
        self.arenas, self.rows = arenas, rows
        self.copied: dict[Step, list[Any]] = {}
        self._keep: list[Captured] = []
        for device in arenas:
            self._copy_kernels([s for s in copied if isinstance(s, Move) and s.target == device], device)
        self.context = call(cuda.cuCtxGetCurrent(), "cuCtxGetCurrent")
        self.handles = {d: handles(a.graphed.graph) for d, a in arenas.items()}
        self.contexts = {d: a.partition.driver_context for d, a in arenas.items()}
        self.memory = {d: a.partition.primary or self.context for d, a in arenas.items()}  # of copies and sets
        self.gpus = {d: a.partition.device for d, a in arenas.items()}

    def _copy_kernels(self, moves: Sequence[Move], device: str) -> None:
        """Capture a kernel for every copy of the moves to a device, on a stream of that device."""
        parts = [(m, part) for m in moves for part in self._copies(m)]
        if not parts:
            return
        arena = self.arenas[device]
        made = captured_copies([part for _, part in parts], arena.graphed.stream, arena.partition.device)
        self._keep.append(made)
        for (move, _), node in zip(parts, made.nodes, strict=True):
            self.copied.setdefault(move, []).append(node)

    def step(self, graph: Any, step: Step, after: list[Any]) -> list[Any]:
        """The nodes that end a step."""
        if isinstance(step, Launch):
            return [self.add(graph, self.handles[step.device][step.kernel], after, step.device)]
        if step in self.copied:
            return [self.add(graph, node, after, step.target) for node in self.copied[step]]
        apart = self.gpus[step.source] != self.gpus[step.target]
        return [add_copy(graph, p, after, self.memory[step.source], apart) for p in self._copies(step)]

    def add(self, graph: Any, node: Any, after: list[Any], device: str) -> Any:
        """A captured node again, in the context of its device."""
        kind = call(cuda.cuGraphNodeGetType(node), "cuGraphNodeGetType")
        before = (graph, after or None, len(after))
        if kind == _KERNEL:
            return add_kernel(before, node, self.contexts[device])
        if kind == _MEMSET:
            params = call(cuda.cuGraphMemsetNodeGetParams(node), "cuGraphMemsetNodeGetParams")
            return call(cuda.cuGraphAddMemsetNode(*before, params, self.memory[device]), "cuGraphAddMemsetNode")
        params = call(cuda.cuGraphMemcpyNodeGetParams(node), "cuGraphMemcpyNodeGetParams")
        return call(cuda.cuGraphAddMemcpyNode(*before, params, self.memory[device]), "cuGraphAddMemcpyNode")

    def _copies(self, move: Move) -> list[tuple[int, int, int, int, int]]:
        """(source address, target address, bytes of a row, rows, pitch) of every copy of a move."""
        source, target = (self.arenas[d].address(move.buffer) for d in (move.source, move.target))
        if not move.delta:
            return [(source + move.start, target + move.start, move.nbytes, 1, move.nbytes)]
        return [(source + r.offset, target + r.offset, r.nbytes, r.count, r.pitch) for r in self.rows[move.buffer]]


class Captured(NamedTuple):
    """Nodes of a captured graph, which owns them."""

    graph: torch.cuda.CUDAGraph
    nodes: list[Any]


def captured_copies(
    parts: Sequence[tuple[int, int, int, int, int]], stream: torch.cuda.Stream, device: int
) -> Captured:
    """A kernel node for every copy, captured on a stream of the device that runs them."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        for part in parts:
            copy_by_kernel(part, device)
        graph.capture_end()
    nodes = handles(graph)
    if len(nodes) != len(parts):
        raise DriverError(f"{len(parts)} copies were captured as {len(nodes)} nodes")
    return Captured(graph, nodes)


def copy_by_kernel(part: tuple[int, int, int, int, int], device: int) -> None:
    """Copy (source address, target address, bytes of a row, rows, pitch) by one kernel on the current stream, in words
    as wide as all of these allow."""
    source, target, width, height, pitch = part
    kind, size = next(
        (kind, size) for kind, size in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2), (torch.uint8, 1))
        if all(x % size == 0 for x in (source, target, width, pitch))
    )  # fmt: skip
    words = [
        bytes_at(at, (height - 1) * pitch + width, device).view(kind).as_strided((height, width // size),
                                                                                 (pitch // size, 1))
        for at in (source, target)
    ]  # fmt: skip
    torch.bitwise_or(words[0], 0, out=words[1])


def add_copy(
    graph: Any, part: tuple[int, int, int, int, int], after: list[Any], context: Any, apart: bool = False
) -> Any:
    """A copy node of (source address, target address, bytes of a row, rows, pitch). `apart`: between two GPUs, which
    the driver finds by the addresses."""
    source, target, width, height, pitch = part
    p = cuda.CUDA_MEMCPY3D()
    kinds = cuda.CUmemorytype
    p.srcMemoryType = p.dstMemoryType = kinds.CU_MEMORYTYPE_UNIFIED if apart else kinds.CU_MEMORYTYPE_DEVICE
    p.srcDevice, p.dstDevice = cuda.CUdeviceptr(source), cuda.CUdeviceptr(target)
    p.srcPitch = p.dstPitch = pitch
    p.srcHeight = p.dstHeight = height
    p.WidthInBytes, p.Height, p.Depth = width, height, 1
    return call(cuda.cuGraphAddMemcpyNode(graph, after or None, len(after), p, context), "cuGraphAddMemcpyNode")


#: How a kernel node of a context of its own (a partition, another GPU) is made again: which context is current, and
#: which its parameters name.
_WAYS = ("as it is", "current", "both", "named")
_ATTRIBUTES = (
    "COOPERATIVE", "CLUSTER_DIMENSION", "CLUSTER_SCHEDULING_POLICY_PREFERENCE", "PROGRAMMATIC_STREAM_SERIALIZATION",
    "PRIORITY", "MEM_SYNC_DOMAIN_MAP", "MEM_SYNC_DOMAIN", "PREFERRED_CLUSTER_DIMENSION",
    "PREFERRED_SHARED_MEMORY_CARVEOUT",
)  # fmt: skip
_works: dict[int, tuple[str, bool]] = {}  # context (0: the current one) -> (way, attributes as a whole)


def add_kernel(before: tuple[Any, Any, int], node: Any, context: Any) -> Any:
    """A captured kernel node again, attributes and all; DriverError with every way that was tried."""
    own = 0 if context is None else int(context)
    ways = [(w, whole) for whole in (True, False) for w in (_WAYS if own else _WAYS[:1])]
    errors = []
    for way, whole in [_works[own]] if own in _works else ways:
        if way in ("current", "both"):
            call(cuda.cuCtxPushCurrent(context), "cuCtxPushCurrent")
        try:
            copy = _again(before, node, context if way in ("named", "both") else None, whole)
            _works[own] = (way, whole)
            return copy
        except DriverError as error:
            errors.append(f"{way}{'' if whole else ', attribute by attribute'}: {error}")
        finally:
            if way in ("current", "both"):
                call(cuda.cuCtxPopCurrent(), "cuCtxPopCurrent")
    raise DriverError("a captured kernel node cannot be made again: " + "; ".join(errors))


def _again(before: tuple[Any, Any, int], node: Any, context: Any, whole: bool) -> Any:
    params = call(cuda.cuGraphKernelNodeGetParams(node), "cuGraphKernelNodeGetParams")
    if context is not None:
        params.ctx = context
    copy = call(cuda.cuGraphAddKernelNode(*before, params), "cuGraphAddKernelNode")
    try:
        if whole:
            call(cuda.cuGraphKernelNodeCopyAttributes(copy, node), "cuGraphKernelNodeCopyAttributes")
            return copy
        ids = getattr(cuda, "CUkernelNodeAttrID", None) or cuda.CUlaunchAttributeID
        for name in _ATTRIBUTES:
            which = getattr(ids, f"CU_LAUNCH_ATTRIBUTE_{name}", None)
            if which is None:
                continue
            status, value = cuda.cuGraphKernelNodeGetAttribute(node, which)
            if status == cuda.CUresult.CUDA_SUCCESS:
                status, standard = cuda.cuGraphKernelNodeGetAttribute(copy, which)
                if status != cuda.CUresult.CUDA_SUCCESS or bytes_of(value) != bytes_of(standard):
                    call(cuda.cuGraphKernelNodeSetAttribute(copy, which, value), f"attribute {name}")
        return copy
    except DriverError:
        call(cuda.cuGraphDestroyNode(copy), "cuGraphDestroyNode")
        raise


def bytes_of(value: Any) -> bytes:
    """The 64 bytes of an attribute's value."""
    return ctypes.string_at(int(value.getPtr()), 64)


class SplitGraph:
    """An executable of `steps`. `rows`: where the deltas of a state lie, by buffer.

    `lost`: moves that are left out; `early`: (launch, move) waits that are left out; `late`: steps that a kernel
    spinning for a while, `spin`, comes before. These make a run wrong on purpose, or give it time to go wrong.
    """

    def __init__(
        self, steps: Sequence[Step], arenas: Mapping[str, Arena], rows: Mapping[int, Rows],
        lost: Collection[int] = (), early: Collection[tuple[int, int]] = (), late: Collection[int] = (),
        spin: Any = None, copies: str = ENGINE,
    ) -> None:  # fmt: skip
        nodes = Nodes(arenas, rows, steps if copies == KERNEL else ())
        self._nodes = nodes  # owns the captured copies
        self.graph = call(cuda.cuGraphCreate(0), "cuGraphCreate")
        made: list[list[Any]] = []  # nodes that end a step
        for i, (step, needs) in enumerate(zip(steps, order(steps, arenas), strict=True)):
            found = [node for j in needs if (i, j) not in early for node in made[j]]
            after = list({int(node): node for node in found}.values())  # a lost move stands for what it waits for
            if i in late:
                where = step.device if isinstance(step, Launch) else step.source
                after = [nodes.add(self.graph, spin, after, where)]
            made.append(after if i in lost else nodes.step(self.graph, step, after))
        self.executable = call(cuda.cuGraphInstantiate(self.graph, 0), "cuGraphInstantiate")

    def launch(self, stream: torch.cuda.Stream) -> None:
        call(cuda.cuGraphLaunch(self.executable, cuda.CUstream(stream.cuda_stream)), "cuGraphLaunch")

    def close(self) -> None:
        call(cuda.cuGraphExecDestroy(self.executable), "cuGraphExecDestroy")
        call(cuda.cuGraphDestroy(self.graph), "cuGraphDestroy")
