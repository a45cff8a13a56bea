"""Which call launched which graph nodes, and which tensors it was given.

While a stream captures, every launch adds nodes to the graph. The recorder wraps the three doors through
which compiled PyTorch code launches work (Inductor's Triton kernels, `extern_kernels`, and plain operators),
reads the node count before and after, and notes the call's tensors with their modes:

* Triton kernels of Inductor: `in_ptr` R, `out_ptr` W, `in_out_ptr` and every mutated argument RW.
* Library calls and operators: by the operator schema; `out=` and fresh results W.
* Triton kernels that a model launches itself: RW, until their PTX says more.

Triton kernels leave the PTX of the variant that ran, also where they run inside an operator.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hw.capture import driver
from hw.capture.ptx_evidence import Compiled, text_of, tuned_text


@dataclass
class Argument:
    """One tensor of a call, as bytes of a storage."""

    name: str
    mode: str  # R | W | RW
    address: int  # of the first element
    nbytes: int  # extent of the view, from its first to its last element
    elements: int  # bytes the view's elements occupy (smaller than nbytes for strided views)
    storage: int
    storage_bytes: int
    allocation: int  # number of the allocation: a storage address may be freed and given out again
    shape: tuple[int, ...]
    dtype: str
    fresh: bool = False  # allocated by this call: a write covers all of it

    @property
    def covers(self) -> bool:
        return self.mode == "W" and self.elements == self.nbytes


@dataclass
class Call:
    """One launch call: `nodes` of the captured graph, in order."""

    module: str
    op: str
    door: str  # triton | extern | aten | jit (a Triton kernel launched by the model itself) | none
    first: int
    last: int  # one past
    arguments: list[Argument] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    compiled: list[Compiled] = field(default_factory=list)  # PTX of the Triton kernels among its nodes


def _view_bytes(t: torch.Tensor) -> tuple[int, int]:
    """(extent, occupied) bytes of a view."""
    if t.numel() == 0:
        return 0, 0
    extent = 1 + sum((n - 1) * abs(s) for n, s in zip(t.shape, t.stride(), strict=True))
    distinct = 1
    for n, s in zip(t.shape, t.stride(), strict=True):
        distinct *= n if s else 1
    return extent * t.element_size(), distinct * t.element_size()


class Allocations:
    """Numbers allocations while they live; asked at the moment of a launch, since later all are freed."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[StorageWeakRef, int]] = {}
        self._count = 0

    def number(self, storage: torch.UntypedStorage) -> int:
        known = self._at.get(storage.data_ptr())
        if known is None or known[0].expired() or known[0].cdata != storage._cdata:
            self._count += 1
            known = self._at[storage.data_ptr()] = (StorageWeakRef(storage), self._count)
        return known[1]


_allocations = Allocations()


def argument(name: str, t: torch.Tensor, mode: str, fresh: bool = False) -> Argument:
    storage = t.untyped_storage()
    extent, occupied = _view_bytes(t)
    return Argument(
        name, mode, t.data_ptr(), extent, occupied, storage.data_ptr(), storage.nbytes(),
        _allocations.number(storage), tuple(t.shape), str(t.dtype).removeprefix("torch."), fresh,
    )  # fmt: skip


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)


class Recorder:
    """Collects `Call`s while installed; `scope` names the part of the model that launches."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.borders: list[tuple[str, int]] = []  # (module, nodes at its start)
        self._module = ""
        self._graph: Any = None
        self._depth = 0
        self._compiled: list[Compiled] = []

    @contextmanager
    def scope(self, module: str) -> Iterator[None]:
        before, self._module = self._module, module
        if self._graph is not None:
            self.borders.append((module, driver.node_count(self._graph)))
        try:
            yield
        finally:
            self._module = before

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Install the wrappers and record into the graph of the stream that is capturing right now."""
        self._graph = driver.capture_graph(torch.cuda.current_stream().cuda_stream)
        if self._graph is None:
            raise RuntimeError("the current stream is not capturing")
        with _installed(self):
            try:
                yield
            finally:
                self._graph = None

    def launch(
        self, door: str, op: str, describe: Callable[[Any], list[Argument]], run: Callable[[], Any],
        ptx: Callable[[Any], str] | None = None, **meta: Any,
    ) -> Any:  # fmt: skip
        """Run a launch; if it added nodes, note it. Nested launches belong to the outermost call.

        `ptx` gives the text of what was launched, from the result of `run`; a nested launch leaves it as well.
        """
        if self._graph is None or (self._depth and ptx is None):
            return run()
        first = driver.node_count(self._graph)
        self._depth += 1
        try:
            result = run()
        finally:
            self._depth -= 1
        last = driver.node_count(self._graph)
        if last > first and ptx is not None:
            self._compiled.append(Compiled(first, last, ptx(result)))
        if last > first and not self._depth:
            inside = [c for c in self._compiled if c.ptx]
            self._compiled = []
            self.calls.append(Call(self._module, op, door, first, last, describe(result), meta, inside))
        return result


@contextmanager
def _installed(recorder: Recorder) -> Iterator[None]:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.select_algorithm import extern_kernels

    run = CachingAutotuner.run
    overload = torch._ops.OpOverload.__call__
    externs = {n: f for n, f in vars(extern_kernels).items() if callable(f) and not n.startswith("_")}

    @functools.wraps(run)
    def triton_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = str((self.inductor_meta or {}).get("kernel_name") or self.fn.__name__)
        return recorder.launch(
            "triton", _triton_op(name), lambda _r: _triton_arguments(self, args), lambda: run(self, *args, **kwargs),
            ptx=lambda _r: tuned_text(self), triton_name=name, mutated=sorted(self.mutated_arg_names or ()),
            generated=_generated(self),
        )  # fmt: skip

    def extern(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return recorder.launch(
                "extern", name, lambda r: _extern_arguments(args, kwargs, r), lambda: f(*args, **kwargs)
            )

        return wrapped

    def operator(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return recorder.launch(
            "aten", self._schema.name.split("::")[-1], lambda r: _schema_arguments(self, args, kwargs, r),
            lambda: overload(self, *args, **kwargs), scalars=_scalars(self, args, kwargs),
        )  # fmt: skip

    jit = _jit_function()
    launch: Callable[..., Any] = jit.run if jit is not None else lambda *_args, **_kwargs: None

    def jit_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("warmup"):
            return launch(self, *args, **kwargs)
        name = str(self.__name__)
        return recorder.launch(
            "jit", name, lambda _r: _jit_arguments(self, args, kwargs), lambda: launch(self, *args, **kwargs),
            ptx=text_of, triton_name=name,
        )  # fmt: skip

    if jit is not None:
        jit.run = functools.wraps(launch)(jit_run)
    CachingAutotuner.run = triton_run
    torch._ops.OpOverload.__call__ = operator
    for name, f in externs.items():
        setattr(extern_kernels, name, extern(name, f))
    try:
        yield
    finally:
        CachingAutotuner.run = run
        if jit is not None:
            jit.run = launch
        torch._ops.OpOverload.__call__ = overload
        for name, f in externs.items():
            setattr(extern_kernels, name, f)


def _jit_function() -> Any:
    """Triton's class of compiled functions; None where Triton is missing."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return None
    return JITFunction


def _generated(tuner: Any) -> bool:
    """Whether Inductor wrote the kernel, so that its argument names mean something; else the model's author did."""
    return getattr(getattr(tuner, "heuristic_type", None), "name", "") != "USER_AUTOTUNE"


def _jit_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Argument]:
    """Tensors of a direct launch, RW: nothing but the kernel's body says what it does with them."""
    given = dict(zip(function.arg_names, args, strict=False)) | kwargs
    found = []
    for name in function.arg_names:
        value = given.get(name)
        value = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value  # tensor descriptors
        found += [argument(name, t, "RW") for t in _tensors(value)]
    return found


def _triton_op(kernel_name: str) -> str:
    """`triton_red_fused_add_mean_mul_3` -> `fused_add_mean_mul`: the origins, which are equal at every batch."""
    name = re.sub(r"^triton_(poi|red|per|tem|for|spl|mm|unk)_", "", kernel_name)
    return re.sub(r"_\d+$", "", name)


def _triton_arguments(tuner: Any, args: tuple[Any, ...]) -> list[Argument]:
    names = list(tuner.fn.arg_names)
    mutated = set(tuner.mutated_arg_names or ())
    found = []
    for name, value in zip(names, args, strict=False):
        if not isinstance(value, torch.Tensor):
            continue
        if name.startswith("in_out_ptr") or (name in mutated and not name.startswith("out_ptr")):
            mode = "RW"
        elif name.startswith("out_ptr"):
            # A mutated out_ptr is a scatter into an existing tensor (index_copy): written in part.
            mode = "RW" if name in mutated else "W"
        else:
            mode = "R"
        found.append(argument(name, value, mode, fresh=mode == "W"))
    return found


def _extern_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[Argument]:
    out = list(_tensors(kwargs.get("out")))
    given = [t for v in (*args, *(v for k, v in kwargs.items() if k != "out")) for t in _tensors(v)]
    written = out or list(_tensors(result))
    return [argument(f"arg{i}", t, "R") for i, t in enumerate(given)] + [
        argument(f"out{i}", t, "W", fresh=True) for i, t in enumerate(written)
    ]


def _scalars(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The numbers a call was given, by argument name."""
    names = [a.name for a in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return {k: v for k, v in given.items() if isinstance(v, (bool, int, float))}


def _schema_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[Argument]:
    found: list[Argument] = []
    storages = set()
    for i, a in enumerate(op._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(a.name)
        written = a.alias_info is not None and a.alias_info.is_write
        for t in _tensors(value):
            out = written and a.kwarg_only
            found.append(argument(a.name, t, "W" if out else "RW" if written else "R", fresh=out))
            storages.add(t.untyped_storage().data_ptr())
    for i, t in enumerate(_tensors(result)):
        if t.untyped_storage().data_ptr() not in storages:
            found.append(argument(f"result{i}", t, "W", fresh=True))
    return found
