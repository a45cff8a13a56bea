"""Rows: complete, consistent with each other, cached without a trace, held to the bound."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tesserasim.case import Case
from tesserasim.cluster.model import Price
from tesserasim.cluster.parse import parse_cluster
from tesserasim.costs.base import default_costs
from tesserasim.errors import DoesNotFitError, InputError
from tesserasim.evaluate import BoundViolatedError, evaluate, evaluate_plan, honest_numbers, set_p_win
from tesserasim.metrics.summary import LaneOutcome, Outcome, summarise
from tesserasim.metrics.verdict import verdict
from tesserasim.plans import Lane, Plan
from tesserasim.policies import Limits
from tesserasim.trace.mix import Mix
from tesserasim.trace.synthetic import synthetic_image_mix, synthetic_mix

pytestmark = pytest.mark.quick

MIX = synthetic_mix(layers=2, output_tokens=8)
PAIR = dataclasses.replace(
    parse_cluster("H200-SXM+L40S@200Gbps"),
    prices={"H200-SXM": Price(4.0, 4.0, 4.0, "", ""), "L40S": Price(1.0, 1.0, 1.0, "", "")},
)
LIMITS = Limits(batches=(8, 32), depths=(1, 2))
COSTS = default_costs()
KEYS = {
    "policy", "batch", "depth", "limited_by", "throughput_per_s", "throughput_unit", "steady_throughput_per_s",
    "latency_ms", "utilisation", "usd_per_hour", "per_usd", "bound_per_s", "bound_batch", "replicas_per_s",
    "best_single_per_s", "best_single_int_per_s", "interval80", "rel_error", "p_win", "regime", "origins", "engine",
    "device_model", "seed",
}  # fmt: skip
NAMES = ("single", "replicas-static", "replicas-lo", "pd", "af", "kernel")


@pytest.fixture(scope="module")
def cache() -> dict[Any, Any]:
    return {}


def row(policy: str, cache: dict[Any, Any] | None = None, **options: Any) -> dict[str, Any]:
    return evaluate(MIX, PAIR, COSTS, policy, limits=LIMITS, cache=cache, **options).row


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_whole_and_plain(name: str, cache: dict[Any, Any]) -> None:
    """Every key of the contract, JSON without tricks, throughput within the bound, p50 <= p90 <= p99.

    Mutation tried: leaving a numpy float in the row.
    """
    found = row(name, cache)
    assert set(found) >= KEYS and found["applicable"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert 0 < found["throughput_per_s"] <= found["bound_per_s"]
    assert found["interval80"][0] < found["throughput_per_s"] < found["interval80"][1]
    assert found["latency_ms"]["p50"] <= found["latency_ms"]["p90"] <= found["latency_ms"]["p99"]
    assert all(0 <= u <= 1 for u in found["utilisation"].values())
    assert found["origins"] == ["synthetic"] and found["regime"] == "near"
    assert found["output_tokens_per_s"] == pytest.approx(8 * found["throughput_per_s"])


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_changes_nothing(name: str, cache: dict[Any, Any]) -> None:
    """A row is the same to the last bit with and without what other policies have left in the cache.

    Mutation tried: a run's key without its depth.
    """
    row("replicas-lo", cache)
    for depth in (1, 2):  # leaves runs at equal batch and other depth
        evaluate(MIX, PAIR, COSTS, name, limits=Limits(batches=(32,), depths=(depth,)), cache=cache)
        alone = evaluate(MIX, PAIR, COSTS, name, limits=Limits(batches=(32,), depths=(depth,)))
        assert evaluate(MIX, PAIR, COSTS, name, limits=Limits(batches=(32,), depths=(depth,)), cache=cache) == alone
    assert row(name, cache) == row(name)


def test_link_free_policies_reuse_runs(cache: dict[Any, Any]) -> None:
    """Single and replicas on another link simulate nothing new.

    Mutation tried: the whole cluster in every run's key.
    """
    row("replicas-lo", cache)
    runs = sum(k[0] == "run" for k in cache)
    slow = dataclasses.replace(parse_cluster("H200-SXM+L40S@25Gbps"), prices=PAIR.prices)
    for name in ("single", "replicas-lo", "replicas-static"):
        again = evaluate(MIX, slow, COSTS, name, limits=LIMITS, cache=cache).row
        assert again["throughput_per_s"] == row(name, cache)["throughput_per_s"]
    assert sum(k[0] == "run" for k in cache) == runs


def test_honest_numbers(cache: dict[Any, Any]) -> None:
    """Replicas = the better of both; N = budget / price, real and whole; equal for every policy's row.

    Mutation tried: N = 1 whatever the prices.
    """
    rows = {name: row(name, cache) for name in NAMES}
    assert len({r["replicas_per_s"] for r in rows.values()}) == 1
    better = max(rows[n]["throughput_per_s"] for n in ("replicas-lo", "replicas-static"))
    assert rows["kernel"]["replicas_per_s"] == better
    case = Case(MIX, PAIR, COSTS, LIMITS, cache=cache)
    honest = honest_numbers(case)
    by_gpu = {"H200-SXM": 5 / 4, "L40S": 5.0}
    assert honest.best_single_per_s == pytest.approx(max(n * honest.one_gpu_per_s[g] for g, n in by_gpu.items()))
    whole = max(int(n) * honest.one_gpu_per_s[g] for g, n in by_gpu.items())
    assert honest.best_single_int_per_s == pytest.approx(whole)
    assert rows["single"]["throughput_per_s"] == pytest.approx(max(honest.one_gpu_per_s.values()))


def test_unknown_price_is_unknown() -> None:
    """Without a price there is no cost and no comparison at equal budget, never a zero.

    Mutation tried: 0 for a missing price.
    """
    free = dataclasses.replace(PAIR, prices={})
    found = evaluate(MIX, free, COSTS, "replicas-lo", limits=LIMITS).row
    assert found["usd_per_hour"] is None and found["per_usd"] is None and found["best_single_per_s"] is None
    assert found["break_even_usd_per_hour"] is None


def test_cost_of_what_is_used(cache: dict[Any, Any]) -> None:
    """Single pays one GPU, replicas pay both; per_usd is throughput over price.

    Mutation tried: the cluster's price for every plan.
    """
    single, replicas = row("single", cache), row("replicas-lo", cache)
    assert single["usd_per_hour"] in (4.0, 1.0) and replicas["usd_per_hour"] == 5.0
    assert replicas["per_usd"] == pytest.approx(replicas["throughput_per_s"] * 3600 / 5)


def test_break_even_price(cache: dict[Any, Any]) -> None:
    """At the break-even price of the L40S, the pair's requests per dollar equal the H200's alone.

    Mutation tried: forgetting the first GPU's own price.
    """
    found = row("replicas-lo", cache)
    one = honest_numbers(Case(MIX, PAIR, COSTS, LIMITS, cache=cache)).one_gpu_per_s["H200-SXM"]
    assert found["break_even_gpu"] == "L40S"
    total = 4.0 + found["break_even_usd_per_hour"]
    assert found["throughput_per_s"] / total == pytest.approx(one / 4.0)


def test_not_applicable_row() -> None:
    """pd on an image mix: a row with a reason.

    Mutation tried: raising.
    """
    found = evaluate(synthetic_image_mix(blocks=2), PAIR, COSTS, "pd", limits=Limits(batches=(1,), depths=(1,)))
    assert not found.applicable and found.row["reason"] and found.plan is None


def test_given_plan_equals_its_policy(cache: dict[Any, Any]) -> None:
    """A plan evaluated from its file form gives the numbers of the policy that made it.

    Mutation tried: static replicas of a file run under free dispatch.
    """
    for name in ("replicas-static", "kernel"):
        made = evaluate(MIX, PAIR, COSTS, name, limits=LIMITS, cache=cache)
        assert made.plan is not None
        again = evaluate_plan(MIX, PAIR, COSTS, made.plan, limits=LIMITS, cache={})
        assert again.row == made.row and again.draws == made.draws


def test_given_plan_that_does_not_fit_or_match() -> None:
    """Errors of a plan file are input errors that say what is wrong.

    Mutation tried: simulating without the memory check.
    """
    def plan(mix: Mix, batch: int, device: str) -> Plan:
        lane = Lane("l", batch, 8, {"prefill": {"*": device}, "decode": {"*": device}})
        return Plan(mix.name, PAIR.name, "single", (lane,))

    big = synthetic_mix(layers=32, output_tokens=1024)
    with pytest.raises(DoesNotFitError, match=r"L40S: .*GB"):
        evaluate_plan(big, PAIR, COSTS, plan(big, 256, "L40S"))
    with pytest.raises(InputError, match="A100"):
        evaluate_plan(MIX, PAIR, COSTS, plan(MIX, 8, "A100"))


def test_faster_than_the_bound_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run beyond the bound raises, whatever the policy.

    Mutation tried: the check left out.
    """
    import tesserasim.case as module

    real = module.outcome

    def twice(*args: Any) -> Outcome:
        made = real(*args)
        lanes = tuple(dataclasses.replace(x, end_to_end_per_s=9 * x.end_to_end_per_s) for x in made.lanes)
        return dataclasses.replace(made, lanes=lanes)

    monkeypatch.setattr(module, "outcome", twice)
    with pytest.raises(BoundViolatedError, match="exceed the bound"):
        row("single")


def test_p_win_over_a_set(cache: dict[Any, Any]) -> None:
    """The shares of all policies add up to 1, and the fastest has the largest.

    Mutation tried: p_win against the honest numbers kept after `set_p_win`.
    """
    found = [evaluate(MIX, PAIR, COSTS, n, limits=LIMITS, cache=cache) for n in NAMES]
    set_p_win(found)
    assert sum(e.row["p_win"] for e in found) == pytest.approx(1.0)
    assert verdict([e.row for e in found]).endswith("(SYNTHETIC)")


def test_static_dispatch_runs_at_the_slowest_share() -> None:
    """Two lanes at 30 and 10 /s with equal shares: 20 /s in all, the fast lane's device idles.

    Mutation tried: adding the lanes' rates.
    """
    lanes = tuple(Lane(n, 1, 1, {"u": {"*": d}}, 0.5) for n, d in (("a", "H200-SXM"), ("b", "L40S")))
    plan = Plan("m", "c", "replicas-static", lanes)
    parts = [
        (("H200-SXM",), Outcome((LaneOutcome("a", 1, 1, 30.0, 30.0, (10**6,) * 4, 4),), (0.9,), "x")),
        (("L40S",), Outcome((LaneOutcome("b", 1, 1, 10.0, 10.0, (3 * 10**6,) * 4, 4),), (0.9,), "x")),
    ]
    static, free = (summarise(plan, PAIR, parts, how) for how in ("static", "free"))
    assert (static.steady_per_s, free.steady_per_s) == (20.0, 40.0)
    assert static.utilisation == pytest.approx({"H200-SXM": 0.3, "L40S": 0.9})
    assert free.latency_ms["mean"] == pytest.approx(1.5) and free.latency_ms["p90"] == 3.0
