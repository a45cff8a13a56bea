"""The verdict line, word for word."""

from __future__ import annotations

from typing import Any

import pytest

from tesserasim.metrics.verdict import verdict

pytestmark = pytest.mark.quick


def row(policy: str, per_s: float, **fields: Any) -> dict[str, Any]:
    return {
        "policy": policy, "throughput_per_s": per_s, "p_win": 0.83, "replicas_per_s": 10.0,
        "replicas_policy": "replicas-lo", "gain80_vs_replicas": [0.02, 0.12], "best_single_per_s": 9.0,
        "best_single_int_per_s": 5.0, "best_single_gpu": "A100", "best_single_count": 1.8,
        "break_even_gpu": "L40S", "break_even_usd_per_hour": 1.312, "bound_per_s": 12.75, "origins": ["captured"],
        **fields,
    }  # fmt: skip


def test_joint_winner() -> None:
    """Mutation tried: gain against the bound instead of the replicas."""
    rows = [row("kernel", 10.7), row("replicas-lo", 10.0)]
    assert verdict(rows) == (
        "kernel beats replicas-lo by 7 % [2, 12], P(win) 0.83; break-even L40S price $1.31/h; bound 19 % above"
    )


def test_replicas_win() -> None:
    """The interval turns round: kernel at [-20 %, -5 %] of replicas means replicas lead by [5, 25].

    Mutation tried: the interval printed unturned.
    """
    rows = [row("kernel", 9.0, gain80_vs_replicas=[-0.2, -0.05]), row("replicas-lo", 10.0), row("single", 6.0)]
    assert verdict(rows).startswith("replicas-lo beats kernel by 11 % [5, 25], P(win) 0.83; ")


def test_single_wins_and_kernel_equals_it() -> None:
    """Mutation tried: naming kernel the winner of a tie."""
    rows = [row("kernel", 11.0), row("single", 11.0), row("replicas-lo", 10.0)]
    assert verdict(rows).startswith("single wins, P(win) 0.83; kernel finds no split that pays and equals it")


def test_who_wins_is_decided_by_the_draws() -> None:
    """Kernel is 1 % faster if every predicted time is right, and loses 4 draws of 5: replicas win, both are said.

    Mutation tried: the winner by nominal throughput.
    """
    rows = [row("kernel", 10.1, p_win=0.2, gain_vs_replicas=-0.05, gain80_vs_replicas=[-0.2, 0.01], median_per_s=9.5),
            row("replicas-lo", 10.0, p_win=0.8)]  # fmt: skip
    assert verdict(rows).startswith(
        "undecided: replicas-lo before kernel by 5 % [-1, 25], P(win) 0.80; "
        "at the predicted times kernel leads by 1.0 %; "
    )


def test_budget_warns() -> None:
    """More single GPUs for the same money win: said, with the count, and that whole GPUs do not.

    Mutation tried: leaving the line out when the winner is a joint plan.
    """
    line = verdict([row("kernel", 10.7, best_single_per_s=12.0)])
    assert "1.80 x A100 at equal budget give 12 % more, 1 whole less" in line


def test_origins_and_missing_units() -> None:
    """Synthetic and derived traces, missing units and extrapolation are named behind the line.

    Mutation tried: warnings of the winner's row only.
    """
    rows = [row("kernel", 11.0), row("single", 9.0, origins=["synthetic"], incomplete=["vae"], extrapolated=["decode"])]
    assert verdict(rows).endswith("(SYNTHETIC; without vae; extrapolated: decode)")
    assert verdict([row("kernel", 11.0, origins=["captured", "derived"])]).endswith("(derived)")


def test_nothing_runs() -> None:
    """Mutation tried: max() of an empty list."""
    assert verdict([{"policy": "pd", "applicable": False, "reason": "no decode"}]) == "no policy can run here"
