"""Running a sweep: what is already there is kept, what is missing is computed, then everything is summed up."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tesserasim.cluster.model import Cluster
from tesserasim.cluster.parse import parse_cluster
from tesserasim.errors import InputError
from tesserasim.metrics.verdict import verdict
from tesserasim.policies import policies
from tesserasim.sweep.bench import FAILED, OK, Bench, Job, check_gpus
from tesserasim.sweep.executor import Task, describe, executor
from tesserasim.sweep.inputs import code_version, inputs, mix_content
from tesserasim.sweep.spec import Experiment, SweepSpec, expand
from tesserasim.sweep.store import Store, digest, finite
from tesserasim.sweep.summary import Row, rows_of, summary_writers
from tesserasim.sweep.toml import did_you_mean
from tesserasim.trace.mix import load_mix, with_lengths
from tesserasim.writing import write_whole

MAX_JOBS = 1024
#: What a sweep writes beside its results.
SUMMARY = ("summary.csv", "summary.parquet", "verdicts.txt")
OUTPUTS = (*SUMMARY, "figure.png", "figure.pdf", "figure.csv")


@dataclass
class SweepResult:
    """What a sweep gave: rows of the summary, and how they came to be."""

    out: Path
    rows: list[Row]
    verdicts: list[str] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    computed: int = 0
    reused: int = 0
    files: list[Path] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)  # why files of the summary could not be written
    wall_s: float = 0.0


def run_sweep(
    spec: SweepSpec, out: Path, *, jobs: int | None = None, executor_name: str = "local", fresh: bool = False,
    progress: bool = False, figure: bool = True,
) -> SweepResult:  # fmt: skip
    """Run what `spec` asks for and is not in `out` yet, and write the summary.

    A failed experiment is listed and leaves the others alone, and so does a file of the summary that cannot be
    written after all. Raises InputError, before anything is computed, for names that do not exist, mixes that
    cannot be read and files that cannot be written.
    """
    started = time.monotonic()
    jobs = min(jobs or os.cpu_count() or 1, MAX_JOBS)
    run = executor(executor_name)
    prepared = _prepare(spec)
    store = Store(out)
    store.check(OUTPUTS if figure else SUMMARY)
    with store.locked():
        if fresh:
            store.wipe()
        found = {job.key: store.load(job.key) for job in prepared.values()}
        missing = [job for job in prepared.values() if found[job.key] is None]
        errors: dict[str, str] = {}
        if missing:
            tasks = [Task(job.key, job.experiment.group, job) for job in missing]
            with _progress(len(prepared), len(prepared) - len(missing), progress) as tick:
                for done in run(tasks, Bench(str(out.resolve())), jobs):
                    if done.error is not None:
                        errors[done.key] = done.error
                    tick()
        result = _collect(spec, prepared, store, errors)
        result.computed, result.reused = len(missing) - len(errors), len(prepared) - len(missing)
        _write(result, figure)
    result.wall_s = time.monotonic() - started
    return result


def _prepare(spec: SweepSpec) -> dict[Experiment, Job]:
    """Every experiment with its key. Reads mixes and clusters once, so that wrong input ends the sweep here."""
    registered = policies()
    for name in spec.policies:
        if name not in registered:
            raise InputError(f"sweep {spec.name}: unknown policy {name!r}{did_you_mean(name, list(registered))}")
    experiments = expand(spec, {name: policy.uses_link for name, policy in registered.items()})
    version = code_version()
    for m in spec.mixes:  # checks every file, before it is read as a whole for its hash
        check_gpus(with_lengths(load_mix(m.path), m.input_tokens, m.output_tokens))
    contents = {m.path: mix_content(Path(m.path)) for m in spec.mixes}
    clusters: dict[str, Cluster] = {}
    prepared = {}
    for experiment in experiments:
        text = experiment.cluster_text(spec.links[0])
        if text not in clusters:
            clusters[text] = parse_cluster(text, prices=spec.prices)
        content = inputs(experiment, contents[experiment.mix], clusters[text], version)
        prepared[experiment] = Job(digest(content), content, experiment, text, version)
    return prepared


def _collect(
    spec: SweepSpec, prepared: Mapping[Experiment, Job], store: Store, errors: Mapping[str, str]
) -> SweepResult:
    results: dict[Experiment, Mapping[str, Any]] = {}
    failures = []
    for experiment, job in prepared.items():
        result = store.load(job.key)
        if result is None:
            reason = errors.get(job.key, "no result was stored")
            failures.append({"experiment": experiment.label(), "key": job.key, "error": reason})
            name = job.inputs["mix"]["mix"].get("name", "")
            result = {"row": {"mix": name, "status": FAILED, "reason": reason, "tool": job.version}, "draws": []}
        results[experiment] = result
    rows = rows_of(tuple(prepared), results, spec.links)
    return SweepResult(store.root, rows, verdict_lines(rows), failures)


def verdict_lines(rows: Sequence[Row]) -> list[str]:
    """A line per mix, cluster and link, from the own-best table (the only table that a verdict may use)."""
    cases: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.get("table") == "own-best":
            case = (str(row.get("mix")), str(row.get("cluster")), str(row.get("link") or ""))
            cases.setdefault(case, []).append(row)
    lines = []
    for (mix, cluster, link), block in cases.items():
        done = [row for row in block if row.get("status") == OK]
        where = f"{mix} on {cluster}" + (f" @ {link}" if link else "")
        lines.append(f"{where}: {verdict(done) if done else 'no policy finished'}")
    return lines


def _write(result: SweepResult, figure: bool) -> None:
    """Write every file of the summary that can be written; the others are listed and leave the rows alone."""
    from tesserasim.report.table import format_rows

    def verdicts() -> list[Path]:
        text = format_rows(result.rows) + "\n\n" + "\n".join(result.verdicts) + "\n"
        write_whole(result.out / "verdicts.txt", text.encode())
        return [result.out / "verdicts.txt"]

    def pictures() -> list[Path]:
        from tesserasim.report.figure import draw

        return draw(result.rows, result.out / "figure")

    steps: list[Callable[[], list[Path]]] = [*summary_writers(result.rows, result.out), verdicts]
    for step in [*steps, pictures] if figure else steps:
        try:
            result.files += step()
        except Exception as error:  # what was computed is reported whatever happens to its files
            result.unwritten.append(describe(error))


def spec_document(spec: SweepSpec) -> dict[str, Any]:
    """The spec as plain data, paths reduced to names."""
    document: dict[str, Any] = finite(dataclasses.asdict(spec))
    for mix in document["mixes"]:
        mix["path"] = Path(mix["path"]).name
    return document


class _progress:
    """A bar on standard error, or nothing."""

    def __init__(self, total: int, done: int, show: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=total, initial=done, desc="experiments", unit="", file=sys.stderr, disable=not show,
            dynamic_ncols=True, mininterval=0.1 if sys.stderr.isatty() else 5.0,
        )  # fmt: skip

    def __enter__(self) -> Callable[[], object]:
        return lambda: self._bar.update()

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
