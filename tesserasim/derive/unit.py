"""One unit while it is written: kernels in launch order, buffers by name, accesses, and what decides each time.

Bytes of a kernel follow from its accesses; every site has one kernel. Activations get a buffer each (their names
carry the kernel that writes them, as in captured traces), weights and state keep their names over all units.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tesserasim.trace.model import Access, Buffer, Kernel

BF16 = 2
ROW = 4096.0  # elements of a row, as sites of traces are translated (tesserasim.costs.sites)


@dataclass(frozen=True, slots=True)
class Cost:
    """What decides one kernel's time: a measured kind of tesserasim.costs with its shape, or a formula of `times`.

    `share` of the operation's time is the kernel's, after what the operation holds besides (`without`) is taken off;
    `kernels` are what the operation takes here, those of `without` apart.
    """

    kind: str  # gemm | attention_prefill | attention_decode | moe | elementwise | mxfp4 | analytic | collective
    columns: tuple[tuple[str, float], ...]
    share: float = 1.0
    without: tuple[Cost, ...] = ()
    kernels: int = 1


def cost(kind: str, without: tuple[Cost, ...] = (), kernels: int = 1, **columns: float) -> Cost:
    """A cost with its columns in a fixed order, so that equal ones are equal."""
    return Cost(kind, tuple(sorted((k, float(v)) for k, v in columns.items())), 1.0, without, kernels)


def bytes_cost(nbytes: float) -> Cost:
    """An elementwise kernel of as many bytes: the benchmark moves three per element."""
    elements = max(nbytes / 3.0, 1.0)
    row = min(ROW, elements)
    return cost("elementwise", m=elements / row, k=row)


@dataclass
class Unit:
    """Collects kernels and buffers. `point` is what the trace says of the unit: name, phase, batch, tokens, context."""

    phase: str
    batch: int
    tokens: int
    context: int
    buffers: dict[str, Buffer] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    _ops: dict[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    def buffer(self, name: str, nbytes: int, role: str, per_token: int = 0, per_sequence: int = 0) -> str:
        if name not in self.buffers:
            n = len(self.buffers)
            self.buffers[name] = Buffer(
                n, name, nbytes, role, n, 0, bytes_per_token=per_token, bytes_per_sequence=per_sequence
            )
        return name

    def weight(self, name: str, nbytes: int) -> str:
        return self.buffer(name, nbytes, "weight")

    def state(self, name: str, per_token: int) -> str:
        """A part of the cache of all sequences at the unit's context."""
        return self.buffer(name, self.batch * self.context * per_token, "state", per_token)

    def kernel(
        self, module: str, op: str, kind: str, part: str, *, reads: Sequence[str] = (), out: int = 0,
        some: Mapping[str, int] | None = None, appends: Mapping[str, int] | None = None, flops: int = 0,
        shape: Mapping[str, int] | None = None, what: Cost | None = None, dtypes: tuple[str, str] = ("", "bf16"),
        role: str = "activation", name: str = "",
    ) -> str:  # fmt: skip
        """Append one kernel; the name of the buffer of `out` bytes that it writes whole ("" if out is 0).

        `some`: bytes read of buffers that are not read whole. `appends`: bytes written of state that lives on.
        """
        number, partly = len(self.kernels), some or {}
        read_names = [*reads, *(n for n in partly if n not in reads)]
        access = [self._access(n, "R", partly.get(n)) for n in read_names]
        access += [self._access(n, "W", nbytes) for n, nbytes in (appends or {}).items()]
        made = ""
        if out:
            made = self.buffer(name or f"{module}@{number}:out", out, role)
            access.append(self._access(made, "W", None))
        read = sum(partly.get(n, self.buffers[n].nbytes) for n in read_names)
        written = sum(a.nbytes for a in access if a.writes)
        key = f"{module}/{op}"
        ordinal = self._ops[key] = self._ops.get(key, -1) + 1
        self.costs.append(what or bytes_cost(read + written))
        self.kernels.append(
            Kernel(
                number, f"derived_{op}", f"{key}#{ordinal}", kind, op, module, self.phase, part, 7,
                weight_dtype=dtypes[0], act_dtype=dtypes[1], shape=dict(shape or {}), flops=flops,
                read_bytes=read, write_bytes=written, accesses=tuple(access),
            )
        )  # fmt: skip
        return made

    def _access(self, name: str, mode: str, nbytes: int | None) -> Access:
        b = self.buffers[name]
        if mode == "R" and nbytes is not None and b.role == "weight":  # which rows is decided by the data
            return Access(b.id, mode, 0, b.nbytes, "superset", False, "schema")
        whole = nbytes is None
        covers = mode == "W" and whole and b.role != "state"
        return Access(b.id, mode, 0, b.nbytes if nbytes is None else nbytes, "exact", covers, "schema")

    def used_buffers(self) -> tuple[Buffer, ...]:
        """All buffers with their first and last use."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for k in self.kernels:
            for a in k.accesses:
                first.setdefault(a.buffer, k.id)
                last[a.buffer] = k.id
        return tuple(
            dataclasses.replace(b, first_use=first.get(b.id, -1), last_use=last.get(b.id, -1))
            for b in self.buffers.values()
        )
