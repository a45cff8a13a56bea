"""`python -m hw`: capture traces on this machine's GPU, and check what they say."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tesserasim.terminal import BAD_INPUT, outcome


class _Parser(argparse.ArgumentParser):
    """One line per error; options in full only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def _seconds(text: str) -> float:
    """A time limit."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:  # nor NaN
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m hw", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    c = commands.add_parser("capture", help="capture the units of a model as traces")
    c.add_argument(
        "--model", action="append", required=True,
        help="llama-3-8b, gpt-oss-20b (-zipf, -bf16), mamba-codestral-7b, qwen2.5-vl-7b, sd3.5-medium, sd3.5-encoders, "
        "or file.py:factory for a module of your own; may be repeated",
    )  # fmt: skip
    c.add_argument("--out", default="traces", help="folder for <model>/<unit>.parquet (default: traces)")
    c.add_argument("--units", default="", help="comma-separated unit names; default: the model's whole grid")
    c.add_argument("--left-out", default="", help="extra decode points as batchxcontext, e.g. 16x1536, kept apart")
    c.add_argument("--limit-s", type=_seconds, default=float("inf"), help="start no further unit after this long")
    o = commands.add_parser("oracle", help="check the read and write sets of captured units, kernel by kernel")
    o.add_argument("trace", nargs="+", help="captured traces; the folder of each names its model")
    o.add_argument("--out", default="oracle", help="folder for <model>/<unit>.json (default: oracle)")
    o.add_argument(
        "--block", action="append", default=[],
        help="module to check, e.g. layers.1; 'all' for the whole step; may be repeated "
        "(default: the first, two in the middle and the last)",
    )  # fmt: skip
    o.add_argument("--limit-s", type=_seconds, default=float("inf"), help="check no further kernel after this long")
    m = commands.add_parser("manifest", help="write MANIFEST.json for a folder of traces")
    m.add_argument("folder", nargs="?", default="traces")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return outcome("hw", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from pathlib import Path

    if args.command == "manifest":
        from hw.capture.manifest import write_manifest

        write_manifest(Path(args.folder))
        return 0
    try:
        import torch  # noqa: F401
    except ImportError:
        print("error: PyTorch is missing; install with: pip install '.[hw]'", file=sys.stderr)
        return 2
    if args.command == "oracle":
        from hw.oracle.run import oracle

        return oracle([Path(t) for t in args.trace], Path(args.out), args.block, args.limit_s)
    from hw.capture import run

    return run.capture_all(
        args.model, Path(args.out), [u for u in args.units.split(",") if u],
        [p for p in args.left_out.split(",") if p], args.limit_s,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
