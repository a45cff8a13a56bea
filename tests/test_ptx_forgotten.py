"""If the analysis forgot something, a kernel with truth would show it: a mutation of the analysis for each feature.

Each row names what is forgotten, how, and a kernel whose answer is then unsound. Without the mutation it is sound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ptx_truth as truth
import pytest
import test_ptx_interpreter as watched

from tesserasim.deps.ptx import affine, analysis, arithmetic, cfg, effects, graph, loops, origins

Patch = Callable[[pytest.MonkeyPatch], None]


def replaced(owner: Any, name: str, made: Any) -> Patch:
    return lambda patch: patch.setattr(owner, name, made)


def idle(owner: Any, name: str) -> Patch:
    """A method that does nothing."""
    return replaced(owner, name, lambda *args, **more: None)


def without(opcode: str) -> Patch:
    """An instruction that touches no memory."""
    return lambda patch: patch.setitem(effects._HANDLERS, opcode, lambda step: None)


def inputs_changed(op: str, change: Callable[[list[int]], list[int]]) -> Patch:
    """A node that takes only some of its operands."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        node = graph.Graph.node

        def changed(self: Any, made: str, inputs: list[int] | None = None, data: object = None) -> int:
            return node(self, made, change(inputs) if made == op and inputs else inputs, data)

        patch.setattr(graph.Graph, "node", changed)

    return apply


def lost(op: str) -> Patch:
    """A node that depends on nothing."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        node = graph.Graph.node

        def changed(self: Any, made: str, inputs: list[int] | None = None, data: object = None) -> int:
            return node(self, "test", [], ("setp",)) if made == op else node(self, made, inputs, data)

        patch.setattr(graph.Graph, "node", changed)

    return apply


def modes_changed(change: Callable[[graph.Access], str]) -> Patch:
    """Accesses that are taken for others."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        applied = analysis._Entry._apply

        def changed(self: Any, a: graph.Access) -> None:
            old, a.mode = a.mode, change(a)
            applied(self, a)
            a.mode = old

        patch.setattr(analysis._Entry, "_apply", changed)

    return apply


def unguarded(patch: pytest.MonkeyPatch) -> None:
    """A predicated instruction always happens."""
    write = effects.Step.write

    def changed(self: effects.Step, operand: Any, node: int) -> None:
        self.guard = None
        write(self, operand, node)

    patch.setattr(effects.Step, "write", changed)


def some_edges(keep: Callable[[int, int], bool]) -> Patch:
    """Values do not come over every edge of the control flow."""

    def close(self: cfg.Definitions, inputs: list[list[int]]) -> None:
        while self.open:
            block, register = self.open.pop()
            for p in [p for p in self.parts[block].before if keep(p, block)] or self.parts[block].before[:1]:
                found = self.ends[p].get(register)
                inputs[self.phis[block, register]].append(self.entry(p, register) if found is None else found)

    return replaced(cfg.Definitions, "close", close)


def first_target(patch: pytest.MonkeyPatch) -> None:
    made = graph.blocks

    def changed(function: Any) -> Any:
        for instr in function.body or []:
            if instr.op == "brx":
                instr.targets = instr.targets[:1]
        return made(function)

    patch.setattr(graph, "blocks", changed)


def numbers_of_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(analysis, "FOREIGN", 0)


def plain_products(patch: pytest.MonkeyPatch) -> None:
    """A product is an index, whatever the factor."""

    def scaled(self: Any, op: str, i: int, v: origins.Masks) -> origins.Masks:
        d, s, p, q, n, r = v
        return 0, d | s, p, q, n, r

    patch.setattr(origins.Origins, "_scaled", scaled)


def never_raised(patch: pytest.MonkeyPatch) -> None:
    """Shifted up twice is as if shifted up once."""
    scaled = origins.Origins._scaled

    def changed(self: Any, op: str, i: int, v: origins.Masks) -> origins.Masks:
        return scaled(self, op, i, (*v[:5], 0))

    patch.setattr(origins.Origins, "_scaled", changed)


def by_name_only(patch: pytest.MonkeyPatch) -> None:
    """Shared memory hands nothing on."""
    connect = origins.Origins._connect_access
    skipped = lambda self, a, changed: None if a.space == "shared" else connect(self, a, changed)  # noqa: E731
    patch.setattr(origins.Origins, "_connect_access", skipped)


FORGOTTEN: list[tuple[str, Patch, str]] = [
    ("an atomic operation writes", modes_changed(lambda a: "R" if a.mode == "RW" else a.mode), "histogram"),
    ("an atomic operation reads", modes_changed(lambda a: "W" if a.mode == "RW" else a.mode), "scatter_add"),
    ("red", without("red"), "vectors"),
    ("source of cp.async", without("cp"), "async_copy"),
    ("target of cp.async.bulk", modes_changed(lambda a: "none" if a.mode in ("W", "RW") else a.mode), "bulk"),
    ("store by a tensor map", modes_changed(lambda a: "none" if a.via in ("W", "RW") else a.mode), "tensor_maps"),
    ("second operand of selp", inputs_changed("selp", lambda x: [x[0], x[0], *x[2:]]), "conditional"),
    ("first operand of selp", inputs_changed("selp", lambda x: [x[1], x[1], *x[2:]]), "choose"),
    ("predicated pointer", unguarded, "predicated"),
    ("pointers that meet at a branch", some_edges(lambda p, b: False), "branches"),
    ("loop-carried pointer", some_edges(lambda p, b: p < b), "carried"),
    ("indirect branch", first_target, "jump_table"),
    ("called function", idle(graph.Graph, "call"), "calls"),
    ("arguments and results", idle(graph.Graph, "link"), "returns_pointer"),
    ("function without a body", idle(graph.Graph, "unknown_call"), "through_calls"),
    ("indirect call", idle(graph.Graph, "unknown_call"), "by_prototype"),
    ("pointer loaded from memory", numbers_of_memory, "pointer_table"),
    ("module variable", idle(analysis._Entry, "_module_variable"), "module_variable"),
    ("generic address", lost("cvta"), "axpy"),
    ("vector forms", replaced(effects, "_items", lambda x: getattr(x, "items", (x,))[:1]), "local_array"),
    ("local memory", idle(origins.Origins, "_local"), "spilled"),
    ("pointer in shared memory", by_name_only, "through_shared"),
    ("pointer through a shuffle", inputs_changed("shfl", lambda x: x[1:]), "warp_shuffle"),
    ("halves of a pointer", inputs_changed("pack", lambda x: []), "packed"),
    ("masked pointer", inputs_changed("and", lambda x: x[1:]), "aligned"),
    ("second operand of xor", inputs_changed("xor", lambda x: x[:1]), "xor_swap"),
    ("product by a number that may be 1", plain_products, "arithmetic_select"),
    ("shift by a number that may be 0", plain_products, "shift_select"),
    ("half that is shifted up twice", never_raised, "halves_shifted_twice"),
    ("dynamic index into parameters", idle(origins.Origins, "_local"), "multi_tensor"),
    ("address of a parameter", idle(origins.Origins, "_from_parameters"), "choose"),
    ("texture", without("tex"), "textures"),
    ("multimem", without("multimem"), "multicast"),
    ("discard", without("discard"), "hints"),
    ("prefetch", without("prefetch"), "hints"),
    ("wmma", without("wmma"), "tensor_core"),
]  # fmt: skip


def unsound(kernel: str) -> tuple[str, ...]:
    for source, ptx in truth.SOURCES.values():
        known = truth.truths((truth.DATA / source).read_text())
        if kernel in known and (truth.DATA / ptx).read_text().count(f" {kernel}("):
            found = truth.verdicts((truth.DATA / ptx).read_text(), {kernel: known[kernel]})
            if found[0].unsound:
                return found[0].unsound
    return ()


@pytest.mark.quick
@pytest.mark.parametrize(("what", "patch", "kernel"), FORGOTTEN, ids=[f[0] for f in FORGOTTEN])
def test_what_is_forgotten_shows(what: str, patch: Patch, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the kernel does not need what the row says, so that nothing would notice its loss."""
    assert unsound(kernel) == ()
    patch(monkeypatch)
    assert unsound(kernel)


def short_limits(patch: pytest.MonkeyPatch) -> None:
    limit = loops.Loops._limit

    def changed(self: Any, *args: Any) -> tuple[int | None, int | None]:
        low, high = limit(self, *args)
        return low, None if high is None else high - 1

    patch.setattr(loops.Loops, "_limit", changed)


def rule(op: str, made: Callable[..., Any]) -> Patch:
    return lambda patch: patch.setitem(arithmetic._RULES, op, made)


def fewer_turns(patch: pytest.MonkeyPatch) -> None:
    count = loops.Loops._count
    patch.setattr(loops.Loops, "_count", lambda self, place: (n := count(self, place)) and n - 1)


def only_numbers_left(self: Any, values: list[Any]) -> list[Any]:
    """Pointers to elsewhere are left out beside anything."""
    rest = [v for v in values if v is None or v.base != affine.ELSEWHERE]
    return rest if self.only and rest else values


ARITHMETIC, GUARDS, POINTERS = "intervals_of_random_arithmetic_hold_what_is_seen", "guards_of_random_launches_hold", "p"
SHORT: list[tuple[str, Patch, str]] = [
    ("32 bits wrap", replaced(affine._Launch, "_fits", lambda self, v, op, kinds: v), ARITHMETIC),
    ("types of operands", replaced(arithmetic, "holds", lambda *x: True), ARITHMETIC),
    ("bits in common of or", rule("or", arithmetic._sum), ARITHMETIC),
    ("bits in common of xor", rule("xor", arithmetic._difference), ARITHMETIC),
    ("the sign of a remainder", rule("rem", lambda r, i, v, k: r.between(i, 0, 2)), ARITHMETIC),
    ("places of bfe", rule("bfe", lambda r, i, v, k: v[0]), ARITHMETIC),
    ("what bfi inserts", rule("bfi", lambda r, i, v, k: v[1]), ARITHMETIC),
    ("the second operand of min", rule("min", lambda r, i, v, k: v[0]), ARITHMETIC),
    ("the last turn of a loop", fewer_turns, GUARDS),
    ("equality in conditions", short_limits, GUARDS),
    ("the side of a branch", replaced(loops, "_OPPOSITE", {k: k for k in loops._OPPOSITE}), GUARDS),
    ("numbers that are pointers elsewhere", replaced(affine._Launch, "_here", only_numbers_left), POINTERS),
]  # fmt: skip


@pytest.mark.parametrize(("what", "patch", "test"), SHORT, ids=[s[0] for s in SHORT])
def test_intervals_that_forget_are_seen(what: str, patch: Patch, test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if random launches do not show the loss."""
    patch(monkeypatch)
    with pytest.raises(AssertionError):
        if test == POINTERS:
            for marked in ("", ".ptr .global .align 1"):
                watched.test_pointers_chosen_and_moved_at_random(marked)
        else:
            getattr(watched, f"test_{test}")()
