"""Figure 2: how much longer kernels take on an L40S than on an A100, by model.

    python paper_figs/fig2.py [STEM]

Ours: every kernel that a cohort launches (32 requests of the mix's lengths, 32 images), with times predicted from the
H200 captures for both GPUs, a launch counting once. The paper: measured launches under vLLM and diffusers; reported
are the share of kernels that are faster on the L40S, and the share of the A100's time that they take. Writes STEM.png,
.pdf and .csv (default: results/fig2) and prints where the two sides differ.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from paperfig import COLOURS, MODELS, ROOT, new_figure, number, pair_of_bars, paper_rows, plain, said, save

from tesserasim import api
from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs.base import default_costs
from tesserasim.mixtimes import mix_times

LEFT, RIGHT = "A100-80GB-PCIe", "L40S"
BATCH = 32


def launches(mix_name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(ns on the left GPU, ns on the right, how often) of every kernel launch of a cohort, one entry per kind of it."""
    mix = api.load_mix(mix_name)
    batch = BATCH if mix.kind == "llm" else 1
    times = mix_times(mix, default_costs())
    left, right = (times.cohort_runs(batch, find_gpu(g)) for g in (LEFT, RIGHT))
    a = np.concatenate([r.duration_ns.ravel() for r in left])
    b = np.concatenate([r.duration_ns.ravel() for r in right])
    n = np.concatenate([np.repeat(r.counts, r.duration_ns.shape[1]) for r in left])
    kept = (a > 0) & (b > 0)
    return a[kept], b[kept], n[kept].astype(float)


def ours(mix_name: str) -> dict[str, Any]:
    """Shares and the distribution of the ratio right / left of one mix."""
    a, b, n = launches(mix_name)
    ratio = b / a
    order = np.argsort(ratio)
    grown = np.cumsum(n[order]) / n.sum()
    faster = ratio < 1.0
    at = [float(ratio[order][min(np.searchsorted(grown, q), len(ratio) - 1)]) for q in (0.1, 0.5, 0.9)]
    return {
        "kernels_faster": float(n[faster].sum() / n.sum()),
        "time_of_faster": float((a * n)[faster].sum() / (a * n).sum()),
        "p10": at[0], "p50": at[1], "p90": at[2], "ratio": ratio[order], "share": grown,
    }  # fmt: skip


def reported() -> dict[str, tuple[float | None, float | None]]:
    """Model -> (share of kernels faster on the L40S, share of the A100's time that they take), as reported."""
    found = {}
    for row in paper_rows("kernel_ratio_summary.csv"):
        percent = number(row["e2e_time_pct_on_a100_of_l40s_faster_kernels"])
        found[row["model"]] = (number(row["frac_kernels_faster_on_l40s"]), None if percent is None else percent / 100)
    return found


def draw(found: dict[str, dict[str, Any]], paper: dict[str, tuple[float | None, float | None]]) -> Any:
    figure = new_figure(11, 4.2)
    axes = figure.subplots(1, 3, width_ratios=(1.4, 1, 1))
    for colour, (model, own) in zip(COLOURS, found.items(), strict=False):
        axes[0].plot(own["ratio"], own["share"], color=colour, label=model, linewidth=1.4)
    axes[0].axvline(1.0, color="#222222", linewidth=0.8, linestyle=":")
    axes[0].set_xscale("log", base=2)
    axes[0].set_xticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"])
    axes[0].set_xlim(0.2, 5)
    axes[0].set_xlabel(f"time on {RIGHT} / time on {LEFT}", fontsize=8)
    axes[0].set_ylabel("share of launches", fontsize=8)
    axes[0].legend(fontsize=7, frameon=False)
    axes[0].set_title("ours: predicted from H200 captures", fontsize=8)
    names = list(found)
    for axis, key, i, title in (
        (axes[1], "kernels_faster", 0, f"kernels faster on {RIGHT}"),
        (axes[2], "time_of_faster", 1, f"their share of {LEFT}'s time"),
    ):
        pair_of_bars(axis, names, [paper.get(m, (None, None))[i] for m in names], [found[m][key] for m in names])
        mean = paper.get("MEAN", (None, None))[i]
        if mean is not None:
            axis.axvline(mean, color="#777777", linestyle="--", linewidth=0.9, label="paper's mean")
        axis.set_title(title, fontsize=8)
    axes[2].set_yticks(range(len(names)), [""] * len(names))
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=3, fontsize=7, frameon=False)
    for axis in axes:
        plain(axis)
    figure.suptitle(
        f"Figure 2. Ours: {BATCH} requests of 1024 + 256 tokens (images: 1), every launch counted; "
        "paper: launches of its serving traces", fontsize=8,
    )  # fmt: skip
    return figure


def main(arguments: list[str]) -> int:
    stem = Path(arguments[0]) if arguments else ROOT / "results" / "fig2"
    paper = reported()
    found = {model: ours(mix) for model, mix in MODELS.items()}
    rows: list[dict[str, Any]] = []
    for model, own in found.items():
        share, time = paper.get(model, (None, None))
        plain_own = {k: round(v, 4) for k, v in own.items() if isinstance(v, float)}
        rows.append({"model": model, **plain_own, "paper_kernels_faster": share, "paper_time_of_faster": time})
        print(f"{model:<20} {said('kernels faster on L40S', share, own['kernels_faster'])}; "
              f"{said('their time on the A100', time, own['time_of_faster'])}")  # fmt: skip
    for path in save(draw(found, paper), stem, rows):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
