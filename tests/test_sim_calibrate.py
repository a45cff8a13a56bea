"""Constants of sharing, found again from pairs that the model made; and what a wrong model leaves."""

from __future__ import annotations

import dataclasses
import random

import pytest
from shared_cases import lane, shared, stream

from tesserasim.errors import InputError
from tesserasim.sim.calibrate import Pair, Solo, calibrate, together_ns
from tesserasim.sim.engine import run
from tesserasim.sim.sharing import ONE, Sharing, sharing_of

pytestmark = pytest.mark.quick
TRUE = Sharing(round(0.9 * ONE), round(0.8 * ONE), round(0.95 * ONE))


def engine_together(a, b, sharing, runs=200):
    """Time together by the engine: each kernel `runs` times on a stream, both streams until the last end."""
    lanes = (lane(n, stream(0, [(x.ns, x.sm / ONE, x.dram / ONE)] * runs)) for n, x in (("a", a), ("b", b)))
    result = run(shared(*lanes, sharing=sharing), cohorts=1, timeline=True)
    own = [s for s in result.timeline if s.cohort == 0]
    # a lane goes on with its next cohort until the other is done; so the slower one is counted from rates
    ends = [max(s.end_ns for s in own if s.lane == i) for i in (0, 1)]
    first, last = min(ends), max(ends)
    slow = (a, b)[ends.index(last)]
    left = slow.ns * runs * (1 - first / last)
    return (first + left) / runs


def pairs_of(rng, sharing, count=60, noise=0.0):
    made = []
    for _ in range(count):
        a, b = (
            Solo(*rng.choice([(ONE, ONE // 8), (ONE // 4, ONE), (ONE // 8, ONE // 8), (ONE // 2, ONE // 2)]), ns)
            for ns in (rng.randint(3_000, 60_000), rng.randint(3_000, 60_000))
        )
        made.append(Pair(a, b, engine_together(a, b, sharing, 20) * (1 + rng.gauss(0, noise))))
    return made


def test_constants_are_found_again():
    """From 60 pairs that the engine ran, with 1 % noise: each within 1.5 %, and the residual is the noise.

    Mutation that fails here: start `first` from the slower kernel in `together_ns`.
    """
    found = calibrate(pairs_of(random.Random(5), TRUE, noise=0.01))
    for name in ("sm_efficiency", "dram_efficiency", "corun_rate"):
        assert getattr(found.constants, name) / getattr(TRUE, name) == pytest.approx(1.0, abs=0.015), name
    assert found.constants.dram_byte_share == ONE
    assert 0.005 < found.rms < 0.015 and found.undecided == ()


def test_without_noise_nothing_is_left():
    found = calibrate(pairs_of(random.Random(6), TRUE))
    assert found.rms < 1e-3 and abs(found.worst) < 5e-3


def test_a_wrong_model_is_reported():
    """Times that no constant explains (small kernels collide at random, large ones do not): the residual says so.

    Mutation that fails here: report the residuals of the constants 1, or of the fit's best pair.
    """
    rng = random.Random(7)
    wrong = [
        dataclasses.replace(p, together_ns=p.together_ns * rng.choice([1.0, 1.6]))
        for p in pairs_of(rng, TRUE, noise=0.0)
    ]
    found = calibrate(wrong)
    assert found.rms > 0.1 and abs(found.worst) >= found.rms
    honest = [together_ns(p.a, p.b, found.constants) / p.together_ns - 1 for p in wrong]
    assert found.residuals == pytest.approx(honest) and max(map(abs, honest)) == abs(found.worst)


def test_what_the_pairs_do_not_show_stays():
    """Kernels that fit beside each other say nothing about what sharing a full resource costs."""
    small = Solo(ONE // 8, ONE // 8, 10_000)
    found = calibrate([Pair(small, small, 11_000), Pair(small, dataclasses.replace(small, ns=20_000), 21_000)])
    assert found.undecided == ("sm_efficiency", "dram")
    assert found.constants.sm_efficiency == found.constants.dram_efficiency == ONE
    assert found.constants.corun_rate < ONE
    assert list(found.document("two pairs")) == ["corun_rate"]


def test_the_document_can_be_read_back():
    found = calibrate(pairs_of(random.Random(8), TRUE, count=20))
    assert set(found.document("pairs of a test")) == {f.name for f in dataclasses.fields(Sharing)}
    assert sharing_of(found.document("pairs of a test")) == found.constants


def test_on_two_devices_the_dram_alone_is_shared():
    """Two kernels that need 9/8 of a DRAM each by their bytes, of which 2/3 reach it: 3/4 each, 3/2 times as long."""
    big, small = Solo(ONE, 9 * ONE // 8, 3000), Solo(ONE, ONE // 8, 3000)
    sharing = Sharing(ONE, ONE, ONE, round(ONE * 2 / 3))
    assert together_ns(big, big, sharing, apart=True) == pytest.approx(4500, rel=1e-5)
    assert together_ns(big, small, sharing, apart=True) == pytest.approx(3000, rel=1e-5)
    assert together_ns(big, big, sharing) == pytest.approx(6000, rel=1e-5)  # on one device the SMs, too
    cases = ((big, big, True), (big, small, True), (big, small, False), (small, small, False))
    pairs = [Pair(a, b, together_ns(a, b, sharing, apart), apart) for a, b, apart in cases]
    found = calibrate(pairs)
    assert found.constants.dram_byte_share / ONE == pytest.approx(2 / 3, abs=1e-3) and found.rms < 1e-4
    assert found.constants.dram_efficiency == ONE


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_pairs_that_make_no_sense_are_refused(bad):
    one = Solo(ONE, ONE, 1000)
    with pytest.raises(InputError, match="pair 1"):
        calibrate([Pair(one, one, 2000), Pair(one, one, bad)])
    with pytest.raises(InputError, match="no pairs"):
        calibrate([])
