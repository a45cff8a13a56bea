"""The table of precedence, row by row, and the rows of library knowledge."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")
from hw.capture.evidence import NAMES, NOWHERE, SCHEMA, Decision, decide
from hw.capture.library import KERNELS, library_kernel
from hw.capture.ptx_evidence import union, within

pytestmark = pytest.mark.quick

COMBINE = next(k for k in KERNELS if k.family == "flash attention combine")
REDUCE = next(k for k in KERNELS if k.family == "split-K reduce")
SPLIT = next(k for k in KERNELS if k.family == "split-K GEMM")
PREPARE = next(k for k in KERNELS if k.family == "grouped GEMM preparation")

ROWS = [
    # row, declared, source, known besides, decision; behind it the mutation of `decide` that it catches
    (1, "RW", SCHEMA, {"node": "W"}, Decision("W", "params")),  # `node` asked after the schema
    (1, None, NOWHERE, {"node": "R"}, Decision("R", "params")),
    (1, "R", NAMES, {"node": "R", "ptx": "RW"}, Decision("R", "params")),  # `node` asked after PTX
    (2, "R", NAMES, {"ptx": "R"}, Decision("R", "schema")),  # evidence `ptx` whenever there is PTX
    (2, "RW", NAMES, {"ptx": "W"}, Decision("RW", "schema")),  # PTX narrows what the names say
    (2, "W", NAMES, {"ptx": "none"}, Decision("W", "schema")),
    (3, "R", NAMES, {"ptx": "W"}, Decision("RW", "ptx", widened=True)),  # PTX wins instead of both
    (3, "W", NAMES, {"ptx": "RW"}, Decision("RW", "ptx", widened=True)),  # `within` compares writes only
    (4, "RW", SCHEMA, {"ptx": "W"}, Decision("W", "ptx")),  # the schema wins over PTX
    (4, "R", SCHEMA, {"ptx": "none"}, Decision("none", "ptx")),
    (4, "W", SCHEMA, {"ptx": "R", "begun": True}, Decision("R", "ptx")),  # `begun` left out of `allowed`
    (5, "R", SCHEMA, {"ptx": "W"}, Decision("RW", "ptx", widened=True)),
    (5, "R", SCHEMA, {"ptx": "W", "begun": True}, Decision("RW", "ptx", widened=True)),  # `begun` allows writes
    (5, "W", SCHEMA, {"ptx": "R"}, Decision("RW", "ptx", widened=True)),  # a result may be read unwritten
    (6, "RW", NOWHERE, {"ptx": "R"}, Decision("R", "ptx")),  # the RW of a direct launch taken for a declaration
    (6, "RW", NOWHERE, {"ptx": "none"}, Decision("none", "ptx")),
    (7, "R", NAMES, {"ptx": "unknown"}, Decision("RW", "params", widened=True, vague=True)),  # unknown is a mode
    (7, "R", SCHEMA, {"ptx": "unknown"}, Decision("RW", "params", widened=True, vague=True)),
    (7, "RW", NOWHERE, {"ptx": "unknown"}, Decision("RW", "params", vague=True)),
    (7, None, NOWHERE, {"ptx": "unknown"}, Decision("RW", "params", vague=True)),
    (8, "R", SCHEMA, {"library": SPLIT}, Decision("R", "library")),  # evidence `schema` beside a known kernel
    (8, "W", SCHEMA, {"library": SPLIT}, Decision("W", "library")),
    (8, "W", SCHEMA, {"library": REDUCE, "begun": True}, Decision("RW", "library")),  # the reduce reads nothing
    (8, "W", SCHEMA, {"library": PREPARE}, Decision("none", "library")),  # it only writes lists of pointers
    (9, "R", SCHEMA, {}, Decision("R", "schema")),
    (9, "W", NAMES, {}, Decision("W", "schema")),
    (9, "W", SCHEMA, {"begun": True}, Decision("RW", "params")),  # a second writer replaces the first
    (10, "RW", NOWHERE, {}, Decision("RW", "params")),
    (10, "R", NOWHERE, {}, Decision("RW", "params")),  # a direct launch declares nothing
    (11, None, NOWHERE, {"ptx": "W"}, Decision("W", "ptx")),  # RW whatever PTX says
    (11, None, NOWHERE, {"ptx": "R", "library": SPLIT}, Decision("R", "ptx")),  # library asked before PTX
    (12, None, NOWHERE, {"library": SPLIT}, Decision("W", "library")),  # the workspace of the GEMM is RW
    (12, None, NOWHERE, {"library": COMBINE}, Decision("R", "library")),
    (12, None, NOWHERE, {"library": REDUCE}, Decision("RW", "library")),  # as the oracle found it
    (13, None, NOWHERE, {}, Decision("RW", "params")),  # nothing known taken for a read
]


@pytest.mark.parametrize(("row", "declared", "source", "known", "want"), ROWS)
def test_precedence(row: int, declared: str | None, source: str, known: dict, want: Decision) -> None:
    assert decide(declared, source, **known) == want


def test_every_row_of_the_table_has_a_test() -> None:
    from hw.capture import evidence

    table = [line.split()[0] for line in (evidence.__doc__ or "").splitlines() if line.strip()[:1].isdigit()]
    assert [str(n) for n in sorted({row for row, *_ in ROWS})] == table


def test_modes_are_sets() -> None:
    """Mutation tried: `union` takes the longer name."""
    modes = ("none", "R", "W", "RW", "unknown")
    for a in modes:
        for b in modes:
            assert within(a, union(a, b)) and within(b, union(a, b))
            assert within(a, b) == (union(a, b) == b)
    assert union("R", "W") == "RW" and not within("R", "W") and not within("unknown", "RW")


NAMED = [
    # function names of the nodes of a call, family of each ("" for none)
    (["nvjet_tst_128x64_64x8_2x1_splitK_TNT", "_ZN8cublasLt19splitKreduce_kernelILi32E"],
     ["split-K GEMM", "split-K reduce"]),
    (["nvjet_tst_128x64_64x8_2x1_v_bz_TNT"], [""]),  # no reduce follows: nothing known of its workspace
    (["memset", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma"], ["", "cuDNN attention"]),
    (["_ZN5flash30flash_fwd_splitkv_kernelI23Flash", "_ZN5flash38flash_fwd_splitkv_combine_kernelI"],
     ["flash attention split", "flash attention combine"]),
    (["_ZN5flash16flash_fwd_kernelI"], ["flash attention"]),
    (["fmha_cutlassF_bf16_aligned_64x64_rf_sm80"], ["memory-efficient attention"]),
    (["_ZN2at4cuda6detail25prepare_grouped_gemm_dataI", "_ZN7cutlass13device_kernelIN4gemm6kernel13GemmUniversal"],
     ["grouped GEMM preparation", "grouped GEMM"]),
    (["_ZN7cutlass13device_kernelIN4gemm6kernel13GemmUniversal"], [""]),
    (["_ZN3cub17DeviceScanInitKernel", "_ZN3cub16DeviceScanKernel"], ["cub initialisation", "cub"]),
    (["triton_poi_fused_add_0"], [""]),
    (["_ZN2at6native29vectorized_elementwise_kernelILi4E"], [""]),
]  # fmt: skip


@pytest.mark.parametrize(("names", "families"), NAMED)
def test_library_kernels_by_name(names: list[str], families: list[str]) -> None:
    """Mutations tried: `followed` or `preceded` not asked; the general row of flash attention first."""
    found = [library_kernel(names, i) for i in range(len(names))]
    assert [f.family if f else "" for f in found] == families
