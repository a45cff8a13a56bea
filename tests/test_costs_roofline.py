"""The roofline ratio: exact where captured, monotonic, honest about floors and about its own error."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs.base import default_costs
from tesserasim.costs.errors import from_table, load_errors
from tesserasim.costs.roofline import L2_USABLE, RooflineRatio, Work, limits, ratio, trace_work, work_ns
from tesserasim.errors import InputError
from tesserasim.trace.model import KINDS, Access, Buffer, Kernel, Trace, TraceMeta

pytestmark = pytest.mark.quick

REPO = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("TESSERASIM_SHARED", REPO.parent / "shared"))
H200, L40S, B200 = find_gpu("H200-SXM"), find_gpu("L40S"), find_gpu("B200")


def make_trace(*kernels: dict[str, Any], gpu: str = "NVIDIA H200", buffers: tuple[Buffer, ...] = ()) -> Trace:
    rows = tuple(Kernel(id=i, name=f"k{i}", **{"site": f"s{i}", **k}) for i, k in enumerate(kernels))
    return Trace(TraceMeta("synthetic", "m", {"name": "u"}, gpu), rows, buffers)


def gemm(ns: int, flops: int = 0, nbytes: int = 0, **more: Any) -> dict[str, Any]:
    return {"kind": "gemm", "duration_ns": ns, "flops": flops, "read_bytes": nbytes, **more}


def test_the_captured_gpu_gives_the_captured_durations() -> None:
    """Mutation tried: compare `trace.meta.gpu` instead of the catalogue's name with `gpu.name` -> fails."""
    trace = make_trace(
        gemm(1001, 5, 7, duration_p10_ns=900, duration_p90_ns=1100), gemm(0), gemm(33, duration_p90_ns=0)
    )
    t = default_costs().kernel_ns(trace, H200)
    assert t.source == "captured" and t.ns.tolist() == [1001, 0, 33]
    assert t.sigma_site[0] == pytest.approx(200 / 2.563 / 1001)
    assert t.sigma_site[1] == t.sigma_site[2] == 0 and (t.sigma_systematic == 0.015).all()


def test_weights_stream_at_dram_bandwidth_and_large_gemms_at_tensor_rate() -> None:
    """Mutation tried: swap captured and target in `ratio` -> fails."""
    trace = make_trace(gemm(300_000, 10**9, 10**9), gemm(10**6, 7 * 10**11, 10**6))
    ns = RooflineRatio().kernel_ns(trace, L40S).ns
    assert ns[0] == pytest.approx(300_000 * H200.dram_gbs / L40S.dram_gbs)
    assert ns[1] == pytest.approx(10**6 * H200.bf16_tflops / L40S.bf16_tflops)


def test_a_kernel_at_its_floor_keeps_its_time() -> None:
    """Mutation tried: `FLOOR_NS = 0` -> fails."""
    small = {"kind": "attention_decode", "duration_ns": 8_000, "read_bytes": 10**5}
    trace = make_trace(gemm(2_400, 10**6, 10**4), small, {"kind": "norm", "duration_ns": 1_500, "read_bytes": 8192})
    for gpu in ("L40S", "B200", "A100-80GB-PCIe"):
        assert RooflineRatio().kernel_ns(trace, find_gpu(gpu)).ns.tolist() == [2_400, 8_000, 1_500]


def test_work_above_the_floor_on_the_target_counts_from_there() -> None:
    """2 us at the floor on H200; the L40S needs 10 MB / 864 GB/s = 11.6 us for the same bytes.

    Mutation tried: a floor that is not limited to the captured time -> fails.
    """
    ns = RooflineRatio().kernel_ns(make_trace(gemm(2_400, 0, 10_000_000)), L40S).ns
    assert ns[0] == pytest.approx(10_000_000 / L40S.dram_gbs)


def test_activations_that_fit_the_l2_move_at_its_speed_but_weights_do_not() -> None:
    """Mutation tried: `fits` is always true -> fails."""
    zero, one = np.zeros(3), np.ones(3)
    nbytes = np.array([20e6, 20e6, 200e6])
    cold = np.array([1.0, 0.0, 0.0])
    work = Work(zero, zero, nbytes * cold, nbytes * (one - cold), nbytes * (one - cold), zero)
    assert nbytes[1] < L2_USABLE * L40S.l2_bytes < nbytes[2]
    assert work_ns(work, L40S) == pytest.approx(nbytes / np.array([864, L40S.l2_gbs, 864]))


def test_cold_bytes_are_the_weights_and_state_of_the_accesses() -> None:
    buffers = (Buffer(0, "w", 1000, "weight"), Buffer(1, "x", 500, "activation"), Buffer(2, "kv", 10**6, "state"))
    both = {"read_bytes": 1400, "write_bytes": 100}
    trace = make_trace(
        {"kind": "gemm", **both, "accesses": (Access(0, "R", 0, 1000), Access(1, "RW", 0, 500))},
        {"kind": "elementwise", **both, "accesses": (Access(2, "W", 0, 10**6),)},
        {"kind": "gemm", **both},
        {"kind": "elementwise", **both},
        buffers=buffers,
    )
    assert trace_work(trace).cold.tolist() == [1000, 1500, 1500, 0]


def test_the_ratio_is_taken_per_site() -> None:
    """Split-K and its reduce scale alike. Mutation tried: `site` numbers every kernel on its own -> fails."""
    split, reduce = gemm(90_000, 10**8, 4 * 10**8, site="a"), gemm(10_000, 0, 10**6, site="a")
    trace = make_trace(split, reduce, gemm(5_000, site="b"))
    ns = RooflineRatio().kernel_ns(trace, L40S).ns
    assert ns[0] / 90_000 == pytest.approx(ns[1] / 10_000)
    assert ns[0] > 3 * 90_000


def test_a_site_of_unknown_size_scales_with_bandwidth_and_says_it_is_unsure() -> None:
    """Mutation tried: leave `doubt` out -> fails."""
    model = RooflineRatio()
    t = model.kernel_ns(make_trace(gemm(102_500), gemm(102_500, 10**9, 10**8)), L40S)
    assert t.ns[0] == pytest.approx(2_500 + 100_000 * H200.dram_gbs / L40S.dram_gbs)
    assert t.sigma_systematic[0] > t.sigma_systematic[1] == model.errors.systematic("gemm")


def test_an_unknown_captured_gpu_is_an_input_error() -> None:
    with pytest.raises(InputError, match="X900"):
        default_costs().kernel_ns(make_trace(gemm(1), gpu="NVIDIA X900"), L40S)


def test_an_empty_trace_has_no_times() -> None:
    assert len(default_costs().kernel_ns(make_trace(), L40S).ns) == 0


amount = st.one_of(st.integers(0, 10**12), st.integers(0, 10**9), st.just(0))  # around the L2's size, too
kernel = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "duration_ns": st.integers(0, 10**8),
        "flops": amount,
        "read_bytes": amount,
        "write_bytes": amount,
        "act_dtype": st.sampled_from(["bfloat16", "float8_e4m3fn", ""]),
        "site": st.sampled_from("abcd"),
    }
)
gain = st.floats(1.0, 20.0)


@given(st.lists(kernel, min_size=1, max_size=8), gain, gain, gain, gain)
def test_a_better_gpu_is_never_slower(
    kernels: list[dict[str, Any]], compute: float, dram: float, l2: float, size: float
) -> None:
    """More FLOP/s, bandwidth, L2 rate and L2 size at the same floor: no kernel takes longer.

    Mutation tried: an L2 slower than DRAM (drop the `max` in `work_ns`) with `l2_gbs` below it -> fails.
    """
    worse = dataclasses.replace(L40S, name="worse", l2_gbs=700.0)
    better = dataclasses.replace(
        worse,
        name="better",
        bf16_tflops=worse.bf16_tflops * compute,
        fp8_tflops=(worse.fp8_tflops or 0) * compute,
        bandwidth_gbs=worse.bandwidth_gbs * dram,
        l2_gbs=700.0 * l2,
        l2_bytes=int(worse.l2_bytes * size),
    )
    trace, model = make_trace(*kernels), RooflineRatio()
    slow, fast = model.kernel_ns(trace, worse), model.kernel_ns(trace, better)
    assert (fast.ns <= slow.ns * (1 + 1e-12)).all()
    for t in (slow, fast):
        assert np.isfinite(t.ns).all() and (t.ns >= 0).all()
        assert ((t.ns == 0) == (np.array([k.duration_ns for k in trace.kernels]) == 0)).all()


def test_the_same_figures_give_ratio_one() -> None:
    work = trace_work(make_trace(gemm(10**5, 10**10, 10**8), gemm(10**5)))
    assert ratio(work, np.array([1e5, 1e5]), H200, H200).tolist() == [1.0, 1.0]
    assert limits(work, np.array([1e5, 1e5]), H200).tolist() == ["memory", "floor"]


# --- the error table -----------------------------------------------------------------------------------


def shipped() -> dict[str, Any]:
    text = resources.files("tesserasim.costs").joinpath("data", "roofline_errors.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def test_the_shipped_error_table_is_whole() -> None:
    """Mutation tried: delete `source` from the file -> fails."""
    table = shipped()
    assert table["schema"] == 1 and table["source"] and table["date"] and table["model"] == "roofline-ratio"
    assert set(table["kinds"]) == {"gemm", "attention_prefill", "attention_decode", "moe", "elementwise"}
    for k in table["kinds"].values():
        assert 0.02 < k["systematic"] < 1 and 0.02 < k["site"] < 1
        assert k["n"] == sum(g["n"] for g in k["gpus"].values()) and len(k["gpus"]) >= 4


def test_kinds_without_a_table_get_the_worst() -> None:
    """Mutation tried: `fallback` takes the least -> fails."""
    errors = load_errors()
    for kind in set(KINDS) - errors.measured:
        assert errors.systematic(kind) == max(errors.systematic(k) for k in errors.measured)
        assert errors.site(kind) == max(errors.site(k) for k in errors.measured)
    assert {"conv", "ssm_scan", "sampling"}.isdisjoint(errors.measured)


def test_the_version_depends_on_the_error_table() -> None:
    table = shipped()
    table["kinds"]["gemm"]["systematic"] += 0.01
    assert RooflineRatio(from_table(table)).version != RooflineRatio().version


def _validation() -> ModuleType:
    path = REPO / "experiments" / "validation" / "costs_roofline.py"
    spec = importlib.util.spec_from_file_location("costs_roofline", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not (SHARED / "data" / "kernels" / "gemm.parquet").is_file(), reason="no kernel tables here")
def test_the_shipped_errors_are_those_measured_now() -> None:
    """The model and its stated error belong together: a changed floor or bandwidth needs a new table.

    Mutation tried: `L2_USABLE = 0.3` without rewriting the table -> fails.
    """
    table = _validation().evaluate(SHARED / "data" / "kernels")
    assert json.loads(json.dumps({k: v for k, v in table.items() if k != "date"})) == {
        k: v for k, v in shipped().items() if k != "date"
    }
