"""The child of `python -m hw oracle`: captures units again and checks the kernels of their blocks.

    python -m hw.oracle.worker MODEL OUT LIMIT_S BLOCKS TRACE...

Everything that PyTorch has allocated when the graph is captured is observed: all allocator segments whole, with
the guard zones that lie among them. What the check itself needs comes from a memory pool of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hw.capture import driver
from hw.capture.assemble import Attribution, attribute
from hw.capture.run import Graphed, capture_graph, log
from hw.errors import DriverError, HardwareError
from hw.oracle.check import FLOATS, Finding, check_kernel
from hw.oracle.memory import Memory, Region
from hw.oracle.report import TIME_IS_UP, append_line, done_of, fragile_kernels, last_state
from hw.oracle.sets import declared
from hw.workloads import UnitSpec, Workload, load_workload
from tesserasim import __version__
from tesserasim.deps.graph import CARRIED, is_unknown
from tesserasim.errors import TesserasimError
from tesserasim.terminal import DEBUG, say
from tesserasim.trace.model import Trace
from tesserasim.trace.parquet import read_trace

INPUTS = 2
SPARE = 6 << 30  # bytes for comparisons beside the snapshot
GUARDS = (2 << 20, 8 << 20, 32 << 20)  # bytes
_STILL = ("position", "place")  # index tensors that a step must find as they are


class Raw:
    """Device memory by its address, for `torch.as_tensor`."""

    def __init__(self, first: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (first, False), "version": 3}


def guards() -> list[torch.Tensor]:
    return [torch.full((n,), 0x5A, dtype=torch.uint8, device="cuda") for n in GUARDS]


def refill(workload: Workload, seed: int) -> None:
    """Other valid inputs and states in the unit's tensors."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for named in workload.named_tensors():
        if named.role not in ("state", "input") or named.name.endswith(_STILL):
            continue
        t = named.tensor
        if t.is_floating_point() and t.numel() < 16:
            continue  # a schedule's figure, not data
        if t.is_floating_point():
            t.normal_(0, 1, generator=generator)
        elif t.numel():
            t.copy_((t * 31 + 7 * seed) % (t.max() + 1).clamp(min=2))


def chosen_modules(found: Attribution, blocks: Sequence[str]) -> list[str]:
    """Modules to check: as named, or the first, two in the middle and the last. HardwareError for an unknown name."""
    modules = list(dict.fromkeys(c.module for c in found.calls))
    if blocks and blocks[0] == "all":
        return modules
    unknown = [b for b in blocks if b not in modules]
    if unknown:
        raise HardwareError(f"no module {unknown[0]!r}; modules: {', '.join(modules)[:300]}")
    middle = len(modules) // 2
    return list(blocks) or list(dict.fromkeys([modules[0], *modules[middle - 1 : middle + 1], modules[-1]]))


class Checker:
    """The kernels of one captured unit. `fragile`: kernels that faulted on other values of what they read."""

    fragile: frozenset[str] = frozenset()

    def __init__(self, workload: Workload, g: Graphed, trace: Trace, path: Path, blocks: Sequence[str]) -> None:
        self.workload, self.g, self.trace = workload, g, trace
        self.found = attribute(workload, g.unit, g.nodes, g.recorder.calls, g.recorder.borders, g.segments)
        self.call_of = [i for i, c in enumerate(self.found.calls) for _ in range(c.first, c.last)]
        wanted = set(chosen_modules(self.found, blocks))
        self.nodes = [n for n, c in enumerate(self.call_of) if self.found.calls[c].module in wanted]
        self.blocks = [m for m in dict.fromkeys(c.module for c in self.found.calls) if m in wanted]
        self.path = path
        regions = [Region(a, torch.as_tensor(Raw(a, b - a), device="cuda")) for a, b in g.segments]
        self.memory = Memory(regions)
        self.launcher = driver.NodeLauncher(driver.graph_of(g.graph))

    def header(self) -> dict[str, Any]:
        """The unit as the report states it."""
        shapes = [(n.grid, n.block, n.cluster, n.shared_bytes) for n in self.g.nodes]
        traced = [(k.grid, k.block, k.cluster, k.shared_bytes) for k in self.trace.kernels]
        alike = [
            _sets(self.found.rows[n], self.found.buffers) == _sets(k.accesses, self.trace.buffers)
            for n, k in enumerate(self.trace.kernels)
        ] if shapes == traced else []  # fmt: skip
        return {
            "kind": "unit", "model": self.trace.meta.model, "unit": self.g.unit.as_dict(), "trace": self.path.name,
            "same_kernels_as_trace": shapes == traced,
            "kernels_with_other_sets_than_trace": alike.count(False) if shapes == traced else None,
            "inputs": INPUTS, "blocks": self.blocks, "observed_bytes": self.memory.nbytes,
            "guard_bytes": 2 * sum(GUARDS), "step_kernels": len(self.g.nodes),
            "gpu": torch.cuda.get_device_name(0), "driver": driver.driver_version(), "torch": torch.__version__,
            "tool_version": __version__,
            "kernels": [self._entry(n) for n in self.nodes],
        }  # fmt: skip

    def _entry(self, node: int) -> dict[str, Any]:
        accesses = self.found.rows[node]
        bare = dataclasses.replace(self.trace.kernels[0], accesses=tuple(accesses))
        return {
            "node": node, "site": self.found.sites[self.call_of[node]],
            "name": self.g.nodes[node].name or self.g.nodes[node].type, "unknown": is_unknown(bare),
            "accesses": [
                {
                    "buffer": a.buffer, "mode": a.mode, "offset": a.offset, "nbytes": a.nbytes, "extent": a.extent,
                    "covers": a.covers, "evidence": a.evidence,
                }
                for a in accesses
            ],
            "buffers": {
                str(a.buffer): {
                    k: getattr(b, k) for k in ("name", "nbytes", "role", "bytes_per_token", "bytes_per_sequence")
                }
                for a in accesses for b in [self.found.buffers[a.buffer]]
            },
        }  # fmt: skip

    def dtype_of(self, node: int, access: int) -> str:
        """Element type of an access: that of the call's tensor which starts there, or lies in its storage."""
        a = self.found.rows[node][access]
        address = self.found.addresses[a.buffer] + a.offset
        arguments = self.found.calls[self.call_of[node]].arguments
        for exact in (True, False):
            for x in arguments:
                if x.address == address if exact else x.storage <= address < x.storage + x.storage_bytes:
                    return x.dtype
        return ""

    def run_real(self, first: int, last: int) -> None:
        if last > first:
            self.launcher.run(first, last, torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()

    def place(self, node: int, first: int, end: int) -> dict[str, Any]:
        """What lies at [first, end) when a node runs: a named buffer, the latest value there, or a bare segment."""
        inside = [
            b for b, address in zip(self.found.buffers, self.found.addresses, strict=True)
            if address <= first < address + b.nbytes and b.role != "workspace"
        ]  # fmt: skip
        named = [b for b in inside if b.role != "activation"]
        values = sorted((b for b in inside if b.first_use <= node), key=lambda b: b.first_use)
        for b in [*named, *values[::-1]]:
            return {"buffer": b.name, "offset": first - self.found.addresses[b.id], "nbytes": end - first}
        segment = next(i for i, (a, b) in enumerate(self.g.segments) if a <= first < b)
        offset = first - self.g.segments[segment][0]
        return {"buffer": f"segment {segment}", "offset": offset, "nbytes": end - first}

    def check(self, node: int, note: Callable[[str], None], judged: Callable[[Finding], None]) -> Finding:
        """Check one node; memory holds the state before it, and afterwards the state behind it."""
        accesses = self.found.rows[node]
        base, dtype = self.found.addresses.__getitem__, functools.partial(self.dtype_of, node)
        sets = declared(accesses, self.found.buffers, base, dtype)
        if self.g.nodes[node].name in self.fragile:  # other indices than its own made it fault: none are tried
            reads = tuple(r if r.dtype in FLOATS else dataclasses.replace(r, dtype="") for r in sets.reads)
            sets = dataclasses.replace(sets, reads=reads)
        before = [
            i for i, a in enumerate(accesses)
            if self.found.buffers[a.buffer].first_use < node or self.found.buffers[a.buffer].role in CARRIED
        ]  # fmt: skip

        def launch() -> None:
            self.launcher.run(node, node + 1, torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()

        return check_kernel(self.memory, sets, launch, note, before, judged)


def _sets(accesses: Sequence[Any], buffers: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [(buffers[a.buffer].name, a.mode, a.offset, a.nbytes, a.extent, a.covers, a.evidence) for a in accesses]


def check_unit(workload: Workload, path: Path, out: Path, blocks: Sequence[str], deadline: float) -> bool:
    """Check one unit, going on after what the journal holds; False if time ran out.

    A unit whose journal is complete for this trace and these blocks is not captured again. Findings about kernels
    that are other ones by now, or have other sets, do not count.
    """
    trace = read_trace(path)
    unit = next((u for u in workload.units() if u.file_stem == path.stem), None) or _unit(trace)
    journal = out / workload.name / f"{path.stem}.journal"
    journal.parent.mkdir(parents=True, exist_ok=True)
    about = {"asked": list(blocks), "trace_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    if _is_done(journal, about):
        return True
    append_line(journal, {"kind": "note", "text": "capturing"})
    with journal.open("a", encoding="utf-8") as file:

        def line(**content: Any) -> None:
            file.write(json.dumps(content) + "\n")
            file.flush()

        graphed = capture_graph(workload, unit)
        need = sum(b - a for a, b in graphed.segments) + SPARE
        if need > torch.cuda.mem_get_info()[0]:
            line(kind="refused", reason=f"a snapshot of its memory needs {need >> 20} MiB, which are not free")
            return True
        pool = torch.cuda.MemPool()
        with torch.cuda.stream(graphed.stream), torch.cuda.use_mem_pool(pool), torch.no_grad():
            checker = Checker(workload, graphed, trace, path, blocks)
            checker.fragile = fragile_kernels(journal.parent)
            line(**checker.header(), **about)
            finished = _check_inputs(checker, done_of(last_state(journal)[1]), line, deadline)
        torch.cuda.synchronize()
        checker.launcher.close()
        del checker, pool, graphed
        gc.collect()
        torch.cuda.empty_cache()
    return finished


def _is_done(journal: Path, about: dict[str, Any]) -> bool:
    """The journal is complete, and about this trace and these blocks (`about`: as the unit's line holds them)."""
    known, found = last_state(journal)
    done = done_of(found)
    return (
        bool(known) and all(known.get(name) == value for name, value in about.items())
        and all((i, k["node"]) in done for i in range(INPUTS) for k in known["kernels"])
    )  # fmt: skip


def _check_inputs(checker: Checker, done: set[tuple[int, int]], line: Callable[..., None], deadline: float) -> bool:
    for number in range(INPUTS):
        todo = [n for n in checker.nodes if (number, n) not in done]
        if not todo:
            continue
        refill(checker.workload, number + 1)
        at, saved = 0, False
        for node in todo:
            if time.monotonic() > deadline:
                return False
            if node > at or not saved:
                checker.run_real(at, node)
                checker.memory.save()
            started = time.monotonic()

            def note(phase: str, number: int = number, node: int = node) -> None:
                line(kind="phase", input=number, node=node, phase=phase)

            def judged(f: Finding, number: int = number, node: int = node) -> None:
                line(kind="judged", input=number, node=node, **_content(checker, node, f))

            f = checker.check(node, note, judged)
            seconds = round(time.monotonic() - started, 3)
            line(kind="kernel", input=number, node=node, **_content(checker, node, f), seconds=seconds)
            at, saved = node + 1, True
    return True


def _content(checker: Checker, node: int, f: Finding) -> dict[str, Any]:
    """A finding for the journal, addresses replaced by what lies there."""
    places = {k: [checker.place(node, *s) for s in getattr(f, k)] for k in ("outside", "wrong", "undeclared")}
    return {
        "status": f.status, "reason": f.reason, "writes": f.writes, "reads": f.reads,
        "nondeterministic_bytes": f.nondeterministic_bytes, **places,
    }  # fmt: skip


def _unit(trace: Trace) -> UnitSpec:
    """The unit of a trace that is in no grid."""
    u = trace.meta.unit
    return UnitSpec(u["name"], u["phase"], u["batch"], u.get("tokens", 1), u.get("context", 0))


def main(argv: Sequence[str]) -> int:
    """0: all done; 2: cannot be done; 3: time ran out; 4: the device failed while a kernel ran."""
    model, out, limit_s, blocks, *traces = argv
    started = time.monotonic()
    deadline = started + float(limit_s)
    first = guards()
    workload = load_workload(model)
    last = guards()
    log(f"oracle: {model} built in {time.monotonic() - started:.1f} s")
    finished = True
    for name in traces:
        if time.monotonic() > deadline:
            return TIME_IS_UP
        t0 = time.monotonic()
        names = tuple(b for b in blocks.split(",") if b)
        finished &= check_unit(workload, Path(name), Path(out), names, deadline)
        log(f"oracle: {model} {Path(name).stem}: {time.monotonic() - t0:.1f} s")
    del first, last
    return 0 if finished else TIME_IS_UP


def code_of(run: Callable[[], int]) -> int:
    """What `run` returns; for what escapes it the code of `main`, or 1 for a bug and 130 for an interrupt."""
    try:
        return run()
    except (torch.AcceleratorError, DriverError) as error:
        say("oracle", (str(error).splitlines() or ["the device failed"])[0])
        return 4
    except (TesserasimError, OSError) as error:
        say("error", str(error))
        return 2
    except KeyboardInterrupt:  # the parent gets it too, and says so
        return 130
    except Exception as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        say("oracle", f"internal error: {type(error).__name__}: {error} (set {DEBUG}=1 for the traceback)")
        return 1


if __name__ == "__main__":
    code = code_of(lambda: main(sys.argv[1:]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # after a fault nothing on the device can be taken down in order
