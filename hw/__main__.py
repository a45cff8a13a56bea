"""`python -m hw`: capture traces on this machine's GPU, and check what they say."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tesserasim.terminal import BAD_INPUT, outcome

#: More slots than any queue of launches is worth, and more placements than a session holds.
MAX_DEPTH, MAX_TRIES = 256, 10_000


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


def _count(text: str) -> int:
    """A whole number that is not negative."""
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    """Whole numbers above 0, with commas between."""
    found = tuple(_count(part) for part in text.split(","))
    if 0 in found:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: every number must be above 0")
    return found


def _depths(text: str) -> tuple[int, ...]:
    """Numbers of slots."""
    found = _counts(text)
    if max(found) > MAX_DEPTH:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: a depth is at most {MAX_DEPTH}")
    return found


def _devices(text: str) -> Any:
    """Devices of a list; argparse says what is wrong with it."""
    from hw.devices import parse_devices

    try:
        return parse_devices(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _tries(text: str) -> int:
    """How many random placements or mutations."""
    found = _count(text)
    if found > MAX_TRIES:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: at most {MAX_TRIES}")
    return found


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
    c.add_argument("--left-out", default="", help="extra decode points of llama-3-8b as batchxcontext, e.g. 16x1536")
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
    _replay_parser(commands)
    v = commands.add_parser("validate", help="compare replayed plans with the simulator (needs no GPU)")
    v.add_argument("runs", help="TOML file that names journals, traces of every device, links and the split")
    v.add_argument("--out", help="also write the table here, as .parquet and .csv")
    v.add_argument(
        "--device-model", choices=("serial", "shared"), default="shared",
        help="one kernel at a time on a device, or kernels of several streams together (default: shared)",
    )  # fmt: skip
    v.add_argument("--plans", metavar="FOLDER", help="write plans of single, af and kernel for every unit instead")
    v.add_argument("--depth", type=_depths, default=(1, 2, 4), help="depths of those plans (default: 1,2,4)")
    b = commands.add_parser("calibrate", help="measure kernels on this machine's GPU, as a table for costs fit")
    b.add_argument("--out", default="calibration", help="folder for the GPU's table and journal (default: calibration)")
    b.add_argument("--kinds", default="", help="comma-separated kernel kinds; default: all")
    b.add_argument("--link", action="store_true", help="also measure the links between the GPUs")
    b.add_argument("--limit-s", type=_seconds, default=300.0, help="measure no further shape after this (default: 300)")
    m = commands.add_parser("manifest", help="write MANIFEST.json for a folder of traces")
    m.add_argument("folder", nargs="?", default="traces")
    return parser


def _replay_parser(commands: Any) -> None:
    r = commands.add_parser("replay", help="run plans of captured units split over devices, kernel by kernel")
    r.add_argument("--model", required=True, help="as for capture")
    r.add_argument("--units", default="", help="comma-separated unit names; default: the model's whole grid")
    r.add_argument(
        "--devices", type=_devices, default=(), metavar="LIST",
        help="e.g. 0:64,0:68 or 0:64,1~32: GPU, its multiprocessors, and ~ those that take bandwidth beside it "
        "(default: every GPU)",
    )  # fmt: skip
    r.add_argument(
        "--sms", type=_counts, default=(),
        help="multiprocessors of each partition of GPU 0: 64,68 is --devices 0:64,0:68",
    )  # fmt: skip
    r.add_argument(
        "--backend", choices=("cudagraph", "aten"), default="cudagraph",
        help="captured kernels in one graph, or operators of PyTorch one by one on any device (default: cudagraph)",
    )  # fmt: skip
    r.add_argument("--on", default="cpu,cpu", help="devices of --backend aten, e.g. cpu,cuda:0 (default: cpu,cpu)")
    r.add_argument("--plan", action="append", default=[], help="plan file whose lanes to run; may be repeated")
    r.add_argument("--random", type=_tries, default=20, help="random placements to run beside them (default: 20)")
    r.add_argument("--timed", type=_tries, help="random placements that are timed, too (default: all)")
    r.add_argument("--depth", type=_depths, default=(1,), help="slots to time every plan with, e.g. 1,2,4")
    r.add_argument(
        "--copies", choices=("engine", "kernel"), default="engine",
        help="what moves bytes: the copy engine, or kernels of the reader's device (parts of one GPU; default: engine)",
    )  # fmt: skip
    r.add_argument("--mutations", type=_tries, default=0, help="moves, and as many waits, to drop, one a run")
    r.add_argument("--profile", action="store_true", help="measure kernel times on every device instead")
    r.add_argument("--links", action="store_true", help="measure hops between the first two devices instead")
    r.add_argument("--pairs", action="store_true", help="with --profile: also how kernels slow each other down")
    r.add_argument("--timelines", action="store_true", help="also write what the profiler saw of every timed plan")
    r.add_argument("--seed", type=_count, default=0)
    r.add_argument("--out", default="replay", help="folder for <model>/<unit>.jsonl (default: replay)")
    r.add_argument("--limit-s", type=_seconds, default=float("inf"), help="start no further run after this long")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command == "replay":
        _fits_together(parser, args)
    return outcome("hw", lambda: _run(args))


def _fits_together(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """An option that the others leave without effect is an error, not ignored."""
    if args.pairs and not args.profile:
        parser.error("replay: --pairs goes with --profile")
    if args.sms and args.devices:
        parser.error("replay: --sms and --devices say the same; give one")
    if args.links and args.profile:
        parser.error("replay: --links and --profile are runs of their own; give one")
    if args.backend == "aten":
        for name in ("profile", "links", "timelines", "sms", "devices", "mutations", "timed"):
            if getattr(args, name):
                parser.error(f"replay: --{name} needs --backend cudagraph; aten checks placements, without times")
        if args.copies != "engine":
            parser.error("replay: --copies needs --backend cudagraph")
        if args.depth != (1,):
            parser.error("replay: --depth needs --backend cudagraph; aten checks placements, without times")
    elif args.on != "cpu,cpu":
        parser.error("replay: --on goes with --backend aten; other devices are the GPUs, or partitions by --sms")


def _run(args: argparse.Namespace) -> int:
    from pathlib import Path

    if args.command == "manifest":
        from hw.capture.manifest import write_manifest
        from tesserasim.files import path_text
        from tesserasim.trace.values import counted

        count = write_manifest(Path(args.folder))
        print(f"{path_text(Path(args.folder) / 'MANIFEST.json')}: {counted(count, 'trace')}")
        return 0
    if args.command == "validate":
        from hw.validate import validate, write_policy_plans

        if args.plans:
            return write_policy_plans(Path(args.runs), Path(args.plans), args.depth)
        return validate(Path(args.runs), Path(args.out) if args.out else None, args.device_model)
    try:
        import torch  # noqa: F401
    except ImportError:
        print("error: PyTorch is missing; install with: pip install '.[hw]'", file=sys.stderr)
        return 2
    if args.command == "calibrate":
        from hw.calibrate.run import from_options

        return from_options(args.out, args.kinds, args.limit_s, args.link)
    if args.command == "oracle":
        from hw.oracle.run import oracle

        return oracle([Path(t) for t in args.trace], Path(args.out), args.block, args.limit_s)
    if args.command == "replay":
        import time

        from hw.devices import DeviceSpec
        from hw.replay.profile import links, profile
        from hw.replay.run import Job, replay

        job = Job(
            args.model, tuple(u for u in args.units.split(",") if u),
            args.devices or tuple(DeviceSpec(0, n) for n in args.sms), tuple(Path(p) for p in args.plan),
            args.random, args.depth, args.mutations, Path(args.out), time.monotonic() + args.limit_s, args.seed,
            args.timelines, args.pairs, args.timed, args.copies,
        )  # fmt: skip
        if args.backend == "aten":
            from hw.replay.aten_job import replay_aten

            return replay_aten(job, args.on)
        return (links if args.links else profile if args.profile else replay)(job)
    from hw.capture import run

    return run.capture_all(
        args.model, Path(args.out), [u for u in args.units.split(",") if u],
        [p for p in args.left_out.split(",") if p], args.limit_s,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
