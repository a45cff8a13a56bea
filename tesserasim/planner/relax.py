"""A small linear relaxation of placement: the bound that plans are held against, and where to look for them.

    min T
    sum_p x[b, p] = 1                                     0 <= x <= 1
    sum_b t[b, p] x[b, p] <= n_p T                        devices of a pool
    sum_f time(f, into p) y[f, p] <= links_p T            link directions into a pool
    sum t x + fixed + sum wait(f, into p) y <= depth * T  a cohort's latency over the (effective) depth
    y[f, p] >= x[reader, p] - x[writer, p]                a value must come to where it is read
    z[r, p] >= x[b, p],  sum_r bytes(r) z[r, p] <= n_p room_p

A *pool* is a set of n_p devices that may be exchanged: equal GPUs with equal links. Any placement gives a solution
with no larger T (x: the block is on a device of the pool), since transfers inside a pool are left out, and a transfer
into a pool counts by the fastest link and the least latency into it: so the optimum is a bound. Against the
integer program (milp.py), which knows for every transfer where it comes from, it has one variable per flow and pool
in place of one per flow and pair of devices; where all links into a device are alike both have the same optimum on
everything that was tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from tesserasim.metrics.memory import usable_bytes
from tesserasim.metrics.predict import ClosedForm, IntArray
from tesserasim.planner.milp import TOLERANCE, Rows, alike, fixed_ns
from tesserasim.workload import FloatArray


def pools(form: ClosedForm) -> IntArray:
    """[device] -> pool, numbered 0, 1, ... by first device."""
    pool = np.full(form.n_devices, -1, dtype=np.int64)
    for k in range(form.n_devices):
        same = next((j for j in range(k) if alike(form, j, k)), None)
        pool[k] = pool[same] if same is not None else pool.max() + 1
    return pool


@dataclass(frozen=True)
class Relaxed:
    """The optimum: a bound on the period, and how much of every block goes to every pool."""

    bound_ns: float  # inf: nothing fits
    share: FloatArray | None  # [block, pool]; None if nothing fits


class Relaxation:
    """The program of one (workload, depth) over blocks (milp.contract) and pools."""

    def __init__(
        self, form: ClosedForm, depth: int, block: IntArray, scale_ns: float, latency_limit_ns: float | None = None
    ) -> None:
        self.form, self.depth, self.block, self.scale, self.limit = form, depth, block, scale_ns, latency_limit_ns
        self.pool = pools(form)
        self.n_pools = int(self.pool.max()) + 1
        self.count = np.bincount(self.pool).astype(float)
        self.first = [int(np.flatnonzero(self.pool == p)[0]) for p in range(self.n_pools)]
        self.n_blocks = int(block.max()) + 1
        self.time = np.zeros((self.n_blocks, self.n_pools))
        np.add.at(self.time, block, form.workload.time_ns[:, self.first] / scale_ns)

    @cached_property
    def flows(self) -> tuple[IntArray, FloatArray, IntArray, IntArray]:
        """(writer block [flow], [bytes, exposed bytes, exposed count] per flow, flow and block of every reading);
        flows with equal blocks are one, those inside a block are none."""
        form, block = self.form, self.block
        merged: dict[tuple[int, tuple[int, ...]], FloatArray] = {}
        totals = np.stack([form.flow_bytes, form.flow_bytes * form.exposed, form.flow_count * form.exposed], axis=1)
        for i, f in enumerate(form.workload.flows):
            w = int(block[f.writer])
            readers = tuple(sorted({int(block[r]) for r in f.readers} - {w}))
            if readers:
                key = (w, readers)
                merged[key] = merged[key] + totals[i] if key in merged else totals[i]
        writer = np.array([w for w, _ in merged], dtype=np.int64)
        flow = np.repeat(np.arange(len(merged)), [len(r) for _, r in merged]).astype(np.int64)
        reader = np.array([b for _, readers in merged for b in readers], dtype=np.int64)
        return writer, np.array(list(merged.values())).reshape(-1, 3), flow, reader

    def _into(self) -> list[tuple[float, float, float]]:
        """Per pool (ns per byte, latency, link directions) of the best ways in from elsewhere; no way: inf."""
        found = []
        for p in range(self.n_pools):
            inside, outside = np.flatnonzero(self.pool == p), np.flatnonzero(self.pool != p)
            linked = self.form.linked[np.ix_(outside, inside)]
            if not linked.any():
                found.append((np.inf, 0.0, 0.0))
                continue
            rate, late = (m[np.ix_(outside, inside)][linked] for m in (self.form.rate, self.form.latency))
            found.append((1.0 / float(rate.max()), float(late.min()), float(linked.sum())))
        return found

    def solve(self) -> Relaxed:
        """HiGHS on the relaxation."""
        rows, columns, upper = self._rows()
        cost = np.zeros(columns + 1)
        cost[-1] = 1.0
        entries = np.concatenate(rows.val), (np.concatenate(rows.row), np.concatenate(rows.col))
        matrix = coo_array(entries, shape=(rows.n, columns + 1)).tocsr()
        run: Any = milp
        found = run(
            cost, integrality=np.zeros(columns + 1), bounds=Bounds(np.zeros(columns + 1), upper),
            constraints=LinearConstraint(matrix, np.concatenate(rows.lo), np.concatenate(rows.hi)),
        )  # fmt: skip
        if found.status == 2:
            return Relaxed(np.inf, None)
        if found.x is None:
            return Relaxed(0.0, None)
        share = found.x[: self.n_blocks * self.n_pools].reshape(self.n_blocks, self.n_pools)
        return Relaxed(max(0.0, float(found.fun) * self.scale * (1 - TOLERANCE)), share)

    def _rows(self) -> tuple[Rows, int, FloatArray]:
        """(rows, columns but T, upper limits of all columns)."""
        n, d, rows = self.n_blocks, self.n_pools, Rows()
        blocks = np.arange(n, dtype=np.int64)
        writer, totals, flow, reader = self.flows
        index = np.arange(len(writer), dtype=np.int64)
        y0 = n * d
        z0 = y0 + len(writer) * d
        residents, tight = self._residents()
        end = z0 + len(residents) * len(tight)
        upper = np.ones(end + 1)
        upper[-1] = np.inf
        last = np.array([end])
        rows.many([blocks * d + p for p in range(d)], [1.0] * d, 1.0, 1.0)
        cols, vals = [np.arange(n * d, dtype=np.int64)], [self.time.ravel()]
        for p, (per_byte, late, directions) in enumerate(self._into()):
            x, y = blocks * d + p, y0 + index * d + p
            rows.one([x, last], [self.time[:, p], np.array([-self.count[p]])], -np.inf, 0.0)
            if not len(writer):
                continue
            if not np.isfinite(per_byte):
                upper[y] = 0.0
                per_byte = 0.0
            else:
                rows.one([y, last], [totals[:, 0] * per_byte / self.scale, np.array([-directions])], -np.inf, 0.0)
            cols.append(y)
            vals.append((totals[:, 1] * per_byte + totals[:, 2] * late) / self.scale)
            rows.many([y0 + flow * d + p, reader * d + p, writer[flow] * d + p], [1.0, -1.0, 1.0], 0.0, np.inf)
        fixed = fixed_ns(self.form) / self.scale
        rows.one([*cols, last], [*vals, np.array([-self.form.effective_depth(self.depth)])], -np.inf, -fixed)
        if self.limit is not None:
            rows.one(cols, vals, -np.inf, self.limit / self.scale - fixed)
        self._memory(rows, z0, residents, tight)
        return rows, end, upper

    def _residents(self) -> tuple[list[tuple[tuple[int, ...], float]], list[tuple[int, float]]]:
        """((blocks, bytes) of what must lie where it is used, (pool, bytes of room) of pools where not all fits)."""
        w = self.form.workload
        merged: dict[tuple[int, ...], float] = {}
        for r in w.residents:
            key = tuple(sorted({int(self.block[i]) for i in r.sites}))
            merged[key] = merged.get(key, 0.0) + r.nbytes * (w.batch * self.depth if r.state else 1)
        everything = sum(merged.values())
        room = (usable_bytes(w) - w.workspace_bytes * self.depth)[self.first]
        tight = [(p, float(room[p] * self.count[p])) for p in range(self.n_pools) if everything > room[p]]
        return list(merged.items()), tight

    def _memory(
        self, rows: Rows, z0: int, residents: list[tuple[tuple[int, ...], float]], tight: list[tuple[int, float]]
    ) -> None:
        sizes = np.array([b for _, b in residents])
        index = np.arange(len(residents), dtype=np.int64)
        member = np.repeat(index, [len(blocks) for blocks, _ in residents]).astype(np.int64)
        block = np.array([b for blocks, _ in residents for b in blocks], dtype=np.int64)
        for i, (p, room) in enumerate(tight):
            z = z0 + i * len(residents)
            rows.one([z + index], [sizes / max(room, 1.0)], -np.inf, 1.0 if room > 0 else 0.0)
            rows.many([z + member, block * self.n_pools + p], [1.0, -1.0], 0.0, np.inf)
