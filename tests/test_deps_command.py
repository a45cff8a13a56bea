"""`deps TRACE`: its numbers by hand, its documents by schema, its graph by a reader of its own."""

from __future__ import annotations

import json
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import PROFILE
from workload_cases import handmade, unit_traces

from tesserasim import api, writing
from tesserasim.cli import main
from tesserasim.deps import graph
from tesserasim.deps.graph import unit_flow
from tesserasim.deps.summary import dependencies, site_edges
from tesserasim.deps.words import dot, in_words, shown, size
from tesserasim.errors import InputError
from tesserasim.trace.inspect import inspect_file
from tesserasim.trace.model import Access, Buffer, Kernel, Trace, TraceMeta
from tesserasim.trace.parquet import write_trace

pytestmark = pytest.mark.quick


def schema() -> Any:
    text = resources.files("tesserasim").joinpath("schemas", "deps-trace.json").read_text(encoding="utf-8")
    document = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(document)
    return document


def access(buffer: int, mode: str, nbytes: int, covers: bool = False, evidence: str = "schema") -> Access:
    return Access(buffer, mode, 0, nbytes, "exact", covers, evidence)


def small() -> Trace:
    """a writes 100 bytes that b and c read; b appends 8 to the state; c reads the state and writes 60 for d; e is bare.

    x and y share a storage: c overwrites the first 60 bytes of what b read.
    """
    buffers = [
        Buffer(0, "x", 100, "activation", storage=1), Buffer(1, "y", 60, "activation", storage=1),
        Buffer(2, "kv", 800, "state", storage=2, bytes_per_token=8), Buffer(3, "w", 50, "weight", storage=3),
    ]  # fmt: skip
    rows = [
        ("a", [access(3, "R", 50), access(0, "W", 100, True)]),
        ("b", [access(0, "R", 100), access(2, "W", 8)]),
        ("c", [access(0, "R", 100), access(2, "R", 800), access(1, "W", 60, True, "ptx")]),
        ("d", [access(1, "R", 60)]),
        ("e", []),
    ]
    return handmade(rows, buffers)


def test_the_numbers_of_a_small_trace() -> None:
    """Mutations tried: a value counted per reader in a cut; the state's context counted as a delta; WAW left out."""
    d = dependencies(small())
    jsonschema.validate(d, schema())
    assert d["buffers"]["activation"] == {"count": 2, "nbytes": 160}
    assert d["raw"] == {"values": 3, "edges": 4, "edge_bytes": 100 + 100 + 8 + 60}
    assert d["state"] == {
        "deltas": 1, "delta_bytes": 8, "replaced": 0, "left_bytes": 8, "reads_from_before": 1, "buffers_from_before": 1
    }  # fmt: skip
    assert d["hazards"] == {"war": 1, "waw": 1, "storages": 1, "by_storage": [{"storage": 1, "war": 1, "waw": 1}]}
    assert d["accesses"]["evidence"]["ptx"] == 1 and d["accesses"]["mode"] == {"R": 5, "W": 3, "RW": 0}
    assert d["unknown"] == {
        "count": 1, "kernels": [{"kernel": 4, "name": "k4", "site": "e", "why": "no accesses"}]
    } and [g["sites"] for g in d["groups"]] == [["d", "e"]]  # fmt: skip
    assert d["largest_values"][0] == {"buffer": "x", "nbytes": 100, "from": "a", "to": ["b", "c"]}
    assert d["largest_cuts"] == [
        {"after": "b", "nbytes": 108}, {"after": "a", "nbytes": 100}, {"after": "c", "nbytes": 60}
    ]  # fmt: skip
    assert d["graph"]["edges"] == [[0, 1, 100], [0, 2, 100], [1, 2, 8], [2, 3, 60]]
    assert d["warnings"] == ["1 kernel without accesses"]


@settings(max_examples=60, deadline=None)
@given(unit_traces(roles=("activation", "workspace", "weight", "state", "output")))
def test_any_trace_fits_the_schema_and_its_own_counts(trace: Trace) -> None:
    d = dependencies(trace)
    jsonschema.validate(d, schema())
    flow = unit_flow(trace)
    # Between sites a value counts once per reading site; the sum over kernels can only be larger.
    assert sum(n for *_, n in site_edges(flow)) <= d["raw"]["edge_bytes"]
    site = trace.site_of
    for i, name in enumerate(trace.sites[:-1]):
        crossing = 0
        for v in flow.values:
            ends = [site[v.writer], *(site[r] for r in v.readers)]
            crossing += v.nbytes if min(ends) <= i < max(ends) else 0
        listed = {c["after"]: c["nbytes"] for c in d["largest_cuts"]}
        assert listed.get(name, 0) == crossing or len(listed) == 10
    assert in_words(d)


def test_the_command_prints_and_writes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, graph = (tmp_path / n for n in ("t.parquet", "d.json", "g.dot"))
    write_trace(small(), path)
    assert main(["deps", str(path), "--json", "--out", str(out), "--dot", str(graph)]) == 0
    streams = capsys.readouterr()
    assert streams.err == ""
    document = json.loads(streams.out)
    jsonschema.validate(document, schema())
    assert document == json.loads(out.read_text()) == api.dependencies(path) == api.dependencies(small())
    assert graph.read_text() == dot(document)
    assert main(["deps", str(path)]) == 0
    text = capsys.readouterr().out
    for part in ("5 kernels", "read after write: 4 edges, 268 B", "1 delta, 8 B in all; 0 buffers",
                 "replaced, 1 buffer read from before", "1 write after read", "ptx 1",
                 "unknown: 1 kernel\n", "kept with its neighbours", "100 B x: a to b and 1 more",
                 "largest cut: 108 B after b", "warning: 1 kernel without accesses"):  # fmt: skip
        assert part in text


def test_kernels_agree_with_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutations: a kernel that copies counts as a copy; sets are not told from kernels."""
    rows = [
        Kernel(0, "memset", "a#0", kind="memset"), Kernel(1, "gemm", "a#0", kind="gemm", block=(128, 1, 1)),
        Kernel(2, "cat", "b#0", kind="copy", block=(64, 1, 1)), Kernel(3, "memcpy", "c#0", kind="copy"),
        Kernel(4, "memset", "d#0", kind="memset"),
    ]  # fmt: skip
    path = tmp_path / "t.parquet"
    write_trace(Trace(TraceMeta("captured", "m", {"name": "decode"}, "H200"), tuple(rows)), path)
    assert main(["deps", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, schema())
    facts = inspect_file(path)
    assert (document["memcpys"], document["memsets"]) == (facts["memcpys"], facts["memsets"]) == (1, 2)
    assert document["kernels"] == facts["kernels"] + facts["memcpys"] + facts["memsets"] == 5
    assert "5 kernels (1 memcpy and 2 memsets among them), 4 sites" in in_words(document)


def test_an_entry_without_pointers_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k.ptx"
    path.write_text(".version 8.4\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u32 n) { ret; }\n")
    assert main(["deps", str(path)]) == 0
    assert capsys.readouterr().out == "k: no pointers\n"


def test_an_imported_profile_says_that_nothing_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation tried: only Parquet is read."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    assert main(["deps", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, schema())
    assert document["unknown"]["count"] == 4 and len(document["groups"]) == 1
    assert any("no accesses" in w for w in document["warnings"])


BAD = {
    "text": b"hello\n",
    "empty": b"",
    "parquet": b"PAR1" + bytes(40) + b"PAR1",
    "json": b"{}",
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("kind", [*BAD, "missing", "a directory"])
def test_bad_files_are_one_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    if kind in BAD:
        path.write_bytes(BAD[kind])
    elif kind == "a directory":
        path.mkdir()
    assert main(["deps", str(path), "--out", str(tmp_path / "out.json")]) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1 and str(path) in streams.err
    assert not (tmp_path / "out.json").exists()


def test_bad_outputs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutations tried: `check_output` left out; without the trace among the inputs; one file for both outputs."""
    path, ptx = tmp_path / "t.parquet", tmp_path / "k.ptx"
    write_trace(small(), path)
    before = path.read_bytes()
    ptx.write_text(".version 8.4\n.target sm_90\n.address_size 64\n.visible .entry k() { ret; }\n")
    same = str(tmp_path / "same")
    for arguments in ([path, "--out", tmp_path], [path, "--dot", path], [path, "--out", same, "--dot", same],
                      [ptx, "--dot", same]):  # fmt: skip
        assert main(["deps", *map(str, arguments)]) == 2
        streams = capsys.readouterr()
        assert streams.out == "" and streams.err.count("\n") == 1
    assert path.read_bytes() == before and not Path(same).exists()
    assert main(["deps", str(ptx)]) == 0


def read_dot(text: str) -> tuple[dict[str, str], dict[str, list[str]], list[tuple[str, str, str]]]:
    """(labels, members of clusters by label, edges) of the DOT that `dot` writes; fails on anything else."""
    string = r'"((?:[^"\\]|\\.)*)"'
    labels: dict[str, str] = {}
    clusters: dict[str, list[str]] = {}
    edges = []
    inside = ""
    lines = text.splitlines()
    assert lines[0] == "digraph dependencies {" and lines[-1] == "}"
    for line in lines[2:-1]:
        line = line.strip()
        if line.startswith("subgraph"):
            inside = line
        elif line == "}":
            inside = ""
        elif found := re.fullmatch(rf"label={string};", line):
            inside = found[1]
        elif found := re.fullmatch(rf"(s\d+) \[label={string}\];", line):
            labels[found[1]] = re.sub(r"\\(.)", r"\1", found[2])
            if inside:
                clusters.setdefault(inside, []).append(found[1])
        else:
            found = re.fullmatch(rf"(s\d+) -> (s\d+) \[label={string}\];", line)
            assert found, line
            edges.append((found[1], found[2], found[3]))
    return labels, clusters, edges


def test_dot_of_the_small_trace() -> None:
    labels, clusters, edges = read_dot(dot(dependencies(small())))
    assert labels == {f"s{i}": n for i, n in enumerate("abcde")}
    assert list(clusters.values()) == [["s3", "s4"]]
    assert ("s0", "s1", "100 B") in edges and len(edges) == 4


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=2, max_size=4, unique=True))
def test_hostile_names_stay_inside_their_labels(names: list[str]) -> None:
    """Mutations tried: quotes not escaped; backslashes not escaped; line ends kept."""
    document = dependencies(handmade([(n, []) for n in names], []))
    labels, clusters, _ = read_dot(dot(document))
    assert list(labels.values()) == [shown(n, 200) for n in names]
    assert [len(m) for m in clusters.values()] == [len(names)]
    assert len(in_words(document).splitlines()) == len(in_words(document).split("\n"))


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1023 * 1024, "1023 KiB"),
                         (2**30, "1 GiB"), (2**50, "1024 TiB")]
)  # fmt: skip
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


# -- what cannot be read, what cannot be written ------------------------------------------------------------------


def test_ptx_is_read_from_regular_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: the file is opened unchecked: the pipe is waited for without end."""
    (tmp_path / "dir.ptx").mkdir()
    os.mkfifo(tmp_path / "pipe.ptx")
    (tmp_path / "loop.ptx").symlink_to("loop.ptx")
    (tmp_path / "huge.ptx").touch()
    os.truncate(tmp_path / "huge.ptx", 1 << 40)
    (tmp_path / "zero.ptx").symlink_to("/dev/zero")
    for name, words in (
        ("dir", "a directory, not a PTX file"), ("pipe", "a pipe, not a PTX file"), ("loop", "not the path of a PTX"),
        ("huge", "larger than 64 MiB"), ("zero", "a device, not a PTX file"), ("none", "no such PTX file"),
    ):  # fmt: skip
        assert main(["deps", str(tmp_path / f"{name}.ptx")]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1


def test_names_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: `say` prints characters as they are."""
    for name in ("\x1b[2Ja.ptx", "\x1b]0;b\x07.parquet", "\x9bc", "\u202ed.ptx"):
        assert main(["deps", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.rstrip("\n").isprintable()


def test_one_file_that_cannot_be_written_leaves_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutation: the first failure ends the writing."""
    trace, out = tmp_path / "t.parquet", tmp_path / "out.json"
    write_trace(small(), trace)
    real = writing.write_whole

    def full(path: Path, content: bytes) -> None:
        if path.suffix == ".dot":
            raise InputError(f"{path}: cannot be written (No space left on device)")
        real(path, content)

    monkeypatch.setattr(writing, "write_whole", full)
    assert main(["deps", str(trace), "--dot", str(tmp_path / "a.dot"), "--out", str(out)]) == 2
    streams = capsys.readouterr()
    assert "a.dot: cannot be written" in streams.err and "largest values" in streams.out
    assert json.loads(out.read_text())["kernels"] == 5


def test_more_pairs_than_fit_are_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that every kernel appends to and reads as a whole: pairs grow with the square of the kernels."""
    monkeypatch.setattr(graph, "MAX_LINKS", 4000)
    kv = [Buffer(0, "kv", 8000, "state")]
    rows = [("s", [access(0, "R", 8000), access(0, "W", 8)]) for _ in range(100)]
    assert sum(e.nbytes for e in unit_flow(handmade(rows[:89], kv)).edges) == 8 * 88 * 89 // 2
    with pytest.raises(InputError, match="kernel 89 of 100: more than 4000 pairs"):
        unit_flow(handmade(rows, kv))
