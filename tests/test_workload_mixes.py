"""The shipped mix files, on traces written where captures go."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from workload_cases import ScaledCosts, small_cluster

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
    write_trace(decoder_unit(s, "prefill", 1, 1024, 1024), tmp_path / "llama-3-8b/prefill-b1-t1024.parquet")
    for b, c in ((8, 512), (8, 2048), (32, 512), (32, 2048)):
        write_trace(decoder_unit(s, "decode", b, 1, c), tmp_path / f"llama-3-8b/decode-b{b}-c{c}.parquet")
    out = tmp_path / "left-out/llama-3-8b/decode-b16-c1536.parquet"
    write_trace(decoder_unit(s, "decode", 16, 1, 1536), out)
    mix = load_mix(tmp_path / "llama-3-8b.toml")
    assert (mix.input_tokens, mix.output_tokens, mix.prefill_batch) == (1024, 256, 1)
    assert {t.meta.unit["batch"] for t in mix.traces["decode"]} == {8, 32}
    w = build_workload(mix, small_cluster(2), ScaledCosts(), 16)
    assert w.unit_launches == (("prefill", 16), ("decode", 255)) and w.extrapolated == ()


def test_the_image_mix_says_what_it_lacks(tmp_path: Path) -> None:
    shutil.copy(TRACES / "sd3.5-medium.toml", tmp_path)
    write_trace(denoiser_unit(DenoiserShape(blocks=1), 1), tmp_path / "sd3.5-medium/denoise-b1.parquet")
    mix = load_mix(tmp_path / "sd3.5-medium.toml")
    assert mix.incomplete == ("text encoders", "VAE decode")
    assert build_workload(mix, small_cluster(2), ScaledCosts(), 1).unit_launches == (("denoise", 28),)
