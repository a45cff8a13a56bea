"""Programs of shared devices for tests: by hand, at random, and a simulator that steps through them."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st
from test_sim_programs import programs

from tesserasim.sim.program import SHARED, LaneProgram, Program, StreamProgram
from tesserasim.sim.sharing import ONE, Sharing


def units(share):
    """A share of a resource in units of 2^-20."""
    return round(share * ONE)


def stream(device, kernels, delay=None, shave=None):
    """A stream of (duration, SM demand, DRAM demand) with demands as shares."""
    n = len(kernels)
    return StreamProgram(
        device, [k[0] for k in kernels], list(delay or [0] * n), list(shave or [0] * n), [None] * n, [None] * n,
        list(range(n)), None, [units(k[1]) for k in kernels], [units(k[2]) for k in kernels],
    )  # fmt: skip


def lane(name, *streams, depth=1, priority=0, stagger=0):
    return LaneProgram(name, 1, depth, streams, 0, 1, priority, stagger)


def shared(*lanes, devices=1, domains=(), sharing=None):
    names = tuple(f"g{d}" for d in range(devices))
    return Program(names, (), lanes, device_model=SHARED, domains=domains, sharing=sharing or Sharing())


demands = st.one_of(
    st.sampled_from([ONE, ONE // 2, ONE // 4, 3 * ONE // 4, ONE // 3]), st.integers(1, ONE)
)  # fmt: skip


@st.composite
def shared_programs(draw, max_kernels=8, one_lane=False, constants=True):
    """Random programs with demands, some devices on one DRAM, and constants below 1."""
    program = draw(programs(max_kernels))
    lanes = program.lanes
    if one_lane:
        lanes = (dataclasses.replace(lanes[0], depth=1),)
    for one in lanes:
        for s in one.streams:
            s.sm = [draw(demands) for _ in s.duration]
            s.dram = [draw(st.one_of(st.just(0), demands)) for _ in s.duration]
    apart = draw(st.booleans())
    domains = () if apart else tuple(draw(st.integers(0, 1)) for _ in program.devices)
    value = st.sampled_from([ONE, ONE, 9 * ONE // 10, 2 * ONE // 3])
    sharing = Sharing(draw(value), draw(value), draw(value)) if constants else Sharing()
    return dataclasses.replace(program, lanes=lanes, device_model=SHARED, domains=domains, sharing=sharing)


def serial_of(program):
    return dataclasses.replace(program, device_model="serial")


def bisect(holds, high):
    """The largest level in [0, high] that holds."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def naive_rates(kernels, sharing):
    """Rates by trial: `kernels` are dicts of device, rank, sm, dram; the answer goes into their `rate`.

    Levels are found by bisection on "nothing is exceeded", not by division.
    """
    def limit(k):
        return ONE if sum(x["device"] == k["device"] for x in kernels) == 1 else sharing.corun_rate

    def sm_fits(device):
        group = [k for k in kernels if k["device"] == device]
        return sum(k["rate"] * k["sm"] for k in group) <= ONE * (ONE if len(group) == 1 else sharing.sm_efficiency)

    def try_sm(group, device, level):
        for k in group:
            k["rate"] = level
        return sm_fits(device)

    def by_classes(free):
        for device in {k["device"] for k in free}:
            for rank in sorted({k["rank"] for k in free if k["device"] == device}):
                group = [k for k in free if (k["device"], k["rank"]) == (device, rank)]
                level = bisect(lambda x, g=group, d=device: try_sm(g, d, x), limit(group[0]))
                try_sm(group, device, level)

    for k in kernels:
        k["rate"] = 0
    by_classes(kernels)
    users = [k for k in kernels if k["dram"]]
    allowed = [k["rate"] for k in users]
    capacity = ONE * (ONE if len(users) < 2 else sharing.dram_efficiency)

    def dram_fits(level):
        return sum(min(level, a) * k["dram"] for k, a in zip(users, allowed, strict=True)) <= capacity

    if users and not dram_fits(ONE):
        level = bisect(dram_fits, ONE)
        for k, a in zip(users, allowed, strict=True):
            k["rate"] = min(level, a)
        rest = [k for k in kernels if not k["dram"]]
        for k in rest:
            k["rate"] = 0
        by_classes(rest)


def step_shared(program, lanes, goals):
    """Completion times per lane and busy ns per device, one nanosecond at a time: naive on purpose."""
    done, entered, busy = {i: [] for i in lanes}, 0, {}
    live, arrivals, queues, carrying = [], [], {k: [] for k in range(len(program.channels))}, {}
    running = []
    slots = [(i, slot) for i in lanes for slot in range(program.lanes[i].depth)]
    free, t = [], 0
    while True:
        changed = True
        while changed:
            changed = False
            for k in list(carrying):
                if carrying[k][0] == t:
                    _, cohort, send = carrying.pop(k)
                    cohort["sending"] -= 1
                    arrivals.append((t + program.channels[k].latency_ns, cohort, send.token))
                    changed = True
            ended = [x for x in running if x["done"] >= x["work"]]
            for x in sorted(ended, key=lambda x: (x["cohort"]["rank"], x["s"].order[x["i"]])):
                running.remove(x)
                cohort, s, d = x["cohort"], x["s"], x["device"]
                for send in s.sends[x["i"]] or ():
                    queues[send.channel].append((cohort, send))
                    cohort["sending"] += 1
                cohort["at"][d] += 1
                cohort["end"][d] = t
                cohort["busy"].discard(d)
                if all(cohort["at"][y.device] == len(y.duration) for y in cohort["streams"]):
                    done[cohort["lane"]].append(t)
                changed = True
            for k, queue in queues.items():
                if queue and k not in carrying:
                    cohort, send = queue.pop(0)
                    c = program.channels[k]
                    carrying[k] = (t + c.setup_ns - (-send.nbytes * 10**9 // c.bytes_per_s), cohort, send)
                    changed = True
        for a in [a for a in arrivals if a[0] == t]:
            a[1]["arrived"].add(a[2])
        arrivals = [a for a in arrivals if a[0] > t]
        if all(len(done[i]) >= goals[i] for i in lanes):
            return done, busy
        for cohort in list(live):
            if not cohort["sending"] and all(cohort["at"][y.device] == len(y.duration) for y in cohort["streams"]):
                live.remove(cohort)
                free.append((cohort["lane"], cohort["slot"]))
        free += [(i, slot) for i, slot in slots if slot * program.lanes[i].stagger_ns == t]
        slots = [(i, slot) for i, slot in slots if slot * program.lanes[i].stagger_ns > t]
        for i, slot in sorted(free):
            at = {s.device: 0 for s in program.lanes[i].streams}
            live.append(
                {"lane": i, "slot": slot, "rank": entered, "streams": program.lanes[i].streams, "at": at,
                 "end": dict.fromkeys(at, t), "sending": 0, "arrived": set(), "busy": set()}
            )  # fmt: skip
            entered += 1
        free = []
        for cohort in live:
            for s in cohort["streams"]:
                d, i = s.device, cohort["at"][s.device]
                if d in cohort["busy"] or i == len(s.duration) or cohort["end"][d] + s.delay[i] > t:
                    continue
                if set(s.waits[i] or ()) <= cohort["arrived"]:
                    length = s.duration[i] - (s.shave[i] if i and cohort["end"][d] == t else 0)
                    cohort["busy"].add(d)
                    running.append({
                        "cohort": cohort, "s": s, "i": i, "device": d, "sm": s.sm[i], "dram": s.dram[i],
                        "rank": program.lanes[cohort["lane"]].priority, "work": length * ONE, "done": 0,
                    })  # fmt: skip
        for dram in {program.domain(x["device"]) for x in running}:
            naive_rates([x for x in running if program.domain(x["device"]) == dram], program.sharing)
        for x in running:
            x["done"] += x["rate"]
        for d in {x["device"] for x in running}:
            busy[d] = busy.get(d, 0) + 1
        t += 1
