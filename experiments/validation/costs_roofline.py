"""How wrong is the roofline ratio? Measured against public kernel tables; writes the error table that ships.

    python experiments/validation/costs_roofline.py [--tables DIR] [--write]

For every build (framework, version) and shape, the time measured on an H200 is scaled by the model's own ratio
(tesserasim/costs/roofline.py) to another GPU and compared with the time measured there. Nothing is fitted.

The log error ln(predicted / measured) is split into a mean that kernels share (systematic) and the scatter
around it (per shape). Means are taken per GPU *and* per limit on that GPU (floor, memory, compute): over a whole
table the limits' biases have opposite signs and cancel, but one unit of a model lives in one of them, so the mean
over the table (`systematic_whole_table`, printed beside it) would promise too much. Cells count alike, cells of
fewer than 100 shapes not at all. All goes into tesserasim/costs/data/roofline_errors.json with --write.

Tables: NVIDIA aiconfigurator performance tables (Apache-2.0), git 095f58a51c4c and release 0.12.0: CUDA-event
timing of graph replays. Found in DIR, else in $TESSERASIM_SHARED/data/kernels or ../shared/data/kernels.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs.roofline import FLOOR_NS, Work, kernel_floor_ns, limits, ratio
from tesserasim.costs.times import FloatArray

REPO = Path(__file__).resolve().parents[2]
OUT = REPO / "tesserasim" / "costs" / "data" / "roofline_errors.json"
REFERENCE = "H200-SXM-141GB"
TARGETS = ("A100-SXM4-80GB", "L40S", "H100-SXM-80GB", "B200-SXM", "RTX-PRO-6000-Server")
LEAST_CELL = 100  # shapes in a (GPU, limit) cell that counts
BUILD = ["framework", "version"]
SOURCE = (
    "NVIDIA aiconfigurator performance tables (Apache-2.0), git 095f58a51c4c and release 0.12.0; bf16 GEMM, "
    "attention and MoE (balanced routing), fp8 quantisation for elementwise; predicted from the H200 row of the "
    "same build and shape for A100-SXM4-80GB, L40S, H100-SXM, B200 and RTX PRO 6000 Server"
)


def tables_dir(option: str | None) -> Path:
    """The folder of the kernel tables; exits with one line if there is none."""
    shared = Path(os.environ.get("TESSERASIM_SHARED", REPO.parent / "shared"))
    folder = Path(option) if option else shared / "data" / "kernels"
    if not (folder / "gemm.parquet").is_file():
        sys.exit(f"no kernel tables in {folder}: set TESSERASIM_SHARED or give --tables")
    return folder


def _work(flops: FloatArray, moved: FloatArray, warm_set: FloatArray, floor_ns: float) -> Work:
    """All bytes are warm: the benchmarks replay the same buffers without flushing the L2."""
    zero = np.zeros(len(flops))
    return Work(flops, zero, zero, moved, warm_set, np.full(len(flops), floor_ns))


def gemm(t: pd.DataFrame) -> Work:
    """Six weight tensors take turns, so the L2 must hold six of them to help."""
    m, n, k = (t[c].to_numpy(np.float64) for c in ("m", "n", "k"))
    weight, rest = 2 * n * k, 2 * m * (n + k)
    return _work(2 * m * n * k, weight + rest, 6 * weight + rest, kernel_floor_ns("gemm"))


def attention_prefill(t: pd.DataFrame) -> Work:
    """Causal: query i of q sees kv - q + i keys."""
    b, q, kv, h, hkv, d = _heads(t)
    pairs = q * (kv - q) + q * (q + 1) / 2
    moved = 2 * b * d * (2 * q * h + 2 * kv * hkv)
    return _work(4 * b * h * d * pairs, moved, moved, kernel_floor_ns("attention_prefill"))


def attention_decode(t: pd.DataFrame) -> Work:
    b, q, kv, h, hkv, d = _heads(t)
    moved = 2 * b * d * (2 * q * h + 2 * kv * hkv)
    return _work(4 * b * h * d * q * kv, moved, moved, kernel_floor_ns("attention_decode"))


def _heads(t: pd.DataFrame) -> list[FloatArray]:
    names = ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim")
    return [t[c].to_numpy(np.float64) for c in names]


def moe(t: pd.DataFrame) -> Work:
    """Balanced routing; a row times about five kernels: sorting, two grouped GEMMs, activation, weighted sum."""
    tokens, hidden, topk = (t[c].to_numpy(np.float64) for c in ("num_tokens", "hidden_size", "topk"))
    ep = t["moe_ep_size"].to_numpy(np.float64)
    inter = t["inter_size"].to_numpy(np.float64) / t["moe_tp_size"].to_numpy(np.float64)
    pairs = tokens * topk / ep
    active = np.clip(pairs, 1, t["num_experts"].to_numpy(np.float64) / ep)
    weights = 2 * active * 3 * hidden * inter
    rest = 2 * (2 * tokens * hidden + pairs * (2 * hidden + 3 * inter))
    return _work(6 * pairs * hidden * inter, weights + rest, weights + rest, 5 * FLOOR_NS)


def elementwise(t: pd.DataFrame) -> Work:
    """bf16 in, fp8 out."""
    moved = 3 * t["m"].to_numpy(np.float64) * t["k"].to_numpy(np.float64)
    return _work(np.zeros(len(t)), moved, moved, kernel_floor_ns("elementwise"))


def _plain_attention(t: pd.DataFrame) -> pd.Series:
    return (t.window_size == 0) & (t.kv_cache_dtype == "bfloat16") & (t.dtype == "bfloat16")


#: kind -> file, rows that count, columns that make a shape, work of the rows
KINDS: dict[str, tuple[str, Callable[[pd.DataFrame], pd.Series], list[str], Callable[[pd.DataFrame], Work]]] = {
    "gemm": ("gemm", lambda t: t.dtype == "bfloat16", ["m", "n", "k"], gemm),
    "attention_prefill": (
        "attention_prefill",
        _plain_attention,
        ["batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim"],
        attention_prefill,
    ),
    "attention_decode": (
        "attention_decode",
        _plain_attention,
        ["batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim"],
        attention_decode,
    ),
    "moe": (
        "moe",
        lambda t: (t.dtype == "bfloat16") & (t.distribution == "balanced"),
        ["num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"],
        moe,
    ),
    "elementwise": ("elementwise_quant", lambda t: t.time_us > 0, ["op", "m", "k"], elementwise),
}


def log_errors(kind: str, folder: Path) -> pd.DataFrame:
    """One row per (GPU, build, shape) that both GPUs measured: gpu, error = ln(predicted / measured), limit.

    Where a build measured several kernels for one shape, the fastest counts: an engine would choose it.
    """
    file, keep, shape, work = KINDS[kind]
    table = pd.read_parquet(folder / f"{file}.parquet")
    table = table[keep(table) & table.gpu.isin([REFERENCE, *TARGETS])]
    key = BUILD + shape
    best = table.groupby(["gpu", *key], observed=True).time_us.min().reset_index()
    reference = best[best.gpu == REFERENCE].drop(columns="gpu")
    captured = find_gpu(REFERENCE)
    parts = []
    for gpu in TARGETS:
        both = best[best.gpu == gpu].merge(reference, on=key, suffixes=("", "_reference"))
        if both.empty:
            continue
        before = both.time_us_reference.to_numpy(np.float64) * 1e3
        predicted = before * ratio(work(both), before, captured, find_gpu(gpu))
        error = np.log(predicted / (both.time_us.to_numpy(np.float64) * 1e3))
        limit = limits(work(both), before, find_gpu(gpu))
        parts.append(pd.DataFrame({"gpu": find_gpu(gpu).name, "error": error, "limit": limit}))
    return pd.concat(parts, ignore_index=True)


def summary(errors: pd.DataFrame) -> dict[str, dict[str, object]]:
    """Per GPU: n, mean and median absolute error, bias (relative to measured), mean and sd of the log, cells."""
    rows: dict[str, dict[str, object]] = {}
    for gpu, part in errors.groupby("gpu"):
        e = part.error
        relative = np.abs(np.expm1(e.to_numpy()))
        cells = part.groupby("limit").error.agg(["size", "mean", "std"]).query(f"size >= {LEAST_CELL}")
        rows[str(gpu)] = {
            "n": len(e),
            "mape": _round(np.mean(relative)),
            "median_ape": _round(np.median(relative)),
            "bias": _round(np.expm1(e.mean())),
            "mean_log": _round(e.mean()),
            "sd_log": _round(e.std()),
            "limits": {
                str(limit): {"n": int(c["size"]), "mean_log": _round(c["mean"]), "sd_log": _round(c["std"])}
                for limit, c in cells.iterrows()
            },
        }
    return rows


def _round(x: float) -> float:
    return round(float(x), 4)


def _rms(values: list[float]) -> float:
    return _round(np.sqrt(np.mean(np.square(values))))


def evaluate(folder: Path) -> dict[str, Any]:
    """The content of roofline_errors.json."""
    kinds: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        by_gpu: dict[str, Any] = summary(log_errors(kind, folder))
        cells = [c for row in by_gpu.values() for c in row["limits"].values()]
        kinds[kind] = {
            "systematic": _rms([c["mean_log"] for c in cells]),
            "site": _rms([c["sd_log"] for c in cells]),
            "systematic_whole_table": _rms([r["mean_log"] for r in by_gpu.values()]),
            "site_whole_table": _rms([r["sd_log"] for r in by_gpu.values()]),
            "n": sum(r["n"] for r in by_gpu.values()),
            "gpus": by_gpu,
        }
    worst = {key: max(k[key] for k in kinds.values()) for key in ("systematic", "site")}
    return {
        "schema": 1,
        "model": "roofline-ratio",
        "reference_gpu": find_gpu(REFERENCE).name,
        "source": SOURCE,
        "made_by": "experiments/validation/costs_roofline.py --write",
        "date": datetime.date.today().isoformat(),
        "kinds": kinds,
        "fallback": {**worst, "why": "kinds without a table get the worst of the measured ones"},
    }


def show(table: dict[str, Any]) -> None:
    columns = ("n", "mape", "median_ape", "bias", "mean_log", "sd_log")
    print(f"{'kind':18} {'gpu':14}" + "".join(f"{c:>11}" for c in columns) + "   mean_log by limit")
    for kind, k in table["kinds"].items():
        for gpu, row in k["gpus"].items():
            cells = "  ".join(f"{limit} {c['mean_log']:+.2f}" for limit, c in row["limits"].items())
            print(f"{kind:18} {gpu:14}" + "".join(f"{row[c]:>11}" for c in columns) + f"   {cells}")
        print(
            f"{kind:18} {'all':14}{k['n']:>11}   systematic {k['systematic']} per shape {k['site']}"
            f" (whole table: {k['systematic_whole_table']}, {k['site_whole_table']})"
        )
    print("other kinds:", table["fallback"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tables", help="folder with gemm.parquet and its siblings")
    parser.add_argument("--write", action="store_true", help=f"write {OUT.relative_to(REPO)}")
    options = parser.parse_args()
    table = evaluate(tables_dir(options.tables))
    show(table)
    if options.write:
        OUT.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {OUT.relative_to(REPO)}")


if __name__ == "__main__":
    main()
