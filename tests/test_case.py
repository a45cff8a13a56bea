"""Which candidates are worth a run."""

from __future__ import annotations

import pytest

from tesserasim.case import SIMULATED, SIMULATED_TIED, _worth_a_run
from tesserasim.plans import Lane, Plan

pytestmark = pytest.mark.quick


def plan(objective_us: float, *devices: str) -> Plan:
    lanes = tuple(Lane(f"l{i}", 1, 1, {"decode": {"*": d}}) for i, d in enumerate(devices or ("a",)))
    return Plan("m", "c", "single", lanes, objective_us=objective_us)


def test_plans_that_are_predicted_alike_are_all_run() -> None:
    """Depth 1, 2, 4 and 8 on one GPU have one prediction; the best of them is not known before they ran.

    Mutation tried: only the first SIMULATED.
    """
    alike = [plan(10.0), plan(10.0), plan(10.0), plan(10.005), plan(11.0)]
    assert _worth_a_run(alike) == alike[:4]
    assert len(_worth_a_run([plan(10.0)] * 20)) == SIMULATED_TIED


def test_pipelines_are_costly_and_keep_to_the_quota() -> None:
    split = Plan("m", "c", "kernel", (Lane("l", 1, 1, {"decode": {"x": "a", "*": "b"}}),), objective_us=10.0)
    assert len(_worth_a_run([split] * 5)) == SIMULATED
