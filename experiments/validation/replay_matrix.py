"""Replay units of all five models on two partitions of one GPU (or two GPUs): measure, plan, run, compare.

    python experiments/validation/replay_matrix.py [--out replay] [--sms 64,68] [--limit-s 500] [--only llama-3-8b]

Hops first. Then per unit its kernel times on every device and how its kernels slow each other down, the plans that
policies make of these times, and the replay of those plans, of placements apart by attention and FFN, and of random
ones: checks, mutations, depths. Each step is a process of its own; what is there is not measured again, and no step
begins after the limit. Copy OUT into `experiments/validation/replay` to keep it; OUT/runs.toml is what
`python -m hw validate` reads.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tesserasim.writing import write_whole

HERE = Path(__file__).resolve().parent
UNITS = [
    ("llama-3-8b", "decode-b8-c512"), ("gpt-oss-20b", "decode-b8-c512"), ("sd3.5-medium", "denoise-b1"),
    ("mamba-codestral-7b", "decode-b8-c512"), ("qwen2.5-vl-7b", "decode-b8-c512"), ("llama-3-8b", "prefill-b1-t512"),
    ("gpt-oss-20b", "prefill-b1-t256"), ("mamba-codestral-7b", "prefill-b1-t256"), ("qwen2.5-vl-7b", "prefill-b1-t256"),
]  # fmt: skip
DEPTHS = {"decode": "1,2,4,8", "denoise": "1,2,4", "prefill": "1,2"}


def seconds(text: str) -> float:
    """A time limit; argparse says so if it is none."""
    value = float(text)
    if not value >= 0:  # nor NaN
        raise ValueError(text)
    return value


def count(text: str) -> int:
    """A whole number from 0 to 10000."""
    value = int(text)
    if not 0 <= value <= 10_000:
        raise ValueError(text)
    return value


def partitions(text: str) -> str:
    """Two numbers of multiprocessors, or nothing."""
    if text and [n.isdecimal() and int(n) > 0 for n in text.split(",")] != [True, True]:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: give two numbers, e.g. 64,68, or '' for two GPUs")
    return text


def shell(step: Sequence[str]) -> str:
    """A step as a shell takes it; plans, a file each, are listed when it runs."""
    if not step[-1].endswith("*.json"):
        return shlex.join(step)
    folder = shlex.quote(step[-1][: -len("*.json")])
    return f"printf -- '--plan=%s\\0' {folder}*.json | xargs -0 {shlex.join(step[:-2])}"


def commands(out: Path, model: str, unit: str, options: argparse.Namespace) -> list[list[str]]:
    """Profile, plan and replay of one unit."""
    sms, copies = options.sms, options.copies
    random, timed, mutations = options.random, options.timed, options.mutations
    hw = [sys.executable, "-m", "hw"]
    devices = ["--sms", sms] if sms else []
    depths = DEPTHS[unit.partition("-")[0]]
    common = ["--model", model, "--units", unit, *devices]
    plans = out / "plans" / model
    # Globs stay globs: the plans do not exist yet.
    return [
        [*hw, "replay", "--profile", "--pairs", *common, "--out", str(out)],
        [*hw, "validate", str(out / "one" / model / f"{unit}.toml"), "--plans", str(plans), "--depth", depths],
        [*hw, "replay", *common, "--random", str(random), "--timed", str(timed), "--mutations", str(mutations),
         "--depth", depths, "--copies", copies, "--out", str(out), "--plan", f"{plans}/{unit}/*.json"],
    ]  # fmt: skip


def toml(model: str, unit: str, names: Sequence[str], up: str, copies: str) -> str:
    """A [[unit]] of a runs file that lies `up` folders above OUT's."""
    lines = ["[[unit]]", f'journal = "{up}{model}/{unit}.jsonl"', f'links = "{up}links.jsonl"', f'copies = "{copies}"']
    if (HERE.parents[1] / "traces/launch-paused.json").exists():
        lines.append(f'launch = "{up}launch-paused.json"')
    lines += ["[unit.traces]", *(f'{n} = "{up}profile/{n}/{model}/{unit}.parquet"' for n in names)]
    return "\n".join(lines) + "\n"


def prepare(out: Path, names: Sequence[str], units: Sequence[tuple[str, str]], copies: str) -> None:
    """Runs files: one per unit for planning, and one over all units that have been replayed."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "split.json", out / "split.json")
    figures = HERE.parents[1] / "traces/launch-paused.json"
    if figures.exists():
        shutil.copy(figures, out / "launch-paused.json")
    for model, unit in units:
        path = out / "one" / model / f"{unit}.toml"
        write_whole(path, ('split = "../../split.json"\n' + toml(model, unit, names, "../../", copies)).encode())


def gather(out: Path, names: Sequence[str], copies: str) -> None:
    """The runs file of all units that have been replayed, in this run or before."""
    done = [
        (m, u) for m, u in UNITS
        if (out / m / f"{u}.jsonl").exists() and all((out / "profile" / n / m / f"{u}.parquet").exists() for n in names)
    ]  # fmt: skip
    text = 'split = "split.json"\n' + "".join("\n" + toml(m, u, names, "", copies) for m, u in done)
    write_whole(out / "runs.toml", text.encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("replay"), help="folder of all that is made (default: replay)")
    parser.add_argument("--sms", type=partitions, default="64,68", help="partitions of GPU 0; '' takes two GPUs")
    parser.add_argument("--limit-s", type=seconds, default=500.0, help="start no step after this")
    models = ["", *dict.fromkeys(m for m, _ in UNITS)]
    parser.add_argument("--only", default="", choices=models, metavar="MODEL", help="one model")
    parser.add_argument("--random", type=count, default=20, help="random placements a unit (default: 20)")
    parser.add_argument("--timed", type=count, default=4, help="of these, how many are timed, too (default: 4)")
    parser.add_argument("--mutations", type=count, default=6, help="moves, and as many waits, to drop (default: 6)")
    parser.add_argument("--unit-s", type=seconds, default=float("inf"), help="replay no unit for longer")
    parser.add_argument("--copies", choices=("engine", "kernel"), default="engine", help="what moves bytes")
    parser.add_argument("--dry-run", action="store_true", help="print the steps")
    options = parser.parse_args()
    started = time.monotonic()
    names = ["a", "b"] if options.sms else ["gpu0", "gpu1"]
    units = [u for u in UNITS if options.only in ("", u[0])]
    devices = ["--sms", options.sms] if options.sms else []
    steps = [[sys.executable, "-m", "hw", "replay", "--links", "--model", units[0][0], *devices, "--out",
              str(options.out)]]  # fmt: skip
    for model, unit in units:
        steps += commands(options.out, model, unit, options)
    if options.dry_run:
        print("\n".join(map(shell, steps)))
        return 0
    try:
        prepare(options.out, names, units, options.copies)
    except OSError as error:
        parser.error(f"--out {options.out}: cannot be written ({error.strerror})")
    failed = 0
    for step in steps:
        left = options.limit_s - (time.monotonic() - started)
        if left < 5:
            print("stopped at the limit; the same command goes on", file=sys.stderr)
            break
        expanded = [x for word in step for x in _plans(word)]
        if step[3] == "replay":
            most = left if "--profile" in step else min(left, options.unit_s)
            expanded += ["--limit-s", f"{most:.0f}"]
        begun = time.monotonic()
        failed += subprocess.run(expanded, check=False).returncode != 0
        print(f"{time.monotonic() - begun:.1f} s: {' '.join(step[2:6])} {step[-1]}", file=sys.stderr, flush=True)
        gather(options.out, names, options.copies)
    return 1 if failed else 0


def _plans(word: str) -> list[str]:
    """`--plan` and its glob as one `--plan` per file."""
    if word == "--plan":
        return []
    if not word.endswith("*.json"):
        return [word]
    found = sorted(Path(word).parent.glob("*.json"))
    return [x for path in found for x in ("--plan", str(path))]


if __name__ == "__main__":
    sys.exit(main())
