"""The split unit as one executable graph: captured nodes where the plan puts them, copies at the cuts.

Kernel nodes are rebuilt from the captures with their parameters and attributes (without the attributes clusters
are lost), each from the capture of its own device: that is what makes the addresses and the multiprocessors right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from cuda.bindings import driver as cuda

from hw.capture.driver import call
from hw.replay.arena import Arena, handles
from hw.replay.cut import Launch, Move, Step
from hw.replay.order import Touch, waits
from hw.replay.rows import Rows

_KERNEL = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
_MEMSET = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET


def touches(step: Step, arenas: Mapping[str, Arena]) -> list[Touch]:
    """Addresses that a step reads and writes; weights are left out, since nobody writes them."""
    if isinstance(step, Move):
        found = []
        for device, write in ((step.source, False), (step.target, True)):
            at = arenas[device].address(step.buffer)
            whole = arenas[device].found.buffers[step.buffer].nbytes
            first, end = (0, whole) if step.delta else (step.start, step.end)
            found.append(Touch(at + first, at + end, write))
        return found
    arena = arenas[step.device]
    found = []
    for a in arena.trace.kernels[step.kernel].accesses:
        b = arena.found.buffers[a.buffer]
        if b.role == "weight":
            continue
        at = arena.address(a.buffer)
        # Where the rows of a growing state lie is not in the access: the whole of it counts.
        whole = a.extent == "unknown" or b.role == "state" or b.role == "workspace"
        first, end = (0, b.nbytes) if whole else (a.offset, a.offset + a.nbytes)
        if a.reads:
            found.append(Touch(at + first, at + end, False))
        if a.writes:
            found.append(Touch(at + first, at + end, True))
    return found


def order(steps: Sequence[Step], arenas: Mapping[str, Arena]) -> list[list[int]]:
    """Per step the earlier steps that it waits for."""
    chains = [s.device if isinstance(s, Launch) else (s.source, s.target) for s in steps]
    needs = waits(chains, [touches(s, arenas) for s in steps])
    # A launch waits for the moves that bring what it reads, also where their bytes lie elsewhere than it names.
    coming: dict[tuple[int, str], list[int]] = {}
    for i, s in enumerate(steps):
        if isinstance(s, Move):
            coming.setdefault((s.before, s.target), []).append(i)
        else:
            needs[i] = sorted({*needs[i], *coming.get((s.kernel, s.device), ())})
    return needs


class SplitGraph:
    """An executable graph of `steps`. `rows`: where the deltas of a state lie, by buffer.

    `lost`: moves that are left out; `early`: (launch, move) waits that are left out; `late`: launches that a kernel
    spinning for `spin` cycles comes before. These make a run wrong on purpose, or give it time to go wrong.
    """

    def __init__(
        self, steps: Sequence[Step], arenas: Mapping[str, Arena], rows: Mapping[int, Rows],
        lost: Collection[int] = (), early: Collection[tuple[int, int]] = (), late: Collection[int] = (),
        spin: Any = None,
    ) -> None:  # fmt: skip
        self._context = call(cuda.cuCtxGetCurrent(), "cuCtxGetCurrent")
        self._handles = {d: handles(a.graphed.graph) for d, a in arenas.items()}
        self._arenas, self._rows, self._spin = arenas, rows, spin
        self.graph = call(cuda.cuGraphCreate(0), "cuGraphCreate")
        made: list[list[Any]] = []  # nodes that end a step
        for i, (step, needs) in enumerate(zip(steps, order(steps, arenas), strict=True)):
            after = [node for j in needs if (i, j) not in early for node in made[j]]
            if i in late:
                after = [self._add(spin, after)]
            if isinstance(step, Launch):
                made.append([self._add(self._handles[step.device][step.kernel], after)])
            elif i in lost:
                made.append(after)
            else:
                made.append([self._copy(p, after) for p in self._copies(step)])
        self.executable = call(cuda.cuGraphInstantiate(self.graph, 0), "cuGraphInstantiate")

    def launch(self, stream: torch.cuda.Stream) -> None:
        call(cuda.cuGraphLaunch(self.executable, cuda.CUstream(stream.cuda_stream)), "cuGraphLaunch")

    def close(self) -> None:
        call(cuda.cuGraphExecDestroy(self.executable), "cuGraphExecDestroy")
        call(cuda.cuGraphDestroy(self.graph), "cuGraphDestroy")

    def _add(self, node: Any, after: list[Any]) -> Any:
        kind = call(cuda.cuGraphNodeGetType(node), "cuGraphNodeGetType")
        before = (self.graph, after or None, len(after))
        if kind == _KERNEL:
            params = call(cuda.cuGraphKernelNodeGetParams(node), "cuGraphKernelNodeGetParams")
            copy = call(cuda.cuGraphAddKernelNode(*before, params), "cuGraphAddKernelNode")
            call(cuda.cuGraphKernelNodeCopyAttributes(copy, node), "cuGraphKernelNodeCopyAttributes")
            return copy
        if kind == _MEMSET:
            params = call(cuda.cuGraphMemsetNodeGetParams(node), "cuGraphMemsetNodeGetParams")
            return call(cuda.cuGraphAddMemsetNode(*before, params, self._context), "cuGraphAddMemsetNode")
        params = call(cuda.cuGraphMemcpyNodeGetParams(node), "cuGraphMemcpyNodeGetParams")
        return call(cuda.cuGraphAddMemcpyNode(*before, params, self._context), "cuGraphAddMemcpyNode")

    def _copies(self, move: Move) -> list[tuple[int, int, int, int, int]]:
        """(source address, target address, bytes of a row, rows, pitch) of every copy of a move."""
        source, target = (self._arenas[d].address(move.buffer) for d in (move.source, move.target))
        if not move.delta:
            return [(source + move.start, target + move.start, move.nbytes, 1, move.nbytes)]
        return [(source + r.offset, target + r.offset, r.nbytes, r.count, r.pitch) for r in self._rows[move.buffer]]

    def _copy(self, part: tuple[int, int, int, int, int], after: list[Any]) -> Any:
        source, target, width, height, pitch = part
        p = cuda.CUDA_MEMCPY3D()
        p.srcMemoryType = p.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
        p.srcDevice, p.dstDevice = cuda.CUdeviceptr(source), cuda.CUdeviceptr(target)
        p.srcPitch = p.dstPitch = pitch
        p.srcHeight = p.dstHeight = height
        p.WidthInBytes, p.Height, p.Depth = width, height, 1
        result = cuda.cuGraphAddMemcpyNode(self.graph, after or None, len(after), p, self._context)
        return call(result, "cuGraphAddMemcpyNode")
