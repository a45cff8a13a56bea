"""The grid of a derived mix: traces, the mix file, and the document about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tesserasim import __version__
from tesserasim.cluster.catalogue import find_gpu
from tesserasim.cluster.model import GpuSpec
from tesserasim.derive.collectives import FORMULA, group_link
from tesserasim.derive.config import read_config
from tesserasim.derive.layers import Plan, decoder_unit
from tesserasim.derive.model import Experts, Model
from tesserasim.derive.shard import MAX_TP, WEIGHTS, Format, check_weights, shard
from tesserasim.derive.times import GAP_NS, ReferenceTimes
from tesserasim.derive.unit import Unit
from tesserasim.errors import InputError
from tesserasim.files import path_text, shown
from tesserasim.metrics.memory import USABLE
from tesserasim.trace.mix import MAX_LENGTHS
from tesserasim.trace.model import Kernel, Trace, TraceMeta, structure_sha256
from tesserasim.workload import live_peak

REFERENCE = "H200-SXM"
#: The points of captured units: decode only where batch x context stays below what an H200 holds of a Llama-3-8B.
PREFILL = (256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (512, 2048, 8192)
MOST_CACHED = 256 * 2048
MAX_TOKENS = 1 << 20
#: 10 % and 90 % points of a normal distribution, in standard deviations.
_Z80 = 1.2816


@dataclass(frozen=True)
class Options:
    """What the configuration does not say."""

    tp: int = 1
    weights: str | None = None  # default: as the published weights are stored
    gpu: str = REFERENCE
    link: str | None = None  # inside the group
    name: str = ""
    input_tokens: int = 1024
    output_tokens: int = 256
    prefill_batch: int = 1
    prefill: tuple[int, ...] = PREFILL
    batches: tuple[int, ...] = BATCHES
    contexts: tuple[int, ...] = CONTEXTS
    floors: bool = True  # False: times keep the floors of the benchmarks (tesserasim.derive.times)
    most_cached: int = MOST_CACHED  # tokens in the cache of a decode step, unless it is of the smallest batch


@dataclass(frozen=True)
class Derived:
    """A derived mix in memory."""

    model: Model
    rank: Model
    format: Format
    gpu: GpuSpec
    options: Options
    traces: tuple[Trace, ...]
    notes: tuple[str, ...] = ()
    link: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.options.name or mix_name(self.model, self.format, self.options.tp)


def mix_name(model: Model, form: Format, tp: int) -> str:
    return f"{model.name}-{form.weights}" + (f"-tp{tp}" if tp > 1 else "")


def derive(config: str | Path, options: Options) -> Derived:
    """All units of a configuration, with modelled times. Raises InputError for a configuration or option that cannot
    be: in one line, naming what is wrong."""
    where = path_text(config)
    model = read_config(config)
    if not 1 <= options.tp <= MAX_TP:
        raise InputError(f"--tp must lie between 1 and {MAX_TP}, not {shown(options.tp)}")
    weights = options.weights or model.stored
    if weights not in WEIGHTS:
        raise InputError(f"--weights {shown(weights)} is none of {', '.join(WEIGHTS)}")
    form = check_weights(model, weights, where)
    rank = shard(model, options.tp, weights, where)
    for key, most in MAX_LENGTHS.items():
        if not 1 <= getattr(options, key) <= most:
            raise InputError(f"--{key.replace('_', '-')} must lie between 1 and {most}, not {getattr(options, key)}")
    gpu = find_gpu(options.gpu)
    times = ReferenceTimes(gpu, options.floors)
    link = group_link(gpu, options.link)
    plan = Plan(rank, form, options.tp, link)
    label = mix_name(model, form, options.tp)
    traces = tuple(
        _trace(decoder_unit(plan, *point), times, label, model, options.tp) for point in points(model, options)
    )
    made = {"kind": link.name, "gbps": link.gbps, "latency_us": link.latency_us, "formula": FORMULA}
    return Derived(model, rank, form, gpu, options, traces, tuple(_notes(model, rank, form, gpu, options)),
                   made if options.tp > 1 else {})  # fmt: skip


def points(model: Model, options: Options) -> list[tuple[str, int, int, int]]:
    """(phase, batch, tokens, context) of every unit; contexts that the model is not made for are left out."""
    for what, values in (("prefill", options.prefill), ("batches", options.batches), ("contexts", options.contexts)):
        if not values or any(not 1 <= v <= MAX_TOKENS for v in values) or len(set(values)) < len(values):
            raise InputError(f"--{what} must hold different whole numbers from 1 to {MAX_TOKENS}, at least one")
    lengths = [t for t in sorted(options.prefill) if t <= model.positions] or [min(model.positions, MAX_TOKENS)]
    contexts = [c for c in sorted(options.contexts) if c <= model.positions] or [min(model.positions, MAX_TOKENS)]
    found = [("prefill", options.prefill_batch, t, t) for t in lengths]
    smallest = min(options.batches)
    cells = [(b, c) for c in contexts for b in sorted(options.batches)]
    return found + [("decode", b, 1, c) for b, c in cells if b == smallest or b * c <= options.most_cached]


def _trace(u: Unit, times: ReferenceTimes, label: str, model: Model, tp: int) -> Trace:
    priced = times.price(u.costs)
    kernels: list[Kernel] = []
    for k, ns, sigma in zip(u.kernels, priced.duration_ns, priced.sigma.tolist(), strict=True):
        low, high = ns * 2.718281828 ** (-_Z80 * sigma), ns * 2.718281828 ** (_Z80 * sigma)
        gap = GAP_NS if k.id else 0
        kernels.append(
            replace(k, duration_ns=ns, duration_p10_ns=int(low + 0.5), duration_p90_ns=int(high + 0.5), gap_ns=gap)
        )
    unit = {"name": u.phase, "phase": u.phase, "batch": u.batch, "tokens": u.tokens, "context": u.context}
    buffers = u.used_buffers()
    routed = next((layer.ffn for layer in model.layers if isinstance(layer.ffn, Experts)), None)
    kinds = dict.fromkeys(zip((c.kind for c in u.costs), priced.sources, strict=True))
    meta = TraceMeta(
        "derived", label, unit, times.gpu.name, structure_sha256=structure_sha256(tuple(kernels)),
        workspace_bytes=live_peak(buffers), tool_version=__version__,
        moe={"experts": routed.count, "top_k": routed.topk, "routing": "even (assumed)"} if routed else None,
        # The simulator reads one rank of a group as one device, so tp_size stays 1.
        extra={"tensor_parallel": tp, "times": [f"{kind}: {source}" for kind, source in kinds], "gap_ns": GAP_NS},
    )  # fmt: skip
    trace = Trace(meta, tuple(kernels), buffers)
    trace.validate()
    return trace


def _notes(model: Model, rank: Model, form: Format, gpu: GpuSpec, options: Options) -> list[str]:
    notes = ["derived from a configuration: times are modelled, nothing was measured", *model.notes]
    if options.tp > 1:
        notes.append(
            f"units are of one rank of {options.tp}: a GPU of a cluster stands for such a group, and costs its price"
            f" {options.tp} times"
        )
    need, room = weight_bytes(rank, form), USABLE * gpu.memory_bytes
    if need > room:
        notes.append(
            f"weights of {need / 1e9:.0f} GB per rank exceed {room / 1e9:.0f} GB ({USABLE:.0%} of {gpu.name}'s memory)"
        )
    return notes


def weight_bytes(model: Model, form: Format) -> int:
    """Bytes of all weights in that format, scales included."""
    h, total = model.hidden, model.vocab * model.hidden * (1 if model.tied else 2) * 2 + 2 * model.hidden
    for layer in model.layers:
        f = layer.ffn
        linear = layer.attention.parameters(h)
        experts = f.count * 3 * h * f.inter if isinstance(f, Experts) else 0
        rest = f.parameters(h) - experts
        total += form.nbytes(experts, form.expert) + form.nbytes(linear + rest, form.linear) + 4 * h
    return total


def document(made: Derived, out: Path, files: Sequence[Path]) -> dict[str, Any]:
    """What `derive --json` prints; times in us, everything modelled."""
    m, o = made.model, made.options
    units = [
        {
            "unit": t.unit, "batch": t.meta.unit["batch"], "tokens": t.meta.unit["tokens"],
            "context": t.meta.unit["context"], "kernels": len(t), "flops": sum(k.flops for k in t),
            "modelled_us": round(t.busy_ns / 1e3 + sum(t.replay_gaps_ns) / 1e3, 3),
            "gaps_us": round(sum(t.replay_gaps_ns) / 1e3, 3), "file": str(file),
        }
        for t, file in zip(made.traces, files, strict=True)
    ]  # fmt: skip
    return {
        "origin": "derived", "mix": str(out), "model": m.name, "model_type": m.kind, "gpu": made.gpu.name,
        "weights": made.format.weights, "tp": o.tp, "layers": len(m.layers), "parameters": m.parameters,
        "active_parameters": m.active_parameters, "multiplied_parameters": m.multiplied_parameters,
        "weight_bytes": weight_bytes(m, made.format), "weight_bytes_per_rank": weight_bytes(made.rank, made.format),
        "kv_bytes_per_token": m.kv_per_token, "kv_bytes_per_token_per_rank": made.rank.kv_per_token,
        "input_tokens": o.input_tokens, "output_tokens": o.output_tokens, "gap_ns": GAP_NS,
        "collectives": made.link or None, "units": units, "notes": list(made.notes),
        "time_sources": sorted({s for t in made.traces for s in t.meta.extra["times"]}),
    }  # fmt: skip


def write(made: Derived, out: Path) -> tuple[Path, list[Path]]:
    """Write traces and mix into `out`; (mix file, trace files in the order of `made.traces`)."""
    from tesserasim.sweep.mixfile import MixOptions, new_mix
    from tesserasim.trace.parquet import write_trace

    o = made.options
    files = [out / f"{_stem(t)}.parquet" for t in made.traces]
    for trace, file in zip(made.traces, files, strict=True):
        write_trace(trace, file)
    mix = out / f"{made.name}.toml"
    new_mix(files, mix, MixOptions(made.name, o.input_tokens, o.output_tokens, o.prefill_batch))
    return mix, files


def _stem(trace: Trace) -> str:
    u = trace.meta.unit
    last = f"t{u['tokens']}" if trace.unit == "prefill" else f"c{u['context']}"
    return f"{trace.unit}-b{u['batch']}-{last}"
