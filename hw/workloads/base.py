"""What a workload offers to the capture: named tensors and nullary step functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

#: Opens a named part of the model during capture ("layers.3"); a no-op while nothing records.
Scope = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class UnitSpec:
    """One point of a unit's grid: what becomes one trace file."""

    name: str  # prefill | decode | denoise | encode | ...
    phase: str
    batch: int
    tokens: int = 1  # new tokens per sequence
    context: int = 0  # KV length at the end, new tokens included
    extra: Mapping[str, Any] | None = None

    @property
    def file_stem(self) -> str:
        if self.name == "prefill":
            past = f"-c{self.context}" if self.context > self.tokens else ""
            return f"prefill-b{self.batch}-t{self.tokens}{past}"
        if self.name == "decode":
            return f"decode-b{self.batch}-c{self.context}"
        return f"{self.name}-b{self.batch}"

    def as_dict(self) -> dict[str, Any]:
        point = {"name": self.name, "phase": self.phase, "batch": self.batch, "tokens": self.tokens}
        return {**point, "context": self.context, **(self.extra or {})}


def prefill_grid(
    tokens: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192), past: Sequence[int] = (4096, 16384)
) -> list[UnitSpec]:
    """Whole prompts of one sequence, then a chunk of 2048 tokens on each past."""
    whole = [UnitSpec("prefill", "prefill", 1, t, t) for t in tokens]
    return whole + [UnitSpec("prefill", "prefill", 1, 2048, 2048 + p) for p in past]


def decode_grid(
    fits: Callable[[int, int], bool], batches: Sequence[int] = (1, 8, 32, 128, 256),
    contexts: Sequence[int] = (512, 2048, 8192),
) -> list[UnitSpec]:  # fmt: skip
    """Decode steps at every (batch, context) whose state fits beside the weights."""
    return [UnitSpec("decode", "decode", b, 1, c) for c in contexts for b in batches if fits(b, c)]


@dataclass(frozen=True)
class NamedTensor:
    """A tensor whose storage has a name of its own in every unit: a weight, state, or an input."""

    name: str
    tensor: torch.Tensor
    role: str  # weight | state | input | output
    bytes_per_token: int = 0
    bytes_per_sequence: int = 0


@dataclass(frozen=True)
class Work:
    """What one call of a workload's own operator does, where its tensors alone do not tell."""

    kind: str  # kernel kind of the trace: "moe", "ssm_scan", "attention_decode", ...
    flops: int  # multiply-adds count 2
    shape: Mapping[str, int]
    weight_share: float = 1.0  # share of the weight bytes it is given that it reads (experts that are chosen)


class Workload(ABC):
    """A model and its grid. `step` must be capturable: no host synchronisation, static addresses."""

    name: str
    model: str
    weight_dtype = "bf16"
    act_dtype = "bf16"
    #: Names of inputs and state that hold token numbers: any number below the largest is as good.
    token_inputs: tuple[str, ...] = ("prompt", "next_token", "clip_tokens", "t5_tokens")
    scope: Scope = staticmethod(lambda _name: nullcontext())

    def __init__(self, device: str) -> None:
        self.device = device

    @abstractmethod
    def units(self) -> Sequence[UnitSpec]:
        """The whole grid, cheapest first."""

    @abstractmethod
    def prepare(self, unit: UnitSpec) -> Callable[[], Any]:
        """Allocate the unit's inputs and state; return the step to capture. Frees the former unit's."""

    @abstractmethod
    def named_tensors(self) -> Iterable[NamedTensor]:
        """Weights, and the state and inputs of the unit prepared last."""

    def moe_statistics(self) -> dict[str, Any] | None:
        """How the unit prepared last routed its tokens; None for a model without experts."""
        return None

    def work_of(
        self, op: str, shapes: Mapping[str, tuple[int, ...]], scalars: Mapping[str, Any], module: str
    ) -> Work | None:
        """What a call of one of the model's own operators does; None for an operator of PyTorch.

        `shapes`: of its tensors by argument name, results as `result0`, `result1`, ...; `scalars`: its other
        arguments; `module`: where in the model it was called.
        """
        return None

    @abstractmethod
    def weights_of(self, module: str) -> str:
        """The part ('attention', 'ffn', 'embed', 'head', 'other') a weight's module path belongs to."""


def functions(compiled: bool, **parts: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The parts of a model, each compiled as a whole for every static shape it meets."""
    if not compiled:
        return parts
    allow_recompiles()
    return {k: torch.compile(f, fullgraph=True, dynamic=False) for k, f in parts.items()}


def under(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of one module, by their names inside it."""
    return {k[len(prefix) + 1 :]: v for k, v in tensors.items() if k.startswith(prefix + ".")}


def allow_recompiles() -> None:
    """Every point of a grid is compiled for its own static shapes; the default limit of 8 is for accidents."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = 4096
    dynamo.accumulated_recompile_limit = 65536
