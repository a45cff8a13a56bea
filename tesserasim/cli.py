"""The command line: a thin shell over `tesserasim.api`.

Results go to standard output (as JSON with `--json`), progress and complaints to standard error. Exit codes:
0 done, 1 some experiments failed and the rest is saved, 2 bad input, 3 a bug, 130 interrupted, 143 stopped.
Nothing heavy is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tesserasim import __version__
from tesserasim.costs.command import add_costs
from tesserasim.derive.command import add_derive
from tesserasim.errors import InputError
from tesserasim.terminal import BAD_INPUT, DONE, SOME_FAILED, outcome, put, say, takes_any_character


class _Parser(argparse.ArgumentParser):
    """One line per error; options in full only, so that a new option never changes what an old line means."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code as in the module's docstring."""
    return outcome("tesserasim", lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    """The command, and its output out of the house; also where it ends early, as `--help` does."""
    ended: SystemExit | None = None
    code = DONE
    try:
        options = parser().parse_args(arguments)
        code = options.run(options)
    except SystemExit as end:
        ended = end
    put(end="")
    if ended is not None:
        raise ended
    return code


def _print(document: Any, as_json: bool, text: str) -> None:
    """A result, for machines or for people."""
    if as_json:
        from tesserasim.sweep.store import finite

        text = json.dumps(finite(document), indent=1, ensure_ascii=not takes_any_character(), allow_nan=False)
    put(text)


def _sweep(options: argparse.Namespace) -> int:
    from tesserasim import api
    from tesserasim.report.table import format_rows

    result = api.sweep(
        options.spec, options.out, jobs=options.jobs, executor=options.executor, fresh=options.fresh,
        quick=options.quick, progress=sys.stderr.isatty() or not options.json,
    )  # fmt: skip
    text = format_rows(result.rows) + "\n\n" + "\n".join(result.verdicts)
    _print(api.sweep_document(result), options.json, text)
    for failure in result.failures:
        say("tesserasim", f"failed: {failure['experiment']}: {failure['error']}")
    print(
        f"tesserasim: {result.computed} experiments computed, {result.reused} kept from before, "
        f"{len(result.failures)} failed, in {result.wall_s:.1f} s; results in {result.out}",
        file=sys.stderr,
    )
    if result.unwritten:
        raise InputError("; ".join(result.unwritten))
    return SOME_FAILED if result.failures else DONE


def _simulate(options: argparse.Namespace) -> int:
    from tesserasim import api
    from tesserasim.provenance import CHANGED
    from tesserasim.report.table import format_case
    from tesserasim.report.words import describe_run

    if options.plan is not None and (options.batch or options.depth):
        raise InputError("--batch and --depth are part of the plan file; give them with --policy only")
    row, write = api.simulation(
        options.mix, options.cluster, options.policy, plan=options.plan, batch=options.batch,
        depth=options.depth, check=options.check, timeline=options.timeline, **_common(options),
    )  # fmt: skip
    notes = row.get("notes") or []
    try:
        _print(row, options.json, format_case([row]) + describe_run(row) + "".join(f"\n  note: {n}" for n in notes))
    finally:  # the file does not depend on who reads standard output
        write()
    changed = [note for note in notes if note.startswith(CHANGED)]
    if changed:
        say("tesserasim", f"warning: {options.plan}: {'; '.join(changed)}")
    return DONE


def _plan(options: argparse.Namespace) -> int:
    from tesserasim import api
    from tesserasim.plans import write_plan
    from tesserasim.report.words import describe_plan
    from tesserasim.writing import check_output

    if options.out is not None:
        check_output(options.out)
    mix = api.load_mix(options.mix)
    plan = api.plan(
        mix, options.cluster, None if options.pick else options.policy, batch=options.batch,
        depth=options.depth, **_common(options),
    )  # fmt: skip
    document = api.plan_document(plan, mix)
    try:
        _print(document, options.json, describe_plan(document))
    finally:  # the file does not depend on who reads standard output
        if options.out is not None:
            write_plan(plan, options.out)
    return DONE


def _import(options: argparse.Namespace) -> int:
    from tesserasim import api
    from tesserasim.report.words import describe_facts
    from tesserasim.trace.bounds import describe_work
    from tesserasim.trace.iterations import describe

    facts = api.import_profile(
        options.file, options.out, unit=options.unit, kernels=options.range, iteration=options.iteration,
        phase=options.phase, gpu=options.gpu, clip=options.clip,
    )  # fmt: skip
    lines = [f"{facts['out']}: {describe_facts(facts)}", f"  work: {describe_work(facts['work'])}"]
    found = facts["iterations"]
    if found:
        taken = "all of them" if options.iteration is None else f"only {found['names'][options.iteration]}"
        taken = f"the range {options.range[0]}:{options.range[1]}" if options.range else taken
        lines.append(f"  iterations: {len(found['names'])}, {describe(found)}; imported: {taken}")
    _print(facts, options.json, "\n".join(lines))
    return DONE


def _inspect(options: argparse.Namespace) -> int:
    from tesserasim.report.words import describe_facts
    from tesserasim.trace.inspect import inspect_file

    facts = inspect_file(options.file)
    _print(facts, options.json, f"{options.file}: {describe_facts(facts)}")
    return DONE


def _export(options: argparse.Namespace) -> int:
    from tesserasim.trace.perfetto import export_perfetto
    from tesserasim.writing import check_output

    check_output(options.perfetto, options.file)
    made = export_perfetto(options.file, options.perfetto)
    _print(made, options.json, f"{made['file']}: {made['slices']} slices on {made['tracks']} tracks")
    return DONE


def _deps(options: argparse.Namespace) -> int:
    from tesserasim import api
    from tesserasim.deps.ptx import analyse_file
    from tesserasim.deps.words import dot, in_words, modes_in_words
    from tesserasim.trace.sniff import FileKind, sniff
    from tesserasim.writing import check_output, write_whole

    outputs = [path for path in (options.dot, options.out) if path is not None]
    for path in outputs:
        check_output(path, options.file)
    if options.file.suffix == ".ptx" or sniff(options.file) is FileKind.PTX:
        if outputs:
            raise InputError(f"{options.file}: --dot and --out are for traces; PTX has no graph")
        found = {name: effects.modes for name, effects in analyse_file(options.file).items()}
        _print(found, options.json, modes_in_words(found) or f"{options.file}: no kernels")
        return DONE
    if len({os.path.realpath(path) for path in outputs}) < len(outputs):
        raise InputError(f"{options.out}: named by both --dot and --out")
    document = api.dependencies(options.file)
    try:
        _print(document, options.json, in_words(document))
    finally:  # the files do not depend on who reads standard output
        texts = ((options.dot, dot(document)), (options.out, json.dumps(document, indent=1) + "\n"))
        problems = []
        for path, text in texts:
            try:
                if path is not None:
                    write_whole(path, text.encode("utf-8", "replace"))
            except InputError as error:  # one that cannot be written leaves the other alone
                problems.append(str(error))
        if problems:
            raise InputError("; ".join(problems))
    return DONE


def _gpus(options: argparse.Namespace) -> int:
    from tesserasim.cluster.catalogue import describe_gpus
    from tesserasim.report.words import format_gpus

    rows = describe_gpus(options.prices)
    _print(rows, options.json, format_gpus(rows))
    return DONE


def _policies(options: argparse.Namespace) -> int:
    from tesserasim import api

    rows = api.describe_policies()
    text = "\n".join(f"{r['name']:<16} {r['description']}" for r in rows)
    _print(rows, options.json, text)
    return DONE


def _mix_new(options: argparse.Namespace) -> int:
    from tesserasim.sweep.mixfile import MixOptions, new_mix

    launches = dict(options.launches or [])
    content = new_mix(
        options.traces, options.out,
        MixOptions(options.name, options.input_tokens, options.output_tokens, options.prefill_batch, launches),
    )  # fmt: skip
    _print({"out": str(options.out), **content}, options.json, f"{options.out}: mix {content['name']}")
    return DONE


def _common(options: argparse.Namespace) -> dict[str, Any]:
    """Options that `simulate` and `plan` share, as keywords of the api."""
    lengths = ("max_seqs", "input_tokens", "output_tokens")
    names = (*lengths, "engine", "prices", "seed", "allow_extrapolation", "device_model")
    return {name: getattr(options, name) for name in names}


def _count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 2**31:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at least 1")
    return value


def _seed_number(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 0 to 2^63 - 1")
    return value


def _interval(text: str) -> tuple[int, int]:
    """`A:B`, the kernels A to B - 1."""
    first, colon, last = text.partition(":")
    try:
        interval = int(first), int(last)
    except ValueError:
        interval = (0, 0)
    if not colon or not 0 <= interval[0] < interval[1]:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not A:B with 0 <= A < B")
    return interval


def _launch(text: str) -> tuple[str, int]:
    """`UNIT=N`, N launches of a unit per request."""
    unit, equals, count = text.partition("=")
    if not equals or not unit:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not UNIT=N")
    return unit, _count(count)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = _Parser(
        prog="tesserasim", description="Which policy wins on a mixed set of GPUs, by how much, and how sure?"
    )
    top.add_argument("--version", action="version", version=f"tesserasim {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    _add_sweep(commands)
    _add_simulate(commands)
    _add_plan(commands)
    _add_files(commands)
    add_derive(commands, _command, _print)
    add_costs(commands, _command, _Parser, _print)
    command = _command(commands, "gpus", _gpus, "the GPU types of the catalogue, with prices and sources")
    command.add_argument("--prices", default="median", metavar="P", help="median, min, max, paper or a file")
    _command(commands, "policies", _policies, "the scheduling policies that can be compared")
    return top


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    return command


def _add_sweep(commands: Any) -> None:
    c = _command(commands, "sweep", _sweep, "run many experiments, keep every result, compare the policies")
    c.add_argument("spec", nargs="?", type=Path, metavar="SPEC.toml", help="default: experiments/default.toml")
    c.add_argument("--out", type=Path, metavar="DIR", help="where results are kept (default: results/NAME)")
    c.add_argument("--jobs", type=_count, metavar="N", help="worker processes (default: one per core)")
    c.add_argument("--executor", default="local", metavar="E", help="local, dask or ray (default: local)")
    c.add_argument("--fresh", action="store_true", help="compute everything again")
    c.add_argument("--quick", action="store_true", help="the small version of the spec (its [quick] table)")


def _add_case(c: argparse.ArgumentParser) -> None:
    """Options that say what is simulated or planned for."""
    c.add_argument("--mix", required=True, metavar="M", help="a mix .toml file or the name of a shipped mix")
    c.add_argument("--cluster", required=True, metavar="C", help="for example A100-80GB-PCIe+L40S@200Gbps")
    c.add_argument("--batch", type=_count, metavar="B", help="requests per cohort (default: the best)")
    c.add_argument("--depth", type=_count, metavar="D", help="cohorts in flight (default: the best)")
    c.add_argument("--max-seqs", type=_count, default=256, metavar="N", help="sequences per GPU (default: 256)")
    c.add_argument("--input-tokens", type=_count, metavar="S", help="tokens of a prompt (default: the mix's)")
    c.add_argument("--output-tokens", type=_count, metavar="O", help="tokens of an answer (default: the mix's)")
    c.add_argument("--engine", default="auto", choices=("auto", "simpy", "fast"), help="default: auto")
    c.add_argument("--device-model", default="serial", choices=("serial", "shared"), help="default: serial")
    c.add_argument("--allow-extrapolation", action="store_true", help="beyond twice the captured range")
    c.add_argument("--prices", default="median", metavar="P", help="median, min, max, paper or a file")
    c.add_argument("--seed", type=_seed_number, default=0, metavar="N", help="of the cost errors (default: 0)")


def _add_simulate(commands: Any) -> None:
    c = _command(commands, "simulate", _simulate, "one policy, or one plan, on one cluster")
    _add_case(c)
    what = c.add_mutually_exclusive_group(required=True)
    what.add_argument("--policy", metavar="P", help="a name from the command 'policies'")
    what.add_argument("--plan", type=Path, metavar="plan.json", help="a file written by the command 'plan'")
    c.add_argument("--check", action="store_true", help="verify the invariants of the run")
    c.add_argument("--timeline", type=Path, metavar="out.json", help="write the first cohorts for Perfetto")


def _add_plan(commands: Any) -> None:
    c = _command(commands, "plan", _plan, "where every kernel goes, as a file that simulator and hardware run")
    _add_case(c)
    what = c.add_mutually_exclusive_group(required=True)
    what.add_argument("--policy", metavar="P", help="a name from the command 'policies'")
    what.add_argument("--pick", action="store_true", help="the policy with the highest simulated throughput")
    c.add_argument("--out", type=Path, metavar="plan.json", help="where to write the plan")


def _add_files(commands: Any) -> None:
    c = _command(commands, "import", _import, "turn a profile (Kineto JSON, Nsight Systems SQLite or CSV) into a trace")
    c.add_argument("file", type=Path, metavar="FILE")
    c.add_argument("--out", type=Path, required=True, metavar="trace.parquet")
    c.add_argument("--unit", metavar="NAME", help="name of the unit in a mix (default: the file's)")
    which = c.add_mutually_exclusive_group()
    which.add_argument("--range", type=_interval, metavar="A:B",
                       help="only A to B - 1 in launch order, copies and sets included")  # fmt: skip
    which.add_argument("--iteration", type=_seed_number, metavar="N", help="only the N-th repeat, counted from 0")
    c.add_argument("--phase", choices=("prefill", "decode", "denoise", "encode", "other"))
    c.add_argument("--gpu", metavar="NAME", help="the GPU, whatever the profile says")
    c.add_argument("--clip", action="store_true", help="end each kernel where the next on its stream begins")
    c = _command(commands, "deps", _deps, "what flows between the kernels of a trace; what PTX reads and writes")
    c.add_argument("file", type=Path, metavar="TRACE|FILE.ptx")
    c.add_argument("--dot", type=Path, metavar="FILE", help="write the site graph of a trace for Graphviz")
    c.add_argument("--out", type=Path, metavar="FILE.json", help="write the dependencies of a trace as JSON")
    c = _command(commands, "inspect", _inspect, "what a profile or a trace holds")
    c.add_argument("file", type=Path, metavar="FILE")
    c = _command(commands, "export", _export, "a trace or a profile as a file that Perfetto opens")
    c.add_argument("file", type=Path, metavar="FILE")
    c.add_argument("--perfetto", type=Path, required=True, metavar="OUT.json", help="Chrome trace events")
    mix = commands.add_parser("mix", help="make mixes", description="make mixes")
    c = _command(mix.add_subparsers(metavar="ACTION", required=True, parser_class=_Parser), "new", _mix_new,
                 "write a mix of traces")  # fmt: skip
    c.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    c.add_argument("--out", type=Path, required=True, metavar="mix.toml")
    c.add_argument("--name", default="", help="name of the mix (default: the file's)")
    c.add_argument("--input-tokens", type=_count, metavar="S")
    c.add_argument("--output-tokens", type=_count, metavar="O")
    c.add_argument("--prefill-batch", type=_count, default=1, metavar="N", help="prompts per prefill (default: 1)")
    c.add_argument("--launches", type=_launch, action="append", metavar="UNIT=N", help="launches per image")
