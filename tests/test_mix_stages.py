"""A language model with stages before its prefill: a vision encoder hands an image over, request by request."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from workload_cases import ScaledCosts, handmade, small_cluster

from tesserasim.errors import InputError
from tesserasim.lower import lower
from tesserasim.planner.seeds import pd_vector
from tesserasim.plans import Lane, Plan
from tesserasim.sim.engine import run
from tesserasim.sweep.mixfile import MixOptions, new_mix
from tesserasim.trace.mix import Mix, UnitInstance, load_mix
from tesserasim.trace.model import Access, Buffer, Trace
from tesserasim.trace.parquet import write_trace
from tesserasim.workload import build_workload

pytestmark = pytest.mark.quick

IMAGE = 1000


def _unit(name: str, phase: str, accesses: list[Access], context: int) -> Trace:
    image = Buffer(0, "image", IMAGE, "state", 0, bytes_per_sequence=IMAGE)
    made = handmade([(f"{name}/a", accesses)], [image], name)
    unit = {"name": name, "phase": phase, "batch": 1, "tokens": max(1, context if phase == "prefill" else 1)}
    kernels = tuple(dataclasses.replace(k, phase=phase) for k in made.kernels)
    return Trace(dataclasses.replace(made.meta, unit=unit | {"context": context}), kernels, made.buffers)


def mix(prefill_batch: int = 1, output_tokens: int = 1) -> Mix:
    encode = _unit("encode", "encode", [Access(0, "W", 0, IMAGE, "exact", True, "schema")], 0)
    prefill = _unit("prefill", "prefill", [Access(0, "R", 0, IMAGE, "exact", False, "schema")], 64)
    decode = _unit("decode", "decode", [Access(0, "R", 0, 8, "exact", False, "schema")], 65)
    traces = {"encode": (encode,), "prefill": (prefill,), "decode": (decode,)}
    made = Mix("vl", "handmade", "llm", traces, 64, output_tokens, prefill_batch, (("encode", 1),))
    made.validate()
    return made


def test_every_prefill_follows_its_own_stages() -> None:
    """Mutation tried: one `encode` of count 3 and then one `prefill` of count 3."""
    assert mix().units == ("encode", "prefill")
    assert mix().cohort(3) == tuple(
        u for n in (1, 2, 3) for u in (UnitInstance("encode", 1, 1, 0, 1, n), UnitInstance("prefill", 1, 64, 64, 1, n))
    )
    pairs = [(u.unit, u.batch) for u in mix(prefill_batch=2, output_tokens=2).cohort(3)]
    assert pairs == [("encode", 2), ("prefill", 2), ("encode", 1), ("prefill", 1), ("decode", 3)]
    assert mix().launches(3) == 6


def test_the_image_of_every_request_is_sent() -> None:
    """Encoder on g0, prefill on g1: of three requests three images cross, not the last one alone."""
    cluster = small_cluster(2)
    plan = Plan("vl", cluster.name, "hand", (Lane("a", 3, 1, {"encode": {"*": "g0"}, "prefill": {"*": "g1"}}),))
    result = run(lower(mix(), plan, cluster, ScaledCosts()), engine="simpy", cohorts=1, check=True)
    assert sum(c.nbytes for c in result.channels) == 3 * IMAGE


def test_prefill_decode_disaggregation_keeps_the_encoder_with_the_prefill() -> None:
    """Mutation tried: `prefill if s.unit == "prefill" else decode`."""
    work = build_workload(mix(output_tokens=4), small_cluster(2), ScaledCosts(), 1)
    x = pd_vector(work, 0, 1)
    assert x is not None
    assert {s.unit: int(d) for s, d in zip(work.sites, x, strict=True)} == {"encode": 0, "prefill": 0, "decode": 1}


def test_mix_new_writes_the_stages(tmp_path: Path) -> None:
    files = []
    for unit, traces in mix().traces.items():
        files.append(tmp_path / f"{unit}.parquet")
        write_trace(traces[0], files[-1])
    options = MixOptions(input_tokens=64, output_tokens=4)
    new_mix(files, tmp_path / "vl.toml", options)
    assert load_mix(tmp_path / "vl.toml").stages == (("encode", 1),)
    with pytest.raises(InputError, match="launches of decode follow from the token lengths"):
        new_mix(files, tmp_path / "no.toml", dataclasses.replace(options, launches={"decode": 3}))


def test_a_decode_step_is_no_stage() -> None:
    wrong = dataclasses.replace(mix(), stages=(("decode", 1),))
    with pytest.raises(InputError, match="stages come before the prefill"):
        wrong.validate()
