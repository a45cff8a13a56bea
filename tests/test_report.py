"""Tables, words and figures: what is shown, in which order, and that nothing made up passes as measured."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tesserasim.report.figure import draw
from tesserasim.report.table import format_case, format_rows, marks, number
from tesserasim.sweep.summary import flat, read_summary, set_p_win, write_summary


def row(policy: str, rate: float | None = 10.0, **more: Any) -> dict[str, Any]:
    """A finished row, or one that does not apply if `rate` is None."""
    base = {"mix": "m", "cluster": "A+B", "link": "25Gbps", "table": "own-best", "policy": policy}
    if rate is None:
        return {**base, "status": "not applicable", "reason": "no decode to split"}
    return {
        **base, "status": "ok", "reason": "", "batch": 8, "depth": 2, "limited_by": "memory of B",
        "throughput_per_s": rate, "throughput_unit": "request/s", "interval80": [0.9 * rate, 1.1 * rate],
        "usd_per_hour": 3.0, "per_usd": rate * 1200, "bound_per_s": 20.0, "bound_batch": 64,
        "replicas_per_s": 10.0, "best_single_per_s": 12.0, "best_single_int_per_s": 9.0, "p_win": 0.5,
        "origins": ["captured"], "incomplete": [], "latency_ms": {"p50": 1.5},
        "utilisation": {"A": 0.5, "B": 1.0}, "lanes": [{"name": "x"}], **more,
    }  # fmt: skip


def test_a_case_lists_the_best_policy_first_and_says_what_does_not_apply() -> None:
    lines = format_case([row("slow", 5.0), row("none", None), row("fast", 15.0)]).splitlines()
    assert lines[0] == "m on A+B @ 25Gbps · own-best"
    assert "bound 20.00 (B 64)" in lines[1]
    assert "replicas 10.00" in lines[1]
    assert "12.00 (whole GPUs 9.000)" in lines[1]
    assert [line.split()[0] for line in lines[3:6]] == ["fast", "slow", "none:"]
    assert "+50.0 %" in lines[3]
    assert "-50.0 %" in lines[4]
    assert "no decode to split" in lines[5]


@pytest.mark.parametrize("origin", ["synthetic", "derived"])
def test_what_was_not_measured_is_marked_everywhere(origin: str, tmp_path: Path) -> None:
    """Mutation: `marks` looks at the first row only: a synthetic row behind a captured one passes."""
    rows = [row("a"), row("b", origins=["captured", origin])]
    assert "SYNTHETIC" in marks(rows)
    assert "SYNTHETIC" in format_case(rows)
    assert marks([row("a")]) == ""
    draw(rows, tmp_path / "made-up")
    draw([row("a"), row("b")], tmp_path / "measured")
    assert (tmp_path / "made-up.png").read_bytes() != (tmp_path / "measured.png").read_bytes()


def test_what_a_request_lacks_is_said() -> None:
    assert "not included in a request: VAE decode" in format_case([row("a", incomplete=["VAE decode"])])


def test_unknown_numbers_are_dashes_not_zeros() -> None:
    """Mutation: `number(None)` gives "0": an unknown price reads as free."""
    text = format_case([row("a", usd_per_hour=None, per_usd=None, best_single_per_s=None, interval80=None)])
    assert "0.000" not in text
    assert "[-, -]" in text
    assert number(None) == "-"
    assert [number(v) for v in (0.0, 0.12345, 1.5, 12.345, 123.45, 1234.5, 123456.7)] == [
        "0.000", "0.12345", "1.500", "12.35", "123.5", "1234", "123,457",
    ]  # fmt: skip


def test_blocks_keep_the_order_of_the_rows() -> None:
    rows = [row("a", cluster="Z"), row("a", cluster="A"), row("b", cluster="Z")]
    assert [line for line in format_rows(rows).splitlines() if " on " in line] == [
        "m on Z @ 25Gbps · own-best", "m on A @ 25Gbps · own-best",
    ]  # fmt: skip


def test_figure_needs_no_display_and_is_the_same_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: the metadata argument of savefig removed: the PDF carries the time."""
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MPLBACKEND", "tkagg")
    rows = [row("a", link=link) for link in ("25Gbps", "200Gbps")] + [row("b", None)]
    first = {p.suffix: p.read_bytes() for p in draw(rows, tmp_path / "one")}
    assert set(first) == {".png", ".pdf", ".csv"}
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert {p.suffix: p.read_bytes() for p in draw(rows, tmp_path / "two")} == first
    with (tmp_path / "one.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["link"], line["interval80_low"]) for line in lines] == [("25Gbps", "9.0"), ("200Gbps", "9.0")]
    assert draw([row("b", None)], tmp_path / "none") == []


def test_summary_files_come_back_as_rows(tmp_path: Path) -> None:
    rows = [row("a"), row("b", None), row("c", 3.0, origins=["captured", "derived"], rel_error=0)]
    write_summary(rows, tmp_path)
    back = read_summary(tmp_path)
    assert [r["policy"] for r in back] == ["a", "b", "c"]
    assert back[0]["interval80"] == [9.0, 11.0]
    assert back[1]["interval80"] is None
    assert back[2]["origins"] == ["captured", "derived"]
    assert format_rows(back) == format_rows(rows)
    assert flat(rows[0])["latency_ms_p50"] == 1.5
    assert flat(rows[0])["utilisation"] == '{"A": 0.5, "B": 1.0}'


def test_p_win_counts_draws_and_splits_ties() -> None:
    rows = [row("a", draws=[3.0, 1.0, 2.0, 2.0]), row("b", draws=[1.0, 3.0, 2.0, 1.0]), row("c", None)]
    set_p_win(rows)
    assert [r.get("p_win") for r in rows] == [0.625, 0.375, None]
    assert all("draws" not in r for r in rows)
