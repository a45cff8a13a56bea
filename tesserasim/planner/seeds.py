"""Placements that anyone would try first: the planner starts from them and is never worse than the best.

single (all on one device), whole units (prefill here, decode there, and every other way), af (attention here,
the rest there) and layer-contiguous splits (the first layers here, the rest there). Every seed respects the
groups.
"""

from __future__ import annotations

import re
from itertools import permutations

import numpy as np

from tesserasim.metrics.predict import ClosedForm, IntArray
from tesserasim.workload import Workload

#: With more devices than this, pairs of them and whole units over them are too many to try.
ALL_PAIRS = 8
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h|block|transformer_blocks)\.(\d+)(?:\.|$|/)")


def pd_vector(workload: Workload, prefill: int, decode: int) -> IntArray | None:
    """Every decode site on one device, prefill and what goes before it on another; None without both units."""
    units = {u for u, _ in workload.unit_launches}
    if not {"prefill", "decode"} <= units:
        return None
    return np.array([decode if s.unit == "decode" else prefill for s in workload.sites], dtype=np.int64)


def af_vector(workload: Workload, attention: int, rest: int) -> IntArray | None:
    """The attention part on one device, the rest on another; None if the model is not told apart so."""
    parts = {s.part for s in workload.sites}
    if not {"attention", "ffn"} <= parts:
        return None
    return np.array([attention if s.part == "attention" else rest for s in workload.sites], dtype=np.int64)


def respects_groups(workload: Workload, x: IntArray) -> bool:
    """All sites of a group on one device."""
    seen: dict[int, int] = {}
    return all(s.group < 0 or seen.setdefault(s.group, int(d)) == d for s, d in zip(workload.sites, x, strict=True))


def layer_of(workload: Workload) -> IntArray:
    """[site] -> layer number; what comes before or after the layers joins the first or the last.

    Without layers in the names, position within the unit in 32 equal parts stands for them.
    """
    found = [(_LAYER.search(s.name)) for s in workload.sites]
    layers = [int(m.group(1)) if m else -1 for m in found]
    last = max(layers)
    result = np.zeros(len(layers), dtype=np.int64)
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for s in workload.sites:
        sizes[s.unit] = sizes.get(s.unit, 0) + 1
    current: dict[str, int] = {}
    for i, s in enumerate(workload.sites):
        k = counts.get(s.unit, 0)
        counts[s.unit] = k + 1
        if last < 1:
            result[i] = 32 * k // sizes[s.unit]
        else:
            seen = current.get(s.unit, 0)
            tail = seen == last and layers[i] < 0
            result[i] = layers[i] if layers[i] >= 0 else (last if tail else seen)
            current[s.unit] = int(result[i])
    return result


def contiguous(form: ClosedForm, order: tuple[int, ...]) -> list[IntArray]:
    """Layers in contiguous pieces over the devices of `order`: all two-way cuts, or the balanced one."""
    layer = layer_of(form.workload)
    top = int(layer.max())
    if len(order) == 2:
        return [np.where(layer < k, order[0], order[1]).astype(np.int64) for k in range(1, top + 1)]
    time = np.zeros((top + 1, form.n_devices))
    np.add.at(time, layer, form.workload.time_ns)
    speed = 1.0 / time.sum(axis=0)[list(order)]
    ends = np.cumsum(speed / speed.sum()) * (top + 1)
    piece = np.minimum(np.searchsorted(ends, layer + 0.5), len(order) - 1)
    return [np.array(order, dtype=np.int64)[piece]]


def _few(form: ClosedForm) -> list[tuple[str, IntArray]]:
    """For many devices: one of each GPU type alone, and the layers over all, fastest type first."""
    w, n = form.workload, form.n_devices
    total = np.asarray(w.time_ns).sum(axis=0)
    order = tuple(sorted(range(n), key=lambda d: (float(total[d]), d)))
    first = {w.devices[d].split("#")[0]: d for d in reversed(range(n))}
    found = [(f"single on {w.devices[d]}", np.full(form.n_sites, d, dtype=np.int64)) for d in sorted(first.values())]
    found += [("layers over all", x) for x in contiguous(form, order)]
    return [(name, x) for name, x in found if respects_groups(w, x)]


def seeds(form: ClosedForm) -> list[tuple[str, IntArray]]:
    """(name, placement) of every seed, in a fixed order."""
    w, n = form.workload, form.n_devices
    if n > ALL_PAIRS:
        return _few(form)
    found: list[tuple[str, IntArray]] = [
        (f"single on {w.devices[d]}", np.full(form.n_sites, d, dtype=np.int64)) for d in range(n)
    ]
    found += [("whole units", x) for x in form.whole_units() if len(set(x.tolist())) > 1]
    for a, b in permutations(range(n), 2):
        x = af_vector(w, a, b)
        if x is not None:
            found.append((f"af {w.devices[a]}, {w.devices[b]}", x))
        found += [(f"layers {w.devices[a]}, {w.devices[b]}", x) for x in contiguous(form, (a, b))]
    if n > 2:
        found += [("layers over all", x) for x in contiguous(form, tuple(range(n)))]
    return [(name, x) for name, x in found if respects_groups(w, x)]
