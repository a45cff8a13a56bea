"""Who gets how much: rates of kernels that run at one moment on the devices of one DRAM.

A kernel that runs alone has rate ONE. At rate r it uses r times its demand of multiprocessors (SM) and of DRAM
bandwidth. Rates are max-min fair: they rise together, a kernel stops where one of its resources is exhausted, the
others go on. Priority classes differ in one thing: SMs go to a more urgent class first, and a less urgent one gets
what that leaves. A DRAM knows no priorities.

1. Per device, class by class: the largest common rate that the SMs left allow is each kernel's limit.
2. Per DRAM: rates rise together, each to its limit at most, until the bandwidth is exhausted.
3. If it is, kernels that use this DRAM keep the rates found; SMs that they cannot use any more go to kernels
   that use none of it, by step 1.

With one class this is max-min fairness under both resources. Integers throughout: capacities are ONE * ONE,
levels are floored, so nothing is ever exceeded and less than the sum of the demands * 2^-20 is left over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tesserasim.sim.sharing import ONE, Sharing


class Load(NamedTuple):
    """What one running kernel demands."""

    device: int
    rank: int  # priority class, 0 the most urgent
    sm: int  # 1..ONE, of the device
    dram: int  # 0..ONE, of the DRAM


def rates(loads: Sequence[Load], sharing: Sharing) -> list[int]:
    """Rates (0..ONE) of the kernels that run on the devices of one DRAM, in the order given.

    A rate is 0 only where more urgent kernels leave no SM.
    """
    together: dict[int, int] = {}
    for x in loads:
        together[x.device] = together.get(x.device, 0) + 1
    sm = {d: ONE * (ONE if n == 1 else sharing.sm_efficiency) for d, n in together.items()}
    users = [k for k, x in enumerate(loads) if x.dram]
    dram = ONE * (ONE if len(users) < 2 else sharing.dram_efficiency)
    most = {d: ONE if n == 1 else sharing.corun_rate for d, n in together.items()}
    found = _sm_limits(loads, range(len(loads)), sm, most)
    if sum(found[k] * loads[k].dram for k in users) <= dram:
        return [found[k] for k in range(len(loads))]
    _fill_dram(loads, users, dram, found)
    for k in users:
        sm[loads[k].device] -= found[k] * loads[k].sm
    rest = [k for k, x in enumerate(loads) if not x.dram]
    found.update(_sm_limits(loads, rest, sm, most))
    return [found[k] for k in range(len(loads))]


def _sm_limits(
    loads: Sequence[Load], which: Iterable[int], capacity: dict[int, int], most: dict[int, int]
) -> dict[int, int]:
    """Step 1: kernel -> rate that the SMs allow; `capacity` per device, in units of 2^-40."""
    classes: dict[tuple[int, int], list[int]] = {}
    for k in which:
        classes.setdefault((loads[k].device, loads[k].rank), []).append(k)
    left = dict(capacity)
    found: dict[int, int] = {}
    for (device, _), members in sorted(classes.items()):
        demand = sum(loads[k].sm for k in members)
        level = min(most[device], left[device] // demand)
        left[device] -= level * demand
        found.update(dict.fromkeys(members, level))
    return found


def _fill_dram(loads: Sequence[Load], users: Sequence[int], capacity: int, found: dict[int, int]) -> None:
    """Step 2: lower the limits in `found` to a common level that the DRAM can carry."""
    demand = sum(loads[k].dram for k in users)
    by_limit = sorted(users, key=found.__getitem__)
    for at, k in enumerate(by_limit):
        if found[k] * demand > capacity:
            found.update(dict.fromkeys(by_limit[at:], capacity // demand))
            return
        capacity -= found[k] * loads[k].dram
        demand -= loads[k].dram
