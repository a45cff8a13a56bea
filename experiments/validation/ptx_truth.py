"""The PTX analysis against kernels with established truth: a row per origin, what is unsound, what is coarse.

    python experiments/validation/ptx_truth.py

Compiles with nvcc, Triton and an installed package of Triton kernels where they are there, beside the texts that
are kept in tests/data/ptx. Exits 1 if an access of the truth is missing from an answer, or a bar is not reached.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import ptx_compilers as compilers  # noqa: E402
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
    return 0 if sound and len(distinct) >= 60 and exact >= 0.95 * plain and len(features) >= 20 else 1


if __name__ == "__main__":
    sys.exit(main())
