"""Small models of every kind with the units that are split in tests, recorded once each."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hw.replay.aten import Arena, differing, new_values, poison, typed
from hw.replay.aten_record import Recorded, eager, record_unit
from hw.replay.cut import Move
from hw.workloads.base import UnitSpec
from hw.workloads.gpt_oss import GptOss, GptOssConfig
from hw.workloads.llama import Llama, LlamaConfig
from hw.workloads.mamba2 import Mamba2, Mamba2Config
from hw.workloads.qwen_vl import QwenVL, QwenVLConfig
from hw.workloads.sd3 import Sd3Config, StableDiffusion3
from hw.workloads.sd3_encoders import ClipConfig, Sd3Encoders, T5Config, VaeConfig
from tesserasim.plans import Lane, Plan, read_plan, write_plan

NAMES = ("a", "b", "c")


def _llama(device: str) -> Any:
    cfg = LlamaConfig(layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64)
    return Llama(device, cfg, compiled=False)


def _gpt_oss(device: str) -> Any:
    cfg = GptOssConfig(
        layers=2, hidden=64, heads=8, kv_heads=2, head_dim=16, window=6, experts=4, top_k=2, ffn=64, vocab=320
    )
    return GptOss(device, cfg, compiled=False)


def _mamba2(device: str) -> Any:
    cfg = Mamba2Config(layers=3, hidden=64, heads=8, head_dim=16, state=16, groups=2, conv=4, vocab=64)
    return Mamba2(device, cfg, compiled=False)


def _qwen(device: str) -> Any:
    cfg = QwenVLConfig(
        layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=48, vocab=64, sections=(2, 3, 3), vision_layers=3,
        vision_hidden=32, vision_heads=2, vision_ffn=40, full_layers=(1,), patch=2, side=5, image_at=3,
    )  # fmt: skip
    return QwenVL(device, cfg, compiled=False)


def _sd3(device: str) -> Any:
    cfg = Sd3Config(
        layers=3, dual_layers=2, width=64, heads=4, mlp=96, latent=8, text_tokens=7, text_width=48, pooled=32
    )
    return StableDiffusion3(device, cfg, compiled=False)


def _encoders(device: str) -> Any:
    left, right = ClipConfig(2, 32, 2, True, 50, 9), ClipConfig(2, 48, 3, False, 50, 9)
    t5 = T5Config(layers=2, width=96, heads=2, head_dim=16, ffn=64, vocab=50, tokens=40)
    return Sd3Encoders(device, left, right, t5, VaeConfig(widths=(64, 64, 32), blocks=1), latent=8, compiled=False)


MODELS: dict[str, Callable[[str], Any]] = {
    "llama": _llama, "gpt-oss": _gpt_oss, "mamba2": _mamba2, "qwen": _qwen, "sd3": _sd3, "encoders": _encoders,
}  # fmt: skip

PREFILL, DECODE = UnitSpec("prefill", "prefill", 2, 11, 11), UnitSpec("decode", "decode", 3, 1, 13)
CHUNK = UnitSpec("prefill", "prefill", 1, 5, 12)
UNITS: dict[str, tuple[UnitSpec, ...]] = {
    "llama": (PREFILL, DECODE, CHUNK), "gpt-oss": (PREFILL, DECODE), "mamba2": (PREFILL, DECODE, CHUNK),
    "qwen": (UnitSpec("prefill", "prefill", 1, 30, 30), DECODE, UnitSpec("encode", "encode", 1)),
    "sd3": (UnitSpec("denoise", "denoise", 1),),
    "encoders": (UnitSpec("encode-text", "encode", 1), UnitSpec("vae-decode", "other", 1)),
}  # fmt: skip
CASES = [(model, i) for model, units in UNITS.items() for i in range(len(units))]


@functools.cache
def recorded(model: str, i: int, device: str = "cpu") -> Recorded:
    """Unit i of a model, with the constants of its initialisation disturbed; in float32 on CPUs where its state can
    be."""
    workload = MODELS[model](device)
    generator = torch.Generator(device).manual_seed(1)
    for name, w in workload.weights.items():
        if w.is_floating_point():
            noise = 0.2 * torch.randn(w.shape, generator=generator, device=device)
            kind = w.dtype if model in ("llama", "sd3") or device != "cpu" else torch.float32
            workload.weights[name] = (w + noise if w.dim() == 1 and "a_log" not in name else w).to(kind)
    return record_unit(workload, UNITS[model][i])


@functools.cache
def arenas(model: str, i: int) -> dict[str, Arena]:
    return {n: Arena(recorded(model, i), n, torch.device("cpu")) for n in NAMES}


def random_plan(
    path: Path, unit: str, sites: tuple[str, ...], names: tuple[str, ...], switches: int, seed: int
) -> Lane:
    """The lane of a plan file that changes its device `switches` times along the sites."""
    rng = random.Random(seed)
    changes = set(rng.sample(range(1, len(sites)), switches))
    now, placed = rng.choice(names), {}
    for i, site in enumerate(sites):
        if i in changes:
            now = rng.choice([n for n in names if n != now])
        placed[site] = now
    lane = Lane("random", 1, 1, {unit: placed})
    write_plan(Plan("tiny", "+".join(names), "random", (lane,), switches=switches), path)
    return read_plan(path).lanes[0]


def never_used(r: Recorded, arena: Arena, move: Move, seed: int) -> bool:
    """Whether poison in the bytes of a move, from its first reader on, changes nothing on one device alone.

    Then no transfer is needed for the value: a query behind the last position that is sampled, say.
    """
    done = []
    for spoil in (False, True):
        arena.fill(seed, new_values(r, seed))
        with eager():
            for i, op in enumerate(r.ops):
                if spoil and i == move.before:
                    memory = arena.memory[move.buffer]
                    other = torch.empty_like(memory)
                    poison(other, r.homes[move.buffer], 99)
                    memory[move.start : move.end] = other[move.start : move.end]
                arena.run(op)
        done.append([typed(arena.memory[v.storage], v).clone() for _, v, _ in r.results])
    return not differing(r, *done)
