"""The `costs` commands: predict a trace on other GPUs, evaluate the models, fit their parameters.

Nothing heavy is imported at the top: the command line reads this module for its help.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Show = Callable[[Any, bool, str], None]
COLUMNS = (
    "kind", "gpu", "n", "mape", "median_ape", "weighted_ape", "spearman", "coverage80", "width80", "spearman_h100",
    "mape_unseen", "mape_unseen_no_sibling", "coverage80_unseen",
)  # fmt: skip


def add_costs(commands: Any, command: Callable[..., argparse.ArgumentParser], parser_class: Any, show: Show) -> None:
    """The command `costs` with its actions; `show` prints a result as JSON or as text."""
    group = commands.add_parser("costs", help="what kernels cost on other GPUs", description="what kernels cost")
    actions = group.add_subparsers(metavar="ACTION", required=True, parser_class=parser_class)
    c = command(actions, "predict", lambda o: _predict(o, show), "times of a trace's sites on the GPUs of a cluster")
    c.add_argument("trace", type=Path, metavar="TRACE")
    c.add_argument("--cluster", required=True, metavar="C", help="for example A100-80GB-PCIe+L40S")
    c.add_argument("--explain", metavar="SITE", help="one site: shape, mechanisms, source and error")
    c = command(actions, "evaluate", lambda o: _evaluate(o, show), "errors of the models on measured kernel tables")
    c.add_argument("tables", nargs="*", type=Path, metavar="TABLE", help="default: the shared kernel tables")
    how = c.add_mutually_exclusive_group()
    how.add_argument("--as-shipped", action="store_true", help="the shipped parameters (default)")
    how.add_argument("--cross-validate", action="store_true", help="fit anew, with groups and GPUs held out")
    c.add_argument("--reference", choices=("H200", "none"), default="H200", help="is the H200's time known?")
    c.add_argument("--calibrated-only", action="store_true", help="cross-validate without holding GPUs out (faster)")
    c = command(actions, "fit", lambda o: _fit(o, show), "fit the parameters that ship, or those of a GPU of your own")
    what = "rows of one GPU (and of the H200): a file for $TESSERASIM_COSTS. Default: the shared kernel tables"
    c.add_argument("tables", nargs="*", type=Path, metavar="TABLE", help=what)
    c.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the parameter files are written")


def _progress(text: str) -> None:
    print(f"tesserasim: {text}", file=sys.stderr, flush=True)


def _fit(options: argparse.Namespace, show: Show) -> int:
    from tesserasim.costs.fitting import fit
    from tesserasim.costs.owntable import fit_own, is_own
    from tesserasim.writing import check_directory, write_whole

    check_directory(options.out)
    own = len(options.tables) > 0 and is_own(options.tables)
    files = fit_own(options.tables, _progress) if own else fit(options.tables, _progress)
    for name, text in files.items():
        write_whole(options.out / name, text.encode())
    rows = [{"file": str(options.out / name), "bytes": len(text.encode())} for name, text in files.items()]
    lines = [f"{r['file']}: {r['bytes']} bytes" for r in rows]
    if own:
        lines.append(f"use it in every command with TESSERASIM_COSTS={rows[0]['file']}")
    show(rows, options.json, "\n".join(lines))
    return 0


def _evaluate(options: argparse.Namespace, show: Show) -> int:
    from tesserasim.costs.fitting import evaluate

    how = "cross-validate" if options.cross_validate else "as-shipped"
    reference = None if options.reference == "none" else "H200-SXM"
    rows = evaluate(options.tables, how, reference, _progress, not options.calibrated_only)
    show(rows, options.json, table(rows))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of `costs evaluate` as aligned text."""
    columns = [c for c in COLUMNS if any(c in row for row in rows)]
    lines = [columns, *([_cell(row.get(c)) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _predict(options: argparse.Namespace, show: Show) -> int:
    from tesserasim import api

    document = api.predict_costs(options.trace, options.cluster, options.explain)
    show(document, options.json, _words(document))
    return 0


def _words(document: dict[str, Any]) -> str:
    lines = [f"{document['trace']}: {document['sites']} sites, captured on {document['captured_on']}"]
    for g in document["gpus"]:
        sources = ", ".join(f"{share:.0%} {source}" for source, share in g["time_by_source"].items())
        lines.append(f"  {g['gpu']:<16} {g['total_us']:12.1f} us   {sources}")
    for row in document["explained"]:
        interval = f"[{row['low_us']:.2f}, {row['high_us']:.2f}]"
        lines.append(
            f"  {row['site']} on {row['gpu']}: {row['us']:.2f} us {interval}, captured {row['captured_us']:.2f}; "
            f"{row['source']}{' ' + row['kind'] if row['kind'] else ''}"
        )
        known = [name for name in ("shape", "mechanisms_us") if name in row]
        lines += [f"    {name}: " + ", ".join(f"{k} {v:g}" for k, v in row[name].items()) for name in known]
    return "\n".join(lines)
