"""Which kernels of a profile belong to which repeat of the same work.

A profile of several steps is cut by the first of these that finds repeats:

1. `ProfilerStep#N` annotations of torch.profiler;
2. other annotations and NVTX ranges whose names are equal but for numbers ("step 3"), that do not overlap within
   a process, and that launched at least half of all rows. Of several such families the one that launched the most
   rows, of nearly equal ones (within a tenth) the one with the fewest ranges: the outermost;
3. a stretch of kernel names that repeats itself, at least half of all rows. Of all periods the one whose repeats
   cover most, of nearly equal ones the shortest. A lone step of a model with many equal layers looks the same, so
   what was found is said.

A row belongs to the range in which it was *launched*: the GPU works later, and often past the range's end. Rows
without a launch go by the GPU's own copy of the annotation, else with the row before them on their stream.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tesserasim.errors import InputError
from tesserasim.trace.launches import Annotation
from tesserasim.trace.rows import Profile, Row

#: Rows outside of every iteration.
OUTSIDE = -1
_STEP = "ProfilerStep##"  # of "ProfilerStep#3", the number replaced
_NEARLY = 0.9
#: Periods tried at most, and the share of all rows that repeats must cover to be believed.
_MOST_PERIODS, _LEAST_COVER = 400, 0.5


@dataclass(frozen=True)
class Iterations:
    """What was found: a name per iteration, and for each row in launch order its iteration or OUTSIDE."""

    found_by: str
    names: tuple[str, ...]
    of_row: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """For `meta.extra`: `runs` holds [iteration, rows] for every stretch of launch order."""
        runs = [[i, len(list(group))] for i, group in groupby(self.of_row)]
        return {"found_by": self.found_by, "names": list(self.names), "runs": runs}


def find_iterations(profile: Profile, rows: Sequence[Row]) -> Iterations | None:
    """The iterations of `profile`, whose rows in launch order are `rows`; None if nothing repeats."""
    return _by_annotations(profile, rows) or _by_names([row.name for row in rows])


def rows_of(found: Mapping[str, Any] | None, number: int, where: str) -> list[int]:
    """Places in launch order of the rows of iteration `number` (from 0) of what `Iterations.as_json` gave.

    Raises InputError if there is no such iteration; it says which there are.
    """
    if not found:
        raise InputError(f"{where}: no iterations found (no annotations, no repeated kernels); use --range A:B")
    names = found["names"]
    if not 0 <= number < len(names):
        raise InputError(
            f"{where}: no iteration {number}; the profile has {len(names)}, numbered from 0: {describe(found)}"
        )
    places: list[int] = []
    at = 0
    for iteration, length in found["runs"]:
        if iteration == number:
            places.extend(range(at, at + length))
        at += length
    return places


def describe(found: Mapping[str, Any]) -> str:
    """The iterations in a few words."""
    names = found["names"]
    shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"{shown}, found by {found['found_by']}"


def _family(name: str) -> str:
    return re.sub(r"\d+", "#", re.sub(r", op_id = \d+$", "", name))


def _by_annotations(profile: Profile, rows: Sequence[Row]) -> Iterations | None:
    best: tuple[int, Iterations] | None = None
    families: dict[tuple[bool, str], list[Annotation]] = defaultdict(list)
    for note in profile.annotations:
        families[note.gpu, _family(note.name)].append(note)
    # CPU ranges first: they say what was launched inside, whenever it ran.
    for (gpu, family), notes in sorted(families.items(), key=lambda item: (item[0][0], len(item[1]), item[0][1])):
        if gpu and best is not None:
            break
        if len(notes) < 2 and family != _STEP:
            continue
        numbers = _numbers(notes)
        if numbers is None:
            continue
        twins = [note for note in families.get((True, family), ()) if not gpu]
        found = _assign(profile, rows, notes, numbers, twins)
        if len(found.names) < 2 and family != _STEP:
            continue
        covered = sum(i != OUTSIDE for i in found.of_row)
        if family == _STEP and covered:
            return found
        if covered >= _LEAST_COVER * len(rows) and (best is None or covered * _NEARLY > best[0]):
            best = covered, found
    return best[1] if best is not None else None


def _numbers(notes: list[Annotation]) -> dict[Annotation, int] | None:
    """The place of each range among those of its process, by time; None if some overlap."""
    by_process: dict[str, list[Annotation]] = defaultdict(list)
    for note in notes:
        by_process[note.process].append(note)
    numbers = {}
    for group in by_process.values():
        group.sort()
        if any(b.start_ns < a.end_ns for a, b in pairwise(group)):
            return None
        numbers.update({note: i for i, note in enumerate(group)})
    return numbers


def _assign(
    profile: Profile, rows: Sequence[Row], notes: list[Annotation], numbers: dict[Annotation, int],
    twins: list[Annotation],
) -> Iterations:  # fmt: skip
    """Give every row its range: by launch, by the GPU's twin of the range, by the row before it."""
    gpu = notes[0].gpu
    ranges = sorted(notes)
    starts = [note.start_ns for note in ranges]
    by_process = {note.process for note in ranges}
    named = {note.name: number for note, number in numbers.items()}
    last: dict[tuple[int, int], int] = {}
    of_row = []
    for row in rows:
        launch = None if gpu else profile.launches.launch(row.correlation)
        stream = (row.device, row.stream)
        if launch is not None:
            process = launch.process if launch.process in by_process else None
            number = _inside(ranges, starts, numbers, launch.start_ns, process)
        elif not gpu and row.op is not None:
            number = _inside(ranges, starts, numbers, row.op.start_ns, None)
        elif gpu:
            number = _inside(ranges, starts, numbers, row.start_ns, None)
        else:
            twin = next((t for t in twins if t.start_ns <= row.start_ns < t.end_ns), None)
            number = named.get(twin.name, OUTSIDE) if twin is not None else last.get(stream, OUTSIDE)
        last[stream] = number
        of_row.append(number)
    used = sorted(set(of_row) - {OUTSIDE})  # a range that launched nothing is no iteration
    renumbered = {number: i for i, number in enumerate(used)}
    name_of = {number: note.name for note, number in reversed(numbers.items())}
    what = "GPU annotations" if gpu else "annotations"
    return Iterations(
        f"{what} like {name_of[used[0]]!r}" if used else what,
        tuple(name_of[number] for number in used),
        tuple(renumbered.get(number, OUTSIDE) for number in of_row),
    )


def _inside(
    ranges: list[Annotation], starts: list[int], numbers: dict[Annotation, int], at: int, process: str | None
) -> int:
    """The number of the range (of `process`, if given) that holds the time `at`."""
    i = bisect.bisect_right(starts, at) - 1
    for note in reversed(ranges[max(0, i - 64) : i + 1]):  # other processes' ranges may lie between
        if at < note.end_ns and (process is None or note.process == process):
            return numbers[note]
    return OUTSIDE


def _by_names(names: Sequence[str]) -> Iterations | None:
    """Repeats of a sequence of names."""
    code = {name: i for i, name in enumerate(dict.fromkeys(names))}
    series = np.array([code[name] for name in names], dtype=np.int64)
    best: tuple[int, int, int] | None = None  # covered, period, first
    for period in _periods(series):
        first, run = _longest_run(series[period:] == series[:-period])
        covered = (run + period) // period * period
        # Periods come shortest first: a longer one must cover clearly more.
        if run >= period and (best is None or covered * _NEARLY > best[0]):
            best = covered, period, first
    if best is None or best[0] < _LEAST_COVER * len(names):
        return None
    covered, period, first = best
    count = covered // period
    of_row = [OUTSIDE] * first + [i // period for i in range(covered)]
    of_row += [OUTSIDE] * (len(names) - len(of_row))
    found_by = f"the same {period} kernel names {count} times over (they may be layers, not steps)"
    return Iterations(found_by, tuple(f"repeat {i}" for i in range(count)), tuple(of_row))


def _periods(series: NDArray[np.int64]) -> list[int]:
    """Periods worth trying, shortest first: distances between occurrences of one name."""
    order = np.argsort(series, kind="stable")
    edges = np.flatnonzero(np.diff(series[order])) + 1
    seen: dict[int, None] = {}
    for places in sorted(np.split(order, edges), key=len):  # rare names occur once a step
        for step in range(1, min(9, len(places))):
            for distance in (places[step] - places[0], places[-1] - places[-1 - step]):
                seen.setdefault(int(distance))
        if len(seen) > _MOST_PERIODS:
            break
    return sorted(p for p in seen if 1 < p <= len(series) // 2)


def _longest_run(equal: NDArray[np.bool_]) -> tuple[int, int]:
    """Start and length of the longest stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.astype(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    starts, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])
