"""Compare `inspect` on every profile of the data folder with the independently computed facts.

    python experiments/validation/trace_facts.py [DATA/traces]

The folder is found through TESSERASIM_SHARED or beside the checkout. Prints a row per file and field that
can be compared, times in nanoseconds, and exits 1 if anything differs. How a fact is read:

- times are decimal µs in facts.json and are turned into integer ns from their text;
- `gpu` is a list of distinct names there: one text joined with " + " here; `["?"]` (devices listed with
  blank names) is "?" here, null or absent (no device listed) is None;
- a profile of the CPU alone has counts of zero and no time facts: zeros here, and a refusal to import;
- files without a count of kernels are no kernel traces: importing and inspecting them must be refused by name.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tesserasim.errors import InputError, NotKernelTraceError
from tesserasim.trace.importer import import_profile
from tesserasim.trace.inspect import inspect_file
from tesserasim.trace.values import ns_of_us

ROOT = Path(__file__).resolve().parents[2]
COUNTS = {
    "kernels": "n_gpu_kernels", "memcpys": "n_gpu_memcpy", "memsets": "n_gpu_memset", "streams": "n_streams",
}  # fmt: skip
TIMES = {
    "busy_ns": "kernel_busy_sum_us",
    "union_ns": "kernel_union_us_all_devices_streams",
    "span_ns": "kernel_span_us",
}
COLUMNS = {
    "gpu": "22", "kernels": ">7", "memcpys": ">7", "memsets": ">7", "streams": ">7", "devices": ">7",
    "graph_kernels": ">13",
    "busy_ns": ">10", "union_ns": ">10", "span_ns": ">12",
}  # fmt: skip


def folder() -> Path:
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    return Path(os.environ.get("TESSERASIM_SHARED", ROOT.parent / "shared")) / "data" / "traces"


def expected(facts: dict[str, Any]) -> dict[str, Any]:
    want: dict[str, Any] = {"gpu": " + ".join(facts["gpu"]) if facts.get("gpu") else None}
    want |= {key: facts.get(fact) or 0 for key, fact in COUNTS.items()}
    want["graph_kernels"] = facts.get("graph_launched_kernels", facts.get("graph_kernels")) or 0  # Kineto, Nsight
    want["devices"] = facts.get("n_devices", facts.get("n_gpu_pids")) or 0
    want |= {key: ns_of_us(facts.get(fact) or 0) for key, fact in TIMES.items()}
    return want


def main() -> int:
    where = folder()
    facts = json.loads((where / "facts.json").read_text(), parse_float=str)
    wrong = files = 0
    print(f"{'file':40} " + " ".join(f"{key:{width}}" for key, width in COLUMNS.items()) + "    s")
    for name, entry in sorted(facts.items()):
        path = where / name
        if not path.exists():
            continue
        if "n_gpu_kernels" not in entry["facts"]:
            wrong += refused(path)
            continue
        begin = time.perf_counter()
        got, want = inspect_file(path), expected(entry["facts"])
        row = " ".join(f"{got[key]!s:{width}}" for key, width in COLUMNS.items())
        print(f"{name:40} {row} {time.perf_counter() - begin:4.1f}")
        files += 1
        for key in COLUMNS:
            if got[key] != want[key]:
                wrong += 1
                print(f"    DIFFERS {key}: {got[key]!r}, facts.json says {want[key]!r}")
    print(f"{files} profiles, {len(COLUMNS)} fields each: {wrong or 'no'} differences")
    return 1 if wrong or not files else 0


def refused(path: Path) -> int:
    """Check that a file that is no kernel trace is refused; returns the number of faults."""
    for function in (import_profile, inspect_file):
        try:
            function(path)
        except NotKernelTraceError as error:
            line = str(error)
        except InputError as error:
            print(f"{path.name}: wrong kind of error: {error}")
            return 1
        else:
            print(f"{path.name}: {function.__name__} accepted it")
            return 1
    print(f"{path.name:40} refused: {line.removeprefix(f'{path}: ')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
