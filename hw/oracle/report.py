"""From the journal of one unit to its report. Needs no GPU and no PyTorch.

Journal lines: `unit` (what was run), `phase` (a kernel, before each of its launches), `judged` (a finding before
its reads are tried), `kernel` (a finding), `note` (what the child does between kernels), `refused` (why a unit is
not checked at all).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tesserasim.errors import InputError
from tesserasim.files import check_regular, path_text, read_text, shown
from tesserasim.terminal import say
from tesserasim.writing import naming, write_whole

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


def _whole(*values: Any) -> bool:
    return all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def _rows(value: Any, **fields: type) -> bool:
    """A list of objects that hold these fields with these types."""
    return isinstance(value, list) and all(
        isinstance(r, dict) and all(type(r.get(n)) is t and (t is not int or _whole(r[n])) for n, t in fields.items())
        for r in value
    )


def _unit(x: dict[str, Any]) -> bool:
    nodes = [k["node"] for k in x["kernels"]] if _rows(x.get("kernels"), node=int) else [0, 0]
    return len(set(nodes)) == len(nodes) and _whole(x.get("inputs")) and x["inputs"] > 0


def _finding(x: dict[str, Any]) -> bool:
    seconds = x.get("seconds", 0)
    return (
        _whole(x.get("input"), x.get("node")) and isinstance(x.get("status"), str) and x["status"] in _ORDER
        and isinstance(x.get("reason"), str) and _rows(x.get("writes"), bytes=int)
        and _rows(x.get("reads"), access=int, seen=str) and isinstance(x.get("note", ""), str)
        and type(seconds) in (int, float) and math.isfinite(seconds)
        and all(_rows(x.get(name, []), offset=int) for name in ("outside", "wrong", "undeclared"))
    )  # fmt: skip


#: What a line of each kind holds; a line that does not is garbage, whatever damaged it.
_HOLDS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "unit": _unit, "judged": _finding, "kernel": _finding, "note": lambda x: True,
    "phase": lambda x: _whole(x.get("input"), x.get("node")) and isinstance(x.get("phase"), str),
    "refused": lambda x: isinstance(x.get("reason"), str),
}  # fmt: skip


def _no_number(text: str) -> None:
    raise ValueError(text)


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of a journal; a line cut short by the end of a process is none, nor is any other garbage.

    InputError if something else than a file lies there, or it cannot be read.
    """
    if not path.exists():
        return
    check_regular(path, "journal")
    try:
        with path.open("rb") as file:
            for raw in file:
                with contextlib.suppress(ValueError, RecursionError):
                    content = json.loads(raw.decode("utf-8", "replace"), parse_constant=_no_number)
                    kind = content.get("kind") if isinstance(content, dict) else None
                    if isinstance(kind, str) and kind in _HOLDS and _HOLDS[kind](content):
                        yield content
    except OSError as error:
        raise InputError(f"{path_text(path)}: cannot be read ({error.strerror})") from None


def append_line(path: Path, content: dict[str, Any]) -> None:
    """Append a line, behind whatever a process left that died in the middle of one. InputError if it cannot be."""
    with naming(path), path.open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        cut_short = file.read() not in (b"", b"\n")
        file.write(b"\n" * cut_short + json.dumps(content).encode() + b"\n")


Found = dict[int, dict[int, dict[str, Any]]]  # node -> input -> finding


def last_state(journal: Path) -> tuple[dict[str, Any], Found]:
    """The unit as it was announced last, and the findings about its kernels as they are announced there.

    A finding is about the kernel and the sets that were announced before it; where those are announced again,
    with other blocks or after other sets, it counts again.
    """
    unit: dict[str, Any] = {}
    announced: dict[int, str] = {}
    kept: dict[tuple[int, str], dict[int, dict[str, Any]]] = {}
    for line in read_journal(journal):
        if line["kind"] == "unit":
            unit = line
            announced = {k["node"]: json.dumps(k, sort_keys=True) for k in line["kernels"]}
        elif line["kind"] == "kernel" and line["node"] in announced and line["input"] < unit["inputs"]:
            kept.setdefault((line["node"], announced[line["node"]]), {})[line["input"]] = line
    return unit, {node: kept[node, text] for node, text in announced.items() if (node, text) in kept}


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
                by_node = {k["node"]: str(k.get("name", "")) for k in x["kernels"]}
            elif x["kind"] == "kernel" and x.get("note"):
                names.add(by_node.get(x["node"], ""))
    return frozenset(names - {""})


def write_report(trace: Path, journal: Path, out: Path) -> bool:
    """Merge the findings of all inputs per kernel; False if something is missed, or kernels were not reached."""
    unit, found = last_state(journal)
    refused = next((x["reason"] for x in read_journal(journal) if x["kind"] == "refused"), "")
    if not unit:
        say("oracle", f"{trace}: {refused or 'not reached'}")
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


# --- reports that are read again -----------------------------------------------------------------------


def read_report(path: Path) -> dict[str, Any]:
    """A report as `write_report` made it. InputError in one line, naming the field, for anything else."""
    where = path_text(path)
    try:
        report = json.loads(read_text(path, "report of the oracle"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:100]
        raise InputError(f"{where}: not a report of the oracle ({why}); run the oracle again") from None
    problem = _first_wrong(report)
    if problem:
        raise InputError(f"{where}: not a report of the oracle ({problem}); run the oracle again")
    return dict(report)


def _first_wrong(report: Any) -> str:
    """The first part of a report that is not as it should be, "" if all is."""
    if not isinstance(report, dict) or not _rows(report.get("kernels"), node=int, site=str, name=str):
        return "no 'kernels' with node, site and name"
    unit, blocks = report.get("unit"), report.get("blocks")
    texts = all(isinstance(report.get(name), str) for name in ("model", "gpu"))
    if not texts or not isinstance(unit, dict) or not isinstance(unit.get("name"), str):
        return "no 'model', 'gpu' and 'unit' with its name"
    if not isinstance(blocks, list) or not isinstance(report.get("same_kernels_as_trace"), bool):
        return "no 'blocks' and 'same_kernels_as_trace'"
    others, steps = report.get("kernels_with_other_sets_than_trace"), report.get("step_kernels", 0)
    if not (others is None or _whole(others)) or not _whole(steps):
        return "'kernels_with_other_sets_than_trace' or 'step_kernels' is no count"
    for k in report["kernels"]:
        problem = _wrong_kernel(k)
        if problem:
            return f"kernel {k['node']}: {problem}"
    return ""


def _wrong_kernel(k: dict[str, Any]) -> str:
    if k.get("status") not in (*_ORDER, "not reached") or not isinstance(k.get("reason"), str):
        return f"status {shown(k.get('status'))} or its reason"
    if not isinstance(k.get("unknown"), bool) or not _rows(k.get("reads"), seen=str):
        return "'unknown' or 'reads'"
    types: dict[str, type] = {"buffer": int, "offset": int, "nbytes": int, "covers": bool}
    if not _rows(k.get("accesses"), **types, mode=str, extent=str, evidence=str):
        return "'accesses'"
    buffers = k.get("buffers")
    sizes = dict.fromkeys(("nbytes", "bytes_per_token", "bytes_per_sequence"), int)
    if not isinstance(buffers, dict) or not _rows(list(buffers.values()), name=str, role=str, **sizes):
        return "'buffers'"
    if any(str(a["buffer"]) not in buffers for a in k["accesses"]) or not all(n.isdecimal() for n in buffers):
        return "an access to no buffer"
    writes = k.get("writes")
    if not _rows(writes, access=int, bytes=int) or not all(_places(w, len(k["accesses"])) for w in writes or ()):
        return "'writes'"
    return ""


def _places(w: dict[str, Any], accesses: int) -> bool:
    """A write of an access that there is, with the places of its bytes."""
    if w["access"] >= accesses:
        return False
    if not w["bytes"]:
        return True
    if "spans" in w:
        spans = w["spans"]
        return isinstance(spans, list) and all(
            isinstance(s, list) and len(s) == 2 and _whole(*s) and s[0] <= s[1] for s in spans
        )
    known = _whole(w.get("intervals"), w.get("first"), w.get("end"))
    return known and 1 <= w["intervals"] <= w["bytes"] <= w["end"] - w["first"]
