"""How a table of `python -m hw calibrate` compares with what is known of the GPU already; prints two tables.

    python experiments/validation/calibrate_h200.py TABLE [--tables DIR] [--traces DIR] [--rows]

Each measured row is held against, where there is such a thing,

    parameters        the shipped parameters' prediction from the shape alone, under the benchmarks' conditions
    parameters, cold  the same with cold weights or cache, against `cold_us`: the shipped tables have no such row
    shipped row       the shipped table's row of that shape on that GPU (SGLang 0.5.10; elementwise vLLM 0.24.0)
    interpolated      between its two neighbours in rows, tokens or length where all else is equal (log-log)
    captured          the site of that shape in the captured traces of that GPU (its kernels' durations, without gaps),
                      against `cold_us` if there is one: a model finds its weights and its cache cold

n: rows; median: of other / measured - 1; MAPE: mean of its size. No GPU is needed. Without the shipped tables (not part
of this repository) their lines are missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs.mechanisms import COLD
from tesserasim.costs.shipped import KINDS, shipped
from tesserasim.costs.sites import site_rows
from tesserasim.costs.tables import BUILDS, DTYPES, SHAPES
from tesserasim.errors import TesserasimError
from tesserasim.trace.parquet import read_trace

REPO = Path(__file__).resolve().parents[2]
FILES = {k: k for k in KINDS} | {"elementwise": "elementwise_quant"}
#: The column along which a shipped table is interpolated.
ALONG = {
    "gemm": "m", "attention_prefill": "seq_q", "attention_decode": "seq_kv", "moe": "num_tokens", "elementwise": "m",
}  # fmt: skip
AGAINST = ("parameters", "parameters, cold", "shipped row", "interpolated", "captured")
#: Kinds whose sites in a trace are the measured operation itself.
CAPTURED = ("gemm", "attention_prefill", "attention_decode")


def read_table(path: Path) -> pd.DataFrame:
    """Rows of the kinds that have a model; exits with one line if the file is no such table."""
    try:
        table = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
        table = table[table["kernel_kind"].isin(KINDS)].reset_index(drop=True)
        if "cold_us" not in table:
            table["cold_us"] = np.nan
        table["time_us"].astype(float)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{path}: not a table of python -m hw calibrate ({' '.join(str(error).split())[:80]})")
    if not len(table):
        sys.exit(f"{path}: no row of a kind that has a model")
    return table


def model_shape(part: pd.DataFrame, kind: str) -> dict[str, np.ndarray]:
    """Rows of one kind as the model knows shapes."""
    shape = {word or column: part[column].to_numpy(np.float64) for column, word in SHAPES[kind].items()}
    bits = np.array([DTYPES[d] for d in part["dtype"]], dtype=np.float64)
    if kind.startswith("attention"):
        cache = np.array([DTYPES[d][0] for d in part["kv_cache_dtype"]], dtype=np.float64)
        return shape | {"q_bits": bits[:, 1], "kv_bits": cache}
    shape |= {"w_bits": bits[:, 0], "a_bits": bits[:, 1], "block": bits[:, 2]}
    return shape | {"skew": np.zeros(len(part))} if kind == "moe" else shape


def predicted(table: pd.DataFrame, cold: bool) -> np.ndarray:
    """[row] us of the shipped parameters; nan where the condition does not apply."""
    found = np.full(len(table), np.nan)
    for (kind, gpu), part in table.groupby(["kernel_kind", "gpu"]):
        shape = model_shape(part, str(kind))
        if cold:
            if kind not in ("gemm", "attention_decode"):
                continue
            shape["copies"] = np.full(len(part), COLD)
        found[part.index] = shipped(str(kind), None).predict(shape, find_gpu(str(gpu)))
    return found


def columns(kind: str) -> list[str]:
    """What makes a shipped row that of a shape."""
    more = {"moe": ["distribution"], "attention_prefill": ["kv_cache_dtype"], "attention_decode": ["kv_cache_dtype"]}
    return ["dtype", *more.get(kind, []), *SHAPES[kind]]


def shipped_rows(table: pd.DataFrame, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """[row] us of the equal shipped row, and interpolated between its neighbours; nan where there is none."""
    equal, between = np.full(len(table), np.nan), np.full(len(table), np.nan)
    for kind, part in table.groupby("kernel_kind"):
        rows = pd.read_parquet(folder / f"{FILES[str(kind)]}.parquet")
        names = {g: find_gpu(str(g)).name for g in rows["gpu"].unique()}
        build = rows["framework"].astype(str) + " " + rows["version"].astype(str)
        rows = rows[(build == BUILDS[str(kind)]) & rows["gpu"].map(names).isin(part["gpu"].unique())]
        key = columns(str(kind))
        rows = rows.assign(**{c: rows[c].astype(str) for c in key if not pd.api.types.is_numeric_dtype(rows[c])})
        along = ALONG[str(kind)]
        # A prefill without earlier tokens has as many keys as queries: they go along.
        fixed = [c for c in key if c != along and not (kind == "attention_prefill" and c == "seq_kv")]
        rows = rows.groupby([*fixed, along], observed=True)["time_us"].min().reset_index()
        curves = {k: c.sort_values(along) for k, c in rows.groupby(fixed, observed=True)}
        for i, row in part.iterrows():
            curve = curves.get(tuple(row[c] for c in fixed))
            if curve is None:
                continue
            x, y = curve[along].to_numpy(np.float64), curve["time_us"].to_numpy(np.float64)
            here = float(row[along])
            if here in x:
                equal[i] = y[np.flatnonzero(x == here)[0]]
            elif x[0] < here < x[-1]:
                between[i] = np.exp(np.interp(np.log(here), np.log(x), np.log(y)))
    return equal, between


def captured_sites(folder: Path, gpus: set[str]) -> Iterator[tuple[str, str, tuple[float, ...], float]]:
    """(gpu, kind, shape, us) of every site of the traces whose kind and shape a table can have."""
    for path in sorted(folder.rglob("*.parquet")):
        try:
            trace = read_trace(path)
            gpu = find_gpu(trace.meta.gpu).name
        except TesserasimError:  # no trace, or of part of a GPU
            continue
        if gpu not in gpus or trace.meta.origin != "captured":
            continue
        us = np.bincount(trace.site_of, weights=[k.duration_ns for k in trace.kernels], minlength=len(trace.sites))
        for rows in site_rows(trace):
            if rows.kind not in CAPTURED:
                continue
            names = key_names(rows.kind)
            values = np.stack([rows.shape[c] for c in names], axis=1)
            for site, value in zip(rows.sites.tolist(), values.tolist(), strict=True):
                yield gpu, rows.kind, tuple(value), us[site] / 1e3


def key_names(kind: str) -> list[str]:
    """A shape as the model names it, with its widths."""
    words = [word or column for column, word in SHAPES[kind].items()]
    return [*words, *(("q_bits", "kv_bits") if kind.startswith("attention") else ("w_bits", "a_bits"))]


def captured(table: pd.DataFrame, folder: Path) -> np.ndarray:
    """[row] median us over the captured sites of the same shape; nan where there is none."""
    sites: dict[tuple[Any, ...], list[float]] = {}
    for gpu, kind, shape, us in captured_sites(folder, set(table["gpu"])):
        sites.setdefault((gpu, kind, *shape), []).append(us)
    found = np.full(len(table), np.nan)
    for (kind, gpu), part in table.groupby(["kernel_kind", "gpu"]):
        if kind not in CAPTURED:
            continue
        shape = model_shape(part, str(kind))
        values = np.stack([shape[c] for c in key_names(str(kind))], axis=1)
        for i, value in zip(part.index, values.tolist(), strict=True):
            times = sites.get((gpu, kind, *value))
            if times:
                found[i] = float(np.median(times))
    return found


def ratios(table: pd.DataFrame, tables: Path | None, traces: Path) -> pd.DataFrame:
    """[row, AGAINST]: other / measured."""
    warm = table["time_us"].to_numpy(np.float64)
    cold = table["cold_us"].to_numpy(np.float64)
    none = np.full(len(table), np.nan)
    equal, between = shipped_rows(table, tables) if tables else (none, none)
    found = {
        "parameters": predicted(table, False) / warm,
        "parameters, cold": predicted(table, True) / cold,
        "shipped row": equal / warm,
        "interpolated": between / warm,
        "captured": captured(table, traces) / np.where(np.isfinite(cold), cold, warm),
    }
    return pd.DataFrame(found)


def summary(table: pd.DataFrame, ratio: pd.DataFrame) -> list[tuple[str, str, str, int, float, float]]:
    """(kind, dtype, against, n, median, MAPE) for every group that has rows."""
    found = []
    for kind in KINDS:
        for dtype in sorted(table.loc[table["kernel_kind"] == kind, "dtype"].unique()):
            mine = (table["kernel_kind"] == kind) & (table["dtype"] == dtype)
            for against in AGAINST:
                error = ratio.loc[mine, against].dropna().to_numpy() - 1.0
                if len(error):
                    mape = float(np.mean(np.abs(error)))
                    found.append((kind, str(dtype), against, len(error), float(np.median(error)), mape))
    return found


def show(table: pd.DataFrame, ratio: pd.DataFrame, every_row: bool) -> None:
    print("| kind | dtype | against | n | median | MAPE |\n|---|---|---|---|---|---|")
    for kind, dtype, against, n, median, mape in summary(table, ratio):
        print(f"| {kind} | {dtype} | {against} | {n} | {median:+.3f} | {mape:.3f} |")
    spread = (table["p90_us"] - table["p10_us"]) / table["time_us"]
    print(
        "\n| kind | rows | spread of samples, median | 90 % | cold / warm, median | implementation |\n"
        + "|---" * 6
        + "|"
    )
    for kind, part in table.groupby("kernel_kind"):
        s, c = spread[part.index], (part["cold_us"] / part["time_us"]).dropna()
        cold = f"{c.median():.3f}" if len(c) else "–"
        source = "; ".join(sorted(part["kernel_source"].unique()))
        print(f"| {kind} | {len(part)} | {s.median():.4f} | {s.quantile(0.9):.4f} | {cold} | {source} |")
    if every_row:
        print()
        keep = [
            c for c in ("kernel_kind", "dtype", *dict.fromkeys(c for s in SHAPES.values() for c in s)) if c in table
        ]
        print(pd.concat([table[[*keep, "time_us", "cold_us"]], ratio.round(3)], axis=1).to_csv(index=False))


def main() -> None:
    shared = Path(os.environ.get("TESSERASIM_SHARED", REPO.parent / "shared"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--tables", type=Path, default=shared / "data" / "kernels", help="folder of the shipped tables")
    parser.add_argument("--traces", type=Path, default=REPO / "traces")
    parser.add_argument("--rows", action="store_true", help="also every row, as CSV")
    options = parser.parse_args()
    table = read_table(options.table)
    there = (options.tables / "gemm.parquet").is_file()
    if not there:
        print(f"no shipped tables in {options.tables}: rows of equal shape are left out", file=sys.stderr)
    try:
        show(table, ratios(table, options.tables if there else None, options.traces), options.rows)
    except TesserasimError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
