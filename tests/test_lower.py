"""Lowered programs against a replay that knows no values, templates or cursors: only who holds which byte."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_cases import ScaledCosts, handmade, image_like, random_plan, small_cluster, small_mixes

from tesserasim.cluster.model import Cluster
from tesserasim.deps.graph import CARRIED
from tesserasim.errors import InputError
from tesserasim.lower import lower
from tesserasim.plans import Lane, Plan
from tesserasim.sim.engine import run
from tesserasim.sim.program import Program
from tesserasim.sim.validate import check_program
from tesserasim.trace.mix import Mix, with_lengths
from tesserasim.trace.model import Access, Buffer, Trace
from tesserasim.trace.synthetic import DecoderShape, synthetic_mix
from tesserasim.workload import Workload, build_workload

pytestmark = pytest.mark.quick

COSTS = ScaledCosts()


def plan_of(assignment: dict[str, dict[str, str]], batch: int = 1, depth: int = 1) -> Plan:
    return Plan("m", "c", "test", (Lane("only", batch, depth, assignment),))


def on_one(mix: Mix, device: str, batch: int) -> Plan:
    return plan_of({unit: {"*": device} for unit in mix.units}, batch)


Moves = dict[tuple[int, int], int]  # (order of the writing kernel, order of the waiting kernel) -> bytes


def naive_moves(mix: Mix, lane: Lane) -> Moves:
    """Who sends what for whom, byte by byte: every device's copy of every byte, and every write to state."""
    moves: Moves = {}
    logs: dict[str, list[dict]] = {}
    order = 0
    for instance in mix.cohort(lane.batch):
        for _ in range(instance.count):
            whole = instance.batch >= lane.batch
            own: dict[str, list[dict]] = logs if whole else {}
            trace = mix.traces[instance.unit][0]
            order = _naive_launch(trace, lane, order, own, moves)
            if not whole:
                for name, versions in own.items():
                    logs.setdefault(name, []).extend(versions)
    return moves


def _naive_launch(trace: Trace, lane: Lane, order: int, logs: dict[str, list[dict]], moves: Moves) -> int:
    bytes_at: dict[tuple[int, int], dict] = {}
    for k in trace.kernels:
        here = lane.device_of(trace.unit, k.site)
        for a in k.accesses:
            b = trace.buffers[a.buffer]
            span = range(b.nbytes) if a.extent == "unknown" else range(a.offset, a.offset + a.nbytes)
            if b.role in CARRIED:
                if a.mode != "W" or not (a.covers or a.extent == "exact"):
                    needed = logs.get(b.name, [])
                else:
                    needed = []
            elif b.role == "weight" or (a.mode == "W" and (a.covers or b.role == "workspace")):
                needed = []
            else:
                needed = [bytes_at[b.id, i] for i in span if (b.id, i) in bytes_at]
            for version in needed:
                if here not in version["held"]:
                    version["held"].add(here)
                    moves[version["order"], order] = moves.get((version["order"], order), 0) + version["nbytes"]
        for a in k.accesses:
            b = trace.buffers[a.buffer]
            span = range(b.nbytes) if a.extent == "unknown" else range(a.offset, a.offset + a.nbytes)
            if a.mode == "R" or b.role == "weight":
                continue
            if b.role in CARRIED:
                if a.covers and span == range(b.nbytes):
                    logs[b.name] = []
                if len(span):
                    logs.setdefault(b.name, []).append({"order": order, "held": {here}, "nbytes": len(span)})
            else:
                for i in span:
                    bytes_at[b.id, i] = {"order": order, "held": {here}, "nbytes": 1}
        order += 1
    return order


def program_moves(program: Program) -> Moves:
    lane = program.lanes[0]
    sender = {x.token: (s.order[i], x.nbytes) for s in lane.streams for i, xs in enumerate(s.sends) for x in xs or ()}
    waiter = {t: s.order[i] for s in lane.streams for i, ts in enumerate(s.waits) for t in ts or ()}
    assert sorted(sender) == sorted(waiter) == list(range(lane.tokens))
    moves: Moves = {}
    for token, (order, nbytes) in sender.items():
        moves[order, waiter[token]] = moves.get((order, waiter[token]), 0) + nbytes
    return moves


def channel_totals(program: Program) -> dict[tuple[str, str], tuple[int, int]]:
    """(from, to) -> (bytes, transfers) per cohort."""
    total: dict[tuple[str, str], tuple[int, int]] = {}
    for s in program.lanes[0].streams:
        for x in (x for xs in s.sends for x in xs or ()):
            c = program.channels[x.channel]
            key = (program.devices[c.src], program.devices[c.dst])
            nbytes, count = total.get(key, (0, 0))
            total[key] = (nbytes + x.nbytes, count + 1)
    return total


def closed_form(w: Workload, lane: Lane) -> dict[tuple[str, str], tuple[int, int]]:
    total: dict[tuple[str, str], tuple[int, int]] = {}
    at = [lane.device_of(s.unit, s.name) for s in w.sites]
    for f in w.flows:
        for there in {at[r] for r in f.readers} - {at[f.writer]}:
            nbytes, count = total.get((at[f.writer], there), (0, 0))
            total[at[f.writer], there] = (nbytes + int(f.nbytes), count + int(f.count))
    return total


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_transfers_equal_a_byte_by_byte_replay(data: st.DataObject) -> None:
    """Every byte goes once to each device that reads it, hung on its writer, awaited by its first reader.

    Mutations tried: the last reader on a device waits instead of the first; every launch sees all others.
    """
    mix, batch = data.draw(small_mixes())
    cluster = small_cluster(3)
    plan = random_plan(data.draw, mix, batch, ["g0", "g1", "g2"])
    program = lower(mix, plan, cluster, COSTS)
    expected = naive_moves(mix, plan.lanes[0])
    assert program_moves(program) == {pair: n for pair, n in expected.items() if n}
    check_program(program)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bytes_and_transfers_equal_the_flows_of_the_workload(data: st.DataObject) -> None:
    """Per link direction, for any placement. Mutation tried: one transfer too many per version."""
    mix, batch = data.draw(small_mixes())
    cluster = small_cluster(3)
    plan = random_plan(data.draw, mix, batch, ["g0", "g1", "g2"])
    w = build_workload(mix, cluster, COSTS, batch)
    assert channel_totals(lower(mix, plan, cluster, COSTS)) == closed_form(w, plan.lanes[0])


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 10))
def test_the_same_on_a_decoder_between_captured_points(tiny_mix: Mix, data: st.DataObject, batch: int) -> None:
    """Scaled bytes are rounded alike on both sides; kernel lists change with the batch."""
    mix = with_lengths(tiny_mix, input_tokens=data.draw(st.integers(40, 100)))
    cluster = small_cluster(2)
    w = build_workload(mix, cluster, COSTS, batch)
    placed: dict[str, dict[str, str]] = {unit: {} for unit in mix.units}
    for s in w.sites:
        placed[s.unit][s.name] = data.draw(st.sampled_from(["g0", "g1"]))
    plan = plan_of(placed, batch)
    program = lower(mix, plan, cluster, COSTS)
    assert channel_totals(program) == closed_form(w, plan.lanes[0])
    check_program(program)


@settings(max_examples=50, deadline=None)
@given(small_mixes(), st.sampled_from(["g0", "g1"]))
def test_one_gpu_equals_the_sums_of_the_workload(drawn: tuple[Mix, int], device: str) -> None:
    """Σ(durations + gaps) + launch cost, to the nanosecond. Mutation tried: launch cost once per run."""
    mix, batch = drawn
    cluster = small_cluster(2)
    w = build_workload(mix, cluster, COSTS, batch)
    program = lower(mix, on_one(mix, device, batch), cluster, COSTS)
    (s,) = program.lanes[0].streams
    total = sum(s.duration) + sum(s.delay) - sum(s.shave)
    column = w.devices.index(device)
    assert total == w.time_ns[:, column].sum() + w.gap_ns.sum() + w.launch_ns
    assert program.channels == () and program.lanes[0].tokens == 0


def test_one_gpu_by_integer_recomputation_and_by_the_engine(tiny_mix: Mix) -> None:
    """A captured point: the engine's period is the trace's span + launch cost, unit by unit."""
    mix = dataclasses.replace(
        tiny_mix, output_tokens=2, input_tokens=64, traces={**tiny_mix.traces, "decode": tiny_mix.traces["decode"][:1]}
    )
    decode = mix.traces["decode"][0]
    point = dataclasses.replace(decode.meta, unit={**decode.meta.unit, "context": 65})
    mix.traces["decode"] = (dataclasses.replace(decode, meta=point),)  # type: ignore[index]
    prefill = next(t for t in mix.traces["prefill"] if t.meta.unit["tokens"] == 64)
    expected = sum(t.span_ns + t.launch_ns for t in (prefill, decode))
    program = lower(mix, on_one(mix, "g0", 1), small_cluster(1), COSTS)
    (s,) = program.lanes[0].streams
    assert sum(s.duration) + sum(s.delay) - sum(s.shave) == expected
    result = run(program, engine="simpy", check=True)
    ends = result.lanes[0].completion_ns
    assert ends[0] == expected and {b - a for a, b in itertools.pairwise(ends)} == {expected}


def chain(gaps: list[int], streams: list[int] | None = None) -> Mix:
    """x -> a -> b -> c, 100 ns each."""
    buffers = [Buffer(i, f"v{i}", 10, "activation") for i in range(3)]
    w = [Access(i, "W", 0, 10, covers=True, evidence="schema") for i in range(3)]
    r = [Access(i, "R", 0, 10, evidence="schema") for i in range(3)]
    t = handmade([("a", [w[0]]), ("b", [r[0], w[1]]), ("c", [r[1], w[2]])], buffers, durations=[100] * 3, gaps=gaps,
                 launch={"empty_graph_ns": 7, "per_node_ns": 0})  # fmt: skip
    kernels = tuple(dataclasses.replace(k, stream=s) for k, s in zip(t.kernels, streams or [0] * 3, strict=True))
    return image_like(dataclasses.replace(t, kernels=kernels), launches=1)


def test_gaps_and_launch_cost_by_hand() -> None:
    """Negative gaps count only beside their captured predecessor; positive ones always; launch on each device.

    Mutation tried: shave kept wherever the kernel runs; launch cost on the first device only.
    """
    mix = chain([0, -30, -20])
    cluster = small_cluster(2)
    (s,) = lower(mix, on_one(mix, "g0", 1), cluster, COSTS).lanes[0].streams
    assert (s.duration, s.delay, s.shave) == ([100] * 3, [7, 0, 0], [0, 30, 20])
    split = lower(mix, plan_of({"step": {"a": "g0", "b": "g1", "c": "g0"}}), cluster, COSTS)
    g0, g1 = split.lanes[0].streams
    assert (g0.duration, g0.delay, g0.shave) == ([100, 100], [7, 0], [0, 0])
    assert (g1.duration, g1.delay, g1.shave) == ([150], [7], [0])
    positive = chain([0, 30, 20])
    g0, g1 = lower(positive, plan_of({"step": {"*": "g0", "b": "g1"}}), cluster, COSTS).lanes[0].streams
    assert (g0.delay, g1.delay) == ([7, 20], [37])


def test_a_gap_counts_from_the_predecessor_on_the_captured_stream() -> None:
    mix = chain([0, -30, -20], streams=[0, 1, 0])
    (s,) = lower(mix, on_one(mix, "g0", 1), small_cluster(1), COSTS).lanes[0].streams
    assert s.shave == [0, 0, 0]
    w = build_workload(mix, small_cluster(1), COSTS, 1)
    assert w.time_ns.sum() == 300


def test_channels_carry_the_link_in_integers() -> None:
    mix = chain([0, 0, 0])
    program = lower(mix, plan_of({"step": {"*": "g0", "b": "g1"}}), small_cluster(2, 25.0, 17.25), COSTS, labels=True)
    assert {(c.name, c.bytes_per_s, c.latency_ns) for c in program.channels} == {
        ("g0->g1", 3_125_000_000, 17_250), ("g1->g0", 3_125_000_000, 17_250)
    }  # fmt: skip
    assert [s.labels for s in program.lanes[0].streams] == [["step 0 a", "step 0 c"], ["step 0 b"]]
    assert [s.order for s in program.lanes[0].streams] == [[0, 2], [1]]


def test_lanes_share_channels_and_keep_their_own_tokens(tiny_mix: Mix) -> None:
    pd = {"prefill": {"*": "g0"}, "decode": {"*": "g1"}}
    whole = {"prefill": {"*": "g1"}, "decode": {"*": "g1"}}
    plan = Plan("m", "c", "test", (Lane("pd", 4, 2, pd), Lane("overflow", 4, 1, whole, 0.2), Lane("more", 1, 1, pd)))
    program = lower(tiny_mix, plan, small_cluster(2), COSTS)
    assert [c.name for c in program.channels] == ["g0->g1"]
    assert [x.depth for x in program.lanes] == [2, 1, 1] and [len(x.streams) for x in program.lanes] == [2, 1, 2]
    # A prefill hands over the KV of two layers, the sampled token and the position; four of them at batch 4.
    assert [x.tokens for x in program.lanes] == [16, 0, 4]
    assert program.lanes[0].units == 4 + 3
    check_program(program)


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ({}, "no placement for unit 'step'"),
        ({"step": {"a": "g0", "b": "g0"}}, "no device for site 'c'"),
        ({"step": {"*": "g9"}}, "no device 'g9'; there are g0, g1"),
        ({"step": {"*": "g0", "zz": "g1"}}, "no site 'zz'"),
    ],
)
def test_plans_that_do_not_fit_the_mix_say_why(placed: dict[str, dict[str, str]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lower(chain([0, 0, 0]), plan_of(placed), small_cluster(2), COSTS)


def test_a_split_group_and_a_missing_link_are_named() -> None:
    """Mutation tried: the group check left out."""
    mix = chain([0, 0, 0])
    (t,) = mix.traces["step"]
    t = dataclasses.replace(
        t, kernels=tuple(dataclasses.replace(k, group=0 if k.id else -1, group_reason="semaphore") for k in t.kernels)
    )
    split = plan_of({"step": {"*": "g0", "c": "g1"}})
    with pytest.raises(InputError, match=r"b and c must share a device \(semaphore\)"):
        lower(image_like(t), split, small_cluster(2), COSTS)
    apart = Cluster("apart", small_cluster(2).devices, ())
    with pytest.raises(InputError, match="sends from g0 to g1, which have no link"):
        lower(mix, split, apart, COSTS)


def test_the_default_cohort_lowers_whole() -> None:
    """256 prefills and 255 decode steps at batch 256 of 32 layers, placed alternately."""
    mix = synthetic_mix(layers=32, prefill_tokens=(1024,), decode_batches=(256,), decode_contexts=(512, 2048),
                        shape=DecoderShape(layers=32))  # fmt: skip
    placed = {u: {s: f"g{i % 2}" for i, s in enumerate(mix.traces[u][0].sites)} for u in mix.units}
    cluster = small_cluster(2)
    program = lower(mix, plan_of(placed, 256), cluster, COSTS)
    assert sum(len(s.duration) for s in program.lanes[0].streams) == 256 * 292 + 255 * len(mix.traces["decode"][0])
    assert np.all([min(s.duration) >= 1 for s in program.lanes[0].streams])
