"""The PTX analysis against established truth: nothing missing from an answer, nearly every mode exact."""

from __future__ import annotations

import ptx_compilers as compilers
import ptx_truth as truth
import pytest


def all_of(found: list[truth.Verdict], least: int) -> None:
    assert len(found) >= least
    assert not [u for v in found for u in v.unsound]
    plain = sum(v.plain for v in found)
    assert sum(v.exact for v in found) >= 0.95 * plain, [c for v in found for c in v.coarse]


@pytest.mark.quick
def test_kernels_with_truth_that_are_kept() -> None:
    """75 kernels, 20 features, none unsound, 95 % exact.

    Fails if `selp` passes on only its first operand, if a store marks R, or if marked pointers are no bases.
    """
    found = truth.committed()
    assert sum(map(len, found.values())) >= 75 and len(truth.features()) >= 20
    for origin, least in (("by hand", 20), ("nvcc", 15), ("Triton", 15)):
        all_of(found[origin], least)
    every = [v for part in found.values() for v in part]
    all_of(every, 75)


def test_kernels_compiled_by_nvcc_now() -> None:
    source = truth.DATA / "kernels.cu"
    ptx = compilers.nvcc(source)
    if ptx is None:
        pytest.skip("no nvcc")
    all_of(truth.verdicts(ptx, truth.truths(source.read_text())), 15)


def test_kernels_of_an_installed_package_compiled_now() -> None:
    """Fails if a load leaves no access."""
    found = compilers.package()
    if not found:
        pytest.skip("no Triton or no package of Triton kernels")
    all_of([v for n, modes, ptx in found for v in truth.verdicts(ptx, {n: truth.declared(n, modes)})], 10)
