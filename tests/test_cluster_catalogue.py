"""The catalogue: complete, sourced, found by any name people use, and never a price out of thin air."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tesserasim.cluster import catalogue
from tesserasim.cluster.catalogue import describe_gpus, find_gpu, gpus, link_kinds, prices
from tesserasim.errors import InputError

pytestmark = pytest.mark.quick


def test_every_gpu_has_figures_and_a_source() -> None:
    """Mutation tried: empty the `source` column of one row of gpus.csv -> fails."""
    rows = catalogue._rows("gpus.csv")
    assert len(rows) == len(gpus()) >= 25
    for row in rows:
        assert row["source"] and row["memory_source"] and row["l2_rate_source"], row["name"]
    for g in gpus().values():
        assert min(g.bf16_tflops, g.bandwidth_gbs, g.memory_bytes, g.l2_bytes, g.sms, g.clock_mhz, g.tdp_w) > 0
        assert g.l2_gbs is None or g.l2_gbs > g.dram_gbs, g.name
        assert 0.7 * g.bandwidth_gbs < g.dram_gbs <= g.bandwidth_gbs


def test_rtx_pro_6000_computes_with_its_measured_bandwidth() -> None:
    """Mutation tried: `dram_gbs` returns `bandwidth_gbs` -> fails."""
    g = find_gpu("RTX-PRO-6000")
    assert (g.bandwidth_gbs, g.dram_gbs) == (1792, 1600)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA A100-PG509-200", "A100-40GB-SXM"),
        ("NVIDIA H200", "H200-SXM"),
        ("H200-SXM-141GB", "H200-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("H100-SXM-80GB", "H100-SXM"),
        ("RTX-PRO-6000", "RTX-PRO-6000"),
        ("RTX-PRO-6000-Server", "RTX-PRO-6000"),
        ("rtx pro 6000", "RTX-PRO-6000"),
        ("B200-SXM", "B200"),
        ("NVIDIA B200", "B200"),
        ("l40s", "L40S"),
        ("NVIDIA H100-SXM", "H100-SXM"),
        ("Tesla V100-SXM2-32GB", "V100-SXM"),
    ],
)
def test_names_people_and_drivers_use(text: str, name: str) -> None:
    """Mutation tried: `_key` keeps the vendor's words -> fails."""
    assert find_gpu(text).name == name


def test_every_canonical_name_and_alias_finds_its_gpu() -> None:
    for g in gpus().values():
        for alias in (g.name, *g.aliases):
            for written in (alias, alias.upper(), alias.replace("-", " "), alias.replace("-", "_")):
                assert find_gpu(written).name == g.name


@pytest.mark.parametrize("text", ["A100", "A100-80GB", "A100-SXM", "H100", "nvidia a100"])
def test_a_name_that_fits_several_types_is_refused(text: str) -> None:
    """Mutation tried: the `too_wide` branch returns the first candidate -> fails."""
    with pytest.raises(InputError, match="fits several types"):
        find_gpu(text)


@pytest.mark.parametrize(("text", "near"), [("A100-80GB-PCI", "A100-80GB-PCIe"), ("H2000", "H20"), ("L40-S2", "L40S")])
def test_an_unknown_name_lists_near_matches(text: str, near: str) -> None:
    with pytest.raises(InputError, match=near):
        find_gpu(text)


@given(st.text(max_size=30))
def test_any_text_finds_a_gpu_or_one_line(text: str) -> None:
    try:
        assert find_gpu(text).name in gpus()
    except InputError as e:
        assert "\n" not in str(e) and len(str(e)) < 400


def test_prices_carry_date_and_source_and_an_unknown_one_stays_absent() -> None:
    """Mutation tried: give absent GPUs `Price(0, ...)` -> fails."""
    for which in ("median", "min", "max", "paper"):
        table = prices(which)
        assert set(table) <= set(gpus())
        for p in table.values():
            assert 0 < p.low <= p.usd_per_hour <= p.high and p.date and p.source
    assert "H20" not in prices() and "L20" not in prices()
    low, mid, high = prices("min"), prices(), prices("max")
    assert all(low[g].usd_per_hour <= mid[g].usd_per_hour <= high[g].usd_per_hour for g in mid)


def test_paper_prices_are_those_of_the_published_pairs() -> None:
    """A100+L40S 2.5, H100+RTX PRO 6000 4.1, B200+H100 7.9 dollars an hour."""
    p = {g: x.usd_per_hour for g, x in prices("paper").items()}
    assert p["A100-80GB-PCIe"] + p["L40S"] == pytest.approx(2.5)
    assert p["H100-SXM"] + p["RTX-PRO-6000"] == pytest.approx(4.1)
    assert p["B200"] + p["H100-SXM"] == pytest.approx(7.9)


def test_price_files(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("# mine\ngpu,usd_per_hour\nNVIDIA H200,3.1\nl40s,0.5\n")
    (tmp_path / "p.toml").write_text('[prices]\n"NVIDIA H200" = 3.1\nL40S = 0.5\n')
    for file in ("p.csv", "p.toml"):
        table = prices(str(tmp_path / file))
        assert {g: p.usd_per_hour for g, p in table.items()} == {"H200-SXM": 3.1, "L40S": 0.5}


@pytest.mark.parametrize("price", ["0", "-1", "nan", "inf", "free", "", "1e9"])
def test_absurd_prices_are_refused(tmp_path: Path, price: str) -> None:
    """Mutation tried: drop the range check of `price_of` -> fails."""
    file = tmp_path / "p.csv"
    file.write_text(f"gpu,usd_per_hour\nL40S,{price}\n")
    with pytest.raises(InputError, match="L40S"):
        prices(str(file))


@pytest.mark.parametrize("text", ["", "gpu,usd\nL40S,1\n", "gpu,usd_per_hour\n", "gpu,usd_per_hour\nX9,1\n"])
def test_useless_price_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p.csv"
    file.write_text(text)
    with pytest.raises(InputError):
        prices(str(file))
    with pytest.raises(InputError, match="neither"):
        prices("cheapest")


def test_links_have_two_sources_each_and_say_what_is_assumed() -> None:
    kinds = link_kinds()
    wanted = {f"nvlink{g}" for g in (2, 3, 4, 5)} | {"pcie4", "pcie5"} | {f"rdma{r}" for r in (25, 50, 100, 200, 400)}
    assert set(kinds) == wanted
    for k in kinds.values():
        assert 0 < k.gbps <= k.nominal_gbps and 0 < k.latency_us < 100
        assert k.gbps_source and k.latency_source
        assert "measured" in k.latency_source or "assumed" in k.latency_source
    assert kinds["nvlink4"].gbps == 395 * 8


def test_describe_gpus_is_json_with_null_for_an_unknown_price() -> None:
    rows = json.loads(json.dumps(describe_gpus(), allow_nan=False))
    assert [r["name"] for r in rows] == list(gpus())
    assert next(r for r in rows if r["name"] == "H20")["usd_per_hour"] is None
