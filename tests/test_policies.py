"""Policies: what they propose, within which limits, and why not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from planner_cases import GB, chain, cluster, image, llama, llm

from tesserasim.errors import InputError
from tesserasim.planner.place import place
from tesserasim.planner.seeds import af_vector, pd_vector
from tesserasim.plans import Plan
from tesserasim.policies import Context, Limits, NotApplicable, Policy, Run, find_policy, policies, register
from tesserasim.policies.base import _REGISTRY
from tesserasim.policies.replicas import proportional
from tesserasim.workload import Workload

pytestmark = pytest.mark.quick

SPEEDS = [(250.0, 1.6), (180.0, 0.75)]
NAMES = ("single", "replicas-static", "replicas-lo", "pd", "af", "kernel")


def context(
    limits: Limits | None = None, layers: int = 2, gbps: float = 200.0, names: tuple[str, ...] = ("A", "L")
) -> Context:  # fmt: skip
    speeds = [SPEEDS[0] if n == "A" else SPEEDS[1] for n in names]
    where = cluster(names, gbps, 5.0, [10.0 if n == "A" else 6.0 for n in names])
    return Context(llm(), where, lambda batch: llama(where, batch, speeds, layers), limits)


def image_context(limits: Limits | None = None) -> Context:
    where = cluster(["A", "L"])

    def build(batch: int) -> Workload:
        return chain([[1e6, 2e6]] * 4, where, 1000.0, batch, units=(("denoise", 28),), mix=image())

    return Context(image(), where, build, limits or Limits(batches=(1,)))


def plans(name: str, ctx: Context) -> list[Plan]:
    found = find_policy(name).candidates(ctx)
    assert not isinstance(found, NotApplicable), found.reason
    return found


def per_s(plan: Plan) -> float:
    assert plan.objective_us is not None
    return 1e6 / plan.objective_us


def test_registry() -> None:
    """All six, in the order of tables; an unknown one lists them.

    Mutation tried: another order of imports in `policies()`.
    """
    assert tuple(policies()) == NAMES
    assert [p.uses_link for p in policies().values()] == [False, False, False, True, True, True]
    with pytest.raises(InputError, match="known: single"):
        find_policy("nonsense")


def test_a_new_policy_is_twenty_lines() -> None:
    """The example of base.py works as written and appears in the registry.

    Mutation tried: `register` without keeping the class.
    """
    try:

        @register
        class OddEven(Policy):
            name, summary = "odd-even", "odd sites here, even sites there"

            def candidates(self, ctx: Context) -> list[Plan] | NotApplicable:
                scored = []
                for batch, depth in ctx.options(n_gpus=2):
                    form = ctx.form(batch)
                    x = np.arange(form.n_sites) % 2
                    scored.append(ctx.score([Run("all", batch, depth, x)]))
                return ctx.plans(self, scored)

        assert "odd-even" in policies()
        assert plans("odd-even", context())[0].switches > 50
    finally:
        _REGISTRY.pop("odd-even", None)


@pytest.mark.parametrize("name", NAMES)
def test_best_first_within_limits(name: str) -> None:
    """Best predicted first, every lane on the grid, within max_seqs per GPU and memory, and a limit named.

    Mutations tried: sorting upwards; max_seqs times the cluster's GPUs for a lane on one.
    """
    ctx = context(Limits(max_seqs=128))
    found = plans(name, ctx)
    assert per_s(found[0]) == max(per_s(p) for p in found)
    for plan in found:
        for lane in plan.lanes:
            assert lane.batch in ctx.limits.batches and lane.depth in ctx.limits.depths
            assert lane.batch * lane.depth <= 128 * len(lane.devices)
        for device in ctx.cluster.devices:
            assert plan.memory_bytes[device.id] <= 0.9 * device.gpu.memory_bytes
        assert plan.limited_by
        assert sum(lane.share for lane in plan.lanes) == pytest.approx(1.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("total", [64, 8])
def test_equal_in_flight(name: str, total: int) -> None:
    """B * d over all lanes is exactly the number asked for.

    Mutation tried: replicas rounding their shares each for itself.
    """
    for plan in plans(name, context(Limits(in_flight=total))):
        assert sum(lane.batch * lane.depth for lane in plan.lanes) == total
        assert plan.limited_by == "in flight"


def test_in_flight_that_the_grid_cannot_give() -> None:
    """48 = 32 + 16 is not on the grid of one lane: the most below it is used, and said; replicas hold all 48.

    Mutation tried: NotApplicable instead.
    """
    plan = plans("single", context(Limits(in_flight=60)))[0]
    assert plan.lanes[0].batch * plan.lanes[0].depth == 32 and plan.limited_by == "in flight 32 of 60"
    assert sum(x.batch * x.depth for x in plans("replicas-lo", context(Limits(in_flight=60)))[0].lanes) == 60


def test_images_in_flight() -> None:
    """A mix of batch 1 only holds four images as four cohorts, split 3 + 1 by rate over replicas.

    Mutation tried: batch 3 for the replica of the faster GPU.
    """
    ctx = image_context(Limits(batches=(1,), in_flight=4))
    for name in ("single", "kernel"):
        assert [(x.batch, x.depth) for x in plans(name, ctx)[0].lanes] == [(1, 4)]
    assert [(x.batch, x.depth) for x in plans("replicas-lo", ctx)[0].lanes] == [(1, 3), (1, 1)]


def test_proportional() -> None:
    """Largest remainder; the total is kept.

    Mutation tried: plain rounding.
    """
    assert proportional(np.array([2.0, 1.0]), 64) == [43, 21]
    assert proportional(np.array([1.0, 1.0, 1.0]), 64) == [22, 21, 21]
    assert proportional(np.array([3.0, 1.0]), 6) == [5, 1]
    assert proportional(np.array([5.0, 0.0]), 64) == [64, 0]


@pytest.mark.parametrize("name", ["pd", "af"])
def test_not_applicable_is_an_answer(name: str) -> None:
    """pd and af on diffusion, on one GPU: a reason, no exception.

    Mutation tried: raising InputError.
    """
    found = find_policy(name).candidates(image_context())
    assert isinstance(found, NotApplicable) and "test" in found.reason
    alone = context(names=("A",))
    found = find_policy(name).candidates(alone)
    assert isinstance(found, NotApplicable) and "two GPUs" in found.reason


def test_does_not_fit_is_an_answer() -> None:
    """A model too large for every GPU: no policy has a plan, and each says what is missing.

    Mutation tried: an empty list of plans.
    """
    where = cluster(["A", "L"], memory_gb=1)

    def build(batch: int) -> Workload:
        return chain([[1e6, 2e6]] * 4, where, 1000.0, batch, mix=image(), weight_bytes=GB)

    for name in ("single", "replicas-lo", "kernel"):
        found = find_policy(name).candidates(Context(image(), where, build, Limits(batches=(1,))))
        assert isinstance(found, NotApplicable) and "memory" in found.reason, name


@pytest.mark.parametrize("gbps", [5.0, 200.0])
def test_kernel_is_at_least_pd_and_af(gbps: float) -> None:
    """At equal (B, d), in closed form, and at each one's own best without overflow.

    Mutation tried: no seed but the first.
    """
    ctx = context(gbps=gbps)
    for batch, depth in ((8, 1), (32, 2), (64, 4)):
        form = ctx.form(batch)
        best = place(form, depth).prediction.per_s
        for a, b in ((0, 1), (1, 0)):
            for x in (pd_vector(form.workload, a, b), af_vector(form.workload, a, b)):
                assert x is not None
                rival = ctx.score([Run("r", batch, depth, x)])
                assert rival.blocked or best >= rival.per_s * (1 - 1e-12)
    best = per_s(plans("kernel", ctx)[0])
    rivals = [p for name in ("single", "pd", "af") for p in plans(name, ctx) if len(p.lanes) == 1]
    assert all(best >= per_s(p) * (1 - 1e-9) for p in rivals)


def test_replicas_differ_in_routing_only() -> None:
    """Equal by the closed form, shares in proportion to own-best rates, GPUs at their own (B, d).

    Mutation tried: equal shares.
    """
    static, free = (plans(n, context())[0] for n in ("replicas-static", "replicas-lo"))
    assert per_s(static) == pytest.approx(per_s(free))
    assert [x.share for x in static.lanes] == pytest.approx([x.share for x in free.lanes])
    single = plans("single", context())[0]
    assert static.lanes[0].share == pytest.approx(per_s(single) / per_s(static))


def test_overflow_fills_idle_time() -> None:
    """With a balanced pd impossible, the overflow lane takes what is left, at lower priority, and gains.

    Mutation tried: the overflow lane at the same priority.
    """
    found = plans("pd", context(layers=4))
    bare = max(per_s(p) for p in found if len(p.lanes) == 1)
    filled = next(p for p in found if len(p.lanes) == 2)
    assert per_s(filled) > bare
    assert [x.priority for x in filled.lanes] == [0, 1] and "overflow" in filled.notes[1]
    # Both kinds are among the two that get simulated.
    assert {len(p.lanes) for p in found[:2]} == {1, 2}


def test_ratios_with_three_gpus() -> None:
    """2 A + 1 L: prefill:decode 1:2 and 2:1 are tried with lanes that pair all GPUs, equal GPUs counted once.

    Mutation tried: one lane only.
    """
    ctx = context(names=("A", "A", "L"))
    found = plans("pd", ctx)
    assert any(len(p.lanes[0].devices) == 2 and len(p.lanes) >= 2 for p in found)
    main = [x for x in found[0].lanes if x.name.startswith("pd")]
    assert len({d for x in main for d in x.devices}) == 3


@pytest.mark.parametrize(
    ("limits", "layers", "word"),
    [
        (Limits(max_seqs=64), 2, "max_seqs"), (Limits(latency_ms=500.0, max_seqs=10**6), 2, "latency"),
        (Limits(batches=(1, 8)), 2, "grid"), (Limits(batches=(8,)), 2, "given batch"),
        (Limits(max_seqs=64), 6, "memory of A"),
    ],
)  # fmt: skip
def test_limited_by(limits: Limits, layers: int, word: str) -> None:
    """The limit that keeps the best point from a faster one.

    Mutation tried: the first limit met in grid order.
    """
    plan = plans("single", context(limits, layers))[0]
    assert plan.limited_by == word


def test_unreachable_batches_are_left_out() -> None:
    """A batch beyond the traces is no candidate and no error; if all are, the reason is the traces'.

    Mutation tried: letting the InputError through.
    """
    where = cluster(["A", "L"])

    def build_up_to(top: int) -> Callable[[int], Workload]:
        def build(batch: int) -> Workload:
            if batch > top:
                raise InputError(f"batch {batch} is beyond the grid")
            return llama(where, batch, SPEEDS, 2)

        return build

    found = find_policy("single").candidates(Context(llm(), where, build_up_to(32), Limits()))
    assert not isinstance(found, NotApplicable) and max(p.lanes[0].batch for p in found) == 32
    for name in NAMES:
        nothing = find_policy(name).candidates(Context(llm(), where, build_up_to(0), Limits()))
        assert isinstance(nothing, NotApplicable) and "beyond the grid" in nothing.reason, name
