"""One line that says who wins, by how much, how sure, at which price it turns, and what is left to the bound.

    kernel beats replicas-lo by 7 % [2, 12], P(win) 0.83; break-even L40S price $1.31/h; bound 19 % above

The winner is the policy that is fastest in most draws of the costs' errors (P(win)), and the gain is the median
over the draws with its 80 % interval: a plan that looks best only if every predicted time is right does not win.
Where the nominal times would name another policy, the line says so. It is held against the best *honest*
alternative: independent replicas, or the best single GPU type at equal budget. Warnings follow: origins that were
not measured, units the mix lacks, points beyond the captured grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
#: Policies that keep a request on one GPU: the honest alternatives themselves.
HONEST = ("replicas-lo", "replicas-static", "single")
#: Order in which equal throughputs are named (relative tolerance TIE).
TIE = 1e-6


def verdict(rows: Sequence[Row]) -> str:
    """The verdict over rows of one mix, cluster and link (own-best table); rows that do not apply are ignored."""
    usable = [r for r in rows if r.get("throughput_per_s")]
    if not usable:
        return "no policy can run here"
    sure = max(float(r.get("p_win") or 0.0) for r in usable)
    likely = [r for r in usable if float(r.get("p_win") or 0.0) >= sure]
    top = max(float(r["throughput_per_s"]) for r in likely)
    tied = [r for r in likely if r["throughput_per_s"] >= top * (1 - TIE)]
    order = {name: i for i, name in enumerate(HONEST)}
    winner = min(tied, key=lambda r: (order.get(str(r["policy"]), len(HONEST)), str(r["policy"])))
    joint = [r for r in usable if r["policy"] not in HONEST]
    if str(winner["policy"]) in HONEST:
        head = _honest_wins(winner, joint)
    else:
        head = _joint_wins(winner)
    parts = [head, _nominal(winner, usable), _budget(winner), _break_even(winner), _bound(winner)]
    return "; ".join(p for p in parts if p) + _warnings(usable)


def _nominal(winner: Row, rows: Sequence[Row]) -> str:
    """The policy that leads at nominal times, if it is another one."""
    first = max(rows, key=lambda r: float(r["throughput_per_s"]))
    lead = first["throughput_per_s"] / winner["throughput_per_s"]
    return f"at the predicted times {first['policy']} leads by {100 * (lead - 1):.1f} %" if lead > 1 + TIE else ""


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.0f} %"


def _range(interval: Sequence[float] | None) -> str:
    """A gain's 80 % interval in percent, "[2, 12]"."""
    return f" [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]" if interval else ""


def _chance(row: Row) -> str:
    return f", P(win) {row['p_win']:.2f}" if row.get("p_win") is not None else ""


def _joint_wins(winner: Row) -> str:
    replicas = winner.get("replicas_per_s")
    if not replicas:
        return f"{winner['policy']} wins{_chance(winner)}; replicas cannot run"
    name = winner.get("replicas_policy") or "replicas-lo"
    median = winner.get("gain_vs_replicas")
    gain = _percent(winner["throughput_per_s"] / replicas if median is None else 1 + median)
    return _leads(winner, str(name), gain, winner.get("gain80_vs_replicas"))


def _leads(winner: Row, other: str, gain: str, interval: Sequence[float] | None) -> str:
    """"beats" only where the 80 % interval of the gain leaves no doubt of its sign."""
    head = f"{winner['policy']} beats" if not interval or interval[0] > 0 else f"undecided: {winner['policy']} before"
    return f"{head} {other} by {gain}{_range(interval)}{_chance(winner)}"


def _honest_wins(winner: Row, joint: Sequence[Row]) -> str:
    if not joint:
        return f"{winner['policy']} wins{_chance(winner)}; no disaggregated policy applies"
    best = max(joint, key=lambda r: (float(r.get("median_per_s") or r["throughput_per_s"]), str(r["policy"])))
    if abs(best["throughput_per_s"] / winner["throughput_per_s"] - 1) <= TIE:
        return f"{winner['policy']} wins{_chance(winner)}; {best['policy']} finds no split that pays and equals it"
    ratio = winner["throughput_per_s"] / best["throughput_per_s"]
    if winner["policy"] != "single" and best.get("gain_vs_replicas") is not None:
        ratio = 1 / (1 + best["gain_vs_replicas"])
    interval = best.get("gain80_vs_replicas") if winner["policy"] != "single" else None
    # The stored gain is best / replicas - 1; the winner's gain over best turns it round.
    turned = [1 / (1 + g) - 1 for g in reversed(interval)] if interval else None
    return _leads(winner, str(best["policy"]), _percent(ratio), turned)


def _budget(winner: Row) -> str:
    """Single GPUs at equal budget, if they are faster than the winner."""
    single = winner.get("best_single_per_s")
    if not single or single <= winner["throughput_per_s"] or winner["policy"] == "single":
        return ""
    n, gpu = winner.get("best_single_count"), winner.get("best_single_gpu")
    who = f"{n:.2f} x {gpu}" if n and gpu else "single GPUs"
    whole = winner.get("best_single_int_per_s") or 0.0
    note = "" if whole > winner["throughput_per_s"] else f", {int(n or 0)} whole less"
    return f"{who} at equal budget give {_percent(single / winner['throughput_per_s'])} more{note}"


def _break_even(winner: Row) -> str:
    gpu, price = winner.get("break_even_gpu"), winner.get("break_even_usd_per_hour")
    if not gpu or price is None:
        return ""
    return f"break-even {gpu} price ${price:.2f}/h" if price > 0 else f"no {gpu} price breaks even"


def _bound(winner: Row) -> str:
    bound = winner.get("bound_per_s")
    return f"bound {_percent(bound / winner['throughput_per_s'])} above" if bound else ""


def _warnings(rows: Sequence[Row]) -> str:
    origins = {o for r in rows for o in r.get("origins") or ()}
    found = [word.upper() if word == "synthetic" else word for word in ("synthetic", "derived") if word in origins]
    missing = sorted({u for r in rows for u in r.get("incomplete") or ()})
    far = sorted({u for r in rows for u in r.get("extrapolated") or ()})
    found += [f"without {', '.join(missing)}"] if missing else []
    found += [f"extrapolated: {', '.join(far)}"] if far else []
    return f" ({'; '.join(found)})" if found else ""
