"""Fixtures shared by all tests: small synthetic mixes, built once."""

from __future__ import annotations

import signal

import pytest

from tesserasim.trace.mix import Mix
from tesserasim.trace.synthetic import DecoderShape, synthetic_image_mix, synthetic_mix

#: A shell starts what runs in its background with interrupts ignored, and children inherit that: tests of Ctrl-C would
#: wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Small enough that a whole cohort is a few hundred kernels.
TINY = DecoderShape(layers=2, hidden=512, heads=8, kv_heads=2, head_dim=64, ffn=1024, vocab=2048)


@pytest.fixture(scope="session")
def tiny_mix() -> Mix:
    """Two-layer decoder, 64 tokens in, 4 out; decode grid batch 1, 4, 8 × context 64, 128."""
    return synthetic_mix(
        input_tokens=64, output_tokens=4, prefill_tokens=(64, 128), decode_batches=(1, 4, 8),
        decode_contexts=(64, 128), shape=TINY,
    )  # fmt: skip


@pytest.fixture(scope="session")
def llm_mix() -> Mix:
    """Two layers of Llama-3-8B, 1024 tokens in, 256 out."""
    return synthetic_mix(layers=2)


@pytest.fixture(scope="session")
def image_mix() -> Mix:
    """A two-block denoiser, 28 steps."""
    return synthetic_image_mix(blocks=2)
