"""Units between captured points: exact where captured, linear in the cell, honest outside it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_cases import handmade

from tesserasim.errors import InputError
from tesserasim.trace.grid import Grid, captured_times, merge_sites, predict_unit_ns
from tesserasim.trace.mix import Mix, UnitInstance
from tesserasim.trace.model import Access, Buffer, Kernel, Trace
from tesserasim.trace.synthetic import DecoderShape, decoder_unit

pytestmark = pytest.mark.quick


def point(batch: int, context: int, times: list[int], gaps: list[int] | None = None, e2e: int | None = None) -> Trace:
    """A decode trace: sites a, b, c...; two kernels of 3:1 in site `a`."""
    names = ["a", "a", *"bcdefg"[: len(times) - 1]]
    split = [times[0] * 3 // 4, times[0] - times[0] * 3 // 4, *times[1:]]
    x = Access(0, "W", 0, 8, covers=True, evidence="schema")
    t = handmade([(s, [x]) for s in names], [Buffer(0, "x", 8, "activation")], "decode", split, gaps)
    unit = {"name": "decode", "phase": "decode", "batch": batch, "tokens": 1, "context": context}
    launch = {"empty_graph_ns": 10 * batch, "per_node_ns": 1}
    ends = {"median": e2e, "p10": e2e, "p90": e2e} if e2e is not None else None
    return dataclasses.replace(t, meta=dataclasses.replace(t.meta, unit=unit, launch=launch, e2e_ns=ends))


def decode(batch: int, context: int) -> UnitInstance:
    return UnitInstance("decode", batch, 1, context)


CORNERS = [
    point(8, 100, [4000, 2000], [0, 500, -40]), point(8, 300, [8000, 2000], [0, 500, -80]),
    point(16, 100, [6000, 3000], [0, 700, -40]), point(16, 300, [12000, 3000], [0, 900, -80]),
]  # fmt: skip


def test_a_captured_point_gives_its_own_numbers(llm_mix: Mix) -> None:
    """Mutation tried: a site's time shared out equally over its kernels."""
    for unit, grid in ((u, Grid(llm_mix.traces[u])) for u in llm_mix.units):
        for t in llm_mix.traces[unit]:
            u = t.meta.unit
            p = grid.profile(UnitInstance(unit, u["batch"], u["tokens"], u["context"]), captured_times)
            assert p.trace is t and not p.extrapolated and p.byte_scale == 1.0
            np.testing.assert_allclose(p.duration_ns, captured_times(t), rtol=1e-12)
            np.testing.assert_allclose(p.gap_ns, [k.gap_ns for k in t.kernels], rtol=1e-12)
            assert p.launch_ns == pytest.approx(t.launch_ns)


def test_bilinear_inside_the_cell_by_hand() -> None:
    """At batch 12, context 150: a = 0.5 (0.75*4000+0.25*8000) + 0.5 (0.75*6000+0.25*12000), b = 2500.

    Mutations tried: both neighbours weighted 0.5; weights multiplied by the wrong axis (b_weight * b_weight).
    """
    p = Grid(CORNERS).profile(decode(12, 150), captured_times)
    assert p.trace is CORNERS[3] and p.byte_scale == 0.75 and not p.extrapolated
    np.testing.assert_allclose(p.duration_ns, [0.75 * 6250, 0.25 * 6250, 2500])
    site_gap = 0.5 * 500 + 0.5 * (0.75 * 700 + 0.25 * 900)
    np.testing.assert_allclose(p.gap_ns, [0, site_gap, -50])
    assert p.launch_ns == pytest.approx(123)


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 16), st.integers(100, 300), st.integers(8, 16))
def test_linear_along_every_axis(batch: int, context: int, other: int) -> None:
    """Second differences along batch and along context vanish; many launches at once give the same numbers."""
    grid = Grid(CORNERS)
    f = lambda b, c: predict_unit_ns(CORNERS, decode(b, c))  # noqa: E731
    w = (batch - 8) / 8
    assert f(batch, context) == pytest.approx((1 - w) * f(8, context) + w * f(16, context))
    w = (context - 100) / 200
    assert f(batch, context) == pytest.approx((1 - w) * f(batch, 100) + w * f(batch, 300))
    runs = grid.profiles([decode(batch, context), decode(other, 300)], grid.table(captured_times))
    assert runs[0].profile(0).unit_ns == pytest.approx(f(batch, context), rel=1e-12)
    assert runs[-1].profile(len(runs[-1]) - 1).unit_ns == pytest.approx(f(other, 300), rel=1e-12)


def test_the_left_out_point_of_a_synthetic_decoder_is_within_five_percent() -> None:
    """Batch 16, context 1536 from batch 8, 32 × context 512, 2048; mutation tried: structure instead of cell."""
    s = DecoderShape(layers=4)
    traces = [decoder_unit(s, "decode", b, 1, c) for b in (8, 32) for c in (512, 2048)]
    truth = decoder_unit(s, "decode", 16, 1, 1536)
    assert predict_unit_ns(traces, decode(16, 1536)) == pytest.approx(truth.span_ns + truth.launch_ns, rel=0.05)


def test_the_kernel_list_is_that_of_the_nearest_larger_point() -> None:
    grid = Grid(CORNERS)
    assert grid.structure(8, 100) == 0 and grid.structure(8, 101) == 1
    assert grid.structure(9, 100) == 2 and grid.structure(9, 101) == 3
    assert grid.structure(20, 500) == 3  # beyond the grid: the largest


def test_a_missing_corner_is_a_plane_and_flagged() -> None:
    """Mutation tried: `holes` never set."""
    inside = Grid(CORNERS[:3]).profile(decode(12, 200), captured_times)
    assert inside.extrapolated
    # plane through three corners: a = 4000 + 2000/8 * 4 + 4000/200 * 100 = 7000
    assert inside.duration_ns[:2].sum() == pytest.approx(7000)
    edge = Grid(CORNERS[:3]).profile(decode(12, 100), captured_times)
    assert not edge.extrapolated  # both corners it needs were captured


def test_beyond_the_grid_is_flagged_and_refused_beyond_two() -> None:
    """Mutation tried: `reach > MAX_REACH` turned into `reach > 3`."""
    grid = Grid(CORNERS)
    p = grid.profile(decode(32, 300), captured_times)
    assert p.extrapolated and p.duration_ns[:2].sum() == pytest.approx(12000 + 2 * 4000)
    for outside in (decode(33, 300), decode(3, 300), decode(16, 601), decode(16, 49)):
        with pytest.raises(InputError, match="factor of 2 outside"):
            grid.profile(outside, captured_times)
        assert grid.profile(outside, captured_times, allow_extrapolation=True).extrapolated


def test_an_axis_with_one_value_scales_with_bytes_and_flops() -> None:
    """Weights are read once whatever the batch; FLOPs grow with it. Mutation tried: factor = ratio."""
    buffers = [Buffer(0, "w", 10_000, "weight"), Buffer(1, "x", 100, "activation")]
    memory = [Access(0, "R", 0, 10_000, evidence="schema"), Access(1, "W", 0, 100, covers=True, evidence="schema")]
    t = handmade([("memory", memory), ("compute", memory[1:])], buffers, "encode")
    kernels = tuple(
        dataclasses.replace(k, read_bytes=r, write_bytes=100, flops=f)
        for k, r, f in zip(t.kernels, (10_000, 0), (0, 10_000_000), strict=True)
    )
    t = dataclasses.replace(t, kernels=kernels)
    p = Grid([t]).profile(UnitInstance("encode", 2, 1, 0), captured_times)
    assert p.extrapolated and p.byte_scale == 2.0
    np.testing.assert_allclose(p.duration_ns, [1000 * 10_200 / 10_100, 2000])
    with pytest.raises(InputError, match="batch 4"):
        Grid([t]).profile(UnitInstance("encode", 4, 1, 0), captured_times)


def test_a_site_that_a_corner_lacks_takes_the_corners_that_have_it() -> None:
    """Mutation tried: the missing corner counted as zero time."""
    small, large = point(8, 100, [4000]), point(16, 100, [6000, 3000])
    p = Grid([small, large]).profile(decode(12, 100), captured_times)
    assert p.duration_ns[2] == pytest.approx(3000)
    assert p.duration_ns[:2].sum() == pytest.approx(5000)
    assert Grid([small, large]).profile(decode(8, 100), captured_times).trace is small


def test_gaps_of_opposite_sign_inside_a_site_do_not_blow_up() -> None:
    near, far = point(8, 100, [4000], [100, -99]), point(16, 100, [4000], [100, -99])
    far = dataclasses.replace(far, kernels=(dataclasses.replace(far.kernels[0], gap_ns=300), far.kernels[1]))
    p = Grid([near, far]).profile(decode(12, 100), captured_times)
    assert p.gap_ns.sum() == pytest.approx(101)
    assert np.abs(p.gap_ns).max() < 400


def test_times_of_another_gpu_are_shared_out_by_that_gpu() -> None:
    """Mutation tried: shares taken from the captured durations."""

    def slow_second(t: Trace) -> np.ndarray:
        return np.array([1.0, 9.0, 5.0])

    p = Grid(CORNERS).profile(decode(10, 200), slow_second)
    np.testing.assert_allclose(p.duration_ns, [1, 9, 5])


def test_residual_is_interpolated_or_unknown() -> None:
    a, b = point(8, 100, [4000], e2e=4000 + 82 + 50), point(16, 100, [4000], e2e=4000 + 162 + 150)
    assert Grid([a, b]).profile(decode(12, 100), captured_times).residual_ns == pytest.approx(100)
    assert Grid([a, point(16, 100, [4000])]).profile(decode(12, 100), captured_times).residual_ns is None


def test_whole_nanoseconds_round_half_up_and_never_vanish() -> None:
    """Mutation tried: shave not limited to duration - 1."""
    t = point(8, 100, [4, 2], [0, 3, -9])
    run = Grid([t]).profiles([decode(8, 100)], Grid([t]).table(lambda t: np.array([0.2, 2.5, 5.0])))[0]
    exact = run.integers()
    assert exact.duration.tolist() == [[1, 3, 5]]
    assert exact.delay.tolist() == [[0, 3, 0]] and exact.shave.tolist() == [[0, 0, 4]]


def test_two_traces_at_one_point_are_an_error() -> None:
    with pytest.raises(InputError, match="two traces at batch 8"):
        Grid([CORNERS[0], CORNERS[0]])


def test_merged_sites_keep_program_order() -> None:
    assert merge_sites([["a", "b", "d"], ["a", "c", "d", "e"], ["x", "a"]]) == ("x", "a", "c", "b", "d", "e")


def test_negative_times_of_an_extrapolated_line_stop_at_zero() -> None:
    steep = [point(8, 100, [100]), point(16, 100, [10000])]
    p = Grid(steep).profile(decode(4, 100), captured_times)
    assert p.extrapolated and p.duration_ns.min() == 0.0


def test_kernels_of_the_profile_are_the_traces_own(tiny_mix: Mix) -> None:
    p = Grid(tiny_mix.traces["decode"]).profile(decode(3, 100), captured_times)
    assert isinstance(p.trace.kernels[0], Kernel) and len(p.duration_ns) == len(p.trace)
