"""The dependencies of a trace as one document: what `deps TRACE --json` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tesserasim.deps.graph import CARRIED, UnitFlow, is_unknown, storage_hazards, unit_flow
from tesserasim.trace.inspect import is_memcpy, kept_warnings
from tesserasim.trace.model import EVIDENCE, EXTENTS, MODES, ROLES, Trace
from tesserasim.trace.values import counted

#: How many of the largest values and cuts, and of the storages with most hazards, are listed.
LISTED = 10
#: How many unknown kernels are listed; all are counted.
UNKNOWN_LISTED = 100


def dependencies(trace: Trace) -> dict[str, Any]:
    """Counts and bytes of all that flows in `trace`, its site graph, and what is not known.

    Keys as in `schemas/deps-trace.json`. Bytes are exact where extents are; an access of unknown extent counts
    for the whole buffer.
    """
    flow = unit_flow(trace)
    return {
        "model": trace.meta.model,
        "unit": trace.unit,
        "origin": trace.meta.origin,
        "kernels": len(trace.kernels),
        "memcpys": sum(is_memcpy(k) for k in trace.kernels),
        "memsets": sum(k.kind == "memset" for k in trace.kernels),
        "sites": len(trace.sites),
        "buffers": _buffers(trace),
        "accesses": _accesses(trace),
        "raw": {
            "values": sum(bool(v.readers) for v in flow.values),
            "edges": len(flow.edges),
            "edge_bytes": sum(e.nbytes for e in flow.edges),
        },
        "state": _state(flow),
        "hazards": _hazards(trace),
        "unknown": _unknown(flow),
        "groups": _groups(flow),
        "largest_values": _largest_values(flow),
        "largest_cuts": _largest_cuts(flow),
        "graph": {
            "sites": [{"name": name, "group": g} for name, g in zip(trace.sites, flow.group_of, strict=True)],
            "edges": [list(e) for e in site_edges(flow)],
        },
        "warnings": _warnings(flow),
    }


def site_edges(flow: UnitFlow) -> list[tuple[int, int, int]]:
    """(site, site, bytes) between different sites, in order; a value that kernels of one site share counts once."""
    site = flow.trace.site_of
    total: Counter[tuple[int, int]] = Counter()
    for v in flow.values:
        for reader in {site[r] for r in v.readers} - {site[v.writer]}:
            total[site[v.writer], reader] += v.nbytes
    return [(a, b, n) for (a, b), n in sorted(total.items())]


def _buffers(trace: Trace) -> dict[str, dict[str, int]]:
    found = {role: {"count": 0, "nbytes": 0} for role in ROLES}
    for b in trace.buffers:
        found[b.role]["count"] += 1
        found[b.role]["nbytes"] += b.nbytes
    return found


def _accesses(trace: Trace) -> dict[str, Any]:
    accesses = [a for k in trace.kernels for a in k.accesses]
    return {
        "count": len(accesses),
        "evidence": _counts(EVIDENCE, (a.evidence for a in accesses)),
        "extent": _counts(EXTENTS, (a.extent for a in accesses)),
        "mode": _counts(MODES, (a.mode for a in accesses)),
    }


def _counts(words: Iterable[str], found: Iterable[str]) -> dict[str, int]:
    counted = Counter(found)
    return {word: counted[word] for word in words}


def _state(flow: UnitFlow) -> dict[str, int]:
    """What carried buffers leave for later units, and what they take from earlier ones."""
    left = [v for v in flow.values if v.left]
    deltas = [v for v in left if v.buffer not in flow.replaced]
    return {
        "deltas": len(deltas),
        "delta_bytes": sum(v.nbytes for v in deltas),
        "replaced": len(flow.replaced),
        "left_bytes": sum(v.nbytes for v in left),
        "reads_from_before": len(flow.external),
        "buffers_from_before": len({b for _, b in flow.external}),
    }


def _hazards(trace: Trace) -> dict[str, Any]:
    found = storage_hazards(trace)
    rows: dict[int, dict[str, int]] = {}
    for h in found:
        row = rows.setdefault(h.storage, {"storage": h.storage, "war": 0, "waw": 0})
        row[h.kind.lower()] += 1
    worst = sorted(rows.values(), key=lambda r: (-r["war"] - r["waw"], r["storage"]))
    totals = Counter(h.kind for h in found)
    return {"war": totals["WAR"], "waw": totals["WAW"], "storages": len(rows), "by_storage": worst[:LISTED]}


def _unknown(flow: UnitFlow) -> dict[str, Any]:
    rows = [k for k in flow.trace.kernels if is_unknown(k)]
    listed = [
        {"kernel": k.id, "name": k.name, "site": k.site, "why": "evidence unknown" if k.accesses else "no accesses"}
        for k in rows[:UNKNOWN_LISTED]
    ]
    return {"count": len(rows), "kernels": listed}


def _groups(flow: UnitFlow) -> list[dict[str, Any]]:
    members: list[list[str]] = [[] for _ in flow.group_why]
    for name, group in zip(flow.trace.sites, flow.group_of, strict=True):
        if group >= 0:
            members[group].append(name)
    return [{"sites": m, "why": why} for m, why in zip(members, flow.group_why, strict=True)]


def _largest_values(flow: UnitFlow) -> list[dict[str, Any]]:
    """Values that leave their site, largest first."""
    trace, site = flow.trace, flow.trace.site_of
    found = []
    for v in flow.values:
        readers = sorted({site[r] for r in v.readers} - {site[v.writer]})
        if readers:
            found.append((-v.nbytes, site[v.writer], readers, trace.buffers[v.buffer].name))
    return [
        {"buffer": name, "nbytes": -n, "from": trace.sites[w], "to": [trace.sites[r] for r in readers]}
        for n, w, readers, name in sorted(found)[:LISTED]
    ]


def _largest_cuts(flow: UnitFlow) -> list[dict[str, Any]]:
    """Bytes that cross when everything up to a site is on one GPU and the rest on another, largest first."""
    sites, site = flow.trace.sites, flow.trace.site_of
    change = [0] * (len(sites) + 1)
    for v in flow.values:
        ends = [site[v.writer], *(site[r] for r in v.readers)]
        change[min(ends)] += v.nbytes
        change[max(ends)] -= v.nbytes
    crossing, at = [], 0
    for i in range(len(sites) - 1):
        at += change[i]
        crossing.append((-at, i))
    return [{"after": sites[i], "nbytes": -n} for n, i in sorted(crossing)[:LISTED] if n]


def _warnings(flow: UnitFlow) -> list[str]:
    trace = flow.trace
    found = kept_warnings(trace)
    bare = sum(not k.accesses for k in trace.kernels)
    if trace.kernels and bare == len(trace.kernels):
        found.append("the trace has no accesses: nothing is known of its dependencies, and nothing can be split")
    elif bare:
        found.append(f"{counted(bare, 'kernel')} without accesses")
    seen: set[int] = set()
    orphans: dict[int, None] = {}
    for k in trace.kernels:
        for a in k.accesses:
            if a.buffer not in seen and a.mode == "R" and trace.buffers[a.buffer].role == "activation":
                orphans[a.buffer] = None
        seen.update(a.buffer for a in k.accesses)
    if orphans:
        name = trace.buffers[next(iter(orphans))].name
        found.append(f"{counted(len(orphans), 'activation')} read before any kernel writes, the first is {name}")
    changed = {a.buffer for k in trace.kernels for a in k.accesses if a.writes}
    changed = {b for b in changed if trace.buffers[b].role == "weight"}
    if changed:
        name = trace.buffers[min(changed)].name
        found.append(f"{counted(len(changed), 'weight')} written, the first is {name}: what is written does not flow")
    vague = sum(a.extent == "unknown" and trace.buffers[a.buffer].role in CARRIED and a.writes
                for k in trace.kernels for a in k.accesses)  # fmt: skip
    if vague:
        found.append(
            f"{counted(vague, 'write')} of unknown extent to state, inputs or outputs: all of the buffer flows"
        )
    return found
