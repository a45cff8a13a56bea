"""What limits a kernel, by mechanism: the prior time of a shape on a GPU, and what the learner is told about it.

Everything is computed from the shape, the GPU's figures and, if known, the time on the GPU where the kernel was
captured; all arrays have one entry per row (a site on a GPU). The mechanisms:

- *floor*: however little a kernel does, launching and draining it takes microseconds;
- *tensor rate* at the activations' width, and *wave quantisation*: the last wave of tiles occupies the whole GPU;
- *DRAM*, and the *L2* for what fits it: a benchmark that replays the same buffers finds them warm;
- *power*: the tensor rate that a GPU holds depends on FLOP/s per watt;
- the *kernel that the library picked* shows in how far the captured time lies from its own prior.

`prior_us` combines them without any fitted figure. The fitted part (tesserasim.costs.boost) sees the mechanisms as
logarithms and learns what the combination misses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tesserasim.cluster.model import GpuSpec
from tesserasim.costs.times import FloatArray

Shape = Mapping[str, FloatArray]

#: Least time of a kernel, us (as in tesserasim.costs.roofline); attention and MoE benchmarks run several kernels.
FLOOR_US = {"gemm": 2.0, "attention_prefill": 7.0, "attention_decode": 7.0, "moe": 15.0, "elementwise": 2.0}
#: Copies of the weights or the cache that are used in turn, as far as the L2 is concerned. The GEMM benchmarks replay
#: six weights, the attention ones a single cache; in a model everything is read once per step, so nothing is warm.
COPIES = {"gemm": 6.0, "attention_prefill": 1.0, "attention_decode": 1.0}
COLD = 64.0
#: Part of the L2's rate that a GEMM reaches when it reads its weights there. Chosen, as the mean in `_tiles_us`:
#: experiments/validation/costs_choices.py makes both choices without each die.
GEMM_L2 = 0.6


@dataclass(frozen=True)
class Specs:
    """Figures of GPUs, one entry per row."""

    sms: FloatArray
    clock_ghz: FloatArray
    bf16: FloatArray  # FLOP per us
    fp8: FloatArray  # FLOP per us; the 16-bit rate where there is no 8-bit one
    fp4: FloatArray  # FLOP per us; the 8-bit rate where there is no 4-bit one
    dram: FloatArray  # bytes per us
    l2: FloatArray  # bytes
    l2_rate: FloatArray  # bytes per us
    watts: FloatArray
    capability: FloatArray  # compute capability as a number: 8.0, 8.9, 9.0, 10.0, 12.0

    def take(self, rows: NDArray[np.int64]) -> Specs:
        return Specs(*(getattr(self, f)[rows] for f in self.__dataclass_fields__))


def specs(gpus: Sequence[GpuSpec]) -> Specs:
    """The figures of GPUs as arrays, one entry per GPU."""
    rows = []
    for g in gpus:
        capability = float(g.compute_capability) if g.compute_capability[:1].isdigit() else 9.4
        fp8 = (g.fp8_tflops or g.bf16_tflops) * 1e6
        fp4 = fp8 * 2.0 if capability >= 10.0 else fp8
        rows.append(
            (g.sms, g.clock_mhz / 1e3, g.bf16_tflops * 1e6, fp8, fp4, g.dram_gbs * 1e3, g.l2_bytes,
             max(g.l2_gbs or 0.0, g.dram_gbs) * 1e3, g.tdp_w, capability)
        )  # fmt: skip
    columns = np.array(rows, dtype=np.float64).T
    return Specs(*(np.ascontiguousarray(c) for c in columns))


@dataclass(frozen=True)
class Limits:
    """Times by mechanism on one GPU per row, us, and features that belong to the kind."""

    floor: FloatArray
    compute: FloatArray
    memory: FloatArray
    more: tuple[FloatArray, ...]  # of the GPU: occupancy and the like, as logarithms

    @property
    def prior(self) -> FloatArray:
        """One time from all: compute at 80 % and memory at 85 % of their peaks overlap nearly, the floor adds."""
        c, m = self.compute / 0.8, self.memory / 0.85
        work: FloatArray = np.sqrt(np.sqrt(c**4 + m**4))
        return self.floor + work


def log2(x: FloatArray) -> FloatArray:
    found: FloatArray = np.log2(np.maximum(x, 1e-9))
    return found


def waves(blocks: FloatArray, s: Specs) -> tuple[FloatArray, FloatArray]:
    """log2 of blocks per SM, and the share of the last wave that is used."""
    per_sm = blocks / s.sms
    return log2(per_sm), per_sm / np.ceil(np.maximum(per_sm, 1e-9))


def moved(cold: FloatArray, warm: FloatArray, working_set: FloatArray, s: Specs, l2_share: float = 1.0) -> FloatArray:
    """us for bytes from DRAM and bytes that the L2 may hold: the share that fits 70 % of it moves at its speed.

    `l2_share`: part of the L2's rate that the kernel reaches.
    """
    fits = np.clip(1.75 - working_set / (0.4 * s.l2), 0.0, 1.0)
    return cold / s.dram + warm * (fits / (l2_share * s.l2_rate) + (1.0 - fits) / s.dram)


def rate(bits: FloatArray, s: Specs) -> FloatArray:
    """FLOP per us at the width of the operands."""
    return np.where(bits >= 16, s.bf16, np.where(bits >= 8, s.fp8, s.fp4))


def copies(kind: str, x: Shape) -> FloatArray:
    """[row] copies in turn: those of the benchmark unless the shape says otherwise."""
    return x["copies"] if "copies" in x else np.full_like(next(iter(x.values())), COPIES[kind])


def _gemm(x: Shape, s: Specs) -> Limits:
    """A GEMM; for 8-bit operands the benchmark quantises the activations first: a kernel of 3 bytes per element."""
    m, n, k = x["m"], x["n"], x["k"]
    weights, acts, out = n * k * x["w_bits"] / 8, m * k * x["a_bits"] / 8, m * n * 2.0
    quantised = (x["a_bits"] < 16).astype(np.float64)
    compute = _tiles_us(m, n, k, x["a_bits"], s)
    total = weights + acts + out
    reused = copies("gemm", x) * weights + acts + out
    elements = 3.0 * quantised * m * k
    memory = moved(0.0 * weights, total, reused, s, GEMM_L2) + moved(0.0 * weights, elements, elements, s)
    floor = FLOOR_US["gemm"] * (1.0 + quantised) * x.get("launches", 1.0)
    big, big_use = waves(np.ceil(m / 128) * np.ceil(n / 128), s)
    _, wide_use = waves(np.ceil(m / 256) * np.ceil(n / 128), s)
    _, small_use = waves(np.ceil(m / 64) * np.ceil(n / 64), s)
    more = (big, big_use, wide_use, small_use, log2(reused / s.l2), log2(total / s.l2))
    return Limits(floor, compute, memory, more)


def _tiles_us(m: FloatArray, n: FloatArray, k: FloatArray, bits: FloatArray, s: Specs) -> FloatArray:
    """us at the tensor rate. 8-bit kernels do not split k: whole tiles of up to 128 x 128 take their turn on the SMs.

    Some kernels have smaller tiles or split after all, so the geometric mean of both times is taken.
    """
    smooth = 2.0 * m * n * k / rate(bits, s)
    height = np.clip(2.0 ** np.ceil(np.log2(m)), 64.0, 128.0)
    turns = np.ceil(np.ceil(m / height) * np.ceil(n / 128) / s.sms)
    whole = turns * 2.0 * height * 128.0 * k / (rate(bits, s) / s.sms)
    return np.where((bits < 16) & (whole > smooth), between_tiles(smooth, whole), smooth)


def between_tiles(smooth: FloatArray, whole: FloatArray) -> FloatArray:
    """The time between that of work spread evenly and that of whole tiles."""
    found: FloatArray = np.sqrt(smooth * whole)
    return found


def _pairs(q: FloatArray, kv: FloatArray, window: FloatArray) -> FloatArray:
    """Pairs of query and key that causal attention with a window computes."""
    span = np.where(window > 0, np.minimum(window, kv), kv)
    ramp = np.minimum(q, np.maximum(span - (kv - q), 0.0))  # queries that see fewer keys than the span
    seen = (kv - q) * ramp + ramp * (ramp + 1.0) / 2.0
    return np.maximum(seen + (q - ramp) * span, 1.0)


def _prefill(x: Shape, s: Specs) -> Limits:
    b, q, kv, h, g, d = (x[c] for c in ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim"))
    pairs = _pairs(q, kv, x["window"])
    compute = 4.0 * b * h * d * pairs / rate(x["q_bits"], s)
    total = b * d * (2.0 * q * h * 2.0 + 2.0 * kv * g * x["kv_bits"] / 8)
    reused = copies("attention_prefill", x) * total
    blocks, use = waves(b * h * np.ceil(q / 128), s)
    packed, packed_use = waves(b * g * np.ceil(q * h / g / 128), s)
    path = 4.0 * 128 * d * np.minimum(kv, np.where(x["window"] > 0, x["window"] + 128, kv)) / rate(x["q_bits"], s)
    more = (blocks, use, packed, packed_use, log2(path * s.sms / FLOOR_US["attention_prefill"]), log2(reused / s.l2))
    return Limits(np.full_like(b, FLOOR_US["attention_prefill"]), compute, moved(0.0 * b, total, reused, s), more)


def _decode(x: Shape, s: Specs) -> Limits:
    b, kv, h, g, d = (x[c] for c in ("batch", "seq_kv", "heads", "kv_heads", "head_dim"))
    seen = np.where(x["window"] > 0, np.minimum(kv, x["window"]), kv)
    cache = 2.0 * b * g * d * seen * x["kv_bits"] / 8
    total = cache + 4.0 * b * h * d
    reused = copies("attention_decode", x) * total
    tile = np.maximum(np.ceil(h / g / 64) * 64, 64)
    compute = 4.0 * b * g * tile * d * seen / s.bf16
    blocks, use = waves(b * g, s)
    work, work_use = waves(b * g * np.ceil(seen / 256), s)
    per_block = 2.0 * d * seen * x["kv_bits"] / 8 / (s.dram / s.sms)
    more = (blocks, use, work, work_use, log2(per_block), log2(reused / s.l2))
    return Limits(np.full_like(b, FLOOR_US["attention_decode"]), compute, moved(0.0 * b, total, reused, s), more)


def active_experts(tokens: FloatArray, x: Shape) -> FloatArray:
    """Experts of one rank that get a token, if tokens choose evenly: E (1 - (1 - k / E)^tokens) / ranks."""
    experts = x["experts"]
    miss = np.log1p(-np.minimum(x["topk"] / experts, 1.0 - 1e-9))
    return experts / x["ep"] * -np.expm1(tokens * miss)


def _moe(x: Shape, s: Specs) -> Limits:
    tokens, hidden, inter = x["tokens"], x["hidden"], x["inter"] / x["tp"]
    active = np.maximum(active_experts(tokens, x), np.minimum(1.0, tokens))
    pairs = np.maximum(tokens * x["topk"] / x["ep"], active)
    per_expert = pairs / active
    weights = active * 3.0 * hidden * inter * x["w_bits"] / 8
    acts = pairs * (2.0 * hidden + 4.0 * inter) * 2.0
    tile = np.where(per_expert <= 16, 16.0, np.where(per_expert <= 32, 32.0, 64.0))
    padded = active * np.ceil(per_expert / tile) * tile
    compute = 6.0 * padded * hidden * inter / rate(x["a_bits"], s)
    memory = moved(weights, acts, weights + acts, s)
    big, big_use = waves(padded / tile * np.ceil(2.0 * inter / 128), s)
    down, down_use = waves(padded / tile * np.ceil(hidden / 128), s)
    more = (big, big_use, down, down_use, log2(weights / s.l2), log2((weights + acts) / s.l2))
    return Limits(np.full_like(tokens, FLOOR_US["moe"]), compute, memory, more)


def _elementwise(x: Shape, s: Specs) -> Limits:
    elements = x["m"] * x["k"]
    total = 3.0 * elements
    compute = elements * 10.0 / (s.sms * s.clock_ghz * 1e3 * 128)
    blocks, use = waves(elements / 4096, s)
    rows, row_use = waves(x["m"], s)
    more = (blocks, use, rows, row_use, log2(total / s.l2), log2(x["k"]))
    return Limits(np.full_like(elements, FLOOR_US["elementwise"]), compute, moved(0.0 * total, total, total, s), more)


LIMITS: dict[str, Callable[[Shape, Specs], Limits]] = {
    "gemm": _gemm,
    "attention_prefill": _prefill,
    "attention_decode": _decode,
    "moe": _moe,
    "elementwise": _elementwise,
}

_RAW = {
    "gemm": ("m", "n", "k", "w_bits", "a_bits", "block"),
    "attention_prefill": ("batch", "seq_q", "heads", "kv_heads", "head_dim", "window", "q_bits", "kv_bits"),
    "attention_decode": ("batch", "seq_kv", "heads", "kv_heads", "head_dim", "window", "kv_bits"),
    "moe": ("tokens", "hidden", "inter", "topk", "experts", "tp", "ep", "skew", "w_bits", "a_bits", "block"),
    "elementwise": ("m", "k"),
}


def _plain(kind: str, x: Shape) -> list[FloatArray]:
    """The shape itself, as logarithms, and how its widths divide."""
    found = [log2(x[c] + 1.0) if c in ("window", "skew", "block") else log2(x[c]) for c in _RAW[kind]]
    if kind == "gemm":
        found += [x["m"] % 64, log2(x["m"] * x["n"]), log2(x["n"] * x["k"]), log2(x["m"] * x["n"] * x["k"])]
    elif kind == "moe":
        found += [log2(x["tokens"] * x["topk"] / x["experts"]), log2(x["inter"] / x["tp"])]
        found.append(log2(x["experts"] / x["ep"]))
    elif kind.startswith("attention"):
        found += [log2(x["heads"] / x["kv_heads"]), log2(x["batch"] * x["heads"])]
    else:
        found += [log2(x["m"] * x["k"])]
    return found


#: How the mechanisms add up when a captured time is scaled: exponent 1 is a plain sum, a large one the slowest alone.
EXPONENT = {"gemm": 1.0, "attention_prefill": 1.0, "attention_decode": 1.0, "moe": 2.0, "elementwise": 2.0}


def scaled(kind: str, here: Limits, there: Limits, s: Specs, captured: Specs, captured_us: FloatArray) -> FloatArray:
    """The captured time, mechanism by mechanism, on the GPU of each row, us.

    What floor, tensor rate and memory do not explain of the captured time is work inside the SMs: it scales with
    their number and clock. A time below their sum scales with the sum.
    """
    p = EXPONENT[kind]
    known, target = (((x.compute / 0.7) ** p + (x.memory / 0.8) ** p + x.floor**p) ** (1.0 / p) for x in (there, here))
    inside = np.maximum(captured_us**p - known**p, 0.0)
    slower = captured.sms * captured.clock_ghz / (s.sms * s.clock_ghz)
    above = (target**p + inside * slower**p) ** (1.0 / p)
    return np.where(captured_us < known, captured_us * target / known, above)


@dataclass(frozen=True)
class Known:
    """What is the same on every GPU: the shape's columns, and how the captured time lies to its own mechanisms."""

    plain: list[FloatArray]
    captured: Specs | None = None
    us: FloatArray | None = None
    there: Limits | None = None
    columns: tuple[FloatArray, ...] = ()


def known_side(kind: str, x: Shape, captured: Specs | None = None, captured_us: FloatArray | None = None) -> Known:
    """`captured` are the figures of the GPU where the time was measured."""
    plain = _plain(kind, x)
    if captured is None or captured_us is None:
        return Known(plain)
    there = LIMITS[kind]({c: v for c, v in x.items() if c != "launches"}, captured)
    columns = (
        log2(captured_us),
        log2(captured_us / there.prior),
        log2(captured_us / there.floor),
        log2(captured_us / np.maximum(there.compute, 0.01)),
        log2(captured_us / np.maximum(there.memory, 0.01)),
    )
    return Known(plain, captured, captured_us, there, columns)


def features(kind: str, x: Shape, s: Specs, known: Known) -> tuple[FloatArray, FloatArray]:
    """(base [row] us, features [row, feature]).

    base: the prior time, or with a captured time that time scaled by the two priors. A column "launches" of the shape
    says how many times the reference's kernels a GPU launches for the operation; it counts for the GPU of the row
    alone.
    """
    here = LIMITS[kind](x, s)
    prior = here.prior
    columns = [
        log2(here.compute / here.floor),
        log2(here.memory / here.floor),
        log2(here.compute / here.memory),
        log2(prior / here.floor),
        *here.more,
        *known.plain,
    ]
    base = prior
    if known.there is not None and known.us is not None and known.captured is not None:
        there = known.there
        base = scaled(kind, here, there, s, known.captured, known.us)
        columns += [
            *known.columns,
            log2(prior / there.prior),
            log2(base / known.us),
            log2(base / prior),
            *there.more[:4],
        ]
    return base, np.array(columns).T
