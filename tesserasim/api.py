"""What a program calls: compare policies, simulate one, make a plan, run a sweep, read traces and what flows in them.

Mixes and clusters are given as objects or as text: a mix by the name of a shipped one or the path of a TOML
file, a cluster in its short form ("A100-80GB-PCIe+L40S@25Gbps") or as the path of a TOML file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tesserasim import arguments
from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import Cluster
from tesserasim.cluster.parse import parse_cluster
from tesserasim.errors import InputError
from tesserasim.metrics.verdict import verdict
from tesserasim.plans import Plan, read_plan
from tesserasim.policies import policies as registered_policies
from tesserasim.sweep.bench import OK, check_gpus, run_case, run_plan, run_policy, write_run
from tesserasim.sweep.locate import default_spec, find_mix
from tesserasim.sweep.run import SweepResult, run_sweep
from tesserasim.sweep.spec import load_spec
from tesserasim.sweep.summary import flat
from tesserasim.trace.assemble import from_graph, graph_facts
from tesserasim.trace.mix import Mix, with_lengths
from tesserasim.trace.mix import load_mix as _load_mix_file
from tesserasim.trace.model import Trace, structure_sha256
from tesserasim.trace.parquet import read_trace, write_trace
from tesserasim.writing import check_output, naming

if TYPE_CHECKING:
    import pandas as pd

MixLike = Mix | str | os.PathLike[str]
ClusterLike = Cluster | str


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace (Parquet). Raises InputError if it is none."""
    return read_trace(arguments.path("path", path))


def load_mix(name: str | os.PathLike[str]) -> Mix:
    """Read a mix by the path of its TOML file, or by name if it is a shipped one."""
    return _load_mix_file(find_mix(os.fspath(arguments.path("mix", name))))


def _mix(mix: MixLike, input_tokens: int | None, output_tokens: int | None) -> Mix:
    loaded = mix if isinstance(mix, Mix) else load_mix(mix)
    check_gpus(loaded)
    lengths = arguments.tokens("input_tokens", input_tokens), arguments.tokens("output_tokens", output_tokens)
    return with_lengths(loaded, *lengths)


def _cluster(cluster: ClusterLike, prices: str) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    return parse_cluster(arguments.text("cluster", cluster), prices=arguments.text("prices", prices))


def compare(
    mix: MixLike, cluster: ClusterLike, policies: Sequence[str] | None = None, *,
    input_tokens: int | None = None, output_tokens: int | None = None, prices: str = "median", **options: Any,
) -> pd.DataFrame:  # fmt: skip
    """A row per policy, best first: throughput with its 80 % interval, P(win), cost, the honest comparisons.

    `options` are the fields of `tesserasim.sweep.bench.Options` (batch and depth: a number or the numbers to choose
    from; max_seqs, in_flight, engine, seed, device_model). Policies that do not apply have a status and a reason.
    The verdict line is in `frame.attrs["verdict"]`.
    """
    import pandas as pd

    loaded = _mix(mix, input_tokens, output_tokens)
    chosen = arguments.options_of(options, options.pop("batch", None), options.pop("depth", None))
    chosen_policies = arguments.names("policies", policies)
    rows = [e.row for e in run_case(loaded, _cluster(cluster, prices), chosen_policies, chosen)]
    line = verdict([row for row in rows if row["status"] == OK])
    rows.sort(key=lambda r: (-(r.get("throughput_per_s") or 0.0), str(r["policy"])))
    frame = pd.DataFrame([flat(row) for row in rows])
    frame.attrs["verdict"] = line
    return frame


def simulate(
    mix: MixLike, cluster: ClusterLike, policy: str | None = None, *,
    plan: Plan | str | os.PathLike[str] | None = None, batch: int | None = None, depth: int | None = None,
    input_tokens: int | None = None, output_tokens: int | None = None, prices: str = "median",
    check: bool = False, timeline: str | os.PathLike[str] | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """One result row (keys of `simulate --json`) of a policy at its best batch and depth, or of a plan.

    `batch` and `depth` fix what the policy may choose. `check` verifies the invariants of every run;
    `timeline` names a file for the run of the first cohorts, which Perfetto shows. A policy that does not
    apply gives `status` "not applicable" and a `reason`.
    """
    row, write = simulation(
        mix, cluster, policy, plan=plan, batch=batch, depth=depth, input_tokens=input_tokens,
        output_tokens=output_tokens, prices=prices, check=check, timeline=timeline, **options,
    )  # fmt: skip
    write()
    return row


def simulation(
    mix: MixLike, cluster: ClusterLike, policy: str | None = None, *,
    plan: Plan | str | os.PathLike[str] | None = None, batch: int | None = None, depth: int | None = None,
    input_tokens: int | None = None, output_tokens: int | None = None, prices: str = "median",
    check: bool = False, timeline: str | os.PathLike[str] | None = None, **options: Any,
) -> tuple[dict[str, Any], Callable[[], None]]:  # fmt: skip
    """`simulate` in two steps: the row, and a call that writes the timeline, so that the row is never lost."""
    if (policy is None) == (plan is None):
        raise InputError("simulate: give a policy or a plan, one of the two")
    if timeline is not None:
        check_output(arguments.path("timeline", timeline), *([] if plan is None or isinstance(plan, Plan) else [plan]))
    loaded, machines = _mix(mix, input_tokens, output_tokens), _cluster(cluster, prices)
    chosen = arguments.options_of(options, batch, depth, check=check)
    if plan is not None:
        given = plan if isinstance(plan, Plan) else read_plan(arguments.path("plan", plan))
        found = run_plan(loaded, machines, given, chosen)
    else:
        found = run_policy(loaded, machines, arguments.text("policy", policy), chosen)

    def write() -> None:
        if timeline is not None and found.plan is not None:
            write_run(loaded, machines, found.plan, Path(timeline), chosen)

    return found.row, write


def plan(
    mix: MixLike, cluster: ClusterLike, policy: str | None = None, *, batch: int | None = None,
    depth: int | None = None, input_tokens: int | None = None, output_tokens: int | None = None,
    prices: str = "median", **options: Any,
) -> Plan:  # fmt: skip
    """The plan of `policy` that simulates best; of the best policy if none is named.

    Raises InputError if the policy does not apply, with its reason.
    """
    loaded, machines = _mix(mix, input_tokens, output_tokens), _cluster(cluster, prices)
    names = None if policy is None else [arguments.text("policy", policy)]
    found = run_case(loaded, machines, names, arguments.options_of(options, batch, depth))
    plans = [e for e in found if e.plan is not None]
    if not plans:
        raise InputError("; ".join(f"{e.row['policy']} does not apply: {e.row['reason']}" for e in found))
    best = max(plans, key=lambda e: (e.row["throughput_per_s"], e.row["p_win"] or 0.0)).plan
    assert best is not None
    return best


def plan_document(made: Plan, mix: Mix) -> dict[str, Any]:
    """A plan as `plan --json` prints it: the file, and the assignment of the lane with the largest share.

    `assignment` names every site of `mix`, where the file may say "*" for all of a unit.
    """
    document = dataclasses.asdict(made)
    main = max(made.lanes, key=lambda lane: lane.share)
    document["assignment"] = {
        unit: {site: main.device_of(unit, site) for trace in mix.traces[unit] for site in trace.sites}
        for unit in mix.units
    }
    return document


def sweep(
    spec: str | os.PathLike[str] | None = None, out: str | os.PathLike[str] | None = None, *,
    jobs: int | None = None, executor: str = "local", fresh: bool = False, quick: bool = False,
    progress: bool = False,
) -> SweepResult:  # fmt: skip
    """Run a sweep spec (default: experiments/default.toml of the checkout) into a directory, and sum it up.

    Results that are already there are kept. Raises InputError before anything runs if the spec is wrong.
    """
    for name, value in (("fresh", fresh), ("quick", quick), ("progress", progress)):
        arguments.flag(name, value)
    jobs = None if jobs is None else arguments.whole("jobs", jobs, 1, 2**31)
    arguments.text("executor", executor)
    loaded = load_spec(Path(arguments.path("spec", spec)) if spec is not None else default_spec(), quick=quick)
    target = Path(arguments.path("out", out)) if out is not None else Path("results") / loaded.name
    return run_sweep(loaded, target, jobs=jobs, executor_name=executor, fresh=fresh, progress=progress)


def sweep_document(result: SweepResult) -> dict[str, Any]:
    """A sweep as `sweep --json` prints it."""
    return {
        "out": str(result.out), "computed": result.computed, "reused": result.reused,
        "failed": len(result.failures), "verdicts": result.verdicts, "failures": result.failures,
        "rows": result.rows, "files": [str(f) for f in result.files],
    }  # fmt: skip


def import_profile(
    path: str | os.PathLike[str], out: str | os.PathLike[str], *, unit: str | None = None,
    kernels: tuple[int, int] | None = None, iteration: int | None = None, phase: str | None = None,
    gpu: str | None = None, clip: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Import a profile into the trace file `out` and return its facts (keys of `import --json`).

    `kernels` (first, end) keeps a stretch in launch order, in which copies and sets count too, `iteration` (from 0)
    one repeat of what the profile repeats; `unit` names it, `phase` says what it does, `gpu` on which GPU it ran,
    whatever the profile says.
    """
    from tesserasim.trace.bounds import with_bounds
    from tesserasim.trace.importer import import_profile as read_profile
    from tesserasim.trace.inspect import facts
    from tesserasim.trace.iterations import rows_of

    if kernels is not None and iteration is not None:
        raise InputError("import: give a range or an iteration, one of the two")
    check_output(arguments.path("out", out), arguments.path("path", path))
    for name, value in (("unit", unit), ("gpu", gpu)):
        if value is not None:
            arguments.text(name, value)
    if kernels is not None:
        kernels = arguments.interval("kernels", kernels)
    if iteration is not None:
        iteration = arguments.whole("iteration", iteration, 0, arguments.MAX_SEED)
    trace = read_profile(path, clip=clip)
    repeats = trace.meta.extra.get("iterations")
    if kernels is not None:
        trace = _stretch(trace, *kernels, os.fspath(path))
    if iteration is not None:
        trace = _part(trace, rows_of(repeats, iteration, os.fspath(path)))
    if unit is not None or phase is not None:
        words = {"name": unit, "phase": phase}
        meta = dataclasses.replace(
            trace.meta, unit={**trace.meta.unit, **{k: v for k, v in words.items() if v is not None}}
        )
        rows = tuple(dataclasses.replace(k, phase=phase) if phase else k for k in trace.kernels)
        trace = dataclasses.replace(trace, meta=meta, kernels=rows)
    if gpu is not None:
        trace = _renamed_gpu(trace, find_gpu(gpu).name)
    trace = with_bounds(_with_side_by_side(trace), *_peak_rates(trace.meta.gpu))
    with naming(out):
        write_trace(trace, out)
    found = {"found_by": repeats["found_by"], "names": repeats["names"], "chosen": iteration} if repeats else None
    work = trace.meta.extra["work"]
    return {**facts(trace), "out": os.fspath(out), "unit": trace.unit, "iterations": found, "work": work}


def dependencies(trace: Trace | str | os.PathLike[str]) -> dict[str, Any]:
    """What flows between the kernels of a trace, as `deps TRACE --json` prints it.

    `trace`: one in memory, or the path of a Parquet trace or of any profile that can be imported. Raises
    InputError if the file holds neither.
    """
    from tesserasim.deps.summary import dependencies as summary
    from tesserasim.trace.importer import import_profile as read_profile
    from tesserasim.trace.sniff import FileKind, sniff

    if isinstance(trace, Trace):
        return summary(trace)
    path = arguments.path("trace", trace)
    return summary(read_trace(path) if sniff(path) is FileKind.PARQUET else read_profile(path))


def _renamed_gpu(trace: Trace, gpu: str) -> Trace:
    """`trace` as of the type `gpu`, with a warning where the profile names a GPU that is no such type."""
    said, warnings = trace.meta.gpu, trace.meta.warnings
    try:
        other = bool(said.strip("? ")) and find_gpu(said).name != gpu
    except InputError:
        other = True
    if other:
        warnings += (f"the profile says that it ran on {said}; it is taken as one of {gpu}",)
    return dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, gpu=gpu, warnings=warnings))


def _with_side_by_side(trace: Trace) -> Trace:
    """`trace` with a warning if its kernels ran on several streams or devices: a simulation puts them in one row."""
    streams, devices = len({(k.device, k.stream) for k in trace.kernels}), len({k.device for k in trace.kernels})
    if streams < 2:
        return trace
    took = max(k.start_ns + k.duration_ns for k in trace.kernels) - min(k.start_ns for k in trace.kernels)
    where = f"{streams} streams" + (f" of {devices} devices" if devices > 1 else "")
    warning = (
        f"kernels of {where}: a simulation runs them one after another on one GPU, each after the pause that it had on "
        f"its stream: in {trace.span_ns / 1e6:.3f} ms, where the profile took {took / 1e6:.3f} ms"
    )
    return dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, warnings=(*trace.meta.warnings, warning)))


def _peak_rates(gpu: str) -> tuple[float | None, float | None]:
    """Bytes and FLOPs per ns of the GPU called so; None for one that the catalogue does not know."""
    try:
        spec = find_gpu(gpu) if gpu else None
    except InputError:
        spec = None
    return (spec.bandwidth_gbs, spec.bf16_tflops * 1e3) if spec is not None else (None, None)


def _stretch(trace: Trace, first: int, end: int, where: str) -> Trace:
    """The rows first to end - 1. InputError, which names the file `where`, if there are fewer."""
    if end > len(trace):
        raise InputError(f"{where}: --range ends at {end}, the profile has {len(trace)} kernels, copies and sets")
    return _part(trace, range(first, end))


def _part(trace: Trace, places: Sequence[int]) -> Trace:
    """The kernels at these places in launch order, renumbered; the first on each stream has no gap."""
    ends: dict[tuple[int, int], int] = {}
    rows = []
    for i, kernel in enumerate(trace.kernels[at] for at in places):
        where = (kernel.device, kernel.stream)
        # Kernels of another iteration may have run in between, so the gap is taken anew.
        gap = kernel.start_ns - ends.get(where, kernel.start_ns)
        rows.append(dataclasses.replace(kernel, id=i, gap_ns=gap))
        ends[where] = kernel.start_ns + kernel.duration_ns
    graph = from_graph(trace.meta.extra)
    extra = {k: v for k, v in trace.meta.extra.items() if k != "iterations"}
    extra |= graph_facts([graph[at] for at in places])
    meta = dataclasses.replace(trace.meta, structure_sha256=structure_sha256(tuple(rows)), extra=extra)
    return dataclasses.replace(trace, meta=meta, kernels=tuple(rows))


def describe_policies() -> list[dict[str, Any]]:
    """The registered policies: name, what they do in a line, whether the link matters."""
    return [
        {"name": name, "description": policy.summary, "uses_link": policy.uses_link}
        for name, policy in registered_policies().items()
    ]


def predict_costs(
    trace: Trace | str | os.PathLike[str], cluster: ClusterLike, site: str | None = None
) -> dict[str, Any]:
    """Times of a trace's sites on the GPUs of a cluster, with source and error (keys of `costs predict --json`)."""
    from tesserasim.costs.predict import predict_document

    loaded = trace if isinstance(trace, Trace) else load_trace(trace)
    name = loaded.unit if isinstance(trace, Trace) else os.fspath(trace)
    chosen = None if site is None else arguments.text("site", site)
    return predict_document(loaded, _cluster(cluster, "median"), name, chosen)
