"""Workloads made by hand for the tests of planner, policies, metrics and evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tesserasim.cluster.model import Cluster, Device, GpuSpec, Link, Price
from tesserasim.trace.mix import Mix
from tesserasim.workload import Flow, Resident, SiteRef, Workload

GB = 1_000_000_000


def gpu(name: str, memory_gb: float = 80.0) -> GpuSpec:
    return GpuSpec(
        name, (), "test", "9.0", 132, 1700, 800.0, None, int(memory_gb * GB), 2000.0, 50_000_000, 350.0
    )


def cluster(
    names: Sequence[str], gbps: float = 200.0, latency_us: float = 5.0, memory_gb: float | Sequence[float] = 80.0
) -> Cluster:
    memory = [memory_gb] * len(names) if isinstance(memory_gb, int | float) else list(memory_gb)
    seen: dict[str, int] = {}
    devices = []
    for name, m in zip(names, memory, strict=True):
        k = seen.get(name, 0)
        seen[name] = k + 1
        devices.append(Device(name if list(names).count(name) == 1 else f"{name}#{k}", gpu(name, m)))
    links = [
        Link(devices[i].id, devices[j].id, gbps, latency_us)
        for i in range(len(devices)) for j in range(i + 1, len(devices))
    ]  # fmt: skip
    prices = {n: Price(2.0 / (i + 1), 1.0, 3.0, "2026-01", "test") for i, n in enumerate(dict.fromkeys(names))}
    return Cluster("+".join(names) + f"@{gbps:g}Gbps", tuple(devices), tuple(links), prices)


def llm(prefill_batch: int = 1, input_tokens: int = 1024, output_tokens: int = 256) -> Mix:
    return Mix("llm-test", "test", "llm", {}, input_tokens, output_tokens, prefill_batch)


def image(steps: int = 28) -> Mix:
    return Mix("image-test", "test", "image", {}, stages=(("denoise", steps),))


def chain(
    times: Sequence[Sequence[float]], where: Cluster, nbytes: float | Sequence[float] = 0.0, batch: int = 1,
    mix: Mix | None = None, gaps: float = 0.0, launch: float = 0.0, state_bytes: int = 0, weight_bytes: int = 0,
    groups: Sequence[int] | None = None, units: Sequence[tuple[str, int]] = (("denoise", 1),),
) -> Workload:  # fmt: skip
    """A chain of sites, each reading what the one before wrote; `times` [site][device] in ns per cohort.

    `units` (name, launches) share the sites in equal parts.
    """
    n = len(times)
    size = [nbytes] * (n - 1) if isinstance(nbytes, int | float) else list(nbytes)
    sites = tuple(
        SiteRef(units[i * len(units) // n][0], f"s{i}", "other", "gemm", groups[i] if groups else -1)
        for i in range(n)
    )
    flows = tuple(Flow(i, (i + 1,), size[i], 1.0, f"f{i}") for i in range(n - 1))
    residents = tuple(Resident(f"w{i}", weight_bytes, (i,)) for i in range(n)) if weight_bytes else ()
    if state_bytes:
        residents += tuple(Resident(f"kv{i}", state_bytes, (i,), True) for i in range(n))
    return make(
        mix or image(1), where, batch, sites, np.array(times, float), np.full(n, gaps), launch, tuple(units),
        tuple((u, launch) for u, _ in units), flows, residents, 0,
    )  # fmt: skip


def make(*fields: object) -> Workload:
    """A Workload from its first fields in order; error fields, where the contract has them, are 3 % and 2 %."""
    names = list(Workload.__dataclass_fields__)
    values = dict(zip(names, fields, strict=False))
    time = values["time_ns"]
    assert isinstance(time, np.ndarray)
    for key, sigma in (("sigma_systematic", 0.03), ("sigma_site", 0.02)):
        if key in names and key not in values:
            values[key] = np.full(time.shape, sigma)
    return Workload(**values)  # type: ignore[arg-type]


LAYER = (
    # name, part, kind, k, n, elements
    ("norm1", "attention", "norm", 0, 0, 4096), ("qkv", "attention", "gemm", 4096, 6144, 0),
    ("rope", "attention", "elementwise", 0, 0, 4096), ("kvwrite", "attention", "elementwise", 0, 0, 1024),
    ("attn", "attention", "attention", 0, 0, 0), ("combine", "attention", "attention", 0, 0, 4096),
    ("o", "attention", "gemm", 4096, 4096, 0), ("add1", "attention", "elementwise", 0, 0, 4096),
    ("norm2", "ffn", "norm", 0, 0, 4096), ("gate_up", "ffn", "gemm", 4096, 28672, 0),
    ("act", "ffn", "elementwise", 0, 0, 14336), ("down", "ffn", "gemm", 14336, 4096, 0),
    ("add2", "ffn", "elementwise", 0, 0, 4096),
)  # fmt: skip
WIDTH = (4096, 6144, 6144, 1024, 4096, 4096, 4096, 4096, 4096, 28672, 14336, 4096, 4096)
TOKENS, STEPS, KV = 1024, 255, 1024


def llama(
    where: Cluster, batch: int, speeds: Sequence[tuple[float, float]], layers: int = 32, seed: int = 1
) -> Workload:
    """Llama-3-8B-like: `speeds` [(TFLOP/s, TB/s)] per device; prefill 1024 one by one, 255 decode steps.

    Times are max(flops / rate, bytes / bandwidth) + 3 us, with 2 % seeded noise; 26 sites a layer.
    """
    rng = np.random.default_rng(seed)
    sites: list[SiteRef] = []
    times: list[list[float]] = []
    flows: list[Flow] = []
    residents: dict[str, tuple[int, list[int], bool]] = {}
    launches = {"prefill": batch, "decode": STEPS}
    for unit, count in launches.items():
        rows = TOKENS if unit == "prefill" else batch

        def out(i: int, readers: tuple[int, ...], width: int, rows: int = rows, count: int = count) -> None:
            flows.append(Flow(i, readers, 2.0 * rows * width * count, count, f"f{len(flows)}"))

        for layer in range(layers):
            first = len(sites)
            for name, part, kind, k, n, elements in LAYER:
                flops, nbytes = 2 * rows * k * n, 2 * k * n + 4 * rows * elements
                if name == "attn":
                    flops = 2 * rows * 4096 * TOKENS if unit == "prefill" else 4 * rows * 4096 * (TOKENS + 128)
                    nbytes = 4 * KV * (TOKENS if unit == "prefill" else (TOKENS + 128) * batch)
                if k:
                    residents.setdefault(f"w{layer}.{name}", (2 * k * n, [], False))[1].append(len(sites))
                noise = rng.uniform(0.98, 1.02, len(speeds))
                times.append([
                    (max(flops / (tf * 1e3), nbytes / (tb * 1e3)) + 3000.0) * count * e
                    for (tf, tb), e in zip(speeds, noise, strict=True)
                ])  # fmt: skip
                kind = f"{kind}_{unit}" if kind == "attention" else kind
                sites.append(SiteRef(unit, f"layers.{layer}.{name}", part, kind))
            for i in range(12):
                out(first + i, (first + i + 1,), WIDTH[i])
            if layer:
                out(first - 1, (first, first + 7), 4096)
            out(first + 7, (first + 12,), 4096)
            if unit == "decode":
                write = first + 3
                before = first - 13 * layers + 3
                flows.append(Flow(before, (first + 4,), 4.0 * KV * TOKENS * batch, batch, f"kv{layer}", True))
                flows.append(Flow(write, (first + 4,), 4.0 * KV * batch * STEPS, STEPS, f"new{layer}", True))
            residents.setdefault(f"kv{layer}", (4 * KV * (TOKENS + 256), [], True))[1].append(first + 4)
    return make(
        llm(), where, batch, tuple(sites), np.array(times), np.full(len(sites), 500.0 * STEPS), STEPS * 10_000.0,
        tuple(launches.items()), (("prefill", 10_000.0), ("decode", 10_000.0)), tuple(flows),
        tuple(Resident(n, b, tuple(s), st) for n, (b, s, st) in residents.items()), 500_000_000,
    )  # fmt: skip
