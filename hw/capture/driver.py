"""Thin helpers over the CUDA driver API: what a captured graph consists of.

The runtime API fails on kernels of other libraries, so everything goes through the driver (cuda-bindings).
A node owns its parameter memory: bytes are copied the moment they are read.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from hw.errors import DriverError

KERNEL, MEMCPY, MEMSET = "kernel", "memcpy", "memset"
_TYPES = {
    driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL: KERNEL,
    driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY: MEMCPY,
    driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET: MEMSET,
}
_EXTRA_POINTER, _EXTRA_SIZE, _EXTRA_END = 1, 2, 0


def call(result: Any, what: str) -> Any:
    """Unpack a driver result; DriverError names the call that failed."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{what} failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True)
class Node:
    """One node of a captured graph, with a copy of its parameters."""

    type: str  # kernel | memcpy | memset | other
    name: str  # mangled function name; "" for copies and sets
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    registers: int = 0
    programmatic: bool = False  # launched with programmatic stream serialization (may overlap its predecessor)
    params: tuple[bytes, ...] = ()  # one entry per parameter, or one blob
    pointers: tuple[tuple[int, str, int], ...] = ()  # copies and sets: (address, mode, nbytes)


def capture_graph(stream: int) -> Any:
    """The graph that a capturing stream is recording into, or None if it does not capture."""
    values = call(driver.cuStreamGetCaptureInfo(driver.CUstream(stream)), "cuStreamGetCaptureInfo")
    if values[0] != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        return None
    return next(v for v in values if isinstance(v, driver.CUgraph))


def graph_of(graph: Any) -> Any:
    """The driver handle of a `torch.cuda.CUDAGraph(keep_graph=True)`."""
    return driver.CUgraph(int(graph.raw_cuda_graph()))


def node_count(graph: Any) -> int:
    values = call(driver.cuGraphGetNodes(graph), "cuGraphGetNodes")
    return int(values[-1])


def graph_nodes(graph: Any) -> list[Node]:
    """All nodes in creation order, which on one capturing stream is launch order."""
    count = node_count(graph)
    handles = call(driver.cuGraphGetNodes(graph, count), "cuGraphGetNodes")[0]
    return [_node(h) for h in handles[:count]]


class NodeLauncher:
    """Launches single nodes of a captured graph, or stretches of it one by one, exactly as captured.

    Every node becomes a graph of its own: its parameters as they are (those of libraries sit in `extra`), and its
    attributes copied, without which clusters are lost. Disabling the other nodes of one executable instead was
    seen to leave some of them running (driver 580). The captured graph must outlive the launcher: it owns the
    parameters.
    """

    def __init__(self, graph: Any) -> None:
        count = node_count(graph)
        self._nodes = call(driver.cuGraphGetNodes(graph, count), "cuGraphGetNodes")[0][:count]
        self._built: dict[int, tuple[Any, Any]] = {}  # node -> (graph, executable)
        self._context = call(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")

    def run(self, first: int, last: int, stream: int) -> None:
        """Launch the nodes [first, last) in order on `stream` (a handle). Does not wait."""
        for i in range(first, last):
            if i not in self._built:
                self._built[i] = self._build(self._nodes[i])
            call(driver.cuGraphLaunch(self._built[i][1], driver.CUstream(stream)), "cuGraphLaunch")

    def _build(self, node: Any) -> tuple[Any, Any]:
        graph = call(driver.cuGraphCreate(0), "cuGraphCreate")
        kind = _TYPES[call(driver.cuGraphNodeGetType(node), "cuGraphNodeGetType")]
        if kind == KERNEL:
            params = call(driver.cuGraphKernelNodeGetParams(node), "cuGraphKernelNodeGetParams")
            copy = call(driver.cuGraphAddKernelNode(graph, None, 0, params), "cuGraphAddKernelNode")
            call(driver.cuGraphKernelNodeCopyAttributes(copy, node), "cuGraphKernelNodeCopyAttributes")
        elif kind == MEMSET:
            params = call(driver.cuGraphMemsetNodeGetParams(node), "cuGraphMemsetNodeGetParams")
            call(driver.cuGraphAddMemsetNode(graph, None, 0, params, self._context), "cuGraphAddMemsetNode")
        else:
            params = call(driver.cuGraphMemcpyNodeGetParams(node), "cuGraphMemcpyNodeGetParams")
            call(driver.cuGraphAddMemcpyNode(graph, None, 0, params, self._context), "cuGraphAddMemcpyNode")
        return graph, call(driver.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")

    def close(self) -> None:
        """Give the graphs back."""
        for graph, executable in self._built.values():
            call(driver.cuGraphExecDestroy(executable), "cuGraphExecDestroy")
            call(driver.cuGraphDestroy(graph), "cuGraphDestroy")
        self._built.clear()


def _node(handle: Any) -> Node:
    kind = _TYPES.get(call(driver.cuGraphNodeGetType(handle), "cuGraphNodeGetType"), "other")
    if kind == KERNEL:
        return _kernel_node(handle)
    if kind == MEMCPY:
        p = call(driver.cuGraphMemcpyNodeGetParams(handle), "cuGraphMemcpyNodeGetParams")
        size = int(p.WidthInBytes) * max(1, int(p.Height)) * max(1, int(p.Depth))
        return Node(MEMCPY, "", pointers=((int(p.srcDevice), "R", size), (int(p.dstDevice), "W", size)))
    if kind == MEMSET:
        p = call(driver.cuGraphMemsetNodeGetParams(handle), "cuGraphMemsetNodeGetParams")
        size = int(p.elementSize) * int(p.width) * max(1, int(p.height))
        return Node(MEMSET, "", pointers=((int(p.dst), "W", size),))
    return Node("other", "")


def _kernel_node(handle: Any) -> Node:
    p = call(driver.cuGraphKernelNodeGetParams(handle), "cuGraphKernelNodeGetParams")
    func = p.func
    if not int(func):
        func = call(driver.cuKernelGetFunction(p.kern), "cuKernelGetFunction")
    name = call(driver.cuFuncGetName(func), "cuFuncGetName")
    registers = call(
        driver.cuFuncGetAttribute(driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, func), "cuFuncGetAttribute"
    )
    static = call(
        driver.cuFuncGetAttribute(driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, func),
        "cuFuncGetAttribute",
    )
    cluster = (1, 1, 1)
    value = _attribute(handle, "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION")
    if value is not None:
        cluster = tuple(max(1, int(getattr(value.clusterDim, axis))) for axis in "xyz")  # type: ignore[assignment]
    programmatic = _attribute(handle, "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION")
    return Node(
        KERNEL,
        name.decode() if isinstance(name, bytes) else str(name),
        (int(p.gridDimX), int(p.gridDimY), int(p.gridDimZ)),
        (int(p.blockDimX), int(p.blockDimY), int(p.blockDimZ)),
        cluster,
        int(p.sharedMemBytes) + int(static),
        int(registers),
        bool(programmatic is not None and programmatic.programmaticStreamSerializationAllowed),
        _parameters(p, func),
    )


def _attribute(handle: Any, name: str) -> Any:
    ids = getattr(driver, "CUkernelNodeAttrID", None) or driver.CUlaunchAttributeID
    status, value = driver.cuGraphKernelNodeGetAttribute(handle, getattr(ids, name))
    return value if status == driver.CUresult.CUDA_SUCCESS else None


def _parameters(p: Any, func: Any) -> tuple[bytes, ...]:
    if int(p.kernelParams):
        table = ctypes.cast(int(p.kernelParams), ctypes.POINTER(ctypes.c_void_p))
        out = []
        for i in range(4096):
            status, _offset, size = driver.cuFuncGetParamInfo(func, i)
            if status != driver.CUresult.CUDA_SUCCESS:
                break
            out.append(ctypes.string_at(table[i], int(size)))
        return tuple(out)
    extra = int(p.extra) if p.extra else 0
    if extra:
        words = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
        buffer, size, i = 0, 0, 0
        while i < 16 and (words[i] or 0) != _EXTRA_END:
            if words[i] == _EXTRA_POINTER:
                buffer = words[i + 1] or 0
            elif words[i] == _EXTRA_SIZE:
                size = ctypes.cast(words[i + 1], ctypes.POINTER(ctypes.c_size_t))[0]
            i += 2
        if buffer and size:
            return (ctypes.string_at(buffer, size),)
    return ()


def driver_version() -> str:
    """Version of the installed driver ("580.65.06"), or the CUDA version it supports if NVML is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    except Exception:
        value = int(call(driver.cuDriverGetVersion(), "cuDriverGetVersion"))
        return f"CUDA {value // 1000}.{value % 1000 // 10}"
