"""Are the read and write sets of the traces sound? The oracle's reports, one line per unit.

Bars: nothing missed, every kernel reached, at most 2 % of the kernels skipped or without evidence. Reads that were
not observed are reads that changed nothing when their bytes changed: they cost bytes, never soundness.

What was checked are the kernels and sets of the oracle's own capture. `traced` is what it said of the trace at
that time: all kernels of the step launched alike (tuning may choose other grids), with the same sets. `sets` counts
the checked kernels whose sets are those of the trace as it is now: buffers, modes, ranges, covering, but for the
sizes of workspaces, which hang on the library's choice.

    python experiments/validation/oracle_summary.py [FOLDER [TRACES]]   (experiments/validation/oracle, traces)
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hw.oracle.report import read_report
from tesserasim.deps.words import shown
from tesserasim.errors import TesserasimError
from tesserasim.terminal import outcome, say
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import read_trace

FOLDER = Path(__file__).resolve().parent / "oracle"
TRACES = Path(__file__).resolve().parents[2] / "traces"
BAR = 0.02
MISSED = ("missed_read", "missed_write")
UNREACHED = "not reached"
OPEN = ("skipped", "unknown")
STATES = ("ok", *MISSED, *OPEN, UNREACHED)
#: What should have been checked: model -> folder and unit name of each of its phases.
WANTED = {
    "llama-3-8b": (("llama-3-8b", "prefill"), ("llama-3-8b", "decode")),
    "gpt-oss-20b": (("gpt-oss-20b", "prefill"), ("gpt-oss-20b", "decode")),
    "mamba-codestral-7b": (("mamba-codestral-7b", "prefill"), ("mamba-codestral-7b", "decode")),
    "qwen2.5-vl-7b": (("qwen2.5-vl-7b", "prefill"), ("qwen2.5-vl-7b", "decode")),
    "sd3.5-medium": (
        ("sd3.5-medium", "denoise"), ("sd3.5-encoders", "encode-text"), ("sd3.5-encoders", "vae-decode"),
    ),
}  # fmt: skip


def state(kernel: dict[str, Any]) -> str:
    """A kernel's place in the table: missed and not reached beat unknown, unknown beats the rest."""
    status = str(kernel["status"])
    return "unknown" if kernel["unknown"] and status not in (*MISSED, UNREACHED) else status


def missing(units: set[tuple[str, str]]) -> list[str]:
    """Phases of the five models of which no (folder, unit name) was checked."""
    return [f"{model} {unit}" for model, phases in WANTED.items() for folder, unit in phases
            if (folder, unit) not in units]  # fmt: skip


def as_traced(report: dict[str, Any]) -> str:
    """Either "yes", or what differs from the trace."""
    if not report["same_kernels_as_trace"]:
        return "other kernels"
    others = report.get("kernels_with_other_sets_than_trace") or 0
    return f"{others} sets differ" if others else "yes"


def trace_of(traces: Path, model: str, stem: str) -> Trace | None:
    path = traces / model / f"{stem}.parquet"
    return read_trace(path) if path.exists() else None


def other_sets(report: dict[str, Any], trace: Trace) -> list[str]:
    """Sites of the checked kernels whose sets are not those of the trace: all, if it has other kernels."""
    if len(trace.kernels) != report.get("step_kernels") or any(
        k["node"] >= len(trace.kernels) for k in report["kernels"]
    ):
        return [k["site"] for k in report["kernels"]]
    found = []
    for k in report["kernels"]:
        checked = [{**a, **k["buffers"][str(a["buffer"])], "range": (a["offset"], a["nbytes"])} for a in k["accesses"]]
        traced = trace.kernels[k["node"]]
        ours = [
            (a["name"], a["mode"], a["extent"], a["covers"], a["role"] == "workspace" or a["range"]) for a in checked
        ]
        theirs = [
            (b.name, a.mode, a.extent, a.covers, b.role == "workspace" or (a.offset, a.nbytes))
            for a in traced.accesses for b in [trace.buffers[a.buffer]]
        ]  # fmt: skip
        if (k["site"], ours) != (traced.site, theirs):
            found.append(k["site"])
    return found


def details(unit: str, report: dict[str, Any], others: Sequence[str]) -> list[str]:
    """One line per kernel that is not plainly ok or has `others` sets, kernels of equal state and reason together."""
    alike: dict[tuple[str, str], list[str]] = {}
    for k in report["kernels"]:
        if state(k) != "ok":
            alike.setdefault((state(k), k["reason"] or "-"), []).append(k["site"])
    if others:
        alike["sets differ", "from the trace's"] = list(others)
    return [
        f"{unit}: {what}: {reason}: {sites[0]}" + (f" and {len(sites) - 1} more" if len(sites) > 1 else "")
        for (what, reason), sites in alike.items()
    ]


def row(unit: str, report: dict[str, Any], others: Sequence[str] | None) -> tuple[str, Counter[str], Counter[str]]:
    """The unit's line, its kernels by state, its reads by what was seen of them. `others`: None without a trace."""
    kernels = report["kernels"]
    count = Counter(state(k) for k in kernels)
    reads = Counter(str(r["seen"]) for k in kernels for r in k["reads"])
    cells = " ".join(f"{count[n]:>12}" for n in STATES)
    tried = f"{reads['observed']}/{reads['observed'] + reads['not observed']}/{reads.total()}"
    sets = "no trace" if others is None else f"{len(kernels) - len(others)}/{len(kernels)}"
    line = f"{unit:<40} {len(report['blocks']):>6} {len(kernels):>7} {cells} {_open(count):>8.2%} {tried:>16} "
    return line + f"{sets:>8} {as_traced(report)}", count, reads


def _open(count: Counter[str]) -> float:
    return sum(count[n] for n in OPEN) / max(1, count.total())


def main(folder: Path, traces: Path = TRACES) -> int:
    paths = sorted(folder.glob("*/*.json"))
    if not paths:
        print(f"error: no reports in {folder}", file=sys.stderr)
        return 2
    total: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    lines, texts, units, changed = [], [], set(), 0
    problems: list[str] = []
    for path in paths:
        model, unit = path.parent.name, f"{path.parent.name}/{path.stem}"
        try:
            report = read_report(path)
            trace = trace_of(traces, model, path.stem)
        except TesserasimError as error:  # the others are summed up all the same
            problems.append(str(error))
            continue
        others = other_sets(report, trace) if trace else None
        line, count, reads = row(unit, report, others)
        texts += details(unit, report, others or ())
        if count["ok"]:
            units.add((model, report["unit"]["name"]))
        lines.append(line)
        total += count
        seen += reads
        changed += len(others or ())
    heads = " ".join(f"{n:>12}" for n in STATES)
    print(f"{'unit':<40} {'blocks':>6} {'kernels':>7} {heads} {'open':>8} {'seen/tried/reads':>16} {'sets':>8} traced")
    for text in lines + [f"  {text}" for text in texts]:
        print(shown(text, 222))
    for problem in problems:
        say("error", problem)
    if problems:
        return 2
    return verdict(total, seen, len(paths), changed, missing(units))


def verdict(total: Counter[str], seen: Counter[str], units: int, changed: int, absent: Sequence[str]) -> int:
    """The closing lines; 1 if anything was missed or not reached, or too much is open."""
    missed = sum(total[n] for n in MISSED)
    good = total.total() > 0 and not missed and not total[UNREACHED] and _open(total) <= BAR
    print(
        f"{units} units, {total.total()} kernels: {missed} missed, {total[UNREACHED]} not reached, "
        f"{_open(total):.2%} skipped or unknown (bars: 0, 0, {BAR:.0%}); {changed} with other sets than the trace"
    )
    print(f"reads: {seen['observed']} observed, {seen['not observed']} not observed, {seen['not tried']} not tried")
    print(f"not checked yet: {', '.join(absent)}" if absent else "all models and phases checked")
    print("all within the bars" if good else "SOME OUTSIDE THE BARS")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(outcome("error", lambda: main(*map(Path, sys.argv[1:3] or [FOLDER]))))
