"""Kernels of Mamba-2 on a GPU: values against the plain bodies, times of every tiling, and whole units.

    PYTHONPATH=. python experiments/bench/ssm_kernels.py [--limit-s 240] [--out FILE.json] [--only values,scan,units]

Times are medians of CUDA graph replays over rotating buffers larger than the L2. `share` is the limit over the time;
the limit is the largest of bytes at 4.3 TB/s, multiply-adds at 790 TFLOP/s, and 2.5 us.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from hw.workloads import ssm, triton_ssm
from hw.workloads.triton_ssm import Tile

H, P, G, N = 128, 64, 8, 128
INNER, CONV = H * P, H * P + 2 * G * N
COPY, FLOPS, FLOOR = 4.3e12, 790e12, 2.5e-6
STEP = [Tile(8, 0, 2), Tile(8, 0, 4), Tile(16, 0, 4), Tile(16, 0, 2), Tile(32, 0, 4), Tile(32, 0, 8), Tile(64, 0, 4),
        Tile(64, 0, 8)]  # fmt: skip
CONV_ONE = [Tile(1, 512, 2), Tile(1, 1024, 4), Tile(1, 2048, 8), Tile(1, 256, 1)]
CONV_MANY = [Tile(4, 256, 1), Tile(8, 256, 1), Tile(16, 256, 1), Tile(32, 256, 1), Tile(8, 512, 2), Tile(8, 128, 1)]
SCAN = [Tile(64, 32, 4, 2), Tile(64, 32, 4, 3), Tile(64, 16, 4, 2), Tile(64, 16, 4, 3), Tile(64, 64, 8, 2),
        Tile(64, 64, 4, 2), Tile(64, 32, 8, 2), Tile(128, 32, 8, 2)]  # fmt: skip
GATE = [Tile(1, 0, 2), Tile(1, 0, 4), Tile(2, 0, 4), Tile(4, 0, 4), Tile(4, 0, 8)]
Result = dict[str, Any]


class Report:
    """Prints and keeps results as they come; `left()` is False when time is up."""

    def __init__(self, out: Path | None, limit: float) -> None:
        self.out, self.limit, self.began = out, limit, time.monotonic()
        self.results: list[Result] = []

    def left(self) -> bool:
        return time.monotonic() - self.began < self.limit

    def add(self, **result: Any) -> None:
        self.results.append(result)
        print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in result.items()), flush=True)
        if self.out:
            self.out.write_text(json.dumps(self.results, indent=1))


def graph_seconds(run: Callable[[], Any], calls: int) -> float:
    """Median seconds per call of `run`, which makes `calls` calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    times = []
    for i in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i > 1:
            times.append(start.elapsed_time(end) * 1e-3 / calls)
    del kept, graph
    return statistics.median(times)


def layer_inputs(batch: int, t: int) -> tuple[Any, ...]:
    """Views as the model makes them: projection [B, T, z | x B C | dt] and convolution output."""
    wide = torch.randn(batch, t, INNER + CONV + H, device="cuda", dtype=torch.bfloat16)
    z, mixed, dt = wide.split([INNER, CONV, H], dim=-1)
    x, b, c = torch.randn(batch, t, CONV, device="cuda", dtype=torch.bfloat16).split([INNER, G * N, G * N], dim=-1)
    scan = (x.unflatten(-1, (H, P)), dt, *heads(), b.unflatten(-1, (G, N)), c.unflatten(-1, (G, N)))
    return z, mixed, (*scan, torch.ones(H, device="cuda", dtype=torch.bfloat16))


def heads() -> tuple[torch.Tensor, torch.Tensor]:
    """Time step bias and logarithm of the decay rate, as the model is initialised."""
    bias = torch.empty(H, device="cuda").uniform_(-6.9, -2.3).bfloat16()
    return bias, torch.empty(H, device="cuda").uniform_(1, 16).log().bfloat16()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def values(report: Report) -> None:
    weight, bias = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((4, CONV), (CONV,)))
    for batch, t, past in ((2, 1, True), (1, 2, True), (1, 200, False), (2, 333, True), (1, 512, False)):
        z, mixed, inputs = layer_inputs(batch, t)
        tail = torch.randn(batch, 3, CONV, device="cuda", dtype=torch.bfloat16)
        state = torch.randn(batch, H, P, N, device="cuda")
        got_tail, got_state = tail.clone(), state.clone()
        want = ssm._conv(mixed, weight, bias, tail, past)
        got = triton_ssm.convolve(mixed, weight, bias, got_tail, past)
        case = f"b{batch} t{t} past={past}"
        report.add(values="conv", case=case, error=error(got, want), tail_equal=bool(torch.equal(tail, got_tail)))
        # The plain body on float32 copies is the truth; on bf16 it rounds the output alone.
        want = ssm._scan(*inputs, state, past)
        if t == 1:
            got = triton_ssm.step(*inputs, got_state)
            report.add(values="step", case=case, error=error(got, want), state_error=error(got_state, state))
        kept = got_state if t > 1 else torch.randn_like(state)
        if t > 1:
            for tile in SCAN:
                try:
                    again = kept.clone()
                    got = triton_ssm.prompt(*inputs, again, past, tile)
                    torch.cuda.synchronize()
                    report.add(values="scan", case=case, tile=str(tuple(tile)), error=error(got, want),
                               state_error=error(again, state))  # fmt: skip
                except Exception as problem:  # a variant that fails is a result
                    report.add(values="scan", case=case, tile=str(tuple(tile)), failed=str(problem)[:300])
        y = want.contiguous()
        scale = torch.randn(INNER, device="cuda", dtype=torch.bfloat16)
        got = triton_ssm.gate(y, z, scale, G, 1e-5)
        report.add(values="gate", case=case, error=error(got, ssm.gated_norm(y, z, scale, G, 1e-5)))


def variants(
    report: Report, name: str, size: str, tiles: list[Tile], make: Callable[[], Any], call: Callable[[Any, Tile], Any],
    moved: int, flops: int,
) -> None:  # fmt: skip
    """Time `call` with every tile on as many inputs from `make` as exceed the L2."""
    if not report.left():
        return
    copies = [make() for _ in range(min(40, max(2, -(-300_000_000 // moved))))]
    limit = max(moved / COPY, flops / FLOPS, FLOOR)

    def warm(tile: Tile) -> str:
        try:
            call(copies[0], tile)
        except Exception as problem:
            return str(problem)[:300] or type(problem).__name__
        return ""

    with ThreadPoolExecutor(8) as pool:
        failed = list(pool.map(warm, tiles))
    torch.cuda.synchronize()
    best: tuple[float, Tile] | None = None
    for tile, problem in zip(tiles, failed, strict=True):
        if problem:
            report.add(kernel=name, size=size, tile=str(tuple(tile)), failed=problem)
            continue
        seconds = graph_seconds(lambda tile=tile: [call(c, tile) for c in copies], len(copies))
        best = min(best or (seconds, tile), (seconds, tile))
        report.add(kernel=name, size=size, tile=str(tuple(tile)), us=seconds * 1e6, gb_s=moved / seconds / 1e9,
                   tflop_s=flops / seconds / 1e12, share=limit / seconds)  # fmt: skip
    if best:
        report.add(best=name, size=size, tile=str(tuple(best[1])), us=best[0] * 1e6, limit_us=limit * 1e6,
                   share=limit / best[0])  # fmt: skip


def step(report: Report) -> None:
    for batch in (1, 8, 32, 128, 256):
        moved = batch * (2 * H * P * N * 4 + (CONV + INNER + H) * 2)
        variants(
            report, "step", f"b{batch}", STEP,
            lambda b=batch: (layer_inputs(b, 1)[2], torch.randn(b, H, P, N, device="cuda")),
            lambda v, tile: triton_ssm.step(*v[0], v[1], tile), moved, batch * 5 * H * P * N,
        )  # fmt: skip


def conv(report: Report) -> None:
    weight, bias = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((4, CONV), (CONV,)))
    for batch, t in ((1, 1), (32, 1), (256, 1), (1, 256), (1, 1024), (1, 2048), (1, 8192)):
        moved = batch * CONV * 2 * (2 * t + 3 + 3 * (t == 1)) + CONV * 10

        def make(batch: int = batch, t: int = t) -> Any:
            return layer_inputs(batch, t)[1], torch.randn(batch, 3, CONV, device="cuda", dtype=torch.bfloat16)

        variants(
            report, "conv", f"b{batch} t{t}", CONV_ONE if t == 1 else CONV_MANY, make,
            lambda v, tile, t=t: triton_ssm.convolve(v[0], weight, bias, v[1], t == 1, tile), moved, 0,
        )  # fmt: skip


def scan(report: Report) -> None:
    for t in (256, 1024, 2048, 8192):
        for past in (False, True) if t == 2048 else (False,):
            moved = t * (CONV + H + INNER) * 2 + H * P * N * 4 * (1 + past)
            variants(
                report, "scan", f"t{t} past={past}", SCAN,
                lambda t=t: (layer_inputs(1, t)[2], torch.randn(1, H, P, N, device="cuda")),
                lambda v, tile, past=past: triton_ssm.prompt(*v[0], v[1], past, tile), moved, 4 * t * H * P * N,
            )  # fmt: skip


def gate(report: Report) -> None:
    scale = torch.ones(INNER, device="cuda", dtype=torch.bfloat16)
    for batch, t in ((1, 1), (32, 1), (256, 1), (1, 256), (1, 2048), (1, 8192)):

        def make(batch: int = batch, t: int = t) -> Any:
            y = torch.randn(batch, t, INNER, device="cuda", dtype=torch.bfloat16)
            return y, layer_inputs(batch, t)[0]

        variants(report, "gate", f"b{batch} t{t}", GATE, make,
                 lambda v, tile: triton_ssm.gate(*v, scale, G, 1e-5, tile), batch * t * INNER * 6, 0)  # fmt: skip


def units(report: Report) -> None:
    """Whole units by graph replay; for Mamba-2 beside the sum of its sites' limits."""
    from hw.workloads.base import UnitSpec
    from hw.workloads.mamba2 import Mamba2
    from hw.workloads.qwen_vl import QwenVL

    mamba = [UnitSpec("decode", "decode", b, 1, 512) for b in (1, 32, 256)]
    mamba += [UnitSpec("prefill", "prefill", 1, t, t) for t in (256, 1024, 8192)]
    for model, points in ((Mamba2, mamba), (QwenVL, None)):
        if not report.left():
            return
        workload = model()
        for unit in points or [u for u in workload.units() if u.name == "encode"]:
            if not report.left():
                return
            run = workload.prepare(unit)
            try:
                for _ in range(2):
                    run()
                torch.cuda.synchronize()
                seconds = graph_seconds(run, 1)
                limit = mamba_limit(unit.batch, unit.tokens) if points else float("nan")
                report.add(unit=f"{workload.name} {unit.file_stem}", ms=seconds * 1e3, limit_ms=limit * 1e3,
                           ratio=seconds / limit, kernels=kernels(run))  # fmt: skip
            except Exception as problem:
                report.add(unit=f"{workload.name} {unit.file_stem}", failed=str(problem)[:300])
        del workload, run
        torch.cuda.empty_cache()


def mamba_limit(batch: int, t: int) -> float:
    """Seconds of 64 layers of six sites and the head, each at its limit."""
    rows, d, wide = batch * t, 4096, INNER + CONV + H

    def gemm(m: int, n: int, k: int) -> float:
        return max((n * k + m * k + m * n) * 2 / COPY, 2 * m * n * k / FLOPS, FLOOR)

    state = batch * H * P * N * 4 * (2 if t == 1 else 1)
    moved = (rows * d * 8, rows * CONV * 4, rows * (CONV + INNER) * 2 + state, rows * INNER * 6)
    layer = gemm(rows, wide, d) + gemm(rows, d, INNER) + sum(max(m / COPY, FLOOR) for m in moved)
    return 64 * layer + gemm(batch, 32768, d)


def kernels(run: Callable[[], Any]) -> str:
    """Number of kernels, and the names that take the most time: name x count microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda r: -r.self_device_time_total)
    top = "; ".join(f"{r.key[:60]} x{r.count} {r.self_device_time_total:.0f}us" for r in rows[:14])
    return f"{sum(r.count for r in rows if r.self_device_time_total)} [{top}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=240)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="values,step,scan,conv,gate,units")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("ssm_kernels: needs a CUDA device")
    torch.manual_seed(0)
    report = Report(arguments.out, arguments.limit_s)
    parts = {"values": values, "step": step, "scan": scan, "conv": conv, "gate": gate, "units": units}
    for name in arguments.only.split(","):
        try:
            parts[name](report)
        except Exception as problem:
            report.add(part=name, failed=f"{type(problem).__name__}: {problem}"[:500])
        torch.cuda.empty_cache()
    print(f"took {time.monotonic() - report.began:.0f} s")


if __name__ == "__main__":
    main()
