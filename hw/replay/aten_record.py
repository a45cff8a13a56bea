"""A step of a workload as a list of PyTorch operators: what each is given, what it writes, where its results lie.

The step runs once under a dispatch mode, below autograd and composite operators. Storages are numbered while all of
them are kept alive, so that each number is one value's home; a tensor is a *view*: a storage with sizes, strides
and offset. Operators that only look at a storage in another way need no record of their own, since their results
are such views. What remains are operators that compute: one kernel of a trace each, with accesses by schema.

Storages that are neither named by the workload nor made by the step are constants and lie on every device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten

from hw.errors import HardwareError
from hw.workloads.base import NamedTensor, UnitSpec, Workload
from tesserasim.deps.graph import CARRIED
from tesserasim.trace.model import Access, Buffer, Kernel, Trace, TraceMeta, structure_sha256

#: Operators that replace all of the tensor that they write in place.
_OVERWRITES = ("copy_", "fill_", "zero_")
#: Operators whose result holds nothing yet.
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
#: Types whose values steer addresses; others that are not floats (random seeds of kernels) never do.
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_GEMM = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
_KINDS = (
    ("attention", "attention"), ("moe", "moe"), ("ssm_scan", "ssm_scan"), ("conv", "conv"), ("norm", "norm"),
    ("argmax", "sampling"), ("copy", "copy"), ("clone", "copy"), ("cat", "copy"), ("fill", "memset"),
    ("zero", "memset"), ("sum", "reduction"), ("mean", "reduction"), ("amax", "reduction"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: elements of one storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements

    @property
    def extent(self) -> tuple[int, int]:
        """First byte and end of what it spans."""
        if 0 in self.size:
            return 0, 0
        n = 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (self.offset + n) * self.dtype.itemsize

    @property
    def dense(self) -> bool:
        """Whether every byte of its extent belongs to one of its elements."""
        start, end = self.extent
        distinct = math.prod(n for n, s in zip(self.size, self.stride, strict=True) if s or n < 2)
        return bool(end - start == distinct * self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call. Tensors among the flat arguments `leaves` are views."""

    func: Any
    module: str
    leaves: tuple[Any, ...]
    spec: TreeSpec
    touches: tuple[tuple[View, str], ...]  # R, W (all of the view) or RW; results left out
    fresh: tuple[tuple[int, View], ...]  # (position among the flat results, view) of results in new storages

    @property
    def name(self) -> str:
        return str(self.func._schema.name).split("::")[-1]


@dataclass(slots=True)
class Home:
    """A storage of the recording."""

    name: str
    role: str
    nbytes: int
    dtype: torch.dtype  # of the first tensor seen in it
    device: torch.device
    low: int | None = None  # smallest and largest integer that it held
    high: int | None = None
    named: NamedTensor | None = None

    def saw(self, t: torch.Tensor) -> None:
        """Widen the range of integers by those of a tensor."""
        if t.dtype in INTEGERS and t.numel():
            low, high = int(t.min()), int(t.max())
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)


@dataclass(frozen=True)
class Sample:
    """What new values of a named tensor shall look like: its moments, or its range of integers."""

    view: View
    tensor: torch.Tensor
    mean: float = 0.0
    spread: float = 0.0
    low: int = 0
    high: int = 0
    ramp: bool = False  # positions, one after another: kept as they are


@dataclass(frozen=True)
class Recorded:
    """A step, ready to be run on several devices. `ops[i]` is kernel i of `trace`, `homes[i]` its buffer i."""

    trace: Trace
    ops: tuple[Op, ...]
    homes: tuple[Home, ...]
    constants: dict[int, torch.UntypedStorage]  # weights and other constants, by buffer
    samples: tuple[Sample, ...]  # of inputs, state and outputs
    #: What the step leaves behind: (name, view, tensor) of named tensors that it wrote, then (name, view, position
    #: among its flat results) of what it returned.
    results: tuple[tuple[str, View, torch.Tensor | int], ...]
    step: Callable[[], Any]


@dataclass
class Recorder:
    """The tape. `scope` is what a workload is given, so that every operator knows its module."""

    unit: UnitSpec | None = None
    model: str = "recorded"
    module: str = ""
    ops: list[Op] = field(default_factory=list)
    homes: list[Home] = field(default_factory=list)
    _alive: list[torch.UntypedStorage] = field(default_factory=list)
    _index: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def scope(self, module: str) -> Iterator[None]:
        before, self.module = self.module, module
        try:
            yield
        finally:
            self.module = before

    def view(self, t: torch.Tensor, name: str = "", role: str = "weight", named: NamedTensor | None = None) -> View:
        """A tensor as a view; a storage that is not known yet gets `name` and `role`."""
        if t.layout != torch.strided or t.is_conj() or t.is_neg() or t.is_quantized:
            raise HardwareError(f"{self.module or 'step'}: a tensor that is no plain strided view cannot be replayed")
        storage = t.untyped_storage()
        at = self._index.get(storage._cdata)
        if at is None:
            at = self._index[storage._cdata] = len(self.homes)
            self._alive.append(storage)
            name = name or f"constant#{at}"
            self.homes.append(Home(name, role, storage.nbytes(), t.dtype, t.device, named=named))
            self.homes[at].saw(t)
        return View(at, t.dtype, tuple(t.shape), tuple(t.stride()), t.storage_offset())

    def known(self, t: torch.Tensor) -> bool:
        return t.untyped_storage()._cdata in self._index

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator and note it."""
        flat, spec = tree_flatten((tuple(args), kwargs))
        leaves = tuple(self.view(v) if isinstance(v, torch.Tensor) else v for v in flat)
        touches = tuple(self._touches(func, args, kwargs))
        result = func(*args, **kwargs)
        op = Op(func, self.module, leaves, spec, touches, self._fresh(func, result))
        if op.name == "_local_scalar_dense":
            raise HardwareError(f"{self.module or 'step'}: a value is read on the host; such a step cannot be replayed")
        written = any(mode != "R" for _, mode in touches)
        if (op.fresh or written) and torch.Tag.inplace_view not in func.tags:
            self.ops.append(op)
            for v in (v for v in flat if isinstance(v, torch.Tensor)):
                if written:
                    self.homes[self.view(v).storage].saw(v)
        return result

    def _touches(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[View, str]]:
        name = func._schema.name.split("::")[-1]
        shape_only = name.startswith("new_") or name.endswith("_like")
        for i, a in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(a.name)
            write = a.alias_info is not None and a.alias_info.is_write
            mode = "R" if not write else "W" if a.kwarg_only or name in _OVERWRITES else "RW"
            if mode == "R" and shape_only:
                continue
            for v in tree_flatten(value)[0]:
                if isinstance(v, torch.Tensor):
                    yield self.view(v), mode

    def _fresh(self, func: Any, result: Any) -> tuple[tuple[int, View], ...]:
        name = func._schema.name.split("::")[-1]
        leaves = [(i, t) for i, t in enumerate(tree_flatten(result)[0]) if isinstance(t, torch.Tensor)]
        new = [(i, t) for i, t in leaves if not self.known(t)]
        found = tuple((i, self.view(t, f"{len(self.ops)}:{i}", "activation")) for i, t in new)
        for (_, t), (_, v) in zip(new, found, strict=True):
            if name in EMPTY:
                self.homes[v.storage].low = self.homes[v.storage].high = None
            else:
                self.homes[v.storage].saw(t)
        return found

    def finish(
        self, step: Callable[[], Any], named: Sequence[NamedTensor], samples: Sequence[Sample], returned: Any
    ) -> Recorded:
        """Trace and results of what was recorded."""
        sites = self._sites()
        for op, site in zip(self.ops, sites, strict=True):
            for i, v in op.fresh:
                self.homes[v.storage].name = f"{site}:{i}"
        flat = [(i, t) for i, t in enumerate(tree_flatten(returned)[0]) if isinstance(t, torch.Tensor)]
        for _, t in flat:
            home = self.homes[self.view(t).storage]
            home.role = "output" if home.role == "activation" else home.role
        kernels = tuple(self._kernel(i, op, site) for i, (op, site) in enumerate(zip(self.ops, sites, strict=True)))
        written = {a.buffer for k in kernels for a in k.accesses if a.writes}
        results: list[tuple[str, View, torch.Tensor | int]] = [
            (n.name, self.view(n.tensor), n.tensor) for n in named
            if n.role != "weight" and self.view(n.tensor).storage in written
        ]  # fmt: skip
        results += [(f"result{i}", self.view(t), i) for i, t in flat]
        constants = {i: s for i, s in enumerate(self._alive) if self.homes[i].role == "weight"}
        return Recorded(
            self._trace(kernels), tuple(self.ops), tuple(self.homes), constants, tuple(samples), tuple(results), step
        )

    def _sites(self) -> list[str]:
        count: Counter[str] = Counter()
        found = []
        for op in self.ops:
            base = f"{op.module}/{op.name}" if op.module else op.name
            found.append(f"{base}#{count[base]}")
            count[base] += 1
        return found

    def _kernel(self, i: int, op: Op, site: str) -> Kernel:
        accesses = [self._access(v, mode, site) for v, mode in op.touches if 0 not in v.size]
        # A result has its storage for itself: bytes between its elements are nobody's.
        made = dict.fromkeys(v.storage for _, v in op.fresh if self.homes[v.storage].nbytes)
        accesses += [Access(s, "W", 0, self.homes[s].nbytes, "exact", True, "schema") for s in made]
        phase = self.unit.phase if self.unit else "other"
        kind = "gemm" if op.name in _GEMM else next((kind for word, kind in _KINDS if word in op.name), "elementwise")
        if kind == "attention":
            kind = "attention_decode" if phase == "decode" else "attention_prefill"
        return Kernel(i, op.name, site, kind, op.name, op.module, phase, accesses=tuple(dict.fromkeys(accesses)))

    def _access(self, v: View, mode: str, site: str) -> Access:
        home, (start, end) = self.homes[v.storage], v.extent
        if mode != "R" and home.role == "weight":
            raise HardwareError(f"{site} writes {home.name}, which the workload does not name as state")
        whole = (start, end) == (0, home.nbytes)
        # A part of what outlives the step is never taken for a row of a log: its place would be lost.
        if mode == "W" and v.dense and (whole or home.role not in CARRIED):
            return Access(v.storage, "W", start, end - start, "exact", True, "schema")
        exact = mode == "R" and v.dense
        mode = "R" if mode == "R" else "RW"
        return Access(v.storage, mode, start, end - start, "exact" if exact else "superset", False, "schema")

    def _trace(self, kernels: tuple[Kernel, ...]) -> Trace:
        users: dict[int, list[int]] = {}
        for k in kernels:
            for a in k.accesses:
                users.setdefault(a.buffer, []).append(k.id)
        buffers = []
        for i, h in enumerate(self.homes):
            used, n = users.get(i, [-1]), h.named
            state = (n.bytes_per_token, n.bytes_per_sequence) if n is not None and h.role == "state" else (0, 0)
            buffers.append(Buffer(i, h.name, h.nbytes, h.role, i, 0, used[0], used[-1], *state))
        unit = self.unit.as_dict() if self.unit else {"name": "step", "phase": "other", "batch": 1}
        gpu = self.homes[0].device.type if self.homes else "cpu"
        meta = TraceMeta(
            origin="synthetic", model=self.model, unit=unit, gpu=gpu,
            torch=torch.__version__, structure_sha256=structure_sha256(kernels), source="operators of one step",
        )  # fmt: skip
        trace = Trace(meta, kernels, tuple(buffers))
        trace.validate()
        return trace


class _Mode(TorchDispatchMode):
    def __init__(self, tape: Recorder) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tape.call(func, args, kwargs or {})


def _sample(view: View, t: torch.Tensor) -> Sample:
    if t.dtype == torch.bool:
        return Sample(view, t, high=1)
    if not t.dtype.is_floating_point:
        low, high = int(t.min()), int(t.max())
        ramp = t.numel() > 1 and bool((t.flatten().diff() == 1).all())
        return Sample(view, t, low=low if ramp else min(low, 0), high=high, ramp=ramp)
    mean = float(t.float().mean())
    spread = float(t.float().std()) if t.numel() > 1 else 0.0
    return Sample(view, t, mean, spread or 0.1 * max(1.0, abs(mean)))


def record(step: Callable[[], Any], named_tensors: Iterable[NamedTensor], recorder: Recorder | None = None) -> Recorded:
    """Run `step` once and note its operators. State and inputs are left as the step leaves them.

    `recorder`: one whose `scope` the step opens for its modules. HardwareError for a step that reads values on the
    host, writes what is not named, or uses tensors that are more than strided views.
    """
    tape = recorder or Recorder()
    named = list(named_tensors)
    views = [tape.view(n.tensor, n.name, n.role, n) for n in named]
    pairs = [(v, n.tensor) for v, n in zip(views, named, strict=True) if n.role != "weight" and n.tensor.numel()]
    samples = [_sample(v, t) for v, t in pairs]
    with eager(), _Mode(tape):
        returned = step()
    return tape.finish(step, named, samples, returned)


@contextmanager
def eager() -> Iterator[None]:
    """Compiled functions run operator by operator, without gradients."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


def record_unit(workload: Workload, unit: UnitSpec) -> Recorded:
    """Prepare and record a unit of a workload."""
    recorder = Recorder(unit, workload.model)
    step = workload.prepare(unit)
    before = workload.__dict__.get("scope")
    workload.scope = recorder.scope
    try:
        return record(step, workload.named_tensors(), recorder)
    finally:
        del workload.scope
        if before is not None:
            workload.scope = before
