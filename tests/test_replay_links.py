"""The fit of a link: against the line that made the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch

from hw.journals import Hop, read_hop
from hw.replay import graph
from hw.replay.links import SIZES, fit_link, fit_setup
from tesserasim.errors import InputError


@pytest.mark.quick
def test_a_line_is_found_and_what_is_none_shows_in_the_residual() -> None:
    link = fit_link("a", "b", SIZES, [3000 + n / 400 for n in SIZES])
    assert link.latency_ns == pytest.approx(3000) and link.gbs == pytest.approx(400) and link.worst < 1e-9
    bent = fit_link("a", "b", SIZES, [3000 + n / 400 + (5000 if n > 1 << 20 else 0) for n in SIZES])
    assert bent.worst > 0.05


@pytest.mark.quick
def test_what_one_more_copy_costs_is_the_slope() -> None:
    assert fit_setup((1, 2, 4, 8), [4000 + 1500 * k for k in (1, 2, 4, 8)]) == pytest.approx(1500)
    assert fit_setup((1, 2, 4, 8), [4000.0] * 4) == pytest.approx(0, abs=1e-6)
    assert fit_setup((1, 2), [4000.0, 3000.0]) == 0


def link(tmp_path: Path, *rows: dict[str, object]) -> Path:
    path = tmp_path / "links.jsonl"
    path.write_text("".join(json.dumps({"kind": "link", **r}) + "\n" for r in rows))
    return path


@pytest.mark.quick
def test_chains_that_hold_each_other_up_mean_one_queue(tmp_path: Path) -> None:
    """Of one chain a change takes 1 + 4 us; two chains at once 10 us if one goes after the other, 6 if not."""
    figures = {"link": {"latency_ns": 4000, "gbs": 500, "setup_ns": 1500}, "stay_ns": {"a": 1000, "b": 1000}}
    one = {**figures, "hop_ns": [4000, 9000], "hop_both_ns": [9000, 20000]}
    free = {**figures, "copies_by": "kernel", "hop_ns": [4000, 9000], "hop_both_ns": [5000, 9000]}
    path = link(tmp_path, one, free)
    assert read_hop(path) == Hop(2500, 500, 1500, True)
    assert read_hop(path, "kernel") == Hop(2500, 500, 1500, False)
    with pytest.raises(InputError, match="no measured link with copies by kernel"):
        read_hop(link(tmp_path, one), "kernel")


@pytest.mark.quick
@pytest.mark.parametrize("bad", [
    {"setup_ns": 5000}, {"setup_ns": -1}, {"setup_ns": float("nan")}, {"setup_ns": "1"}, {"latency_ns": None},
])  # fmt: skip
def test_a_link_that_cannot_be_is_refused(bad: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1"):
        read_hop(link(tmp_path, {"link": {"latency_ns": 4000, "gbs": 500, **bad}}))


@pytest.mark.quick
@pytest.mark.parametrize("part", [(0, 64, 24, 1, 24), (3, 67, 5, 1, 5), (8, 80, 8, 3, 16), (4, 72, 4, 2, 12)])
def test_a_copy_by_kernel_moves_its_rows_and_nothing_else(
    part: tuple[int, int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch.arange(128, dtype=torch.uint8)
    before = memory.clone()
    base = memory.data_ptr()
    monkeypatch.setattr(graph, "bytes_at", lambda at, n, device: memory[at - base : at - base + n])
    source, target, width, height, pitch = part
    graph.copy_by_kernel((base + source, base + target, width, height, pitch), 0)
    want = before.clone()
    for row in range(height):
        at = row * pitch
        want[target + at : target + at + width] = before[source + at : source + at + width]
    assert torch.equal(memory, want) and not torch.equal(memory, before)
