"""Real profiles of six GPU types against independently computed facts, to the nanosecond."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from kineto_cases import SHARED, needs_shared

SCRIPT = Path(__file__).resolve().parents[1] / "experiments" / "validation" / "trace_facts.py"


@needs_shared
@pytest.mark.quick
def test_all_profiles_equal_the_facts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """gpu, kernels, copies, sets, streams, devices, graph kernels, busy, union, span of every profile.

    Mutation tried: union over one stream only (`union_ns` summing durations) → hta-alexnet differs, fails.
    """
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(SHARED / "data" / "traces")])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    assert caught.value.code == 0, printed
    assert "17 profiles, 10 fields each: no differences" in printed
