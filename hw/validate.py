"""`python -m hw validate RUNS.toml`: what the simulator says of the plans that the hardware has replayed.

Runs here need no GPU: measured rates come from the journals of `python -m hw replay`, kernel times from traces of
each device (`--profile`, another process than the runs), hops from `--links`. Nothing is fitted to a plan. Every
combination of plan and depth belongs to the calibration or to the held-out part of a split that was fixed before
the first run; tables give both.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from hw.journals import Hop, Measured, Split, read_hop, read_journal, read_json, read_split
from tesserasim.case import Case, settled_run
from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import Cluster, Device, GpuSpec, Link
from tesserasim.costs.times import CAPTURED_SYSTEMATIC, KernelTimes, captured_times
from tesserasim.errors import InputError
from tesserasim.files import did_you_mean, path_text, read_toml, shown
from tesserasim.lower import lower
from tesserasim.plans import Lane, Plan, write_plan
from tesserasim.policies import policies
from tesserasim.policies.base import Limits, NotApplicable
from tesserasim.terminal import put
from tesserasim.trace.mix import Mix
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import read_trace
from tesserasim.writing import check_directory, check_output, write_whole

DEVICE_MODELS = ("serial", "shared")
#: How the trace of a partition names its multiprocessors: "H200-SXM/64sm".
_PARTITION = re.compile(r"/(\d+)sm$")
#: Policies whose plans for a unit are replayed.
POLICIES = ("single", "af", "kernel")
#: Standard deviations of a normal distribution that hold 80 % of it.
EIGHTY = 1.2816
MAX_LAUNCH_NS = 1e6


@dataclass(frozen=True)
class MeasuredTimes:
    """Kernel times of a unit on the devices that it was profiled on, by device; a cost model."""

    traces: Mapping[str, Trace]  # GPU name -> the unit's trace there
    name: str = "measured"

    @property
    def version(self) -> str:
        content = [[g, [k.duration_ns for k in t.kernels]] for g, t in sorted(self.traces.items())]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def kernel_ns(self, trace: Trace, gpu: GpuSpec) -> KernelTimes:
        if gpu.name not in self.traces:
            raise InputError(f"{trace.unit}: not profiled on {gpu.name}")
        return captured_times(self.traces[gpu.name])


@dataclass(frozen=True)
class Unit:
    """One unit on its devices: traces of the same kernels, and the hop between them."""

    model: str
    traces: Mapping[str, Trace]  # device -> trace
    hop: Hop | None

    def __post_init__(self) -> None:
        first = next(iter(self.traces.values()))
        for device, t in self.traces.items():
            if [k.site for k in t.kernels] != [k.site for k in first.kernels]:
                raise InputError(f"{self.model} {first.unit}: device {device} runs other kernels than the first one")


def bench(unit: Unit) -> tuple[Mix, Cluster, MeasuredTimes]:
    """The unit as a mix of one launch, its devices as a cluster, and what was measured as a cost model."""
    names = sorted(unit.traces)
    first = unit.traces[names[0]]
    hop = unit.hop or Hop(0.0, 1.0)
    base = find_gpu("H200")
    gpus = {n: replace(base, name=f"{base.name}/{n}", aliases=()) for n in names}
    links = tuple(Link(a, b, hop.gbs * 8, hop.latency_ns / 1000, "measured") for a, b in combinations(names, 2))
    # Partitions are of one GPU, so they share its DRAM.
    parts = {n: int(m[1]) for n in names if (m := _PARTITION.search(unit.traces[n].meta.gpu))}
    devices = tuple(Device(n, gpus[n], parts.get(n)) for n in names)
    cluster = Cluster("devices", devices, links, dram_domains=(tuple(names),) if len(parts) > 1 else ())
    # A mix of stages launches a unit at tokens 1 and context 0, whatever they were: the trace is taken as it is.
    point = {**first.meta.unit, "tokens": 1, "context": 0}
    first = replace(first, meta=replace(first.meta, unit=point))
    mix = Mix("unit", unit.model, "stages", {first.unit: (first,)}, stages=((first.unit, 1),))
    return mix, cluster, MeasuredTimes({gpus[n].name: t for n, t in unit.traces.items()})


def predict(unit: Unit, device_of: Sequence[str], depth: int, device_model: str = "serial") -> float:
    """Units per second of a closed loop of `depth` slots, kernel i on `device_of[i]`.

    InputError if a site lies on two devices, or bytes must move and no hop was measured.
    """
    first = unit.traces[min(unit.traces)]
    if len(device_of) != len(first.kernels):
        raise InputError(f"{unit.model} {first.unit}: {len(first.kernels)} kernels, devices for {len(device_of)}")
    placed: dict[str, str] = {}
    for k, device in zip(first.kernels, device_of, strict=True):
        if placed.setdefault(k.site, device) != device:
            raise InputError(f"{unit.model} {first.unit}: site {k.site} lies on two devices")
    if unit.hop is None and len(set(device_of)) > 1:
        raise InputError("no hop was measured between the devices: python -m hw replay --links")
    if device_model not in DEVICE_MODELS:
        raise InputError(f"device model {device_model!r}: one of {', '.join(DEVICE_MODELS)}")
    mix, cluster, costs = bench(unit)
    batch = int(first.meta.unit.get("batch", 1))
    plan = Plan("unit", cluster.name, "replay", (Lane("lane", batch, depth, {first.unit: placed}),))
    result, _ = settled_run(lower(mix, plan, cluster, costs, device_model=device_model), "auto")
    return result.lanes[0].steady_per_s / batch


def policy_plans(unit: Unit, depths: Sequence[int], names: Sequence[str] = POLICIES) -> dict[str, Plan]:
    """What policies make of the unit at its batch, by "policy-depth": from measured times and the measured hop."""
    if unit.hop is None:
        raise InputError("no hop was measured between the devices: python -m hw replay --links")
    mix, cluster, costs = bench(unit)
    batch = int(unit.traces[min(unit.traces)].meta.unit.get("batch", 1))
    found: dict[str, Plan] = {}
    for depth in depths:
        limits = Limits((batch,), (depth,), max_seqs=max(256, batch * depth))
        for name in names:
            ran = Case(mix, cluster, costs, limits).best(policies()[name]())
            if not isinstance(ran, NotApplicable):
                found[f"{name}-{depth}"] = ran.plan
    return found


# The command


def rows(runs: Path, device_model: str = "serial") -> list[dict[str, Any]]:
    """A row per measured combination: measured, simulated, error, part. Paths are relative to the file."""
    split, units = _units(runs)
    found: list[dict[str, Any]] = []
    for journal, unit in units:
        found += [_row(unit, m, split, device_model) for m in read_journal(journal)]
    return found


def _units(runs: Path) -> tuple[Split, list[tuple[Path, Unit]]]:
    """The split and every unit of a runs file with its journal."""
    data = read_toml(runs, "runs")
    name, here, units = path_text(runs), runs.parent, data.get("unit")
    if not isinstance(data.get("split"), str) or not isinstance(units, list) or not units:
        raise InputError(f"{name}: needs 'split' and at least one [[unit]]")
    _only(data, ("split", "unit"), name)
    split = read_split(here / data["split"])
    return split, [(here / str(u["journal"]), _unit(u, here)) for u in (_checked(u, name) for u in units)]


def _checked(u: Any, name: str) -> dict[str, Any]:
    """A [[unit]] with the keys and types that it must have."""
    if not isinstance(u, dict) or not isinstance(u.get("traces"), dict) or not u["traces"] or "journal" not in u:
        raise InputError(f"{name}: every [[unit]] needs 'journal' and a table 'traces' of devices")
    _only(u, ("journal", "links", "launch", "traces"), name)
    for key, value in [*u.items(), *u["traces"].items()]:
        if value is not u["traces"] and (not isinstance(value, str) or not value):
            raise InputError(f"{name}: {shown(key)} must be the path of a file, not {shown(value)}")
    if not all(d and d.isprintable() for d in u["traces"]):
        raise InputError(f"{name}: a device of 'traces' has no readable name")
    return u


def _only(table: Mapping[str, Any], known: Sequence[str], name: str) -> None:
    for key in table:
        if key not in known:
            raise InputError(f"{name}: unknown key {shown(key)}{did_you_mean(key, known)}")


def _unit(u: Mapping[str, Any], here: Path) -> Unit:
    launch = read_json(here / u["launch"], "launch figures") if "launch" in u else None
    for key, value in (launch or {}).items():
        if key.endswith("_ns") and not (type(value) in (int, float) and abs(value) <= MAX_LAUNCH_NS):
            raise InputError(
                f"{path_text(here / u['launch'])}: {key} must be a number of nanoseconds below a millisecond"
            )
    traces = {}
    for device, path in u["traces"].items():
        trace = read_trace(here / path)
        traces[device] = trace if launch is None else replace(trace, meta=replace(trace.meta, launch=launch))
    hop = read_hop(here / u["links"]) if "links" in u else None
    return Unit(next(iter(traces.values())).meta.model, traces, hop)


def write_policy_plans(runs: Path, out: Path, depths: Sequence[int]) -> int:
    """Plan files of all units for `python -m hw replay --plan`, as `out`/<journal's name>/<policy>-<depth>.json."""
    check_directory(out)
    for journal, unit in _units(runs)[1]:
        for name, plan in policy_plans(unit, depths).items():
            path = out / journal.stem / f"{name}.json"
            write_plan(plan, path)
            put(f"{path}: {plan.status}, gap {plan.gap}, {plan.switches} switches")
    return 0


def _row(unit: Unit, m: Measured, split: Split, device_model: str) -> dict[str, Any]:
    durations = {d: [k.duration_ns for k in t.kernels] for d, t in unit.traces.items()}
    busy = {d: sum(durations[d][i] for i, x in enumerate(m.device_of) if x == d) for d in unit.traces}
    row: dict[str, Any] = {
        "model": m.model, "unit": m.unit, "plan": m.plan, "lane": m.lane, "depth": m.depth,
        "part": "held-out" if split.held_out(m) else "calibration",
        "switches": sum(a != b for a, b in itertools.pairwise(m.device_of)),
        "lesser_share": round(min(busy.values()) / max(1, sum(busy.values())), 4),
        "measured_per_s": m.units_per_s, "measured_low": min(m.samples), "measured_high": max(m.samples),
        "device_model": device_model, "simulated_per_s": None, "error": None, "low80": None, "high80": None, "why": "",
    }  # fmt: skip
    try:
        simulated = predict(unit, m.device_of, m.depth, device_model)
    except InputError as error:
        return {**row, "why": str(error)}
    sigma = math.hypot(CAPTURED_SYSTEMATIC, simulator_sigma(row))
    return {
        **row, "simulated_per_s": simulated, "error": simulated / m.units_per_s - 1,
        "low80": simulated * math.exp(-EIGHTY * sigma), "high80": simulated * math.exp(EIGHTY * sigma),
    }  # fmt: skip


def simulator_sigma(row: Mapping[str, Any]) -> float:
    """The simulator's own log-sd of a rate: assumed until the calibration part says otherwise."""
    return 0.01 if row["depth"] == 1 and row["switches"] == 0 else 0.04


def summary(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Median and p95 of |error|, and the share inside the interval, by part and model."""
    out = []
    for part in ("calibration", "held-out"):
        for model in [*sorted({r["model"] for r in found}), "all"]:
            chosen = [r for r in found if r["part"] == part and model in (r["model"], "all") and r["error"] is not None]
            if not chosen:
                continue
            error = np.abs([r["error"] for r in chosen])
            inside = [r["low80"] <= r["measured_per_s"] <= r["high80"] for r in chosen]
            out.append({
                "part": part, "model": model, "n": len(chosen), "median": float(np.median(error)),
                "p95": float(np.percentile(error, 95)), "inside80": float(np.mean(inside)),
            })  # fmt: skip
    return out


def validate(runs: Path, out: Path | None, device_model: str = "serial") -> int:
    """Print the table and its summary; with `out` also write it as Parquet and CSV. 1 if nothing was predicted."""
    if out is not None:
        _check_table(out, runs)
    found = rows(runs, device_model)
    put(f"{'model':<20} {'unit':<18} {'plan':<16} {'d':>2} switches  measured/s simulated    error  part")
    for r in found:
        said = f"{'-':>9} {'-':>8}"
        if r["error"] is not None:
            said = f"{r['simulated_per_s']:9.2f} {100 * r['error']:+7.2f}%"
        put(
            f"{r['model']:<20} {r['unit']:<18} {r['lane'][:16]:<16} {r['depth']:>2} {r['switches']:>8} "
            f"{r['measured_per_s']:11.2f} {said}  {r['part']}" + f"  {r['why']}" * bool(r["why"])
        )
    for s in summary(found):
        put(f"{s['part']:<12} {s['model']:<20} n {s['n']:>4}  |error| median {100 * s['median']:.2f} %, p95 "
              f"{100 * s['p95']:.2f} %, inside 80 % interval {100 * s['inside80']:.0f} %")  # fmt: skip
    if out is not None:
        _write(found, out)
    if not any(r["error"] is not None for r in found):
        print("hw: nothing could be predicted", file=sys.stderr)
        return 1
    return 0


def _tables(out: Path) -> tuple[Path, Path]:
    """The two files of `--out`: as .parquet and as .csv."""
    stem = out.with_suffix("") if out.suffix in (".parquet", ".csv") else out
    return stem.with_name(stem.name + ".parquet"), stem.with_name(stem.name + ".csv")


def _check_table(out: Path, runs: Path) -> None:
    """InputError, before anything is computed, unless both files can be written and are no inputs."""
    if not out.name or out.is_dir() or (out.exists() and not out.is_file()):
        raise InputError(f"{path_text(out)}: name a file to write, without its ending")
    data, here = read_toml(runs, "runs"), runs.parent
    read = [runs, here / str(data.get("split"))]
    for u in data["unit"] if isinstance(data.get("unit"), list) else []:
        table = u if isinstance(u, dict) else {}
        traces = table.get("traces")
        named = [*table.values(), *(traces.values() if isinstance(traces, dict) else ())]
        read += [here / x for x in named if isinstance(x, str) and x.isprintable()]
    for path in _tables(out):
        check_directory(path.parent)
        if path.parent.is_dir():
            check_output(path, *read)


def _write(found: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Both tables, each whole or not at all."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    table = pa.Table.from_pylist([dict(r) for r in found])
    for path, write in zip(_tables(out), (pyarrow.parquet.write_table, pyarrow.csv.write_csv), strict=True):
        content = pa.BufferOutputStream()
        write(table, content)
        write_whole(path, content.getvalue().to_pybytes())
