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

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs.boost import BoostParams, Forest
from tesserasim.costs.distance import Between, Left, distance, estimate, robust_scatter
from tesserasim.costs.learn import (
    DIES,
    PER_GPU,
    POOLED,
    KindModel,
    Problem,
    Spread,
    anchor_of,
    far_spread,
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
class Inner:
    """A GPU left out with one more die."""

    errors: FloatArray  # [share of SHARES, row] ln(measured / predicted)
    distance: float  # to the GPU from which its errors grow


Pairs = Mapping[frozenset[str], Mapping[str, Inner]]  # two dies left out -> their GPUs -> errors


@dataclass(frozen=True)
class HeldOut:
    """Predictions of every row by models that have not seen its group; [row] of `problem.rows`."""

    problem: Problem
    fold: NDArray[np.int64]
    calibrated: FloatArray  # ln factor on the base
    unseen: FloatArray
    alone: FloatArray  # unseen, without siblings
    shares: tuple[Mapping[str, float], ...]  # per fold: GPU -> share chosen for it
    inner: tuple[Pairs, ...]  # per fold: what the choice and the errors of unseen GPUs are made from


def hold_out(
    p: Problem, folds: int = FOLDS, unseen: bool = True, per_gpu: BoostParams = PER_GPU, pooled: BoostParams = POOLED
) -> HeldOut:
    """Cross-validate one kind."""
    n = len(p.rows)
    fold = fold_of(len(p.rows.group_names), folds)[p.rows.group]
    calibrated, by_sibling, alone = np.zeros(n), np.zeros(n), np.zeros(n)
    gpus = [g for g in p.rows.gpus if p.rows.is_gpu(g).any()]
    shares: list[Mapping[str, float]] = []
    inner: list[Pairs] = []
    for k in range(folds):
        train, test = fold != k, fold == k
        forests = {g: fit_gpu(p, train, g, per_gpu) for g in gpus}
        for g in gpus:
            rows = np.flatnonzero(test & p.rows.is_gpu(g))
            calibrated[rows] = forests[g].predict(p.x[rows])
        if not unseen:
            continue
        pairs = inner_errors(p, train, fold == _check_fold(p, fold, k), gpus)
        inner.append(pairs)
        chosen: dict[str, float] = {}
        for g in gpus:
            rows = np.flatnonzero(test & p.rows.is_gpu(g))
            kin = [o for o in gpus if sibling_of(o, [g])]
            others = [o for o in gpus if o != g and o not in kin]
            share = chosen[g] = choose_share(pairs, g, others)
            alone[rows] = p.lone[rows]
            if share:
                alone[rows] += share * fit_pooled(p, train, others, pooled).predict(p.lone_x[rows])
            by_sibling[rows] = _unseen(g, kin, rows, p, forests, alone)
        shares.append(chosen)
    return HeldOut(p, fold, calibrated, by_sibling, alone, tuple(shares), tuple(inner))


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


def _check_fold(p: Problem, fold: NDArray[np.int64], k: int) -> int:
    """The first fold after `k` where every GPU has rows (the next one if there is none): few groups fall unevenly."""
    folds = int(fold.max()) + 1
    after = [(k + step) % folds for step in range(1, folds + (k < 0))]
    gpus = [p.rows.is_gpu(g) for g in p.rows.gpus if p.rows.is_gpu(g).any()]
    return next((f for f in after if all((mine & (fold == f)).any() for mine in gpus)), after[0])


def inner_errors(p: Problem, train: NDArray[np.bool_], check: NDArray[np.bool_], gpus: list[str]) -> Pairs:
    """Two dies left out -> their GPUs -> errors per share; groups of `check` are held out as well."""
    few = _thinned(p, gpus, 3000)
    dies = sorted({frozenset([g, *(o for o in gpus if sibling_of(o, [g]))]) for g in gpus}, key=min)
    found: dict[frozenset[str], dict[str, Inner]] = {}
    for i, first in enumerate(dies):
        for second in dies[i + 1 :]:
            others = [q for q in gpus if q not in first | second]
            forest = fit_pooled(p, train & ~check & few, others, INNER)
            found[first | second] = {
                q: _inner(p, q, np.flatnonzero(check & few & p.rows.is_gpu(q)), forest, others)
                for q in sorted(first | second)
            }
    return found


def _inner(p: Problem, gpu: str, rows: NDArray[np.int64], forest: Forest, others: list[str]) -> Inner:
    factor = forest.predict(p.lone_x[rows])
    errors = np.stack([p.y[rows] - p.lone[rows] - s * factor for s in SHARES])
    return Inner(errors, distance(find_gpu(gpu), find_gpu(anchor_of(gpu, "", p.reference, others))))


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
    errors = [
        [_mape(-share) for share in e[o].errors]
        for pair, e in pairs.items()
        if gpu is None or gpu in pair
        for o in others
        if o in e and len(e[o].errors[0])
    ]
    if not errors:
        return 0.0
    return SHARES[int(np.argmin(np.round(np.median(errors, axis=0), 4)))]


def final_model(p: Problem, held: HeldOut) -> KindModel:
    """The model that is shipped: all rows, with the errors of the held-out predictions."""
    gpus = [g for g in p.rows.gpus if p.rows.is_gpu(g).any()]
    check = held.fold == _check_fold(p, held.fold, -1)
    pairs = inner_errors(p, ~check, check, gpus)
    share = choose_share(pairs, None, gpus)
    model = fit_kind(p, np.ones(len(p.rows), dtype=bool), gpus, pooled=share > 0)
    spreads = {g: _spread(held, held.calibrated, p.rows.is_gpu(g), p.rows.group) for g in gpus}
    every = np.ones(len(p.rows), dtype=bool)
    return with_errors(model, spreads, share, between(held, pairs, share, None, every))


def between(held: HeldOut, pairs: Pairs, share: float, gpu: str | None, known: NDArray[np.bool_]) -> Between:
    """How errors grow with distance, from the other dies, each predicted without its own rows and those of `gpu`.

    gpu None: a GPU of no table; every pair of dies with rows counts. `known` [row]: rows whose calibrated errors may
    be looked at; those of `gpu` are not.
    """
    p = held.problem
    left, others = [], set()
    for pair, inner in pairs.items():
        for o, found in inner.items() if gpu is None or gpu in pair else ():
            if not len(found.errors[0]) or (gpu is not None and (o == gpu or sibling_of(o, [gpu]))):
                continue
            near = p.reference is not None and sibling_of(o, [p.reference]) != ""
            i = SHARES.index(0.0 if near else share)  # the reference's siblings are not corrected
            left.append(Left(found.distance, found.errors[i], _die(o)))
            others.add(o)
    errors = p.y - held.calibrated
    return estimate(left, [robust_scatter(errors[known & p.rows.is_gpu(o)]) for o in sorted(others)])


def _die(gpu: str) -> str:
    return next((min(die) for die in DIES if gpu in die), gpu)


def _unseen_interval(held: HeldOut, k: int, gpu: str, alone: bool) -> Spread:
    """The errors that fold `k` states of `gpu` without having seen it."""
    p = held.problem
    gpus = [g for g in p.rows.gpus if p.rows.is_gpu(g).any()]
    kin = [] if alone else [o for o in gpus if sibling_of(o, [gpu])]
    whose = sibling_of(gpu, [*kin, *([p.reference] if p.reference else [])])
    others = [o for o in gpus if o != gpu and not sibling_of(o, [gpu])]
    found = between(held, held.inner[k], held.shares[k][gpu], gpu, held.fold != k)
    return far_spread(found, gpu, anchor_of(gpu, whose, p.reference, others), whose in kin)


def _spread(held: HeldOut, factor: FloatArray, where: NDArray[np.bool_], shared: NDArray[Any]) -> Spread:
    p = held.problem
    error = (p.y - factor)[where]
    return measure_spread(p.rows.kind, p.base[where], error, p.rows.group[where], shared[where])


def intervals(held: HeldOut, factor: FloatArray, across: str) -> tuple[FloatArray, FloatArray]:
    """[row] 80 % interval, us. across "groups": from the GPU's other folds; "gpus", "dies": from the other dies'
    GPUs, with and without a sibling."""
    p = held.problem
    low, high = np.zeros(len(p.rows)), np.zeros(len(p.rows))
    predicted = p.base * np.exp(factor)
    where = regime(p.rows.kind, p.base)
    for k in range(int(held.fold.max()) + 1 if len(held.fold) else 0):
        for g in p.rows.gpus:
            mine = p.rows.is_gpu(g)
            rows = np.flatnonzero(mine & (held.fold == k))
            if not len(rows):
                continue
            if across == "groups":
                s = _spread(held, factor, (held.fold != k) & mine, p.rows.group)
            else:
                s = _unseen_interval(held, k, g, across == "dies")
            low[rows] = predicted[rows] * np.exp(s.low[where[rows]])
            high[rows] = predicted[rows] * np.exp(s.high[where[rows]])
    return low, high


def metrics(
    rows: Rows, predicted: FloatArray, low: FloatArray, high: FloatArray, reference: str | None
) -> list[dict[str, Any]]:
    """A row per GPU: n, mape, median_ape, weighted_ape, bias, spearman, coverage80, width80."""
    found, numbers = [], shape_numbers(rows)
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
            "spearman_h100": None if gpu == "H100-SXM" else _against(rows, numbers, predicted, gpu, "H100-SXM"),
            "coverage80": float(np.mean((t >= lo) & (t <= hi))), "width80": float(np.mean((hi - lo) / q)),
        }  # fmt: skip
        if reference is None and gpu != "H200-SXM":
            row["spearman"] = _against(rows, numbers, predicted, gpu, "H200-SXM")
        found.append(row)
    return found


def _rank(true: FloatArray, predicted: FloatArray) -> float | None:
    """Spearman's correlation of two ratios; None if the true one hardly varies (interquartile spread <= 1.3)."""
    from scipy.stats import spearmanr

    if len(true) < 20:
        return None
    first, third = np.quantile(true, [0.25, 0.75])
    return float(spearmanr(true, predicted).statistic) if third / first > LEAST_SPREAD else None


def shape_numbers(rows: Rows) -> NDArray[np.int64]:
    """[row] numbers that rows of one build, data types and shape share."""
    words = [np.unique(w, return_inverse=True)[1].ravel() for w in (rows.build, rows.dtype)]
    every = np.stack([*words, *rows.shape.values()], axis=1)
    return np.unique(every, axis=0, return_inverse=True)[1].ravel().astype(np.int64)


def _pairs(rows: Rows, numbers: NDArray[np.int64], a: str, b: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of two GPUs for the shapes that both have in one build."""
    mine, theirs = np.flatnonzero(rows.is_gpu(a)), np.flatnonzero(rows.is_gpu(b))
    _, i, j = np.intersect1d(numbers[mine], numbers[theirs], return_indices=True)
    return mine[i], theirs[j]


def _against(rows: Rows, numbers: NDArray[np.int64], predicted: FloatArray, gpu: str, other: str) -> float | None:
    """Spearman of the ratio to another GPU."""
    a, b = _pairs(rows, numbers, gpu, other)
    return _rank(rows.time_us[a] / rows.time_us[b], predicted[a] / predicted[b]) if len(a) else None


def pair_ranks(held: HeldOut) -> list[dict[str, Any]]:
    """A row per pair of GPUs whose ratio varies: Spearman of the ratio, calibrated and with neither GPU seen."""
    p = held.problem
    rows, numbers = p.rows, shape_numbers(p.rows)
    gpus = [g for g in rows.gpus if rows.is_gpu(g).any()]
    ways = {"spearman": held.calibrated, "spearman_unseen": held.unseen, "spearman_unseen_no_sibling": held.alone}
    times = {name: p.base * np.exp(factor) for name, factor in ways.items()}
    found = []
    for i, first in enumerate(gpus):
        for second in gpus[i + 1 :]:
            a, b = _pairs(rows, numbers, first, second)
            true = rows.time_us[a] / rows.time_us[b]
            ranks = {name: _rank(true, t[a] / t[b]) for name, t in times.items()} if len(a) else {}
            if ranks.get("spearman") is not None:
                found.append({"kind": rows.kind, "gpu": first, "other": second, "n": len(a), **ranks})
    return found


def cross_validate(rows: Rows, reference: str | None, unseen: bool = True) -> list[dict[str, Any]]:
    """Metrics per GPU with groups held out; `mape_unseen` and the like beside them."""
    p = problem(rows, reference)
    return held_metrics(hold_out(p, unseen=unseen), unseen)


def held_metrics(held: HeldOut, unseen: bool = True) -> list[dict[str, Any]]:
    """Metrics per GPU of held-out predictions."""
    p = held.problem
    table = metrics(p.rows, p.base * np.exp(held.calibrated), *intervals(held, held.calibrated, "groups"), p.reference)
    ways = (("unseen", held.unseen, "gpus"), ("unseen_no_sibling", held.alone, "dies"))
    for name, factor, across in ways if unseen else ():
        other = metrics(p.rows, p.base * np.exp(factor), *intervals(held, factor, across), p.reference)
        for row, seen in zip(table, other, strict=True):
            row |= {f"{column}_{name}": seen[column] for column in ("mape", "spearman", "coverage80", "width80")}
    return table
