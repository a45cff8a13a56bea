"""What one rank of a tensor-parallel group of N GPUs holds.

Column-parallel: QKV and gate/up (heads and intermediate width / N); row-parallel: output and down projection, each
followed by an all-reduce (Megatron-LM, arXiv 1909.08053). Embedding and head are split over the vocabulary. Every
expert's width is split; the router, norms and the latent projections of MLA are on every rank, and so are KV heads
where there are fewer of them than ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tesserasim.derive.model import Attention, Dense, Experts, Latent, Layer, Model
from tesserasim.errors import InputError

WEIGHTS = ("bf16", "fp8", "mxfp4")
MX_BLOCK = 32  # weights that share a scale of 8 bits (OCP Microscaling Formats v1.0)
FP8_BLOCK = 128 * 128  # weights that share a scale of 32 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)
MAX_TP = 1024


def shard(model: Model, tp: int, weights: str, where: str) -> Model:
    """The rank's own widths as a model. Raises InputError, naming the width, where N does not divide it."""
    layers = {layer: _layer(layer, tp, weights, where) for layer in dict.fromkeys(model.layers)}
    # A vocabulary is padded to a multiple of the ranks; every other width must divide.
    return replace(model, vocab=-(-model.vocab // tp), layers=tuple(layers[x] for x in model.layers))


def _layer(layer: Layer, tp: int, weights: str, where: str) -> Layer:
    def part(value: int, what: str) -> int:
        if value % tp:
            raise InputError(f"{where}: {what} {value} is not divisible by --tp {tp}")
        return value // tp

    a, f = layer.attention, layer.ffn
    heads = part(a.heads, "num_attention_heads")
    if isinstance(a, Attention):
        if a.kv_heads % tp and tp % a.kv_heads:
            raise InputError(f"{where}: num_key_value_heads {a.kv_heads} and --tp {tp}: neither divides the other")
        attention: Attention | Latent = replace(a, heads=heads, kv_heads=max(1, a.kv_heads // tp))
    else:
        attention = replace(a, heads=heads)
    if isinstance(f, Dense):
        return Layer(attention, replace(f, inter=part(f.inter, "intermediate_size")))
    inter = part(f.inter, "moe_intermediate_size")
    if weights == "mxfp4":  # blocks are not torn: a rank pads its part
        inter = -(-inter // MX_BLOCK) * MX_BLOCK
    return Layer(attention, replace(f, inter=inter, shared=part(f.shared, "width of the shared experts")))


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are stored: `fp8` in all linear layers of the blocks, `mxfp4` in the experts alone, else bf16."""

    weights: str

    @property
    def linear(self) -> str:
        return "fp8" if self.weights == "fp8" else "bf16"

    @property
    def expert(self) -> str:
        return self.weights

    @staticmethod
    def nbytes(elements: int, dtype: str) -> int:
        """Bytes of a weight with its scales."""
        if dtype == "mxfp4":
            return -(-elements // 2) + -(-elements // MX_BLOCK)
        if dtype == "fp8":
            return elements + 4 * -(-elements // FP8_BLOCK)
        return 2 * elements


def check_weights(model: Model, weights: str, where: str) -> Format:
    """The format; InputError where the model has no weights that it applies to."""
    if weights == "mxfp4" and not any(isinstance(layer.ffn, Experts) for layer in model.layers):
        raise InputError(f"{where}: --weights mxfp4 is for expert layers, and this model has none; use bf16 or fp8")
    return Format(weights)
