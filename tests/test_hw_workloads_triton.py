"""The Triton kernels of gpt-oss: interpreted on the CPU against the plain bodies, and compiled for Hopper.

The interpreter knows no bf16 products and no inline PTX: numbers are checked in float32, the inline PTX by
executing its instructions here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from hw.workloads import triton_moe  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]

INTERPRETED = """
import torch
from hw.workloads import linear, moe, sinks, triton_linear, triton_moe, triton_sinks
torch.manual_seed(0)
close = lambda a, b: torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)
for t, c, window in ((20, 20, 0), (5, 37, 8), (33, 50, 16), (1, 37, 0), (1, 130, 0), (1, 3, 0)):
    q = torch.randn(2, t, 8, 16).transpose(1, 2)
    k, v = (torch.randn(c, 2, 2, 16).permute(1, 2, 0, 3) for _ in range(2))
    s = torch.randn(8) * 2
    y = triton_sinks.decode(q, k, v, s) if t == 1 else triton_sinks.prefill(q, k, v, s, window)
    close(y, sinks.attention_sinks(q, k, v, s, window))
for t, c, h, kv in ((1, 9, 8, 2), (5, 12, 4, 4), (3, 7, 18, 3)):
    qkv, angle = torch.randn(2, t, (h + 2 * kv) * 16), torch.rand(20, 8)
    position = torch.randperm(c)[:t]
    k, v = torch.randn(c, 2, kv, 16).permute(1, 2, 0, 3), torch.randn(2, kv, c, 16)
    other = k.clone(), v.clone()
    want = sinks.rope_append(qkv, angle.cos(), angle.sin(), position, k, v, h)
    close(triton_sinks.rotate_and_append(qkv, angle.cos(), angle.sin(), position, *other, h), want)
    close(other[0], k)
    assert torch.equal(other[1], v)
for m, n, k, tile in (
    (1, 48, 64, None), (1, 40, 320, None), (1, 4, 100, None), (1, 333, 192, triton_linear.Tile(4, 128, 4)),
    (7, 32, 192, None), (50, 40, 2000, triton_linear.Tile(16, 128, 4)),
):
    x, w, bias = torch.randn(1, m, k), torch.randn(n, k) / k**0.5, torch.randn(n)
    close(triton_linear.few_rows(x, w, bias, tile), linear.linear_few(x, w, bias))
points = (5, 8, 2, 64, 128, 16), (40, 4, 4, 192, 64, 32), (300, 4, 4, 64, 192, 128), (130, 32, 3, 64, 64, 16)
for t, e, k, d, f, block in points:
    logits, x = torch.randn(t, e), torch.randn(t, d)
    want, got = moe.moe_route(logits, k, block), triton_moe.route(logits, k, block)
    used = int((want[3] >= 0).sum()) * block
    close(got[0], want[0])
    assert torch.equal(got[1], want[1]) and torch.equal(got[3], want[3]) and torch.equal(got[2][:used], want[2][:used])
    gain, _, order, owner = want
    for pack in (moe.quantise, lambda w: (w, None)):
        w1, w2 = pack(torch.randn(e, 2 * f, d) / d**0.5), pack(torch.randn(e, d, f) / f**0.5)
        b1, b2 = torch.randn(e, 2 * f), torch.randn(e, d)
        h = moe.moe_up(x, *w1, b1, order, owner, k)
        close(triton_moe.grouped_gemm(x, *w1, b1, order, owner, None, k), h)
        for fewest in (block // 2, block // 4):  # half-empty blocks, and those with a quarter
            variant = triton_moe.Variant(64, 4, 1, fewest=fewest)
            close(triton_moe.grouped_gemm(x, *w1, b1, order, owner, None, k, variant), h)
        y = moe.moe_down(h, *w2, b2, order, owner, gain)
        close(triton_moe.grouped_gemm(h, *w2, b2, order, owner, gain, 1), y)
"""


def test_interpreted_kernels_equal_the_plain_bodies() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]


def compiled(kernel: object, kinds: str, constants: dict[str, object], warps: int, stages: int) -> dict[str, str]:
    """Compile for sm_90. `kinds`: type per plain argument, in order."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    plain = [n for n in kernel.arg_names if n not in constants]  # type: ignore[attr-defined]
    kind = dict(zip(plain, kinds.split(), strict=True))
    places = {n: i for i, n in enumerate(kernel.arg_names)}  # type: ignore[attr-defined]
    signature = {n: kind.get(n, "constexpr") for n in places}
    aligned = {(places[n],): [["tt.divisibility", 16]] for n, k in kind.items() if k.startswith("*") or k == "i32"}
    source = ASTSource(kernel, signature, {(places[n],): v for n, v in constants.items()}, aligned)
    target = GPUTarget("cuda", 90, 32)
    return dict(triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages}).asm)


@pytest.mark.parametrize("rows,gated,packed", [(16, 1, 1), (128, 1, 1), (128, 0, 1), (32, 0, 1), (64, 1, 0)])
def test_grouped_gemm_compiles(rows: int, gated: int, packed: int) -> None:
    """Tensor cores take the weights from registers, and memory is read in 16 bytes a thread, scales in words."""
    from hw.workloads.triton_moe import CHOSEN, moe_gemm

    v = CHOSEN[rows][0 if gated else 1]
    constants = {
        "k": 2880, "PER_ROW": 4 if gated else 1, "GATED": bool(gated), "PACKED": bool(packed), "ASM": True,
        "LIMIT": 7.0, "ALPHA": 1.702, "BM": rows, "BN": v.columns, "STEP": v.step, "FEWEST": v.fewest,
    }  # fmt: skip
    weight = "*i32" if packed else "*bf16"
    kinds = f"*bf16 {weight} {weight} *bf16 *i32 *i32 *fp32 *bf16 i32 i32"
    asm = compiled(moe_gemm, kinds, constants, v.warps, v.stages)
    assert "wgmma.mma_async" in asm["ptx"] and "cp.async" in asm["ptx"]
    assert ("mul.rn.bf16x2" in asm["ptx"]) == bool(packed)
    assert not re.search(r"ld\.(global|shared)\S*\.[bsu]8\b", asm["ptx"])
    sizes = set(re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x\w+|\d+)", asm["ptx"]))
    assert {int(x, 0) for x in sizes} == ({4, 16} if packed else {16})
    assert len(asm["cubin"]) > 0


def test_attention_and_routing_compile() -> None:
    from hw.workloads import triton_sinks

    strides = " i32"
    for window in (0, 128):
        asm = compiled(
            triton_sinks.sinks_prefill, "*bf16 *bf16 *bf16 *bf16 *bf16" + 9 * strides + " i32 i32 i32 i32 fp32",
            {"WINDOW": window, "PACK": 8, "BM": 64, "BN": 64, "D": 64}, 4, 3,
        )  # fmt: skip
        assert "wgmma.mma_async" in asm["ptx"]
    asm = compiled(
        triton_sinks.rope_kv_index_copy, "*bf16 *fp32 *fp32 *i64 *bf16 *bf16 *bf16" + 6 * strides + " i32 i32 i32",
        {"H": 16, "D": 64}, 2, 3,
    )  # fmt: skip
    assert re.search(r"st\.global(\.\w+)*\.v4", asm["ptx"])
    compiled(
        triton_sinks.sinks_decode, "*bf16 *bf16 *bf16 *bf16 *fp32 *fp32" + 8 * strides + " i32 i32 i32 fp32",
        {"GROUP": 8, "BN": 64, "D": 64, "WHOLE": False}, 4, 3,
    )  # fmt: skip
    compiled(triton_sinks.sinks_combine, "*fp32 *fp32 *bf16 *bf16 i32 i32", {"GROUP": 8, "SP": 64, "D": 64}, 4, 3)
    sizes = {"E": 32, "K": 4, "KP": 4, "BT": 64}
    compiled(triton_moe.moe_topk, "*bf16 *fp32 *i32 *i32 i32", sizes, 4, 3)
    few, blocks = {**sizes, "BT": 32}, {"BLOCK": 16, "LP": 64}
    compiled(triton_moe.moe_route_few, "*bf16 *fp32 *i32 *i32 *i32 i32 i32", {**few, **blocks}, 4, 3)
    blocks["BLOCK"] = 128
    compiled(triton_moe.moe_sort, "*i32 *i32 *i32 *i32 i32 i32 i32", {**sizes, **blocks}, 8, 3)


@pytest.mark.parametrize("tokens", [16, 32, 64, 128, 129])
def test_the_analysis_follows_every_address_of_the_routing(tokens: int) -> None:
    """Scattered rows: a layout in which the compiler passes addresses through shared memory hides them."""
    from tesserasim.deps.ptx.analysis import analyse

    sizes, blocks = {"E": 32, "K": 4, "KP": 4}, {"BLOCK": 64 if tokens < 128 else 128, "LP": 64}
    few = {**sizes, **blocks, "BT": tokens}
    text = (
        compiled(triton_moe.moe_route_few, "*bf16 *fp32 *i32 *i32 *i32 i32 i32", few, 4 if tokens < 64 else 8, 3)
        if tokens <= triton_moe.ONE_PROGRAM
        else compiled(triton_moe.moe_sort, "*i32 *i32 *i32 *i32 i32 i32 i32", {**few, "BT": 16}, 4, 3)
    )["ptx"]
    (effects,) = analyse(text).values()
    modes = [effects.modes[f"{effects.entry}_param_{i}"] for i in range(5 if tokens <= 128 else 4)]
    assert "*" not in effects.modes and modes == (["R", *"WWWW"] if tokens <= 128 else [*"RRWW"])


@pytest.mark.quick
def test_the_recorder_names_an_operators_tensors_by_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operator adds nodes through the operator door; weights are read, results fresh.

    The node counter and the test for CUDA tensors are replaced: nothing here needs a GPU.
    """
    pytest.importorskip("cuda.bindings")
    from hw.capture import driver, recorder
    from hw.workloads import moe

    def each_tensor(value: object) -> list[torch.Tensor]:
        return [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, torch.Tensor)]

    count = iter(range(1000))
    monkeypatch.setattr(driver, "node_count", lambda _graph: next(count))
    monkeypatch.setattr(recorder, "_tensors", each_tensor)
    x, logits = torch.randn(3, 64), torch.randn(3, 4)
    (w, s), bias = moe.quantise(torch.randn(4, 128, 64)), torch.randn(4, 128)
    seen = recorder.Recorder()
    seen._graph = object()
    with recorder._installed(seen):
        _, _, order, owner = moe.moe_route(logits, 2, 16)
        moe.moe_up(x, w, s, bias, order, owner, 2)
    calls = {c.op: c for c in seen.calls}
    assert calls["moe_up"].door == "aten"
    modes = {a.name: a.mode for a in calls["moe_up"].arguments}
    reads = dict.fromkeys(("x", "weight", "scale", "bias", "order", "owner"), "R")
    assert modes == {**reads, "result0": "W"}
    assert [a.name for a in calls["moe_route"].arguments if a.mode == "W"] == [f"result{i}" for i in range(4)]
