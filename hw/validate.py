"""`python -m hw validate RUNS.toml`: what the simulator says of the plans that the hardware has replayed.

Runs here need no GPU: measured rates come from the journals of `python -m hw replay`, kernel times from traces of
each device (`--profile`, another process than the runs), hops from `--links`. Nothing is fitted to a plan. Every
combination of plan and depth belongs to the calibration or to the held-out part of a split that was fixed before
the first run; tables give both.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from tesserasim.case import Case, settled_run
from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import Cluster, Device, GpuSpec, Link
from tesserasim.costs.times import CAPTURED_SYSTEMATIC, KernelTimes, captured_times
from tesserasim.errors import InputError
from tesserasim.files import read_toml
from tesserasim.lower import lower
from tesserasim.plans import Lane, Plan, write_plan
from tesserasim.policies import policies
from tesserasim.policies.base import Limits, NotApplicable
from tesserasim.trace.mix import Mix
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import read_trace

DEVICE_MODELS = ("serial", "shared")
#: How the trace of a partition names its multiprocessors: "H200-SXM/64sm".
_PARTITION = re.compile(r"/(\d+)sm$")
#: Policies whose plans for a unit are replayed.
POLICIES = ("single", "af", "kernel")
#: Standard deviations of a normal distribution that hold 80 % of it.
EIGHTY = 1.2816


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
class Hop:
    """A link as it was measured: one direction is like the other."""

    latency_ns: float
    gbs: float


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
    gpus = {n: dataclasses.replace(base, name=f"{base.name}/{n}", aliases=()) for n in names}
    links = tuple(Link(a, b, hop.gbs * 8, hop.latency_ns / 1000, "measured") for a, b in combinations(names, 2))
    # Partitions are of one GPU, so they share its DRAM.
    parts = {n: int(m[1]) for n in names if (m := _PARTITION.search(unit.traces[n].meta.gpu))}
    devices = tuple(Device(n, gpus[n], parts.get(n)) for n in names)
    cluster = Cluster("devices", devices, links, dram_domains=(tuple(names),) if len(parts) > 1 else ())
    # A mix of stages launches a unit at tokens 1 and context 0, whatever they were: the trace is taken as it is.
    point = {**first.meta.unit, "tokens": 1, "context": 0}
    first = dataclasses.replace(first, meta=dataclasses.replace(first.meta, unit=point))
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


# Journals


@dataclass(frozen=True)
class Measured:
    """One timed combination of a journal."""

    model: str
    unit: str
    plan: str  # hash of the devices of its kernels
    lane: str
    device_of: tuple[str, ...]
    depth: int
    units_per_s: float
    samples: tuple[float, ...]
    energy_j: float | None

    @property
    def key(self) -> str:
        """What the split goes by."""
        return f"{self.plan}:{self.depth}"


def read_journal(path: Path) -> list[Measured]:
    """Timed combinations of a replay's journal, the last of equal ones. InputError names the file."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    session: dict[str, Any] = {}
    placed: dict[str, tuple[str, ...]] = {}
    found: dict[tuple[str, int], Measured] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            kind = row["kind"]
            if kind == "session":
                session = row
            if "device_of" in row:
                placed[row["plan"]] = tuple(d for d, n in row["device_of"] for _ in range(int(n)))
            if kind == "timing":
                found[row["plan"], row["depth"]] = Measured(
                    session["model"], path.stem, row["plan"], row["lane"], placed[row["plan"]], int(row["depth"]),
                    float(row["units_per_s"]), tuple(float(x) for x in row["units_per_s_all"]), row["energy_j"],
                )  # fmt: skip
        except (ValueError, KeyError, TypeError):
            if number < len(lines):  # the last line may be half of one
                raise InputError(f"{path}: line {number} is no line of a replay's journal") from None
    return [m for m in found.values() if m.units_per_s > 0 and math.isfinite(m.units_per_s)]


def read_hop(path: Path) -> Hop:
    """The link that was measured last."""
    hop = None
    try:
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            if row.get("kind") == "link":
                hop = Hop(float(row["link"]["latency_ns"]), float(row["link"]["gbs"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path}: no journal of python -m hw replay --links") from None
    if hop is None:
        raise InputError(f"{path}: holds no measured link")
    return hop


@dataclass(frozen=True)
class Split:
    """Which combinations judge: whole models, and half of the others by hash."""

    models: tuple[str, ...]

    def held_out(self, m: Measured) -> bool:
        return m.model in self.models or int(hashlib.sha256(m.key.encode()).hexdigest()[:8], 16) % 2 == 0


def read_split(path: Path) -> Split:
    try:
        data = json.loads(path.read_text("utf-8"))
        return Split(tuple(str(x) for x in data["held_out_models"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path}: no split ({{'held_out_models': [...]}})") from None


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
    data = read_toml(runs, "runs file")
    here = runs.parent
    try:
        split = read_split(here / str(data["split"]))
        units = list(data["unit"])
    except (KeyError, TypeError):
        raise InputError(f"{runs}: needs 'split' and at least one [[unit]]") from None
    found = []
    for u in units:
        if not isinstance(u, dict) or not isinstance(u.get("traces"), dict) or "journal" not in u:
            raise InputError(f"{runs}: every [[unit]] needs 'journal' and a table 'traces' of devices")
        traces = {d: _with_launch(read_trace(here / str(p)), u, here) for d, p in u["traces"].items()}
        hop = read_hop(here / str(u["links"])) if "links" in u else None
        found.append((here / str(u["journal"]), Unit(next(iter(traces.values())).meta.model, traces, hop)))
    return split, found


def write_policy_plans(runs: Path, out: Path, depths: Sequence[int]) -> int:
    """Plan files of all units for `python -m hw replay --plan`, as `out`/<journal's name>/<policy>-<depth>.json."""
    for journal, unit in _units(runs)[1]:
        for name, plan in policy_plans(unit, depths).items():
            path = out / journal.stem / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_plan(plan, path)
            print(f"{path}: {plan.status}, gap {plan.gap}, {plan.switches} switches")
    return 0


def _with_launch(trace: Trace, u: Mapping[str, Any], here: Path) -> Trace:
    """The trace with the launch figures of its machine, if the run names them."""
    if "launch" not in u:
        return trace
    figures = json.loads((here / str(u["launch"])).read_text("utf-8"))
    return dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, launch=figures))


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
    found = rows(runs, device_model)
    print(f"{'model':<20} {'unit':<18} {'plan':<16} {'d':>2} switches  measured/s simulated    error  part")
    for r in found:
        said = f"{'-':>9} {'-':>8}"
        if r["error"] is not None:
            said = f"{r['simulated_per_s']:9.2f} {100 * r['error']:+7.2f}%"
        print(
            f"{r['model']:<20} {r['unit']:<18} {r['lane'][:16]:<16} {r['depth']:>2} {r['switches']:>8} "
            f"{r['measured_per_s']:11.2f} {said}  {r['part']}" + f"  {r['why']}" * bool(r["why"])
        )
    for s in summary(found):
        print(f"{s['part']:<12} {s['model']:<20} n {s['n']:>4}  |error| median {100 * s['median']:.2f} %, p95 "
              f"{100 * s['p95']:.2f} %, inside 80 % interval {100 * s['inside80']:.0f} %")  # fmt: skip
    if out is not None:
        _write(found, out)
    if not any(r["error"] is not None for r in found):
        print("hw: nothing could be predicted", file=sys.stderr)
        return 1
    return 0


def _write(found: Sequence[Mapping[str, Any]], out: Path) -> None:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    table = pa.Table.from_pylist([dict(r) for r in found])
    out.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, out.with_suffix(".parquet"))
    pyarrow.csv.write_csv(table, out.with_suffix(".csv"))
