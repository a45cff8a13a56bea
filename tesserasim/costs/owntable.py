"""Fitting a table of one's own GPU (tesserasim.costs.own): rows checked one by one, errors from shapes held out.

A table of `python -m hw calibrate` is read as it is. Its `cold_us`, the time with `cold_turns` weights or caches in
turn, is a second row of the shape with that many copies. Rows of the reference GPU beside those of the own one serve
as known times, within one build.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import GpuSpec
from tesserasim.costs.boost import BoostParams, fit_forest
from tesserasim.costs.learn import REFERENCE, Spread, measure_spread
from tesserasim.costs.mechanisms import COPIES
from tesserasim.costs.own import Own, own_document, own_part
from tesserasim.costs.shipped import shipped, shipped_hash, text_of
from tesserasim.costs.tables import BUILDS, DTYPES, GROUPS, OTHER_BUILD, SHAPES, canonical, read_frame
from tesserasim.costs.times import CAPTURED_SYSTEMATIC, FloatArray
from tesserasim.costs.validate import fold_of
from tesserasim.errors import InputError
from tesserasim.files import path_text, shown

#: Fewer rows or groups of shapes than these say nothing about shapes that were not measured.
LEAST_ROWS, LEAST_GROUPS = 12, 4
FOLDS = 5
MOST = 1e12  # of a shape, and of us: beyond it products overflow and nothing was ever measured
#: Small trees: a table of one's own has hundreds of rows, not tens of thousands.
OWN = BoostParams(trees=60, depth=3, rate=0.15, shrink=4.0, share=0.7, clip=1.0)
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "float8_e4m3fn": "fp8"}
_NO_SHAPE = ("build", "dtype", "time_us", "reference_us")
_ATTENTION = ("bfloat16", "float16", "fp8")


def fit_own(paths: Sequence[str | os.PathLike[str]], say: Callable[[str], None]) -> dict[str, str]:
    """File name -> content: the corrections of the one GPU of the tables.

    Raises InputError, naming file, row and column, for what is no such table.
    """
    frames = [(path_text(p), read_frame(Path(p))) for p in paths]
    gpu = _the_gpu(frames)
    kinds: dict[str, Any] = {}
    parts: dict[str, list[pd.DataFrame]] = {}
    for name, frame in frames:
        words = frame["kernel_kind"].astype(str)
        left = sorted(set(words) - set(SHAPES))
        if left:
            say(f"{name}: {int((~words.isin(SHAPES)).sum())} rows of kinds without a model left out: {shown(left)}")
        for kind in sorted(set(words) & set(SHAPES)):
            parts.setdefault(kind, []).append(_checked(frame[words == kind], kind, name))
    if not parts:
        raise InputError(f"{frames[0][0]}: no rows of a kind that has a model: {', '.join(SHAPES)}")
    for kind, found in sorted(parts.items()):
        fitted = _fit_kind(pd.concat(found), kind, gpu, say)
        if fitted:
            kinds[kind] = fitted
    if not kinds:
        raise InputError(f"{frames[0][0]}: {_needed()} of a kind; no kind here has as many")
    sources = [f"{Path(p).name} sha256 {hashlib.sha256(Path(p).read_bytes()).hexdigest()}" for p in paths]
    return {f"{gpu.name}.json": text_of(own_document(gpu.name, shipped_hash(), sources, kinds))}


def _needed() -> str:
    return f"a fit needs {LEAST_ROWS} rows in {LEAST_GROUPS} groups of shapes (equal widths)"


def is_own(paths: Sequence[str | os.PathLike[str]]) -> bool:
    """Whether the tables are about one GPU, rows of the reference beside it not counted, or of no public build."""
    frames = [read_frame(Path(p)) for p in paths]
    gpus = {find_gpu(str(g)).name for frame in frames for g in frame["gpu"].unique()}
    builds = {str(b) for frame in frames for b in frame.get("framework", pd.Series(dtype=str)).unique()}
    public = {build.split()[0] for build in (*BUILDS.values(), OTHER_BUILD)}
    return len(gpus | {REFERENCE}) <= 2 or not builds & public


def _the_gpu(frames: Sequence[tuple[str, pd.DataFrame]]) -> GpuSpec:
    found = {find_gpu(str(g)).name for _, frame in frames for g in frame["gpu"].unique()}
    own = sorted(found - {REFERENCE}) or [REFERENCE]
    if len(own) != 1:
        raise InputError(f"{frames[0][0]}: an own table has one GPU, not {len(own)}: {', '.join(own)[:200]}")
    return find_gpu(own[0])


def _row(bad: pd.Series, frame: pd.DataFrame) -> int:
    """Line in the file, the header being line 1, of the first bad row."""
    return int(frame.index[np.flatnonzero(bad.to_numpy())[0]]) + 2


def _with_cold(part: pd.DataFrame, kind: str, name: str) -> pd.DataFrame:
    """The rows, and once more with their cold time those that have one."""
    if kind not in COPIES or not {"cold_us", "cold_turns"} <= set(part.columns):
        return part.copy()
    cold = part[part["cold_us"].notna() & part["cold_turns"].notna()]
    cold = cold.assign(time_us=_numbers(cold, "cold_us", name), copies=_numbers(cold, "cold_turns", name))
    part = part if "copies" in part.columns else part.assign(copies=np.nan)
    return pd.concat([part, cold]) if len(cold) else part.copy()


def _numbers(part: pd.DataFrame, column: str, name: str, default: float = np.nan) -> pd.Series:
    """A column as numbers: times above 0, all else whole; `default`, if given, stands for what is empty."""
    raw = part[column]
    number = pd.to_numeric(raw, errors="coerce").astype(np.float64)
    if np.isfinite(default):
        number = number.where(raw.notna() & (raw.astype(str).str.strip() != ""), default)
    time, least = column.endswith("_us"), 0.0 if column == "window_size" else 1.0
    good = number.between(0.0, MOST, inclusive="right")
    if not time:
        good = number.between(least, MOST) & (number == np.floor(number))
    if not good.all():
        wanted = "a time above 0" if time else f"a whole number from {least:.0f} to {MOST:.0e}"
        value = shown(str(raw[~good].iloc[0]))
        raise InputError(f"{name}: line {_row(~good, part)}: {column} is {value}, not {wanted}")
    return number


def _checked(part: pd.DataFrame, kind: str, name: str) -> pd.DataFrame:
    """Rows of one kind under the model's names, every value checked."""
    part = _with_cold(part, kind, name)
    words = ["dtype", *(["kv_cache_dtype"] if kind.startswith("attention") else [])]
    for column in [*SHAPES[kind], *words, *(["distribution"] if kind == "moe" else [])]:
        if column not in part.columns:
            raise InputError(f"{name}: rows of kind {kind} need a column {column!r}")
    for column in [*SHAPES[kind], "time_us"]:
        part[column] = _numbers(part, column, name)
    if "copies" in part.columns and kind in COPIES:
        part["copies"] = _numbers(part, "copies", name, COPIES[kind])
    for column in words if kind != "elementwise" else []:
        part[column] = part[column].astype(str).replace(_ALIASES)
        known = list(DTYPES) if kind in ("gemm", "moe") else list(_ATTENTION)
        good = part[column].isin(known)
        if not good.all():
            value = part[column][~good].iloc[0]
            raise InputError(f"{name}: line {_row(~good, part)}: {column} {shown(value)} is none of {', '.join(known)}")
    for column in ("framework", "version"):
        if column not in part.columns:
            part[column] = "own"
    return canonical(part, kind, name)


def _fit_kind(frame: pd.DataFrame, kind: str, gpu: GpuSpec, say: Callable[[str], None]) -> dict[str, Any]:
    """GPU whose time is known, or "none" -> correction; empty if there are too few rows."""
    key = [c for c in frame.columns if c not in ("gpu", "time_us")]
    frame = pd.DataFrame(frame.groupby(["gpu", *key], as_index=False, sort=True)["time_us"].median())
    mine = frame[frame["gpu"] == gpu.name].drop(columns="gpu")
    found = {"none": _fit_part(mine, kind, gpu, None, say)}
    if gpu.name != REFERENCE:
        known = frame[frame["gpu"] == REFERENCE].drop(columns="gpu").rename(columns={"time_us": "reference_us"})
        both = mine.merge(known, on=key)
        if len(both):
            found[REFERENCE] = _fit_part(both, kind, gpu, both["reference_us"].to_numpy(np.float64), say)
    return {name: part for name, part in found.items() if part}


def _fit_part(
    frame: pd.DataFrame, kind: str, gpu: GpuSpec, known_us: FloatArray | None, say: Callable[[str], None]
) -> dict[str, Any]:
    shape = {c: frame[c].to_numpy(np.float64) for c in frame.columns if c not in _NO_SHAPE}
    widths = np.stack([shape[c] for c in GROUPS[kind]], axis=1)
    group = np.unique(widths, axis=0, return_inverse=True)[1].ravel().astype(np.int64)
    n, n_groups = len(frame), int(group.max()) + 1 if len(frame) else 0
    where = f"{kind} on {gpu.name}{'' if known_us is None else f' from times on {REFERENCE}'}"
    if n < LEAST_ROWS or n_groups < LEAST_GROUPS:
        say(f"{where}: left out, {n} rows in {n_groups} groups; {_needed()}")
        return {}
    model, time_us = shipped(kind, REFERENCE if known_us is not None else None), frame["time_us"].to_numpy(np.float64)
    base, x = model.base(shape, gpu, model.known_side(shape, known_us))
    y = np.log(time_us / base) - model.log_factor(gpu.name, x)
    shift, trees = _held_out(x, y, group)
    better = float(np.abs(np.expm1(-trees)).mean()) < float(np.abs(np.expm1(-shift)).mean())
    error = trees if better else shift
    forest = fit_forest(x, y, group, OWN if better else BoostParams(trees=0))
    own = Own(forest, _widened(measure_spread(kind, base, error, group, group), n_groups))
    facts = {
        "rows": n, "groups": n_groups, "how": "forest" if better else "shift",
        "shipped_source": model.source(gpu.name)[0],
        "mape_shipped": round(float(np.abs(np.expm1(-y)).mean()), 4),
        "mape_held_out": round(float(np.abs(np.expm1(-error)).mean()), 4),
    }  # fmt: skip
    say(
        f"{where}: {n} rows, {n_groups} groups; error {facts['mape_shipped']:.1%} as shipped, "
        f"{facts['mape_held_out']:.1%} on shapes held out ({facts['how']})"
    )
    return own_part(own, facts)


def _held_out(x: FloatArray, y: FloatArray, group: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """[row] what remains of y for groups held out: after a shift alone, and after a forest."""
    fold = fold_of(int(group.max()) + 1, min(FOLDS, int(group.max()) + 1))[group]
    shift, trees = np.empty(len(y)), np.empty(len(y))
    for k in range(int(fold.max()) + 1):
        train, test = fold != k, fold == k
        shift[test] = y[test] - np.median(y[train])
        trees[test] = y[test] - fit_forest(x[train], y[train], group[train], OWN).predict(x[test])
    return shift, trees


def _widened(s: Spread, n_groups: int) -> Spread:
    """The spread with its systematic part widened for being known from few groups (Student's t for the normal)."""
    from scipy.stats import norm, t

    factor = float(t.ppf(0.9, n_groups - 1) / norm.ppf(0.9))
    systematic = round(max(s.systematic, CAPTURED_SYSTEMATIC) * factor, 4)
    return Spread(np.round(s.low * factor, 4), np.round(s.high * factor, 4), systematic, s.site)
