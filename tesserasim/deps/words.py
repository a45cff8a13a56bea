"""The dependencies of a trace for the terminal, and as a Graphviz graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tesserasim.trace.values import alike, counted

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
#: Groups and values shown in the terminal.
SHOWN = 5


def in_words(document: Mapping[str, Any]) -> str:
    """A summary of the document of `dependencies`, a line per question."""
    raw, state, hazards, unknown = (document[key] for key in ("raw", "state", "hazards", "unknown"))
    accesses = document["accesses"]
    lines = [
        f"{document['model'] or '?'} {document['unit']} ({document['origin']}): {_kernels(document)}, "
        f"{counted(document['sites'], 'site')}",
        "buffers: " + _some({r: f"{b['count']} ({size(b['nbytes'])})" for r, b in document["buffers"].items()
                             if b["count"]}),
        f"read after write: {counted(raw['edges'], 'edge')}, {size(raw['edge_bytes'])} in "
        f"{counted(raw['values'], 'value')}",
        f"state: {counted(state['deltas'], 'delta')}, {size(state['delta_bytes'])} in all; "
        f"{counted(state['replaced'], 'buffer')} replaced, {counted(state['buffers_from_before'], 'buffer')} read "
        "from before",
        f"storage: {hazards['war']} write after read, {hazards['waw']} write after write, in "
        f"{counted(hazards['storages'], 'storage')}" + _most(hazards["by_storage"]),
        "evidence: " + _some({k: v for k, v in accesses["evidence"].items() if v}),
        "extent: " + _some({k: v for k, v in accesses["extent"].items() if v}),
        f"unknown: {counted(unknown['count'], 'kernel')}",
    ]  # fmt: skip
    lines += [f"  {k['kernel']} {shown(k['name'])}: {k['why']}" for k in unknown["kernels"][:SHOWN]]
    lines.append(f"groups: {len(document['groups'])}")
    lines += [
        f"  {counted(len(g['sites']), 'site')} from {shown(g['sites'][0])}: {g['why']}"
        for g in document["groups"][:SHOWN]
    ]
    lines.append("largest values:" if document["largest_values"] else "largest values: none between sites")
    lines += [
        f"  {size(v['nbytes'])} {shown(v['buffer'])}: {shown(v['from'])} to {shown(v['to'][0])}"
        + (f" and {len(v['to']) - 1} more" if len(v["to"]) > 1 else "")
        for v in document["largest_values"][:SHOWN]
    ]
    if document["largest_cuts"]:
        cut = document["largest_cuts"][0]
        lines.append(f"largest cut: {size(cut['nbytes'])} after {shown(cut['after'])}")
    return "\n".join(lines + [f"warning: {shown(w, 300)}" for w in alike(document["warnings"])])


def modes_in_words(found: Mapping[str, Mapping[str, str]]) -> str:
    """`entry: parameter mode, ...` a line, for PTX."""
    lines = {name: ", ".join(f"{p} {m}" for p, m in modes.items()) for name, modes in found.items()}
    return "\n".join(f"{name}: {line or 'no pointers'}" for name, line in lines.items())


def _kernels(document: Mapping[str, Any]) -> str:
    """How many kernels, and how many of them are copies and sets by the driver."""
    parts = [counted(document[key], key[:-1]) for key in ("memcpys", "memsets") if document[key]]
    return counted(document["kernels"], "kernel") + (f" ({' and '.join(parts)} among them)" if parts else "")


def _some(parts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parts.items()) or "none"


def _most(rows: list[Mapping[str, int]]) -> str:
    return f", most in storage {rows[0]['storage']}: {rows[0]['war']} and {rows[0]['waw']}" if rows else ""


def size(nbytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1, to three digits."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return (
        f"{nbytes} B" if not unit else f"{value:.3g} {_UNITS[unit]}" if value < 1000 else f"{value:.0f} {_UNITS[unit]}"
    )


def shown(text: str, limit: int = 80) -> str:
    """A name on one line of at most `limit` characters."""
    line = "".join(c if c.isprintable() else "?" for c in text)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def dot(document: Mapping[str, Any]) -> str:
    """Graphviz DOT of the site graph: edges with their bytes, groups as clusters."""
    graph, groups = document["graph"], document["groups"]
    sites = graph["sites"]
    lines = ["digraph dependencies {", "  node [shape=box];"]
    for number, group in enumerate(groups):
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(group['why'])};"]
        lines += [f"    s{i} [label={_quoted(s['name'])}];" for i, s in enumerate(sites) if s["group"] == number]
        lines.append("  }")
    lines += [f"  s{i} [label={_quoted(s['name'])}];" for i, s in enumerate(sites) if s["group"] < 0]
    lines += [f"  s{a} -> s{b} [label={_quoted(size(n))}];" for a, b, n in graph["edges"]]
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    """A DOT string that shows `text` as it is; backslashes would start an escape, quotes end it."""
    return '"' + shown(text, 200).replace("\\", "\\\\").replace('"', '\\"') + '"'
