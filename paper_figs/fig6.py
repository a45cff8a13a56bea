"""Figure 6: throughput of the policies on three pairs of GPUs, both sides over the left GPU alone.

    python -m tesserasim sweep paper_figs/fig6.toml          # ours, on one core a quarter of an hour
    python paper_figs/fig6.py [RESULTS] [STEM]

reads RESULTS/summary.parquet (default: results/fig6; the default sweep's results serve too, for the models it has) and
the paper's reported throughput, and writes STEM.png, .pdf and .csv (default: results/fig6-paper). Each side is divided
by its own throughput of the pair's left GPU alone, so that 1 is that GPU under either workload. The workloads are not
the same: ours is a closed loop of the mix's lengths at the policy's best batch and depth; the paper's is its serving
system's. Printed is where the two sides order the policies differently or are more than 20 % apart.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from paperfig import MODELS, OURS, PAPER, ROOT, new_figure, paper_rows, plain, save

from tesserasim import api
from tesserasim.sweep.summary import read_summary

#: The paper's pairs -> (left, right) of our clusters.
PAIRS = {
    "a100_l40s": ("A100-80GB-PCIe", "L40S"), "h100_rtxpro6000": ("H100-SXM", "RTX-PRO-6000"),
    "b200_h100": ("B200", "H100-SXM"),
}  # fmt: skip
#: The paper's policies -> ours. Its "request distribution" is our replicas; its planner is our kernel placement.
POLICIES = {
    "homo-left": "left alone", "homo-right": "right alone", "request-dist": "replicas-lo", "pd": "pd", "af": "af",
    "fluidgpu": "kernel",
}  # fmt: skip
APART = 0.2
Row = Mapping[str, Any]


def reported() -> dict[tuple[str, str, str], float]:
    """(pair, model, our word for the policy) -> reported throughput over that of the left GPU alone."""
    rows = paper_rows("fig6_throughput_paper.csv")
    name = {"Llama-3.1-8B-Instruct": "Llama-3.1-8B"}
    left = {(r["pair"], r["model"]): float(r["value"]) for r in rows if r["policy"] == "homo-left"}
    return {
        (r["pair"], name.get(r["model"], r["model"]), POLICIES[r["policy"]]):
        float(r["value"]) / left[r["pair"], r["model"]] for r in rows if r["policy"] in POLICIES
    }  # fmt: skip


def ours(rows: Sequence[Row]) -> dict[tuple[str, str, str], tuple[float, float, float]]:
    """(pair, model, policy) -> (throughput, low, high of the 80 % interval), over the left GPU alone."""
    done = [r for r in rows if r.get("status") == "ok" and r.get("table") == "own-best"]
    known: dict[tuple[str, str, str], Row] = {}
    for r in done:  # of several links the last, which is the widest in our specs
        known[str(r["mix"]), str(r["cluster"]), str(r["policy"])] = r
    found = {}
    for pair, (left, right) in PAIRS.items():
        for model, mix in MODELS.items():
            both = f"{left}+{right}"
            alone = {"left alone": known.get((mix, left, "single")), "right alone": known.get((mix, right, "single"))}
            base = alone["left alone"] or _single_on(known.get((mix, both, "single")), left)
            if base is None:
                continue
            one = float(base["throughput_per_s"])
            mine = {p: known.get((mix, both, p)) for p in ("replicas-lo", "pd", "af", "kernel")}
            for policy, row in {**alone, **mine, "left alone": base}.items():
                if row is not None:
                    value = float(row["throughput_per_s"])
                    low, high = row.get("interval80") or (value, value)
                    found[pair, model, policy] = (value / one, float(low) / one, float(high) / one)
    return found


def _single_on(row: Row | None, gpu: str) -> Row | None:
    """The result of the policy `single` if it chose that GPU."""
    busy = (row.get("utilisation") if row is not None else None) or "{}"
    busy = json.loads(busy) if isinstance(busy, str) else busy
    return row if float(busy.get(gpu) or 0.0) > 0 else None


def draw(
    own: Mapping[tuple[str, str, str], tuple[float, float, float]], paper: Mapping[tuple[str, str, str], float],
    words: str,
) -> Any:  # fmt: skip
    policies = list(POLICIES.values())
    figure = new_figure(10.5, 11)
    axes = figure.subplots(len(MODELS), len(PAIRS), squeeze=False, sharey=True, sharex="col")
    for i, model in enumerate(MODELS):
        for j, (pair, gpus) in enumerate(PAIRS.items()):
            axis = axes[i][j]
            for k, policy in enumerate(policies):
                theirs, mine = paper.get((pair, model, policy)), own.get((pair, model, policy))
                axis.barh(k - 0.2, theirs or 0.0, 0.38, color=PAPER, label="paper (reported)" if k == 0 else None)
                if mine:
                    axis.barh(k + 0.2, mine[0], 0.38, color=OURS, label="ours (simulated)" if k == 0 else None)
                    axis.plot(mine[1:], (k + 0.2, k + 0.2), color="#222222", linewidth=0.9)
                for value, shift, why in ((theirs, -0.2, "not reported"), (mine, 0.2, "no result")):
                    if value is None:
                        axis.annotate(f" {why}", (0, k + shift), fontsize=5.5, va="center", color="#777777")
            axis.axvline(1.0, color="#222222", linewidth=0.8, linestyle=":")
            axis.set_yticks(range(len(policies)), policies)
            axis.set_ylim(len(policies) - 0.4, -0.6)
            axis.set_title(f"{model}\n{gpus[0]} + {gpus[1]}" if i == 0 else model, fontsize=8)
            plain(axis)
    for j, gpus in enumerate(PAIRS.values()):
        axes[-1][j].set_xlabel(f"throughput / {gpus[0]} alone", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.suptitle(words, fontsize=8)
    return figure


def differences(
    own: Mapping[tuple[str, str, str], tuple[float, float, float]], paper: Mapping[tuple[str, str, str], float]
) -> list[str]:
    """A line per pair and model: best policy on both sides, and the policies that are more than 20 % apart."""
    found = []
    for pair in PAIRS:
        for model in MODELS:
            both = [p for p in POLICIES.values() if (pair, model, p) in own and (pair, model, p) in paper]
            if len(both) < 2:
                continue
            first = max(both, key=lambda p: paper[pair, model, p]), max(both, key=lambda p: own[pair, model, p][0])
            apart = [
                f"{p} paper {paper[pair, model, p]:.2f}, ours {own[pair, model, p][0]:.2f}" for p in both
                if abs(own[pair, model, p][0] / paper[pair, model, p] - 1.0) > APART
            ]  # fmt: skip
            best = f"both put {first[0]} first" if first[0] == first[1] else (
                f"paper puts {first[0]} first, ours {first[1]}: DIFFERS")  # fmt: skip
            found.append(f"{pair}, {model}: {best}; " + (f"apart: {'; '.join(apart)}" if apart else "within 20 %"))
    return found


@cache
def _prompt(mix: str) -> int:
    return api.load_mix(mix).input_tokens


def workload(rows: Sequence[Row]) -> str:
    """What ours ran, in words."""
    lengths: dict[str, None] = {}
    for row in rows:
        rate, tokens = row.get("throughput_per_s"), row.get("output_tokens_per_s")
        if rate and tokens and math.isfinite(tokens) and str(row["mix"]) in MODELS.values():
            prompt = _prompt(str(row["mix"]))
            lengths[f"prompts of {prompt} tokens (the mix's), {tokens / rate:.0f} answered"] = None
    what = ", ".join(lengths) or "the mixes' own lengths"
    return (
        f"Figure 6. Ours: closed loop, {what} (SD3.5: 1024 x 1024, 28 steps), best batch and depth, simulated at times "
        "predicted from H200 captures.\nPaper: its serving system's reported output tokens/s (images/min); request "
        "lengths are not part of the reported numbers. Each side over its own left GPU alone."
    )


def main(arguments: list[str]) -> int:
    results = Path(arguments[0]) if arguments else ROOT / "results" / "fig6"
    stem = Path(arguments[1]) if len(arguments) > 1 else ROOT / "results" / "fig6-paper"
    rows = read_summary(results)
    own, paper = ours(rows), reported()
    for line in differences(own, paper):
        print(line)
    table = []
    for pair in PAIRS:
        for model in MODELS:
            for policy in POLICIES.values():
                mine = own.get((pair, model, policy))
                low_high = {} if mine is None else {"ours": round(mine[0], 4), "ours_low": round(mine[1], 4),
                                                    "ours_high": round(mine[2], 4)}  # fmt: skip
                theirs = paper.get((pair, model, policy))
                named = {"pair": pair, "model": model, "policy": policy}
                table.append({**named, "paper": "" if theirs is None else round(theirs, 4), **low_high})
    for path in save(draw(own, paper, workload(rows)), stem, table):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
