"""How wrong the models are on what they have not seen: shapes of other groups, and GPUs of other kinds.

Cross-validation holds whole groups of shapes out (tesserasim.costs.tables), in every data type, build and GPU at once.
Three questions are asked of each row:

    calibrated          the GPU's rows of other groups are known
    unseen              no row of the GPU is known; a sibling of the same die may be
    unseen, no sibling  neither

What a model chooses by looking at errors (`pooled_share`) it chooses on training groups and training GPUs alone, and
the stated interval of a row comes from errors of other groups (calibrated) or other GPUs (unseen).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tesserasim.costs.boost import BoostParams
from tesserasim.costs.learn import (
    PER_GPU,
    POOLED,
    KindModel,
    Problem,
    Spread,
    fit_gpu,
    fit_kind,
    fit_pooled,
    measure_spread,
    problem,
    regime,
    sibling_of,
    with_errors,
)
from tesserasim.costs.tables import Rows
from tesserasim.costs.times import FloatArray

FOLDS = 5
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
#: The choice of a share looks at small forests of few rows: it is a choice among five.
INNER = BoostParams(trees=40, rate=0.15, shrink=100.0)
#: Rows of each GPU that a spread over GPUs sees: they count alike.
EVEN = 3000
#: A pair of GPUs whose ratio hardly varies has no order to find.
LEAST_SPREAD = 1.3


def fold_of(n_groups: int, folds: int = FOLDS, seed: int = 1) -> NDArray[np.int64]:
    """[group] the fold that holds it out."""
    order = list(range(n_groups))
    random.Random(seed).shuffle(order)
    found = np.empty(n_groups, dtype=np.int64)
    found[order] = np.arange(n_groups) % folds
    return found


@dataclass(frozen=True)
class HeldOut:
    """Predictions of every row by models that have not seen its group; [row] of `problem.rows`."""

    problem: Problem
    fold: NDArray[np.int64]
    calibrated: FloatArray  # ln factor on the base
    unseen: FloatArray
    alone: FloatArray  # unseen, without siblings
    shares: tuple[float, ...]  # chosen, per fold and GPU


def hold_out(
    p: Problem, folds: int = FOLDS, unseen: bool = True, per_gpu: BoostParams = PER_GPU, pooled: BoostParams = POOLED
) -> HeldOut:
    """Cross-validate one kind."""
    n = len(p.rows)
    fold = fold_of(len(p.rows.group_names), folds)[p.rows.group]
    calibrated, by_sibling, alone = np.zeros(n), np.zeros(n), np.zeros(n)
    gpus = [g for g in p.rows.gpus if p.rows.is_gpu(g).any()]
    shares: list[float] = []
    for k in range(folds):
        train, test = fold != k, fold == k
        forests = {g: fit_gpu(p, train, g, per_gpu) for g in gpus}
        for g in gpus:
            rows = np.flatnonzero(test & p.rows.is_gpu(g))
            calibrated[rows] = forests[g].predict(p.x[rows])
        if not unseen:
            continue
        pairs = _inner_errors(p, train, fold == (k + 1) % folds, gpus)
        for g in gpus:
            rows = np.flatnonzero(test & p.rows.is_gpu(g))
            kin = [o for o in gpus if sibling_of(o, [g])]
            others = [o for o in gpus if o != g and o not in kin]
            share = choose_share(pairs, g, others)
            shares.append(share)
            if share:
                alone[rows] = share * fit_pooled(p, train, others, pooled).predict(p.x[rows])
            by_sibling[rows] = _unseen(g, kin, rows, p, forests, alone)
    return HeldOut(p, fold, calibrated, by_sibling, alone, tuple(shares))


def _unseen(
    gpu: str, kin: list[str], rows: NDArray[np.int64], p: Problem, forests: Mapping[str, Any], alone: FloatArray
) -> FloatArray:
    """As `KindModel.log_factor` answers without rows of `gpu`."""
    whose = sibling_of(gpu, [*kin, *([p.reference] if p.reference else [])])
    if not whose:
        return alone[rows]
    if whose not in forests:
        return np.zeros(len(rows))
    found: FloatArray = forests[whose].predict(p.x[rows])
    return found


Pairs = Mapping[frozenset[str], Mapping[str, FloatArray]]


def _inner_errors(p: Problem, train: NDArray[np.bool_], check: NDArray[np.bool_], gpus: list[str]) -> Pairs:
    """Two dies left out -> their GPUs -> mean error per share; groups of `check` are held out as well."""
    few = _thinned(p, gpus, 3000)
    dies = sorted({frozenset([g, *(o for o in gpus if sibling_of(o, [g]))]) for g in gpus}, key=min)
    found: dict[frozenset[str], dict[str, FloatArray]] = {}
    for i, first in enumerate(dies):
        for second in dies[i + 1 :]:
            others = [q for q in gpus if q not in first | second]
            forest = fit_pooled(p, train & ~check & few, others, INNER)
            errors = {}
            for q in sorted(first | second):
                rows = np.flatnonzero(check & few & p.rows.is_gpu(q))
                factor = forest.predict(p.x[rows])
                errors[q] = np.array([_mape(s * factor - p.y[rows]) for s in SHARES])
            found[first | second] = errors
    return found


def _thinned(p: Problem, gpus: list[str], most: int) -> NDArray[np.bool_]:
    found = np.zeros(len(p.rows), dtype=bool)
    for g in gpus:
        rows = np.flatnonzero(p.rows.is_gpu(g))
        found[rows[:: max(1, len(rows) // most)]] = True
    return found


def _mape(log_error: FloatArray) -> float:
    return float(np.mean(np.abs(np.expm1(log_error)))) if len(log_error) else 0.0


def choose_share(pairs: Pairs, gpu: str | None, others: list[str]) -> float:
    """The share with the least median error over `others`, each predicted without its own die and that of `gpu`.

    gpu None: a GPU of no table; every pair of dies with rows counts.
    """
    errors = [e[o] for pair, e in pairs.items() if gpu is None or gpu in pair for o in others if o in e]
    if not errors:
        return 0.0
    return SHARES[int(np.argmin(np.round(np.median(errors, axis=0), 4)))]


def final_model(p: Problem, held: HeldOut) -> KindModel:
    """The model that is shipped: all rows, with the errors of the held-out predictions."""
    gpus = [g for g in p.rows.gpus if p.rows.is_gpu(g).any()]
    pairs = _inner_errors(p, held.fold != 0, held.fold == 0, gpus)
    share = choose_share(pairs, None, gpus)
    model = fit_kind(p, np.ones(len(p.rows), dtype=bool), gpus, pooled=share > 0)
    spreads = {g: _spread(held, held.calibrated, p.rows.is_gpu(g), p.rows.group) for g in gpus}
    even = _thinned(p, gpus, EVEN)
    kin = even & _kin_mask(p)
    spreads["spec"] = _spread(held, held.alone, even, p.rows.gpu)
    spreads["sibling"] = _spread(held, held.unseen, kin, p.rows.gpu) if kin.any() else spreads["spec"]
    return with_errors(model, spreads, share)


def _has_kin(gpu: str, p: Problem) -> bool:
    return bool(sibling_of(gpu, [*p.rows.gpus, *([p.reference] if p.reference else [])]))


def _spread(held: HeldOut, factor: FloatArray, where: NDArray[np.bool_], shared: NDArray[Any]) -> Spread:
    p = held.problem
    error = (p.y - factor)[where]
    return measure_spread(p.rows.kind, p.base[where], error, p.rows.group[where], shared[where])


def intervals(held: HeldOut, factor: FloatArray, across: str) -> tuple[FloatArray, FloatArray]:
    """[row] 80 % interval, us. across "groups": from the GPU's other folds; "gpus": from the other GPUs."""
    p = held.problem
    low, high = np.zeros(len(p.rows)), np.zeros(len(p.rows))
    predicted = p.base * np.exp(factor)
    where = regime(p.rows.kind, p.base)
    even = _thinned(p, list(p.rows.gpus), EVEN)
    for k in range(int(held.fold.max()) + 1 if len(held.fold) else 0):
        for g in p.rows.gpus:
            mine = p.rows.is_gpu(g)
            rows = np.flatnonzero(mine & (held.fold == k))
            if not len(rows):
                continue
            known = (held.fold != k) & (mine if across == "groups" else even & ~mine & (_kin_mask(p) == _has_kin(g, p)))
            if not known.any():
                known = even & (held.fold != k) & ~mine
            s = _spread(held, factor, known, p.rows.group)
            low[rows] = predicted[rows] * np.exp(s.low[where[rows]])
            high[rows] = predicted[rows] * np.exp(s.high[where[rows]])
    return low, high


def _kin_mask(p: Problem) -> NDArray[np.bool_]:
    return np.array([_has_kin(g, p) for g in p.rows.gpus])[p.rows.gpu]


def metrics(
    rows: Rows, predicted: FloatArray, low: FloatArray, high: FloatArray, reference: str | None
) -> list[dict[str, Any]]:
    """A row per GPU: n, mape, median_ape, weighted_ape, bias, spearman, coverage80, width80."""
    found = []
    for i, gpu in enumerate(rows.gpus):
        mine = rows.gpu == i
        if not mine.any():
            continue
        t, q, lo, hi = rows.time_us[mine], predicted[mine], low[mine], high[mine]
        ape = np.abs(q / t - 1.0)
        row = {
            "kind": rows.kind, "gpu": gpu, "n": int(mine.sum()), "mape": float(ape.mean()),
            "median_ape": float(np.median(ape)), "weighted_ape": float(np.abs(q - t).sum() / t.sum()),
            "bias": float(np.mean(np.log(q / t))),
            "spearman": _rank(t / rows.reference_us[mine], q / rows.reference_us[mine]) if reference else None,
            "spearman_h100": None if gpu == "H100-SXM" else _against(rows, predicted, mine, "H100-SXM"),
            "coverage80": float(np.mean((t >= lo) & (t <= hi))), "width80": float(np.mean((hi - lo) / q)),
        }  # fmt: skip
        if reference is None and gpu != "H200-SXM":
            row["spearman"] = _against(rows, predicted, mine, "H200-SXM")
        found.append(row)
    return found


def _rank(true: FloatArray, predicted: FloatArray) -> float | None:
    """Spearman's correlation of two ratios; None if the true one hardly varies (interquartile spread <= 1.3)."""
    from scipy.stats import spearmanr

    if len(true) < 20:
        return None
    first, third = np.quantile(true, [0.25, 0.75])
    return float(spearmanr(true, predicted).statistic) if third / first > LEAST_SPREAD else None


def _against(rows: Rows, predicted: FloatArray, mine: NDArray[np.bool_], other: str) -> float | None:
    """Spearman of the ratio to another GPU over the shapes that both have in one build."""
    theirs = rows.is_gpu(other)
    words = [rows.build, rows.dtype, *rows.shape.values()]
    key = np.array([f"{row}" for row in zip(*(w.tolist() for w in words), strict=True)])
    where = dict(zip(key[theirs].tolist(), np.flatnonzero(theirs).tolist(), strict=True))
    asked = zip(np.flatnonzero(mine).tolist(), key[mine].tolist(), strict=True)
    pairs = [(i, where[k]) for i, k in asked if k in where]
    if not pairs:
        return None
    a, b = np.array(pairs).T
    return _rank(rows.time_us[a] / rows.time_us[b], predicted[a] / predicted[b])


def cross_validate(rows: Rows, reference: str | None, unseen: bool = True) -> list[dict[str, Any]]:
    """Metrics per GPU with groups held out; `mape_unseen` and the like beside them."""
    p = problem(rows, reference)
    return held_metrics(hold_out(p, unseen=unseen), unseen)


def held_metrics(held: HeldOut, unseen: bool = True) -> list[dict[str, Any]]:
    """Metrics per GPU of held-out predictions."""
    p = held.problem
    table = metrics(p.rows, p.base * np.exp(held.calibrated), *intervals(held, held.calibrated, "groups"), p.reference)
    for name, factor in (("unseen", held.unseen), ("unseen_no_sibling", held.alone)) if unseen else ():
        other = metrics(p.rows, p.base * np.exp(factor), *intervals(held, factor, "gpus"), p.reference)
        for row, seen in zip(table, other, strict=True):
            row |= {f"{column}_{name}": seen[column] for column in ("mape", "spearman", "coverage80", "width80")}
    return table
