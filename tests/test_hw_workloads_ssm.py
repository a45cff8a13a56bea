"""Operators of Mamba-2: plain bodies against a recurrence in numpy, Triton bodies against the plain ones.

The Triton interpreter knows no bf16 products: numbers are checked in float32. What the kernels become on a Hopper
GPU is read off their PTX and machine code, which needs no GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hw.workloads import ssm  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]

INTERPRETED = """
import torch
from hw.workloads import ssm, triton_ssm
from hw.workloads.triton_ssm import Tile
torch.manual_seed(0)
close = lambda a, b: torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)
for t, rows, columns in ((1, 1, 64), (2, 4, 32), (3, 16, 64), (21, 4, 32), (5, 4, 64)):
    x, w, bias = torch.randn(2, t, 60)[..., 8:56], torch.randn(4, 48), torch.randn(48)
    for past in (False, True):
        tail = torch.randn(2, 3, 48)
        other = tail.clone()
        want = ssm._conv(x, w, bias, tail, past)
        close(triton_ssm.convolve(x, w, bias, other, past, Tile(rows, columns, 4)), want)
        assert torch.equal(other, tail)
h, p, g, n = 4, 32, 2, 16
for t, chunk, columns in ((1, 16, 32), (2, 16, 16), (16, 16, 32), (37, 16, 16), (40, 32, 32)):
    x, b, c, dt, _ = torch.randn(2, t, h * p + 2 * g * n + h + 3).split((h * p, g * n, g * n, h, 3), dim=-1)
    x, b, c = x.unflatten(-1, (h, p)), b.unflatten(-1, (g, n)), c.unflatten(-1, (g, n))
    inputs = x, dt, torch.randn(h), torch.randn(h), b, c, torch.randn(h)
    for past in (False, True):
        state = torch.randn(2, h, p, n)
        other, stepped = state.clone(), [state.clone(), state.clone()]
        want = ssm._scan(*inputs, state, past)
        close(triton_ssm.prompt(*inputs, other, past, Tile(chunk, columns, 4)), want)
        close(other, state)
    for rows, kept in zip((8, 32), stepped if t == 1 else ()):
        close(triton_ssm.step(*inputs, kept, Tile(rows, 0, 4)), want)
        close(kept, state)
for t in (1, 5):
    y, z, w = torch.randn(3, t, 48), torch.randn(3, t, 100)[..., :48], torch.randn(48)
    close(triton_ssm.gate(y, z, w, 2, 1e-5), ssm.gated_norm(y, z, w, 2, 1e-5))
"""


def inputs(batch: int, t: int, h: int = 4, p: int = 3, g: int = 2, n: int = 5) -> list[torch.Tensor]:
    make = torch.randn
    return [
        make(batch, t, h, p),
        make(batch, t, h),
        make(h),
        make(h),
        make(batch, t, g, n),
        make(batch, t, g, n),
        make(h),
    ]


def recurrence(values: list[torch.Tensor], state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Head by head and token by token in float64."""
    x, dt, bias, a_log, b, c, skip = (v.double().numpy() for v in values)
    (batch, t, heads, p), each = x.shape, x.shape[2] // b.shape[2]
    y, state = np.zeros((batch, t, heads, p)), state.astype(np.float64)
    for i in range(batch):
        for h in range(heads):
            s = state[i, h]
            for k in range(t):
                d = np.log1p(np.exp(dt[i, k, h] + bias[h]))
                s = s * np.exp(-d * np.exp(a_log[h])) + d * np.outer(x[i, k, h], b[i, k, h // each])
                y[i, k, h] = s @ c[i, k, h // each] + skip[h] * x[i, k, h]
            state[i, h] = s
    return y.reshape(batch, t, -1), state


@pytest.mark.quick
def test_scan_equals_the_recurrence() -> None:
    torch.manual_seed(0)
    for t in (1, 7):
        values, first = inputs(2, t), torch.randn(2, 4, 3, 5)
        for start, scan in ((first, ssm.scan), (torch.zeros_like(first), ssm.scan_first)):
            state = first.clone()
            y = scan(*values, state=state)
            want_y, want_state = recurrence(values, start.numpy())
            np.testing.assert_allclose(y.numpy(), want_y, atol=2e-5, rtol=2e-5)
            np.testing.assert_allclose(state.numpy(), want_state, atol=2e-5, rtol=2e-5)


@pytest.mark.quick
@pytest.mark.parametrize("t", [1, 2, 3, 9])
def test_convolution_equals_the_library(t: int) -> None:
    x, weight, bias, before = torch.randn(2, t, 6), torch.randn(4, 6), torch.randn(6), torch.randn(2, 3, 6)
    for past, conv in ((before, ssm.conv), (torch.zeros_like(before), ssm.conv_first)):
        tail = before.clone()
        y = conv(x, weight, bias, tail)
        whole = torch.cat((past, x), dim=1)
        want = torch.nn.functional.conv1d(whole.transpose(1, 2), weight.T[:, None], bias, groups=6).transpose(1, 2)
        torch.testing.assert_close(y, torch.nn.functional.silu(want))
        assert torch.equal(tail, whole[:, -3:])


def test_interpreted_kernels_equal_the_plain_bodies() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def compiled(name: str, kinds: str, constants: dict[str, object], warps: int, stages: int = 1) -> str:
    """PTX for compute capability 9.0, pointers and integers divisible by 16; `kinds`: of the plain arguments.

    Fails if registers are spilled.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hw.workloads import triton_ssm

    kernel = getattr(triton_ssm, name)
    kind = dict(zip([n for n in kernel.arg_names if n not in constants], kinds.split(), strict=True))
    places = {n: i for i, n in enumerate(kernel.arg_names)}
    aligned = {(places[n],): [["tt.divisibility", 16]] for n, k in kind.items() if k.startswith("*") or k == "i32"}
    values = {(places[n],): v for n, v in constants.items()}
    source = ASTSource(kernel, {n: kind.get(n, "constexpr") for n in places}, values, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    found = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if found.exists():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(asm["cubin"])
            file.flush()
            usage = subprocess.run([found, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        assert " STACK:0 " in usage and " LOCAL:0 " in usage, usage  # registers suffice
    return str(asm["ptx"])


BF16 = " ".join(["*bf16"] * 7)


def test_prompt_uses_tensor_cores_and_no_local_memory() -> None:
    rows = {"x_row": 10240, "dt_row": 18560, "b_row": 10240, "c_row": 10240}
    shape = {"heads": 128, "each": 16, "P": 64, "N": 128, "L": 64, "BP": 32}
    for past in (False, True):
        ptx = compiled("ssm_chunks", f"{BF16} *fp32 *bf16 i32 i32 i32 i32 i32", {**rows, **shape, "PAST": past}, 4, 3)
        assert "wgmma.mma_async" in ptx and "cp.async" in ptx
        assert re.search(r"st\.global(\.\w+)*\.v4", ptx)


def test_step_moves_16_bytes_at_a_time() -> None:
    shape = {"P": 64, "N": 128, "BP": 8}
    ptx = compiled("ssm_step", f"{BF16} *fp32 *bf16 i32 i32 i32 i32 i32 i32", shape, 2)
    loads = [line for line in ptx.splitlines() if "ld.global" in line]
    assert sum(".v4.b32" in line for line in loads) >= 4
    assert sum(bool(re.search(r"st\.global(\.\w+)*\.v4", line)) for line in ptx.splitlines()) >= 4
    for tokens, past in ((1, True), (8, False), (8, True)):
        shape = {"W": 4, "PAST": past, "BT": tokens, "BC": 256}
        ptx = compiled("ssm_conv", "*bf16 *bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32", shape, 1)
        accesses = re.findall(r"(?:ld|st)\.global\S*", ptx)
        assert all(".v4.b32" in a for a in accesses)
        # Inputs, weights, bias and outputs once each; the tail is read for the result and to be moved.
        assert len(accesses) == 2 * tokens + 3 + 5 + 6 + (6 if past else 0)


@pytest.mark.quick
def test_schemas_say_what_is_kept() -> None:
    """State from nothing is an output alone; state that goes on is read and written."""
    written = {}
    for name in ("ssm_conv", "ssm_conv_first", "ssm_scan", "ssm_scan_first", "ssm_gated_rms_norm"):
        schema = getattr(torch.ops.tesserasim, name).default._schema
        written[name] = [(a.name, a.kwarg_only) for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == {
        "ssm_conv": [("tail", False)], "ssm_conv_first": [("tail", True)], "ssm_scan": [("state", False)],
        "ssm_scan_first": [("state", True)], "ssm_gated_rms_norm": [],
    }  # fmt: skip


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs a C++ compiler on the CPU")
@pytest.mark.parametrize("t,past", [(6, False), (6, True), (1, True)])
def test_a_layer_is_six_launches_without_copies(t: int, past: bool) -> None:
    from torch._inductor.utils import run_and_get_code

    from hw.workloads.mamba2 import Mamba2, Mamba2Config, block

    cfg = Mamba2Config(layers=1, hidden=64, heads=8, head_dim=16, state=16, groups=2, vocab=64)
    w = {k.removeprefix("layers.0."): v for k, v in Mamba2("cpu", cfg, compiled=False).weights.items()}
    w = {k: v for k, v in w.items() if "." not in k}
    state = [torch.randn(2, cfg.conv - 1, cfg.conv_width).bfloat16(), torch.randn(2, 8, 16, 16)]
    x, residual = (torch.randn(2, t, 64).bfloat16() for _ in range(2))
    compile_ = torch.compile(block, fullgraph=True, dynamic=False)
    with torch.no_grad():
        _, code = run_and_get_code(compile_, x, residual, *state, w, cfg, past)
    launches = re.findall(
        r"^ +(?:\w+ = )?(cpp_fused|extern_kernels|torch\.ops\.\w+)", code[0].split("def call")[1], re.M
    )
    assert launches == ["cpp_fused", "extern_kernels", *["torch.ops.tesserasim"] * 3, "extern_kernels"]
