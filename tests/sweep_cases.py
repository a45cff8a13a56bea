"""A tiny mix as files, and a tiny sweep over it: for the tests of sweep, command line and api."""

from __future__ import annotations

from pathlib import Path

from conftest import TINY

from tesserasim.sweep.mixfile import MixOptions, new_mix
from tesserasim.trace.parquet import write_trace
from tesserasim.trace.synthetic import synthetic_image_mix, synthetic_mix

SPEC = """
clusters = ["A100-80GB-PCIe+L40S", "H200-SXM+L40S"]
links = ["25Gbps", "200Gbps"]
depth = [1, 2]
[[mixes]]
mix = "./tiny.toml"
batch = [1, 4, 8]
in_flight = 8
output_tokens = 4
[[mixes]]
mix = "./pixels.toml"
batch = [1]
in_flight = 2
[quick]
clusters = ["A100-80GB-PCIe+L40S"]
links = ["25Gbps"]
output_tokens = 3
"""


def write_tiny_mixes(directory: Path) -> None:
    """tiny.toml (a two-layer decoder, 64 tokens in, 4 out) and pixels.toml (a one-block denoiser)."""
    llm = synthetic_mix(
        input_tokens=64, output_tokens=4, prefill_tokens=(64, 128), decode_batches=(1, 4, 8),
        decode_contexts=(64, 128), shape=TINY,
    )  # fmt: skip
    image = synthetic_image_mix(blocks=1)
    for mix, name in ((llm, "tiny"), (image, "pixels")):
        paths = []
        for unit, traces in mix.traces.items():
            for i, trace in enumerate(traces):
                paths.append(directory / f"{name}-{unit}-{i}.parquet")
                write_trace(trace, paths[-1])
        lengths, steps = MixOptions(input_tokens=64, output_tokens=4), MixOptions(launches={"denoise": 3})
        new_mix(paths, directory / f"{name}.toml", lengths if name == "tiny" else steps)


def write_tiny_sweep(directory: Path) -> Path:
    """The spec of the tiny sweep, with its mixes beside it."""
    write_tiny_mixes(directory)
    spec = directory / "tiny-sweep.toml"
    spec.write_text(SPEC)
    return spec
