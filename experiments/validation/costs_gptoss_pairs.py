"""A check on other people's measurements: gpt-oss-20b's kernels from an A100 to an L40S, faster or slower?

    python experiments/validation/costs_gptoss_pairs.py [--pairs FILE] [--json]

The pairs (a published serving trace, median time per kernel on both GPUs) were never used in a fit and no choice was
made by looking at them. They have no shapes: costs_gptoss_shapes.json assumes one per kernel, with reasons, and was
committed before any time was read. Both GPUs' times are predicted by the shipped model without a known time; a
prediction is right if it says on which GPU the kernel is faster. Rows weigh as much as their time on the A100.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs.mechanisms import LIMITS, specs
from tesserasim.costs.shipped import shipped
from tesserasim.costs.sites import site_rows
from tesserasim.trace.model import Kernel, Trace, TraceMeta

REPO = Path(__file__).resolve().parents[2]
SHAPES = Path(__file__).with_name("costs_gptoss_shapes.json")
#: Ratios closer to 1 than this have no side.
NEAR = 0.1
ATTENTION = ("batch", "seq_q", "seq_kv")
#: Kind of the rows that are reported apart.
MOE_KERNELS = "moe"


def kernels(row: dict[str, Any], model: dict[str, int]) -> list[Kernel]:
    """The kernels that stand for a row: one, or one per window or projection of which the row is the mean."""
    kind, op = row["kind"], str(row["kernel"])
    if kind == "gemm":
        shape = {c: row[c] for c in "mnk"}
        return [Kernel(0, op, op, kind, shape=shape, duration_ns=1, act_dtype="bf16", weight_dtype="bf16")]
    if kind.startswith("attention"):
        heads = {c: model[c] for c in ("heads", "kv_heads", "head_dim")}
        shapes = [{**{c: row[c] for c in ATTENTION}, **heads, "window": w} for w in row["windows"]]
        return [Kernel(0, op, op, kind, shape=s, duration_ns=1, act_dtype="bf16") for s in shapes]
    if kind == "moe":
        both = {"up": (2 * model["inter"], model["hidden"]), "down": (model["hidden"], model["inter"])}
        wanted = [row["projection"]] if "projection" in row else ["up", "down"]
        return [
            Kernel(
                0, op, op, kind, op=p, shape={"n": both[p][0], "k": both[p][1], "experts": model["experts"]},
                flops=2 * both[p][0] * both[p][1] * row["tokens"] * model["topk"], duration_ns=1, act_dtype="bf16",
                weight_dtype="mxfp4",
            )
            for p in wanted
        ]  # fmt: skip
    return [Kernel(0, op, op, kind, read_bytes=row["read"], write_bytes=row["write"], duration_ns=1, act_dtype="bf16")]


def predict_us(row: dict[str, Any], model: dict[str, int], gpu: str) -> tuple[float, str, dict[str, float]]:
    """(us of a row on a GPU, source of the time, us by mechanism); the mean over the kernels that stand for it."""
    spec, meta = find_gpu(gpu), TraceMeta("synthetic", "gpt-oss-20b", {"name": row["phase"]}, "H200-SXM")
    us, parts, source = [], [], ""
    for kernel in kernels(row, model):
        (rows,) = site_rows(Trace(meta, (kernel,)))
        fitted = shipped(rows.kind, None)
        us.append(float((fitted.predict(rows.shape, spec) * rows.share)[0]))
        source = " ".join(fitted.source(spec.name)).strip()
        limits = LIMITS[rows.kind](rows.shape, specs([spec]))
        parts.append([float(x[0]) for x in (limits.floor, limits.compute, limits.memory)])
    names = ("floor", "tensor", "memory")
    return float(np.mean(us)), source, dict(zip(names, np.mean(parts, axis=0).tolist(), strict=True))


def read_pairs(path: Path) -> list[dict[str, str]]:
    """Rows of the pairs file; its first line is a comment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def compare(pairs: list[dict[str, str]], assumed: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per pair: measured and predicted ratio of L40S to A100 time, and what the A100's time weighs.

    Rows without an assumed shape have `predicted` None.
    """
    shapes = {(r["phase"], r["kernel"]): r for r in assumed["rows"]}
    here, there = assumed["gpus"]["from"], assumed["gpus"]["to"]
    found = []
    for pair in pairs:
        us, n = float(pair["a100_us_median"]), int(pair["launches"])
        row = {
            "phase": pair["phase"], "kernel": pair["kernel_a100"], "launches": n, "a100_us": us,
            "weight_us": us * n, "ratio": float(pair["ratio_l40s_over_a100_median"]), "predicted": None,
        }  # fmt: skip
        shape = shapes.get((pair["phase"], pair["kernel_a100"]))
        if shape is not None:
            before, source, parts = predict_us(shape, assumed["model"], here)
            after, other, other_parts = predict_us(shape, assumed["model"], there)
            row |= {
                "kind": shape["kind"], "predicted": after / before, "predicted_a100_us": before,
                "predicted_l40s_us": after, "sources": [source, other], "mechanisms_a100": parts,
                "mechanisms_l40s": other_parts,
            }  # fmt: skip
        found.append(row)
    return found


def right(row: dict[str, Any]) -> bool:
    """Does the prediction name the faster GPU?"""
    return row["predicted"] is not None and (row["predicted"] > 1.0) == (row["ratio"] > 1.0)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Shares of the A100's time: unknown, of MoE kernels; right among the rest where the ratio is not near 1."""
    weight = sum(r["weight_us"] for r in rows)
    rest = [r for r in rows if r.get("kind") != MOE_KERNELS]
    sided = [r for r in rest if abs(r["ratio"] - 1.0) > NEAR]
    total = sum(r["weight_us"] for r in sided)
    return {
        "unknown_share": sum(r["weight_us"] for r in rows if r["predicted"] is None) / weight,
        "moe_share": sum(r["weight_us"] for r in rows if r.get("kind") == MOE_KERNELS) / weight,
        "sided_share_of_non_moe": total / sum(r["weight_us"] for r in rest),
        "right_share": sum(r["weight_us"] for r in sided if right(r)) / total,
        "right_rows": float(sum(map(right, sided))),
        "sided_rows": float(len(sided)),
    }


def words(row: dict[str, Any]) -> str:
    if row["predicted"] is None:
        return f"| {row['phase']} | {row['kernel']} | {row['a100_us']:.1f} | {row['ratio']:.2f} | – | unknown shape |"
    said = "near 1" if abs(row["ratio"] - 1.0) <= NEAR else "right" if right(row) else "wrong"
    return (
        f"| {row['phase']} | {row['kernel']} | {row['a100_us']:.1f} | {row['predicted_a100_us']:.1f} | "
        f"{row['ratio']:.2f} | {row['predicted']:.2f} | {said} | {row['kind']}: {', '.join(row['sources'])} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shared = Path(os.environ.get("TESSERASIM_SHARED", REPO.parent / "shared"))
    parser.add_argument("--pairs", type=Path, default=shared / "data" / "paper" / "gptoss20b_kernel_pairs.csv")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = compare(read_pairs(options.pairs), json.loads(SHAPES.read_text(encoding="utf-8")))
    found = summary(rows)
    if options.json:
        print(json.dumps({"summary": found, "rows": rows}, indent=1))
        return
    print("| phase | kernel | A100 us | predicted | L40S / A100 | predicted | side | model |\n" + "|---" * 8 + "|")
    for row in sorted(rows, key=lambda r: -r["weight_us"]):
        print(words(row))
    print(
        f"\nright side for {found['right_share']:.1%} of the non-MoE time whose ratio is not within {NEAR:g} of 1 "
        f"({found['right_rows']:.0f} of {found['sided_rows']:.0f} rows; {found['sided_share_of_non_moe']:.1%} of the "
        f"non-MoE time); expert kernels {found['moe_share']:.1%} of the time; unknown {found['unknown_share']:.1%}"
    )
    for row in rows:
        if row.get("kind") == MOE_KERNELS:
            parts = {g: {k: round(v, 1) for k, v in row[f"mechanisms_{g}"].items()} for g in ("a100", "l40s")}
            print(f"experts, {row['phase']} {row['kernel']}: mechanisms of a layer, us: {parts}")


if __name__ == "__main__":
    main()
