"""The Perfetto export: exact decimal times, one track per stream and direction, flows, no overlap."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_golden import two_stage
from test_sim_programs import outcome, programs

from tesserasim.errors import InputError
from tesserasim.sim.engine import run
from tesserasim.sim.result import SimResult
from tesserasim.sim.timeline import timeline_json, us, write_timeline
from tesserasim.trace.inspect import inspect_file

pytestmark = pytest.mark.quick


@given(st.integers(-(10**18), 10**18))
def test_microseconds_are_exact(ns):
    """Mutation that fails here: `f"{ns / 1000:.3f}"` (a float has 53 bits)."""
    assert re.fullmatch(r"-?\d+\.\d{3}", us(ns))
    assert Decimal(us(ns)) * 1000 == ns


def read(text):
    return json.loads(text, parse_float=Decimal)["traceEvents"]


def ns(value):
    assert value * 1000 == int(value * 1000)
    return int(value * 1000)


@settings(max_examples=60, deadline=None)
@given(programs())
def test_tracks_hold_every_slice_without_overlap(program):
    result = outcome(program, engine="simpy", timeline=True, cohorts=3)
    if not isinstance(result, SimResult):
        return
    events = read(timeline_json(program, result))
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(result.timeline)
    tracks = defaultdict(list)
    for e in slices:
        tracks[e["pid"], e["tid"]].append((ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])))
    for times in tracks.values():
        assert all(a[1] <= b[0] for a, b in pairwise(times))
    named = {(e["pid"], e["tid"]) for e in events if e.get("name") == "thread_name"}
    assert named == set(tracks)
    starts = {(e["pid"], e["tid"], ns(e["ts"])) for e in slices}
    for e in events:
        if e["ph"] in "stf":
            assert (e["pid"], e["tid"], ns(e["ts"])) in starts


def test_flows_join_producer_transfer_and_consumer():
    program = two_stage(1, 10, 100, 10, 5, 20)
    result = run(program, timeline=True, cohorts=2)
    flows = [e for e in read(timeline_json(program, result)) if e["ph"] in "stf"]
    assert [(e["ph"], ns(e["ts"]), e["pid"]) for e in flows[:3]] == [("s", 0, 0), ("t", 10, 2), ("f", 25, 1)]


def test_importing_our_own_export_gives_the_same_facts(tmp_path):
    """Kernels, busy, union and span come back exactly."""
    program = two_stage(3, 1_234_567, 100, 1, 5, 7_654_321)
    result = run(program, timeline=True)
    path = tmp_path / "timeline.json"
    write_timeline(program, result, path)
    kernels = [s for s in result.timeline if s.kind == "kernel"]
    facts = inspect_file(path)
    assert facts["kernels"] == len(kernels)
    assert facts["busy_ns"] == sum(s.end_ns - s.start_ns for s in kernels)
    assert facts["span_ns"] == max(s.end_ns for s in kernels) - min(s.start_ns for s in kernels)
    covered, reach = 0, 0
    for s in sorted(kernels):
        covered += max(0, s.end_ns - max(s.start_ns, reach))
        reach = max(reach, s.end_ns)
    assert facts["union_ns"] == covered
    assert facts["devices"] == 2
    assert facts["streams"] == len({(s.resource, s.slot) for s in kernels})


def test_a_run_without_slices_cannot_be_exported():
    program = two_stage(1, 1, 1, 1, 1, 1)
    with pytest.raises(InputError, match="timeline=True"):
        timeline_json(program, run(program))
