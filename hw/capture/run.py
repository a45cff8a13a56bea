"""`python -m hw capture`: capture the units of a model and write one Parquet trace each.

Every finished unit is on disk before the next begins, and a unit whose file is there is skipped, so an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hw.capture import driver, launch, timing
from hw.capture.assemble import Captured, assemble
from hw.capture.manifest import write_manifest
from hw.capture.recorder import Recorder
from hw.errors import HardwareError
from hw.workloads import UnitSpec, Workload, check_workload, load_workload
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import write_trace


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What this machine is, and its measured copy bandwidth and empty-graph launch time."""
    if not torch.cuda.is_available():
        raise HardwareError("no CUDA device: capture runs on the GPU that the trace describes")
    return {
        "gpu": gpu_name(0), "driver": driver.driver_version(), "torch": torch.__version__,
        "copy_gbs": round(timing.copy_gbs(), 1), "empty_graph_ns": timing.empty_graph_ns(),
    }  # fmt: skip


def gpu_name(device: int) -> str:
    """The catalogue's name of a GPU of this machine; the driver's, if the catalogue does not know it."""
    from tesserasim.cluster.catalogue import find_gpu

    try:
        return find_gpu(torch.cuda.get_device_name(device)).name
    except Exception:
        return str(torch.cuda.get_device_name(device))


@dataclass(frozen=True)
class Graphed:
    """One unit as a captured graph. The graph owns its nodes and their parameters."""

    unit: UnitSpec
    graph: Any  # torch.cuda.CUDAGraph(keep_graph=True)
    stream: Any
    nodes: list[driver.Node]
    recorder: Recorder
    segments: list[tuple[int, int]]  # allocator segments, sorted (first, end)
    workspace_bytes: int


def capture_graph(workload: Workload, unit: UnitSpec, stream: Any = None) -> Graphed:
    """Compile and capture one unit, and record who launches what. `stream`: where; by default a new one."""
    gc.collect()
    torch.cuda.empty_cache()
    step = workload.prepare(unit)
    torch.cuda.synchronize()  # the inputs are made on another stream than the one that reads them
    stream = stream or torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, tunes, and lets libraries allocate their workspaces
            step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    recorder = Recorder()
    workload.scope = recorder.scope
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            with recorder.recording():
                step()
        finally:
            graph.capture_end()
    workspace = torch.cuda.max_memory_allocated() - before
    nodes = driver.graph_nodes(driver.graph_of(graph))
    if any(n.type == "other" for n in nodes):
        raise HardwareError(f"{workload.name} {unit.file_stem}: the graph holds nodes that are no kernel, copy or set")
    segments = sorted((s["address"], s["address"] + s["total_size"]) for s in torch.cuda.memory_snapshot())
    return Graphed(unit, graph, stream, nodes, recorder, segments, int(workspace))


def capture_unit(workload: Workload, unit: UnitSpec, replays: int = 24, stream: Any = None) -> Captured:
    """Compile, capture and time one unit, on `stream` if one is given."""
    g = capture_graph(workload, unit, stream)
    with torch.cuda.stream(g.stream):
        e2e, times = timing.measure(g.graph, [n.type for n in g.nodes], replays)
        idle = timing.end_to_end_ns(g.graph.replay, 12, ahead=False)
    return Captured(
        unit, g.nodes, g.recorder.calls, g.recorder.borders, times, timing.percentiles(e2e), e2e, idle,
        g.workspace_bytes, g.segments,
    )  # fmt: skip


def capture_model(
    name: str, out: Path, only: Sequence[str] = (), extra: Sequence[UnitSpec] = (), limit_s: float = float("inf"),
    info: dict[str, Any] | None = None, grid: dict[str, None] | None = None,
) -> list[str]:  # fmt: skip
    """Capture a model's grid into `out`/name; returns the stems that failed or were not reached.

    `only`: stems to take (of several models some may have none of them), () for all; `grid` is given every stem.
    """
    started = time.monotonic()
    info = info if info is not None else machine()
    workload = load_workload(name)
    log(f"{name}: built in {time.monotonic() - started:.1f} s; {info}")
    missing = []
    units = [*workload.units(), *extra]
    if grid is not None:
        grid.update(dict.fromkeys(u.file_stem for u in units))
    for unit in units:
        path = out / workload.name / f"{unit.file_stem}.parquet"
        if (only and unit.file_stem not in only) or path.exists():
            continue
        if time.monotonic() - started > limit_s:
            missing.append(unit.file_stem)
            continue
        try:
            t0 = time.monotonic()
            trace = assemble(workload, capture_unit(workload, unit), info)
            write_trace(trace, path)
            log(f"{name} {unit.file_stem}: {describe(trace)} in {time.monotonic() - t0:.1f} s")
        except Exception as error:  # one unit must not take the others with it
            if isinstance(error, torch.AcceleratorError):
                raise
            import traceback

            traceback.print_exc()
            log(f"{name} {unit.file_stem}: FAILED {type(error).__name__}: {str(error)[:300]}")
            missing.append(unit.file_stem)
    return missing


def describe(trace: Trace) -> str:
    """One line: kernels, sites, end-to-end time and what the sums leave over."""
    assert trace.meta.e2e_ns is not None
    e2e = trace.meta.e2e_ns["median"]
    left = 100 * (trace.residual_ns or 0) / e2e
    span = statistics.median(trace.meta.extra["span_samples_ns"])
    unknown = sum(not k.accesses for k in trace.kernels)
    return (
        f"{len(trace)} kernels, {len(trace.sites)} sites, {e2e / 1e6:.3f} ms end to end, "
        f"busy {trace.busy_ns / 1e6:.3f} ms, span {span / 1e6:.3f} ms, sums {trace.span_ns / 1e6:.3f} ms, "
        f"residual {left:+.2f} %, {unknown} kernels without accesses, "
        f"{trace.meta.extra.get('warnings_total')} warnings"
    )


def capture_all(
    models: Sequence[str], out: Path, only: Sequence[str], left_out: Sequence[str], limit_s: float
) -> int:
    """Capture several models: fit the launch cost once, then every grid; 1 if anything is missing."""
    for name in models:
        check_workload(name)
    points = [_point(p) for p in left_out]
    if points and launch.MODEL not in models:
        raise HardwareError(f"--left-out: points are left out of {launch.MODEL} only; add --model {launch.MODEL}")
    started = time.monotonic()
    info = machine()
    info["launch"] = _launch(out, info)
    missing: list[str] = []
    grid: dict[str, None] = dict.fromkeys(p.file_stem for p in points)
    for name in models:
        left = limit_s - (time.monotonic() - started)
        missing += [f"{name}/{s}" for s in capture_model(name, out, only, limit_s=left, info=info, grid=grid)]
        if points and name == launch.MODEL:
            stems = [p.file_stem for p in points]
            missing += capture_model(name, out / "left-out", stems, points, left, info)
        torch.cuda.empty_cache()
    write_manifest(out)
    nowhere = [stem for stem in only if stem not in grid]
    if nowhere:
        there = ", ".join(grid)
        raise HardwareError(f"--units: no unit {', '.join(nowhere)} in {', '.join(models)}; there are {there}")
    if missing:
        log(f"missing: {', '.join(missing)}; run the same command again to go on")
    return 1 if missing else 0


def _point(text: str) -> UnitSpec:
    try:
        batch, context = (int(x) for x in text.split("x"))
        return UnitSpec("decode", "decode", batch, 1, context)
    except ValueError:
        raise HardwareError(f"--left-out {text!r}: want batchxcontext, e.g. 16x1536") from None


def _launch(out: Path, info: dict[str, Any]) -> dict[str, Any]:
    """Launch cost and profiler overhead of this machine, from `out`/fit; a resumed run finds them there."""
    units = [UnitSpec("decode", "decode", 4, 1, 1024), UnitSpec("prefill", "prefill", 1, 768, 768)]
    if [u.file_stem for u in units] != [launch.DECODE_STEM, launch.PREFILL_STEM]:
        raise AssertionError("the fitting units and their names differ")
    workload: Workload | None = None
    for unit in units:
        path = out / "fit" / launch.MODEL / f"{unit.file_stem}.parquet"
        if not path.exists():
            workload = workload or load_workload(launch.MODEL)
            write_trace(assemble(workload, capture_unit(workload, unit, replays=72), info), path)
    fitted = launch.fit_folder(out, info)
    log(f"launch: {fitted}")
    torch.cuda.empty_cache()
    return fitted
