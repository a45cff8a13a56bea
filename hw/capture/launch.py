"""What a launch costs, and what the profiler adds: three numbers of a machine, fitted on units of their own.

*Launch cost* is the measured time of an empty graph, its submission hidden behind earlier work as in a serving
loop. *Profiler overhead* is what kernel-level tracing adds to the gap before a node: one figure for every
node, one more for a node that follows a memset. Both come from two units that no grid holds and no error is
stated on: a decode step (many kernels, one memset) and a prefill (a memset before most GEMMs). For each, the
overhead is the sum of the profiled durations and gaps less the end-to-end time without the profiler, so two
units give both figures exactly.

Both kinds of replay must have the same pauses, or the power limit speaks through these figures: with pauses before
timed replays only, the memset figure came out as 6.6 us, with pauses before both as 0.5 us (H200, driver 580).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hw.errors import HardwareError
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import read_trace, write_trace

MODEL = "llama-3-8b"
DECODE_STEM = "decode-b4-c1024"
PREFILL_STEM = "prefill-b1-t768"


def _excess(trace: Trace, empty_graph_ns: int) -> tuple[float, int, int]:
    """(profiled sum - end to end, gaps, gaps after a memset) of one unit."""
    if not trace.meta.e2e_ns:
        raise HardwareError(f"{trace.meta.model} {trace.unit}: no end-to-end time, so no launch cost can be fitted")
    after_set = sum(k.kind == "memset" for k in trace.kernels[:-1])
    return trace.span_ns + empty_graph_ns - trace.meta.e2e_ns["median"], len(trace) - 1, after_set


def fit(decode: Trace, prefill: Trace, empty_graph_ns: int) -> dict[str, Any]:
    """Solve for the overhead per node and per memset. HardwareError if the units cannot tell them apart."""
    (d, nodes_d, sets_d), (p, nodes_p, sets_p) = (_excess(t, empty_graph_ns) for t in (decode, prefill))
    determinant = nodes_d * sets_p - nodes_p * sets_d
    if not determinant:
        return {
            "empty_graph_ns": empty_graph_ns, "kernel_overhead_ns": round(d / max(1, nodes_d), 1),
            "memset_overhead_ns": 0.0, "fitted_on": [DECODE_STEM],
        }  # fmt: skip
    return {
        "empty_graph_ns": empty_graph_ns,
        "kernel_overhead_ns": round((d * sets_p - p * sets_d) / determinant, 1),
        "memset_overhead_ns": round((nodes_d * p - nodes_p * d) / determinant, 1),
        "fitted_on": [f"{MODEL} {DECODE_STEM}", f"{MODEL} {PREFILL_STEM}"],
    }


def fit_folder(root: Path, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Fit from the two units under `root`/fit and write `root`/launch.json. `machine`: gpu, driver, empty_graph_ns."""
    decode, prefill = (read_trace(root / "fit" / MODEL / f"{stem}.parquet") for stem in (DECODE_STEM, PREFILL_STEM))
    fitted = fit(decode, prefill, int(machine["empty_graph_ns"])) | {k: machine[k] for k in ("gpu", "driver")}
    (root / "launch.json").write_text(json.dumps(fitted, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return fitted


def attach(root: Path, launch: Mapping[str, Any]) -> int:
    """Write the machine's launch figures into every captured trace under `root`; returns how many changed."""
    changed = 0
    for path in sorted(root.rglob("*.parquet")):
        trace = read_trace(path)
        if trace.meta.origin == "captured" and trace.meta.gpu == launch["gpu"] and trace.meta.launch != launch:
            write_trace(dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, launch=dict(launch))), path)
            changed += 1
    return changed
