"""What the scripts beside this file share: the paper's reported numbers, and figures as PNG + PDF + CSV.

The paper's numbers are read from $TESSERASIM_SHARED/data/paper or ../shared/data/paper, where each file names its
source; they are not part of this repository. Without them a figure shows our side alone and says so.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tesserasim.writing import write_whole

ROOT = Path(__file__).resolve().parents[1]
PAPER, OURS = "#bbbbbb", "#4477aa"
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
#: The paper's names of models -> the shipped mixes.
MODELS = {
    "Llama-3.1-8B": "llama-3-8b", "gpt-oss-20b": "gpt-oss-20b", "Qwen2.5-VL-7B": "qwen2.5-vl-7b",
    "Mamba-Codestral-7B": "mamba-codestral-7b", "SD3.5-medium": "sd3.5-medium",
}  # fmt: skip


def paper_rows(name: str, folder: Path | None = None) -> list[dict[str, str]]:
    """Rows of one of the paper's files, its comment lines left out; [] if the file is not here."""
    shared = Path(os.environ.get("TESSERASIM_SHARED", ROOT.parent / "shared"))
    path = (folder or shared / "data" / "paper") / name
    if not path.is_file():
        print(f"{path}: not here: the paper's side is left out (set TESSERASIM_SHARED to the folder with data/paper)")
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def number(text: str | None) -> float | None:
    """A cell as a number, None if it is empty."""
    return float(text) if text else None


#: Difference of a share that is worth saying.
DIFFERS = 0.1


def said(what: str, paper: float | None, own: float) -> str:
    """Both shares in words, and plainly where they differ."""
    if paper is None:
        return f"{what}: ours {own:.0%}, not reported"
    gap = own - paper
    mark = f" DIFFERS by {100 * gap:+.0f} points" if abs(gap) > DIFFERS else ""
    return f"{what}: paper {paper:.0%}, ours {own:.0%}{mark}"


def pair_of_bars(axis: Any, names: Sequence[str], paper: Sequence[float | None], own: Sequence[float]) -> None:
    """Shares as two horizontal bars per name, with the difference in points where it is worth saying."""
    for i, (theirs, mine) in enumerate(zip(paper, own, strict=True)):
        axis.barh(i - 0.2, theirs or 0.0, 0.38, color=PAPER, label="paper (measured)" if i == 0 else None)
        axis.barh(i + 0.2, mine, 0.38, color=OURS, label="ours (predicted)" if i == 0 else None)
        if theirs is None:
            axis.annotate(" not reported", (0, i - 0.2), fontsize=6, va="center", color="#777777")
        elif abs(mine - theirs) > DIFFERS:
            axis.annotate(f" differs: {100 * (mine - theirs):+.0f} points", (mine, i + 0.2), fontsize=6, va="center",
                          color="#bb0000")  # fmt: skip
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlim(0, 1)


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(axis: Any) -> None:
    """No frame but the axes, small labels."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(labelsize=7)


def save(figure: Figure, stem: Path, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """STEM.png, .pdf and .csv (a row per value drawn), without dates, so that equal figures are equal files."""
    text = io.StringIO()
    columns = list(dict.fromkeys(c for row in rows for c in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    files = {stem.with_suffix(".csv"): text.getvalue().encode()}
    for suffix, metadata in ((".png", {"Software": None}), (".pdf", {"CreationDate": None, "Producer": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix[1:], dpi=150, metadata=metadata)
        files[stem.with_suffix(suffix)] = buffer.getvalue()
    for path, content in files.items():
        write_whole(path, content)
    return sorted(files)
