"""Measured kernel tables: what a row is, which rows are compared, and which shapes belong together.

A table is a Parquet file with one row per (GPU, build, data types, shape) and its `time_us`; a build is a framework
and its version. GPUs are only ever compared within one build: another build runs another kernel.

*Groups* are shapes that share their widths: (n, k) of a GEMM, (heads, kv_heads, head_dim) of attention, (hidden,
inter, topk, experts) of a mixture of experts, k of an elementwise kernel. Cross-validation holds whole groups out,
in all data types, builds and GPUs at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs.mechanisms import COPIES
from tesserasim.costs.times import FloatArray
from tesserasim.errors import InputError
from tesserasim.files import check_regular, path_text

#: Kind -> shape columns of the tables -> names in the model.
SHAPES: dict[str, dict[str, str]] = {
    "gemm": {"m": "m", "n": "n", "k": "k"},
    "attention_prefill": dict.fromkeys(("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim"), "")
    | {"window_size": "window"},
    "attention_decode": dict.fromkeys(("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim"), "")
    | {"window_size": "window"},
    "moe": {
        "num_tokens": "tokens", "hidden_size": "hidden", "inter_size": "inter", "topk": "topk",
        "num_experts": "experts", "moe_tp_size": "tp", "moe_ep_size": "ep",
    },
    "elementwise": {"m": "m", "k": "k"},
}  # fmt: skip
GROUPS = {
    "gemm": ("n", "k"),
    "attention_prefill": ("heads", "kv_heads", "head_dim"),
    "attention_decode": ("heads", "kv_heads", "head_dim"),
    "moe": ("hidden", "inter", "topk", "experts"),
    "elementwise": ("k",),
}
#: The builds that are fitted and evaluated: the same shapes on most GPUs, and for each GPU that has none, vLLM 0.24.
BUILDS = {
    "gemm": "sglang 0.5.10",
    "attention_prefill": "sglang 0.5.10",
    "attention_decode": "sglang 0.5.10",
    "moe": "sglang 0.5.10",
    "elementwise": "vllm 0.24.0",
}
OTHER_BUILD = "vllm 0.24.0"
#: data type word -> bits of (weights, activations) and 1 if scaled per block
DTYPES = {
    "bfloat16": (16, 16, 0), "float16": (16, 16, 0), "fp8": (8, 8, 0), "fp8_block": (8, 8, 1), "nvfp4": (4, 4, 1),
    "int4_wo": (4, 16, 0), "w4a16_mxfp4": (4, 16, 1), "w4a8_mxfp4_mxfp8": (4, 8, 1),
}  # fmt: skip
#: Rows without a graph: the GPU whose launches count as one, how far above its least time a shape may lie for the host
#: to set its pace, and how many shapes two GPUs must share.
LAUNCHES_OF, HOST_BOUND, LEAST_EAGER = "H200-SXM", 1.2, 20
_BITS = {"bfloat16": 16, "float16": 16, "fp8": 8}


@dataclass(frozen=True)
class Rows:
    """Rows of one kind; every array has one entry per row."""

    kind: str
    gpus: tuple[str, ...]  # canonical names; `gpu` indexes it
    gpu: NDArray[np.int64]
    build: NDArray[Any]  # words
    dtype: NDArray[Any]  # words
    shape: dict[str, FloatArray]
    time_us: FloatArray
    group: NDArray[np.int64]  # numbers the groups from 0, in the order of `group_names`
    group_names: tuple[tuple[int, ...], ...]
    reference_us: FloatArray  # time of the reference GPU's row of the same build and shape; nan: there is none
    launches: Mapping[str, float] = field(default_factory=dict)  # GPU -> launches of a block-scaled GEMM, H200 = 1

    def __len__(self) -> int:
        return len(self.time_us)

    def take(self, where: NDArray[Any]) -> Rows:
        """The rows of a mask or of indices."""
        shape = {k: v[where] for k, v in self.shape.items()}
        return Rows(
            self.kind, self.gpus, self.gpu[where], self.build[where], self.dtype[where], shape, self.time_us[where],
            self.group[where], self.group_names, self.reference_us[where], self.launches,
        )  # fmt: skip

    def is_gpu(self, name: str) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.gpu == (self.gpus.index(name) if name in self.gpus else -1)
        return found


def read_tables(paths: Sequence[str | os.PathLike[str]], reference: str | None = "H200-SXM") -> dict[str, Rows]:
    """Kind -> rows of the evaluated builds, of all files together.

    Raises InputError for a file that is no kernel table. Kinds without a model (collectives, Mamba) are left out.
    """
    frames: dict[str, list[pd.DataFrame]] = {}
    launches: dict[str, float] = {}
    for path in paths:
        frame = read_frame(Path(path))
        launches |= eager_launches(frame)
        for kind, part in frame.groupby("kernel_kind", observed=True):
            if str(kind) in SHAPES:
                frames.setdefault(str(kind), []).append(canonical(part, str(kind), path_text(path)))
    if not frames:
        raise InputError(f"{', '.join(path_text(p) for p in paths)[:200]}: no rows of a kind that has a model")
    found = {kind: _rows(pd.concat(parts), kind, reference) for kind, parts in sorted(frames.items())}
    return {kind: replace(rows, launches=launches if kind == "gemm" else {}) for kind, rows in found.items()}


def eager_launches(frame: pd.DataFrame) -> dict[str, float]:
    """GPU -> launches of a block-scaled FP8 GEMM relative to the H200's, from rows timed without a graph.

    There the host sets the pace of small operations: the time is proportional to what it launches. Only shapes count
    for which both GPUs ran the same library's kernel, and which the H200 does in little more than its least time.
    """
    needed = ("framework", "version", "dtype", "kernel_source", *SHAPES["gemm"])
    if not set(needed) <= set(frame.columns):
        return {}
    build = frame["framework"].astype(str) + " " + frame["version"].astype(str)
    eager = frame[(build == OTHER_BUILD) & (frame["dtype"].astype(str) == "fp8_block")]
    names = {str(g): find_gpu(str(g)).name for g in eager["gpu"].unique()}
    key = ["kernel_source", *SHAPES["gemm"]]
    times = eager.assign(gpu=eager["gpu"].astype(str).map(names), kernel_source=eager["kernel_source"].astype(str))
    wide = times.pivot_table(index=key, columns="gpu", values="time_us", aggfunc="median")
    if LAUNCHES_OF not in wide.columns:
        return {}
    base = wide[LAUNCHES_OF]
    least = base.groupby(level="kernel_source").transform("min")
    ratio = wide[base <= HOST_BOUND * least].div(base[base <= HOST_BOUND * least], axis=0)
    enough = ratio.notna().sum() >= LEAST_EAGER
    return {str(g): round(float(ratio[g].median()), 2) for g in ratio.columns if enough[g]}


def read_frame(path: Path) -> pd.DataFrame:
    """A kernel table as it is, CSV by its suffix and Parquet otherwise. Raises InputError for anything else."""
    check_regular(path, "kernel table")
    csv = path.suffix.lower() == ".csv"
    try:
        frame = pd.read_csv(path) if csv else pd.read_parquet(path)
    except Exception as error:  # pandas and pyarrow raise many types
        line = (str(error).splitlines() or ["unreadable"])[0]
        raise InputError(f"{path_text(path)}: not a {'CSV' if csv else 'Parquet'} table ({line[:100]})") from None
    missing = [c for c in ("kernel_kind", "gpu", "time_us") if c not in frame.columns]
    if missing:
        raise InputError(f"{path_text(path)}: not a kernel table: no column {missing[0]!r}")
    if frame.empty:
        raise InputError(f"{path_text(path)}: a kernel table without rows")
    if frame[["kernel_kind", "gpu"]].isna().any(axis=None):
        raise InputError(f"{path_text(path)}: rows without a kernel_kind or a gpu")
    return frame


def canonical(frame: pd.DataFrame, kind: str, name: str) -> pd.DataFrame:
    """Columns gpu, build, dtype, time_us and the shape under the model's names; only builds that are evaluated."""
    needed = [*SHAPES[kind], "framework", "version", "dtype"]
    for column in needed:
        if column not in frame.columns:
            if column in ("framework", "version"):  # another source: not a build that is compared
                return pd.DataFrame()
            raise InputError(f"{name}: rows of kind {kind} need a column {column!r}")
    names = {g: find_gpu(str(g)).name for g in frame["gpu"].unique()}
    out = pd.DataFrame({"gpu": frame["gpu"].astype(str).map({str(k): v for k, v in names.items()})})
    out["build"] = frame["framework"].astype(str) + " " + frame["version"].astype(str)
    dtype = frame["dtype"].astype(str)
    if kind.startswith("attention"):
        cache = frame["kv_cache_dtype"].astype(str)
        out["q_bits"], out["kv_bits"] = dtype.map(_BITS), cache.map(_BITS)
        dtype = dtype + "/" + cache
    elif kind == "elementwise":
        dtype = "bfloat16>" + dtype
    else:
        for i, column in enumerate(("w_bits", "a_bits", "block")):
            out[column] = dtype.map({k: v[i] for k, v in DTYPES.items()})
    out["dtype"] = dtype
    if kind == "moe":
        out["skew"] = frame["distribution"].astype(str).str.extract(r"power_law_([\d.]+)")[0].astype(float).fillna(0.0)
    for column, word in SHAPES[kind].items():
        out[word or column] = frame[column].astype(np.float64)
    if "copies" in frame.columns and kind in COPIES:
        out["copies"] = frame["copies"].astype(np.float64).fillna(COPIES[kind])
    out["time_us"] = frame["time_us"].astype(np.float64)
    ok = out.notna().all(axis=1) & np.isfinite(out["time_us"]) & (out["time_us"] > 0)
    found: pd.DataFrame = out[ok]
    return found


def _rows(frame: pd.DataFrame, kind: str, reference: str | None) -> Rows:
    main = BUILDS[kind]
    has_main = set(frame.loc[frame["build"] == main, "gpu"])
    keep = (frame["build"] == main) | ((frame["build"] == OTHER_BUILD) & ~frame["gpu"].isin(has_main))
    others = set(frame.loc[keep & (frame["build"] != main), "gpu"])
    if others and reference is not None:  # the reference's rows of that build, to compare with
        keep |= (frame["build"] == OTHER_BUILD) & (frame["gpu"] == reference)
    # Block-scaled GEMMs of vLLM were timed without a graph, launch included: another quantity.
    eager = (frame["build"] == OTHER_BUILD) & (frame["dtype"] == "fp8_block") & (kind == "gemm")
    frame = frame[keep & ~eager]
    key = [c for c in frame.columns if c not in ("gpu", "time_us")]
    frame = pd.DataFrame(frame.groupby(["gpu", *key], as_index=False, sort=True)["time_us"].median())
    if reference is not None:
        known = frame.loc[frame["gpu"] == reference, [*key, "time_us"]].rename(columns={"time_us": "reference_us"})
        frame = frame.merge(known, on=key, how="left")
    else:
        frame["reference_us"] = np.nan
    extra = (frame["gpu"] == reference) & (frame["build"] != main)  # there only to be compared with
    frame = frame[~extra] if main in set(frame["build"]) else frame
    gpus = tuple(sorted(set(frame["gpu"])))
    groups = [tuple(int(v) for v in g) for g in frame[list(GROUPS[kind])].itertuples(index=False)]
    names = tuple(sorted(set(groups)))
    number = {g: i for i, g in enumerate(names)}
    shape = {c: frame[c].to_numpy(np.float64) for c in key if c not in ("build", "dtype")}
    return Rows(
        kind, gpus, frame["gpu"].map({g: i for i, g in enumerate(gpus)}).to_numpy(np.int64),
        frame["build"].to_numpy(str), frame["dtype"].to_numpy(str), shape, frame["time_us"].to_numpy(np.float64),
        np.array([number[g] for g in groups], dtype=np.int64), names, frame["reference_us"].to_numpy(np.float64),
    )  # fmt: skip
