"""A row per measured combination of plan and depth: what was measured, what was simulated, and under which inputs.

What is not known is None, never 0: energy without a counter, a price without an offer, use without a timeline.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from hw.journals import Journal, Measured, Split
from hw.validate.bench import Prediction, Unit, bench, dram_share, placed_sites, simulate, whole_gpu
from hw.validate.runs import journal_of, read_runs
from hw.validate.timeline import Use, read_timeline
from tesserasim import __version__
from tesserasim.cluster.catalogue import prices
from tesserasim.costs.times import CAPTURED_SYSTEMATIC
from tesserasim.errors import InputError
from tesserasim.sim.sharing import load_sharing

#: Standard deviations of a normal distribution that hold 80 % of it.
EIGHTY = 1.2816
#: A plan asks for much of the DRAM above this share of its bandwidth; two devices co-run above this share of the time.
MEMORY_BOUND, CORUN = 0.5, 0.01
MAX_WATTS = 1e5

#: Columns of the table: name -> type. Text of use per device is JSON, since CSV knows no nesting.
COLUMNS: dict[str, type] = {
    "model": str, "unit": str, "plan": str, "lane": str, "depth": int, "part": str, "switches": int,
    "lesser_share": float, "equal": bool, "segments": bool, "corun": bool, "memory_bound": bool, "dram_share": float,
    "measured_per_s": float, "measured_low": float, "measured_high": float, "bursts": int, "launches": int,
    "simulated_per_s": float, "error": float, "low80": float, "high80": float,
    "measured_latency_ms": float, "measured_latency_low": float, "measured_latency_high": float,
    "simulated_latency_ms": float, "latency_error": float,
    "measured_busy_ms": str, "simulated_busy_ms": str, "measured_exposed_ms": float, "simulated_exposed_ms": float,
    "measured_energy_j": float, "simulated_energy_j": float, "usd_per_hour": float,
    "measured_usd_per_1e6": float, "simulated_usd_per_1e6": float,
    "device_model": str, "hardware": str, "driver": str, "torch": str, "hop_us": float, "hop_gbs": float,
    "kernel_times": str, "simulator": str, "version": str, "why": str,
}  # fmt: skip


@dataclass(frozen=True)
class _Bench:
    """What all rows of a unit share."""

    unit: Unit
    journal: Path
    equal: Mapping[str, bool | None]  # plan -> whether its outputs were right
    facts: Mapping[str, Any]  # columns


def rows(runs: Path, device_model: str = "serial") -> list[dict[str, Any]]:
    """A row (keys: COLUMNS) per measured combination. Paths in the runs file are relative to it."""
    read = read_runs(runs)
    units = [(path, unit, journal_of(path, unit)) for path, unit in read.units]
    found: list[dict[str, Any]] = []
    # Plans that co-run with many slots take half a minute each.
    with tqdm(total=sum(len(j.measured) for _, _, j in units), desc="combinations", disable=None) as bar:
        for path, unit, journal in units:
            for row in unit_rows(path, unit, journal, read.split, device_model):
                found.append(row)
                bar.update()
    return found


def unit_rows(path: Path, unit: Unit, journal: Journal, split: Split, device_model: str) -> Iterator[dict[str, Any]]:
    """Rows of one unit, whose journal lies at `path`, one by one."""
    equal = {c.plan: c.equal for c in journal.checks}
    shared = _Bench(unit, path, equal, _facts(unit, device_model))
    yield from (_row(shared, m, split, device_model) for m in journal.measured)


def _facts(unit: Unit, device_model: str) -> dict[str, Any]:
    """Inputs of the simulation, by content."""
    first = unit.traces[min(unit.traces)]
    figures = {d: dict(t.meta.launch or {}) for d, t in sorted(unit.traces.items())}
    content = [__version__, device_model, asdict(load_sharing()), figures]
    parts = "+".join(f"{d}:{n}sm" for d, n in sorted(unit.parts.items()))
    return {
        "device_model": device_model, "version": __version__,
        "hardware": f"{whole_gpu(first).name} {parts or '+'.join(sorted(unit.traces))}",
        "hop_us": unit.hop.latency_ns / 1000 if unit.hop else None, "hop_gbs": unit.hop.gbs if unit.hop else None,
        "kernel_times": bench(unit)[2].version[:16],
        "simulator": hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16],
    }  # fmt: skip


def _row(shared: _Bench, m: Measured, split: Split, device_model: str) -> dict[str, Any]:
    unit, trace = shared.unit, shared.unit.traces[min(shared.unit.traces)]
    used = [d for d in sorted(unit.traces) if d in m.device_of]
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {
        **shared.facts, "model": m.model, "unit": m.unit, "plan": m.plan, "lane": m.lane, "depth": m.depth,
        "part": "held-out" if split.held_out(m) else "calibration", "equal": shared.equal.get(m.plan),
        "switches": sum(a != b for a, b in itertools.pairwise(m.device_of)), "segments": m.segments,
        "driver": m.machine.driver or trace.meta.driver, "torch": m.machine.torch or trace.meta.torch,
        "usd_per_hour": _price(unit, used), "why": "",
    }  # fmt: skip
    row |= _measured(shared, m, used)
    row["measured_usd_per_1e6"] = _per_million(row["usd_per_hour"], m.units_per_s)
    row["corun"] = True if m.depth > 1 else False if len(used) == 1 else None
    try:
        placed_sites(unit, m.device_of)
        row["lesser_share"] = _lesser_share(unit, m)
        row["dram_share"] = round(dram_share(unit, m.device_of), 4)
        row["memory_bound"] = row["dram_share"] > MEMORY_BOUND
        found = simulate(unit, m.device_of, m.depth, device_model, m.stagger_us)
    except InputError as error:
        return {**row, "why": "; ".join(x for x in (row["why"], str(error)) if x)}
    return {**row, **_simulated(unit, m, found, row)}


def _measured(shared: _Bench, m: Measured, used: Sequence[str]) -> dict[str, Any]:
    """What the journal and a timeline beside it say."""
    seen, why = _timeline(shared, m, used)
    # What GPUs took whose counters were not read is not in the figure.
    counted = all(m.machine.gpu_of.get(d, 0 if len(shared.unit.gpus) == 1 else -1) in m.energy_gpus for d in used)
    return {
        "measured_per_s": m.units_per_s, "measured_low": min(m.samples), "measured_high": max(m.samples),
        "bursts": len(m.samples), "launches": m.launches,
        "measured_latency_ms": statistics.median(m.latency_ms) if m.latency_ms else None,
        "measured_latency_low": min(m.latency_ms, default=None),
        "measured_latency_high": max(m.latency_ms, default=None),
        "measured_busy_ms": _busy_text(seen), "measured_exposed_ms": _ms(seen.exposed_ns if seen else None),
        "measured_energy_j": m.energy_j if counted else None, "why": why,
    }  # fmt: skip


def _timeline(shared: _Bench, m: Measured, used: Sequence[str]) -> tuple[Use | None, str]:
    """Use of devices in the timeline that the replay wrote of this combination; why there is none in one that is."""
    path = shared.journal.with_name(f"{shared.journal.stem}.{m.lane}.d{m.depth}.json")
    if not path.is_file():
        return None, ""
    kernels = next(iter(shared.unit.traces.values())).kernels
    nodes = sum(k.kind not in ("copy", "memset") for k in kernels)
    try:
        seen = read_timeline(path, nodes, m.machine.gpu_of, used)
    except InputError as error:
        return None, f"timeline not read: {error}"
    if any(k.kind == "copy" for k in kernels):  # the unit's own copies look like moves
        return Use(seen.busy_ns, None, seen.overlap), ""
    return seen, ""


def _simulated(unit: Unit, m: Measured, found: Prediction, row: Mapping[str, Any]) -> dict[str, Any]:
    corun = m.depth > 1 or found.use.overlap > CORUN
    latency = row["measured_latency_ms"]
    power = _power(unit, found.use)
    sigma = math.hypot(CAPTURED_SYSTEMATIC, simulator_sigma({**row, "corun": corun}))
    return {
        "corun": corun, "simulated_per_s": found.per_s, "error": found.per_s / m.units_per_s - 1,
        "low80": found.per_s * math.exp(-EIGHTY * sigma), "high80": found.per_s * math.exp(EIGHTY * sigma),
        "simulated_latency_ms": found.latency_ms, "latency_error": found.latency_ms / latency - 1 if latency else None,
        "simulated_busy_ms": _busy_text(found.use), "simulated_exposed_ms": _ms(found.use.exposed_ns),
        "simulated_energy_j": power / found.per_s if power is not None else None,
        "simulated_usd_per_1e6": _per_million(row["usd_per_hour"], found.per_s),
    }  # fmt: skip


def _lesser_share(unit: Unit, m: Measured) -> float:
    """Share of the kernels' times on the device that has less of them."""
    busy = dict.fromkeys(unit.traces, 0)
    for i, d in enumerate(m.device_of):
        busy[d] += unit.traces[d].kernels[i].duration_ns
    return round(min(busy.values()) / max(1, sum(busy.values())), 4)


def _power(unit: Unit, use: Use) -> float | None:
    """Watts of the GPU under a plan: those while the unit ran on one of its devices alone, by the times that kernels
    run there. None unless the traces of all devices in use say (`extra["power_w"]`), and for several GPUs, since what
    one draws while it waits for another was not measured."""
    if not unit.parts and len(use.busy_ns) > 1:
        return None
    watts: dict[str, Any] = {d: unit.traces[d].meta.extra.get("power_w") for d, ns in use.busy_ns.items() if ns > 0}
    known = {d: float(w) for d, w in watts.items() if type(w) in (int, float) and 0 < w < MAX_WATTS}
    if not watts or len(known) < len(watts):
        return None
    return sum(use.busy_ns[d] * w for d, w in known.items()) / sum(use.busy_ns[d] for d in known)


def _price(unit: Unit, used: Sequence[str]) -> float | None:
    """US dollars per hour of the GPUs in use; a GPU is paid whole, whatever part of it is used."""
    known = prices()
    specs = [whole_gpu(unit.traces[d]).name for d in used]
    if unit.parts:
        specs = specs[:1]
    if not specs or any(s not in known for s in specs):
        return None
    return sum(known[s].usd_per_hour for s in specs)


def _per_million(usd_per_hour: float | None, per_s: float) -> float | None:
    return usd_per_hour / 3600 / per_s * 1e6 if usd_per_hour is not None else None


def _busy_text(use: Use | None) -> str | None:
    return json.dumps({d: round(ns / 1e6, 6) for d, ns in sorted(use.busy_ns.items())}) if use else None


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def simulator_sigma(row: Mapping[str, Any]) -> float:
    """The simulator's own log-sd of a rate: assumed until the calibration part says otherwise."""
    return 0.01 if row["depth"] == 1 and row["switches"] == 0 else 0.04


def summary(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Median and p95 of |error|, median of the latency's, and the share inside the interval, by part and model."""
    out = []
    for part in ("calibration", "held-out"):
        for model in [*sorted({r["model"] for r in found}), "all"]:
            chosen = [r for r in found if r["part"] == part and model in (r["model"], "all") and r["error"] is not None]
            if not chosen:
                continue
            error = np.abs([r["error"] for r in chosen])
            latency = [abs(r["latency_error"]) for r in chosen if r["latency_error"] is not None]
            inside = [r["low80"] <= r["measured_per_s"] <= r["high80"] for r in chosen]
            out.append({
                "part": part, "model": model, "n": len(chosen), "median": float(np.median(error)),
                "p95": float(np.percentile(error, 95)), "inside80": float(np.mean(inside)),
                "latency_median": float(np.median(latency)) if latency else None,
            })  # fmt: skip
    return out
