"""The figures beside the paper's: their numbers by hand, files that are equal twice, no paper no failure."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tesserasim.sweep.spec import load_spec
from tesserasim.sweep.summary import write_summary

pytestmark = pytest.mark.quick

FOLDER = Path(__file__).resolve().parents[1] / "paper_figs"


@pytest.fixture(scope="module")
def figures() -> dict[str, ModuleType]:
    """The scripts, imported as they import each other."""
    sys.path.insert(0, str(FOLDER))
    try:
        import fig2
        import fig3
        import fig6
        import paperfig

        return {m.__name__: m for m in (fig2, fig3, fig6, paperfig)}
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the paper's files, empty at first."""
    folder = tmp_path / "shared" / "data" / "paper"
    folder.mkdir(parents=True)
    monkeypatch.setenv("TESSERASIM_SHARED", str(tmp_path / "shared"))
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_blocks_by_hand(figures: dict[str, ModuleType]) -> None:
    launches = [("prefill", "ffn", 60.0, 90.0), ("prefill", "ffn", 20.0, 10.0), ("decode", "attention", 20.0, 100.0)]
    found = figures["fig3"].shares(launches)
    assert found["prefill", "ffn"] == (0.8, 0.5, 0.25)
    assert found["decode", "attention"] == (0.2, 0.5, 0.0)
    assert found["decode", "ffn"] == (0.0, 0.0, 0.0)


def test_figure_3_beside_the_paper(
    figures: dict[str, ModuleType], paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (paper / "gptoss20b_kernel_pairs.csv").write_text(
        "# source\nphase,block,launches,a100_us_median,ratio_l40s_over_a100_median,kernel_a100,kernel_l40s\n"
        "prefill,ffn,10,6.0,0.5,a,b\ndecode,other,4,10.0,2.0,a,b\n"
    )
    own = [("prefill", "ffn", 60.0, 90.0), ("decode", "other", 40.0, 80.0)]
    monkeypatch.setattr(figures["fig3"], "ours", lambda: own)
    assert figures["fig3"].main([str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    assert "share of the A100's time: paper 60%, ours 60%;" in said
    assert "paper 100%, ours 0% DIFFERS by -100 points" in said
    row = next(r for r in rows_of(tmp_path / "a.csv") if (r["phase"], r["block"]) == ("prefill", "ffn"))
    assert (row["ours_share_l40s"], row["paper_share_l40s"]) == ("0.5294", "0.2727")
    assert figures["fig3"].main([str(tmp_path / "b")]) == 0
    for suffix in (".png", ".pdf", ".csv"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_figure_2_counts_launches(
    figures: dict[str, ModuleType], paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Three launches of 10 ns that take 5, one of 70 that takes 140. Mutation: launches not weighted -> fails."""
    import numpy as np

    made = np.array([10.0, 70.0]), np.array([5.0, 140.0]), np.array([3.0, 1.0])
    monkeypatch.setattr(figures["fig2"], "launches", lambda mix: made)
    own = figures["fig2"].ours("any")
    assert (own["kernels_faster"], own["time_of_faster"]) == (0.75, 0.3)
    assert (own["p10"], own["p50"], own["p90"]) == (0.5, 0.5, 2.0)
    assert figures["fig2"].main([str(tmp_path / "none")]) == 0  # no paper here
    assert "the paper's side is left out" in capsys.readouterr().out
    (paper / "kernel_ratio_summary.csv").write_text(
        "model,n_ratio_samples,frac_kernels_faster_on_l40s,e2e_time_pct_on_a100_of_l40s_faster_kernels,notes\n"
        "Llama-3.1-8B,354,0.588,26.30,\nMEAN,,0.67,36.1,\n"
    )
    assert figures["fig2"].main([str(tmp_path / "both")]) == 0
    assert "paper 59%, ours 75% DIFFERS by +16 points" in capsys.readouterr().out
    assert rows_of(tmp_path / "both.csv")[0]["paper_kernels_faster"] == "0.588"


def result(cluster: str, policy: str, value: float, **more: Any) -> dict[str, Any]:
    return {
        "mix": "llama-3-8b", "cluster": cluster, "link": "200Gbps", "table": "own-best", "policy": policy,
        "status": "ok", "throughput_per_s": value, "interval80": [0.9 * value, 1.1 * value],
        "utilisation": {"L40S": 1.0}, "origins": ["captured"], "incomplete": [], "extrapolated": [], **more,
    }  # fmt: skip


def test_figure_6_over_the_left_gpu(figures: dict[str, ModuleType], paper: Path, tmp_path: Path, capsys: Any) -> None:
    """Mutation: normalised to the right GPU, or to the paper's left -> fails."""
    both = "A100-80GB-PCIe+L40S"
    rows = [result("A100-80GB-PCIe", "single", 10.0), result("L40S", "single", 8.0), result(both, "kernel", 15.0),
            result(both, "replicas-lo", 18.0), result(both, "pd", 1.0, status="failed")]  # fmt: skip
    write_summary(rows, tmp_path)
    (paper / "fig6_throughput_paper.csv").write_text("pair,model,policy,value\n" + "".join(
        f"a100_l40s,Llama-3.1-8B-Instruct,{p},{v}\n"
        for p, v in (("homo-left", 1000), ("homo-right", 700), ("request-dist", 1500), ("fluidgpu", 2000))
    ))  # fmt: skip
    assert figures["fig6"].main([str(tmp_path), str(tmp_path / "f")]) == 0
    said = capsys.readouterr().out
    assert "paper puts kernel first, ours replicas-lo: DIFFERS" in said
    assert "kernel paper 2.00, ours 1.50" in said and "right alone" not in said
    found = {(r["policy"], r["paper"], r["ours"], r["ours_high"]) for r in rows_of(tmp_path / "f.csv")
             if (r["pair"], r["model"]) == ("a100_l40s", "Llama-3.1-8B")}  # fmt: skip
    assert {("left alone", "1.0", "1.0", "1.1"), ("right alone", "0.7", "0.8", "0.88"), ("pd", "", "", ""),
            ("kernel", "2.0", "1.5", "1.65"), ("replicas-lo", "1.5", "1.8", "1.98")} <= found  # fmt: skip


def test_left_alone_may_come_from_the_pair(figures: dict[str, ModuleType]) -> None:
    both = "A100-80GB-PCIe+L40S"
    used = json.dumps({"A100-80GB-PCIe": 1.0, "L40S": 0.0})
    rows = [result(both, "kernel", 15.0), result(both, "single", 10.0, utilisation=used)]
    assert figures["fig6"].ours(rows)["a100_l40s", "Llama-3.1-8B", "kernel"][0] == 1.5
    other = json.dumps({"A100-80GB-PCIe": 0.0, "L40S": 1.0})
    rows[1] = result(both, "single", 10.0, utilisation=other)
    assert figures["fig6"].ours(rows) == {}


def test_the_sweep_of_figure_6_has_every_pair_and_each_gpu_alone(figures: dict[str, ModuleType]) -> None:
    spec = load_spec(FOLDER / "fig6.toml")
    gpus = {g for pair in figures["fig6"].PAIRS.values() for g in pair}
    assert {"+".join(pair) for pair in figures["fig6"].PAIRS.values()} | gpus == set(spec.clusters)
    assert {Path(m.path).stem for m in spec.mixes} == set(figures["paperfig"].MODELS.values())
