"""The shipped mix files, on traces written where captures go."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from workload_cases import ScaledCosts, small_cluster

from tesserasim.cluster.parse import parse_cluster
from tesserasim.costs.base import default_costs
from tesserasim.trace.mix import load_mix
from tesserasim.trace.parquet import write_trace
from tesserasim.trace.synthetic import DecoderShape, DenoiserShape, decoder_unit, denoiser_unit
from tesserasim.workload import build_workload

pytestmark = pytest.mark.quick

TRACES = Path(__file__).resolve().parents[1] / "traces"


def test_the_llama_mix_finds_its_grid_and_leaves_the_left_out_point_out(tmp_path: Path) -> None:
    """Mutation tried: the glob `**/*.parquet`."""
    shutil.copy(TRACES / "llama-3-8b.toml", tmp_path)
    s = DecoderShape(layers=1)
    for t in (512, 1024):
        write_trace(decoder_unit(s, "prefill", 1, t, t), tmp_path / f"llama-3-8b/prefill-b1-t{t}.parquet")
    chunk = decoder_unit(s, "prefill", 1, 2048, 6144)  # a point that this grid has no axis for
    write_trace(chunk, tmp_path / "llama-3-8b/prefill-b1-t2048-c6144.parquet")
    for b, c in ((8, 512), (8, 2048), (32, 512), (32, 2048)):
        write_trace(decoder_unit(s, "decode", b, 1, c), tmp_path / f"llama-3-8b/decode-b{b}-c{c}.parquet")
    out = tmp_path / "left-out/llama-3-8b/decode-b16-c1536.parquet"
    write_trace(decoder_unit(s, "decode", 16, 1, 1536), out)
    mix = load_mix(tmp_path / "llama-3-8b.toml")
    assert (mix.input_tokens, mix.output_tokens, mix.prefill_batch) == (1024, 256, 1)
    assert {t.meta.unit["batch"] for t in mix.traces["decode"]} == {8, 32}
    w = build_workload(mix, small_cluster(2), ScaledCosts(), 16)
    assert w.unit_launches == (("prefill", 16), ("decode", 255)) and w.extrapolated == ()


def test_the_image_mix_runs_encoders_denoising_and_decoder(tmp_path: Path) -> None:
    """Mutation tried: stages without the encoders."""
    shutil.copy(TRACES / "sd3.5-medium.toml", tmp_path)
    denoise = denoiser_unit(DenoiserShape(blocks=1), 1)
    write_trace(denoise, tmp_path / "sd3.5-medium/denoise-b1.parquet")
    for name in ("encode-text", "vae-decode"):
        meta = dataclasses.replace(denoise.meta, unit={**denoise.meta.unit, "name": name})
        write_trace(dataclasses.replace(denoise, meta=meta), tmp_path / f"sd3.5-encoders/{name}-b1.parquet")
    mix = load_mix(tmp_path / "sd3.5-medium.toml")
    assert mix.incomplete == ()
    launches = build_workload(mix, small_cluster(2), ScaledCosts(), 1).unit_launches
    assert launches == (("encode-text", 1), ("denoise", 28), ("vae-decode", 1))


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-oss-20b", "mamba-codestral-7b", "qwen2.5-vl-7b", "sd3.5-medium"])
def test_every_shipped_mix_loads_and_runs_on_two_gpus(name: str) -> None:
    """The prefills are whole prompts: chunks on a past are no points of these grids."""
    mix = load_mix(TRACES / f"{name}.toml")
    w = build_workload(mix, parse_cluster("H200-SXM+L40S@200Gbps"), default_costs(), 1)
    assert w.extrapolated == () and len(w.unit_launches) == len(mix.units)
    assert all(t.meta.unit["tokens"] == t.meta.unit["context"] for t in mix.traces.get("prefill", ()))
