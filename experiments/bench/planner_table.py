"""How fast the planner is, and how far from proven: a fixed table over GPUs, links, objectives and memory.

    python experiments/bench/planner_table.py [--exact] [--out results/planner_table.jsonl] [--only 2x1000]

Instances: the sites of the captured Llama-3-8B mix at batch 32, tiled one copy after the other until there are 1,000
or 10,000, on 2, 3, 4 and 16 GPUs of four types. Objectives: *throughput*, the period with 8 cohorts in flight;
*latency*, that of one cohort. Memory: *free*, or *binding*: every GPU has room for 0.7 of what would lie on it alone. A
cell is met with a gap of at most 1 % in the time that its number of GPUs allows (0.3 % on wide links with free memory),
or in that time with at most 3 % and no more than the exact program after 60 s (`--exact`: slow, one line per cell,
resumes). Times include everything from the workload on: closed form, seeds, relaxation, rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tesserasim.api import load_mix
from tesserasim.cluster.parse import parse_cluster
from tesserasim.costs.roofline import RooflineRatio
from tesserasim.errors import DoesNotFitError
from tesserasim.metrics.memory import USABLE
from tesserasim.metrics.predict import ClosedForm
from tesserasim.planner.milp import Program
from tesserasim.planner.place import start
from tesserasim.workload import Flow, Workload, build_workload

ROOT = Path(__file__).resolve().parents[2]
GPUS = {
    2: "A100-80GB-PCIe+L40S", 3: "A100-80GB-PCIe+L40S+H100-SXM", 4: "A100-80GB-PCIe+L40S+H100-SXM+H20",
    16: "4xA100-80GB-PCIe+4xL40S+4xH100-SXM+4xH20",
}  # fmt: skip
SIZES = ((2, 1000, 0.2), (3, 1000, 0.5), (4, 1000, 1.0), (16, 1000, 3.0), (2, 10_000, 2.0))  # GPUs, sites, s
DEPTHS = {"throughput": 8, "latency": 1}
ROOM = 0.7  # of what would lie on one GPU, where memory binds
EXACT_S, REPEATS = 60.0, 3


def tile(w: Workload, count: int) -> Workload:
    """`count` sites: copies of the workload one after the other, each reading what the last site of the one before has
    made. Weights and state are shared out over the copies, so that the whole is as large as one."""
    sites, flows, residents = [], [], []
    place: dict[tuple[int, int], int] = {}
    copies = -(-count // len(w.sites))
    for r in range(copies):
        for i, s in enumerate(w.sites[: count - len(sites)]):
            place[r, i] = len(sites)
            sites.append(replace(s, name=f"{r}.{s.name}", group=s.group if s.group < 0 else s.group + 100_000 * r))
    rows = np.array([i for _, i in place])
    joint = max(w.flows, key=lambda f: f.count)
    for r in range(copies):
        for f in w.flows:
            readers = tuple(place[r, x] for x in f.readers if (r, x) in place)
            if (r, f.writer) in place and readers:
                flows.append(replace(f, writer=place[r, f.writer], readers=readers))
        for x in w.residents:
            own = tuple(place[r, i] for i in x.sites if (r, i) in place)
            if own:
                residents.append(replace(x, name=f"{r}.{x.name}", sites=own, nbytes=x.nbytes // copies))
        if r:
            flows.append(Flow(place[r, 0] - 1, (place[r, 0],), joint.nbytes, joint.count, f"copy {r}"))
    none = np.zeros((count, w.time_ns.shape[1]))
    return replace(
        w, sites=tuple(sites), time_ns=w.time_ns[rows] / copies, gap_ns=w.gap_ns[rows] / copies, flows=tuple(flows),
        residents=tuple(residents), sigma_systematic=none, sigma_site=none,
    )  # fmt: skip


def binding(w: Workload, depth: int) -> Workload:
    """The same on GPUs with room for ROOM of everything."""
    total = sum(r.nbytes * (w.batch * depth if r.state else 1) for r in w.residents) + w.workspace_bytes * depth
    memory = int(ROOM * total / USABLE)
    devices = tuple(replace(d, gpu=replace(d.gpu, memory_bytes=memory)) for d in w.cluster.devices)
    return replace(w, cluster=replace(w.cluster, devices=devices))


def measure(w: Workload, depth: int) -> dict[str, Any]:
    """The planner without its integer program: the median of a few runs, which all give the same plan."""
    took, found = [], None
    for _ in range(REPEATS):
        began = time.perf_counter()
        found = start(ClosedForm(w), depth)
        if found.seed is None or found.seed.gap > 0:
            found.tighten()
        took.append(time.perf_counter() - began)
    assert found is not None
    seed = found.seed
    if seed is None:
        return {"s": float(np.median(took)), "gap": 1.0, "plan": "none found"}
    return {
        "s": float(np.median(took)), "gap": seed.gap, "plan": seed.origin, "period_ms": seed.prediction.period_ns / 1e6,
        "bound_ms": seed.bound_ns / 1e6, "gpus": len(set(seed.x.tolist())), "status": seed.status,
    }  # fmt: skip


def exact(w: Workload, depth: int) -> dict[str, Any]:
    """The integer program as it is, for a minute."""
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import coo_array

    began = time.perf_counter()
    form = ClosedForm(w)
    begun = start(form, depth)
    program = Program(form, depth, np.arange(form.n_sites), begun.bound_ns)
    r = program.rows
    entries = np.concatenate(r.val), (np.concatenate(r.row), np.concatenate(r.col))
    matrix = coo_array(entries, shape=(r.n, program.t + 1)).tocsr()
    cost, kinds = np.zeros(program.t + 1), np.zeros(program.t + 1)
    cost[-1], kinds[: program.y0] = 1.0, 1
    limits = LinearConstraint(matrix, np.concatenate(r.lo), np.concatenate(r.hi))
    run: Any = milp
    found = run(cost, integrality=kinds, bounds=program._bounds(), constraints=limits,
                options={"time_limit": EXACT_S, "mip_rel_gap": 1e-3})  # fmt: skip
    gap = float(found.mip_gap) if found.x is not None and found.mip_gap is not None else 1.0
    return {"exact_gap": gap, "exact_s": time.perf_counter() - began}


def cells(only: str) -> list[tuple[int, int, float, int, str, str]]:
    return [
        (gpus, sites, limit, gbps, objective, memory)
        for gpus, sites, limit in SIZES if only in ("", f"{gpus}x{sites}")
        for gbps in (25, 200) for objective in DEPTHS for memory in ("free", "binding")
    ]  # fmt: skip


def verdict(row: dict[str, Any]) -> str:
    wide = row["gbps"] >= 200 and row["memory"] == "free"
    if row["s"] > row["limit_s"]:
        return "MISSED (time)"
    if row["gap"] <= (0.003 if wide else 0.01):
        return "met"
    if not wide and row["gap"] <= 0.03 and row["gap"] <= row.get("exact_gap", -1.0):
        return "met (exact is no closer)"
    return "MISSED (gap)"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--exact", action="store_true", help="also run the exact program, a minute per cell")
    parser.add_argument("--out", type=Path, default=Path("results/planner_table.jsonl"), help="journal of exact runs")
    parser.add_argument("--only", default="", metavar="GPUSxSITES", help="e.g. 4x1000")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if options.out.exists():
        known = {tuple(r["cell"]): r for r in map(json.loads, options.out.read_text().splitlines())}
    mix = load_mix(str(ROOT / "traces/llama-3-8b.toml"))
    print(f"{'GPUs x sites':<12} {'Gb/s':>5} {'objective':<10} {'memory':<8} {'s':>6} {'limit':>5} {'gap':>8} "
          f"{'exact':>8} {'GPUs used':>9}  plan")  # fmt: skip
    count = 0
    for gpus, sites, limit, gbps, objective, memory in cells(options.only):
        depth = DEPTHS[objective]
        w = tile(build_workload(mix, parse_cluster(f"{GPUS[gpus]}@{gbps}Gbps"), RooflineRatio(), 32), sites)
        w = binding(w, depth) if memory == "binding" else w
        key = (gpus, sites, gbps, objective, memory)
        row = {"gbps": gbps, "memory": memory, "limit_s": limit}
        try:
            row |= measure(w, depth)
        except DoesNotFitError as error:
            row |= {"s": 0.0, "gap": 1.0, "plan": str(error)}
        if key in known:
            row |= {k: known[key][k] for k in ("exact_gap", "exact_s")}
        elif options.exact:
            found = exact(w, depth)
            row |= found
            with options.out.open("a", encoding="utf-8") as f:
                f.write(json.dumps({"cell": key, **found}) + "\n")
        said = verdict(row)
        count += said.startswith("met")
        there = f"{100 * row['exact_gap']:7.2f}%" if "exact_gap" in row else f"{'-':>8}"
        print(f"{f'{gpus} x {sites}':<12} {gbps:>5} {objective:<10} {memory:<8} {row['s']:6.2f} {limit:5.1f} "
              f"{100 * row['gap']:7.2f}% {there} {row.get('gpus', 0):>9}  {row['plan']}: "
              f"{row.get('status', '')}, {said}", flush=True)  # fmt: skip
    print(f"{count} of {len(cells(options.only))} cells met")
    return 0


if __name__ == "__main__":
    sys.exit(main())
