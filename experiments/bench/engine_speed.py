"""How fast the engines are, measured against SimPy itself in the same run.

    python experiments/bench/engine_speed.py [--repeats 5] [--kernels 300000] [--json]

The yardstick is raw SimPy: timeouts per second with 1,000 processes. The bar: the reference engine simulates at
least 0.4 kernels per raw timeout on a two-GPU plan with >= 100 switches per cohort, two lanes of different
priority, signed gaps (delays and shaves) and the tie rule on; nothing is merged. Then the fast engine on the
same plan and on plans where merging applies, and the reference on shared devices, for which there is no bar.
Measurements alternate, so that a slow phase of the machine meets both sides. Exit code 1 if the median ratio is
below the bar.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import replace

import simpy

from tesserasim.sim.engine import run
from tesserasim.sim.program import Channel, LaneProgram, Program, Send, StreamProgram
from tesserasim.sim.sharing import ONE

BAR = 0.4
GBPS_200 = 25_000_000_000  # bytes per second


def lane(
    name: str, rng: random.Random, kernels: int, switches: int, depth: int, priority: int = 0, devices: int = 2
) -> LaneProgram:
    """A cohort of `kernels` kernels that changes the device `switches` times, at random places."""
    cuts = set(rng.sample(range(1, kernels), switches)) if devices > 1 else set()
    streams = [StreamProgram(d) for d in range(devices)]
    at, tokens = 0, 0
    last = [-2] * devices
    for position in range(kernels):
        waits = None
        if position in cuts:
            nbytes = rng.randint(100_000, 400_000)
            streams[at].sends[-1] = (Send(at, nbytes, tokens),)
            waits, tokens, at = (tokens,), tokens + 1, 1 - at
        s = streams[at]
        duration = rng.randint(3_000, 60_000)
        gap = rng.randint(-1_500, 4_000)
        follows = last[at] == position - 1
        s.duration.append(duration)
        s.delay.append(max(gap, 0))
        s.shave.append(min(-gap, duration - 1) if gap < 0 and follows else 0)
        s.waits.append(waits)
        s.sends.append(None)
        s.order.append(position)
        last[at] = position
    return LaneProgram(name, 8, depth, tuple(streams), tokens, units=100, priority=priority)


def two_gpu_plan(switches: int = 120, kernels: int = 480, depth: int = 2, lanes: int = 2) -> Program:
    """Two H200-like devices, 200 Gb/s and 5 us between them."""
    rng = random.Random(7)
    channels = (Channel("0>1", 0, 1, GBPS_200, 5_000), Channel("1>0", 1, 0, GBPS_200, 5_000))
    made = tuple(lane(f"lane{i}", rng, kernels, switches, depth, priority=i) for i in range(lanes))
    return Program(("g0", "g1"), channels, made)


def one_gpu_plan(kernels: int = 100_000, depth: int = 1) -> Program:
    return Program(("g0",), (), (lane("single", random.Random(7), kernels, 0, depth, devices=1),))


def shared_plan(plan: Program) -> Program:
    """The plan on shared devices: demands from a quarter to all of the SMs and from none to all of the DRAM."""
    rng = random.Random(11)
    streams = [s for x in plan.lanes for s in x.streams]
    for s in streams:
        s.sm = [rng.choice((ONE // 4, ONE // 2, ONE)) for _ in s.duration]
        s.dram = [rng.choice((0, ONE // 4, ONE // 2, ONE)) for _ in s.duration]
    return replace(plan, device_model="shared")


def simpy_timeouts_per_s(events: int, processes: int = 1_000) -> float:
    """Raw SimPy: so many processes, each waiting for one timeout after the other."""
    env = simpy.Environment()
    rounds = events // processes

    def process(offset: int):
        for i in range(rounds):
            yield env.timeout(1 + (i * 7919 + offset * 104_729) % 1_000)

    for p in range(processes):
        env.process(process(p))
    begin = time.perf_counter()
    env.run()
    return rounds * processes / (time.perf_counter() - begin)


def kernels_per_s(program: Program, engine: str, kernels: int) -> float:
    """Kernels simulated per second by `engine`, for about `kernels` kernels."""
    per_cohort = sum(len(s.duration) for x in program.lanes for s in x.streams) / len(program.lanes)
    cohorts = max(2, int(kernels / per_cohort / len(program.lanes)))
    begin = time.perf_counter()
    result = run(program, engine=engine, cohorts=cohorts)
    return result.kernels / (time.perf_counter() - begin)


def measure(repeats: int, kernels: int) -> dict[str, list[float]]:
    """Alternate the yardstick and the engines; rates per second."""
    plan = two_gpu_plan()
    ten = 4_800  # ten steps of 480 kernels a cohort
    fast_plans = {
        "fast: the same plan": plan,
        "fast: 2 GPUs, 120 switches per 480, one lane, depth 2": two_gpu_plan(10 * 120, ten, 2, 1),
        "fast: 2 GPUs, 64 switches per 480, one lane, depth 4": two_gpu_plan(10 * 64, ten, 4, 1),
        "fast: 2 GPUs, 2 switches per 480, one lane, depth 2": two_gpu_plan(10 * 2, ten, 2, 1),
        "fast: 1 GPU, depth 4": one_gpu_plan(depth=4),
        "fast: 1 GPU, depth 1": one_gpu_plan(),
    }
    shared_plans = {
        "shared: the same plan": shared_plan(two_gpu_plan()),
        "shared: 1 GPU, depth 1": shared_plan(one_gpu_plan(10_000)),
        "shared: 1 GPU, depth 4": shared_plan(one_gpu_plan(10_000, depth=4)),
    }
    rates: dict[str, list[float]] = {"raw": [], "reference": []}
    for _ in range(repeats):
        rates["raw"].append(simpy_timeouts_per_s(kernels))
        rates["reference"].append(kernels_per_s(plan, "simpy", kernels))
        for name, other in fast_plans.items():
            rates.setdefault(name, []).append(kernels_per_s(other, "fast", 10 * kernels))
        for name, other in shared_plans.items():
            rates.setdefault(name, []).append(kernels_per_s(other, "simpy", kernels))
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=300_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rates = measure(args.repeats, args.kernels)
    ratios = [a / b for a, b in zip(rates["reference"], rates["raw"], strict=True)]
    ratio = statistics.median(ratios)
    if args.json:
        print(json.dumps({"ratio": ratio, "bar": BAR, "ratios": ratios, "per_s": rates}))
    else:
        print(f"raw SimPy timeouts/s, 1,000 processes: {statistics.median(rates.pop('raw')):12,.0f}")
        for name, values in rates.items():
            print(f"{name:55s} kernels/s: {statistics.median(values):12,.0f}")
        print(f"reference / raw: {' '.join(f'{r:.2f}' for r in ratios)}; median {ratio:.2f} (bar {BAR})")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
