"""Results in a few words for the terminal: a run, a plan, a profile, the catalogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tesserasim.report.table import aligned, number
from tesserasim.trace.values import alike, counted

GIB = 2**30


def describe_run(row: Mapping[str, Any]) -> str:
    """Latency, use of the machines and the way the numbers were made; empty for a row without a result."""
    if row.get("status") != "ok":
        return ""
    lines = []
    latency = row.get("latency_ms") or {}
    if latency:
        lines.append("latency ms: " + ", ".join(f"{name} {number(ms)}" for name, ms in latency.items()))
    used = row.get("utilisation") or {}
    if used:
        lines.append("utilisation: " + ", ".join(f"{gpu} {100 * share:.0f} %" for gpu, share in used.items()))
    made = [f"engine {row.get('engine')}", f"device model {row.get('device_model')}", f"seed {row.get('seed')}"]
    lines.append(", ".join([*made, f"traces {', '.join(row.get('origins') or ['?'])}"]))
    return "".join(f"\n  {line}" for line in lines)


def describe_plan(document: Mapping[str, Any]) -> str:
    """A plan's claim, and how much of each unit lies where."""
    lines = [f"{document['policy']}: {document['status'] or 'no status'}"]
    times = [("objective", "objective_us"), ("bound", "bound_us")]
    parts = [f"{name} {number(document[key])} us" for name, key in times if document.get(key) is not None]
    if document.get("gap") is not None:
        parts.append(f"gap {100 * document['gap']:.2f} %")
    parts.append(f"{document['switches']} switches and {document['cut_bytes']:,} bytes over links per cohort")
    lines.append(", ".join(parts))
    for lane in document["lanes"]:
        lines.append(f"lane {lane['name']}: batch {lane['batch']}, depth {lane['depth']}, share {lane['share']:.3g}")
        for unit, sites in lane["assignment"].items():
            counts: dict[str, int] = {}
            for gpu in sites.values():
                counts[gpu] = counts.get(gpu, 0) + 1
            whole = ["all on " + gpu for site, gpu in sites.items() if site == "*" and len(sites) == 1]
            lines.append(f"  {unit}: " + ", ".join(whole or [f"{n} sites on {gpu}" for gpu, n in counts.items()]))
    for gpu, nbytes in document["memory_bytes"].items():
        lines.append(f"memory of {gpu}: {nbytes / GIB:.2f} GiB")
    return "\n".join(lines)


def describe_facts(facts: Mapping[str, Any]) -> str:
    """What a profile holds, in one line and its warnings."""
    counts = ", ".join(counted(facts[key], key[:-1]) for key in ("kernels", "memcpys", "memsets", "streams", "devices"))
    times = ", ".join(f"{key[:-3]} {facts[key] / 1e6:.3f} ms" for key in ("busy_ns", "union_ns", "span_ns"))
    gpu = {None: "unknown", "?": "without a name"}.get(facts["gpu"], facts["gpu"])
    lines = [f"{counts}; {times}; {facts['graph_kernels']} from graphs; GPU {gpu}"]
    return "\n".join(lines + [f"  warning: {warning}" for warning in alike(facts["warnings"])])


def format_gpus(rows: Sequence[Mapping[str, Any]]) -> str:
    """The catalogue as a table."""
    head = ("GPU", "architecture", "SMs", "bf16 TFLOP/s", "GiB", "GB/s", "$/h", "price of")
    body = [
        (
            str(r["name"]), str(r["architecture"]), str(r["sms"]), f"{r['bf16_tflops']:g}",
            f"{r['memory_bytes'] / GIB:.0f}", f"{r['effective_gbs'] or r['bandwidth_gbs']:g}",
            "-" if r["usd_per_hour"] is None else f"{r['usd_per_hour']:.2f}", str(r["price_date"] or "-"),
        )
        for r in rows
    ]  # fmt: skip
    return "\n".join(aligned([head, *body], left={0, 1, 7}))
