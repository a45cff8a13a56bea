"""What policies see: sums, flows, residents, groups and errors of one cohort."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from workload_cases import ScaledCosts, handmade, image_like, small_cluster

from tesserasim.errors import InputError
from tesserasim.trace.mix import Mix, with_lengths
from tesserasim.trace.model import Access, Buffer
from tesserasim.trace.synthetic import synthetic_image_mix, synthetic_mix
from tesserasim.workload import Workload, build_workload

pytestmark = pytest.mark.quick

COSTS = ScaledCosts()


def flows_named(w: Workload, name: str) -> list[tuple[str, set[tuple[str, str]], float, float]]:
    """(writer, readers, bytes, transfers) of the flows of a buffer."""
    site = [(s.unit, s.name) for s in w.sites]
    return [(site[f.writer][0], {site[r] for r in f.readers}, f.nbytes, f.count) for f in w.flows if f.name == name]


def test_the_kv_cache_flows_as_new_bytes_only(tiny_mix: Mix) -> None:
    """64 prompt tokens of 4 requests once, then 4 new tokens a step; never the context.

    Mutation tried: what a unit leaves behind counted inside the unit as well.
    """
    w = build_workload(tiny_mix, small_cluster(2), COSTS, 4)
    per_token = 2 * 2 * 64 * 2
    assert flows_named(w, "layers.1.kv") == [
        ("prefill", {("prefill", "layers.1/attention"), ("decode", "layers.1/attention")}, 4 * 64 * per_token, 4),
        ("decode", {("decode", "layers.1/attention")}, 3 * 4 * per_token, 3),
    ]


def test_the_sampled_token_feeds_the_next_step(tiny_mix: Mix) -> None:
    """The token of the last step goes nowhere: 2 of the 3 decode tokens are read."""
    w = build_workload(tiny_mix, small_cluster(2), COSTS, 4)
    assert flows_named(w, "next_token") == [
        ("prefill", {("decode", "embed")}, 4 * 8, 4),
        ("decode", {("decode", "embed")}, 2 * 4 * 8, 2),
    ]
    assert not any(f.name.endswith("weight") for f in w.flows)


def test_between_captured_lengths_the_cache_scales_with_tokens_and_the_sampled_token_does_not(tiny_mix: Mix) -> None:
    """48 tokens on the kernels of 64. Mutation tried: one scale for all carried buffers."""
    w = build_workload(with_lengths(tiny_mix, input_tokens=48), small_cluster(2), COSTS, 4)
    assert flows_named(w, "layers.0.kv")[0][2] == 4 * 48 * 2 * 2 * 64 * 2
    assert flows_named(w, "next_token")[0][2] == 4 * 8


def test_a_request_of_one_token_has_no_decode(tiny_mix: Mix) -> None:
    w = build_workload(with_lengths(tiny_mix, output_tokens=1), small_cluster(1), COSTS, 4)
    assert w.unit_launches == (("prefill", 4),) and {s.unit for s in w.sites} == {"prefill"}
    assert flows_named(w, "next_token") == []


def test_latents_go_from_step_to_step() -> None:
    mix = synthetic_image_mix(blocks=1, steps=5)
    w = build_workload(mix, small_cluster(2), COSTS, 2)
    (flow,) = flows_named(w, "latents")
    assert flow == ("denoise", {("denoise", "embed")}, 4 * 2 * 128 * 128 * 16 * 2, 4)  # step reads what it wrote


def test_an_output_of_one_stage_is_the_input_of_the_next() -> None:
    out = [Buffer(0, "text", 100, "output")]
    into = [Buffer(0, "text", 100, "input"), Buffer(1, "image", 10, "output")]
    encode = handmade([("enc", [Access(0, "W", 0, 100, covers=True, evidence="schema")])], out, "encode")
    use = [Access(0, "R", 0, 100, evidence="schema"), Access(1, "W", 0, 10, covers=True, evidence="schema")]
    w = build_workload(image_like(encode, handmade([("use", use)], into, "draw")), small_cluster(2), COSTS, 1)
    # two encoder launches; the second replaces what the first wrote, so one transfer
    assert [(f.writer, f.readers, f.nbytes, f.count) for f in w.flows] == [(0, (1,), 100, 1)]


def test_residents_are_weights_once_and_state_per_request(tiny_mix: Mix) -> None:
    w = build_workload(tiny_mix, small_cluster(2), COSTS, 8)
    by_name = {r.name: r for r in w.residents}
    kv = by_name["layers.0.kv"]
    assert kv.state and kv.nbytes == (64 + 4) * 2 * 2 * 64 * 2
    assert [(w.sites[i].unit, w.sites[i].name) for i in kv.sites] == [
        ("prefill", "layers.0/attention"), ("decode", "layers.0/attention")
    ]  # fmt: skip
    head = by_name["head.weight"]
    assert not head.state and head.nbytes == 2048 * 512 * 2 and len(head.sites) == 2
    assert sum(not r.state for r in w.residents) == 3 + 2 * 6


def test_times_are_sums_of_whole_nanoseconds_per_device(tiny_mix: Mix) -> None:
    """Mutation tried: rows of a run weighted by one instead of by their count."""
    cluster = small_cluster(2)
    w = build_workload(tiny_mix, cluster, COSTS, 4)
    assert w.time_ns.shape == w.sigma_systematic.shape == w.sigma_site.shape == (len(w.sites), 2)
    assert np.array_equal(w.time_ns, np.round(w.time_ns)) and np.array_equal(w.gap_ns, np.round(w.gap_ns))
    assert w.unit_launches == (("prefill", 4), ("decode", 3))
    prefill = next(t for t in tiny_mix.traces["prefill"] if t.meta.unit["tokens"] == 64)
    mine = [i for i, s in enumerate(w.sites) if s.unit == "prefill"]
    shaved = sum(k.duration_ns + min(k.gap_ns, 0) for k in prefill.kernels)
    assert w.time_ns[mine, 0].sum() == 4 * shaved
    assert w.gap_ns[mine].sum() == 4 * sum(max(k.gap_ns, 0) for k in prefill.kernels)
    assert dict(w.launch_each_ns)["prefill"] == prefill.launch_ns
    assert w.launch_ns == sum(n * dict(w.launch_each_ns)[u] for u, n in w.unit_launches)
    assert w.sources == ("test", "test")


def test_sigmas_are_weighted_by_time() -> None:
    """Kernels of 100 and 300 ns in one site, site errors 0 and 0.2: 0.15. Mutation tried: plain mean."""
    x = [Access(0, "W", 0, 8, covers=True, evidence="schema")]
    mix = image_like(handmade([("a", x), ("a", x)], [Buffer(0, "x", 8, "activation")], durations=[100, 300]))
    w = build_workload(mix, small_cluster(1), COSTS, 1)
    np.testing.assert_allclose(w.sigma_site, [[0.15]])
    np.testing.assert_allclose(w.sigma_systematic, [[0.1]])


def test_sites_line_up_over_batches_whatever_their_kernels() -> None:
    """The split-K kernels of small batches belong to the same sites; a site that a batch lacks takes no time."""
    mix = synthetic_mix(layers=1)
    small, large = (build_workload(mix, small_cluster(1), COSTS, b) for b in (1, 256))
    assert [(s.unit, s.name) for s in small.sites] == [(s.unit, s.name) for s in large.sites]
    x = [Access(0, "W", 0, 8, covers=True, evidence="schema")]
    one, two = (
        handmade([(s, x) for s in sites], [Buffer(0, "x", 8, "activation")], batch=b)
        for b, sites in ((1, ["a", "b"]), (2, ["a", "c", "b"]))
    )
    both = dataclasses.replace(image_like(one), traces={"step": (one, two)})
    w = build_workload(both, small_cluster(1), COSTS, 1)
    assert [s.name for s in w.sites] == ["a", "c", "b"] and w.time_ns[:, 0].tolist() == [2000, 0, 2000]


def test_groups_carry_their_reason() -> None:
    """Mutation tried: groups numbered per kernel list and not joined."""
    x = [Access(0, "W", 0, 8, covers=True, evidence="schema")]
    t = handmade([("a", x), ("b", []), ("c", x), ("d", x)], [Buffer(0, "x", 8, "activation")])
    w = build_workload(image_like(t), small_cluster(1), COSTS, 1)
    assert [s.group for s in w.sites] == [0, 0, 0, -1]
    assert "unknown" in w.sites[0].why and w.sites[3].why == ""


def test_parts_and_kinds_follow_the_kernels(tiny_mix: Mix) -> None:
    w = build_workload(tiny_mix, small_cluster(1), COSTS, 4)
    kind = {(s.unit, s.name): (s.part, s.kind) for s in w.sites}
    assert kind["decode", "layers.0/attention"] == ("attention", "attention_decode")
    assert kind["prefill", "layers.0/attention"] == ("attention", "attention_prefill")
    assert kind["decode", "head"] == ("head", "gemm")
    assert w.kinds == tuple(s.kind for s in w.sites)


def test_outside_the_grid_is_named(tiny_mix: Mix) -> None:
    w = build_workload(tiny_mix, small_cluster(1), COSTS, 12)
    assert w.extrapolated == ("decode",)
    with pytest.raises(InputError, match="unit decode: batch 17"):
        build_workload(tiny_mix, small_cluster(1), COSTS, 17)
    assert build_workload(tiny_mix, small_cluster(1), COSTS, 17, allow_extrapolation=True).batch == 17


def test_residual_share_is_weighted_by_time() -> None:
    """100 of 2100 measured ns are unexplained in both launches."""
    x = [Access(0, "W", 0, 8, covers=True, evidence="schema")]
    ends = {"median": 2100, "p10": 2100, "p90": 2100}
    t = handmade([("a", x), ("b", x)], [Buffer(0, "x", 8, "activation")], e2e_ns=ends)
    w = build_workload(image_like(t), small_cluster(1), COSTS, 1)
    assert w.residual_share == pytest.approx(100 / 2100)


def test_workspace_is_that_of_the_largest_unit(tiny_mix: Mix) -> None:
    w = build_workload(tiny_mix, small_cluster(1), COSTS, 1)
    prefill = next(t for t in tiny_mix.traces["prefill"] if t.meta.unit["tokens"] == 64)
    assert w.workspace_bytes == prefill.meta.workspace_bytes > 0
    b = [Buffer(0, "x", 8, "activation", first_use=0, last_use=1),
         Buffer(1, "y", 5, "workspace", first_use=1, last_use=1),
         Buffer(2, "z", 9, "activation", first_use=2, last_use=2)]  # fmt: skip
    t = handmade([("a", [Access(0, "W", 0, 8, covers=True, evidence="schema")])] * 3, b)
    assert build_workload(image_like(t), small_cluster(1), COSTS, 1).workspace_bytes == 13
