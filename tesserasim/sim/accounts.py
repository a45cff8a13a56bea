"""From the starts of kernels to a result: completions, use of devices and links, slices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tesserasim.sim.flows import Cohort, Device, Flow, Link
from tesserasim.sim.program import Program
from tesserasim.sim.result import SimResult, Slice


@dataclass(slots=True)
class Run:
    """What the fast engine has found when it stops. Clocks differ: part of it lies after `end`."""

    program: Program
    cohorts: list[Cohort]
    devices: dict[int, Device]
    links: dict[int, Link]
    completions: dict[int, list[int]]  # per lane, sorted
    end: int


def account(run: Run, result: SimResult) -> None:
    """Fill the result in; everything is clipped to the end of the run."""
    numbers = _lanes(run, result)
    lanes = [result.lanes[i] for i in run.completions]
    if any(len(lane.completion_ns) < lane.goal for lane in lanes):
        return  # given up: the caller says so
    window_start = max(lane.window_start_ns for lane in lanes)
    window = run.end - window_start
    for d, device in run.devices.items():
        out = result.devices[d]
        out.span_ns, out.window_ns = run.end, window
        for flow in device.past + [f for f in device.flows if not f.done]:
            starts, ends = kernel_times(flow)
            out.busy_ns += _inside(starts, ends, 0, run.end)
            out.window_busy_ns += _inside(starts, ends, window_start, run.end)
            out.kernels += int(np.count_nonzero(ends <= run.end))
            if result.timeline is not None:
                result.timeline.extend(_kernel_slices(flow, numbers[id(flow.cohort)], starts, ends, run.end))
    for k, link in run.links.items():
        use = result.channels[k]
        use.span_ns, use.window_ns = run.end, window
        ends = np.array(link.ends, dtype=np.int64)
        begins = ends - np.array([x.occupation_ns for x in link.sent], dtype=np.int64)
        use.busy_ns = _inside(begins, ends, 0, run.end)
        use.window_busy_ns = _inside(begins, ends, window_start, run.end)
        use.transfers = int(np.count_nonzero(ends <= run.end))
        use.nbytes = sum(x.nbytes for x in link.sent[: use.transfers])  # first in, first out: ends never decrease
        if result.timeline is not None:
            result.timeline.extend(_transfer_slices(k, link, numbers, run.end))


def kernel_times(flow: Flow) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of the kernels that a flow has started; ~start marks a shaved one."""
    parts = [*flow.parts, np.array(flow.starts, dtype=np.int64)]
    marked = np.concatenate(parts) if len(parts) > 1 else parts[0]
    n = len(marked)
    shaved = marked < 0
    starts = np.where(shaved, ~marked, marked)
    code = flow.code
    ends = starts + code.duration_array[:n] - np.where(shaved, code.shave_array[:n], 0)
    return starts, ends


def _lanes(run: Run, result: SimResult) -> dict[int, int]:
    """Entries and completions per lane, in order; the number of each cohort in its lane, by id."""
    numbers: dict[int, int] = {}
    for index in run.completions:
        lane = result.lanes[index]
        cohorts = sorted((c for c in run.cohorts if c.lane.index == index), key=lambda c: (c.entry, c.slot))
        numbers.update({id(c): number for number, c in enumerate(cohorts)})
        lane.entry_ns.extend(c.entry for c in cohorts if c.entry < run.end)
        done = sorted((c.last_end, number) for number, c in enumerate(cohorts) if not c.left and c.last_end <= run.end)
        lane.completion_ns.extend(at for at, _ in done)
        lane.cohorts.extend(number for _, number in done)
    return numbers


def _inside(starts: np.ndarray, ends: np.ndarray, low: int, high: int) -> int:
    """Total length of the intervals inside [low, high]."""
    return int((np.clip(ends, low, high) - np.clip(starts, low, high)).sum())


def _kernel_slices(flow: Flow, number: int, starts: np.ndarray, ends: np.ndarray, end: int) -> list[Slice]:
    c, p = flow.cohort, flow.code.program
    return [
        Slice(
            a, b, "kernel", p.device, c.lane.index, c.slot, number, p.device, i, p.order[i],
            label=p.labels[i] if p.labels else "",
        )
        for i, (a, b) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
        if a < end
    ]  # fmt: skip


def _transfer_slices(k: int, link: Link, numbers: dict[int, int], end: int) -> list[Slice]:
    slices = []
    for b, x, (flow, i) in zip(link.ends, link.sent, link.log, strict=True):
        c, p = flow.cohort, flow.code.program
        if b - x.occupation_ns < end:
            label = p.labels[i] if p.labels else ""
            one = Slice(
                b - x.occupation_ns, b, "transfer", k, c.lane.index, c.slot, numbers[id(c)], p.device, i,
                p.order[i], x.token, x.nbytes, b + x.latency_ns, label,
            )  # fmt: skip
            slices.append(one)
    return slices
