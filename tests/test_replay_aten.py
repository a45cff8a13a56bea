"""Plans replayed operator by operator: right to the bit, and wrong as soon as anything that is needed is missing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from replay_cases import CASES, DECODE, MODELS, NAMES, UNITS, arenas, never_used, random_plan, recorded  # noqa: E402

from hw.errors import HardwareError  # noqa: E402
from hw.replay import aten  # noqa: E402
from hw.replay.aten import Arena, Replay, StaleReadError, differing, new_values, outside, typed  # noqa: E402
from hw.replay.aten_record import EMPTY, Recorded, Recorder, eager, record  # noqa: E402
from hw.replay.aten_run import replay_lane, replay_plan  # noqa: E402
from hw.replay.cut import Launch, Move  # noqa: E402
from hw.workloads.base import NamedTensor  # noqa: E402
from tesserasim.deps.graph import unit_flow  # noqa: E402
from tesserasim.plans import ANY_SITE, Lane, Plan  # noqa: E402
from tesserasim.trace.parquet import read_trace, write_trace  # noqa: E402

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")
WHERE = dict.fromkeys(NAMES, CPU)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums over threads may be in any order; and the same random steps in every run."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def split(model: str, i: int, switches: int, seed: int, tmp_path: Path, names: tuple[str, ...] = NAMES) -> Replay:
    r, unit = recorded(model, i), UNITS[model][i].name
    lane = random_plan(tmp_path / "plan.json", unit, r.trace.sites, names, switches, seed)
    return Replay(r, {s: lane.device_of(unit, s) for s in r.trace.sites}, WHERE, arenas(model, i))


# What is recorded


def test_the_trace_of_a_decode_step(tmp_path: Path) -> None:
    trace = recorded("llama", 1).trace
    buffers, sites = {b.name: b for b in trace.buffers}, {k.site: k for k in trace.kernels}
    assert len(sites) == len(trace.kernels) and {k.module for k in trace.kernels} == {
        "embed", "head", *(f"layers.{i}" for i in range(3)),
    }  # fmt: skip
    assert not {k.op for k in trace.kernels} & {"view", "_unsafe_view", "t", "transpose", "split", "slice", "expand"}
    assert {buffers[n].role for n in ("layers.0.kv.k", "next_token")} == {"state"}
    assert (buffers["position"].role, buffers["layers.1.wqkv"].role) == ("input", "weight")
    assert buffers["layers.0.kv.k"].bytes_per_token == 2 * 8 * 2
    append, sample = sites["layers.0/index_copy_#0"], sites["head/copy_#0"]
    cache, token = buffers["layers.0.kv.k"], buffers["next_token"]
    assert [(a.mode, a.nbytes, a.covers) for a in append.accesses if a.buffer == cache.id] == [
        ("RW", cache.nbytes, False)
    ]
    assert [(a.mode, a.covers) for a in sample.accesses if a.buffer == token.id] == [("W", True)]
    assert [a.mode for a in sites["embed/embedding#0"].accesses] == ["R", "R", "W"]
    assert sites["layers.0/mm#0"].kind == "gemm" and trace.meta.origin == "synthetic"
    write_trace(trace, tmp_path / "t.parquet")
    assert read_trace(tmp_path / "t.parquet").buffers == trace.buffers


@pytest.mark.parametrize("model,i", CASES)
def test_what_moves_is_what_the_dependency_graph_says(model: str, i: int, tmp_path: Path) -> None:
    replay = split(model, i, 9, 3, tmp_path)
    want: Counter[tuple[int, int, str]] = Counter()
    for v in unit_flow(replay.recorded.trace).values:
        for target in {replay.device_of[k] for k in v.readers} - {replay.device_of[v.writer]}:
            want[v.writer, v.buffer, target] += v.nbytes
    got: Counter[tuple[int, int, str]] = Counter()
    for m in replay.moves:
        got[m.after, m.buffer, m.target] += m.nbytes
    assert got == want and got


# Right plans


@pytest.mark.parametrize("i", range(50))
def test_random_plans_are_right_to_the_bit(i: int, tmp_path: Path) -> None:
    """Every model, prefill and decode, two and three devices; half of the plans with 8 switches and more."""
    model, case = CASES[i % len(CASES)]
    r, unit = recorded(model, case), UNITS[model][case].name
    names = NAMES[: 2 + i // (2 * len(CASES))]
    many = (i + i // len(CASES)) % 2  # so that every unit meets both, on two and on three devices
    switches = random.Random(i).randrange(8, min(40, len(r.trace.sites) - 1)) if many else 1 + i % 7
    lane = random_plan(tmp_path / "plan.json", unit, r.trace.sites, names, switches, i)
    shared = {n: arenas(model, case)[n] for n in names}
    report = replay_lane(r, unit, lane, dict.fromkeys(names, CPU), seed=100 + i, arenas=shared)
    assert report.equal, report
    assert report.switches == switches and report.moves and report.moved_bytes
    assert sum(report.devices.values()) == report.operators == len(r.trace.kernels)
    assert all(torch.isfinite(t).all() for t in outside(r, 100 + i))


def test_one_operator_after_another_on_the_next_device() -> None:
    for model, case in CASES:
        r = recorded(model, case)
        place = {s: NAMES[n % 3] for n, s in enumerate(r.trace.sites)}
        got = Replay(r, place, WHERE, arenas(model, case)).run(7)
        assert not differing(r, got, outside(r, 7))
        assert differing(r, got, outside(r, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model,i", CASES)
def test_plans_on_gpus_are_right_to_the_bit(model: str, i: int, tmp_path: Path) -> None:
    """On all GPUs, or on one as two devices. Lost transfers with the check alone: a kernel may fault on them."""
    r, unit = recorded(model, i, "cuda"), UNITS[model][i].name
    where = {n: torch.device("cuda", k % torch.cuda.device_count()) for k, n in enumerate(NAMES[:2])}
    lane = random_plan(tmp_path / "plan.json", unit, r.trace.sites, NAMES[:2], 12, i)
    report = replay_lane(r, unit, lane, where)
    assert report.equal and report.moves, report
    replay = Replay(r, {s: lane.device_of(unit, s) for s in r.trace.sites}, where)
    for number in range(0, len(replay.moves), 5):
        with pytest.raises(StaleReadError):
            replay.run(1, drop={number})


def test_a_plan_of_a_workload() -> None:
    workload = MODELS["qwen"]("cpu")
    sites = {"layers.1/mm#0": "x", ANY_SITE: "y"}
    plan = Plan("m", "c", "p", (Lane("one", 1, 1, {"decode": {ANY_SITE: "y"}}), Lane("two", 1, 1, {"decode": sites})))
    report = replay_plan(workload, DECODE, plan, "two")
    assert report.equal and report.devices == {"x": 1, "y": report.operators - 1} and report.switches == 2
    assert replay_plan(workload, DECODE, plan, plan.lanes[0]).moves == 0
    assert workload.scope("nothing records").__enter__() is None
    with pytest.raises(HardwareError, match="no lane 'three'; it has one, two"):
        replay_plan(workload, DECODE, plan, "three")
    with pytest.raises(HardwareError, match="places no unit 'encode'; it places decode"):
        replay_plan(workload, UNITS["qwen"][2], plan, "one")


def test_the_reference_is_the_models_own_step() -> None:
    """It does not go through arenas: a weight that changes after they were made is seen by it alone."""
    workload = MODELS["llama"]("cpu")
    recorder = Recorder()
    r = record(workload.prepare(DECODE), workload.named_tensors(), recorder)
    replay = Replay(r, lambda _s: "a", {"a": CPU})
    assert not differing(r, replay.run(1), outside(r, 1))
    workload.weights["layers.0.wqkv"].neg_()
    assert differing(r, replay.run(1), outside(r, 1))


# Wrong ones


@pytest.mark.parametrize("model", MODELS)
def test_a_lost_transfer_shows(model: str, tmp_path: Path) -> None:
    """Of 25 per model: always as a stale read; without that check in the output, unless the value is never used."""
    rng = random.Random(model)
    places = [(case, n) for m, case in CASES if m == model for n in range(3)]
    caught, unused = 0, 0
    for n in range(25):
        case, seed = places[n % len(places)]
        replay = split(model, case, 12, seed, tmp_path)
        r, number = replay.recorded, rng.randrange(len(replay.moves))
        move = replay.moves[number]
        with pytest.raises(StaleReadError) as error:
            replay.run(n, drop={number})
        reader, writer = r.trace.kernels[move.before].site, r.trace.kernels[move.after].site
        assert str(error.value) == (
            f"{reader} on {move.target} reads {r.trace.buffers[move.buffer].name}, but {writer} was not sent there"
        )
        if differing(r, replay.run(n, drop={number}, checks=False), replay.unsplit().run(n)):
            caught += 1
        else:
            unused += never_used(r, arenas(model, case)["a"], move, n)
    assert caught >= 20 and caught >= 0.95 * (25 - unused), (caught, unused)


@pytest.mark.parametrize("model,i", CASES)
def test_without_transfers_there_is_only_poison(model: str, i: int, tmp_path: Path) -> None:
    """Nothing right lies in an arena already, and poison never crashes an operator."""
    for seed in range(3):
        replay = split(model, i, 12, seed, tmp_path)
        got = replay.run(seed, drop=range(len(replay.moves)), checks=False)
        assert differing(replay.recorded, got, replay.unsplit().run(seed))
        floats = [t for t in got if t.is_floating_point()]
        assert any(t.isnan().any() for t in floats)


def test_the_check_does_not_believe_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    r = recorded("llama", 0)
    place = {s: NAMES[n % 2] for n, s in enumerate(r.trace.sites)}
    right = Replay(r, place, WHERE, arenas("llama", 0)).steps

    def early(steps: list[Any]) -> list[Any]:  # the first move before its writer
        i = next(i for i, s in enumerate(steps) if isinstance(s, Move))
        at = next(j for j, s in enumerate(steps) if isinstance(s, Launch) and s.kernel == steps[i].after)
        return [*steps[:at], steps[i], *steps[at:i], *steps[i + 1 :]]

    def short(steps: list[Any]) -> list[Any]:  # one byte less
        i = next(i for i, s in enumerate(steps) if isinstance(s, Move))
        m = steps[i]
        return [*steps[:i], Move(m.buffer, m.start, m.end - 1, m.source, m.target, m.after, m.before), *steps[i + 1 :]]

    def elsewhere(steps: list[Any]) -> list[Any]:  # from an arena that does not have it
        i = next(i for i, s in enumerate(steps) if isinstance(s, Move))
        m = steps[i]
        return [*steps[:i], Move(m.buffer, m.start, m.end, "c", m.target, m.after, m.before), *steps[i + 1 :]]

    wrong: list[Callable[[list[Any]], list[Any]]] = [
        early, short, elsewhere, lambda steps: [s for s in steps if isinstance(s, Launch)],
    ]  # fmt: skip
    for spoil in wrong:
        monkeypatch.setattr(aten, "cut", lambda _t, _d, spoil=spoil: spoil(list(right)))
        with pytest.raises(StaleReadError, match="was not sent there"):
            Replay(r, place, WHERE, arenas("llama", 0)).run(1)
    monkeypatch.setattr(aten, "cut", lambda _t, _d: right[::-1])
    with pytest.raises(HardwareError, match="does not launch every operator once, in order"):
        Replay(r, place, WHERE, arenas("llama", 0))
    monkeypatch.setattr(aten, "cut", lambda _t, _d: list(right))
    assert not differing(r, Replay(r, place, WHERE, arenas("llama", 0)).run(1), outside(r, 1))


def test_arenas_before_a_run() -> None:
    """NaN in every float that is not a weight, valid integers, nothing in common but what is read first."""
    r = recorded("gpt-oss", 1)
    one, two = Arena(r, "a", CPU), Arena(r, "b", CPU)
    true = new_values(r, 3)
    kept = next(b.id for b in r.trace.buffers if b.name == "layers.0.kv.k")
    for arena in (one, two):
        arena.fill(3, {kept: true[kept]})
    for i, home in enumerate(r.homes):
        memory = [a.memory[i].view(home.dtype) for a in (one, two)]
        if home.role == "weight" or i == kept:
            assert torch.equal(one.memory[i], two.memory[i])
            assert one.memory[i].data_ptr() != two.memory[i].data_ptr()
        elif home.dtype.is_floating_point:
            assert all(m.isnan().all() for m in memory)
            assert home.nbytes < 16 or not torch.equal(one.memory[i], two.memory[i])
        else:
            assert home.low is not None and home.high is not None
            low = home.low if home.low < home.high else min(0, home.low)  # one value alone would be the true one
            assert all(low <= m.min() and m.max() <= home.high for m in memory)
    assert not torch.equal(true[kept], new_values(r, 4)[kept])


def test_true_state_lies_only_where_it_is_read_first(tmp_path: Path) -> None:
    r = recorded("mamba2", 0)  # a prompt from nothing writes its state and never reads it
    names = {b.name: b.id for b in r.trace.buffers}
    first = Replay(r, lambda s: "b" if s.startswith("layers.1") else "a", WHERE, arenas("mamba2", 0)).first_readers
    assert first == {(names["prompt"], "a")}
    r = recorded("mamba2", 1)
    names = {b.name: b.id for b in r.trace.buffers}
    first = Replay(r, lambda s: "b" if s.startswith("layers.1") else "a", WHERE, arenas("mamba2", 1)).first_readers
    state = {(names[f"layers.{i}.state.{k}"], "ab"[i % 2]) for i in range(3) for k in ("conv", "ssm")}
    assert first == {*state, (names["next_token"], "a")}


# Steps by hand


def toy(step: Callable[[], Any], **tensors: torch.Tensor) -> Recorded:
    roles = {"w": "weight", "x": "input"}
    return record(step, [NamedTensor(n, t, roles.get(n, "state")) for n, t in tensors.items()])


def test_views_partial_writes_and_outputs() -> None:
    w, x = torch.randn(4, 6), torch.randn(5, 6)
    cache, total, flags = torch.zeros(8, 4), torch.zeros(4), torch.zeros(3, dtype=torch.int32)
    constant = torch.arange(4.0)

    def step() -> Any:
        h = torch.empty(5, 8)
        torch.mm(x, w.t(), out=h[:, :4])  # in part, with gaps
        h[:, 4:] = h[:, :4].flip(1) + constant
        cache[2:7].add_(h.view(5, 2, 4).sum(1).unsqueeze_(0).squeeze_(0))
        torch.sum(cache, 0, out=total)
        flags[1:].copy_(total.view(torch.int32)[:2])
        chunks = torch.ops.aten.split_with_sizes_copy(h, [3, 5], 1)
        first, second = torch.var_mean(chunks[1], 0)
        h.T[0].zero_()
        return {"h": h.T[1:3], "pair": [first, second.to(torch.float64)]}

    r = toy(step, w=w, x=x, cache=cache, total=total, flags=flags)
    assert [n for n, _, _ in r.results] == ["cache", "total", "flags", "result0", "result1", "result2"]
    sites = r.trace.sites
    assert not {k.op for k in r.trace.kernels} & {"slice", "view", "unsqueeze_", "squeeze_", "t", "split"}
    for seed in range(20):
        rng = random.Random(seed)
        replay = Replay(r, {s: rng.choice(NAMES) for s in sites}, WHERE)
        got = replay.run(seed)
        assert not differing(r, got, outside(r, seed)) and not differing(r, got, replay.unsplit("c").run(seed))
        for number, move in enumerate(replay.moves):
            if r.ops[move.after].name in EMPTY:
                continue  # an output moves as a whole, also the part that holds nothing yet
            with pytest.raises(StaleReadError):
                replay.run(seed, drop={number})


def test_integers_that_depend_on_values_stay_valid() -> None:
    """A lost index is another valid index: a wrong answer, never a fault."""
    w, x = torch.randn(9, 3), torch.randn(40, 9)

    def step() -> Any:
        chosen = x.argmax(1)
        return w[chosen], torch.bincount(chosen, minlength=9).to(torch.uint8), chosen > 4

    r = toy(step, w=w, x=x)
    index = next(h for h in r.homes if h.name == "argmax#0:0")
    assert index.low is not None and index.low >= 0 and index.high is not None and index.high <= 8
    replay = Replay(r, lambda s: "a" if s.startswith("argmax") else "b", WHERE)
    assert len(replay.moves) == 1
    want = outside(r, 5)
    assert not differing(r, replay.run(5), want)
    assert differing(r, replay.run(5, drop={0}, checks=False), want) == ["result0", "result1", "result2"]


def test_compiled_functions_are_recorded_operator_by_operator() -> None:
    x = torch.randn(3)
    f = torch.compile(lambda t: (t * 2).sin())
    r = toy(lambda: f(x), x=x)
    assert [k.op for k in r.trace.kernels] == ["mul", "sin"]


def test_steps_that_cannot_be_replayed() -> None:
    x, hidden = torch.ones(2), torch.zeros(2)
    for step, message in (
        (lambda: x * float(x.sum()), "a value is read on the host"),
        (lambda: hidden.add_(x), "add_#0 writes constant#1, which the workload does not name as state"),
        (lambda: torch.view_as_complex(x).conj() * 1, "no plain strided view"),
    ):
        with pytest.raises(HardwareError, match=message):
            toy(step, x=x)
    x = torch.randn(99)
    r = toy(lambda: (x > 0).nonzero().neg(), x=x)
    with pytest.raises(HardwareError, match="nonzero: sizes of a result depend on values"):
        for seed in range(6):
            Replay(r, lambda _s: "a", WHERE).run(seed)


def test_placements_that_cannot_be_used() -> None:
    r = recorded("llama", 1)
    for place, message in (
        (lambda _s: "z", "uses device z; known: a, b, c"), ({"embed/embedding#0": "a"}, "leaves out site layers.0/"),
    ):  # fmt: skip
        with pytest.raises(HardwareError, match=message):
            Replay(r, place, WHERE)
    with pytest.raises(HardwareError, match="device a is of type meta, but the step was recorded on cpu"):
        Replay(r, lambda _s: "a", {"a": torch.device("meta")})
    lane = Lane("l", 1, 1, {"decode": {"embed/embedding#0": "a"}})
    with pytest.raises(HardwareError, match=r"lane l leaves out site layers.0/_to_copy#0 of unit decode"):
        replay_lane(r, "decode", lane, WHERE)


def test_values_by_seed_look_like_the_recorded_ones() -> None:
    position, x = torch.arange(3, 7), torch.randn(200) * 5 + 40
    token, seen = torch.tensor([[6], [2]]), torch.tensor([True, False])
    r = toy(lambda: (position + 1, x + 1, token + 1, ~seen), position=position, x=x, token=token, seen=seen)
    one, other = new_values(r, 1), new_values(r, 2)
    view = {r.homes[s.view.storage].name: s.view for s in r.samples}
    get = lambda values, name: typed(values[view[name].storage], view[name])  # noqa: E731
    assert get(one, "position").tolist() == [3, 4, 5, 6]
    assert 38 < get(one, "x").mean() < 42 and 4 < get(one, "x").std() < 6
    assert not torch.equal(get(one, "x"), get(other, "x")) and not torch.equal(get(one, "x"), x)
    assert all(0 <= t <= 6 for v in (one, other) for t in get(v, "token").flatten().tolist())
    with eager():
        assert torch.equal(outside(r, 1)[1], get(one, "x") + 1)
