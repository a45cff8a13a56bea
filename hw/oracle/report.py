"""From the journal of one unit to its report. Needs no GPU and no PyTorch.

Journal lines: `unit` (what was run), `phase` (a kernel, before each of its launches), `judged` (a finding before
its reads are tried), `kernel` (a finding), `note` (what the child does between kernels), `refused` (why a unit is
not checked at all).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tesserasim.writing import write_whole

#: What the end of the process means: phase -> (status, words after what happened).
FAILED_WHILE = {
    "A": ("missed_read", "on poisoned memory (pattern A)"), "B": ("missed_read", "on poisoned memory (pattern B)"),
    "true": ("skipped", "when launched alone on the true state"),
    "again": ("skipped", "when launched alone on the true state"),
    "narrow": ("missed_read", "on partly poisoned memory"),
    "perturb": ("skipped", "on other values of what it reads, which it may check"),
    "advance": ("skipped", "when launched alone on the true state"),
}  # fmt: skip
TIME_IS_UP = 3  # exit code of a child that reached its deadline
_ORDER = ("missed_read", "missed_write", "skipped", "ok")
_FINDING = {"input", "node", "status", "reason", "writes", "reads"}
_NEEDED = {
    "unit": {"kernels", "inputs"}, "phase": {"input", "node", "phase"}, "judged": _FINDING, "kernel": _FINDING,
    "note": set(), "refused": {"reason"},
}  # fmt: skip


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of a journal; a line cut short by the end of a process is none, nor is any other garbage."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and content.keys() >= _NEEDED.get(str(content.get("kind")), {""}):
            yield content


Found = dict[int, dict[int, dict[str, Any]]]  # node -> input -> finding


def last_state(journal: Path) -> tuple[dict[str, Any], Found]:
    """The unit as it was announced last, and the findings about its kernels as they are announced there."""
    unit: dict[str, Any] = {}
    found: Found = {}
    for line in read_journal(journal):
        if line["kind"] == "unit":
            if unit and line["kernels"] != unit["kernels"]:
                found.clear()  # other kernels, or other sets: what was found before is about those
            unit = line
        elif line["kind"] == "kernel":
            found.setdefault(line["node"], {})[line["input"]] = line
    return unit, found


def done_of(found: Found) -> set[tuple[int, int]]:
    """(input, node) of all findings."""
    return {(i, node) for node, by_input in found.items() for i in by_input}


def fragile_kernels(folder: Path) -> frozenset[str]:
    """Names of kernels of this model that a child died on while other values of its reads were tried."""
    names = set()
    for journal in folder.glob("*.journal"):
        by_node: dict[int, str] = {}
        for x in read_journal(journal):
            if x["kind"] == "unit":
                by_node = {k["node"]: k["name"] for k in x["kernels"]}
            elif x["kind"] == "kernel" and x.get("note"):
                names.add(by_node.get(x["node"], ""))
    return frozenset(names - {""})


def write_report(trace: Path, journal: Path, out: Path) -> bool:
    """Merge the findings of all inputs per kernel; False if something is missed, or kernels were not reached."""
    unit, found = last_state(journal)
    refused = next((x["reason"] for x in read_journal(journal) if x["kind"] == "refused"), "")
    if not unit:
        print(f"oracle: {trace}: {refused or 'not reached'}", file=sys.stderr)
        return False
    kernels = []
    for entry in unit["kernels"]:
        by_input = found.get(entry["node"], {})
        if len(by_input) < unit["inputs"]:
            kernels.append(entry | {"status": "not reached", "reason": "", "writes": [], "reads": []})
            continue
        kernels.append(entry | _merged(list(by_input.values())))
    report = {k: v for k, v in unit.items() if k not in ("kind", "kernels")} | {"kernels": kernels}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, (json.dumps(report, separators=(",", ":")) + "\n").encode())
    return all(k["status"] in ("ok", "skipped") for k in kernels)


def _merged(findings: list[dict[str, Any]]) -> dict[str, Any]:
    """One kernel under several inputs: the worst status; a read is observed if any input shows it."""
    worst = min(findings, key=lambda f: _ORDER.index(f["status"]))
    reads: dict[int, dict[str, Any]] = {}
    for f in findings:
        for r in f["reads"]:
            kept = reads.get(r["access"])
            if kept is None or (r["seen"] == "observed" and kept["seen"] != "observed"):
                reads[r["access"]] = r
    most = max(findings, key=lambda f: sum(w["bytes"] for w in f["writes"]))
    merged = {"status": worst["status"], "reason": worst["reason"], "writes": most["writes"]}
    merged |= {k: worst[k] for k in ("outside", "wrong", "undeclared") if worst.get(k)}
    seconds = round(sum(f.get("seconds", 0) for f in findings), 3)
    return merged | {"reads": list(reads.values()), "seconds": seconds}
