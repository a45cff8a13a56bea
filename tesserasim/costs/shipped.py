"""The fitted parameters as files: one JSON text per kernel kind and situation, read when first needed.

`data/<kind>.<reference>.json` holds, readable, what was fitted from what with which errors, and the trees as base64 of
little-endian arrays: borders as float32 (they are exact in it), features and thresholds as uint8, leaves as int16.
Files are written by `python -m tesserasim costs fit` and are the same, byte for byte, whenever it is run on the same
tables.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tesserasim.costs.boost import Forest
from tesserasim.costs.distance import UNKNOWN, Between
from tesserasim.costs.learn import KindModel, Spread
from tesserasim.errors import InputError

SCHEMA = 2
KINDS = ("gemm", "attention_prefill", "attention_decode", "moe", "elementwise")
SOURCE = (
    "NVIDIA aiconfigurator performance tables (Apache-2.0), git 095f58a51c4c and release 0.12.0: CUDA-event timing of "
    "graph replays; SGLang 0.5.10, and vLLM 0.24.0 where a GPU has no rows there and for elementwise kernels"
)


def file_name(kind: str, reference: str | None) -> str:
    return f"{kind}.{reference or 'none'}.json"


def _pack(array: NDArray[Any], kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype=kind).tobytes()).decode("ascii")


def _unpack(text: str, kind: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype=kind)


def forest_document(forest: Forest) -> dict[str, Any]:
    """A forest as plain JSON."""
    return {
        "base": forest.base,
        "depth": int(forest.feature.shape[1]),
        "borders": [len(e) for e in forest.edges],
        "border_values": _pack(np.concatenate(forest.edges) if forest.edges else np.zeros(0), "<f4"),
        "features": _pack(forest.feature, "u1"),
        "thresholds": _pack(forest.threshold, "u1"),
        "leaves": _pack(forest.leaves, "<i2"),
    }


def forest_from(document: Mapping[str, Any]) -> Forest:
    values, depth = _unpack(document["border_values"], "<f4").astype(np.float64), int(document["depth"])
    ends = np.cumsum([0, *document["borders"]]).tolist()
    return Forest(
        tuple(values[a:b] for a, b in pairwise(ends)),
        int(document["base"]),
        _unpack(document["features"], "u1").reshape(-1, depth),
        _unpack(document["thresholds"], "u1").reshape(-1, depth),
        _unpack(document["leaves"], "<i2").reshape(-1, 1 << depth),
    )


def model_document(model: KindModel, rows: Mapping[str, int]) -> dict[str, Any]:
    """A model as plain JSON; `rows`: GPU -> rows it was fitted on."""
    spreads = {
        name: {"q10": s.low.tolist(), "q90": s.high.tolist(), "systematic": s.systematic, "site": s.site}
        for name, s in model.spreads.items()
    }
    return {
        "schema": SCHEMA,
        "kind": model.kind,
        "reference": model.reference,
        "source": SOURCE,
        "made_by": "python -m tesserasim costs fit",
        "rows": dict(rows),
        "pooled_share": model.pooled_share,
        "launches": dict(model.launches),
        "between": asdict(model.between),
        "errors": spreads,
        "pooled": forest_document(model.pooled),
        "forests": {gpu: forest_document(f) for gpu, f in model.forests.items()},
    }


def model_from(document: Mapping[str, Any]) -> KindModel:
    spreads = {
        name: Spread(np.array(s["q10"]), np.array(s["q90"]), float(s["systematic"]), float(s["site"]))
        for name, s in document["errors"].items()
    }
    forests = {gpu: forest_from(f) for gpu, f in document["forests"].items()}
    return KindModel(
        document["kind"], document["reference"], forests, forest_from(document["pooled"]),
        float(document["pooled_share"]), spreads, document.get("launches", {}),
        Between(**document["between"]) if "between" in document else UNKNOWN,
    )  # fmt: skip


def text_of(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


@cache
def shipped_text(kind: str, reference: str | None) -> str:
    """The file's content. Raises InputError if the parameters of this kind do not ship."""
    place = resources.files("tesserasim.costs").joinpath("data", file_name(kind, reference))
    try:
        return place.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"no fitted parameters ship for kind {kind}, reference {reference or 'none'}") from None


@cache
def shipped(kind: str, reference: str | None) -> KindModel:
    """The shipped model of a kind."""
    return model_from(json.loads(shipped_text(kind, reference)))


@cache
def shipped_hash() -> str:
    """One hash over all shipped parameters."""
    h = hashlib.sha256()
    for kind in KINDS:
        for reference in ("H200-SXM", None):
            h.update(shipped_text(kind, reference).encode())
    return h.hexdigest()
