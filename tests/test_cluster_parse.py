"""Clusters from text: what is meant is built, what cannot be meant is one clear line."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tesserasim.cluster.catalogue import gpus
from tesserasim.cluster.model import cluster_hash
from tesserasim.cluster.parse import MAX_DEVICES, parse_cluster
from tesserasim.errors import InputError

pytestmark = pytest.mark.quick


def test_the_short_form() -> None:
    c = parse_cluster("A100-80GB-PCIe+L40S@25Gbps")
    assert [d.id for d in c.devices] == ["A100-80GB-PCIe", "L40S"]
    assert c.link("L40S", "A100-80GB-PCIe") is c.links[0]
    assert c.links[0].gbps == 25 and c.links[0].bytes_per_ns == 3.125 and c.links[0].kind == "rdma25"
    assert c.usd_per_hour == pytest.approx(1.52 + 1.295)
    assert parse_cluster("A100-80GB-PCIe+L40S", "paper").usd_per_hour == pytest.approx(2.5)


def test_several_of_a_type_are_numbered_and_all_pairs_linked() -> None:
    """Mutation tried: link only neighbouring devices -> fails."""
    c = parse_cluster("2xA100-80GB-PCIe+1xL40S+2xL40S@pcie4")
    ids = [d.id for d in c.devices]
    assert ids == ["A100-80GB-PCIe#0", "A100-80GB-PCIe#1", "L40S#0", "L40S#1", "L40S#2"]
    assert len(c.links) == 10
    assert all(c.link(a, b) for a in ids for b in ids if a != b)
    assert c.nic_gbps == dict.fromkeys(ids, c.links[0].gbps)


def test_an_unknown_price_makes_the_cluster_unpriced() -> None:
    assert parse_cluster("H20+L40S").usd_per_hour is None


def test_the_default_link_and_a_single_gpu() -> None:
    assert parse_cluster("L4+L40S").name == "L4+L40S@200Gbps"
    assert parse_cluster("L40S").links == () and parse_cluster("L40S").name == "L40S"


LINKS = st.one_of(
    st.sampled_from(["@nvlink4", "@NVLink-3", "@pcie5", "@rdma100", ""]),
    st.floats(0.01, 100_000.0).map(lambda g: f"@{g!r}Gbps"),
    st.integers(1, 100_000).map(lambda g: f"@{g}Gb/s"),
)
GROUP = st.tuples(st.integers(1, 8), st.sampled_from(sorted(gpus()))).map(lambda g: f"{g[0]}x{g[1]}")


@given(st.lists(GROUP, min_size=1, max_size=5), LINKS)
def test_the_canonical_name_parses_to_the_same_cluster(groups: list[str], link: str) -> None:
    """Mutation tried: `_short_name` writes the bandwidth with `:g` -> fails."""
    c = parse_cluster("+".join(groups) + link)
    again = parse_cluster(c.name)
    assert again == c and cluster_hash(again) == cluster_hash(c)


@pytest.mark.parametrize(
    "text",
    [
        "", "+", "@", "L40S@", "L40S+", "0xL40S", "-1xL40S", "1e9xL40S", "1e+9xL40S", "1.5xL40S", "nanxL40S",
        "infxL40S", "1000xL40S", "64xL40S+L4", "9" * 40 + "xL40S", "L40S+L4@0Gbps", "L40S+L4@-5Gbps",
        "L40S+L4@NaNGbps", "L40S+L4@infGbps", "L40S+L4@-infGbps", "L40S+L4@1e999Gbps", "L40S+L4@1e-9Gbps",
        "L40S+L4@1.2.3Gbps", "L40S+L4@25", "L40S+L4@25GBps", "L40S+L4@25GB/s", "L40S+L4@fast", "L40S+L4@1Gbps@2Gbps",
        "A100+L40S", "L40S L4", "L40S:8", "missing.toml", "L40S;L4", "x" * 5000,
    ],
)  # fmt: skip
def test_absurd_input_is_one_clear_line(text: str) -> None:
    """Mutations tried: drop the range check of `_bandwidth`; drop `MAX_DEVICES` from `_devices` -> fails."""
    with pytest.raises(InputError) as e:
        parse_cluster(text)
    assert "\n" not in str(e.value) and len(str(e.value)) < 500


@given(st.text(alphabet="0123456789.-+exX*@:GbpsLH 40A\t\n", max_size=40))
def test_any_text_is_a_sound_cluster_or_an_input_error(text: str) -> None:
    try:
        c = parse_cluster(text)
    except InputError:
        return
    assert 1 <= len(c.devices) <= MAX_DEVICES
    assert len(c.links) == len(c.devices) * (len(c.devices) - 1) // 2


def test_tensor_parallel_groups_are_understood_and_refused() -> None:
    with pytest.raises(InputError, match="tensor-parallel groups are not simulated yet"):
        parse_cluster("8xB200:tp8+8xH100-SXM:tp8")


TOML = """
name = "lab"
devices = ["A100-80GB-PCIe", "2xL40S"]
link = "25Gbps"
links = [
  { a = "L40S#0", b = "L40S#1", kind = "pcie4" },
  { a = "L40S#0", b = "A100-80GB-PCIe", gbps = 90.0, latency_us = 20 },
]
nic_gbps = { "L40S#0" = 25.0 }
prices = { L40S = 0.85 }
"""


def test_toml_states_everything(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(TOML)
    c = parse_cluster(str(file))
    kinds = {frozenset((x.a, x.b)): (x.kind, x.gbps, x.latency_us) for x in c.links}
    assert kinds[frozenset(("L40S#0", "L40S#1"))][0] == "pcie4"
    assert kinds[frozenset(("L40S#0", "A100-80GB-PCIe"))] == ("rdma", 90.0, 20.0)
    assert kinds[frozenset(("L40S#1", "A100-80GB-PCIe"))] == ("rdma25", 25.0, 17.0)
    assert c.name == "lab" and c.nic_gbps == {"L40S#0": 25.0}
    assert c.prices["L40S"].usd_per_hour == 0.85 and c.prices["A100-80GB-PCIe"].usd_per_hour == 1.52


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"2xL40S"]', '"2xL40S", 3]'), ("devices = ", "device = "), ('"L40S#1", kind', '"L40S#0", kind'),
        ('"L40S#1", kind', '"L4", kind'), ('kind = "pcie4"', 'kind = "pcie9"'), ('kind = "pcie4"', 'speed = 3'),
        ("gbps = 90.0", "gbps = nan"), ("gbps = 90.0", "gbps = true"), ("latency_us = 20", "latency_us = -1"),
        ("latency_us = 20", "latency_us = inf"), ('"L40S#0" = 25.0', '"L40S#0" = 0'), ("L40S = 0.85", "L40S = 0"),
        ("L40S = 0.85", "L41S = 1"), ('name = "lab"', "name = 3"), ('link = "25Gbps"', "link = 25"),
        ("links = [", "links = [ 7,"), ("prices = { L40S = 0.85 }", "prices = 3"), ('"lab"', '"lab'),
    ],
)  # fmt: skip
def test_faults_in_toml_are_one_clear_line(tmp_path: Path, old: str, new: str) -> None:
    assert old in TOML
    file = tmp_path / "lab.toml"
    file.write_text(TOML.replace(old, new, 1))
    with pytest.raises(InputError) as e:
        parse_cluster(str(file))
    assert "\n" not in str(e.value)


def test_the_hash_sees_figures_not_prose() -> None:
    """Mutation tried: leave `links` out of `cluster_hash` -> fails."""
    c = parse_cluster("H100-SXM+L40S@25Gbps")
    gpu = dataclasses.replace(c.devices[0].gpu, source="elsewhere", notes="x")
    prose = dataclasses.replace(c, name="other", devices=(dataclasses.replace(c.devices[0], gpu=gpu), c.devices[1]))
    assert cluster_hash(prose) == cluster_hash(c)
    others = ["H100-SXM+L40S@50Gbps", "L40S+H100-SXM@25Gbps", "2xH100-SXM@25Gbps", "H100-SXM+L40S@pcie4"]
    hashes = {cluster_hash(parse_cluster(t)) for t in others} | {cluster_hash(parse_cluster(c.name, "max"))}
    slow = dataclasses.replace(c, links=(dataclasses.replace(c.links[0], latency_us=18.0),))
    assert len(hashes | {cluster_hash(c), cluster_hash(slow)}) == len(others) + 3


def test_the_hash_is_the_same_in_another_process() -> None:
    code = (
        "from tesserasim.cluster.parse import parse_cluster; from tesserasim.cluster.model import cluster_hash;"
        "print(cluster_hash(parse_cluster('2xH100-SXM+L40S@25Gbps')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == cluster_hash(parse_cluster("2xH100-SXM+L40S@25Gbps"))


class TestTextThatOnlyLooksLikeACluster:
    """Mutations tried: `_plain` does nothing; blanks inside numbers dropped; the option echoed whole -> each fails."""

    @pytest.mark.parametrize(
        "text",
        [
            "L40S\0+L4", "L40S+L4\0", "L40S+L4@25\0Gbps", "\u0663xL40S", "L40S+L4@\u0662\u0665Gbps", "1_0xL40S",
            "L40S+L4@1_0Gbps", "L40S+L4@2 5Gbps", "L\uff140S", "L40S\x1b[31m", "\ud800",
            "L40S+L4@rdma\u0661\u0660\u0660",
            "a\0b.toml", "L40S:" + "y" * 5000, "L40S:tp" + "8" * 5000, "A100" + "-" * 5000 + "+L40S", "-" * 5000,
            "x" * 5000 + ".toml",
        ],
    )  # fmt: skip
    def test_it_is_refused_in_one_short_line(self, text: str) -> None:
        with pytest.raises(InputError) as e:
            parse_cluster(text)
        assert str(e.value).isprintable() and len(str(e.value)) < 500

    @pytest.mark.parametrize("prices", ["9" * 5000, "a\0b", "\n", "/dev/zero", "/tmp"])
    def test_prices_too(self, prices: str) -> None:
        with pytest.raises(InputError) as e:
            parse_cluster("L40S", prices)
        assert str(e.value).isprintable() and len(str(e.value)) < 500

    @pytest.mark.parametrize("price", ["1_0", "\u0661", "nan", "inf", "1e999", "", "True"])
    def test_a_price_table_holds_plain_numbers(self, tmp_path: Path, price: str) -> None:
        (tmp_path / "p.csv").write_text(f"gpu,usd_per_hour\nL40S,{price}\n")
        with pytest.raises(InputError, match="is not a price"):
            parse_cluster("L40S", str(tmp_path / "p.csv"))

    def test_what_is_meant_stays(self) -> None:
        assert parse_cluster(" 2 x L40S + L4 @ 25 Gbps ") == parse_cluster("2xL40S+L4@25Gbps")


class TestClusterFiles:
    """Mutations tried: `_number` without OverflowError; `float(value)` of texts; tomllib directly -> each fails."""

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("L40S = 0.85", "L40S = " + "9" * 5000), ("L40S = 0.85", "L40S = " + "9" * 400),
            ("L40S = 0.85", 'L40S = "1"'),
            ("L40S = 0.85", "L40S = true"), ("gbps = 90.0", "gbps = " + "9" * 400), ("gbps = 90.0", 'gbps = "1_0"'),
            ("gbps = 90.0", 'gbps = "\u0663"'), ("latency_us = 20", "latency_us = " + "9" * 400),
            ("latency_us = 20", 'latency_us = "20"'), ('name = "lab"', 'name = "a\\nb"'), ('name = "lab"', 'name = ""'),
            ('name = "lab"', f'name = "{"x" * 5000}"'), ('name = "lab"', "x" * 5000 + " = 1"),
            ('"L40S#0" = 25.0', f'"{"x" * 5000}" = 25.0'), ('kind = "pcie4"', f'kind = "{"x" * 5000}"'),
            ('name = "lab"', "name = " + "[" * 50_000), ('"2xL40S"]', '"2xL40S\\u0000"]'), ("= 25.0", "= " + "9" * 400),
        ],
    )  # fmt: skip
    def test_faults_are_one_short_line(self, tmp_path: Path, old: str, new: str) -> None:
        assert old in TOML
        file = tmp_path / "lab.toml"
        file.write_text(TOML.replace(old, new, 1))
        with pytest.raises(InputError) as e:
            parse_cluster(str(file))
        assert str(e.value).isprintable() and len(str(e.value)) < 500

    def test_only_regular_files(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.toml")
        (tmp_path / "zero.toml").symlink_to("/dev/zero")
        (tmp_path / "dir.toml").mkdir()
        for name in ("pipe", "zero", "dir", "none"):
            with pytest.raises(InputError, match=f"{name}.toml: (a|no such) "):
                parse_cluster(str(tmp_path / f"{name}.toml"))
