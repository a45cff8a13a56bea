"""One figure of a sweep: policies side by side, with their intervals, the bound and the replicas.

A row of panels per mix, a column per cluster; in a panel a bar per policy and link. Drawn with the Agg
backend, so no display is needed, and without dates, so that equal results are equal files.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tesserasim.report.table import marks

Row = Mapping[str, Any]
COLUMNS = (
    "mix", "cluster", "link", "table", "policy", "throughput_per_s", "interval80_low", "interval80_high",
    "bound_per_s", "replicas_per_s",
)  # fmt: skip
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


def draw(rows: Sequence[Row], stem: Path, table: str = "own-best") -> list[Path]:
    """Write `stem`.png, .pdf and .csv for the finished rows of `table`; nothing if there are none."""
    from tesserasim.writing import write_whole

    shown = [r for r in rows if r.get("table") == table]
    done = [r for r in shown if r.get("status") == "ok"]
    if not done:
        return []
    files = {stem.with_suffix(".csv"): _csv(done), **_pictures(shown, stem)}
    for path, content in files.items():
        write_whole(path, content)
    return sorted(files)


def _csv(rows: Sequence[Row]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        low, high = row.get("interval80") or (None, None)
        flat = {**row, "interval80_low": low, "interval80_high": high}
        writer.writerow([flat.get(c) for c in COLUMNS])
    return text.getvalue().encode()


def _pictures(rows: Sequence[Row], stem: Path) -> dict[Path, bytes]:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mixes = list(dict.fromkeys(str(r["mix"]) for r in rows))
    clusters = list(dict.fromkeys(str(r["cluster"]) for r in rows))
    links = list(dict.fromkeys(str(r.get("link") or "") for r in rows))
    policies = list(dict.fromkeys(str(r["policy"]) for r in rows))
    height = 0.9 + len(mixes) * (0.9 + 0.13 * len(policies) * max(1, len(links)))
    figure = Figure(figsize=(2.2 + 2.6 * len(clusters), height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(mixes), len(clusters), squeeze=False, sharey=True)
    for i, mix in enumerate(mixes):
        for j, cluster in enumerate(clusters):
            panel = [r for r in rows if r["mix"] == mix and r["cluster"] == cluster]
            _panel(axes[i][j], panel, policies, links)
            axes[i][j].set_title(f"{mix}\n{cluster}", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels) or 1, fontsize=8, frameon=False)
    mark = marks(rows)
    if mark:
        figure.suptitle(mark, fontsize=9, color="#bb0000")
    pictures = {}
    for suffix, metadata in ((".png", {"Software": None}), (".pdf", {"CreationDate": None, "Producer": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix[1:], dpi=150, metadata=metadata)
        pictures[stem.with_suffix(suffix)] = buffer.getvalue()
    return pictures


def _panel(axis: Any, rows: Sequence[Row], policies: Sequence[str], links: Sequence[str]) -> None:
    """Horizontal bars of one mix on one cluster, a colour per link; a word where a policy gave no number."""
    silent = {str(r["policy"]): str(r["status"]) for r in rows if r.get("status") != "ok"}
    for policy, status in silent.items():
        axis.annotate(f" {status}", (0, policies.index(policy)), fontsize=7, color="#777777", va="center")
    rows = [r for r in rows if r.get("status") == "ok"]
    thickness = 0.8 / max(1, len(links))
    for k, link in enumerate(links):
        colour = _COLOURS[k % len(_COLOURS)]
        mine = {str(r["policy"]): r for r in rows if str(r.get("link") or "") == link}
        present = [p for p in policies if p in mine]
        places = [policies.index(p) + (k - (len(links) - 1) / 2) * thickness for p in present]
        values = [float(mine[p]["throughput_per_s"]) for p in present]
        spans = [mine[p].get("interval80") or (v, v) for p, v in zip(present, values, strict=True)]
        axis.barh(places, values, height=thickness * 0.9, color=colour, label=link or "default link")
        # Drawn from the interval's ends, not from the bar's: the interval need not hold the bar's end.
        middle = [(low + high) / 2 for low, high in spans]
        half = [(high - low) / 2 for low, high in spans]
        axis.errorbar(middle, places, xerr=half, fmt="none", ecolor="#222222", elinewidth=0.9, capsize=2)
    for key, style, name in (("replicas_per_s", ":", "replicas"), ("bound_per_s", "--", "bound")):
        values = [float(r[key]) for r in rows if r.get(key)]
        if values:
            axis.axvline(max(values), linestyle=style, color="#222222", linewidth=1.1, label=name)
    axis.set_yticks(range(len(policies)), policies, fontsize=8)
    axis.set_ylim(len(policies) - 0.4, -0.6)
    axis.set_xlim(left=0)
    axis.tick_params(axis="x", labelsize=7)
    axis.set_xlabel(" / ".join(sorted({str(r.get("throughput_unit", "")) for r in rows})), fontsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
