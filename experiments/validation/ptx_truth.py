"""The PTX analysis against kernels with established truth: a row per origin, what is unsound, what is coarse.

    python experiments/validation/ptx_truth.py

Compiles with nvcc, Triton and an installed package of Triton kernels where they are there, beside the texts that
are kept in tests/data/ptx. Then random launches of each kernel are run by an interpreter of PTX that shares nothing
with the package: what it sees must lie inside the answer, and the table says how tight the intervals of bytes are.
Exits 1 if an access of the truth or of a launch is missing from an answer, or a bar is not reached.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import ptx_compilers as compilers  # noqa: E402
import ptx_launches as launches  # noqa: E402
import ptx_truth as truth  # noqa: E402


def compiled_now() -> dict[str, list[truth.Verdict]]:
    rows = {}
    source = truth.DATA / "kernels.cu"
    if ptx := compilers.nvcc(source):
        rows["nvcc, compiled now"] = truth.verdicts(ptx, truth.truths(source.read_text()))
    rows["package, compiled now"] = [
        v for name, modes, ptx in compilers.package() for v in truth.verdicts(ptx, {name: truth.declared(name, modes)})
    ]
    return rows


def observed(seeds: int = 5) -> bool:
    """Print what launches show, a row per origin; whether all of it lies inside the answers."""
    rows: dict[str, list[launches.Sight]] = {}
    ran: dict[str, int] = {}
    skipped = []
    for kernel, seen in launches.runnable(launches.kernels(package=True), lambda _: iter(range(seeds))):
        if isinstance(seen, str):
            skipped.append(f"{kernel.name} ({seen})")
            continue
        ran[kernel.origin] = ran.get(kernel.origin, 0) + 1
        rows.setdefault(kernel.origin, []).extend(s for s in seen if s.name != "*")
    print(f"\n{seeds} random launches of each kernel; bytes seen / bytes said of each pointer and launch")
    print(f"{'origin':<24}{'kernels':>8}{'sights':>8}{'outside':>8}{'bounded':>8}{'extent':>8}{'bytes':>8}")
    for origin, found in rows.items():
        bounded = [s for s in found if s.bytes is not None and s.distinct]
        extents = [(s.seen[1] - s.seen[0]) / (s.bytes[1] - s.bytes[0]) for s in bounded if s.sound]  # type: ignore[index]
        shares = [s.distinct / (s.bytes[1] - s.bytes[0]) for s in bounded if s.sound]  # type: ignore[index]
        outside = sum(not s.sound for s in found)
        share, extent, part = (sum(x) / max(1, len(y)) for x, y in
                               (([1] * len(bounded), found), (extents, extents), (shares, shares)))  # fmt: skip
        print(f"{origin:<24}{ran[origin]:>8}{len(found):>8}{outside:>8}{share:>8.0%}{extent:>8.1%}{part:>8.1%}")
        for s in (s for s in found if not s.sound):
            print("   ", s)
    print("not run:", "; ".join(skipped))
    return all(s.sound for found in rows.values() for s in found) and sum(ran.values()) >= 60


def main() -> int:
    rows = {**truth.committed(), **compiled_now()}
    print(f"{'origin':<24}{'kernels':>8}{'pointers':>9}{'exact':>6}{'unsound':>8}")
    for origin, found in rows.items():
        unsound = [u for v in found for u in v.unsound]
        numbers = (len(found), sum(v.plain for v in found), sum(v.exact for v in found), len(unsound))
        print(f"{origin:<24}{numbers[0]:>8}{numbers[1]:>9}{numbers[2]:>6}{numbers[3]:>8}")
        for line in unsound + [c for v in found for c in v.coarse]:
            print("   ", line)
    distinct = {v.name: v for found in rows.values() for v in found}
    plain, exact = (sum(getattr(v, k) for v in distinct.values()) for k in ("plain", "exact"))
    features = sorted(truth.features())
    print(f"{len(distinct)} kernels, {exact} of {plain} plain pointers exact ({100 * exact / plain:.1f} %)")
    print(f"{len(features)} features: {', '.join(features)}")
    sound = not any(v.unsound for found in rows.values() for v in found)
    sound = observed() and sound
    return 0 if sound and len(distinct) >= 60 and exact >= 0.95 * plain and len(features) >= 20 else 1


if __name__ == "__main__":
    sys.exit(main())
