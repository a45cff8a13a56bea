"""A GPU of one's own: what the shipped model misses on it, learned from a table measured there.

`costs fit TABLE` with the rows of a single GPU writes one small file. The file corrects the shipped model, which may
know that GPU, a sibling or neither: per kind a shift, and a small forest if it does better on shapes held out. Errors
are those of the held-out shapes. Every command reads the files that the environment variable TESSERASIM_COSTS names
(several are separated as in PATH). A site on such a GPU costs

    captured time x corrected prediction there / prediction on the GPU of the trace

and its error is that of both predictions. If the tables hold the same shapes on the reference GPU too, in the same
build, there is a second correction, of the shipped model that knows the time there: traces captured on that GPU use it.
Fitting the tables is in `tesserasim.costs.owntable`, which needs pandas.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs.boost import Forest
from tesserasim.costs.learn import Spread
from tesserasim.costs.shipped import KINDS, forest_document, forest_from
from tesserasim.errors import InputError
from tesserasim.files import path_text, read_bytes

VARIABLE = "TESSERASIM_COSTS"
SCHEMA = 1
FORMAT = "tesserasim own costs"


@dataclass(frozen=True)
class Own:
    """The correction of one kind on one GPU, in one situation."""

    forest: Forest  # ln(measured / shipped prediction)
    spread: Spread


#: (GPU, kind, GPU whose time is known or None)
OwnCosts = Mapping[tuple[str, str, str | None], Own]


def own_part(own: Own, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One kind in one situation: `facts` for the reader, and what predictions need."""
    s = own.spread
    errors = {"q10": s.low.tolist(), "q90": s.high.tolist(), "systematic": s.systematic, "site": s.site}
    return {**facts, "errors": errors, "forest": forest_document(own.forest)}


def own_document(gpu: str, shipped_hash: str, sources: Sequence[str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT, "schema": SCHEMA, "gpu": gpu, "corrects": shipped_hash, "tables": list(sources),
        "made_by": "python -m tesserasim costs fit", "kinds": dict(kinds),
    }  # fmt: skip


def read_own(path: str | os.PathLike[str], shipped_hash: str) -> dict[tuple[str, str, str | None], Own]:
    """The corrections of one file; its keys under a kind are the GPU whose time is known, or "none".

    Raises InputError for anything that `costs fit` did not write, and for a file that corrects other parameters than
    those that ship now: its figures would be added to a model that they were not learned on.
    """
    name = path_text(path)
    try:
        document = json.loads(read_bytes(path, "file of own costs"))
        if document["format"] != FORMAT or document["schema"] != SCHEMA:
            raise KeyError
        gpu, corrects, kinds = find_gpu(str(document["gpu"])).name, document["corrects"], dict(document["kinds"])
        found = {
            (gpu, kind, None if known == "none" else str(known)): _own(part)
            for kind in kinds if kind in KINDS for known, part in kinds[kind].items()
        }  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{name}: no file of own costs; `tesserasim costs fit TABLE --out DIR` writes one") from None
    if corrects != shipped_hash:
        raise InputError(f"{name}: corrects other parameters than those that ship; run `tesserasim costs fit` again")
    return found


def _own(part: Mapping[str, Any]) -> Own:
    s = part["errors"]
    spread = Spread(np.array(s["q10"]), np.array(s["q90"]), float(s["systematic"]), float(s["site"]))
    forest = forest_from(part["forest"])
    asked = int(forest.feature.max()) if forest.feature.size else -1
    if spread.low.shape != (4,) or spread.high.shape != (4,) or asked >= len(forest.edges):
        raise ValueError
    return Own(forest, spread)


def named_files() -> tuple[str, ...]:
    """The files that the environment names."""
    return tuple(p for p in os.environ.get(VARIABLE, "").split(os.pathsep) if p)


def load_own(files: tuple[str, ...], shipped_hash: str) -> OwnCosts:
    """The corrections of all files; a (GPU, kind) may be in one only."""
    found: dict[tuple[str, str, str | None], Own] = {}
    for path in files:
        for key, own in read_own(path, shipped_hash).items():
            if key in found:
                raise InputError(f"{path_text(path)}: {key[1]} on {key[0]} is in an earlier file of {VARIABLE} already")
            found[key] = own
    return found


def own_hash() -> str:
    """Hash over the content of the files that the environment names; "" without any."""
    files = named_files()
    contents = [hashlib.sha256(read_bytes(path, "file of own costs")).hexdigest() for path in files]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest() if files else ""
