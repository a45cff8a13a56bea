"""Published model configurations, as far as they decide shapes. Sources: the config.json of each repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tesserasim.derive.config import parse_config
from tesserasim.derive.model import Model


def _llama(kind: str, hidden: int, inter: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> Any:
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab, "tie_word_embeddings": False,
        "max_position_embeddings": 32768, **more,
    }  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": _llama("llama", 4096, 14336, 32, 32, 8, 128256, max_position_embeddings=8192),
    "Mistral-7B-v0.1": _llama("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=4096),
    "Qwen2.5-7B": _llama("qwen2", 3584, 18944, 28, 28, 4, 152064, use_sliding_window=False, sliding_window=131072,
                         max_window_layers=28),
    "Qwen3-8B": _llama("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128, attention_bias=False),
    "Mixtral-8x7B": _llama("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2,
                           sliding_window=None),
    "gpt-oss-20b": _llama("gpt_oss", 2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32,
                          num_experts_per_tok=4, sliding_window=128, attention_bias=True,
                          quantization_config={"quant_method": "mxfp4"}, max_position_embeddings=131072),
    "Qwen3-235B-A22B": _llama("qwen3_moe", 4096, 12288, 94, 64, 4, 151936, head_dim=128, moe_intermediate_size=1536,
                              num_experts=128, num_experts_per_tok=8, decoder_sparse_step=1, mlp_only_layers=[],
                              sliding_window=None, use_sliding_window=False),
    "DeepSeek-V3": _llama("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, moe_intermediate_size=2048,
                          n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3,
                          moe_layer_freq=1, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
                          qk_rope_head_dim=64, v_head_dim=128, num_nextn_predict_layers=1,
                          quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
}  # fmt: skip
#: Two layers that are quick to derive and to simulate.
TINY = _llama("llama", 256, 512, 2, 8, 2, 1024)


def model(name: str) -> Model:
    return parse_config(CONFIGS[name], name, name)


def write_config(folder: Path, config: Any, name: str = "tiny") -> Path:
    path = folder / f"{name}.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path
