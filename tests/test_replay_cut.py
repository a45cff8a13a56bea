"""What a placement moves: by hand, and against what the simulator sends for the same plan."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from hw.replay.cut import NEXT, Launch, Move, Remains, brought, cut, remains
from tesserasim.deps.graph import unit_flow
from tesserasim.errors import InputError
from tesserasim.trace.model import Access, Buffer, Kernel, Trace, TraceMeta
from tesserasim.trace.parquet import read_trace

TRACES = Path(__file__).resolve().parents[1] / "traces"
META = TraceMeta(origin="synthetic", model="toy", unit={"name": "step"}, gpu="H200")
SHIPPED = [
    "llama-3-8b/decode-b8-c512", "llama-3-8b/prefill-b1-t512", "gpt-oss-20b/decode-b32-c2048",
    "mamba-codestral-7b/decode-b32-c512", "qwen2.5-vl-7b/encode-b1", "sd3.5-medium/denoise-b1",
    "sd3.5-encoders/vae-decode-b1",
]  # fmt: skip


def toy(buffers: list[tuple[str, int]], kernels: list[list[Access]]) -> Trace:
    """Buffers (role, bytes); a kernel per list of accesses."""
    return Trace(
        META,
        buffers=tuple(Buffer(i, f"b{i}", n, role) for i, (role, n) in enumerate(buffers)),
        kernels=tuple(Kernel(i, f"k{i}", f"m/k{i}#0", accesses=tuple(a)) for i, a in enumerate(kernels)),
    )


def access(buffer: int, mode: str, nbytes: int, offset: int = 0, extent: str = "exact", covers: bool = False) -> Access:
    return Access(buffer, mode, offset, nbytes, extent, covers, "schema")


def moves(trace: Trace, devices: str, carry: bool = False) -> list[tuple[int, int, int, str, str, int, int]]:
    steps = [s for s in cut(trace, list(devices), carry) if isinstance(s, Move)]
    return [(m.buffer, m.start, m.end, m.source, m.target, m.after, m.before) for m in steps]


@pytest.mark.quick
def test_a_value_goes_to_a_device_once_and_only_the_bytes_read() -> None:
    t = toy(
        [("activation", 100)],
        [[access(0, "W", 100, covers=True)], [access(0, "R", 40)], [access(0, "R", 60)], [access(0, "R", 100)]],
    )
    assert moves(t, "abbb") == [(0, 0, 40, "a", "b", 0, 1), (0, 40, 60, "a", "b", 0, 2), (0, 60, 100, "a", "b", 0, 3)]
    assert moves(t, "abab") == [(0, 0, 40, "a", "b", 0, 1), (0, 40, 100, "a", "b", 0, 3)]
    assert moves(t, "abcc") == [(0, 0, 40, "a", "b", 0, 1), (0, 0, 60, "a", "c", 0, 2), (0, 60, 100, "a", "c", 0, 3)]
    assert moves(t, "aaaa") == []


@pytest.mark.quick
def test_the_newest_version_moves_and_a_partial_write_needs_the_old_one() -> None:
    t = toy(
        [("activation", 100)],
        [[access(0, "W", 100, covers=True)], [access(0, "W", 10, 20, extent="superset")], [access(0, "R", 100)]],
    )
    # k1 may write [20, 30): it needs the old bytes there; k2 reads both writers
    assert moves(t, "aba") == [(0, 20, 30, "a", "b", 0, 1), (0, 20, 30, "b", "a", 1, 2)]
    assert moves(t, "abb")[1:] == [(0, 0, 20, "a", "b", 0, 2), (0, 30, 100, "a", "b", 0, 2)]


@pytest.mark.quick
def test_state_moves_as_what_was_written_and_carries_to_the_next_launch() -> None:
    t = toy(
        [("state", 1000), ("state", 8)],
        [[access(1, "R", 8)], [access(0, "W", 16)], [access(0, "R", 1000)], [access(1, "W", 8, covers=True)]],
    )
    assert moves(t, "abab") == [(0, 0, 16, "b", "a", 1, 2)]
    assert moves(t, "abab", carry=True) == [(0, 0, 16, "b", "a", 1, 2), (1, 0, 8, "b", "a", 3, NEXT)]
    assert all(m.delta for m in cut(t, list("abaa")) if isinstance(m, Move))


@pytest.mark.quick
def test_weights_and_what_nobody_wrote_stay() -> None:
    t = toy([("weight", 10), ("activation", 10), ("input", 4)], [[access(0, "R", 10), access(2, "R", 4)],
            [access(0, "R", 10), access(1, "R", 10), access(2, "R", 4)]])  # fmt: skip
    assert moves(t, "ab") == []
    with pytest.raises(InputError, match="2 kernels, but devices for 1"):
        cut(t, ["a"])


@pytest.mark.parametrize("name", SHIPPED)
def test_the_same_bytes_as_the_values_of_the_dependency_graph(name: str) -> None:
    """Random placements: per writer, buffer and target, what moves is what the simulator's values say."""
    trace = read_trace(TRACES / f"{name}.parquet")
    flow = unit_flow(trace)
    rng = random.Random(name)
    for devices, switches in ((2, 0.5), (3, 0.1)):
        site_device, now = [], 0
        for _ in trace.sites:
            now = rng.randrange(devices) if rng.random() < switches else now
            site_device.append("abc"[now])
        device_of = [site_device[s] for s in trace.site_of]
        want: Counter[tuple[int, int, str]] = Counter()
        for v in flow.values:
            for target in {device_of[r] for r in v.readers} - {device_of[v.writer]}:
                want[v.writer, v.buffer, target] += v.nbytes
        got: Counter[tuple[int, int, str]] = Counter()
        launched: set[int] = set()
        for s in cut(trace, device_of):
            if isinstance(s, Launch):
                launched.add(s.kernel)
                continue
            assert s.after in launched and s.before not in launched and device_of[s.before] == s.target
            got[s.after, s.buffer, s.target] += s.nbytes
        assert got == want
        assert len(launched) == len(trace.kernels)


@pytest.mark.quick
def test_what_remains_and_what_must_be_brought() -> None:
    t = Trace(
        META,
        buffers=(
            Buffer(0, "kv", 1000, "state"), Buffer(1, "token", 8, "state"), Buffer(2, "a", 64, "activation", 5, 0),
            Buffer(3, "lse", 64, "activation", 5, 64), Buffer(4, "b", 64, "activation", 5, 96),
            Buffer(5, "logits", 32, "activation", 5, 256), Buffer(6, "image", 16, "input"),
        ),
        kernels=tuple(
            Kernel(i, f"k{i}", f"m/k{i}#0", accesses=tuple(a)) for i, a in enumerate([
                [access(1, "R", 8), access(6, "R", 16), access(2, "W", 64, covers=True)],
                [access(2, "R", 64), access(0, "W", 16), access(3, "W", 64, covers=True)],
                [access(0, "R", 1000), access(4, "W", 64, covers=True)],  # takes the place of lse in part
                [access(4, "R", 64), access(5, "W", 32, covers=True), access(1, "W", 8, covers=True)],
            ])
        ),
    )  # fmt: skip
    assert brought(t, list("abab")) == {(1, "a"), (6, "a"), (0, "a")}
    assert remains(t, list("abab")) == [
        Remains(0, 0, 16, "b", delta=True), Remains(1, 0, 8, "b"), Remains(5, 0, 32, "b")
    ]  # fmt: skip
