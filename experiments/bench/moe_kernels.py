"""Variants of the GPU kernels of gpt-oss: their values against plain PyTorch, and their times.

    python experiments/bench/moe_kernels.py [--limit-s 150] [--out FILE.json] [--only gemm,route,linear,attention]

The grouped GEMM runs at the model's size over several layers' weights in turn, so that weights come from memory.
One line per measurement: what, tokens, microseconds, GB/s, TFLOP/s, and the share of the limit max(bytes / copy
bandwidth, FLOPs / matrix rate, shortest kernel). A variant that fails is reported and the others go on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from hw.workloads import moe, sinks, triton_linear, triton_sinks
from hw.workloads.triton_linear import Tile
from hw.workloads.triton_moe import Variant, grouped_gemm, moe_gemm, route

COPY, MATRIX, SHORTEST = 4.3e12, 790e12, 2.5e-6  # measured on an H200: bytes/s, FLOP/s, s
EXPERTS, TOP, WIDTH, LAYERS = 32, 4, 2880, 3
STARTED = time.monotonic()
V = Variant
#: By rows of a block; f: rows of the smallest path for blocks that are half empty.
VARIANTS: dict[int, list[Variant]] = {
    16: [V(64, 4, 4, 3), V(64, 4, 3, 3), V(128, 4, 3, 3)],
    32: [V(64, 4, 3, 3, 16), V(128, 4, 3, 3, 16), V(128, 4, 3, 1, 16)],
    64: [V(128, 4, 4, 1, 16), V(128, 4, 4, 1, 16, 168), V(128, 4, 5, 1, 16, 168), V(128, 4, 6, 1, 16, 168)],
    128: [V(128, 8, 3, 1, 32), V(128, 4, 3, 1, 32), V(128, 4, 4, 1, 32), V(64, 4, 4, 1, 32)],
    256: [V(128, 8, 4, 1, 64), V(128, 8, 3, 1, 64)],
}  # fmt: skip
#: Tokens of a step, and the blocks worth trying.
POINTS = {
    1: (16,), 8: (16,), 32: (16, 32), 128: (32, 64), 256: (64,), 512: (64, 128), 1024: (128,), 2048: (128, 256),
    8192: (256,),
}  # fmt: skip


class Log:
    """Lines on the terminal at once; all results in a file after each."""

    def __init__(self, out: Path | None, limit_s: float) -> None:
        self.out, self.limit_s, self.rows = out, limit_s, list[dict[str, Any]]()

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps(self.rows, indent=1))

    def late(self) -> bool:
        return time.monotonic() - STARTED > self.limit_s


def timed(calls: list[Callable[[], Any]], repeats: int = 3) -> float:
    """Seconds of one call: `calls` as one CUDA graph, best of a few replays."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    best = float("inf")
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3)
    return best / len(calls)


def report(log: Log, what: str, seconds: float, nbytes: float, flops: float, **more: Any) -> None:
    limit = max(nbytes / COPY, flops / MATRIX, SHORTEST)
    log.add(
        what=what, **more, us=seconds * 1e6, gb_s=nbytes / seconds * 1e-9, tflop_s=flops / seconds * 1e-12,
        limit_us=limit * 1e6, of_limit=round(seconds / limit, 3),
    )  # fmt: skip


# Grouped GEMM


def warm(job: tuple[int, bool, Variant]) -> str | None:
    """Compile one kernel into the cache on disk."""
    block, gated, v = job
    try:
        bf16, i32, f32, n = torch.bfloat16, torch.int32, torch.float32, WIDTH * (2 if gated else 1)
        moe_gemm.warmup(
            bf16, i32, i32, bf16, i32, i32, bf16 if gated else f32, bf16, n, 1024, k=WIDTH, PER_ROW=TOP if gated else 1,
            GATED=gated, PACKED=True, ASM=True, LIMIT=moe.LIMIT, ALPHA=moe.ALPHA, BM=block, BN=v.columns, STEP=v.step,
            FEWEST=v.fewest, num_warps=v.warps, num_stages=v.stages, maxnreg=v.registers, grid=(1,),
        )  # fmt: skip
    except Exception as error:
        return f"{block} {gated} {v.name}: {type(error).__name__} {str(error)[:200]}"
    return None


def weights() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per layer: words, scales and bias of the first and of the second layer."""
    made: list[Any] = []
    for _ in range(LAYERS):
        layer: list[torch.Tensor] = []
        for n in (2 * WIDTH, WIDTH):
            words = torch.randint(-(2**31), 2**31, (EXPERTS, n // 64, WIDTH // 64, 128, 4), device="cuda")
            scales = torch.randint(245, 247, (EXPERTS, n // 64, WIDTH // 64, 128), device="cuda", dtype=torch.uint8)
            bias = torch.randn(EXPERTS, n, device="cuda", dtype=torch.bfloat16)
            layer += [words.int(), scales.view(torch.int32), bias]
            del words
        made.append(tuple(layer))
    return made


def reference(x: torch.Tensor, layer: tuple[torch.Tensor, ...], chosen: torch.Tensor, gain: torch.Tensor) -> Any:
    """Both layers in float32 on rounded inputs, every choice by itself: [T * k, F], [T * k, D]."""
    w1, s1, b1, w2, s2, b2 = layer
    flat = chosen.flatten().long()
    up = torch.empty(len(flat), WIDTH, device="cuda", dtype=x.dtype)
    down = torch.empty_like(up)
    for e in range(EXPERTS):
        rows = (flat == e).nonzero().flatten()
        y = x[rows // TOP].float() @ moe.dequantise(w1[e], s1[e]).T + b1[e].float()
        gate, linear = (p.flatten(-2) for p in y.unflatten(-1, (-1, 2, 8)).unbind(-2))
        gate, linear = gate.clamp(max=moe.LIMIT), linear.clamp(-moe.LIMIT, moe.LIMIT)
        up[rows] = ((linear + 1) * gate * torch.sigmoid(moe.ALPHA * gate)).to(x.dtype)
        y = up[rows].float() @ moe.dequantise(w2[e], s2[e]).T + b2[e].float()
        down[rows] = (y * gain.flatten()[rows, None]).to(x.dtype)
    return up, down


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.float() - want.float()).norm() / want.float().norm()).item())


def routed(tokens: int, block: int, seed: int) -> Any:
    logits = torch.randn(tokens, EXPERTS, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    return route(logits.bfloat16(), TOP, block)


def check_gemm(log: Log, layer: tuple[torch.Tensor, ...]) -> set[tuple[int, str]]:
    """(block, variant) whose values are right, and stay the same to the bit when repeated."""
    x = torch.randn(256, WIDTH, device="cuda", dtype=torch.bfloat16)
    gain, chosen, _, _ = routed(256, 16, 0)
    up, down = reference(x, layer, chosen, gain)
    good = set()
    for block, variants in VARIANTS.items():
        _, _, order, owner = routed(256, block, 0)
        for v in variants:
            try:
                twice = [grouped_gemm(x, *layer[:3], order, owner, None, TOP, v) for _ in range(2)]
                again = [grouped_gemm(up, *layer[3:], order, owner, gain, 1, v) for _ in range(2)]
                errors = error_of(twice[0], up), error_of(again[0], down)
                same = torch.equal(*twice) and torch.equal(*again)
            except Exception as error:
                log.add(what="values", block=block, variant=v.name, failed=f"{type(error).__name__} {str(error)[:160]}")
                continue
            right = max(errors) < 1e-2 and same
            log.add(what="values", block=block, variant=v.name, up=errors[0], down=errors[1], same=same, right=right)
            if right:
                good.add((block, v.name))
    return good


def gemm(log: Log) -> None:
    jobs = [(b, gated, v) for b, variants in VARIANTS.items() for v in variants for gated in (True, False)]
    with multiprocessing.get_context("spawn").Pool(min(12, multiprocessing.cpu_count())) as pool:
        for failed in filter(None, pool.imap_unordered(warm, jobs)):
            log.add(what="compile", failed=failed)
    log.add(what="compiled", kernels=len(jobs), s=time.monotonic() - STARTED)
    layers = weights()
    good = check_gemm(log, layers[0])
    for tokens, blocks in POINTS.items():
        best: dict[str, tuple[float, str]] = {}
        for block in blocks:
            for v in VARIANTS[block]:
                if (block, v.name) in good and not log.late():
                    for part, us in time_gemm(log, layers, tokens, block, v):
                        best[part] = min(best.get(part, (1e9, "")), (us, f"{block}:{v.name}"))
        log.add(what="best", tokens=tokens, **{k: f"{name} {us:.1f}us" for k, (us, name) in best.items()})


def time_gemm(log: Log, layers: Any, tokens: int, block: int, v: Variant) -> Iterator[tuple[str, float]]:
    x = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    h = torch.randn(tokens * TOP, WIDTH, device="cuda", dtype=torch.bfloat16)
    routes = [routed(tokens, block, seed) for seed in range(LAYERS)]
    active = sum(int(r[1].unique().numel()) for r in routes) / LAYERS
    choices, used = tokens * TOP, sum(int((r[3] >= 0).sum()) for r in routes) / LAYERS
    for part, n in (("up", 2 * WIDTH), ("down", WIDTH)):
        calls: list[Callable[[], Any]] = []
        for i in range(24 if tokens <= 1024 else 9):
            layer, (gain, _, order, owner) = layers[i % LAYERS], routes[i % LAYERS]
            if part == "up":
                calls.append(partial(grouped_gemm, x, *layer[:3], order, owner, None, TOP, v))
            else:
                calls.append(partial(grouped_gemm, h, *layer[3:], order, owner, gain, 1, v))
        try:
            s = timed(calls)
        except Exception as error:
            log.add(what=part, block=block, variant=v.name, failed=f"{type(error).__name__} {str(error)[:160]}")
            continue
        nbytes = active * n * WIDTH * 0.53125 + (tokens if part == "up" else choices) * WIDTH * 2 + choices * WIDTH * 2
        report(
            log, part, s, nbytes, 2.0 * choices * n * WIDTH, tokens=tokens, block=block, variant=v.name,
            filled=round(choices / (used * block), 3),
        )  # fmt: skip
        yield part, s * 1e6


# Routing, attention


def routing(log: Log) -> None:
    for tokens in (1, 32, 128, 256, 512, 1024, 8192):
        block = moe.block_rows(tokens * TOP, EXPERTS)
        logits = (torch.rand(tokens, EXPERTS, device="cuda").argsort(-1) / 8).bfloat16()  # no two alike
        got, want = route(logits, TOP, block), moe.moe_route(logits.cpu(), TOP, block)
        used = int((want[3] >= 0).sum()) * block
        right = (
            bool((got[0].cpu() - want[0]).abs().max() < 1e-5) and torch.equal(got[1].cpu(), want[1])
            and torch.equal(got[3].cpu(), want[3]) and torch.equal(got[2][:used].cpu(), want[2][:used])
        )  # fmt: skip
        s = timed([partial(route, logits, TOP, block)] * 20)
        report(log, "route", s, logits.numel() * 2.0, 0.0, tokens=tokens, block=block, right=right)


# Linear layers of few rows

ROW = [Tile(1, 4096, 4), Tile(2, 1024, 4), Tile(1, 2048, 8)]
ROWS = [
    Tile(16, 64, 8), Tile(16, 64, 4, 4), Tile(32, 64, 8), Tile(16, 128, 8, 2), Tile(16, 64, 16, 2), Tile(16, 128, 4)
]  # fmt: skip


def linear_layers(log: Log) -> None:
    """Query, key and value; output; router: against the library, several layers' weights in turn."""
    points = [(m, n, k) for n, k in ((5120, WIDTH), (WIDTH, 4096)) for m in (1, 8, 32)]
    for m, n, k in (*points, *((m, EXPERTS, WIDTH) for m in (1, 8, 32, 128, 256, 512, 1024, 2048, 8192))):
        w, bias, x = make(8, n, k) * k**-0.5, make(n), make(m, k)
        want, nbytes = F.linear(x, w[0], bias), 2.0 * (n * k + m * (n + k))
        calls: list[Callable[[], Any]] = [partial(F.linear, x, w[i], bias) for i in range(8)] * 3
        report(log, "linear", timed(calls), nbytes, 2.0 * m * n * k, rows=m, n=n, k=k, variant="library")
        for tile in ROW if m == 1 else ROWS:
            try:
                wrong = error_of(triton_linear.few_rows(x, w[0], bias, tile), want)
                s = timed([partial(triton_linear.few_rows, x, w[i], bias, tile) for i in range(8)] * 3)
            except Exception as error:
                log.add(what="linear", n=n, k=k, failed=f"{type(error).__name__} {str(error)[:160]}")
                continue
            name = f"{tile.columns}x{tile.depth}w{tile.warps}s{tile.stages}"
            report(log, "linear", s, nbytes, 2.0 * m * n * k, rows=m, n=n, k=k, variant=name, error=wrong)


#: Rows (queries times heads) and keys of a tile, warps, stages, registers; and programs of a decode step at a time.
PREFILL = [
    (128, 64, 8, 3, 128), (128, 32, 8, 3, 128), (128, 64, 8, 2, 128), (64, 64, 4, 2, None), (64, 32, 4, 3, 128),
    (64, 64, 4, 3, None), (128, 32, 4, 3, None),
]  # fmt: skip
DECODE = [528, 792, 1056]


def attention(log: Log) -> None:
    """Decode and prefill of 64 heads over 8 KV heads of 64; several caches in turn. A window of 128 names its keys
    alone, as the model does."""
    heads, kv, d, window = 64, 8, 64, 128
    points = [(b, 1, c, 0) for b in (1, 32, 256) for c in (128, 512, 2048, 8192) if b * c <= 2**20]
    points += [(1, t, c, w) for w in (0, window) for t, c in ((256, 256), (512, 512), (1024, 1024), (8192, 8192))]
    for b, t, c, w in points:
        keys = min(c, w + t - 1) if w else c
        copies = max(2, min(8, 2**28 // (b * keys * kv * d * 4)))
        q, s = make(b, t, heads, d).transpose(1, 2), make(heads)
        # the model keeps caches of windowed layers tokens first
        caches = [(make(b, kv, keys, d), make(b, kv, keys, d)) for _ in range(copies)]
        pairs = sum(min(i, w) if w else i for i in range(keys - t + 1, keys + 1))
        nbytes = 4.0 * b * keys * kv * d + 4.0 * b * t * heads * d
        point = {"b": b, "t": t, "c": c, "window": w}
        k, v = caches[0]
        want = sinks.attention_sinks(q[:1, :, -64:].cpu(), k[:1].cpu(), v[:1].cpu(), s.cpu(), w)  # the last queries
        for shape in DECODE if t == 1 else PREFILL:
            if log.late():
                return
            try:
                function, more = (triton_sinks.decode, ()) if t == 1 else (triton_sinks.prefill, (w,))
                calls = [partial(function, q, *x, s, *more, shape) for x in caches] * max(1, 16 // copies)
                wrong = error_of(calls[0]()[:1, -64:].cpu(), want)
                seconds = timed(calls)
            except Exception as error:
                log.add(what="attention", **point, failed=f"{type(error).__name__} {str(error)[:160]}")
                continue
            name = str(shape).replace(" ", "")
            report(log, "attention", seconds, nbytes, 4.0 * b * heads * d * pairs, **point, variant=name, error=wrong)


def make(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--limit-s", type=float, default=150.0, help="start no further measurement after this")
    parser.add_argument("--out", type=Path, help="JSON file of all results")
    parser.add_argument("--only", default="gemm,route,linear,attention", help="parts to run")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    log = Log(arguments.out, arguments.limit_s)
    for part in arguments.only.split(","):
        try:
            {"gemm": gemm, "route": routing, "linear": linear_layers, "attention": attention}[part](log)
        except Exception as error:
            log.add(what=part, failed=f"{type(error).__name__} {str(error)[:300]}")
    print(f"{time.monotonic() - STARTED:.0f} s")


if __name__ == "__main__":
    main()
