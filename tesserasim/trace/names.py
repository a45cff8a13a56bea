"""What a kernel's name gives away: its kind, and a short form for people.

The rules stand in order, the first that matches decides; each is written for names seen in profiles of
PyTorch, cuBLAS, cuDNN, CUTLASS, Triton, FlashAttention, TensorRT-LLM, vLLM, SGLang, Tensile, MIOpen and AITER.
A name that says "attention" but not whether of a prompt or of one token stays `other`: a wrong kind would
be priced with the wrong model.
"""

from __future__ import annotations

import re
from functools import lru_cache

_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv|nvshmem", "collective"),
        (r"paged_attention|decode_attention|flash_?decod|mmha|masked_multihead|splitkv|split_kv|mla_decode"
         r"|batch_?decode|fmha\w*decode|single_?query|fmhaSm\d+\w*Generation", "attention_decode"),
        (r"flash_(fwd|bwd)|fmha\w*(context|prefill|_fwd|_bwd)|(pre|context)fill\w*att|batch_?prefill"
         r"|mem_eff\w*attention|fmha_cutlass|^attn_(fwd|bwd)|flash_attn_varlen|sdpa_?(fprop|bprop|flash)",
         "attention_prefill"),
        (r"attn|attention|fmha|flash_?inf", "other"),
        (r"selective_scan|ssd_chunk|chunk_(scan|state)|state_passing|mamba|causal_conv1d", "ssm_scan"),
        (r"moe|grouped_?gemm|grouped_?mm|_matmul_ogs|fused_experts|topk_gating|expert|_routing_", "moe"),
        (r"conv(?!ert)|cutlass_cudnn|wgrad|dgrad|winograd|scudnn|cudnn\w*::cnn|igemm_(fwd|bwd|wrw)|im2col|computeOffsetsKernel"
         r"|compute\w*OffsetsKernel|gcgemm|fft2d", "conv"),
        (r"gemm|gemv|nvjet|cutlass\w*::kernel|^cijk_|matmul|_bmm_|^bmm_|splitk|xmma|dot_kernel|wmma|cublas",
         "gemm"),
        (r"norm|triton_\w*rsqrt|bn_(fw|bw)|gammabeta", "norm"),
        (r"sampl|top_?k|top_?p|argmax|multinomial|RadixSort|sort_kernel", "sampling"),
        (r"reduce|softmax|::sum|triton_(red|per)|_sum_|scan|segment|loss|criterion|pool", "reduction"),
        (r"elementwise|triton_poi|unrolled|multi_tensor|pointwise|cat_?array|gather|scatter|index|embedding"
         r"|rotary|rope|silu|gelu|act_and_mul|activation|dropout|copy|transpose|permute|nchw|nhwc|quant"
         r"|reshape|kv_?cache|distribution|epilogue|cast|OpWithScalar|tensor_?op|fill|arange|memset", "elementwise"),
    )
)  # fmt: skip
_WRAPPER = re.compile(r"^cutlass::|^std::|^_Z|trampoline|kentry|globalKernel|device_kernel", re.IGNORECASE)
_ANONYMOUS = re.compile(r"\(anonymous( namespace)?\)::|\{anonymous\}::|<unnamed>::")


@lru_cache(maxsize=1 << 14)
def kernel_kind(name: str) -> str:
    """The kind (one of `KINDS`) of the kernel called `name`; `other` if the name does not tell.

    Never `copy` or `memset`: in imported traces these mark copies and sets by the driver, and only those.
    """
    short = _bare(name)
    # Template arguments mislead (an elementwise kernel over `rsqrt` is no norm), except in a mere wrapper.
    texts = (name,) if _WRAPPER.search(short) else (short, name)
    for text in texts:
        text = text[:2000].replace("fbgemm", "")
        for pattern, kind in _RULES:
            if pattern.search(text):
                return kind
    return "other"


@lru_cache(maxsize=1 << 14)
def short_name(name: str) -> str:
    """The name without return type, template arguments and parameters, at most 80 characters."""
    return _bare(name)[:80]


def _bare(name: str) -> str:
    text = _ANONYMOUS.sub("", name).removeprefix("void ").strip()
    return re.split(r"[<(\[]", text, maxsplit=1)[0].strip() or text or "unnamed"
