"""Names of sites: the same for one piece of the model at every batch, length and attention backend."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence


def stable_op(op: str, alone: Collection[str]) -> str:
    """Name of a fused kernel without what it does not compute.

    Inductor names a kernel after the operators that it came from. Among them are operators that have a launch of
    their own (`alone`: GEMMs, attention, the model's own), if the kernel writes their input in the layout that they
    want, and the last view, which moves nothing: both come and go with batch and backend.
    """
    if not op.startswith("fused"):
        return op
    for other in sorted(alone, key=len, reverse=True):
        op = re.sub(rf"_{re.escape(other)}(?=_|$)", "", op)
    return re.sub(r"(?<!_unsafe)_view$", "", op)


def site_names(calls: Sequence[tuple[str, str]], leaves: Sequence[str], alone: Collection[str]) -> list[str]:
    """module/op[.weight]#ordinal per call (module, op), the ordinal counted within (module, op)."""
    seen: Counter[str] = Counter()
    names = []
    for (module, op), leaf in zip(calls, leaves, strict=True):
        base = f"{module or 'unit'}/{stable_op(op, alone)}" + (f".{leaf}" if leaf else "")
        names.append(f"{base}#{seen[base]}")
        seen[base] += 1
    return names
