"""Which moves and waits of a placement can be dropped so that a right check must see it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from hw.replay.cut import NEXT, Launch, Move, Step
from hw.replay.order import implied


@dataclass(frozen=True)
class Wait:
    """A launch that will not wait for moves, and the step that a pause is put before, so that it would have to."""

    reader: int  # step
    move: int  # step: the move that was picked
    gone: frozenset[int]  # steps: all moves that the reader waits for
    late: int  # step


@dataclass
class Mutants:
    """Steps of a placement whose loss must show, and how many are left out because theirs need not."""

    moves: list[int] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    implied: int = 0  # waits that other waits imply
    integers: int = 0  # moves that bring integers: a stale index may be a fault, not another answer


def mutants(
    steps: Sequence[Step], needs: Sequence[Collection[int]], integer: Callable[[Move], bool]
) -> Mutants:
    """What can be dropped of `steps`, whose waits are `needs`. `integer`: whether a move brings integers.

    A wait shows only if the reader comes too early without it. So the pause comes before the producer; where the
    reader's other waits put it behind the producer anyway, and only the move is at risk, it comes before the move.
    """
    at = {(s.kernel, s.device): i for i, s in enumerate(steps) if isinstance(s, Launch)}
    moves = [(i, s) for i, s in enumerate(steps) if isinstance(s, Move) and s.before != NEXT]
    into: dict[tuple[int, str], set[int]] = {}
    for i, m in moves:
        into.setdefault((m.before, m.target), set()).add(i)
    stale = {i for i, m in moves if integer(m)}
    found = Mutants([i for i, _ in moves if i not in stale], integers=len(stale))
    ordered = [sorted(n) for n in needs]
    for i, m in moves:
        reader, gone = at[m.before, m.target], frozenset(into[m.before, m.target])
        if gone & stale:
            continue
        if implied(ordered, reader, i, gone):
            found.implied += 1
            continue
        producer = at[m.after, m.source]
        behind = implied(ordered, reader, producer, gone)
        found.waits.append(Wait(reader, i, gone, i if behind else producer))
    return found
