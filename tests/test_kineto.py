"""Kineto import: values inside valid JSON, order, gaps, links. Times in ns; 1 µs in the file is 1000."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kineto_cases import SHARED, SMALL, call, cpu_op, document, event, kernel, needs_shared, write

from tesserasim.errors import NotKernelTraceError
from tesserasim.trace.importer import import_profile
from tesserasim.trace.inspect import inspect_file
from tesserasim.trace.model import Trace
from tesserasim.trace.names import kernel_kind, short_name
from tesserasim.trace.parquet import read_trace, write_trace
from tesserasim.trace.values import ns_of_us

pytestmark = pytest.mark.quick


def load(tmp_path: Path, events: list[Any], **top: Any) -> Trace:
    return import_profile(write(tmp_path / "profile.json", document(events, **top)))


def times(trace: Trace) -> list[tuple[str, int, int, int]]:
    return [(k.name, k.start_ns, k.duration_ns, k.gap_ns) for k in trace]


def test_own_small_profile_whole(tmp_path: Path) -> None:
    """One profile of every ingredient, row by row.

    Mutation tried: gaps taken to the row before on *any* stream in `_kernels` → fails.
    """
    trace = import_profile(SMALL)
    rows = [(k.site, k.kind, k.stream, k.start_ns, k.duration_ns, k.gap_ns) for k in trace]
    assert rows == [
        ("memcpy#0", "copy", 20, 0, 2500, 0),
        ("aten::mm#0", "memset", 7, 19375, 768, 0),
        ("aten::mm#0", "gemm", 7, 20375, 30250, 232),
        ("ncclDevKernel_AllReduce_Sum_f16_RING_LL#0", "collective", 20, 48875, 40000, 46375),
        ("flash_fwd_splitkv_kernel#0", "attention_decode", 7, 58875, 12001, 8250),
        ("rms_norm_kernel#0", "norm", 7, 72375, 2000, 1499),
    ]
    gemm = trace.kernels[2]
    assert (gemm.grid, gemm.block, gemm.registers, gemm.shared_bytes) == ((8, 1, 1), (128, 1, 1), 122, 8192)
    assert (trace.meta.origin, trace.meta.source, trace.meta.gpu) == (
        "imported", "kineto_small.json", "NVIDIA H100 80GB HBM3",
    )  # fmt: skip
    copy, memset = trace.kernels[0], trace.kernels[1]
    assert (copy.read_bytes, copy.write_bytes, memset.write_bytes) == (0, 4096, 512)
    write_trace(trace, tmp_path / "t.parquet")
    assert read_trace(tmp_path / "t.parquet") == trace


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1732107143473443.069", 1732107143473443069), ("0.1", 100), ("7", 7000), (7, 7000), ("0.0005", 1),
        ("0.00049", 0), ("-0.0005", 0), ("-1.5", -1500), ("1e3", 1000000), (" 4 ", 4000), ("1.", 1000),
        ("1e400", None), ("", None), ("nan", None), (None, None), (True, None), ([1], None), ("0x10", None),
        ("123456789012345678.9995", 123456789012345679000),
    ],
)  # fmt: skip
def test_decimal_microseconds_become_exact_nanoseconds(text: Any, ns: int | None) -> None:
    """Mutation tried: `int(float(text) * 1000)` for plain decimals → the first case fails."""
    assert ns_of_us(text) == ns


def test_epoch_times_with_decimals_do_not_pass_through_float(tmp_path: Path) -> None:
    """Gaps of 49 ns next to 1.7e15 µs, where a double steps by 250 ns.

    Mutation tried: `parse_float=float` with `str()` in `ns_of_us` → fails.
    """
    rows = ",".join(
        f'{{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":17321071434734{43 + i}.{69 + 549 * i:03d},'
        f'"dur":0.5,"args":{{"stream":7,"device":0}}}}'
        for i in range(2)
    )
    rows = rows.replace("44.618", "43.618")
    trace = import_profile(write(tmp_path / "t.json", f'{{"traceEvents":[{rows}]}}'))
    assert [k.gap_ns for k in trace] == [0, 49]
    assert trace.meta.extra["first_event_ns"] == 1732107143473443069


def test_sub_microsecond_kernels_keep_their_length(tmp_path: Path) -> None:
    trace = load(tmp_path, [kernel("a", 100.7, 0.2), kernel("b", 101.3, 0.45), kernel("c", 102.1, 900.25)])
    assert times(trace) == [("a", 0, 200, 0), ("b", 600, 450, 400), ("c", 1400, 900250, 350)]


def test_touching_rows_have_gap_zero(tmp_path: Path) -> None:
    """0.1 + 0.2 in floats is more than 0.3.

    Mutation tried: `Row.end_ns` computed in float µs → the rows at 1.7e15 µs do not touch, fails.
    """
    assert [k.gap_ns for k in load(tmp_path, [kernel("a", 0.1, 0.2), kernel("b", 0.3, 0.3)])] == [0, 0]
    late = [kernel("a", "1732107143473443.069", 0.549), kernel("b", "1732107143473443.618", 1)]
    assert [k.gap_ns for k in load(tmp_path, late)] == [0, 0]


def test_rows_at_time_zero_beside_an_epoch_clock_are_dropped_and_counted(tmp_path: Path) -> None:
    """Mutation tried: `_drop_unset_times` returns at once → the span is 54 years and the test fails."""
    epoch = 1_700_000_000_000_000
    events = [kernel("lost", 0, 0) for _ in range(1200)]
    kept = [kernel("lost", 0, 7), call("cudaLaunchKernel", epoch, 1), kernel("k", epoch + 5, 40)]
    trace = load(tmp_path, [*events, *kept])
    assert times(trace) == [("k", 0, 40000, 0)]
    assert any("dropped 1201 GPU events" in w for w in trace.meta.warnings)
    with pytest.raises(NotKernelTraceError, match="dropped 1200 GPU events"):
        load(tmp_path, [*events, call("cudaLaunchKernel", epoch, 1)])


def test_time_zero_is_a_time_where_the_clock_starts_there(tmp_path: Path) -> None:
    assert len(load(tmp_path, [kernel("a", 0, 0), kernel("b", 5, 1)])) == 2


def test_two_clocks_are_said(tmp_path: Path) -> None:
    trace = load(tmp_path, [kernel("a", 5, 1), kernel("b", 1_700_000_000_000_000, 1)])
    assert any("two clocks" in w for w in trace.meta.warnings)


def test_synchronisation_and_annotations_are_no_kernels(tmp_path: Path) -> None:
    """Mutation tried: the category test replaced by "on a GPU track" (pid 0) → fails."""
    noise = [
        event("cuda_sync", "Stream Sync", 12, 500, stream=7, device=0),
        event("gpu_user_annotation", "step", 9, 600),
        kernel("Event Sync", 12, 500), kernel("Stream Wait Event", 12, 500), kernel("Device Sync", 12, 500),
    ]  # fmt: skip
    assert times(load(tmp_path, [kernel("gemm", 10, 20), *noise])) == [("gemm", 0, 20000, 0)]


def test_old_names_strings_and_nulls(tmp_path: Path) -> None:
    """2021 categories, numbers in quotes, "stream 7", rows without times.

    Mutation tried: `label` without its "last number" rule → the stream of the first row differs, fails.
    """
    old = {"ph": "X", "cat": "Kernel", "name": "k", "pid": "0", "tid": "stream 7", "ts": "1635202069792700"}
    events = [
        {**old, "dur": "4", "args": {"device": "0", "correlation": "34", "grid": "[99,1,1]"}},
        {**old, "cat": "Memcpy", "ts": "1635202069792710", "dur": "1.5", "args": {"stream": "7"}},
        {**old, "cat": "Memset", "ts": "1635202069792720", "dur": 1, "args": None},
        {**old, "name": None, "ts": 5, "dur": None, "args": None},
        {"ph": "X", "cat": "kernel", "name": "no duration", "pid": 0, "tid": 7, "ts": 9},
        {**old, "dur": "-3"}, {**old, "dur": "1e18"}, {**old, "ts": "never"},
    ]  # fmt: skip
    trace = load(tmp_path, events)
    assert [(k.kind, k.device, k.stream, k.start_ns, k.duration_ns) for k in trace] == [
        ("other", 0, 7, 0, 4000), ("copy", 0, 7, 10000, 1500), ("memset", 0, 7, 20000, 1000),
    ]  # fmt: skip
    assert trace.kernels[0].grid == (99, 1, 1)
    assert sorted(w[:23] for w in trace.meta.warnings) == ["dropped 2 GPU events wi", "dropped 3 GPU events wi"]


def test_negative_occupancy_changes_nothing(tmp_path: Path) -> None:
    plain = load(tmp_path, [kernel("k", 1, 2)])
    odd = load(tmp_path, [kernel("k", 1, 2, **{"est. achieved occupancy %": -26})])
    assert odd.kernels == plain.kernels
    assert any("negative occupancy" in w for w in odd.meta.warnings)


def test_runaway_duration_is_flagged_and_clipped_on_request(tmp_path: Path) -> None:
    """Mutation tried: `_clip` cuts at the end of the next row instead of its start → fails."""
    events = [kernel("fmha_bwd", 10, 1_600_000), kernel("gemm", 90, 40), kernel("gemm", 140, 40)]
    path = write(tmp_path / "t.json", document(events))
    trace = import_profile(path)
    assert trace.busy_ns == 1_600_080_000
    assert any("busy time are not real" in w for w in trace.meta.warnings)
    clipped = import_profile(path, clip=True)
    assert [k.duration_ns for k in clipped] == [80000, 40000, 40000]
    assert [k.gap_ns for k in clipped] == [0, 0, 10000]


def test_graph_kernels_are_never_merged_by_correlation(tmp_path: Path) -> None:
    """Mutation tried: rows kept in a dict by correlation id → one of five is left, fails."""
    events = [call("cudaGraphLaunch", 100, 500), *(kernel(f"k{i}", 200 + 10 * i, 8, correlation=500) for i in range(5))]
    facts = inspect_file(write(tmp_path / "t.json", document(events)))
    assert (facts["kernels"], facts["graph_kernels"], facts["busy_ns"]) == (5, 5, 40000)


@pytest.mark.parametrize("name", ["cuGraphLaunch", "hipGraphLaunch", "cudaGraphLaunch_v10000"])
def test_graph_launches_of_all_vendors(tmp_path: Path, name: str) -> None:
    calls = [call(name, 1, 5), call("cudaLaunchKernel", 2, 6)]
    kernels = [kernel("a", 9, 1, correlation=5), kernel("b", 11, 1, correlation=6)]
    assert inspect_file(write(tmp_path / "t.json", document(calls + kernels)))["graph_kernels"] == 1


def test_overlap_in_a_graph_is_flagged_and_put_in_launch_order(tmp_path: Path) -> None:
    """Times of graph kernels contradict each other: node ids decide, else the file.

    Mutation tried: `_launch_order` returns the order by time → the order is c, a, b, fails.
    """
    launch = call("cudaGraphLaunch", 100, 1)
    a, b, c = (kernel(n, t, 50, correlation=1) for n, t in (("a", 200), ("b", 200), ("c", 199)))
    trace = load(tmp_path, [launch, a, b, c])
    assert [k.name for k in trace] == ["a", "b", "c"]
    assert any("2 rows starting before an earlier one" in w for w in trace.meta.warnings)
    for node, row in enumerate((c, b, a), start=1):
        row["args"]["graph node id"] = node
    assert [k.name for k in load(tmp_path, [launch, a, b, c])] == ["c", "b", "a"]


def test_file_order_is_not_believed_where_it_contradicts_time(tmp_path: Path) -> None:
    """Mutation tried: the check of keys in `_overlapping_graph_rows` always true → b before a, fails."""
    launch = call("cudaGraphLaunch", 100, 1)
    events = [kernel(n, t, d, correlation=1) for n, t, d in (("d", 300, 9), ("b", 205, 9), ("a", 200, 9))]
    assert [k.name for k in load(tmp_path, [launch, *events])] == ["a", "b", "d"]


def test_launching_operator_is_found_by_time_and_thread(tmp_path: Path) -> None:
    """Innermost operator around the launch; "External id" may be a copy of the correlation id.

    Mutation tried: external id asked before the call → the site is of `aten::empty`, fails.
    """
    events = [
        cpu_op("aten::linear", 0, 100, **{"External id": 1}), cpu_op("aten::addmm", 10, 50, **{"External id": 2}),
        cpu_op("aten::empty", 0, 100, tid=5, **{"External id": 14}), cpu_op("aten::relu", 70, 20),
        call("cudaMemsetAsync", 15, 13), call("cudaLaunchKernel", 20, 14), call("cudaLaunchKernel", 75, 15),
        event("gpu_memset", "Memset (Device)", 30, 1, device=0, stream=7, correlation=13),
        kernel("gemm", 32, 5, correlation=14, **{"External id": 14}), kernel("relu", 90, 5, correlation=15),
        kernel("alone", 99, 5, correlation=77), kernel("by_id", 110, 5, **{"External id": 2}),
    ]  # fmt: skip
    sites = [k.site for k in load(tmp_path, events)]
    assert sites == ["aten::addmm#0", "aten::addmm#0", "aten::relu#0", "alone#0", "aten::addmm#0"]


def test_amd_without_correlation_device_or_stream(tmp_path: Path) -> None:
    events = [
        event("cuda_runtime", "hipExtModuleLaunchKernel", 1, 2, pid=1, tid=1, **{"External id": 131}),
        event("kernel", "Cijk_Alik_Bljk", 10, 32, pid=2, tid=0, **{"External id": 131}),
        event("gpu_memcpy", "CopyHostToDevice", 50, 9, pid=2, tid=0, bytes=64),
    ]
    trace = load(tmp_path, events, deviceProperties=[{"id": 0, "name": "AMD Instinct MI300X"}])
    assert [(k.kind, k.device, k.stream, k.write_bytes) for k in trace] == [("gemm", 2, 0, 0), ("copy", 2, 0, 64)]
    assert trace.kernels[1].read_bytes == 0


def test_streams_and_devices_with_names_or_huge_numbers_fit_the_columns(tmp_path: Path) -> None:
    events = [kernel("a", 1, 1, stream="default"), kernel("b", 3, 1, stream=2**63), kernel("c", 5, 1, device=-7)]
    trace = load(tmp_path, events)
    assert len({(k.device, k.stream) for k in trace}) == 3
    write_trace(trace, tmp_path / "t.parquet")
    assert read_trace(tmp_path / "t.parquet") == trace


def test_names_that_are_not_unicode_are_kept_readable(tmp_path: Path) -> None:
    text = '{"traceEvents":[{"ph":"X","cat":"kernel","name":"a\\ud800b","ts":1,"dur":1,"pid":0,"tid":7}]}'
    trace = import_profile(write(tmp_path / "t.json", text))
    assert trace.kernels[0].name == "a�b"
    write_trace(trace, tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT", "gemm"), ("Cijk_Alik_Bljk_BBS_BH_Bias", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64>(Params)", "gemm"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<Foo> >(Params)", "other"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64> >(Params)", "attention_prefill"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Traits<128> >(Params)", "attention_decode"),
        ("paged_attention_ll4mi_reduce_kernel", "attention_decode"), ("kernel_unified_attention_2d", "other"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1", "moe"),
        ("_chunk_scan_fwd_kernel", "ssm_scan"), ("sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32", "conv"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>(int)", "norm"),
        ("void at::native::vectorized_elementwise_kernel<4, rsqrt_kernel_cuda>(int)", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, MeanOps> >(int)", "reduction"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, ArgMaxOps<float> > >(int)", "reduction"),
        ("triton_poi_fused__unsafe_view_mul_silu_2", "elementwise"), ("triton_red_fused_add_mean_rsqrt_0", "norm"),
        ("at::cuda::spin_kernel(long)", "other"), ("", "other"),
    ],
)  # fmt: skip
def test_kind_by_name(name: str, kind: str) -> None:
    """Mutation tried: template arguments searched along with the name → the `ArgMaxOps` case is sampling, fails."""
    assert kernel_kind(name) == kind


def test_short_name() -> None:
    assert short_name("void at::native::(anonymous namespace)::softmax<float>(int, float*)") == "at::native::softmax"


@needs_shared
@pytest.mark.parametrize(
    ("name", "busy_us", "rows"),
    [
        ("08_sub_us_kernels", "900.9", 3), ("21_zero_dur_inside_other_on_same_stream", "35", 3),
        ("19_dur_overflows_next", "1600080", 3), ("52_sync_events_are_not_kernels", "20", 1),
        ("06_ts_zero_dur_zero", "40", 1), ("54_strings_and_nulls", "4", 1), ("24_epoch_us_with_ns", "2.5", 5),
        ("11_gpu_only_no_runtime", "11", 3), ("15_graph_same_stream_bogus_overlap", "101", 3),
        ("26_amd_no_correlation", "41", 2), ("27_ops_without_link_ids", "9", 1), ("23_touching_slices_float", "0.6", 3),
    ],
)  # fmt: skip
def test_bad_values_of_the_shared_folder(name: str, busy_us: str, rows: int) -> None:
    trace = import_profile(SHARED / "data" / "bad_inputs" / f"{name}.json")
    assert (trace.busy_ns, len(trace)) == (ns_of_us(busy_us), rows)
