"""A Hugging Face `config.json` read with suspicion: every number in range, every absence one clear line.

What a key means is taken from the `transformers` library's configuration classes (Apache-2.0), by model_type:

    biases      `attention_bias` (all four projections), qwen2: q, k and v; gpt_oss: all
    qk norm     qwen3, qwen3_moe
    windows     `layer_types` if it is there; gpt_oss: every other layer from the first on; qwen2: `use_sliding_window`
                and `max_window_layers`; else `sliding_window` for all layers
    experts     `num_local_experts`, `num_experts` or `n_routed_experts`; `moe_intermediate_size` or
                `intermediate_size`; dense layers by `first_k_dense_replace`, `mlp_only_layers`, `decoder_sparse_step`
    MLA         `kv_lora_rank`
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tesserasim.derive.model import Attention, Dense, Experts, Latent, Layer, Model
from tesserasim.errors import InputError
from tesserasim.files import path_text, read_text, shown

MAX_CONFIG_BYTES = 4 << 20
MAX_PARAMETERS = 20 * 10**12
KNOWN = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2",
         "deepseek_v3")  # fmt: skip
#: Keys of models that are no decoders of attention and feed-forward alone.
FOREIGN = ("state_size", "ssm_cfg", "mamba_d_state", "d_model", "n_embd", "encoder_layers", "linear_num_key_heads")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class _Reader:
    """One table of the configuration; errors name the file and the key."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def fail(self, key: str, problem: str) -> InputError:
        return InputError(f"{self.where}: {key} {problem}")

    def whole(self, key: str, high: int, default: int | None = None, low: int = 1) -> int:
        """A whole number from `low` to `high`; the default where the key is absent or null."""
        value = self.data.get(key)
        if value is None:
            if default is None:
                raise InputError(f"{self.where}: key {key!r} is missing; is this the config.json of a language model?")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, f"must be a whole number from {low} to {high}, not {shown(value)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, not {shown(value)}")
        return default if value is None else value

    def text(self, key: str, default: str) -> str:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
            raise self.fail(key, f"must be a line of text, not {shown(value)}")
        return value


def read_config(path: str | os.PathLike[str]) -> Model:
    """The model of a configuration file. Raises InputError, in one line, for whatever it cannot be."""
    where = path_text(path)
    text = read_text(path, "model configuration", MAX_CONFIG_BYTES)
    try:
        data = json.loads(text)
    except RecursionError:
        raise InputError(f"{where}: nested too deeply to be a model configuration") from None
    except ValueError as error:
        first = (str(error).splitlines() or ["unreadable"])[0]
        raise InputError(f"{where}: not JSON, so not a model configuration ({first[:100]})") from None
    if not isinstance(data, dict):
        raise InputError(f"{where}: a model configuration is a JSON object, not {shown(data)}")
    return parse_config(data, where, _name(path))


def _name(path: str | os.PathLike[str]) -> str:
    """The file's name, or its folder's where the file is called config.json."""
    file = Path(os.path.abspath(os.fspath(path)))
    name = file.parent.name if file.stem == "config" else file.stem
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "-._") else "-" for c in name).strip("-.")
    return plain[:80] or "model"


def parse_config(data: Mapping[str, Any], where: str, name: str) -> Model:
    """The model that `data` describes; `where` is what errors name."""
    notes: list[str] = []
    inner = data.get("text_config")
    if isinstance(inner, dict) and "hidden_size" not in data:
        notes.append("only the language part of the configuration (text_config); no vision or audio encoder")
        data = {**inner, "quantization_config": inner.get("quantization_config", data.get("quantization_config"))}
    r = _Reader(data, where)
    kind = r.text("model_type", "unknown")
    foreign = next((key for key in FOREIGN if data.get(key) is not None), None)
    if r.flag("is_encoder_decoder") or (foreign and "num_key_value_heads" not in data) or foreign in FOREIGN[-1:]:
        why = f"{foreign} is set" if foreign else "is_encoder_decoder is true"
        raise InputError(f"{where}: model type {shown(kind)} is no decoder of attention and feed-forward ({why})")
    if kind not in KNOWN:
        notes.append(f"model_type {shown(kind)} is not known: taken as a Llama-like decoder by its keys")
    hidden = r.whole("hidden_size", 1 << 18)
    count = r.whole("num_hidden_layers", 1000)
    attention = _attention(r, kind, hidden, count)
    ffn = [_ffn(r, kind, i) for i in range(count)]
    if r.whole("num_nextn_predict_layers", 100, 0, 0):
        notes.append("layers for multi-token prediction (num_nextn_predict_layers) are left out")
    if any(isinstance(a, Latent) for a in attention):
        notes.append("MLA is modelled analytically: latent cache, absorbed projections in decode, expanded in prefill")
    stored = _stored(r, notes)
    model = Model(
        name, kind, hidden, r.whole("vocab_size", 1 << 24), r.flag("tie_word_embeddings"),
        tuple(Layer(a, f) for a, f in zip(attention, ffn, strict=True)),
        r.whole("max_position_embeddings", 1 << 30, 1 << 20), stored, tuple(notes),
    )  # fmt: skip
    if model.parameters > MAX_PARAMETERS:
        raise InputError(f"{where}: {model.parameters / 1e12:.0f} trillion parameters: more than any model has")
    return model


def _attention(r: _Reader, kind: str, hidden: int, count: int) -> list[Attention | Latent]:
    heads = r.whole("num_attention_heads", 4096)
    if r.data.get("kv_lora_rank") is not None:
        latent = Latent(
            heads, r.whole("q_lora_rank", 1 << 16, 0, 0), r.whole("kv_lora_rank", 1 << 16),
            r.whole("qk_nope_head_dim", 4096), r.whole("qk_rope_head_dim", 4096), r.whole("v_head_dim", 4096),
        )  # fmt: skip
        return [latent] * count
    kv_heads = r.whole("num_key_value_heads", 4096, heads)
    if heads % kv_heads:
        raise r.fail("num_attention_heads", f"is {heads}, which num_key_value_heads {kv_heads} does not divide")
    if r.data.get("head_dim") is None and hidden % heads:
        raise r.fail("hidden_size", f"is {hidden}, which num_attention_heads {heads} does not divide; give head_dim")
    head_dim = r.whole("head_dim", 4096, max(1, hidden // heads))
    bias = r.flag("attention_bias", kind in ("qwen2", "qwen2_moe", "gpt_oss"))
    o_bias = bias and kind not in ("qwen2", "qwen2_moe")
    qk_norm = kind in ("qwen3", "qwen3_moe") or r.flag("use_qk_norm")
    windows = _windows(r, kind, count)
    return [Attention(heads, kv_heads, head_dim, w, bias, o_bias, qk_norm, kind == "gpt_oss") for w in windows]


def _windows(r: _Reader, kind: str, count: int) -> list[int]:
    """Window of every layer, 0 for none."""
    window = r.whole("sliding_window", 1 << 30, 0, 0)
    if not r.flag("use_sliding_window", True):
        window = 0
    types = r.data.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) < count or not all(isinstance(t, str) for t in types):
            raise r.fail("layer_types", f"must be a list of {count} words, one a layer")
        for t in types[:count]:
            if t not in ("full_attention", "sliding_attention"):
                raise r.fail("layer_types", f"holds {shown(t)}: only full_attention and sliding_attention are modelled")
        return [window if t == "sliding_attention" else 0 for t in types[:count]]
    if kind == "gpt_oss":
        return [window if i % 2 == 0 else 0 for i in range(count)]
    if kind in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):
        first = r.whole("max_window_layers", 100_000, 0, 0)
        return [window if i >= first and r.flag("use_sliding_window") else 0 for i in range(count)]
    return [window] * count


def _ffn(r: _Reader, kind: str, layer: int) -> Dense | Experts:
    found = [key for key in _EXPERTS if r.data.get(key) is not None]
    experts = r.whole(found[0], 1 << 16, low=0) if found else 0
    step = r.whole("decoder_sparse_step", 1000, 1) if kind.startswith("qwen") else r.whole("moe_layer_freq", 1000, 1)
    only = r.data.get("mlp_only_layers") or []
    if not isinstance(only, list):
        raise r.fail("mlp_only_layers", f"must be a list of layer numbers, not {shown(only)}")
    first = r.whole("first_k_dense_replace", 1000, 0, 0)
    sparse = (layer + 1) % step == 0 if kind.startswith("qwen") else layer % step == 0
    if experts < 2 or layer < first or layer in only or not sparse:
        return Dense(r.whole("intermediate_size", 1 << 22), r.flag("mlp_bias"))
    topk = r.whole("num_experts_per_tok", experts)
    inter = r.whole("moe_intermediate_size", 1 << 22, r.whole("intermediate_size", 1 << 22, 0) or None)
    shared = r.whole("shared_expert_intermediate_size", 1 << 22, r.whole("n_shared_experts", 64, 0, 0) * inter, 0)
    extra = experts if kind == "deepseek_v3" else 0  # e_score_correction_bias
    return Experts(experts, topk, inter, shared, kind == "gpt_oss", extra, kind == "qwen2_moe" and shared > 0)


def _stored(r: _Reader, notes: list[str]) -> str:
    """bf16, fp8 or mxfp4: how the published weights are stored. Another way is taken as bf16, with a note."""
    found = r.data.get("quantization_config")
    if not isinstance(found, dict):
        return "bf16"
    method = found.get("quant_method")
    if method in ("fp8", "mxfp4"):
        return str(method)
    notes.append(f"weights are published with quantisation {shown(method)}, which is not modelled: bf16 by default")
    return "bf16"
