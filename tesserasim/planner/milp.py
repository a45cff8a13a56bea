"""Throughput placement as a mixed-integer program, solved by HiGHS (scipy.optimize.milp).

    min T
    sum_d x[b, d] = 1                                     every block runs once        (x binary)
    sum_b t[b, d] x[b, d] <= T                            device loads
    sum_f time(f, s, d) y[f, s, d] <= T                   link direction loads
    sum t x + fixed + sum wait(f, s, d) y <= depth * T    a cohort's latency over the (effective) depth
    sum_s y[f, s, d] >= x[reader, d] - x[writer, d]       a value crosses once per other device that reads it
    y[f, s, d] <= x[writer, s]                            ... from where it was written (3 or more devices)
    z[r, d] >= x[b, d],  sum_r bytes(r) z[r, d] <= room   memory by what is placed there

A *block* is a set of sites that share a device: a group, or sites tied by a flow so big that splitting
it costs more than the best plan known (`contract`, exact: no better plan splits it). Launch cost counts once
per unit here and once per unit and device in the closed form, so the program's bound stays a bound. Placements
that keep units whole wait less than the program assumes; they are listed (seeds), not searched.

Solvers stop by gap and node count, never by seconds: the same input gives the same plan everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from tesserasim.metrics.memory import usable_bytes
from tesserasim.metrics.predict import ClosedForm, IntArray
from tesserasim.workload import FloatArray

#: A solver's tolerance, taken off every bound it reports.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Solution:
    """What the solver says. `x` is None without an incumbent; `bound_ns` is inf if nothing fits."""

    x: IntArray | None  # [site] -> device
    bound_ns: float
    infeasible: bool = False
    nodes: int = 0


def contract(form: ClosedForm, depth: float, best_ns: float) -> IntArray:
    """[site] -> block, merging what no plan better than `best_ns` can split.

    A flow whose transfer alone occupies its link for `best_ns`, or alone lifts the least possible latency
    over `depth` (effective) * best_ns, ties its writer and readers. Groups are always merged. Labels are 0, 1, ... in
    program order.
    """
    parent = list(range(form.n_sites))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(i: int, j: int) -> None:
        a, b = sorted((root(i), root(j)))
        parent[b] = a

    first_of: dict[int, int] = {}
    for i, site in enumerate(form.workload.sites):
        if site.group >= 0:
            join(i, first_of.setdefault(site.group, i))
    off = ~np.eye(form.n_devices, dtype=bool)
    if form.n_devices > 1 and np.isfinite(best_ns):
        time = form.flow_bytes / form.rate[off].max()
        wait = (time + form.flow_count * form.latency[off].min()) * form.exposed
        least = float(form.workload.time_ns.min(axis=1).sum()) + fixed_ns(form)
        for f in np.flatnonzero((time >= best_ns) | (least + wait >= depth * best_ns)):
            flow = form.workload.flows[int(f)]
            for r in flow.readers:
                join(flow.writer, r)
    return np.unique([root(i) for i in range(form.n_sites)], return_inverse=True)[1].astype(np.int64)


def alike(form: ClosedForm, j: int, k: int) -> bool:
    """Exchanging devices j and k changes nothing."""
    devices, time = form.workload.cluster.devices, form.workload.time_ns
    swap = np.arange(form.n_devices)
    swap[[j, k]] = k, j
    return (
        devices[j].gpu == devices[k].gpu
        and np.array_equal(time[:, j], time[:, k])
        and np.array_equal(form.rate, form.rate[np.ix_(swap, swap)])
        and np.array_equal(form.latency, form.latency[np.ix_(swap, swap)])
    )


def fixed_ns(form: ClosedForm) -> float:
    """The part of a cohort's latency that no placement avoids: gaps, and one launch cost per unit."""
    return form.gap_total_ns + float(form.unit_launch_ns.sum())


@dataclass
class Rows:
    """Sparse rows lo <= A v <= hi, collected as triplets."""

    row: list[IntArray] = field(default_factory=list)
    col: list[IntArray] = field(default_factory=list)
    val: list[FloatArray] = field(default_factory=list)
    lo: list[FloatArray] = field(default_factory=list)
    hi: list[FloatArray] = field(default_factory=list)
    n: int = 0

    def one(self, cols: Iterable[IntArray], vals: Iterable[FloatArray], lo: float, hi: float) -> None:
        """One dense row."""
        c, v = np.concatenate(list(cols)), np.concatenate(list(vals))
        self.row.append(np.full(len(c), self.n, dtype=np.int64))
        self.col.append(c.astype(np.int64))
        self.val.append(v.astype(float))
        self.lo.append(np.array([lo]))
        self.hi.append(np.array([hi]))
        self.n += 1

    def many(self, cols: list[IntArray], vals: list[float], lo: float, hi: float) -> None:
        """len(cols[0]) rows of equal shape: coefficient vals[k] at column cols[k][i] in row i."""
        m = len(cols[0])
        for c, v in zip(cols, vals, strict=True):
            self.row.append(self.n + np.arange(m, dtype=np.int64))
            self.col.append(c.astype(np.int64))
            self.val.append(np.full(m, v))
        self.lo.append(np.full(m, lo))
        self.hi.append(np.full(m, hi))
        self.n += m


class Program:
    """The program of one (workload, depth) over blocks; `relax` and `solve` run it."""

    def __init__(
        self, form: ClosedForm, depth: int, block: IntArray, scale_ns: float, latency_limit_ns: float | None = None
    ) -> None:
        self.form, self.depth, self.block, self.scale = form, depth, block, scale_ns
        self.limit = latency_limit_ns
        self.n_blocks = int(block.max()) + 1
        d = form.n_devices
        time = np.zeros((self.n_blocks, d))
        np.add.at(time, block, form.workload.time_ns / scale_ns)
        self.time = time
        self._merge_flows()
        self.pairs = [(s, t) for s in range(d) for t in range(d) if s != t]
        self.y0 = self.n_blocks * d  # columns: x from 0, y, z, and T last
        self.z0 = self.y0 + len(self.flow_writer) * len(self.pairs)
        self.residents = self._merge_residents()
        self.tight = self._tight_devices()
        self.t = self.z0 + len(self.residents) * len(self.tight)
        self.rows = Rows()
        self._load_rows()
        self._flow_rows()
        self._memory_rows()

    def _x(self, blocks: IntArray, d: int) -> IntArray:
        columns: IntArray = blocks * self.form.n_devices + d
        return columns

    def _y(self, pair: int) -> IntArray:
        columns: IntArray = self.y0 + np.arange(len(self.flow_writer), dtype=np.int64) * len(self.pairs) + pair
        return columns

    def _merge_flows(self) -> None:
        """Flows with equal writer and reader blocks become one; those inside a block vanish."""
        form = self.form
        merged: dict[tuple[int, tuple[int, ...]], list[float]] = {}
        for i, f in enumerate(form.workload.flows):
            w = int(self.block[f.writer])
            readers = tuple(sorted({int(self.block[r]) for r in f.readers} - {w}))
            if readers:
                sums = merged.setdefault((w, readers), [0.0, 0.0, 0.0])
                sums[0] += f.nbytes
                sums[1] += f.nbytes * form.exposed[i]
                sums[2] += f.count * form.exposed[i]
        self.flow_writer = np.array([w for w, _ in merged], dtype=np.int64)
        self.flow_readers = [r for _, r in merged]
        total = np.array(list(merged.values())).reshape(-1, 3)
        self.flow_bytes, self.wait_bytes, self.wait_count = total[:, 0], total[:, 1], total[:, 2]

    def _merge_residents(self) -> list[tuple[tuple[int, ...], float]]:
        """(blocks, bytes at this batch and depth); residents of equal blocks are one."""
        merged: dict[tuple[int, ...], float] = {}
        w = self.form.workload
        for r in w.residents:
            key = tuple(sorted({int(self.block[i]) for i in r.sites}))
            merged[key] = merged.get(key, 0.0) + r.nbytes * (w.batch * self.depth if r.state else 1)
        return list(merged.items())

    def _tight_devices(self) -> list[int]:
        """Devices on which not everything fits: only they need memory rows."""
        self.room = usable_bytes(self.form.workload) - self.form.workload.workspace_bytes * self.depth
        everything = sum(b for _, b in self.residents)
        return [d for d in range(self.form.n_devices) if everything > self.room[d]]

    def _load_rows(self) -> None:
        d, rows = self.form.n_devices, self.rows
        blocks = np.arange(self.n_blocks, dtype=np.int64)
        end, minus = np.array([self.t]), np.array([-1.0])
        rows.many([self._x(blocks, k) for k in range(d)], [1.0] * d, 1.0, 1.0)
        for k in range(d):
            rows.one([self._x(blocks, k), end], [self.time[:, k], minus], -np.inf, 0.0)
        cols: list[IntArray] = [np.arange(self.n_blocks * d, dtype=np.int64)]
        vals = [self.time.ravel()]
        for p, (s, t) in enumerate(self.pairs):
            if not self.form.linked[s, t]:
                continue
            per_byte = 1.0 / self.form.rate[s, t] / self.scale
            if len(self.flow_writer):
                rows.one([self._y(p), end], [self.flow_bytes * per_byte, minus], -np.inf, 0.0)
                cols.append(self._y(p))
                vals.append(self.wait_bytes * per_byte + self.wait_count * self.form.latency[s, t] / self.scale)
        fixed = fixed_ns(self.form) / self.scale
        rows.one([*cols, end], [*vals, np.array([-self.form.effective_depth(self.depth)])], -np.inf, -fixed)
        if self.limit is not None:
            rows.one(cols, vals, -np.inf, self.limit / self.scale - fixed)

    def _flow_rows(self) -> None:
        if not len(self.flow_writer):
            return
        d, rows = self.form.n_devices, self.rows
        flow = np.repeat(np.arange(len(self.flow_writer)), [len(r) for r in self.flow_readers])
        reader = np.array([r for readers in self.flow_readers for r in readers], dtype=np.int64)
        writer = self.flow_writer[flow]
        for k in range(d):
            into = [self._y(p)[flow] for p, (_, t) in enumerate(self.pairs) if t == k]
            rows.many([*into, self._x(reader, k), self._x(writer, k)], [1.0] * len(into) + [-1.0, 1.0], 0.0, np.inf)
        if d > 2:  # with two devices the source is the other one
            for p, (s, _) in enumerate(self.pairs):
                rows.many([self._y(p), self._x(self.flow_writer, s)], [1.0, -1.0], -np.inf, 0.0)

    def _memory_rows(self) -> None:
        sizes = np.array([b for _, b in self.residents])
        index = np.arange(len(self.residents), dtype=np.int64)
        member = np.repeat(index, [len(blocks) for blocks, _ in self.residents])
        block = np.array([b for blocks, _ in self.residents for b in blocks], dtype=np.int64)
        for i, k in enumerate(self.tight):
            z = self.z0 + i * len(self.residents)
            self.rows.one([z + index], [sizes / max(self.room[k], 1.0)], -np.inf, 1.0 if self.room[k] > 0 else 0.0)
            self.rows.many([z + member, self._x(block, k)], [1.0, -1.0], 0.0, np.inf)

    def _bounds(self) -> Bounds:
        """Variables in [0, 1], T >= 0; of equal devices the first takes the heaviest block (symmetry)."""
        upper = np.ones(self.t + 1)
        upper[-1] = np.inf
        for p, (s, t) in enumerate(self.pairs):
            if not self.form.linked[s, t]:
                upper[self._y(p)] = 0.0
        heaviest = int(np.argmax(self.time.sum(axis=1)))
        for k in range(1, self.form.n_devices):
            if any(alike(self.form, j, k) for j in range(k)):
                upper[self._x(np.array([heaviest]), k)] = 0.0
        return Bounds(np.zeros(self.t + 1), upper)

    def _run(self, integral: bool, gap: float, nodes: int) -> Solution:
        cost = np.zeros(self.t + 1)
        cost[-1] = 1.0
        r = self.rows
        matrix = coo_array(
            (np.concatenate(r.val), (np.concatenate(r.row), np.concatenate(r.col))), shape=(r.n, self.t + 1)
        ).tocsr()
        kinds = np.zeros(self.t + 1)
        kinds[: self.y0] = 1 if integral else 0
        solve: Any = milp
        found = solve(
            cost, integrality=kinds, bounds=self._bounds(),
            constraints=LinearConstraint(matrix, np.concatenate(r.lo), np.concatenate(r.hi)),
            options={"mip_rel_gap": gap, "node_limit": nodes} if integral else {},
        )  # fmt: skip
        if found.status == 2:
            return Solution(None, np.inf, True)
        if not integral:
            return Solution(None, max(0.0, float(found.fun) * self.scale * (1 - TOLERANCE)))
        dual = found.mip_dual_bound
        bound = float(dual) * self.scale * (1 - TOLERANCE) if dual is not None and np.isfinite(dual) else 0.0
        x = None
        if found.x is not None:
            placed = found.x[: self.y0].reshape(self.n_blocks, self.form.n_devices).argmax(axis=1)
            x = placed[self.block].astype(np.int64)
        return Solution(x, bound, False, int(found.mip_node_count or 0))

    def relax(self) -> Solution:
        """The bound of this program's own linear relaxation."""
        return self._run(False, 0.0, 0)

    def solve(self, gap: float, nodes: int) -> Solution:
        """Branch and bound until the relative gap or the node limit."""
        return self._run(True, gap, nodes)
