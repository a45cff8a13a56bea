"""The table that a calibration writes, and the file beside it that says where it comes from.

Columns are those of the shipped kernel tables; `costs fit` reads them. Beyond those: `p10_us` and `p90_us` of the
samples, `cold_us` with `cold_turns` operands in turn (docs/calibrate.md), and `kernels`, what the library ran.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hw.calibrate.shapes import Shape

SOURCE = "python -m hw calibrate"
SIZES = (
    "m", "n", "k", "batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "window_size", "num_tokens",
    "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size",
)  # fmt: skip
COLUMNS = (
    "source", "kernel_kind", "op", "gpu", "framework", "version", "dtype", "kv_cache_dtype", "kernel_source", *SIZES,
    "distribution", "time_us", "n_meas", "p10_us", "p90_us", "cold_us", "cold_turns", "kernels",
)  # fmt: skip
#: The elementwise operation that the fitted kind is about; the others are kinds of their own, which no model has yet.
FITTED_OPERATION = "scale_matrix"


def row(shape: Shape, measured: Mapping[str, Any], gpu: str, torch: str) -> dict[str, Any]:
    """A row of the table from a shape and its line of the journal; what a kind does not have is absent."""
    other = shape.kind == "elementwise" and shape.op != FITTED_OPERATION
    found: dict[str, Any] = {
        "source": SOURCE, "kernel_kind": shape.op if other else shape.kind, "gpu": gpu, "framework": "torch",
        "version": torch, "dtype": shape.dtype, **shape.sizes, "n_meas": measured["samples"],
    }  # fmt: skip
    found |= {c: measured[c] for c in ("kernel_source", "time_us", "p10_us", "p90_us")}
    if shape.kind == "elementwise":
        found["op"] = shape.op
    if shape.kind.startswith("attention"):
        found |= {"kv_cache_dtype": shape.dtype, "window_size": 0}
    if shape.kind == "moe":
        found["distribution"] = "balanced"
    return found | {c: measured[c] for c in ("cold_us", "cold_turns", "kernels") if measured.get(c)}


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, with the same columns whatever was measured."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def sidecar_text(facts: Mapping[str, Any]) -> str:
    return json.dumps(dict(facts), indent=1, sort_keys=True) + "\n"
