"""Results as text: one block per mix, cluster, link and table; one line per policy, best first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

Row = Mapping[str, Any]
CASE = ("mix", "cluster", "link", "table")
_HEAD = (
    "policy", "B", "d", "limited by", "simulated", "median [80 % interval]", "$/h", "per $", "vs replicas", "P(win)",
)  # fmt: skip
_LEFT = {0, 3}


def marks(rows: Iterable[Row]) -> str:
    """What must be said about where the numbers come from: empty when every trace was captured or imported."""
    origins = {origin for row in rows for origin in row.get("origins") or ()}
    words = []
    if "synthetic" in origins:
        words.append("SYNTHETIC: made from shapes, nothing was measured")
    if "derived" in origins:
        words.append("SYNTHETIC (derived from a configuration, nothing was measured)")
    return "; ".join(words)


def format_rows(rows: Sequence[Row]) -> str:
    """All blocks, in the order in which the rows first name them."""
    cases: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        cases.setdefault(tuple(str(row.get(k, "")) for k in CASE), []).append(row)
    return "\n\n".join(format_case(block) for block in cases.values())


def format_case(rows: Sequence[Row]) -> str:
    """One block: the case, what every policy is compared with, and the policies, best first."""
    done = [r for r in rows if r.get("status") == "ok"]
    done.sort(key=lambda r: (-(r.get("throughput_per_s") or 0.0), str(r["policy"])))
    lines = [_title(rows[0])]
    if done:
        lines.append(f"  {_references(done[0])}")
        lines += aligned([_HEAD, *(_cells(r) for r in done)], _LEFT)
    for row in sorted((r for r in rows if r.get("status") != "ok"), key=lambda r: str(r["policy"])):
        lines.append(f"  {row['policy']}: {row['status']}: {row.get('reason') or 'no reason given'}")
    incomplete = sorted({unit for r in done for unit in r.get("incomplete") or ()})
    if incomplete:
        lines.append(f"  not included in a request: {', '.join(incomplete)}")
    mark = marks(done)
    if mark:
        lines.append(f"  {mark}")
    return "\n".join(lines)


def _title(row: Row) -> str:
    parts = [str(row.get("mix", "")), "on", str(row.get("cluster", ""))]
    if row.get("link"):
        parts.append(f"@ {row['link']}")
    return " ".join(parts) + (f" · {row['table']}" if row.get("table") else "")


def _references(row: Row) -> str:
    """The three numbers that keep a result honest."""
    unit = row.get("throughput_unit", "request/s")
    text = f"{unit} · bound {number(row.get('bound_per_s'))}"
    if row.get("bound_batch"):
        text += f" (B {row['bound_batch']})"
    text += f" · replicas {number(row.get('replicas_per_s'))}"
    text += f" · best single type at equal budget {number(row.get('best_single_per_s'))}"
    return text + f" (whole GPUs {number(row.get('best_single_int_per_s'))})"


def _cells(row: Row) -> tuple[str, ...]:
    rate, replicas = row.get("throughput_per_s"), row.get("replicas_per_s")
    low, high = row.get("interval80") or (None, None)
    against = f"{100.0 * (rate / replicas - 1.0) + 0.0:+.1f} %".replace("-0.0 ", "+0.0 ") if rate and replicas else "-"
    p_win = row.get("p_win")
    return (
        str(row["policy"]), str(row.get("batch") or "-"), str(row.get("depth") or "-"),
        str(row.get("limited_by") or "-"), number(rate),
        f"{number(row.get('median_per_s'))} [{number(low)}, {number(high)}]",
        number(row.get("usd_per_hour")), number(row.get("per_usd")), against,
        "-" if p_win is None else f"{p_win:.2f}",
    )  # fmt: skip


def aligned(table: Sequence[Sequence[str]], left: Set[int]) -> list[str]:
    """Lines of cells under one another; the columns `left` start at the same place, the others end there."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return [
        "  " + "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]  # fmt: skip


def number(value: float | None) -> str:
    """About four significant digits; "-" for what is not known."""
    if value is None:
        return "-"
    if 1e5 <= abs(value) < 1e8:
        return f"{value:,.0f}"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
        digits = digits if abs(value) >= 1 or value == 0 else 5
        return f"{value:.{digits}f}"
    return f"{value:.3e}"
