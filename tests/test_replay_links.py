"""The fit of a link: against the line that made the numbers."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from hw.replay.links import SIZES, fit_link


@pytest.mark.quick
def test_a_line_is_found_and_what_is_none_shows_in_the_residual() -> None:
    link = fit_link("a", "b", SIZES, [3000 + n / 400 for n in SIZES])
    assert link.latency_ns == pytest.approx(3000) and link.gbs == pytest.approx(400) and link.worst < 1e-9
    bent = fit_link("a", "b", SIZES, [3000 + n / 400 + (5000 if n > 1 << 20 else 0) for n in SIZES])
    assert bent.worst > 0.05
