"""The calibrated model: exact where captured, sourced everywhere, and right about measured kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tesserasim.cluster.catalogue import find_gpu, gpus
from tesserasim.costs.calibrated import Calibrated
from tesserasim.costs.learn import REFERENCE, measure_spread, regime
from tesserasim.costs.mechanisms import LIMITS, features, known_side, specs
from tesserasim.costs.shipped import KINDS, shipped
from tesserasim.costs.sites import site_rows
from tesserasim.costs.tables import Rows, read_tables
from tesserasim.errors import InputError
from tesserasim.trace.model import Kernel, Trace, TraceMeta

pytestmark = pytest.mark.quick

SAMPLE = Path(__file__).parent / "data" / "costs"
MODEL = Calibrated()
GEMM = {"kind": "gemm", "shape": {"m": 64, "n": 4096, "k": 4096}, "act_dtype": "bf16", "weight_dtype": "bf16"}


def make_trace(*kernels: dict[str, Any], gpu: str = "H200-SXM") -> Trace:
    rows = tuple(
        Kernel(id=i, name=f"k{i}", **{"site": f"s{i}", "duration_ns": 20_000, **k}) for i, k in enumerate(kernels)
    )
    return Trace(TraceMeta("synthetic", "m", {"name": "u"}, gpu), rows)


def test_the_captured_gpu_gives_the_captured_durations() -> None:
    t = MODEL.kernel_ns(make_trace(GEMM, {**GEMM, "duration_ns": 33}), find_gpu("H200"))
    assert t.source == "captured" and t.ns.tolist() == [20_000, 33]


def test_every_source_is_used_and_named() -> None:
    """Mutation tried: `DIES` without the A100s -> the sibling becomes "spec" and the test fails."""
    trace = make_trace(GEMM, {"kind": "conv", "read_bytes": 10**6}, {**GEMM, "shape": {}})
    for gpu, source in (
        ("L40S", "calibrated"), ("A100-80GB-PCIe", "sibling A100-80GB-SXM"), ("H20", "sibling H100-SXM"),
        ("A40", "spec"), ("H200-SXM", "captured"),
    ):  # fmt: skip
        times = MODEL.site_times(trace, find_gpu(gpu))
        assert times.sources[0] == source
        assert times.sources[1] == times.sources[2] == ("captured" if source == "captured" else "roofline")
        assert (times.low_ns <= times.ns).all() and (times.ns <= times.high_ns).all()


def test_errors_grow_with_the_distance_from_measurement() -> None:
    trace = make_trace(GEMM)
    known, sibling, spec = (
        MODEL.kernel_ns(trace, find_gpu(g)).sigma_systematic[0] for g in ("A100-80GB-SXM", "A100-80GB-PCIe", "A40")
    )
    assert 0 < known < sibling and known < spec


def test_kernels_of_a_site_share_its_ratio_and_no_site_changes_another() -> None:
    split = {**GEMM, "site": "a"}
    reduce = {"kind": "gemm", "site": "a", "duration_ns": 4_000, "shape": {}}
    together = MODEL.kernel_ns(make_trace(split, reduce, {**GEMM, "site": "b"}), find_gpu("L40S"))
    alone = MODEL.kernel_ns(make_trace({**GEMM, "site": "b"}), find_gpu("L40S"))
    assert together.ns[0] / 20_000 == pytest.approx(together.ns[1] / 4_000)
    assert together.ns[2] == alone.ns[0]


def test_a_trace_of_another_gpu_is_scaled_by_two_predictions() -> None:
    """Captured on an L40S: the B200 is faster, a second L40S takes the same time."""
    trace = make_trace({**GEMM, "duration_ns": 60_000}, gpu="L40S")
    assert MODEL.kernel_ns(trace, find_gpu("L40S")).ns[0] == 60_000
    fast = MODEL.kernel_ns(trace, find_gpu("B200")).ns[0]
    assert 60_000 / 25 < fast < 60_000 / 2.5
    with pytest.raises(InputError, match="X900"):
        MODEL.kernel_ns(make_trace(GEMM, gpu="X900"), find_gpu("L40S"))


def table(kind: str) -> Rows:
    name = "elementwise_quant" if kind == "elementwise" else kind
    return read_tables([SAMPLE / f"{name}.parquet"])[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_measured_kernels_come_out(kind: str) -> None:
    """The shipped parameters against measured times they were fitted on: a wrong file, unit or join is far off.

    Mutations tried: reference in ns instead of us; forests of another kind -> fails.
    """
    rows, model = table(kind), shipped(kind, REFERENCE)
    rows = rows.take(np.isfinite(rows.reference_us))
    for gpu in model.forests:
        mine = rows.take(rows.is_gpu(gpu))
        assert len(mine) > 20
        predicted = model.predict(mine.shape, find_gpu(gpu), mine.reference_us)
        assert np.median(np.abs(predicted / mine.time_us - 1)) < 0.1
        error = np.log(mine.time_us / predicted)
        base, _ = model.base(mine.shape, find_gpu(gpu), model.known_side(mine.shape, mine.reference_us))
        where, spread = regime(kind, base), model.spread(gpu)
        assert 0.6 < np.mean((error >= spread.low[where]) & (error <= spread.high[where])) <= 1.0


def test_without_a_reference_the_models_still_know_their_gpus() -> None:
    for kind in KINDS:
        rows, model = table(kind), shipped(kind, None)
        for gpu in model.forests:
            mine = rows.take(rows.is_gpu(gpu))
            predicted = model.predict(mine.shape, find_gpu(gpu))
            assert np.median(np.abs(predicted / mine.time_us - 1)) < 0.15


def test_every_catalogued_gpu_gets_finite_times() -> None:
    attention = {"batch": 4, "seq_q": 1, "seq_kv": 2048, "heads": 32, "kv_heads": 8, "head_dim": 128}
    trace = make_trace(
        GEMM,
        {"kind": "attention_decode", "shape": attention, "act_dtype": "bf16"},
        {"kind": "attention_prefill", "shape": {**attention, "seq_q": 2048}, "act_dtype": "bf16"},
        {"kind": "moe", "op": "moe_up", "shape": {"n": 5760, "k": 2880, "experts": 32}, "flops": 132_710_400},
        {"kind": "norm", "read_bytes": 10**6, "write_bytes": 10**6},
        {"kind": "memset"},
    )
    assert {r.kind for r in site_rows(trace)} == set(KINDS)
    for name in gpus():
        t = MODEL.kernel_ns(trace, find_gpu(name))
        assert np.isfinite(t.ns).all() and (t.ns > 0).all()
        assert (t.sigma_systematic >= 0).all() and (t.sigma_site >= 0).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 10**10))
def test_any_shape_has_a_time(m: int, n: int, k: int, ns: int) -> None:
    trace = make_trace({**GEMM, "shape": {"m": m, "n": n, "k": k}, "duration_ns": ns})
    for gpu in ("B200", "L4"):
        t = MODEL.kernel_ns(trace, find_gpu(gpu)).ns[0]
        assert np.isfinite(t) and t > 0


def test_mechanisms_by_hand() -> None:
    """4096^3 in bf16 on an H200: 137.4 GFLOP at 989.4 TFLOP/s = 138.9 us; 8 x 32 tiles of waves on 132 SMs."""
    x = {"m": 4096.0, "n": 4096.0, "k": 4096.0, "w_bits": 16.0, "a_bits": 16.0, "block": 0.0}
    shape = {c: np.array([v]) for c, v in x.items()}
    limits = LIMITS["gemm"](shape, specs([find_gpu("H200")]))
    assert limits.compute[0] == pytest.approx(2 * 4096**3 / 989.4e6)
    assert limits.more[0][0] == pytest.approx(np.log2(1024 / 132))
    assert limits.more[1][0] == pytest.approx(1024 / 132 / 8)
    decode = {"batch": 8.0, "seq_q": 1.0, "seq_kv": 4096.0, "heads": 32.0, "kv_heads": 8.0, "head_dim": 128.0,
              "window": 128.0, "q_bits": 16.0, "kv_bits": 16.0, "copies": 64.0}  # fmt: skip
    memory = LIMITS["attention_decode"]({c: np.array([v]) for c, v in decode.items()}, specs([find_gpu("H200")])).memory
    assert memory[0] == pytest.approx((2 * 8 * 8 * 128 * 128 * 2 + 4 * 8 * 32 * 128) / 4.3e6)


def test_eight_bit_gemms_by_hand() -> None:
    """133 tiles of 64 x 128 on 132 SMs of an H200 take two turns; the quantisation has a floor and bytes of its own.

    Mutations tried: no `ceil` over the turns; bf16 quantised too; `launches` ignored -> fails each.
    """
    x = {"m": 1.0, "n": 133 * 128.0, "k": 4096.0, "w_bits": 8.0, "a_bits": 8.0, "block": 1.0}
    shape, h200 = {c: np.array([v]) for c, v in x.items()}, find_gpu("H200")
    limits = LIMITS["gemm"](shape, specs([h200]))
    fp8 = (h200.fp8_tflops or 0.0) * 1e6
    smooth, whole = 2 * 133 * 128 * 4096 / fp8, 2 * 2 * 64 * 128 * 4096 / (fp8 / 132)
    assert limits.compute[0] == pytest.approx((smooth * whole) ** 0.5) and limits.floor[0] == 4.0
    assert LIMITS["gemm"]({**shape, "launches": np.array([2.5])}, specs([h200])).floor[0] == 10.0
    wide = LIMITS["gemm"]({**shape, "a_bits": np.array([16.0])}, specs([h200]))
    assert wide.floor[0] == 2.0 and wide.compute[0] == pytest.approx(2 * 133 * 128 * 4096 / 989.4e6)


def test_the_same_gpu_keeps_a_reference_time() -> None:
    """Scaling from a GPU to itself changes nothing, whatever the captured time."""
    shape = {c: np.array([float(v)] * 3) for c, v in {**GEMM["shape"], "w_bits": 16, "a_bits": 16, "block": 0}.items()}  # type: ignore[dict-item]
    one, known = specs([find_gpu("H200")]), np.array([1.0, 10.0, 1000.0])
    base, _ = features("gemm", shape, one, known_side("gemm", shape, one, known))
    assert base == pytest.approx(known)


def test_a_spread_by_hand() -> None:
    """Two groups off by +0.1 and -0.1, each without scatter. Mutation tried: `site` without the mean -> fails."""
    error = np.repeat([0.1, -0.1], 500)
    s = measure_spread("gemm", np.full(1000, 50.0), error, np.zeros(1000, dtype=np.int64), np.repeat([0, 1], 500))
    assert (s.systematic, s.site) == (0.1, 0.0)
    assert s.low.tolist() == [-0.1] * 4 and s.high.tolist() == [0.1] * 4


def test_predictions_need_no_pandas() -> None:
    used = "from tesserasim.costs.calibrated import Calibrated; Calibrated().version"
    code = f"import sys; {used}; assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_expert_layer_is_found_behind_its_grouped_gemms() -> None:
    """Numbers of a captured gpt-oss-20b prefill: 1,024 tokens, top-4 of 32, 4-bit weights that the trace does not name.

    Mutation tried: `_weight_bits` returns 16 -> fails.
    """
    up = {"kind": "moe", "op": "moe_up", "act_dtype": "bf16", "flops": 135_895_449_600, "read_bytes": 288_309_504}
    down = {"kind": "moe", "op": "moe_down", "act_dtype": "bf16", "flops": 67_947_724_800, "read_bytes": 160_000_000}
    (rows,) = site_rows(
        make_trace(
            {**up, "shape": {"n": 5760, "k": 2880, "experts": 32}},
            {**down, "shape": {"n": 2880, "k": 2880, "experts": 32}},
        )
    )
    assert rows.kind == "moe" and rows.share.tolist() == pytest.approx([2 / 3, 1 / 3])
    for column, value in {"tokens": 1024, "hidden": 2880, "inter": 2880, "topk": 4, "w_bits": 4, "a_bits": 16}.items():
        assert rows.shape[column].tolist() == [value, value]
