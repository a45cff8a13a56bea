"""The models' own operators, launched for real up to the driver: what the PTX of their kernels says of every tensor.

Operators are found in the registry and called by the tiny models with their bodies for the GPU. Triton compiles
each launch for Hopper; the launch itself becomes a fabricated graph node with the parameters that it would have.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytest.importorskip("cuda.bindings")

from test_hw_workloads_gpt_oss import tiny as tiny_gpt_oss  # noqa: E402
from test_hw_workloads_mamba2 import tiny as tiny_mamba2  # noqa: E402

from hw.capture import driver, recorder  # noqa: E402
from hw.capture.assemble import unit_accesses  # noqa: E402
from hw.capture.buffers import BufferTable  # noqa: E402
from hw.capture.ptx_evidence import Compiled  # noqa: E402
from hw.workloads.base import NamedTensor, UnitSpec  # noqa: E402
from tesserasim.deps.ptx.parse import parse  # noqa: E402
from tesserasim.trace.model import Access, Buffer  # noqa: E402

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.uint8: "*u8",
            torch.int64: "*i64", torch.float16: "*fp16"}  # fmt: skip


def compile_launch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, driver.Node]:
    """(compiled kernel, graph node) of a launch, specialised as Triton does."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    given = dict(zip(function.arg_names, args, strict=False)) | kwargs
    signature, constants, data, aligned = {}, {}, [], {}
    for i, p in enumerate(function.params):
        value = given[p.name]
        if p.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[p.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[p.name] = POINTERS[value.dtype]
            data.append(struct.pack("<Q", value.data_ptr()))
            if value.data_ptr() % 16 == 0:
                aligned[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[p.name] = "i32"
            data.append(struct.pack("<i", value))
        else:
            signature[p.name] = "fp32"
            data.append(struct.pack("<f", value))
    options = {k: kwargs[k] for k in ("num_warps", "num_stages", "debug") if k in kwargs}
    source = ASTSource(function, signature, constants, aligned)
    kernel = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    entry = parse(kernel.asm["ptx"]).entries[0]
    data += [bytes(p.nbytes) for p in entry.params[len(data) :]]  # scratch memory: null
    return kernel, driver.Node("kernel", entry.name, params=tuple(data))


@dataclass
class Machine:
    """Stands for the GPU: launches become nodes."""

    nodes: list[driver.Node] = field(default_factory=list)

    def run(self, function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel, node = compile_launch(function, args, kwargs)
        self.nodes.append(node)
        return kernel


def _cpu_tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _cpu_tensors(v)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    from torch._library.custom_ops import OPDEFS

    from hw.workloads import moe, sinks, ssm  # noqa: F401  (they register their operators)

    found = Machine()
    jit = triton.runtime.jit.JITFunction
    monkeypatch.setattr(jit, "run", lambda self, *a, **k: found.run(self, *a, **k))
    monkeypatch.setattr(driver, "node_count", lambda _graph: len(found.nodes))
    monkeypatch.setattr(recorder, "_tensors", _cpu_tensors)
    for name, op in OPDEFS.items():
        if name.startswith("tesserasim::"):
            monkeypatch.setitem(op._backend_fns, "cpu", op._backend_fns["cuda"])
    return found


@dataclass
class Recorded:
    calls: list[recorder.Call]
    table: BufferTable
    rows: list[list[Access]]
    buffers: list[Buffer]
    warnings: list[str]

    def modes(self, call: recorder.Call, argument: recorder.Argument) -> set[str]:
        """Modes of the accesses of a call's kernels to the buffer of one tensor."""
        buffer = self.table.known(argument)
        return {a.mode for row in self.rows[call.first : call.last] for a in row if a.buffer == buffer}


def record(machine: Machine, named: Any, unit: UnitSpec, step: Any) -> Recorded:
    """Record one step. All addresses lie in one allocator segment."""
    seen = recorder.Recorder()
    seen._graph = object()
    with recorder._installed(seen):
        step()
    table = BufferTable(named, unit)
    rows, buffers, warnings = unit_accesses(seen.calls, machine.nodes, table, [(0, 1 << 56)])
    return Recorded(seen.calls, table, rows, buffers, warnings)


def operators() -> set[str]:
    from torch._library.custom_ops import OPDEFS

    return {name.removeprefix("tesserasim::") for name in OPDEFS if name.startswith("tesserasim::")}


MODELS = {"gpt-oss": tiny_gpt_oss, "mamba-2": tiny_mamba2}
PLACES = [(name, batch, tokens) for name in MODELS for batch, tokens in ((2, 24), (2, 1), (1, 1))]
CALLED: set[str] = set()


@pytest.mark.parametrize(("name", "batch", "tokens"), PLACES)
def test_ptx_and_schema_of_every_operator_agree(machine: Machine, name: str, batch: int, tokens: int) -> None:
    """A schema's R is R by PTX, its results are written, what it mutates is written too; no pointer is left over.

    Mutations tried: `_modes` pairs names with the parameter before; `mutates_args=()` of `ssm_scan`.
    """
    model = MODELS[name]()
    unit = UnitSpec("prefill" if tokens > 1 else "decode", "prefill", batch, tokens, tokens if tokens > 1 else 9)
    found = record(machine, model.named_tensors(), unit, model.prepare(unit))
    assert found.warnings == [] and found.calls
    for call in found.calls:
        assert call.door == "aten" and len(call.compiled) == call.last - call.first
        assert {a.evidence for row in found.rows[call.first : call.last] for a in row} == {"ptx"}
        written = {found.table.known(a) for a in call.arguments if "W" in a.mode}
        for a in call.arguments:
            modes = found.modes(call, a)
            if found.table.known(a) in written:
                assert "W" in "".join(modes), (call.op, a.name)
            else:
                assert modes == {"R"}, (call.op, a.name)
        CALLED.add(call.op)


def test_every_operator_has_been_called(machine: Machine) -> None:
    """What the test above did not reach is not known to be right."""
    for name, batch, tokens in PLACES if not CALLED else []:
        machine.nodes.clear()
        test_ptx_and_schema_of_every_operator_agree(machine, name, batch, tokens)
    assert operators() == CALLED


@triton.jit
def _double_into(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count) * 2, mask=at < count)


@torch.library.custom_op("accesses_test::fourfold", mutates_args=())
def fourfold(x: torch.Tensor) -> torch.Tensor:
    """Through memory of its own."""
    between, out = torch.empty_like(x), torch.empty_like(x)
    _double_into[(1,)](x, between, 64, BLOCK=64)
    _double_into[(1,)](between, out, 64, BLOCK=64)
    return out


def test_kernels_of_one_operator_go_through_its_workspace(machine: Machine) -> None:
    """The first writes memory that no argument explains, the second reads it.

    Mutation tried: `unexplained` without PTX: RW by both.
    """
    x = torch.ones(64)
    found = record(machine, [], UnitSpec("step", "other", 1), lambda: fourfold(x))
    assert [(c.op, c.last - c.first) for c in found.calls] == [("fourfold", 2)]
    private = [{a.mode for a in row if found.buffers[a.buffer].role == "workspace"} for row in found.rows]
    assert private == [{"W"}, {"R"}]
    assert [found.modes(found.calls[0], a) for a in found.calls[0].arguments] == [{"R"}, {"W"}]


@pytest.mark.parametrize("with_ptx", [True, False])
def test_a_kernel_that_a_model_launches_itself(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, with_ptx: bool
) -> None:
    """PTX says what its arguments mean; without PTX they are all RW. What it made is read as its value either way.

    Mutations tried: `jit` calls take the schema's word; `_begins` never: the result is an input of the unit.
    """
    x, y, z = torch.ones(64), torch.empty(64), torch.empty(64)
    if not with_ptx:
        monkeypatch.setattr(recorder, "text_of", lambda _kernel: "")

    def step() -> None:
        _double_into[(1,)](x, y, 64, BLOCK=64)
        _double_into[(1,)](y, target=z, count=64, BLOCK=64)

    found = record(machine, [], UnitSpec("step", "other", 1), step)
    assert [(c.op, c.door, [a.name for a in c.arguments]) for c in found.calls] == 2 * [
        ("_double_into", "jit", ["source", "target"])
    ]
    first, second = ([(a.mode, a.evidence, a.covers) for a in row] for row in found.rows)
    if with_ptx:
        assert sorted(first) == sorted(second) == [("R", "ptx", False), ("W", "ptx", False)]
        assert [b.role for b in found.buffers] == ["input", "activation", "activation"]
    else:
        assert first == second == [("RW", "params", False)] * 2
    assert len({a.buffer for row in found.rows for a in row}) == 3


@triton.jit
def triton_poi_fused_index_copy_0(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row of the cache at a position from memory, checked as Inductor checks indices."""
    at = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    row = tl.broadcast_to(tl.load(in_ptr0 + 0), [XBLOCK])
    tl.device_assert((row >= 0) & (row < 32), "index out of bounds")
    tl.store(out_ptr0 + (at % 16 + 16 * row + 512 * (at // 16)), tl.load(in_ptr1 + at, at < xnumel), at < xnumel)


def test_an_append_as_inductor_writes_it(machine: Machine) -> None:
    """Names say RW; PTX with its assertion stays within them and shows no read: new bytes alone, nothing unknown.

    Mutation tried: `by_ptx` left out of `_append`, with an operator that is called otherwise.
    """
    at, new, cache = torch.zeros(1, dtype=torch.int64), torch.ones(64), torch.zeros(4, 32, 16)
    launch = {"grid": (1,), "warmup": False, "XBLOCK": 64, "debug": True}
    kernel = machine.run(triton_poi_fused_index_copy_0, at, new, cache, 64, **launch)
    assert "__assertfail" in kernel.asm["ptx"]
    modes = zip(("in_ptr0", "in_ptr1", "out_ptr0"), (at, new, cache), ("R", "R", "RW"), strict=True)
    arguments = [recorder.argument(n, t, m) for n, t, m in modes]
    call = recorder.Call("m", "fused_copy", "triton", 0, 1, arguments, {}, [Compiled(0, 1, kernel.asm["ptx"])])
    unit = UnitSpec("decode", "decode", 4, 1, 32)
    table = BufferTable([NamedTensor("kv", cache, "state", bytes_per_token=64)], unit)
    rows, buffers, warnings = unit_accesses([call], machine.nodes, table, [(0, 1 << 56)])
    assert warnings == []
    assert [(buffers[a.buffer].name, a.mode, a.nbytes, a.evidence) for a in rows[0]] == [
        ("m@0:in_ptr0", "R", 8, "schema"), ("m@0:in_ptr1", "R", 256, "schema"), ("kv", "W", 4 * 64, "schema")
    ]  # fmt: skip
