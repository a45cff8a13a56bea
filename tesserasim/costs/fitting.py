"""`costs fit` and `costs evaluate`: tables in, parameters or errors out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tesserasim.costs.learn import REFERENCE, KindModel, problem
from tesserasim.costs.shipped import file_name, model_document, shipped, text_of
from tesserasim.costs.tables import BUILDS, OTHER_BUILD, Rows, read_tables
from tesserasim.costs.times import FloatArray
from tesserasim.costs.validate import final_model, held_metrics, hold_out, metrics
from tesserasim.errors import InputError

Paths = Sequence[str | os.PathLike[str]]
#: Fewer rows than this of a kind are no ground for a fit.
LEAST_ROWS = 50


def find_tables(paths: Paths) -> list[Path]:
    """The given tables; without any, those of $TESSERASIM_SHARED/data/kernels or ../shared/data/kernels."""
    if paths:
        return [Path(p) for p in paths]
    shared = Path(os.environ.get("TESSERASIM_SHARED", Path(__file__).resolve().parents[3] / "shared"))
    names = ("gemm", "attention_prefill", "attention_decode", "moe", "elementwise_quant")
    found = [shared / "data" / "kernels" / f"{n}.parquet" for n in names]
    if not all(p.is_file() for p in found):
        raise InputError("no kernel tables here: name them, or set TESSERASIM_SHARED to the folder with data/kernels")
    return found


def fit(paths: Paths, say: Callable[[str], None] = lambda _: None) -> dict[str, str]:
    """File name -> content of the parameters fitted from tables, for both situations of every kind in them."""
    files: dict[str, str] = {}
    for path in find_tables(paths):
        for reference in (REFERENCE, None):
            for kind, rows in read_tables([path], REFERENCE).items():
                p = problem(rows, reference)
                if len(p.rows) < LEAST_ROWS:
                    raise InputError(f"{path}: {len(p.rows)} rows of kind {kind} with a time on {REFERENCE}: too few")
                say(f"{kind}, reference {reference or 'none'}: {len(p.rows)} rows")
                model = final_model(p, hold_out(p))
                counts = {g: int(p.rows.is_gpu(g).sum()) for g in model.forests}
                files[file_name(kind, reference)] = text_of(model_document(model, counts))
    return files


def evaluate(
    paths: Paths, how: str, reference: str | None, say: Callable[[str], None] = lambda _: None, unseen: bool = True
) -> list[dict[str, Any]]:
    """A row per (kind, GPU): errors of the shipped parameters ("as-shipped") or with groups held out."""
    found: list[dict[str, Any]] = []
    for path in find_tables(paths):
        for kind, rows in read_tables([path], REFERENCE).items():
            say(f"{kind}: {len(rows)} rows")
            if how == "as-shipped":
                found += _as_shipped(rows, shipped(kind, reference))
            else:
                found += held_metrics(hold_out(problem(rows, reference), unseen=unseen), unseen)
    if not found:
        builds = ", ".join(sorted({*BUILDS.values(), OTHER_BUILD}))
        raise InputError(f"no rows to evaluate: the tables have none of {builds} with a time on {REFERENCE}")
    return found


def _as_shipped(rows: Rows, model: KindModel) -> list[dict[str, Any]]:
    p = problem(replace(rows, launches=model.launches), model.reference)  # not what this table would say
    predicted, low, high = (np.zeros(len(p.rows)) for _ in range(3))
    for g in p.rows.gpus:
        mine = p.rows.is_gpu(g)
        if mine.any():
            predicted[mine] = p.base[mine] * np.exp(model.log_factor(g, p.x[mine]))
            low[mine], high[mine] = interval80(model, g, p.base[mine], predicted[mine])
    return metrics(p.rows, predicted, low, high, model.reference)


def interval80(model: KindModel, gpu: str, base: FloatArray, predicted: FloatArray) -> tuple[FloatArray, FloatArray]:
    """[row] the interval that the model states, us."""
    from tesserasim.costs.learn import regime

    spread = model.spread(gpu)
    where = regime(model.kind, base)
    return predicted * np.exp(spread.low[where]), predicted * np.exp(spread.high[where])
