"""The closed form by hand, and against the engine."""

from __future__ import annotations

import numpy as np
import pytest
from planner_cases import chain, cluster, llama

from tesserasim.case import Case
from tesserasim.cluster.parse import parse_cluster
from tesserasim.costs.base import default_costs
from tesserasim.metrics.predict import QUEUEING, ClosedForm, LaneLoad, share_machines
from tesserasim.planner.seeds import contiguous
from tesserasim.plans import Lane
from tesserasim.policies import Limits, Policy, Run
from tesserasim.trace.synthetic import synthetic_image_mix, synthetic_mix

pytestmark = pytest.mark.quick


def test_by_hand() -> None:
    """Golden pipeline: A 10 ns, 100 B over 10 B/ns with 5 ns latency, B 20 ns.

    Mutation tried: counting the link's latency as occupation.
    """
    w = chain([[10.0, 99.0], [99.0, 20.0]], cluster(["A", "B"], gbps=80.0, latency_us=0.005), nbytes=100.0)
    form, x = ClosedForm(w), np.array([0, 1])
    one = form.predict(x, 1)
    assert one.loads_ns.tolist() == [10.0, 20.0]
    assert one.link_ns.tolist() == [[0.0, 10.0], [0.0, 0.0]]
    assert one.latency_ns == pytest.approx(45.0) and one.period_ns == pytest.approx(45.0)
    assert form.predict(x, 2).period_ns == pytest.approx(22.5)
    assert form.predict(x, 3).period_ns == pytest.approx(20.0)
    assert form.predict(x, 3).bottleneck == "device" and one.bottleneck == "latency"


def test_a_value_crosses_once_per_device() -> None:
    """Two readers on one other device cost one transfer; readers on two devices cost two.

    Mutation tried: a transfer per reader.
    """
    import dataclasses

    from tesserasim.workload import Flow

    w = chain([[1.0] * 3] * 3, cluster(["A", "B", "C"], gbps=80.0), nbytes=100.0)
    w = dataclasses.replace(w, flows=(Flow(0, (1, 2), 100.0, 1.0, "v"),))
    form = ClosedForm(w)
    assert form.cut(np.array([0, 1, 1]))[0] == 100
    assert form.cut(np.array([0, 1, 2]))[0] == 200
    assert form.cut(np.array([0, 0, 0]))[0] == 0


def test_gaps_and_launches_are_latency_not_load() -> None:
    """Gaps and launch cost delay a cohort and leave the device free; a unit pays a launch on every device it uses.

    Mutation tried: adding gaps to the loads.
    """
    w = chain([[10.0, 10.0]] * 2, cluster(["A", "B"], gbps=1e6, latency_us=0.0), gaps=3.0, launch=5.0)
    form = ClosedForm(w)
    alone, split = form.predict(np.array([0, 0]), 1), form.predict(np.array([0, 1]), 1)
    assert alone.loads_ns.tolist() == [20.0, 0.0] and alone.latency_ns == pytest.approx(20 + 6 + 5)
    assert split.latency_ns == pytest.approx(20 + 6 + 10)


def test_waiting() -> None:
    """Split units wait for the other cohorts; units kept whole and one device alone do not.

    Mutation tried: QUEUEING for units kept whole too.
    """
    form = ClosedForm(llama(cluster(["A", "L"]), 8, [(500.0, 3.0), (250.0, 1.0)], layers=2))
    layers = contiguous(form, (0, 1))[0]
    whole = next(x for x in form.whole_units() if len(set(x.tolist())) == 2)
    single = np.zeros(form.n_sites, dtype=np.int64)
    divisors = [form.predict(x, 4).divisor for x in (layers, whole, single)]
    assert divisors[0] == pytest.approx(1 + 3 * (1 - QUEUEING * (1 - 1 / 263)))
    assert divisors[0] < divisors[1] == divisors[2] == 4.0
    assert all(form.predict(x, 1).divisor == 1.0 for x in (layers, whole, single))


def test_handed_over_state_is_exposed_by_one_launch() -> None:
    """The KV of 8 prefills travels while they run; decode waits for the last one's only.

    Mutation tried: exposure 1 for every flow.
    """
    form = ClosedForm(llama(cluster(["A", "L"], 1.0, 0.0), 8, [(500.0, 3.0), (250.0, 1.0)], layers=2))
    x = np.where(form.unit_of == 0, 0, 1)
    links, waits = form.transfers(x)
    assert waits == pytest.approx(links.sum() / 8, rel=1e-9)


def test_sharing_machines() -> None:
    """Free lanes fill what is left, by priority; static shares go at the pace of the slowest.

    Mutation tried: ignoring priorities; forgetting a lane's own latency cap.
    """
    main = LaneLoad(np.array([0.5e9, 0.25e9]), 100.0)  # seconds per request: 0.5 on A, 0.25 on B
    rest = LaneLoad(np.array([0.0, 0.5e9]), 100.0, priority=1)
    assert share_machines([main, rest]) == pytest.approx([2.0, 1.0])
    assert share_machines([main, LaneLoad(np.array([0.0, 0.5e9]), 0.25, priority=1)]) == pytest.approx([2.0, 0.25])
    apart = [LaneLoad(np.array([0.5e9, 0.0]), 9.0, 0.5), LaneLoad(np.array([0.0, 0.25e9]), 9.0, 0.5)]
    assert share_machines(apart) == pytest.approx([2.0, 4.0])
    assert share_machines(apart, "static") == pytest.approx([2.0, 2.0])


def test_assignment_round_trip() -> None:
    """A placement survives its words in a plan.

    Mutation tried: `"*"` for every unit.
    """
    form = ClosedForm(chain([[1.0, 1.0]] * 4, cluster(["A", "B"])))
    for x in ([0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1]):
        lane = Lane("l", 1, 1, form.assignment(np.array(x)))
        assert form.vector(lane).tolist() == x


class _Fixed(Policy):
    name, summary = "fixed-for-test", "a given placement"

    def candidates(self, ctx):  # type: ignore[no-untyped-def]
        raise NotImplementedError


def test_single_at_depth_one_equals_the_engine() -> None:
    """One GPU, one cohort: durations, gaps and launch cost add up exactly, in both.

    Mutation tried: leaving the launch cost out of the latency.
    """
    mix = synthetic_mix(layers=2, output_tokens=16)
    case = Case(mix, parse_cluster("H200-SXM+L40S@200Gbps"), default_costs(), Limits())
    for device in (0, 1):
        form = case.context.form(8)
        run = Run("r", 8, 1, np.full(form.n_sites, device, dtype=np.int64))
        scored = case.context.score([run])
        ran = case.run(case.context.plan(_Fixed(), scored, ""), "free")
        assert ran.summary.steady_per_s == pytest.approx(scored.per_s, rel=1e-9)


@pytest.mark.parametrize("kind", ["llm", "image"])
def test_contiguous_split_with_depth_equals_the_engine(kind: str) -> None:
    """With depth to spare a two-GPU layer split runs at its bottleneck: within 2 % of the engine.

    Mutation tried: a latency that depth does not divide.
    """
    mix = synthetic_mix(layers=4, output_tokens=32) if kind == "llm" else synthetic_image_mix(blocks=4, batches=(1,))
    batch = 8 if kind == "llm" else 1
    case = Case(mix, parse_cluster("H200-SXM+L40S@200Gbps"), default_costs(), Limits())
    form = case.context.form(batch)
    x = contiguous(form, (0, 1))[-1]  # the last layer only: the link and L40S have time to spare
    scored = case.context.score([Run("r", batch, 8, x)])
    ran = case.run(case.context.plan(_Fixed(), scored, ""), "free")
    assert ran.summary.steady_per_s == pytest.approx(scored.per_s, rel=0.02)
