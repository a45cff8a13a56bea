"""The oracle's algorithm on memory and kernels made for it: every kind of wrong declaration must be found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from hw.oracle.check import Finding, check_kernel  # noqa: E402
from hw.oracle.memory import PERIOD, ROW, Memory, Region  # noqa: E402
from hw.oracle.sets import declared  # noqa: E402
from tesserasim.trace.model import Access, Buffer  # noqa: E402

BASE = 1 << 40
N = 3000  # elements of a vector: neither a row nor a cell
#: name -> (offset in memory, bytes, role); the rest of memory is nobody's: free blocks and guard zones
PLACES = {
    "x": (ROW + 64, 2 * N, "activation"), "w": (4 * ROW, 2 * N, "weight"), "y": (8 * ROW + 512, 2 * N, "activation"),
    "z": (12 * ROW, 2 * N, "activation"), "cache": (16 * ROW, 64 * 128, "state"),
    "scratch": (20 * ROW, 2 * ROW, "workspace"), "index": (24 * ROW, 8 * 16, "input"),
}  # fmt: skip
GUARD = 30 * ROW
BUFFERS = [Buffer(i, n, PLACES[n][1], PLACES[n][2]) for i, n in enumerate(PLACES)]


class World:
    """Two regions of memory with the places above, filled with normal numbers; kernels see them by name."""

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        one, two = (torch.empty(n * ROW // 2, dtype=torch.bfloat16).normal_(generator=g) for n in (40, 2 * PERIOD + 7))
        self.memory = Memory([Region(BASE, one.view(torch.uint8)), Region(BASE * 2, two.view(torch.uint8))])
        self.raw = self.memory.regions[0].live
        self.far = self.memory.regions[1].live
        self.at("index", torch.int64).copy_(torch.randperm(16, generator=g) * 4)

    def at(self, name: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        offset, nbytes, _ = PLACES[name]
        return self.raw[offset : offset + nbytes].view(dtype)

    def check(
        self, kernel: Callable[[World], None], *accesses: Access, note: Callable[[str], None] = lambda p: None,
        before: tuple[int, ...] = (), dtypes: str = "bfloat16",
    ) -> Finding:  # fmt: skip
        names = list(PLACES)
        sets = declared(
            accesses, BUFFERS, lambda b: BASE + PLACES[names[b]][0],
            lambda i: "int64" if names[accesses[i].buffer] == "index" else dtypes,
        )  # fmt: skip
        self.memory.save()
        return check_kernel(self.memory, sets, lambda: kernel(self), note, before)

    def status(self, kernel: Callable[[World], None], *accesses: Access) -> str:
        """Status of a kernel; one that fails on poisoned memory read something that it should not."""
        phases: list[str] = []
        try:
            return self.check(kernel, *accesses, note=phases.append).status
        except IndexError:
            assert phases[-1] in ("A", "B")
            return "missed_read"


def access(name: str, mode: str, covers: bool | None = None, nbytes: int = 0, offset: int = 0, **more: str) -> Access:
    size = nbytes or PLACES[name][1] - offset
    cover = mode == "W" if covers is None else covers
    return Access(list(PLACES).index(name), mode, offset, size, **{"extent": "exact", **more}, covers=cover)


def add(m: World) -> None:
    m.at("y").copy_(m.at("x") + m.at("w"))


ADD = (access("x", "R"), access("w", "R"), access("y", "W"))


def in_place(m: World) -> None:
    m.at("y").add_(m.at("x"))


def append(m: World) -> None:
    rows = m.at("cache").view(64, 64)
    rows[m.at("index", torch.int64)] = m.at("x")[: 16 * 64].view(16, 64)


def halves(m: World) -> None:
    m.at("y")[: N // 2] = m.at("x")[: N // 2]


def through_scratch(m: World) -> None:
    s = m.at("scratch")
    s[:N].copy_(m.at("x"))
    m.at("y").copy_(s[:N] * 2)


APPEND = (access("x", "R", nbytes=2048), access("index", "R"), access("cache", "W", covers=False, nbytes=16 * 128))
RIGHT = [
    (add, ADD),
    (in_place, (access("x", "R"), access("y", "RW"))),
    (append, APPEND),
    (halves, (access("x", "R", nbytes=N), access("y", "W", nbytes=N))),
    (halves, (access("x", "R", nbytes=N), access("y", "W", covers=False, extent="superset"))),
    (through_scratch, (access("x", "R"), access("y", "W"), access("scratch", "RW", extent="unknown"))),
]


@pytest.mark.parametrize("kernel, accesses", RIGHT)
def test_right_declarations_pass(kernel: Callable[[World], None], accesses: tuple[Access, ...]) -> None:
    world, expected = World(), World()
    found = world.check(kernel, *accesses)
    assert (found.status, found.reason) == ("ok", "")
    assert all(r["seen"] == "observed" for r in found.reads if accesses[r["access"]].extent != "unknown"), found.reads
    kernel(expected)  # memory is left in the state behind the kernel
    assert torch.equal(world.raw, expected.raw) and torch.equal(world.far, expected.far)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kernel, accesses, drop", [(k, a, i) for k, a in RIGHT for i in range(len(a))])
def test_dropping_any_access_is_found(
    kernel: Callable[[World], None], accesses: tuple[Access, ...], drop: int, seed: int
) -> None:
    found = World(seed).status(kernel, *(a for i, a in enumerate(accesses) if i != drop))
    gone = accesses[drop]
    want = {"R": ("missed_read",), "W": ("missed_write",), "RW": ("missed_read", "missed_write")}[gone.mode]
    assert found in want


@pytest.mark.parametrize("kernel, accesses, at", [(k, a, i) for k, a in RIGHT[:3] for i in range(len(a))])
def test_cutting_an_access_short_is_found(
    kernel: Callable[[World], None], accesses: tuple[Access, ...], at: int
) -> None:
    a = accesses[at]
    less = Access(a.buffer, a.mode, a.offset, a.nbytes - 8, a.extent, a.covers)
    assert World().status(kernel, *accesses[:at], less, *accesses[at + 1 :]) != "ok"


def test_where_was_written() -> None:
    found = World().check(append, *APPEND)
    write = found.writes[0]
    assert (write["bytes"], write["intervals"], write["resolution"]) == (16 * 128, 16, 1)
    assert write["spans"] == [(i * 512, i * 512 + 128) for i in range(16)]
    found = World().check(add, *ADD)
    assert found.writes[0]["spans"] == [(0, 2 * N)]


def test_more_than_declared_is_found() -> None:
    found = World().check(append, *APPEND[:2], access("cache", "W", covers=False, nbytes=16 * 128 - 2))
    assert found.status == "missed_write" and "declared 2046" in found.reason


def test_a_write_far_outside_and_a_read_of_a_guard_zone() -> None:
    def stray(m: World) -> None:
        add(m)
        m.far[PERIOD * ROW + 5] = 17

    found = World().check(stray, *ADD)
    assert found.status == "missed_write"
    assert found.outside == [(2 * BASE + PERIOD * ROW + 5, 2 * BASE + PERIOD * ROW + 6)]

    def peek(m: World) -> None:
        add(m)
        m.at("y")[7] += m.raw[GUARD : GUARD + 2].view(torch.bfloat16)[0]

    found = World().check(peek, *ADD)
    assert found.status == "missed_read"
    offset = PLACES["y"][0] + 14
    assert all(BASE + offset <= a and b <= BASE + offset + 2 for a, b in found.wrong)
    assert any(a <= BASE + GUARD < b for a, b in found.undeclared), "the guard zone is named"
    assert sum(b - a for a, b in found.undeclared) <= 512


def test_a_copy_whose_target_already_holds_the_answer() -> None:
    """Source and target undeclared, and equal in the true state: only the patterns' places tell."""

    def copy(m: World) -> None:
        m.far[: 2 * ROW] = m.far[3 * ROW : 5 * ROW]

    world = World()
    copy(world)
    assert world.check(copy).status == "missed_read"


@pytest.mark.parametrize("value", [0xFF, 0x7A, 0x81, 0x00])
def test_a_write_of_the_old_value_or_of_a_pattern_is_seen(value: int) -> None:
    def fill(m: World) -> None:
        m.raw[GUARD : GUARD + 256] = value

    world = World()
    fill(world)
    found = world.check(fill)
    assert found.status == "missed_write" and found.outside == [(BASE + GUARD, BASE + GUARD + 256)]


def test_a_write_into_a_buffer_that_is_only_read() -> None:
    def scribble(m: World) -> None:
        add(m)
        m.at("x")[3] = 12.5

    assert World().check(scribble, *ADD).status == "missed_write"


def test_nondeterminism_is_skipped_unless_it_stays_in_scratch() -> None:
    calls = [0]

    def count(m: World) -> None:
        calls[0] += 1
        add(m)
        m.at("scratch")[0] = calls[0]

    found = World().check(count, *ADD, access("scratch", "RW", extent="unknown"))
    assert found.status == "ok" and found.nondeterministic_bytes > 0

    def noisy(m: World) -> None:
        count(m)
        m.at("y")[5] = calls[0]

    found = World().check(noisy, *ADD, access("scratch", "RW", extent="unknown"))
    assert found.status == "skipped" and "nondeterministic" in found.reason


def test_a_cover_that_is_none_matters_once_the_buffer_held_something() -> None:
    wrong = (access("x", "R"), access("y", "W"))
    fresh = World().check(halves, *wrong)
    assert fresh.status == "ok" and fresh.writes[0]["not_covered"] == 2 * N - 2 * (N // 2)
    found = World().check(halves, *wrong, before=(1,))
    assert found.status == "missed_read" and "old bytes" in found.reason


def test_reads_that_change_nothing_are_not_observed() -> None:
    def ignores(m: World) -> None:
        m.at("y").copy_(m.at("x"))

    found = World().check(ignores, *ADD, access("scratch", "RW", extent="unknown"), dtypes="bfloat16")
    assert [r["seen"] for r in found.reads[:2]] == ["observed", "not observed"]
    assert found.reads[1]["tries"] == 3
    found = World().check(ignores, *ADD, dtypes="")
    assert {r["seen"] for r in found.reads} == {"not tried"}


def test_a_fault_on_poison_comes_with_its_phase() -> None:
    phases: list[str] = []

    def lookup(m: World) -> None:
        index = m.at("index", torch.int64)
        m.at("y")[:16] = m.at("x")[index]

    with pytest.raises(IndexError):
        World().check(lookup, access("x", "R"), access("y", "W", nbytes=32), note=phases.append)
    assert phases == ["A"]
    phases.clear()
    found = World().check(
        lookup, access("x", "R"), access("index", "R"), access("y", "W", nbytes=32), note=phases.append
    )
    assert found.status == "ok" and phases[:4] == ["A", "B", "true", "again"] and phases[-1] == "advance"
