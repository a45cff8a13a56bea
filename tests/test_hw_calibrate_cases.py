"""What `hw calibrate` runs: the operations of the cases on the CPU against plain PyTorch, and the Triton kernels, in
the interpreter against plain PyTorch and compiled for the GPUs that they must run on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from hw.calibrate.cases import balanced_logits, build  # noqa: E402
from hw.calibrate.shapes import Shape, shapes  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]

INTERPRETED = """
import torch
from hw.calibrate import kernels
torch.manual_seed(0)
close = lambda a, b: torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
for m, k in ((1, 32), (3, 128), (5, 2880), (2, 4096)):
    x, y, weight, both = torch.randn(m, k), torch.randn(m, k), torch.randn(k), torch.randn(m, 2 * k)
    close(kernels.rmsnorm(x, weight), torch.nn.functional.rms_norm(x, (k,), weight, 1e-5))
    close(kernels.silu_mul(both), torch.nn.functional.silu(both[:, :k]) * both[:, k:])
    close(kernels.add(x, y), x + y)
    scaled = kernels.scale_matrix(x, torch.tensor([60.0]), torch.int8)
    assert torch.equal(scaled, torch.floor((x * 60).clamp(-127, 127) + 0.5).to(torch.int8))
    half = 16 if k == 32 else 32 if k % 128 else 64
    angle = torch.rand(m, half) * 6
    turn = torch.polar(torch.ones(m, 1, half), angle[:, None])
    pairs = x.view(m, -1, 2, half)
    z = torch.complex(pairs[:, :, 0], pairs[:, :, 1]) * turn
    close(kernels.rope(x, angle.cos(), angle.sin()), torch.stack((z.real, z.imag), 2).view(m, k))
"""


def test_interpreted_kernels() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_compile(capability: int) -> None:
    """Quantising to 8-bit floating point needs Hopper or Ada; older GPUs quantise to integers."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from hw.calibrate import kernels as k

    eight = "*i8" if capability == 80 else "*fp8e4nv"
    todo = [
        (k._scale, f"*bf16 {eight} *fp32 i32", {"INTEGER": capability == 80, "BLOCK": k.BLOCK}),
        (k._rmsnorm, "*bf16 *bf16 *bf16 i32", {"EPSILON": k.EPSILON, "WIDE": 4096}),
        (k._silu_mul, "*bf16 *bf16 i32", {"BLOCK": k.BLOCK}),
        (k._add, "*bf16 *bf16 *bf16 i32", {"BLOCK": k.BLOCK}),
        (k._rope, "*bf16 *fp32 *fp32 *bf16 i32", {"HALF": 64, "HEADS": 8}),
    ]  # fmt: skip
    for kernel, kinds, constants in todo:
        plain = [n for n in kernel.arg_names if n not in constants]
        signature = {**dict(zip(plain, kinds.split(), strict=True)), **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(kernel, signature, dict(constants))
        asm = compile(source, target=GPUTarget("cuda", capability, 32)).asm
        assert "st.global" in asm["ptx"] and len(asm["cubin"]) > 0


def case_of(kind: str, dtype: str = "bfloat16", op: str = "", **sizes: int) -> object:
    return build(Shape(kind, dtype, sizes, op), "cpu")


def test_gemm_case() -> None:
    case = case_of("gemm", m=3, n=32, k=64)
    weight = case.make()  # type: ignore[attr-defined]
    assert weight.shape == (32, 64) and case.launch(weight).shape == (3, 32)  # type: ignore[attr-defined]
    assert case.turn_bytes == case.held_bytes == weight.nbytes  # type: ignore[attr-defined]


@pytest.mark.parametrize("q,kv", [(9, 9), (1, 17)])
def test_attention_case(q: int, kv: int) -> None:
    kind = "attention_decode" if q == 1 else "attention_prefill"
    case = case_of(kind, batch=2, seq_q=q, seq_kv=kv, heads=8, kv_heads=2, head_dim=16)
    cache = case.make()  # type: ignore[attr-defined]
    assert case.turn_bytes == sum(x.nbytes for x in cache)  # type: ignore[attr-defined]
    first = case.launch(cache)  # type: ignore[attr-defined]
    cache[0][:, :, -1] = 9.0  # the last query sees the last key, the first query of a prefill does not
    second = case.launch(cache)  # type: ignore[attr-defined]
    assert first.shape == (2, 8, q, 16) and not torch.equal(first[:, :, -1], second[:, :, -1])
    assert q == 1 or torch.equal(first[:, :, 0], second[:, :, 0])


@pytest.mark.parametrize("dtype", ["bfloat16", "w4a16_mxfp4"])
@pytest.mark.parametrize("tokens,tp", [(1, 1), (5, 2), (40, 1)])
def test_moe_case(dtype: str, tokens: int, tp: int) -> None:
    case = case_of(
        "moe", dtype, num_tokens=tokens, hidden_size=64, inter_size=128 * tp, topk=2, num_experts=4, moe_tp_size=tp,
        moe_ep_size=1,
    )  # fmt: skip
    weights = case.make()  # type: ignore[attr-defined]
    held = sum(w.nbytes for w in weights if w is not None)
    assert case.held_bytes == held  # type: ignore[attr-defined]
    assert case.turn_bytes == held * min(2 * tokens, 4) // 4  # type: ignore[attr-defined]
    out = case.launch(weights)  # type: ignore[attr-defined]
    assert out.shape == (tokens, 64) and out.isfinite().all() and out.float().std() > 0


@pytest.mark.parametrize("tokens,experts,k", [(7, 32, 4), (128, 8, 2), (1, 256, 8), (100, 128, 8)])
def test_routing_is_even(tokens: int, experts: int, k: int) -> None:
    from hw.workloads.moe import moe_route

    _, chosen, _, _ = moe_route(balanced_logits(tokens, experts, k, "cpu"), k, 16)
    count = torch.bincount(chosen.flatten(), minlength=experts)
    assert int(count.sum()) == tokens * k and int(count.max() - count.min()) <= 1


def test_every_moe_shape_suits_the_kernels() -> None:
    """Tiles of 64 rows and columns, and experts that are a power of two."""
    for s in (s.sizes for s in shapes() if s.kind == "moe"):
        assert s["hidden_size"] % 64 == s["inter_size"] // s["moe_tp_size"] % 64 == 0
        assert s["num_experts"] & (s["num_experts"] - 1) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_kind_is_timed(tmp_path: Path) -> None:
    """The smallest shape of each kind and data type is measured; cold is not faster than half of warm."""
    from hw.calibrate.timing import measure

    for kind, dtype in sorted({(s.kind, s.dtype) for s in shapes()}):
        shape = min((s for s in shapes() if (s.kind, s.dtype) == (kind, dtype)), key=lambda s: s.work)
        found = measure(build(shape))
        assert 0 < found.warm.low_us <= found.warm.us <= found.warm.high_us and found.kernels
        assert found.cold is None or found.cold.us > 0.5 * found.warm.us
