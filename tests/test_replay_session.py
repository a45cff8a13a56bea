"""What a session does before it touches a GPU: placements."""

from __future__ import annotations

import itertools
import random

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from hw.errors import HardwareError
from hw.replay.session import random_devices, workspace_pairs
from tesserasim.trace.model import Access, Buffer, Kernel, Trace, TraceMeta


@pytest.mark.quick
@pytest.mark.parametrize("switches", [1, 5, 39])
def test_random_placements_switch_as_often_as_asked(switches: int) -> None:
    sites = [f"m/s{i // 2}#0" for i in range(80)]  # two kernels a site
    placed = random_devices(sites, ["a", "b", "c"], switches, random.Random(1))
    order = [placed[s] for s in dict.fromkeys(sites)]
    assert sum(x != y for x, y in itertools.pairwise(order)) == switches
    with pytest.raises(HardwareError, match="40 switches over 40 sites"):
        random_devices(sites, ["a", "b"], 40, random.Random(1))


@pytest.mark.quick
def test_sites_that_hand_a_workspace_on() -> None:
    def touch(mode: str) -> Access:
        return Access(0, mode, 0, 64, "superset", False, "library")

    trace = Trace(
        TraceMeta(origin="synthetic", model="toy", unit={"name": "u"}, gpu=""),
        buffers=(Buffer(0, "w", 64, "workspace", 0),),
        kernels=(
            Kernel(0, "k", "m/gemm#0", accesses=(touch("W"),)), Kernel(1, "k", "m/gemm#0", accesses=(touch("R"),)),
            Kernel(2, "k", "m/other#0", accesses=(touch("R"),)), Kernel(3, "k", "m/last#0"),
        ),
    )  # fmt: skip
    assert workspace_pairs(trace) == [("m/gemm#0", "m/other#0")]
