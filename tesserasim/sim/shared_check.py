"""Invariants of a run on shared devices, verified from its slices, its logged rates and its program.

Cohorts, streams, links and slots are held to the same rules as on serial devices (invariants.py). What a device
does is verified from the rates themselves, never by finding them again: capacities, bottlenecks, work done.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import groupby, pairwise

from tesserasim.sim.components import components
from tesserasim.sim.invariants import _Check, _need
from tesserasim.sim.program import Program
from tesserasim.sim.result import SimResult, Slice
from tesserasim.sim.sharing import ONE

_Kernel = tuple[int, int, int, int]  # device, lane, cohort, index


def check_shared_run(program: Program, result: SimResult) -> None:
    """Verify every invariant; slices and rates must be in the result. Raises InvariantError."""
    if result.timeline is None or result.rates is None:
        raise ValueError("a check needs the slices and rates of the run")
    for lanes in components(program):
        _SharedCheck(program, result, lanes).all()


class _SharedCheck(_Check):
    def __init__(self, program: Program, result: SimResult, lanes: list[int]) -> None:
        super().__init__(program, result, lanes)
        self.steps: dict[_Kernel, list[tuple[int, int]]] = defaultdict(list)  # (from, rate)
        for x in sorted(result.rates or ()):
            if x.lane in lanes:
                self.steps[x.device, x.lane, x.cohort, x.kernel].append((x.at_ns, x.rate))

    def lasts(self, s: Slice, length: int) -> None:
        """3: a kernel ends in the nanosecond in which its rates have done its work, not before and not after."""
        steps = self.steps[s.device, s.lane, s.cohort, s.index]
        _need(bool(steps) and steps[0][0] == s.start_ns, 3, f"{s} has no rate from its start on")
        until = min(s.end_ns, self.end)
        _need(steps[-1][0] < until, 3, f"{s} changes its rate after its end")
        ends = [at for at, _ in steps[1:]] + [until]
        done = sum(rate * (end - at) for (at, rate), end in zip(steps, ends, strict=True))
        if s.end_ns <= self.end:
            _need(done - steps[-1][1] < length * ONE <= done, 3, f"{s} does {done} of {length * ONE}")
        else:
            _need(done < length * ONE, 3, f"{s} has done its work before {self.end}")

    def one_at_a_time(self) -> None:
        """4: a stream runs at most one kernel, a channel one transfer, and no resource is exceeded or left idle."""
        for group in (*self.kernels.values(), *self.on_channel.values()):
            for a, b in pairwise(group):
                _need(a.end_ns <= b.start_ns, 4, f"{b} overlaps {a}")
        for dram in {self.program.domain(d) for _, d in self.streams}:
            self._rates_of(dram)

    def _rates_of(self, dram: int) -> None:
        """Go through the moments at which something changes on the devices of one DRAM."""
        changes: list[tuple[int, _Kernel, int | None]] = []  # None: it has ended
        for device, group in self.on_device.items():
            if self.program.domain(device) == dram:
                for s in group:
                    kernel = (device, s.lane, s.cohort, s.index)
                    changes += [(at, kernel, rate) for at, rate in self.steps[kernel]]
                    changes.append((s.end_ns, kernel, None))
        now: dict[_Kernel, int] = {}
        changes.sort(key=lambda c: (c[0], c[2] is not None))
        for at, group_at in groupby(changes, key=lambda c: c[0]):
            if at >= self.end:
                return
            for _, kernel, rate in group_at:
                if rate is None:
                    del now[kernel]
                else:
                    now[kernel] = rate
            self._shares(at, now)

    def _shares(self, at: int, now: dict[_Kernel, int]) -> None:
        """4: SMs and DRAM are not exceeded; who runs below his limit has a resource with nothing left for him."""
        sharing = self.program.sharing
        on: dict[int, list[_Kernel]] = defaultdict(list)
        for k in now:
            on[k[0]].append(k)
        users = [k for k in now if self._demand(k)[1]]
        dram_left = ONE * (ONE if len(users) < 2 else sharing.dram_efficiency)
        dram_left -= sum(now[k] * self._demand(k)[1] for k in users)
        _need(dram_left >= 0, 4, f"DRAM exceeded at {at}")
        scarce = dram_left < sum(self._demand(k)[1] for k in users)
        for device, kernels in on.items():
            capacity = ONE * (ONE if len(kernels) == 1 else sharing.sm_efficiency)
            used = sum(now[k] * self._demand(k)[0] for k in kernels)
            _need(used <= capacity, 4, f"SMs of device {device} exceeded at {at}")
            limit = ONE if len(kernels) == 1 else sharing.corun_rate
            for k in kernels:
                _need(now[k] <= limit, 4, f"{k} runs at {now[k]} at {at}, above {limit}")
                if now[k] < limit and not (scarce and self._demand(k)[1]):
                    self._sm_bound(at, k, kernels, now, capacity)

    def _sm_bound(self, at: int, k: _Kernel, kernels: list[_Kernel], now: dict[_Kernel, int], capacity: int) -> None:
        """4: a kernel that only SMs can hold back: its class and those above it use them up, and nobody of its
        class runs faster."""
        mine = self.program.lanes[k[1]].priority
        above = [o for o in kernels if self.program.lanes[o[1]].priority <= mine]
        peers = [o for o in above if self.program.lanes[o[1]].priority == mine]
        # Flooring leaves less than the sum of the demands, once per step of `fluid.rates`.
        crumbs = 2 * sum(self._demand(o)[0] for o in above)
        left = capacity - sum(now[o] * self._demand(o)[0] for o in above)
        _need(left < crumbs, 4, f"{k} waits at {at} beside idle SMs")
        behind = max(now[o] for o in peers) - now[k]
        _need(behind * self._demand(k)[0] < crumbs, 4, f"{k} is slower at {at} than others of its class")

    def _demand(self, k: _Kernel) -> tuple[int, int]:
        stream = self.streams[k[1], k[0]]
        return stream.sm[k[3]], stream.dram[k[3]]

    def no_idle_device(self) -> None:
        """7: every head starts in the nanosecond in which it is ready."""
        for group in self.on_device.values():
            for s in group:
                _need(s.start_ns == self.ready(s), 7, f"{s}: was ready at {self.ready(s)}")
        for i, c in self.slot_of:
            for device in {d for lane, d in self.streams if lane == i}:
                for due, _, index in self._heads(i, c, device)[len(self.kernels.get((i, c, device), [])) :]:
                    _need(due >= self.end, 7, f"lane {i}, cohort {c}: kernel {index} on {device} was ready at {due}")

    def busy_periods(self, group: list[Slice]) -> list[Slice]:
        """The union of the slices: a device is busy while any kernel runs."""
        union: list[Slice] = []
        for s in group:
            if union and s.start_ns <= union[-1].end_ns:
                union[-1] = replace(union[-1], end_ns=max(union[-1].end_ns, s.end_ns))
            else:
                union.append(s)
        return union
