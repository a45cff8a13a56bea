"""One experiment, start to end, in whatever process it runs; what experiments share is kept between them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import Cluster
from tesserasim.costs.base import default_costs
from tesserasim.errors import InputError
from tesserasim.evaluate import Cache, Evaluation, evaluate, evaluate_plan, set_p_win
from tesserasim.plans import Plan
from tesserasim.policies import Limits, policies
from tesserasim.policies.base import BATCHES, DEPTHS
from tesserasim.sweep.inputs import code_version
from tesserasim.sweep.locate import find_mix
from tesserasim.sweep.spec import EQUAL, OWN_BEST, Experiment
from tesserasim.sweep.store import Store
from tesserasim.trace.mix import Mix, load_mix, with_lengths

Result = dict[str, Any]
OK, NOT_APPLICABLE, FAILED = "ok", "not applicable", "failed"


@dataclass(frozen=True, slots=True)
class Options:
    """How a policy is tried: what it may choose from, and how the choice is simulated."""

    batch: tuple[int, ...] = BATCHES
    depth: tuple[int, ...] = DEPTHS
    in_flight: int | None = None  # the equal table: sum of B * d over the lanes; None: own best
    max_seqs: int = 256
    engine: str = "auto"
    seed: int = 0
    allow_extrapolation: bool = False  # beyond twice the captured range
    check: bool = False
    device_model: str = "serial"

    @property
    def table(self) -> str:
        return OWN_BEST if self.in_flight is None else EQUAL


def options_of(experiment: Experiment) -> Options:
    e = experiment
    return Options(e.batch, e.depth, e.in_flight, e.max_seqs, e.engine, e.seed, e.allow_extrapolation)


@dataclass(frozen=True, slots=True)
class Job:
    """An experiment with its key, and all that its result depends on."""

    key: str
    inputs: dict[str, Any]
    experiment: Experiment
    cluster: str  # with the link to run on; any link for an experiment that does not depend on it
    version: str


@dataclass
class Bench:
    """Runs jobs and stores their results under `root`. Lives in a worker process for many jobs."""

    root: str
    _store: Store | None = field(default=None, repr=False)
    _gate: int = field(default=-1, repr=False)  # open: this process is a worker of the directory
    _version: str = field(default="", repr=False)  # of the source that this process runs
    _group: Any = field(default=None, repr=False)
    _cache: Cache = field(default_factory=dict, repr=False)
    _mixes: dict[str, Mix] = field(default_factory=dict, repr=False)

    def start(self) -> None:
        """Become a worker of the directory."""
        self._store = Store(Path(self.root))
        self._gate = self._store.join_workers()
        self._version = code_version()

    def stop(self) -> None:
        """No longer be one."""
        os.close(self._gate)

    def __call__(self, job: Job) -> str:
        """Compute and store one result; returns its status.

        InputError if this process runs other source than the one that `job.key` is made of: its result would lie
        under the wrong key for good.
        """
        assert self._store is not None
        if job.version != self._version:
            raise InputError("tesserasim's own files were changed while the sweep ran; run the same command again")
        started = time.monotonic()
        self._store.journal("start", job.key)
        result = self._run(job)
        self._store.save(job.key, job.inputs, result)
        # The result is there before the journal says so: a journal without "done" may lack a line, never the file.
        wall = round(time.monotonic() - started, 3)
        self._store.journal("done", job.key, wall_s=wall, experiment=job.experiment.label())
        return str(result["row"]["status"])

    def _run(self, job: Job) -> Result:
        from tesserasim.cluster.parse import parse_cluster

        experiment = job.experiment
        if experiment.group != self._group:
            self._group = experiment.group
            for key in [k for k in self._cache if k[0] == "workload"]:  # large; runs are small and worth keeping
                del self._cache[key]
        if experiment.mix not in self._mixes:
            self._mixes[experiment.mix] = load_mix(find_mix(experiment.mix))
        mix = with_lengths(self._mixes[experiment.mix], experiment.input_tokens, experiment.output_tokens)
        cluster = parse_cluster(job.cluster, prices=experiment.prices)
        found = run_policy(mix, cluster, experiment.policy, options_of(experiment), self._cache)
        return {"row": {**found.row, "tool": job.version}, "draws": found.draws}


def check_gpus(mix: Mix) -> None:
    """InputError if a trace comes from a GPU that the catalogue does not have: no time could be predicted."""
    for unit in mix.units:
        for trace in mix.traces[unit]:
            if not trace.meta.gpu.strip("? "):
                raise InputError(f"mix {mix.name}, unit {unit}: its trace names no GPU; import --gpu NAME sets it")
            try:
                find_gpu(trace.meta.gpu)
            except InputError as error:
                raise InputError(f"mix {mix.name}, unit {unit}: {error} (import --gpu NAME sets it)") from None


def run_policy(
    mix: Mix, cluster: Cluster, policy: str, options: Options, cache: Cache | None = None
) -> Evaluation:
    """The policy's best plan as an evaluation; one that does not apply says why in its row."""
    return _done(evaluate(mix, cluster, default_costs(), policy, cache=cache, **_keywords(options)))


def run_plan(mix: Mix, cluster: Cluster, plan: Plan, options: Options) -> Evaluation:
    """A given plan as an evaluation."""
    return _done(evaluate_plan(mix, cluster, default_costs(), plan, **_keywords(options)))


def write_run(mix: Mix, cluster: Cluster, plan: Plan, path: Path, options: Options) -> None:
    """Simulate `plan` until each lane has completed one cohort, and write what ran where, for Perfetto."""
    from tesserasim.lower import lower
    from tesserasim.sim.engine import run
    from tesserasim.sim.timeline import write_timeline

    program = lower(
        mix, plan, cluster, default_costs(), labels=True, allow_extrapolation=options.allow_extrapolation,
        device_model=options.device_model,
    )  # fmt: skip
    write_timeline(program, run(program, engine=options.engine, timeline=True, cohorts=1), path)


def run_case(
    mix: Mix, cluster: Cluster, names: Sequence[str] | None, options: Options
) -> list[Evaluation]:
    """Several policies (None: all) on one case, with P(win) among them."""
    cache: Cache = {}
    found = [run_policy(mix, cluster, name, options, cache) for name in (names or list(policies()))]
    set_p_win(found)
    return found


def _keywords(options: Options) -> dict[str, Any]:
    limits = Limits(options.batch, options.depth, options.max_seqs, in_flight=options.in_flight)
    return {
        "limits": limits, "engine": options.engine, "seed": options.seed, "table": options.table,
        "allow_extrapolation": options.allow_extrapolation, "check": options.check,
        "device_model": options.device_model,
    }  # fmt: skip


def _done(evaluation: Evaluation) -> Evaluation:
    evaluation.row["status"] = OK if evaluation.applicable else NOT_APPLICABLE
    return evaluation
