"""What co-running costs on this GPU, from measured pairs of single kernels: tesserasim/sim/sharing.json.

    python experiments/validation/calibrate_sharing.py experiments/validation/replay [--write]

Reads OUT/pairs/<model>/<unit>.jsonl and the profile of the first two devices that `replay_matrix.py` left in OUT; no
plan and no rate of one has a part in it. Prints how well each pair is explained; --write replaces the shipped
constants. The pairs of one model judge those fitted on the others (leave one model out), and that is what counts as
the error of the constants.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hw.journals import journal_lines
from hw.validate.bench import partition_sms, whole_gpu
from tesserasim.demands import achievable_gbs, sm_demand
from tesserasim.errors import InputError
from tesserasim.sim.calibrate import Calibration, Pair, Solo, calibrate, together_ns
from tesserasim.sim.sharing import ONE
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import read_trace
from tesserasim.writing import write_whole

SHIPPED = Path(__file__).resolve().parents[2] / "tesserasim/sim/sharing.json"


def solo(trace: Trace, kernels: Sequence[int], alone_ns: float) -> Solo:
    """What kernels that run one after the other in `alone_ns` demand together, by their times."""
    gpu = whole_gpu(trace)
    chosen = [trace.kernels[i] for i in kernels]
    ns = np.array([k.duration_ns for k in chosen], dtype=np.float64)
    sm = np.array([sm_demand(k, gpu, partition_sms(trace) or gpu.sms) for k in chosen], dtype=np.float64)
    nbytes = sum(k.read_bytes + k.write_bytes for k in chosen)
    return Solo(
        max(1, round(float(sm @ ns / ns.sum()))), round(ONE * nbytes / alone_ns / achievable_gbs(trace, gpu)), alone_ns
    )


def pair_of(row: Mapping[str, Any], traces: Sequence[Trace]) -> Pair:
    """A line of a pairs journal: times while both run, as the time that both take for equally many runs."""
    apart = row["where"] == "across"
    (alone_a, alone_b), (now_a, now_b) = row["alone_ns"], row["together_ns"]
    a = solo(traces[0], row["kernels"][0], alone_a)
    b = solo(traces[int(apart)], row["kernels"][1], alone_b)
    (first, _), (last, alone) = sorted(((now_a, alone_a), (now_b, alone_b)))
    return Pair(a, b, first + (1.0 - first / last) * alone, apart)


def read_pairs(out: Path) -> dict[str, list[Pair]]:
    """Model -> its measured pairs. InputError without any."""
    found: dict[str, list[Pair]] = {}
    devices = sorted(p.name for p in (out / "profile").glob("*") if p.is_dir())[:2]
    for path in sorted(out.glob("pairs/*/*.jsonl")):
        traces = [read_trace(out / "profile" / d / path.parent.name / f"{path.stem}.parquet") for d in devices]
        for number, row in journal_lines(path, "journal of pairs"):
            if row.get("kind") != "pair":
                continue
            try:
                found.setdefault(path.parent.name, []).append(pair_of(row, traces))
            except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError):
                raise InputError(f"{path}: line {number} is no pair of kernels") from None
    if not found:
        raise InputError(f"{out}: no pairs; python -m hw replay --profile --pairs measures them")
    return found


def errors(pairs: Sequence[Pair], found: Calibration) -> np.ndarray:
    return np.array([together_ns(p.a, p.b, found.constants, p.apart) / p.together_ns - 1.0 for p in pairs])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="folder of replay_matrix.py")
    parser.add_argument("--write", action="store_true", help="replace tesserasim/sim/sharing.json")
    options = parser.parse_args()
    try:
        pairs = read_pairs(options.out)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    everything = [p for own in pairs.values() for p in own]
    found = calibrate(everything)
    for model, own in pairs.items():
        rest = [p for m, others in pairs.items() if m != model for p in others]
        judged = errors(own, calibrate(rest)) if rest else np.array([np.nan])
        apart = np.array([p.apart for p in own])
        print(f"{model}: {len(own)} pairs ({apart.sum()} on two devices); |error| of constants from the other models: "
              f"median {100 * np.median(np.abs(judged)):.1f} %, worst {100 * np.abs(judged).max():.1f} %")  # fmt: skip
    source = f"{len(everything)} pairs of single kernels on two partitions of an H200 (experiments/validation)"
    entries = found.document(source)
    for name, entry in entries.items():
        print(f"{name}: {entry['value']:.4f} ({entry['source']})")
    print(f"undecided: {', '.join(found.undecided) or 'nothing'}; worst residual {100 * found.worst:+.1f} %")
    if options.write:
        shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))
        for name, entry in entries.items():
            shipped[name].update(entry)
        write_whole(SHIPPED, (json.dumps(shipped, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
