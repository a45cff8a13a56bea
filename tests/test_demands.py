"""What kernels demand, by hand; partitions and DRAM domains in cluster files; the bound by resource."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tesserasim import api
from tesserasim.case import Case
from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import cluster_hash
from tesserasim.cluster.parse import parse_cluster
from tesserasim.costs.base import default_costs
from tesserasim.demands import achievable_gbs, kernel_demands, resident_blocks, resource_load, sm_demand
from tesserasim.errors import InputError
from tesserasim.lower import lower
from tesserasim.metrics.bound import mixed_shared_bound_per_s, shared_ns
from tesserasim.plans import Lane, Plan
from tesserasim.policies import Limits
from tesserasim.sim.sharing import ONE
from tesserasim.trace.model import Kernel, Trace, TraceMeta

pytestmark = pytest.mark.quick
H200 = find_gpu("H200")


def kernel(grid=132, block=256, registers=0, shared=0, nbytes=0, ns=1000, kind="gemm"):
    return Kernel(
        0, "k", "s", kind=kind, grid=(grid, 1, 1) if grid else (0, 0, 0), block=(block, 1, 1), registers=registers,
        shared_bytes=shared, read_bytes=nbytes, duration_ns=ns,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("k", "blocks"),
    [
        (kernel(block=1024), 2),  # 2048 threads
        (kernel(block=64), 32),  # 32 blocks, though 2048 / 64 = 32 too
        (kernel(block=32), 32),
        (kernel(block=100), 16),  # 4 warps each
        (kernel(block=256, registers=128), 2),  # 65536 / (128 * 256)
        (kernel(block=256, registers=33), 6),  # 33 * 32 = 1056 -> 1280 per warp: 65536 // 10240
        (kernel(block=128, shared=100 * 1024), 2),  # 228 // 101
        (kernel(block=128, shared=227 * 1024), 1),
        (kernel(block=1024, registers=255), 1),  # would not fit; it ran
    ],
)
def test_resident_blocks(k, blocks):
    """Mutation that fails here: leave out the rounding of registers, or the 1 KiB per block."""
    assert resident_blocks(k, H200) == blocks


def test_other_architectures_hold_less():
    assert resident_blocks(kernel(block=1024), find_gpu("L40S")) == 1
    assert resident_blocks(kernel(block=128, shared=100 * 1024), find_gpu("A100-80GB-PCIe")) == 1


def test_sm_demand():
    assert sm_demand(kernel(grid=132, block=1024), H200, 132) == ONE // 2
    assert sm_demand(kernel(grid=64, block=1024), H200, 64) == ONE // 2  # a partition
    assert sm_demand(kernel(grid=1320, block=1024), H200, 132) == ONE
    assert sm_demand(kernel(grid=198, block=1024, shared=200_000), H200, 132) == 3 * ONE // 4  # 1.5 waves
    assert sm_demand(kernel(grid=1321, block=1024), H200, 132) == round(ONE * 1321 / 1584)
    assert sm_demand(kernel(grid=0, kind="memset"), H200, 128) == ONE // 128
    assert sm_demand(kernel(grid=0), H200, 128) == ONE


def blocks_served(kernels, places):
    """Rounds until streams are through: a place takes one block a round, blocks wait in order of their kernel's launch,
    and a stream's next kernel is launched when the last block of the one before has ended."""
    left = [list(stream) for stream in kernels]
    waiting = [[s, stream.pop(0)] for s, stream in enumerate(left)]
    rounds = 0
    while waiting:
        free, rounds = places, rounds + 1
        for entry in waiting:
            taken = min(free, entry[1])
            entry[1] -= taken
            free -= taken
        done = [s for s, n in waiting if not n]
        waiting = [e for e in waiting if e[1]] + [[s, left[s].pop(0)] for s in done if left[s]]
    return rounds


@pytest.mark.parametrize(("blocks", "places"), [(96, 64), (100, 64), (66, 64), (160, 128), (64, 64)])
def test_two_streams_fill_each_others_last_waves(blocks, places):
    """A block scheduler written out, against two kernels that share their SM-time by `sm_demand`: within a tenth.

    With min(1, blocks / places), which asks for all places in the last wave too, the two would take as long as one
    after the other: a third too long for 96 blocks on 64 places.
    """
    k = kernel(grid=blocks, block=1024, shared=200_000)  # one block a multiprocessor
    waves, runs = -(-blocks // places), 200
    alone = blocks_served([[blocks] * runs], places)
    assert alone == waves * runs
    together = blocks_served([[blocks] * runs] * 2, places)
    demand = sm_demand(k, H200, places) / ONE
    assert max(1.0, 2 * demand) * alone == pytest.approx(together, rel=0.1)


def test_dram_demand():
    """Bytes over time over the measured copy bandwidth on the captured GPU, the catalogue's elsewhere; at most 1."""
    rows = tuple(dataclasses.replace(kernel(nbytes=n), id=i) for i, n in enumerate((2_000_000, 9_000_000, 0)))
    meta = TraceMeta("captured", "m", {"name": "u"}, "H200-SXM", extra={"copy_gbs": 4000.0})
    trace = Trace(meta, rows)
    assert achievable_gbs(trace, H200) == 4000.0
    _, dram = kernel_demands(trace, np.full(3, 1000.0), H200, 132)
    assert dram.tolist() == [ONE // 2, ONE, 0]
    other = find_gpu("L40S")
    _, dram = kernel_demands(trace, np.full(3, 10_000.0), other, other.sms)
    assert dram[0] == round(ONE * 2e6 / 1e4 / other.dram_gbs)


# Cluster files --------------------------------------------------------------------------------------------


def written(tmp_path: Path, text: str):
    path = tmp_path / "c.toml"
    path.write_text('devices = ["2xH200-SXM", "L40S"]\n' + text)
    return parse_cluster(str(path))


def test_partitions_of_one_gpu(tmp_path):
    plain = written(tmp_path, "")
    parts = written(
        tmp_path, 'dram_domains = [["H200-SXM#1", "H200-SXM#0"]]\nsms = { "H200-SXM#0" = 64, "H200-SXM#1" = 68 }\n'
    )
    assert plain.dram_of == (0, 1, 2) and parts.dram_of == (0, 0, 2)
    assert [d.sm_count for d in parts.devices] == [64, 68, find_gpu("L40S").sms]
    assert cluster_hash(plain) != cluster_hash(parts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('dram_domains = ["H200-SXM#0"]', "lists of two or more"),
        ('dram_domains = [["H200-SXM#0"]]', "lists of two or more"),
        ('dram_domains = [["H200-SXM#0", "nobody"]]', "is no device"),
        ('dram_domains = [["H200-SXM#0", "L40S"]]', "not parts of one GPU"),
        ('dram_domains = [["H200-SXM#0", "H200-SXM#0"]]', "listed twice"),
        ('sms = { "H200-SXM#0" = 0 }', "is not in 1 to 132"),
        ('sms = { "H200-SXM#0" = 133 }', "is not in 1 to 132"),
        ('sms = { "H200-SXM#0" = 1.5 }', "is not in 1 to 132"),
        ("sms = 3", "is not a table"),
        (
            'dram_domains = [["H200-SXM#0", "H200-SXM#1"]]\nsms = { "H200-SXM#0" = 100, "H200-SXM#1" = 33 }',
            "133 SMs together",
        ),
    ],
)
def test_domains_that_cannot_be_meant(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        written(tmp_path, text + "\n")


# The bound ------------------------------------------------------------------------------------------------

time = st.floats(1.0, 1e5)


@given(st.lists(st.tuples(time, time, time, time), min_size=1, max_size=6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_placement_beats_the_bound_by_resource(rows, together):
    """Over all integer placements of sites on two devices, with one DRAM or two.

    Mutation that fails here: give each device a DRAM of its own whatever the domain, or drop the DRAM rows.
    """
    t = np.array(rows)
    sm, dram, domain = t[:, :2], t[:, 2:], ((0, 0) if together else (0, 1))
    least = shared_ns(sm, dram, domain)
    best = np.inf
    for x in product(range(2), repeat=len(rows)):
        load = [sum(sm[i, d] for i, d in enumerate(x) if d == k) for k in range(2)]
        reads = [sum(dram[i, d] for i, d in enumerate(x) if domain[d] == k) for k in set(domain)]
        best = min(best, max(load + reads))
    assert least <= best * (1 + 1e-12)
    assert least >= max(sm.min(axis=1).sum() / 2, dram.min(axis=1).sum() / len(set(domain))) * (1 - 1e-9)


def test_the_bound_by_resource_by_hand():
    """One device: the fuller resource. Two equal ones: half of it, unless they share the DRAM."""
    sm, dram = np.array([[10.0], [20.0]]), np.array([[30.0], [5.0]])
    assert shared_ns(sm, dram, (0,)) == pytest.approx(35.0)
    twice = np.repeat(sm, 2, axis=1), np.repeat(dram, 2, axis=1)
    assert shared_ns(*twice, (0, 1)) == pytest.approx(17.5)
    assert shared_ns(*twice, (0, 0)) == pytest.approx(35.0)


def test_loads_are_those_of_the_lowered_program(tiny_mix):
    """Per device: the sums of time * demand over a cohort's kernels, less what shaves take off.

    Mutation that fails here: use the demand of another kernel list for a launch.
    """
    cluster, costs = parse_cluster("H200-SXM+L40S"), default_costs()
    load = resource_load(tiny_mix, cluster, costs, 8)
    for d, device in enumerate(cluster.devices):
        plan = Plan("m", "c", "x", (Lane("l", 8, 1, {u: {"*": device.id} for u in tiny_mix.units}),))
        (s,) = lower(tiny_mix, plan, cluster, costs, device_model="shared").lanes[0].streams
        for demand, column in ((s.sm, load.sm_ns), (s.dram, load.dram_ns)):
            total = sum((t - x) * r for t, x, r in zip(s.duration, s.shave, demand, strict=True)) / ONE
            assert column[:, d].sum() == pytest.approx(total)
    assert mixed_shared_bound_per_s([load]) == pytest.approx(
        8e9 / shared_ns(load.sm_ns, load.dram_ns, load.domain_of)
    )


# Results --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["single", "replicas-lo", "kernel", "pd"])
def test_a_row_of_shared_devices(tiny_mix, policy):
    """Within its own bound, at least as fast as one kernel at a time, and says what is not modelled."""
    options = {"batch": 4, "depth": 2, "check": True}
    found = api.simulate(tiny_mix, "H200-SXM+L40S", policy, device_model="shared", **options)
    serial = api.simulate(tiny_mix, "H200-SXM+L40S", policy, **options)
    assert found["device_model"] == "shared" and serial["device_model"] == "serial"
    assert found["engine"] == "simpy" and 0 < found["throughput_per_s"] <= found["bound_per_s"]
    assert any("closed form of serial devices" in note for note in found["notes"])
    assert not any("closed form of serial devices" in note for note in serial["notes"])
    assert found["bound_per_s"] >= serial["bound_per_s"]


def test_one_cache_keeps_the_models_apart(tiny_mix):
    cache = {}
    cluster, limits = parse_cluster("H200-SXM"), Limits(batches=(4,), depths=(2,))
    rates = {}
    for model in ("serial", "shared", "serial"):
        case = Case(tiny_mix, cluster, default_costs(), limits, cache=cache, device_model=model)
        plan = Plan("m", "c", "x", (Lane("l", 4, 2, {u: {"*": "H200-SXM"} for u in tiny_mix.units}),))
        rate = case.run(plan, "free").summary.steady_per_s
        assert rates.setdefault(model, rate) == rate
    assert rates["shared"] > rates["serial"]


def test_lanes_on_partitions_of_one_gpu_are_run_together(llm_mix, tmp_path):
    """Two replicas on partitions that share a DRAM are slower than on two GPUs, and not run apart."""
    rows = {}
    for name, domains in (("one", 'dram_domains = [["H200-SXM#0", "H200-SXM#1"]]\n'), ("two", "")):
        (tmp_path / f"{name}.toml").write_text('devices = ["2xH200-SXM"]\n' + domains)
        rows[name] = api.simulate(
            llm_mix, str(tmp_path / f"{name}.toml"), "replicas-lo", batch=8, depth=1, output_tokens=4,
            device_model="shared", check=True,
        )  # fmt: skip
    assert rows["one"]["bound_per_s"] <= rows["two"]["bound_per_s"]
    assert rows["one"]["throughput_per_s"] < rows["two"]["throughput_per_s"]


def test_options_are_checked(tiny_mix):
    with pytest.raises(InputError, match="device_model: 'fluid' is none of serial, shared"):
        api.simulate(tiny_mix, "H200-SXM", "single", device_model="fluid")
    with pytest.raises(InputError, match="'fast' runs serial devices only"):
        api.simulate(tiny_mix, "H200-SXM", "single", device_model="shared", engine="fast")


def test_the_command_line(capsys, tmp_path):
    from tesserasim.cli import main

    line = ["simulate", "--mix", "llama-3-8b", "--cluster", "H200-SXM", "--policy", "single", "--batch", "1",
            "--depth", "1", "--output-tokens", "4", "--device-model", "shared"]  # fmt: skip
    assert main([*line, "--json", "--timeline", str(tmp_path / "t.json")]) == 0
    assert '"device_model": "shared"' in capsys.readouterr().out and (tmp_path / "t.json").stat().st_size
    assert main([*line, "--engine", "fast"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
