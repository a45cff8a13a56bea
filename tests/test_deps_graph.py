"""Data flow inside a unit, held against a byte-by-byte replay of who wrote what last."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_cases import SIZE, handmade, unit_traces

from tesserasim.deps.graph import Edge, Hazard, needs_old_bytes, storage_hazards, unit_flow
from tesserasim.trace.mix import Mix
from tesserasim.trace.model import Access, Buffer, Trace

pytestmark = pytest.mark.quick


def read(buffer: int, offset: int = 0, nbytes: int = SIZE, **more: str) -> Access:
    return Access(buffer, "R", offset, nbytes, evidence="schema", **more)


def write(buffer: int, offset: int = 0, nbytes: int = SIZE, covers: bool = True, extent: str = "exact") -> Access:
    return Access(buffer, "W", offset, nbytes, extent, covers, "schema")


def activations(n: int = 2, role: str = "activation") -> list[Buffer]:
    return [Buffer(i, f"b{i}", SIZE, role) for i in range(n)]


@settings(max_examples=200, deadline=None)
@given(unit_traces(roles=("state", "output")))
def test_carried_buffers_equal_a_replay_of_the_log(trace: Trace) -> None:
    """Mutation tried: a covering write of a part of the buffer starts a new log."""
    flow = unit_flow(trace)
    logs: dict[int, list[int]] = {}
    edges, external = set(), set()
    replaced: set[int] = set()
    for k in trace.kernels:
        for a in k.accesses:
            b = trace.buffers[a.buffer]
            delta = a.mode == "W" and (a.covers or a.extent == "exact")
            if not delta:
                edges |= {(w, k.id, b.id) for w in logs.get(b.id, []) if w != k.id}
                if b.id not in replaced:
                    external.add((k.id, b.id))
        for a in k.accesses:
            if a.mode != "R":
                whole = a.covers and (a.extent == "unknown" or (a.offset, a.nbytes) == (0, SIZE))
                if whole:
                    logs[a.buffer] = []
                    replaced.add(a.buffer)
                if a.extent == "unknown" or a.nbytes:
                    logs.setdefault(a.buffer, []).append(k.id)
    assert {(v.writer, r, v.buffer) for v in flow.values for r in v.readers} == edges
    assert {(v.writer, v.buffer) for v in flow.values if v.left} == {(w, b) for b, ws in logs.items() for w in ws}
    assert set(flow.external) == external and flow.replaced == replaced


def test_a_partial_write_of_an_activation_needs_the_old_bytes() -> None:
    """k1 overwrites bytes 0..6 without proof: it reads them; k2 gets 6 from k1 and 6 from k0.

    Mutation tried: `needs_old_bytes` returning a.reads.
    """
    t = handmade([("a", [write(0)]), ("b", [write(0, 0, 6, covers=False)]), ("c", [read(0)])], activations(1))
    assert unit_flow(t).edges == (Edge(0, 1, 6), Edge(0, 2, 6), Edge(1, 2, 6))
    covered = handmade([("a", [write(0)]), ("b", [write(0, 0, 6)]), ("c", [read(0)])], activations(1))
    assert unit_flow(covered).edges == (Edge(0, 2, 6), Edge(1, 2, 6))


def test_a_state_delta_needs_nothing_and_unknown_extent_needs_all() -> None:
    """Mutation tried: state treated as an activation."""
    b = [Buffer(0, "layers.0.kv", SIZE, "state", bytes_per_token=2)]
    t = handmade([("w", [write(0, 0, 2, covers=False)]), ("r", [read(0)])], b)
    flow = unit_flow(t)
    assert flow.edges == (Edge(0, 1, 2),)  # new bytes only, not the context
    assert flow.external == ((1, 0),)
    assert [v for v in flow.values if v.left] == list(flow.values)
    vague = handmade([("w", [write(0, 0, 2, covers=False, extent="unknown")]), ("r", [read(0)])], b)
    assert unit_flow(vague).external == ((0, 0), (1, 0)) and unit_flow(vague).edges == (Edge(0, 1, SIZE),)


def test_weights_and_stream_order_are_no_edges() -> None:
    t = handmade([("a", [read(0)]), ("b", [read(0)]), ("c", [write(1)])], [*activations(1, "weight"), activations()[1]])
    assert unit_flow(t).edges == () and set(unit_flow(t).group_of) == {-1}


def test_unknown_kernels_share_a_group_with_their_neighbours() -> None:
    """Mutation tried: joined with the kernel before it only."""
    x = [write(0)]
    t = handmade([("a", x), ("b", []), ("c", x), ("d", x), ("e", [Access(0, "R", 0, 1)])], activations())
    flow = unit_flow(t)
    assert flow.group_of == (0, 0, 0, 1, 1)
    assert all("unknown" in w for w in flow.group_why)
    alone = handmade([("a", []), ("b", []), ("c", [])], activations())
    assert unit_flow(alone).group_of == (0, 0, 0)


def test_explicit_groups_are_kept_with_their_reason() -> None:
    t = handmade([(s, [write(0)]) for s in "abcd"], activations())
    kernels = [dataclasses.replace(k, group=7, group_reason="semaphore") if k.id in (0, 2) else k for k in t.kernels]
    flow = unit_flow(dataclasses.replace(t, kernels=tuple(kernels)))
    assert flow.group_of == (0, -1, 0, -1) and flow.group_why == ("semaphore",)


def test_a_decoder_layer_by_hand(tiny_mix: Mix) -> None:
    """The flow of one synthetic layer: names, bytes, and the KV delta of one token per sequence."""
    t = next(t for t in tiny_mix.traces["decode"] if t.meta.unit["batch"] == 4 and t.meta.unit["context"] == 64)
    site = [k.site for k in t.kernels]
    flow = unit_flow(t)
    moved = {(site[v.writer], t.buffers[v.buffer].name): (v.nbytes, {site[r] for r in v.readers}) for v in flow.values}
    assert moved["layers.0/rope_kv", "layers.0.kv"] == (4 * 2 * 2 * 64 * 2, {"layers.0/attention"})
    assert moved["layers.0/o", "layers.0.x1"] == (4 * 512 * 2, {"layers.0/ffn_norm", "layers.0/down"})
    assert moved["sample", "next_token"] == (32, set())
    assert {t.buffers[b].name for _, b in flow.external} == {"layers.0.kv", "layers.1.kv", "next_token", "position"}
    assert {t.buffers[b].name for b in flow.replaced} == {"next_token", "position"}
    assert set(flow.group_of) == {-1}


def test_hazards_of_reused_storage() -> None:
    """k1 reads a; k2 writes b over its last 4 bytes; c lies elsewhere. Mutation tried: offsets ignored."""
    buffers = [
        Buffer(0, "a", 8, "activation", storage=3),
        Buffer(1, "b", 8, "activation", storage=3, storage_offset=4),
        Buffer(2, "c", 8, "activation", storage=3, storage_offset=64),
    ]
    t = handmade([("a", [write(0, 0, 8)]), ("b", [read(0, 0, 8)]), ("c", [write(1, 0, 8)]), ("d", [write(2, 0, 8)])],
                 buffers)  # fmt: skip
    assert storage_hazards(t) == (Hazard(0, 2, 3, "WAW", 4), Hazard(1, 2, 3, "WAR", 4))


@settings(max_examples=200, deadline=None)
@given(unit_traces(roles=("activation", "workspace", "weight", "state")), st.lists(st.integers(-1, 1)), st.data())
def test_hazards_equal_a_byte_by_byte_replay(trace: Trace, storages: list[int], data: st.DataObject) -> None:
    """Last writer and readers since, in arrays over the bytes of two storages and of every buffer without one.

    Mutations tried: readers kept over a write; WAW only without readers; -1 taken for one storage.
    """
    storages = (storages + [-1] * 4)[: len(trace.buffers)]
    offsets = [data.draw(st.integers(0, 9)) for _ in trace.buffers]
    buffers = tuple(
        dataclasses.replace(b, storage=s, storage_offset=o)
        for b, s, o in zip(trace.buffers, storages, offsets, strict=True)
    )
    last = np.full((2 + len(buffers), 32), -1)
    readers: dict[tuple[int, int], set[int]] = {}
    found: dict[tuple[int, int, int, str], int] = {}
    for k in trace.kernels:
        touched: dict[str, set[tuple[int, int]]] = {"R": set(), "W": set()}
        for a in k.accesses:
            b = buffers[a.buffer]
            row = b.storage if b.storage >= 0 else 2 + b.id
            first, end = (0, b.nbytes) if a.extent == "unknown" else (a.offset, a.offset + a.nbytes)
            for mode in a.mode if b.role != "weight" else "":
                touched[mode] |= {(row, b.storage_offset + i) for i in range(first, end)}
        for at in touched["R"]:
            readers.setdefault(at, set()).add(k.id)
        for at in touched["W"]:
            before = [(r, "WAR") for r in readers.pop(at, ())] + [(int(last[at]), "WAW")]
            for other, kind in before:
                if other not in (-1, k.id):
                    key = (k.id, other, at[0] if at[0] < 2 else -1, kind)
                    found[key] = found.get(key, 0) + 1
            last[at] = k.id
    hazards = storage_hazards(dataclasses.replace(trace, buffers=buffers))
    assert {(h.after, h.before, h.storage, h.kind): h.nbytes for h in hazards} == found
    assert [(h.after, h.before, h.storage, h.kind) for h in hazards] == sorted(found)


@settings(max_examples=300, deadline=None)
@given(unit_traces(roles=("activation", "workspace", "weight")))
def test_raw_bytes_equal_an_array_of_last_writers(trace: Trace) -> None:
    """One numpy array of last writers per buffer; a write that may leave bytes as they were reads them first.

    Mutations tried: `_span` without the cut at the end of the range; a write that does not cover needs nothing.
    """
    last = {b.id: np.full(b.nbytes, -1) for b in trace.buffers}
    bytes_of: dict[tuple[int, int], int] = {}
    for k in trace.kernels:
        wanted = {b.id: np.zeros(b.nbytes, dtype=bool) for b in trace.buffers}
        flowing = [a for a in k.accesses if trace.buffers[a.buffer].role != "weight"]
        for a in flowing:
            span = slice(None) if a.extent == "unknown" else slice(a.offset, a.offset + a.nbytes)
            if "R" in a.mode or not (a.covers or trace.buffers[a.buffer].role == "workspace"):
                wanted[a.buffer][span] = True
        for b, mask in wanted.items():
            for writer, n in zip(*np.unique(last[b][mask], return_counts=True), strict=True):
                if writer >= 0:
                    bytes_of[int(writer), k.id] = bytes_of.get((int(writer), k.id), 0) + int(n)
        for a in flowing:
            if "W" in a.mode:
                span = slice(None) if a.extent == "unknown" else slice(a.offset, a.offset + a.nbytes)
                last[a.buffer][span] = k.id
    assert {(e.src, e.dst): e.nbytes for e in unit_flow(trace).edges} == bytes_of


@settings(max_examples=100, deadline=None)
@given(unit_traces())
def test_values_are_sorted_positive_and_computed_once(trace: Trace) -> None:
    flow = unit_flow(trace)
    assert unit_flow(trace) is flow
    for v in flow.values:
        assert v.nbytes > 0 and list(v.readers) == sorted(set(v.readers)) and v.writer not in v.readers
    assert [v.writer for v in flow.values] == sorted(v.writer for v in flow.values)
    assert all(needs_old_bytes(a, trace.buffers[a.buffer]) for k in trace.kernels for a in k.accesses if a.reads)
