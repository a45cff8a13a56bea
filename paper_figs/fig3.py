"""Figure 3: where the time goes on an A100 and an L40S, by phase and block, for gpt-oss-20b.

    python paper_figs/fig3.py [STEM]

Ours: the shipped gpt-oss-20b mix at 32 requests of 4096 + 684 tokens, as far as the launches of the paper's file tell
its run, with times predicted from the H200 captures. The paper: median times and launches of a vLLM trace (the first
38 kernels of its file). Also drawn: how much of a block's time on the A100 lies in kernels that the L40S runs faster.
Writes STEM.png, .pdf and .csv (default: results/fig3) and prints where the two sides differ.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fig2 import LEFT, RIGHT
from paperfig import COLOURS, ROOT, new_figure, pair_of_bars, paper_rows, plain, said, save

from tesserasim import api
from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs.base import default_costs
from tesserasim.mixtimes import mix_times
from tesserasim.trace.mix import with_lengths

MIX, BATCH, INPUT, OUTPUT = "gpt-oss-20b", 32, 4096, 684
BLOCKS = ("attention", "ffn", "other")
Block = tuple[str, str]  # phase, block
#: (phase, block, us on the left GPU, us on the right), all launches of a row together
Launch = tuple[str, str, float, float]


def ours() -> list[Launch]:
    mix = with_lengths(api.load_mix(MIX), INPUT, OUTPUT)
    times = mix_times(mix, default_costs())
    found = []
    left, right = (times.cohort_runs(BATCH, find_gpu(g)) for g in (LEFT, RIGHT))
    for a, b in zip(left, right, strict=True):
        us_a, us_b = a.counts @ a.duration_ns / 1e3, b.counts @ b.duration_ns / 1e3
        for k, x, y in zip(a.trace.kernels, us_a.tolist(), us_b.tolist(), strict=True):
            found.append((k.phase, k.part if k.part in BLOCKS else "other", x, y))
    return found


def reported() -> list[Launch]:
    found = []
    for row in paper_rows("gptoss20b_kernel_pairs.csv"):
        us = float(row["a100_us_median"]) * int(row["launches"])
        found.append((row["phase"], row["block"], us, us * float(row["ratio_l40s_over_a100_median"])))
    return found


def shares(launches: Iterable[Launch]) -> dict[Block, tuple[float, float, float]]:
    """Block -> (share of the left GPU's time, of the right's, of the block's left time in kernels faster right)."""
    sums: dict[Block, list[float]] = {(p, b): [0.0, 0.0, 0.0] for p in ("prefill", "decode") for b in BLOCKS}
    for phase, block, a, b in launches:
        entry = sums[phase, block]
        entry[0] += a
        entry[1] += b
        entry[2] += a * (b < a)
    left, right = (sum(e[i] for e in sums.values()) or 1.0 for i in (0, 1))
    return {key: (e[0] / left, e[1] / right, e[2] / e[0] if e[0] else 0.0) for key, e in sums.items()}


def draw(own: dict[Block, tuple[float, float, float]], paper: dict[Block, tuple[float, float, float]] | None) -> Any:
    figure = new_figure(10, 4.2)
    axes = figure.subplots(1, 2, width_ratios=(1.3, 1))
    bars = [(f"{side}\n{gpu}", data, i) for i, gpu in enumerate((LEFT, RIGHT))
            for side, data in (("paper", paper), ("ours", own)) if data]  # fmt: skip
    bottom = [0.0] * len(bars)
    for colour, block in zip(COLOURS, own, strict=True):
        heights = [data[block][i] for _, data, i in bars]
        axes[0].bar(range(len(bars)), heights, 0.65, bottom=bottom, color=colour, label=" ".join(block))
        for x, (low, high) in enumerate(zip(bottom, heights, strict=True)):
            if high > 0.04:
                axes[0].annotate(f"{high:.0%}", (x, low + high / 2), ha="center", va="center", fontsize=7,
                                 color="white")  # fmt: skip
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes[0].set_xticks(range(len(bars)), [name for name, _, _ in bars])
    axes[0].set_ylim(0, 1)
    axes[0].set_ylabel("share of all kernel time", fontsize=8)
    axes[0].legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    names = [" ".join(block) for block in own]
    pair_of_bars(axes[1], names, [paper[x][2] if paper else None for x in own], [v[2] for v in own.values()])
    axes[1].set_title(f"share of a block's {LEFT} time\nin kernels that are faster on {RIGHT}", fontsize=8)
    axes[1].legend(fontsize=7, frameon=False)
    for axis in axes:
        plain(axis)
    figure.suptitle(
        f"Figure 3. gpt-oss-20b. Ours: {BATCH} requests of {INPUT} + {OUTPUT} tokens, predicted from H200 captures; "
        "paper: medians of a vLLM trace", fontsize=8,
    )  # fmt: skip
    return figure


def main(arguments: list[str]) -> int:
    stem = Path(arguments[0]) if arguments else ROOT / "results" / "fig3"
    known = reported()
    paper, own = (shares(known) if known else None), shares(ours())
    rows: list[dict[str, Any]] = []
    for block, values in own.items():
        row: dict[str, Any] = {"phase": block[0], "block": block[1]}
        for i, what in enumerate(("share_a100", "share_l40s", "faster_on_l40s")):
            row[f"ours_{what}"] = round(values[i], 4)
            row[f"paper_{what}"] = round(paper[block][i], 4) if paper else ""
        rows.append(row)
        theirs = paper[block] if paper else (None, None, None)
        words = ("share of the A100's time", "of the L40S's", "its A100 time in kernels that the L40S runs faster")
        print(f"{' '.join(block):<18}", "; ".join(said(w, theirs[i], values[i]) for i, w in enumerate(words)))
    for path in save(draw(own, paper), stem, rows):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
