"""One kernel against its declared sets: what it writes, and whether anything outside its read set matters to it.

A sound kernel is a function of its read set: it writes the same bytes with the same values whatever stands
elsewhere, and leaves all other bytes alone. So it is run four times from states that agree on the read set:

    A, B     every byte outside the read set holds a pattern (two patterns that differ in every byte)
    true     the true state, twice, to see whether the kernel repeats itself at all

A byte is *written* if any run changed it. Where it is written, all runs must have left the same value; else the
kernel read something undeclared (MISSED read; so does a fault or a hang on poisoned memory). Written bytes must lie
in the declared write set (else MISSED write), no more of them than declared, and a write that is declared to
replace everything must have done so if anybody wrote the buffer before. Inside the read set the true bytes stand
in every run, so there a byte is known to be written only if its value changed.

Then each read is tried: the access's bytes are changed into other valid values (mantissa bits of floats,
permutations of integers) and the kernel runs again. Other results: the read is *observed*. None: *not observed*,
which never means that it does not happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hw.oracle.memory import PATTERNS, ROW, Layout, Memory, Shot
from hw.oracle.sets import Declared, Read, Write
from hw.oracle.spans import Spans, gaps, merge, total

BATCH = 1 << 15  # rows judged at once
CELL = 32  # bytes that count as one where writes are seen only by changed values
NARROW = 512  # bytes: undeclared reads are narrowed down to this
LISTED = 64  # longest list of intervals that is kept
FLOATS = {
    "bfloat16": (torch.int16, (0x40, 0x20, 0x15)),
    "float16": (torch.int16, (0x200, 0x100, 0x155)),
    "float32": (torch.int32, (0x400000, 0x2AAAAA, 0x10000)),
    "float64": (torch.int64, (1 << 51, 1 << 50, 1 << 40)),
    "float8_e4m3fn": (torch.int8, (4, 2, 1)),
    "float8_e5m2": (torch.int8, (2, 1, 3)),
}
_INTEGERS = {
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.uint8,
}  # fmt: skip


@dataclass
class Finding:
    """What was seen of one kernel under one input."""

    status: str  # ok | missed_read | missed_write | skipped
    reason: str = ""
    writes: list[dict[str, Any]] = field(default_factory=list)  # per write access
    reads: list[dict[str, Any]] = field(default_factory=list)  # per read access: observed | not observed | not tried
    outside: Spans = field(default_factory=list)  # written, not declared
    wrong: Spans = field(default_factory=list)  # written, value depends on undeclared bytes
    undeclared: Spans = field(default_factory=list)  # bytes on which it depends, narrowed down; [] if that failed
    nondeterministic_bytes: int = 0


def check_kernel(
    memory: Memory, declared: Declared, launch: Callable[[], None], note: Callable[[str], None] = lambda _phase: None,
    written_before: Sequence[int] = (), judged: Callable[[Finding], None] = lambda _finding: None,
) -> Finding:  # fmt: skip
    """Check one kernel; memory and its snapshot hold the state before it, and afterwards the state behind it.

    `note` is told each phase before its launch. `written_before`: accesses whose buffer held a value before.
    `judged` gets the finding before reads are tried, which may end in a fault. An exception of `launch` ends the
    check: what it means depends on the phase.
    """
    layout = memory.layout(declared.kept)
    shots: dict[str, Shot] = {}
    for pattern in PATTERNS:
        memory.poison(layout, pattern)
        note(pattern)
        launch()
        shots[pattern] = memory.shoot(layout, pattern)
        memory.restore_rows(shots[pattern].rows)
    memory.restore()
    for phase in ("true", "again"):
        note(phase)
        launch()
        shots[phase] = memory.shoot()
        memory.restore_rows(shots[phase].rows)
    judge = _Judge(memory, declared, layout, shots)
    finding = judge.finding(written_before)
    judged(finding)
    if finding.wrong:
        finding.undeclared = _narrow(memory, declared, judge, launch, note)
    if finding.status != "skipped":
        finding.reads = [_try_read(memory, declared, judge, r, launch, note) for r in declared.reads]
        memory.restore()
    note("advance")
    launch()
    memory.save()
    return finding


class _Judge:
    """Compares the shots, row by row, in batches."""

    def __init__(self, memory: Memory, declared: Declared, layout: Layout, shots: dict[str, Shot]) -> None:
        self.memory, self.declared, self.layout, self.shots = memory, declared, layout, shots
        self.rows = np.unique(np.concatenate([s.rows for s in shots.values()]))
        self.truth = torch.empty((len(self.rows), ROW), dtype=torch.uint8, device=memory.device)
        self.written = torch.empty((len(self.rows), ROW), dtype=torch.bool, device=memory.device)
        self.outside: Spans = []
        self.wrong: Spans = []
        self.wrong_scratch: Spans = []
        self.unstable = self.unstable_scratch = 0
        self._allowed, self._scratch = memory.layout(declared.allowed), memory.layout(declared.scratch)
        for at in range(0, len(self.rows), BATCH):
            self._batch(at, min(at + BATCH, len(self.rows)))

    def _batch(self, first: int, end: int) -> None:
        m, rows = self.memory, self.rows[first:end]
        before, truth = m.before_and_after(self.shots["true"], rows)
        _, again = m.before_and_after(self.shots["again"], rows)
        written = (truth != before) | (again != before)
        wrong = torch.zeros_like(written)
        for pattern in PATTERNS:
            poisoned, result = m.before_and_after(self.shots[pattern], rows, self.layout, pattern)
            written |= result != poisoned
            wrong |= result != truth
        wrong &= written
        scratch = m.mask(rows, self._scratch)
        unstable = truth != again
        self.unstable += int((unstable & ~scratch).sum())
        self.unstable_scratch += int((unstable & scratch).sum())
        self.wrong += self._spans(rows, wrong & ~scratch)
        self.wrong_scratch += self._spans(rows, wrong & scratch)
        self.outside += self._spans(rows, written & ~m.mask(rows, self._allowed))
        self.truth[first:end] = truth
        self.written[first:end] = written

    def _spans(self, rows: np.ndarray, mask: torch.Tensor) -> Spans:
        """Address ranges of the true bytes, of the first rows that have any."""
        found: Spans = []
        for k in np.flatnonzero(mask.any(1).cpu().numpy())[:1024]:
            address = self.memory.address(int(rows[k]))
            found += [(address + a, address + b) for a, b in _runs(mask[int(k)].cpu().numpy())]
        return found

    def finding(self, written_before: Sequence[int]) -> Finding:
        d = self.declared
        if self.unstable:
            return Finding(
                "skipped", f"nondeterministic: {self.unstable} bytes differ between two runs from one state",
                nondeterministic_bytes=self.unstable,
            )  # fmt: skip
        # Scratch that differs from run to run tells nothing about what was read.
        wrong = merge(self.wrong + ([] if self.unstable_scratch else self.wrong_scratch))
        outside = merge(self.outside)
        writes = [self._write(w) for w in d.writes]
        reads_missed, writes_missed = [], []
        if wrong:
            reads_missed.append(f"{total(wrong)} bytes or more depend on bytes outside the read set")
        if outside:
            writes_missed.append(f"{total(outside)} bytes or more are written outside the write set")
        for w, seen in zip(d.writes, writes, strict=True):
            if w.limit is not None and seen["changed"] > w.limit:
                writes_missed.append(f"access {w.access} writes {seen['changed']} bytes, declared {w.limit}")
            short = w.span[1] - w.span[0] - seen["bytes"]
            if w.covers and not w.kept and short:
                seen["not_covered"] = short
                if w.access in written_before:
                    reads_missed.append(f"access {w.access} leaves {short} old bytes that it is declared to replace")
        status = "missed_read" if reads_missed else "missed_write" if writes_missed else "ok"
        reason = "; ".join(reads_missed + writes_missed)
        seen_wrong, unstable = wrong[:LISTED], self.unstable_scratch
        return Finding(status, reason, writes, [], outside[:LISTED], seen_wrong, nondeterministic_bytes=unstable)

    def _write(self, w: Write) -> dict[str, Any]:
        """Bytes written inside an access, as merged intervals from the first byte of its span.

        `bytes` counts cells of `resolution` bytes; `changed` counts the bytes that some run changed.
        """
        first, end = w.span
        mine = np.isin(self.rows, self.memory.rows_of(first, end), assume_unique=True)
        at = np.flatnonzero(mine)
        out: dict[str, Any] = {"access": w.access, "bytes": 0, "changed": 0, "intervals": 0}
        out["resolution"] = CELL if w.kept else 1
        if not len(at):
            return out
        rows, a, b = self.rows[at], int(at[0]), int(at[-1]) + 1
        seen = self.written[a:b] & self.memory.mask(rows, self.memory.layout([w.span]))
        out["changed"] = int(seen.sum())
        if w.kept:
            cells = seen.view(len(rows), -1, CELL).any(-1)
            seen = cells.repeat_interleave(CELL, dim=1) & self.memory.mask(rows, self.memory.layout([w.span]))
        return {**out, **self._intervals(rows, seen, first)}

    def _intervals(self, rows: np.ndarray, seen: torch.Tensor, base: int) -> dict[str, Any]:
        """Count, first and last byte of the intervals of `seen` [rows, ROW], and all of them if they are few."""
        joined = torch.zeros_like(seen)  # the byte before is seen too, and lies right before
        joined[:, 1:] = seen[:, :-1]
        neighbours = torch.from_numpy(np.diff(rows) == 1).to(seen.device)
        joined[1:, 0] = seen[:-1, -1] & neighbours
        out: dict[str, Any] = {"bytes": int(seen.sum()), "intervals": int((seen & ~joined).sum())}
        if not out["bytes"]:
            return out
        hit, whole = (f(1).cpu().numpy() for f in (seen.any, seen.all))
        address = self.memory.addresses(rows) - base
        ends = [int(np.flatnonzero(hit)[i]) for i in (0, -1)]
        bytes_of = {k: np.flatnonzero(seen[k].cpu().numpy()) for k in ends}
        out["first"] = int(address[ends[0]] + bytes_of[ends[0]][0])
        out["end"] = int(address[ends[1]] + bytes_of[ends[1]][-1] + 1)
        if out["intervals"] <= LISTED:
            spans = [
                (int(address[k]) + a, int(address[k]) + b)
                for k in np.flatnonzero(hit & ~whole)
                for a, b in _runs(seen[int(k)].cpu().numpy())
            ]
            out["spans"] = merge(spans + _stretches(address[whole]))
        return out


def _stretches(addresses: np.ndarray) -> Spans:
    """Whole rows at ascending addresses, joined where they touch."""
    if not len(addresses):
        return []
    cuts = np.flatnonzero(np.diff(addresses) != ROW)
    firsts, lasts = np.concatenate(([0], cuts + 1)), np.concatenate((cuts, [len(addresses) - 1]))
    return [(int(addresses[a]), int(addresses[b]) + ROW) for a, b in zip(firsts, lasts, strict=True)]


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """(first, end) of the stretches of true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _narrow(
    memory: Memory, declared: Declared, judge: _Judge, launch: Callable[[], None], note: Callable[[str], None]
) -> Spans:
    """Undeclared bytes whose content alone changes the results, by halving; [] if no half does so alone."""
    everywhere = [(r.first, r.end) for r in memory.regions]
    suspects = [s for first, end in everywhere for s in gaps(declared.kept, first, end)]

    def matters(spans: Spans) -> bool:
        kept = merge(s for first, end in everywhere for s in gaps(spans, first, end))
        memory.restore()
        memory.poison(memory.layout(kept), "B")
        note("narrow")
        launch()
        return _results_differ(memory, judge)

    narrowed = matters(suspects)
    while narrowed and total(suspects) > NARROW:
        halves = _halves(suspects)
        chosen = next((h for h in halves if matters(h)), None)
        if chosen is None:
            break
        suspects = chosen
    memory.restore()
    return suspects[:LISTED] if narrowed else []


def _halves(spans: Spans) -> tuple[Spans, Spans]:
    """The first and the second half of the bytes."""
    left = total(spans) // 2
    first: Spans = []
    for k, (a, b) in enumerate(spans):
        if b - a > left:
            return merge([*first, (a, a + left)]), merge([(a + left, b), *spans[k + 1 :]])
        first.append((a, b))
        left -= b - a
    return first, []


def _try_read(
    memory: Memory, declared: Declared, judge: _Judge, read: Read, launch: Callable[[], None],
    note: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Change what an access reads, in up to three ways, until the results change."""
    result = {"access": read.access, "seen": "not tried", "tries": 0}
    if read.dtype not in FLOATS and read.dtype not in _INTEGERS:
        return result
    first, end = read.span
    size = torch.empty(0, dtype=FLOATS.get(read.dtype, (_INTEGERS.get(read.dtype),))[0]).element_size()
    end -= (end - first) % size
    if first % size or end <= first:
        return result
    for k in range(3):
        if not _perturb(memory.view(first, end), read.dtype, k):
            break
        note(f"perturb {read.access} {k}")
        launch()
        result["tries"] = k + 1
        changed = _results_differ(memory, judge)
        memory.restore_span(first, end)
        memory.restore_rows(judge.rows)
        for w in declared.writes:
            memory.restore_span(*w.span)
        result["seen"] = "observed" if changed else "not observed"
        if changed:
            break
    return result


def _perturb(view: torch.Tensor, dtype: str, k: int) -> bool:
    """Change the k-th way; False if there is nothing to change."""
    if dtype in FLOATS:
        kind, masks = FLOATS[dtype]
        view.view(kind).bitwise_xor_(masks[k])
        return True
    values = view.view(_INTEGERS[dtype])
    moved = values.flip(0) if k == 0 else values.roll(1 if k == 1 else max(1, len(values) // 2))
    if bool((moved == values).all()):
        return len(values) > 1 and k < 2 and _perturb(view, dtype, k + 1)
    values.copy_(moved)
    return True


def _results_differ(memory: Memory, judge: _Judge) -> bool:
    for at in range(0, len(judge.rows), BATCH):
        end = min(at + BATCH, len(judge.rows))
        differ = memory.current(judge.rows[at:end]) != judge.truth[at:end]
        if bool((differ & judge.written[at:end]).any()):
            return True
    return False
