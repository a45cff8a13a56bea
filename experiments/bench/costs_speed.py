"""First predictions of a process: 1,000 distinct sites on seven GPUs, imports apart.

    python experiments/bench/costs_speed.py [--repeat N]

Each repeat is a process of its own; prints the least, median and largest time in ms, and the load of the machine: on
cores that others use the least time says most about the code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

CHILD = """
import random, time
from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs.calibrated import Calibrated
from tesserasim.trace.model import Kernel, Trace, TraceMeta
draw = random.Random(0)
def kernel(i):
    kind = ("gemm", "attention_decode", "attention_prefill", "moe", "elementwise")[i % 5]
    shape = {"gemm": {"m": draw.randint(1, 4096), "n": 128 * draw.randint(1, 64), "k": 128 * draw.randint(1, 64)},
             "moe": {"n": 256 * draw.randint(4, 24), "k": 2880, "experts": 32},
             "elementwise": {"elements": 4096 * (i + 1)}}.get(kind) or {
             "batch": draw.randint(1, 64), "seq_q": 1 if "dec" in kind else draw.randint(16, 4096), "seq_kv": 4096,
             "heads": 32, "kv_heads": 8, "head_dim": 128}
    if kind == "attention_prefill":
        shape["seq_kv"] = shape["seq_q"]
    return Kernel(i, f"k{i}", f"s{i}", kind, shape=shape, flops=10**9 + i, read_bytes=10**6 + i, write_bytes=10**5,
                  duration_ns=draw.randint(3000, 900000), act_dtype="bf16", weight_dtype="bf16")
trace = Trace(TraceMeta("synthetic", "m", {"name": "u"}, "H200-SXM"), tuple(kernel(i) for i in range(1000)))
gpus = [find_gpu(g) for g in ("A100-80GB-SXM", "L40S", "H100-SXM", "H200-SXM", "B200", "B300", "RTX-PRO-6000")]
start = time.perf_counter()
costs = Calibrated()
for gpu in gpus:
    costs.kernel_ns(trace, gpu)
print((time.perf_counter() - start) * 1e3)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=9)
    repeat = parser.parse_args().repeat
    found = sorted(
        float(subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout)
        for _ in range(repeat)
    )
    print(
        f"1,000 sites x 7 GPUs, first call: least {found[0]:.1f} ms, median {found[len(found) // 2]:.1f} ms, largest "
        f"{found[-1]:.1f} ms; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
