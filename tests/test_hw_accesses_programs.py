"""Random programs on a made-up allocator: from whoever wrote a tensor last a path leads to whoever reads it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")
from test_hw_accesses_calls import POOL, kernel, unit

from hw.capture.driver import Node
from hw.capture.recorder import Argument, Call
from tesserasim.deps.graph import unit_flow

pytestmark = pytest.mark.quick

SLOT = 0x1000


@dataclass
class Tensor:
    slot: int
    allocation: int
    writer: int  # kernel, -1: made before the unit

    def argument(self, name: str, mode: str, fresh: bool = False) -> Argument:
        at = POOL[0] + self.slot * SLOT
        return Argument(name, mode, at, 256, 256, at, 256, self.allocation, (256,), "uint8", fresh)


@dataclass
class Program:
    """Calls and nodes, and who truly depends on whom."""

    calls: list[Call]
    nodes: list[Node]
    flows: set[tuple[int, int]]


@st.composite
def programs(draw: st.DrawFn, recorded: bool = False) -> Program:
    """Every step launches one kernel: recorded or not, into a new tensor or in place; tensors die, slots are reused."""
    made = Program([], [], set())
    live = [Tensor(slot, slot, -1) for slot in range(2)]
    allocations = 2
    for k in range(draw(st.integers(1, 10))):
        if len(live) > 2 and draw(st.booleans()):
            live.pop(draw(st.integers(0, len(live) - 1)))
        reads = draw(st.lists(st.sampled_from(live), min_size=1, max_size=2, unique_by=id))
        made.flows |= {(t.writer, k) for t in reads if t.writer >= 0}
        in_place = draw(st.booleans())
        if in_place:
            target = reads[0]
        else:
            slot = min(set(range(16)) - {t.slot for t in live})  # the lowest free one, as caches do
            target = Tensor(slot, allocations, -1)
            allocations += 1
            live.append(target)
        arguments = [t.argument(f"r{i}", "RW" if t is target else "R") for i, t in enumerate(reads)]
        if not in_place:
            arguments.append(target.argument("result0", "W", fresh=True))
        target.writer = k
        pointers = [a.address for a in arguments]
        made.nodes.append(kernel("k", *pointers))
        known = recorded or draw(st.booleans())
        made.calls.append(Call("m", "own", "aten", k, k + 1, arguments) if known else Call("m", "?", "none", k, k + 1))
    return made


@settings(max_examples=400, deadline=None)
@given(programs())
def test_no_flow_is_missed(program: Program) -> None:
    """Mutations tried: strays not noted; a workspace per unrecorded kernel; `at_place` not asked."""
    trace, _ = unit(program.calls, program.nodes)
    before: list[set[int]] = [set() for _ in trace.kernels]
    for e in sorted(unit_flow(trace).edges, key=lambda e: e.dst):
        before[e.dst] |= {e.src} | before[e.src]  # a may-write hands on what was there
    assert all(writer in before[reader] for writer, reader in program.flows)


@settings(max_examples=300, deadline=None)
@given(programs(recorded=True))
def test_recorded_programs_have_no_other_flow(program: Program) -> None:
    """Where every kernel is recorded the edges are exactly the flows. Mutation tried: in-place writes begin anew.

    What was made before the unit is carried, and its readers need all that has been written to it: left out.
    """
    changed = any("W" in a.mode and a.allocation < 2 for c in program.calls for a in c.arguments)
    if not changed:
        trace, warnings = unit(program.calls, program.nodes)
        assert {(e.src, e.dst) for e in unit_flow(trace).edges} == program.flows and not warnings
