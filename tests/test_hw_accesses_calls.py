"""Fabricated calls and graph nodes: what becomes of their pointers."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")
from hw.capture.assemble import unit_accesses
from hw.capture.buffers import BufferTable
from hw.capture.driver import Node
from hw.capture.ptx_evidence import Compiled, text_of, tuned_text
from hw.capture.recorder import Argument, Call
from hw.workloads.base import NamedTensor, UnitSpec
from tesserasim.deps.graph import Edge, unit_flow
from tesserasim.trace.model import Access, Buffer, Kernel, Trace, TraceMeta

pytestmark = pytest.mark.quick

UNIT = UnitSpec("decode", "decode", 4, 1, 16)
POOL = (0x10000000, 0x10100000)
LIBRARY = (0x30000000, 0x30100000)
A, B, C, D = (POOL[0] + i * 0x1000 for i in range(4))
W = LIBRARY[0] + 0x100
KV = 0x50000000


def tensor(name: str, mode: str, at: int, nbytes: int = 256, fresh: bool = False, **more: Any) -> Argument:
    return Argument(name, mode, at, nbytes, nbytes, at, nbytes, more.pop("allocation", at), (nbytes,), "uint8", fresh)


def result(name: str, at: int, **more: Any) -> Argument:
    return tensor(name, "W", at, fresh=True, **more)


def kernel(name: str, *pointers: int) -> Node:
    return Node("kernel", name, params=tuple(struct.pack("<Q", p) for p in pointers))


def ptx(name: str, body: str, pointers: int) -> str:
    parameters = ", ".join(f".param .u64 p{i}" for i in range(pointers))
    loads = "".join(f"ld.param.u64 %rd{i}, [p{i}];\n" for i in range(pointers))
    return (
        f".version 8.4\n.target sm_90\n.address_size 64\n.visible .entry {name}({parameters}) {{\n"
        f".reg .b64 %rd<9>;\n.reg .b32 %r<9>;\n{loads}{body}\nret;\n}}\n"
    )


def unit(calls: list[Call], nodes: list[Node], named: list[NamedTensor] | None = None) -> tuple[Trace, list[str]]:
    """The trace of the calls, and the warnings of its accesses."""
    table = BufferTable(named or [], UNIT)
    rows, buffers, warnings = unit_accesses(calls, nodes, table, sorted([POOL, LIBRARY]))
    kernels = tuple(
        Kernel(i, nodes[i].name, f"s{n}", accesses=tuple(rows[i]))
        for n, c in enumerate(calls)
        for i in range(c.first, c.last)
    )
    trace = Trace(TraceMeta("captured", "m", UNIT.as_dict(), "H200"), kernels, tuple(buffers))
    trace.validate()
    return trace, warnings


def of(trace: Trace, k: int) -> dict[str, Access]:
    """Accesses of a kernel by buffer name."""
    return {trace.buffers[a.buffer].name: a for a in trace.kernels[k].accesses}


def buffer(trace: Trace, name: str) -> Buffer:
    return next(b for b in trace.buffers if b.name == name)


def test_inductor_names_checked_against_ptx() -> None:
    """A kernel that stores through `in_ptr0`: both modes are kept, with a warning; one that agrees is `schema`.

    Mutation tried: `compiled` not given to `pointer_modes`.
    """
    call = Call("m", "fused_add", "triton", 0, 1, [tensor("in_ptr0", "R", A), result("out_ptr0", B)])
    node = kernel("k", A, B)
    good = ptx("k", "ld.global.u32 %r1, [%rd0];\nst.global.u32 [%rd1], %r1;", 2)
    bad = ptx("k", "st.global.u32 [%rd0], %r1;\nst.global.u32 [%rd1], %r1;", 2)
    for text, mode, evidence, complaints in ((good, "R", "schema", 0), (bad, "RW", "ptx", 1), ("", "R", "schema", 0)):
        trace, warnings = unit([replace(call, compiled=[Compiled(0, 1, text)])], [node])
        access = of(trace, 0)["m@0:in_ptr0"]
        assert (access.mode, access.evidence, len(warnings)) == (mode, evidence, complaints)
        assert of(trace, 0)["m@0:out_ptr0"].covers


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("ld.global.u32 %r1, [%rd1];\nst.global.u32 [%rd1], %r1;", "of k may read out_ptr0, declared W; both are kept"),
        ("st.global.u32 [%rd0], %r1;\nst.global.u32 [%rd1], %r1;", "of k may write in_ptr0, declared R; both are kept"),
        ("call.uni far, (%rd0);\nst.global.u32 [%rd1], %r1;", "of k gives up on in_ptr0, declared R; RW of unknown"),
    ],
)
def test_a_warning_says_what_was_not_declared(body: str, words: str) -> None:
    """Mutation: it says what the access does in all: `may write` of what is declared W."""
    call = Call("m", "fused_add", "triton", 0, 1, [tensor("in_ptr0", "R", A), result("out_ptr0", B)])
    text = ptx("k", body, 2)
    _, warnings = unit([replace(call, compiled=[Compiled(0, 1, text)])], [kernel("k", A, B)])
    assert words in warnings[0]


@pytest.mark.parametrize("change", ["name", "size", "range", "malformed"])
def test_ptx_that_does_not_fit_is_no_evidence(change: str) -> None:
    """The variant that ran has the node's name and parameters. Mutations tried: sizes, or names, not compared."""
    text = ptx("other" if change == "name" else "k", "st.global.u32 [%rd0], %r1;", 2)
    if change == "size":
        text = text.replace(".param .u64 p1", ".param .u32 p1").replace("ld.param.u64 %rd1, [p1];", "")
    if change == "malformed":
        text = text[:-30]
    compiled = [Compiled(1, 2, text) if change == "range" else Compiled(0, 1, text)]
    call = Call("m", "fused_add", "triton", 0, 1, [tensor("in_ptr0", "R", A), result("out_ptr0", B)], {}, compiled)
    trace, warnings = unit([call], [kernel("k", A, B)])
    assert of(trace, 0)["m@0:in_ptr0"].mode == "R" and not warnings


def test_a_kernel_that_reaches_further_is_unknown_and_grouped() -> None:
    """A pointer loaded from memory may lead anywhere. Mutation tried: `everything` ignored."""
    text = ptx("k", "ld.global.u64 %rd3, [%rd0];\nst.global.u32 [%rd3], %r1;", 2)
    calls = [
        Call("m", "mm", "extern", 0, 1, [tensor("arg0", "R", A), result("out0", B)]),
        Call("m", "own", "aten", 1, 2, [tensor("x", "R", B), result("result0", C)], {}, [Compiled(1, 2, text)]),
        Call("m", "mm", "extern", 2, 3, [tensor("arg0", "R", C), result("out0", D)]),
    ]
    trace, warnings = unit(calls, [kernel("g", A, B), kernel("k", B, C), kernel("g", C, D)])
    assert {a.evidence for a in trace.kernels[1].accesses} == {"unknown"}
    assert unit_flow(trace).group_of == (0, 0, 0) and "no parameter names" in warnings[0]


@pytest.mark.parametrize("door", ["jit", "aten"])
def test_an_argument_behind_memory_without_a_name_is_not_dropped(door: str) -> None:
    """The kernel stores the pointer and reads through what it loads. Mutation: no edge from the tensor's writer."""
    text = ptx("k", "st.global.u64 [%rd1], %rd0;\nld.global.u64 %rd3, [%rd1];\nld.global.u32 %r1, [%rd3];", 2)
    calls = [
        Call("m", "mm", "extern", 0, 1, [tensor("arg0", "R", A), result("out0", B)]),
        Call("m", "mm", "extern", 1, 2, [tensor("arg0", "R", A), result("out0", D)]),
        Call("m", "own", door, 2, 3, [tensor("x", "R", B), result("result0", C)], {}, [Compiled(2, 3, text)]),
    ]
    trace, _ = unit(calls, [kernel("g", A, B), kernel("g", A, D), kernel("k", B, C)])
    assert (0, 2) in {(e.src, e.dst) for e in unit_flow(trace).edges}


def test_split_k_shares_a_workspace_outside_the_pool() -> None:
    """GEMM writes partial sums, the reduce reads them: an edge inside the site and none to other sites.

    Mutations tried: one workspace for all sites; the reduce covers the result that the GEMM has begun.
    """
    names = "nvjet_tst_splitK", "splitKreduce_kernel"
    calls = [
        Call("m", "mm", "extern", 2 * i, 2 * i + 2, [tensor("arg0", "R", A), result("out0", out)])
        for i, out in enumerate((B, C))
    ]
    nodes = [kernel(n, W, x) for out in (B, C) for n, x in zip(names, (A, out), strict=True)]
    trace, warnings = unit(calls, nodes)
    assert not warnings
    first, second = of(trace, 0)["m@0:workspace"], of(trace, 1)["m@0:workspace"]
    assert (first.mode, first.evidence, second.mode, second.evidence) == ("W", "library", "RW", "library")
    assert {(e.src, e.dst) for e in unit_flow(trace).edges} == {(0, 1), (2, 3)}


def test_attention_needs_the_set_before_it() -> None:
    """The semaphore in the workspace: set W, attention RW. Mutation tried: sets taken for kernels (RW by params)."""
    call = Call(
        "m", "_scaled_dot_product_cudnn_attention", "aten", 0, 2,
        [tensor("query", "R", A), tensor("key", "R", B), result("result0", C), result("result1", D)],
    )  # fmt: skip
    clear = Node("memset", "", pointers=((W, "W", 16),))
    trace, _ = unit([call], [clear, kernel("cudnn_generated_fort_native_sdpa_sm90", A, B, C, D, W)])
    assert [a.mode for a in trace.kernels[0].accesses] == ["W"]
    assert of(trace, 1)["m@0:workspace"].mode == "RW" and of(trace, 1)["m@0:result1"].mode == "W"
    assert [(e.src, e.dst) for e in unit_flow(trace).edges] == [(0, 1)]


def test_grouped_gemm_reaches_its_tensors_through_memory() -> None:
    """Only the preparation has their addresses. Mutation tried: `hidden` ignored: it reads and writes them."""
    arguments = [tensor("self", "R", A), tensor("mat2", "R", B), result("result0", C)]
    call = Call("m", "_grouped_mm", "aten", 0, 2, arguments)
    names = "_ZN2at4cuda6detail25prepare_grouped_gemm_dataI", "_ZN7cutlass13device_kernelIN4gemm"
    trace, _ = unit([call], [kernel(names[0], A, B, C, W), kernel(names[1], W)])
    assert of(trace, 0).get("m@0:result0") is None
    gemm = of(trace, 1)
    assert {n: a.mode for n, a in gemm.items()} == {
        "m@0:self": "R", "m@0:mat2": "R", "m@0:result0": "W", "m@0:workspace": "R"
    }  # fmt: skip


def test_a_result_that_two_kernels_are_given_flows_from_both() -> None:
    """Nothing known of either: the second reads what the first wrote. Mutation tried: `begun` never set."""
    call = Call("m", "own", "aten", 0, 2, [tensor("x", "R", A), result("result0", B)])
    trace, _ = unit([call], [kernel("a", A, B), kernel("b", A, B)])
    assert [of(trace, k)["m@0:result0"].mode for k in (0, 1)] == ["W", "RW"]
    assert unit_flow(trace).edges == (Edge(0, 1, 256),)


def test_a_kernel_nobody_recorded_keeps_its_readers() -> None:
    """Eager code between recorded calls: RW on values it points to; what it made is read from it, and it is grouped.

    Mutations tried: `at_place` not asked; no strays: the reader takes an input of the unit.
    """
    calls = [
        Call("m", "mm", "extern", 0, 1, [tensor("arg0", "R", A), result("out0", B)]),
        Call("m", "unknown", "none", 1, 2),
        Call("m", "mm", "extern", 2, 3, [tensor("arg0", "R", C), result("out0", D)]),
    ]
    trace, _ = unit(calls, [kernel("g", A, B), kernel("?", B, C), kernel("g", C, D)])
    assert {(e.src, e.dst) for e in unit_flow(trace).edges} == {(0, 1), (1, 2)}
    assert buffer(trace, "m@2:arg0").role == "activation" and buffer(trace, "m@0:arg0").role == "input"
    assert unit_flow(trace).group_of == (0, 0, 0)


def test_a_copy_nobody_recorded_moves_bytes_one_way() -> None:
    calls = [
        Call("m", "mm", "extern", 0, 1, [tensor("arg0", "R", A), result("out0", B)]),
        Call("m", "memcpy", "none", 1, 2),
    ]
    trace, _ = unit(calls, [kernel("g", A, B), Node("memcpy", "", pointers=((B, "R", 256), (C, "W", 256)))])
    assert of(trace, 1)["m@0:out0"].mode == "R"


def test_a_pointer_beside_a_view_reaches_the_rest_of_its_storage() -> None:
    """Mutation tried: a pointer anywhere in the storage of an argument counts as explained by its view."""
    view = Argument("q", "R", A, 64, 64, A, 256, A, (64,), "uint8")
    call = Call("m", "own", "aten", 0, 1, [view, result("result0", B)])
    trace, _ = unit([call], [kernel("k", A, A + 64, B)])
    found = [(a.mode, a.nbytes, a.evidence) for a in trace.kernels[0].accesses if a.buffer == 0]
    assert found == [("R", 64, "schema"), ("RW", 256, "params")]


class Fake:
    """An object with these attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= attributes


def test_the_text_of_the_variant_that_ran(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutations tried: the first of several launchers; Triton's cache not looked into; an error let through."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (tmp_path / "KEY").mkdir()
    (tmp_path / "KEY" / "k.ptx").write_text("cached")
    compiled = Fake(bin=Fake(asm={"ptx": "text"}))
    static = Fake(cache_hash="KEY")
    results = [Fake(compile_meta={"device": 0})]
    assert tuned_text(Fake(launchers=[compiled], compile_results=results)) == "text"
    assert tuned_text(Fake(launchers=[static], compile_results=results)) == "cached"
    assert tuned_text(Fake(launchers=[compiled, compiled], compile_results=results)) == ""
    assert tuned_text(Fake(launchers=[Fake(cache_hash="NONE")], compile_results=results)) == ""
    assert tuned_text(Fake(launchers=[Fake()])) == tuned_text(Fake()) == text_of(None) == ""
    assert text_of(Fake(asm={"ptx": "text"})) == "text"


class Cache:
    """A named tensor at a made-up address."""

    def __init__(self, at: int, nbytes: int) -> None:
        self.at, self.size = at, nbytes

    def untyped_storage(self) -> Cache:
        return self

    def data_ptr(self) -> int:
        return self.at

    def nbytes(self) -> int:
        return self.size


def cache(role: str = "state", bytes_per_token: int = 8) -> list[NamedTensor]:
    fake: Any = Cache(KV, 4096)
    return [NamedTensor("layers.0.kv", fake, role, bytes_per_token)]


APPENDS = [
    # op, door, PTX of the cache's parameter, modes on the cache
    ("fused_index_copy", "triton", None, {"W"}),
    ("fused_index_copy", "triton", "W", {"W"}),
    ("fused_index_copy", "triton", "RW", {"R", "W"}),
    ("attention_and_append", "aten", None, {"R", "W"}),
    ("attention_and_append", "aten", "W", {"W"}),
    ("attention_and_append", "aten", "RW", {"R", "W"}),
]


@pytest.mark.parametrize(("op", "door", "effect", "modes"), APPENDS)
def test_an_append_reads_the_cache_unless_it_is_known_not_to(
    op: str, door: str, effect: str | None, modes: set[str]
) -> None:
    """New bytes only are written. Mutations tried: every RW is an append without a read; PTX not asked."""
    body = {"W": "", "RW": "ld.global.u32 %r1, [%rd1];\n", None: ""}[effect] + "st.global.u32 [%rd1], %r1;"
    compiled = [Compiled(0, 1, ptx("k", body, 2))] if effect else []
    call = Call("m", op, door, 0, 1, [tensor("in_ptr0", "R", A), tensor("kv", "RW", KV, 4096)], {}, compiled)
    trace, _ = unit([call], [kernel("k", A, KV)], cache())
    found = [a for a in trace.kernels[0].accesses if trace.buffers[a.buffer].role == "state"]
    assert {a.mode for a in found} == modes
    assert [a.nbytes for a in found if a.mode == "W"] == [8 * 4]


def test_a_weight_that_is_written_is_state() -> None:
    """Weights never flow, so one that changes must not be called so. Mutation tried: role left as it is."""
    call = Call("m", "copy_", "aten", 0, 1, [tensor("self", "RW", KV, 4096), tensor("src", "R", A)])
    trace, warnings = unit([call], [kernel("k", KV, A)], cache("weight", 0))
    assert buffer(trace, "layers.0.kv").role == "state" and "a weight that a kernel writes" in warnings[0]


def test_storages_of_one_segment_share_a_number() -> None:
    """Blocks overlap in part when the allocator cuts a freed one. Mutation tried: a number for every address."""
    call = Call("m", "mm", "extern", 0, 1, [tensor("arg0", "R", A), result("out0", B)])
    trace, _ = unit([call], [kernel("g", A, B)])
    one, two = (buffer(trace, f"m@0:{n}") for n in ("arg0", "out0"))
    assert one.storage == two.storage and two.storage_offset - one.storage_offset == B - A
