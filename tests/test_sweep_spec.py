"""The sweep spec: what is accepted, what is refused, and that every refusal is one line naming the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tesserasim.errors import InputError
from tesserasim.sweep.spec import EQUAL, OWN_BEST, expand, load_spec

GOOD = """
clusters = ["A100-80GB-PCIe+L40S", "B200+H100-SXM"]
links = ["25Gbps", "200Gbps"]
[[mixes]]
mix = "./a.toml"
output_tokens = 256
[[mixes]]
mix = "./b.toml"
batch = [1]
[quick]
clusters = ["A100-80GB-PCIe+L40S"]
links = ["25Gbps"]
output_tokens = 32
"""
USES_LINK = {"single": False, "kernel": True}


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "spec.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_runs_that_do_not_depend_on_the_link_are_done_once(tmp_path: Path) -> None:
    """Mutation: in `_expand` the test of uses_link turned into `link is None`: single runs once per link."""
    experiments = expand(load_spec(write(tmp_path, GOOD)), USES_LINK)
    single = [e for e in experiments if e.policy == "single"]
    kernel = [e for e in experiments if e.policy == "kernel"]
    assert len(single) == 2 * 2 * 2  # mixes x clusters x tables
    assert {e.link for e in single} == {None}
    assert len(kernel) == 2 * 2 * 2 * 2
    assert {e.link for e in kernel} == {"25Gbps", "200Gbps"}
    assert len(set(experiments)) == len(experiments)


def test_in_flight_is_set_in_the_equal_table_only(tmp_path: Path) -> None:
    experiments = expand(load_spec(write(tmp_path, GOOD)), USES_LINK)
    assert {e.in_flight for e in experiments if e.table == EQUAL} == {64}
    assert {e.in_flight for e in experiments if e.table == OWN_BEST} == {None}


def test_quick_changes_what_its_table_says(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, GOOD), quick=True)
    assert spec.clusters == ("A100-80GB-PCIe+L40S",)
    assert spec.links == ("25Gbps",)
    assert spec.name == "spec-quick"
    assert [m.output_tokens for m in spec.mixes] == [32, None]


def test_shipped_default_spec_is_valid() -> None:
    root = Path(__file__).resolve().parents[1]
    if not list((root / "traces").glob("*.toml")):
        pytest.skip("no shipped mixes in this checkout")
    path = root / "experiments" / "default.toml"
    for quick in (False, True):
        spec = load_spec(path, quick=quick)
        assert len(spec.mixes) == 2
        assert len(spec.clusters) == (1 if quick else 4)


HEAD = 'clusters = ["A+B"]\nmixes = ["./a.toml"]\n'
BAD = {
    "unknown key": (HEAD + 'link = ["25Gbps"]\n', ["'link'", "'links'"]),
    "missing clusters": ('mixes = ["./a.toml"]\n', ["'clusters'"]),
    "missing mixes": ('clusters = ["A+B"]\n', ["'mixes'"]),
    "cluster is a string": ('clusters = "A+B"\nmixes = ["./a.toml"]\n', ["clusters", "list"]),
    "empty list": ('clusters = []\nmixes = ["./a.toml"]\n', ["clusters"]),
    "two links": ('clusters = ["A@25Gbps"]\nlinks = ["1Gbps"]\nmixes = ["./a.toml"]\n', ["clusters", "links"]),
    "unknown table": (HEAD + 'tables = ["own_best"]\n', ["tables", "'own-best'"]),
    "depth zero": (HEAD + "depth = [0]\n", ["depth", "between 1"]),
    "depth huge": (HEAD + "depth = [99999999999999999999]\n", ["depth"]),
    "depth is true": (HEAD + "depth = [true]\n", ["depth", "whole number"]),
    "depth is a float": (HEAD + "depth = [2.0]\n", ["depth", "whole number"]),
    "depth twice": (HEAD + "depth = [2, 2]\n", ["depth", "names 2 twice"]),
    "seed negative": (HEAD + "seed = -1\n", ["seed"]),
    "name is a path": (HEAD + 'name = "../../etc"\n', ["name"]),
    "engine unknown": (HEAD + 'engine = "simpi"\n', ["engine", "'simpy'"]),
    "mix unknown key": ('clusters = ["A"]\n[[mixes]]\nmix = "./a.toml"\nbatches = [1]\n', ["'batch'"]),
    "mix is a number": ('clusters = ["A"]\nmixes = [3]\n', ["mixes[0]"]),
    "mix twice": ('clusters = ["A"]\nmixes = ["./a.toml", "./a.toml"]\n', ["twice"]),
    "mix without name": ('clusters = ["A"]\n[[mixes]]\nbatch = [1]\n', ["mixes[0]", "'mix'"]),
    "quick is text": (HEAD + 'quick = "yes"\n', ["quick"]),
    "quick unknown key": (HEAD + '[quick]\nlinkz = ["1Gbps"]\n', ["linkz"]),
    "not toml": ("clusters = [", ["not valid TOML"]),
    "not text": (b"\xff\xfe\x00\x01", ["UTF-8"]),
    "too deep": ("a = " + "[" * 50_000, ["spec.toml"]),
    "too large": ("# " + "x" * (2 << 20), ["1 MiB"]),
    "control character": ('clusters = ["A\\u0007B"]\nmixes = ["./a.toml"]\n', ["clusters"]),
    "nan": (HEAD + "seed = nan\n", ["seed"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_specs_are_refused_in_one_line_that_names_the_key(case: str, tmp_path: Path) -> None:
    """Mutation: `Table.finish` emptied: the cases of unknown keys pass silently."""
    text, words = BAD[case]
    with pytest.raises(InputError) as caught:
        load_spec(write(tmp_path, text))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    for word in words:
        assert word in message


def test_too_many_experiments_are_refused(tmp_path: Path) -> None:
    clusters = ", ".join(f'"A+B{i}"' for i in range(1000))
    links = ", ".join(f'"{i + 1}Gbps"' for i in range(100))
    path = write(tmp_path, f'clusters = [{clusters}]\nlinks = [{links}]\nmixes = ["./a.toml"]\n')
    with pytest.raises(InputError, match="split the spec"):
        expand(load_spec(path), USES_LINK)


@pytest.mark.parametrize("kind", ["missing", "directory"])
def test_a_spec_that_is_no_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path if kind == "directory" else tmp_path / "none.toml"
    with pytest.raises(InputError):
        load_spec(path)


def test_quick_without_a_quick_table(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="quick"):
        load_spec(write(tmp_path, HEAD), quick=True)


def test_an_unknown_mix_lists_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama-3-8b.toml").touch()
    monkeypatch.setenv("TESSERASIM_TRACES", str(tmp_path))
    with pytest.raises(InputError, match="did you mean 'llama-3-8b'"):
        load_spec(write(tmp_path, 'clusters = ["A"]\nmixes = ["lama-3-8b"]\n'))
    monkeypatch.setenv("TESSERASIM_TRACES", str(tmp_path / "none"))
    with pytest.raises(InputError, match="TESSERASIM_TRACES"):
        load_spec(write(tmp_path, 'clusters = ["A"]\nmixes = ["llama-3-8b"]\n'))
