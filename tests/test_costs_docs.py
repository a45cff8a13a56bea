"""docs/costs.md quotes what the scripts print, from the committed results and the shipped parameters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kineto_cases import SHARED

pytestmark = pytest.mark.quick

REPO = Path(__file__).resolve().parents[1]
PAIRS = SHARED / "data" / "paper" / "gptoss20b_kernel_pairs.csv"


@pytest.mark.parametrize("name", ["costs_table", "costs_gptoss_pairs"])
def test_generated_blocks_are_current(name: str) -> None:
    """Mutation tried: a digit of the page changed -> fails."""
    if name == "costs_gptoss_pairs" and not PAIRS.is_file():
        pytest.skip("the published pairs are not here")
    script = REPO / "experiments" / "validation" / "costs_docs.py"
    done = subprocess.run([sys.executable, str(script), name, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"docs/costs.md is stale: run {script.name} {name}\n{done.stderr}"
