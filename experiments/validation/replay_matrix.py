"""Replay units of all five models on two partitions of one GPU (or two GPUs): measure, plan, run, compare.

    python experiments/validation/replay_matrix.py --out replay [--sms 64,68] [--limit-s 500] [--only llama-3-8b]

Hops first. Then per unit its kernel times on every device and how its kernels slow each other down, the plans that
policies make of these times, and the replay of those plans, of placements apart by attention and FFN, and of random
ones: checks, mutations, depths. Each step is a process of its own; what is there is not measured again, and no step
begins after the limit. Copy OUT into `experiments/validation/replay` to keep it; OUT/runs.toml is what
`python -m hw validate` reads.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
UNITS = [
    ("llama-3-8b", "decode-b8-c512"), ("gpt-oss-20b", "decode-b8-c512"), ("sd3.5-medium", "denoise-b1"),
    ("mamba-codestral-7b", "decode-b8-c512"), ("qwen2.5-vl-7b", "decode-b8-c512"), ("llama-3-8b", "prefill-b1-t512"),
    ("gpt-oss-20b", "prefill-b1-t256"), ("mamba-codestral-7b", "prefill-b1-t256"), ("qwen2.5-vl-7b", "prefill-b1-t256"),
]  # fmt: skip
DEPTHS = "1,2,4"


def commands(
    out: Path, model: str, unit: str, sms: str, names: Sequence[str], random: int, mutations: int
) -> list[list[str]]:
    """Profile, plan and replay of one unit."""
    hw = [sys.executable, "-m", "hw"]
    devices = ["--sms", sms] if sms else []
    common = ["--model", model, "--units", unit, *devices]
    plans = out / "plans" / model
    # Globs stay globs: the plans do not exist yet.
    return [
        [*hw, "replay", "--profile", "--pairs", *common, "--out", str(out)],
        [*hw, "validate", str(out / "one" / model / f"{unit}.toml"), "--plans", str(plans), "--depth", DEPTHS],
        [*hw, "replay", *common, "--random", str(random), "--mutations", str(mutations), "--depth", DEPTHS,
         "--out", str(out), "--plan", f"{plans}/{unit}/*.json"],
    ]  # fmt: skip


def toml(model: str, unit: str, names: Sequence[str], up: str) -> str:
    """A [[unit]] of a runs file that lies `up` folders above OUT's."""
    lines = ["[[unit]]", f'journal = "{up}{model}/{unit}.jsonl"', f'links = "{up}links.jsonl"']
    if (HERE.parents[1] / "traces/launch-paused.json").exists():
        lines.append(f'launch = "{up}launch-paused.json"')
    lines += ["[unit.traces]", *(f'{n} = "{up}profile/{n}/{model}/{unit}.parquet"' for n in names)]
    return "\n".join(lines) + "\n"


def prepare(out: Path, names: Sequence[str], units: Sequence[tuple[str, str]]) -> None:
    """Runs files: one per unit for planning, and one over all units that have been replayed."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "split.json", out / "split.json")
    figures = HERE.parents[1] / "traces/launch-paused.json"
    if figures.exists():
        shutil.copy(figures, out / "launch-paused.json")
    for model, unit in units:
        path = out / "one" / model / f"{unit}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('split = "../../split.json"\n' + toml(model, unit, names, "../../"), "utf-8")


def gather(out: Path, names: Sequence[str], units: Sequence[tuple[str, str]]) -> None:
    done = [
        (m, u) for m, u in units
        if (out / m / f"{u}.jsonl").exists() and all((out / "profile" / n / m / f"{u}.parquet").exists() for n in names)
    ]  # fmt: skip
    text = 'split = "split.json"\n' + "".join("\n" + toml(m, u, names, "") for m, u in done)
    (out / "runs.toml").write_text(text, "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sms", default="64,68", help="partitions of GPU 0; '' takes two GPUs")
    parser.add_argument("--limit-s", type=float, default=500.0, help="start no step after this")
    parser.add_argument("--only", default="", help="one model")
    parser.add_argument("--random", type=int, default=12)
    parser.add_argument("--mutations", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="print the steps")
    options = parser.parse_args()
    started = time.monotonic()
    names = ["a", "b"] if options.sms else ["gpu0", "gpu1"]
    units = [u for u in UNITS if options.only in ("", u[0])]
    devices = ["--sms", options.sms] if options.sms else []
    steps = [[sys.executable, "-m", "hw", "replay", "--links", "--model", units[0][0], *devices, "--out",
              str(options.out)]]  # fmt: skip
    for model, unit in units:
        steps += commands(options.out, model, unit, options.sms, names, options.random, options.mutations)
    if options.dry_run:
        print("\n".join(" ".join(s) for s in steps))
        return 0
    prepare(options.out, names, units)
    failed = 0
    for step in steps:
        left = options.limit_s - (time.monotonic() - started)
        if left < 5:
            print("stopped at the limit; the same command goes on", file=sys.stderr)
            break
        expanded = [x for word in step for x in _plans(word)]
        if step[3] == "replay":
            expanded += ["--limit-s", f"{left:.0f}"]
        failed += subprocess.run(expanded, check=False).returncode != 0
        gather(options.out, names, units)
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
