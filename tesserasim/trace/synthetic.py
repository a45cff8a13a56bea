"""Units written from shapes: a Llama-like decoder and an image denoiser, with nothing measured.

They exist for tests and for machines without captures. Structure, bytes, FLOPs, buffers and accesses follow
what a captured trace of serving-grade code holds; durations come from a plain roofline of an H200 with a
2.5 µs floor and are NOT measurements: the origin is `synthetic`, and there is no end-to-end time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tesserasim.trace.mix import Mix
from tesserasim.trace.model import Access, Buffer, Kernel, Trace, TraceMeta, structure_sha256

GPU = "H200-SXM"
#: What a good kernel reaches on an H200, and the time below which no kernel gets.
FLOP_PER_NS = 790e3
BYTES_PER_NS = 4300.0
FLOOR_NS = 2500
LAUNCH = {"empty_graph_ns": 4000, "per_node_ns": 5, "fitted_on": "synthetic"}
_DTYPE = 2  # bytes of a bf16 number
#: Signed gaps in turn; the negative one is a kernel that starts before its predecessor's tail is over.
_GAPS_NS = (900, 700, 1100, -400, 800)


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A dense decoder with grouped-query attention and a gated feed-forward. Defaults: Llama-3-8B."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 14336
    vocab: int = 128256

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class DenoiserShape:
    """A diffusion transformer over image tokens. Defaults: about the size of SD3.5 medium."""

    blocks: int = 24
    hidden: int = 1536
    heads: int = 24
    ffn: int = 6144
    tokens: int = 4096
    text_tokens: int = 154
    latent_bytes: int = 128 * 128 * 16 * _DTYPE


@dataclass
class _Builder:
    """Collects kernels and buffers in launch order; every number of a kernel follows from its accesses."""

    phase: str
    buffers: dict[str, Buffer] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    storages: dict[str, int] = field(default_factory=dict)

    def buffer(
        self, name: str, nbytes: int, role: str, slot: str = "", per_token: int = 0, per_seq: int = 0
    ) -> str:
        """Register a buffer once. Buffers of one `slot` share an allocator block, as reused memory does."""
        if name not in self.buffers:
            storage = self.storages.setdefault(slot or name, len(self.storages))
            self.buffers[name] = Buffer(
                len(self.buffers), name, nbytes, role, storage, 0,
                bytes_per_token=per_token, bytes_per_sequence=per_seq,
            )  # fmt: skip
        return name

    def activation(self, module: str, name: str, nbytes: int, role: str = "activation") -> str:
        return self.buffer(f"{module}.{name}", nbytes, role, slot=name)

    def weight(self, name: str, elements: int) -> str:
        return self.buffer(name, elements * _DTYPE, "weight")

    def kernel(
        self, site: str, kind: str, part: str, *, reads: Sequence[str] = (), writes: Sequence[str] = (),
        partial: Mapping[str, int] | None = None, read_bytes: Mapping[str, int] | None = None, flops: int = 0,
        shape: Mapping[str, int] | None = None, suffix: str = "",
    ) -> None:  # fmt: skip
        """Append one kernel. `partial` names buffers of which only so many bytes are written."""
        some = read_bytes or {}
        access = [self._access(n, "R", some.get(n)) for n in reads]
        access += [self._access(n, "W", None) for n in writes]
        access += [self._access(n, "W", count) for n, count in (partial or {}).items()]
        read = sum(a.nbytes for a in access if a.reads)
        written = sum(a.nbytes for a in access if a.writes)
        roof = max(flops / FLOP_PER_NS, (read + written) / BYTES_PER_NS, FLOOR_NS)
        duration = int(roof + 0.5)
        number = len(self.kernels)
        module, _, op = site.rpartition("/")
        self.kernels.append(
            Kernel(
                number,
                f"synthetic_{op}{suffix}",
                site,
                kind,
                op,
                module,
                self.phase,
                part,
                7,
                grid=(max(1, (read + written) // 65536), 1, 1),
                block=(256, 1, 1),
                weight_dtype="bf16",
                act_dtype="bf16",
                shape=dict(shape or {}),
                flops=flops,
                read_bytes=read,
                write_bytes=written,
                duration_ns=duration,
                duration_p10_ns=duration - duration // 100,
                duration_p90_ns=duration + duration // 50,
                gap_ns=_GAPS_NS[number % len(_GAPS_NS)] if number else 0,
                accesses=tuple(access),
            )
        )

    def _access(self, name: str, mode: str, nbytes: int | None) -> Access:
        b = self.buffers[name]
        whole = nbytes is None
        return Access(
            b.id, mode, 0, b.nbytes if nbytes is None else nbytes, "exact", mode == "W" and whole, "schema"
        )

    def trace(self, model: str, unit: Mapping[str, object]) -> Trace:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for k in self.kernels:
            for a in k.accesses:
                first.setdefault(a.buffer, k.id)
                last[a.buffer] = k.id
        buffers = tuple(
            dataclasses.replace(b, first_use=first.get(b.id, -1), last_use=last.get(b.id, -1))
            for b in self.buffers.values()
        )
        kernels = tuple(self.kernels)
        blocks: dict[int, int] = {}
        for b in buffers:
            if b.role in ("activation", "workspace"):
                blocks[b.storage] = max(blocks.get(b.storage, 0), b.nbytes)
        meta = TraceMeta(
            "synthetic", model, dict(unit), GPU, repeats=0, launch=dict(LAUNCH),
            structure_sha256=structure_sha256(kernels), workspace_bytes=sum(blocks.values()),
        )  # fmt: skip
        trace = Trace(meta, kernels, buffers)
        trace.validate()
        return trace


def decoder_unit(
    shape: DecoderShape, phase: str, batch: int, tokens: int, context: int, model: str = "synthetic-decoder"
) -> Trace:
    """One launch of a decoder: a prefill of `tokens` tokens, or a decode step (`tokens` = 1).

    `context` is the KV length at the end of the launch, new tokens included. The sampled token and the
    position are state: a decode step's embedding reads what the sampling of the launch before it wrote.
    """
    b = _Builder(phase)
    rows = batch * tokens
    stream = rows * shape.hidden * _DTYPE
    b.buffer("next_token", batch * 8, "state", per_seq=8)
    b.buffer("position", batch * 8, "state", per_seq=8)
    source = "next_token" if phase == "decode" else b.buffer("input_ids", rows * 8, "input")
    x = b.activation("embed", "x0", stream)
    table = b.weight("embed.weight", shape.vocab * shape.hidden)
    b.kernel("embed", "elementwise", "embed", reads=[source, table], writes=[x], read_bytes={table: stream},
             shape={"elements": rows * shape.hidden})  # fmt: skip
    for layer in range(shape.layers):
        x = _attention_part(b, shape, layer, batch, tokens, context, x)
        x = _ffn_part(b, shape, layer, rows, x)
    _head(b, shape, batch, rows, x)
    unit = {"name": phase, "phase": phase, "batch": batch, "tokens": tokens, "context": context}
    return b.trace(model, unit)


def _gemm(
    b: _Builder,
    site: str,
    part: str,
    m: int,
    n: int,
    k: int,
    a: str,
    w: str,
    out: str,
    extra: Sequence[str] = (),
) -> None:
    """One matrix product; a short one is split over k and summed by a second kernel through a workspace."""
    flops, shape = 2 * m * n * k, {"m": m, "n": n, "k": k}
    if m >= 64 or n > 2 * k:
        b.kernel(site, "gemm", part, reads=[a, w, *extra], writes=[out], flops=flops, shape=shape)
        return
    module = site.replace("/", ".")
    partial = b.activation(module, "splitk", 4 * m * n * 4, role="workspace")
    b.kernel(site, "gemm", part, reads=[a, w], writes=[partial], flops=flops, shape=shape, suffix="_splitk")
    b.kernel(site, "reduction", part, reads=[partial, *extra], writes=[out], flops=4 * m * n,
             shape={"elements": m * n}, suffix="_reduce")  # fmt: skip


def _attention_part(
    b: _Builder, s: DecoderShape, layer: int, batch: int, tokens: int, context: int, x: str
) -> str:  # fmt: skip
    m, rows, part = f"layers.{layer}", batch * tokens, "attention"
    q_width, qkv_width = s.heads * s.head_dim, s.heads * s.head_dim + 2 * s.kv_width
    per_token = 2 * s.kv_width * _DTYPE
    kv = b.buffer(f"{m}.kv", batch * context * per_token, "state", per_token=per_token)
    h = b.activation(m, "h", rows * s.hidden * _DTYPE)
    norm = b.weight(f"{m}.attn_norm.weight", s.hidden)
    b.kernel(f"{m}/attn_norm", "norm", part, reads=[x, norm], writes=[h], shape={"elements": rows * s.hidden})
    qkv = b.activation(m, "qkv", rows * qkv_width * _DTYPE)
    _gemm(
        b,
        f"{m}/qkv",
        part,
        rows,
        qkv_width,
        s.hidden,
        h,
        b.weight(f"{m}.qkv.weight", qkv_width * s.hidden),
        qkv,
    )
    q = b.activation(m, "q", rows * q_width * _DTYPE)
    b.kernel(f"{m}/rope_kv", "elementwise", part, reads=[qkv, "position"], writes=[q],
             partial={kv: rows * per_token}, shape={"elements": rows * qkv_width})  # fmt: skip
    out = b.activation(m, "attn", rows * q_width * _DTYPE)
    shape = {"batch": batch, "seq_q": tokens, "seq_kv": context, "heads": s.heads, "kv_heads": s.kv_heads,
             "head_dim": s.head_dim}  # fmt: skip
    pairs = batch * (tokens * context - tokens * (tokens - 1) // 2)
    flops = 4 * pairs * q_width
    if tokens == 1:
        split = b.activation(m, "split", 8 * rows * q_width * 4, role="workspace")
        b.kernel(f"{m}/attention", "attention_decode", part, reads=[q, kv], writes=[split], flops=flops,
                 shape=shape, suffix="_split")  # fmt: skip
        b.kernel(f"{m}/attention", "reduction", part, reads=[split], writes=[out], suffix="_combine",
                 shape={"elements": rows * q_width})  # fmt: skip
    else:
        b.kernel(
            f"{m}/attention", "attention_prefill", part, reads=[q, kv], writes=[out], flops=flops, shape=shape
        )
    after = b.activation(m, "x1", rows * s.hidden * _DTYPE)
    weight = b.weight(f"{m}.o.weight", q_width * s.hidden)
    _gemm(b, f"{m}/o", part, rows, s.hidden, q_width, out, weight, after, extra=[x])
    return after


def _ffn_part(b: _Builder, s: DecoderShape, layer: int, rows: int, x: str) -> str:
    m, part = f"layers.{layer}", "ffn"
    h = b.activation(m, "h2", rows * s.hidden * _DTYPE)
    norm = b.weight(f"{m}.ffn_norm.weight", s.hidden)
    b.kernel(f"{m}/ffn_norm", "norm", part, reads=[x, norm], writes=[h], shape={"elements": rows * s.hidden})
    up = b.activation(m, "gate_up", rows * 2 * s.ffn * _DTYPE)
    weight = b.weight(f"{m}.gate_up.weight", 2 * s.ffn * s.hidden)
    _gemm(b, f"{m}/gate_up", part, rows, 2 * s.ffn, s.hidden, h, weight, up)
    act = b.activation(m, "act", rows * s.ffn * _DTYPE)
    b.kernel(f"{m}/silu_mul", "elementwise", part, reads=[up], writes=[act], shape={"elements": rows * s.ffn})
    out = b.activation(m, "x0", rows * s.hidden * _DTYPE)
    _gemm(
        b,
        f"{m}/down",
        part,
        rows,
        s.hidden,
        s.ffn,
        act,
        b.weight(f"{m}.down.weight", s.ffn * s.hidden),
        out,
        [x],
    )
    return out


def _head(b: _Builder, s: DecoderShape, batch: int, rows: int, x: str) -> None:
    last = b.activation("norm", "h", batch * s.hidden * _DTYPE)
    norm = b.weight("norm.weight", s.hidden)
    b.kernel("norm", "norm", "head", reads=[x, norm], writes=[last],
             read_bytes={x: batch * s.hidden * _DTYPE}, shape={"elements": batch * s.hidden})  # fmt: skip
    logits = b.activation("head", "logits", batch * s.vocab * _DTYPE)
    weight = b.weight("head.weight", s.vocab * s.hidden)
    b.kernel("head", "gemm", "head", reads=[last, weight], writes=[logits],
             flops=2 * batch * s.vocab * s.hidden,
             shape={"m": batch, "n": s.vocab, "k": s.hidden})  # fmt: skip
    b.kernel("sample", "sampling", "head", reads=[logits], writes=["next_token", "position"],
             shape={"elements": batch * s.vocab})  # fmt: skip


def denoiser_unit(shape: DenoiserShape, batch: int, model: str = "synthetic-denoiser") -> Trace:
    """One denoising step with classifier-free guidance (two passes as one batch); the latents are state."""
    b = _Builder("denoise")
    s, rows = shape, 2 * batch * (shape.tokens + shape.text_tokens)
    width = rows * s.hidden * _DTYPE
    latents = b.buffer("latents", batch * s.latent_bytes, "state", per_seq=s.latent_bytes)
    text = b.buffer("text", 2 * batch * s.text_tokens * s.hidden * _DTYPE, "input")
    x = b.activation("embed", "x0", width)
    weight = b.weight("embed.weight", 64 * s.hidden)
    b.kernel(
        "embed", "conv", "embed", reads=[latents, text, weight], writes=[x], flops=2 * rows * 64 * s.hidden
    )
    for i in range(s.blocks):
        x = _denoiser_block(b, s, f"blocks.{i}", rows, batch, x)
    out = b.activation("head", "noise", 2 * batch * s.latent_bytes)
    weight = b.weight("head.weight", 64 * s.hidden)
    b.kernel("head", "gemm", "head", reads=[x, weight], writes=[out], flops=2 * rows * 64 * s.hidden,
             shape={"m": rows, "n": 64, "k": s.hidden})  # fmt: skip
    b.kernel("step", "elementwise", "head", reads=[out, latents], writes=[latents],
             shape={"elements": batch * s.latent_bytes // _DTYPE})  # fmt: skip
    unit = {"name": "denoise", "phase": "denoise", "batch": batch, "tokens": 1, "context": 0}
    return b.trace(model, unit)


def _denoiser_block(b: _Builder, s: DenoiserShape, m: str, rows: int, batch: int, x: str) -> str:
    h = b.activation(m, "h", rows * s.hidden * _DTYPE)
    b.kernel(f"{m}/norm", "norm", "attention", reads=[x], writes=[h], shape={"elements": rows * s.hidden})
    qkv = b.activation(m, "qkv", 3 * rows * s.hidden * _DTYPE)
    weight = b.weight(f"{m}.qkv.weight", 3 * s.hidden * s.hidden)
    _gemm(b, f"{m}/qkv", "attention", rows, 3 * s.hidden, s.hidden, h, weight, qkv)
    out = b.activation(m, "attn", rows * s.hidden * _DTYPE)
    seq = s.tokens + s.text_tokens
    b.kernel(f"{m}/attention", "attention_prefill", "attention", reads=[qkv], writes=[out],
             flops=4 * 2 * batch * seq * seq * s.hidden,
             shape={"batch": 2 * batch, "seq_q": seq, "seq_kv": seq, "heads": s.heads, "kv_heads": s.heads,
                    "head_dim": s.hidden // s.heads})  # fmt: skip
    x1 = b.activation(m, "x1", rows * s.hidden * _DTYPE)
    weight = b.weight(f"{m}.o.weight", s.hidden * s.hidden)
    _gemm(b, f"{m}/o", "attention", rows, s.hidden, s.hidden, out, weight, x1, [x])
    up = b.activation(m, "up", rows * s.ffn * _DTYPE)
    _gemm(b, f"{m}/up", "ffn", rows, s.ffn, s.hidden, x1, b.weight(f"{m}.up.weight", s.ffn * s.hidden), up)
    x2 = b.activation(m, "x0", rows * s.hidden * _DTYPE)
    _gemm(
        b,
        f"{m}/down",
        "ffn",
        rows,
        s.hidden,
        s.ffn,
        up,
        b.weight(f"{m}.down.weight", s.ffn * s.hidden),
        x2,
        [x1],
    )
    return x2


def synthetic_mix(
    layers: int = 2, input_tokens: int = 1024, output_tokens: int = 256, prefill_batch: int = 1,
    prefill_tokens: Sequence[int] = (512, 1024, 2048), decode_batches: Sequence[int] = (1, 8, 32, 128, 256),
    decode_contexts: Sequence[int] = (512, 2048), shape: DecoderShape | None = None,
) -> Mix:  # fmt: skip
    """A decoder mix with a grid of prefills (at batch `prefill_batch`) and of decode batch × context."""
    s = shape or DecoderShape(layers=layers)
    prefills = tuple(decoder_unit(s, "prefill", prefill_batch, n, n) for n in prefill_tokens)
    decodes = tuple(decoder_unit(s, "decode", n, 1, c) for n in decode_batches for c in decode_contexts)
    mix = Mix(
        f"synthetic-llm-{s.layers}", "synthetic-decoder", "llm", {"prefill": prefills, "decode": decodes},
        input_tokens=input_tokens, output_tokens=output_tokens, prefill_batch=prefill_batch,
    )  # fmt: skip
    mix.validate()
    return mix


def synthetic_image_mix(
    blocks: int = 2, steps: int = 28, batches: Sequence[int] = (1, 2, 4), shape: DenoiserShape | None = None
) -> Mix:
    """An image mix: `steps` denoising steps a request, captured at several batches."""
    s = shape or DenoiserShape(blocks=blocks)
    traces = tuple(denoiser_unit(s, n) for n in batches)
    mix = Mix(f"synthetic-image-{s.blocks}", "synthetic-denoiser", "image", {"denoise": traces},
              stages=(("denoise", steps),), incomplete=("encode", "vae"))  # fmt: skip
    mix.validate()
    return mix
