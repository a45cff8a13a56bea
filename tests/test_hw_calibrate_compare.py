"""experiments/validation/calibrate_h200.py: against numbers that are known, and without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tesserasim.cluster.catalogue import find_gpu
from tesserasim.costs.shipped import shipped
from tesserasim.trace.parquet import read_trace

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "experiments" / "validation" / "calibrate_h200.py"
GEMM = {"kernel_kind": "gemm", "gpu": "H200-SXM", "dtype": "bfloat16", "kernel_source": "x", "p10_us": 1, "p90_us": 2}


def lines(*arguments: object) -> dict[tuple[str, str], tuple[int, float, float]]:
    """(kind, against) -> n, median, MAPE as printed."""
    done = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    cells = [[c.strip() for c in x.split("|")[1:-1]] for x in done.stdout.split("\n\n")[0].splitlines()[2:]]
    return {(c[0], c[2]): (int(c[3]), float(c[4]), float(c[5])) for c in cells}


def test_parameters_are_compared_under_both_conditions(tmp_path: Path) -> None:
    """Times 25 % above the prediction, cold ones as predicted. Mutation: the copies of the cold case are forgotten."""
    m, n, k = np.array([[1, 4096, 4096], [64, 2048, 512], [512, 8192, 1024]], dtype=np.float64).T
    shape = {"m": m, "n": n, "k": k, "w_bits": 0 * m + 16, "a_bits": 0 * m + 16, "block": 0 * m}
    model, gpu = shipped("gemm", None), find_gpu("H200-SXM")
    warm, cold = (model.predict(shape | {"copies": 0 * m + c}, gpu) for c in (6.0, 64.0))
    assert (np.abs(cold / warm - 1) > 0.01).any()
    table = pd.DataFrame({"m": m, "n": n, "k": k, "time_us": warm * 1.25, "cold_us": cold}).assign(**GEMM)
    table.to_csv(tmp_path / "t.csv", index=False)
    found = lines(tmp_path / "t.csv", "--tables", tmp_path, "--traces", tmp_path)
    assert found == {("gemm", "parameters"): (3, -0.2, 0.2), ("gemm", "parameters, cold"): (3, 0.0, 0.0)}


def test_equal_rows_and_neighbours(tmp_path: Path) -> None:
    """A row between two is interpolated in logarithms, one beyond them is not, another build or type does not count."""
    shipped_rows = pd.DataFrame(
        {"m": [16, 64, 16, 32], "time_us": [10.0, 40.0, 99.0, 99.0], "framework": ["sglang"] * 2 + ["vllm", "sglang"],
         "version": ["0.5.10", "0.5.10", "0.24.0", "0.5.10"], "dtype": ["bfloat16", "bfloat16", "bfloat16", "fp8"]}
    ).assign(kernel_kind="gemm", gpu="H200-SXM-141GB", n=256, k=128)  # fmt: skip
    shipped_rows.to_parquet(tmp_path / "gemm.parquet")
    table = pd.DataFrame({"m": [16, 32, 128], "time_us": [8.0, 25.0, 1.0]}).assign(**GEMM, n=256, k=128)
    table.to_csv(tmp_path / "t.csv", index=False)
    found = lines(tmp_path / "t.csv", "--tables", tmp_path, "--traces", tmp_path / "none")
    assert found["gemm", "shipped row"] == (1, 0.25, 0.25)
    assert found["gemm", "interpolated"] == (1, -0.2, 0.2)


def test_captured_sites_of_the_same_shape(tmp_path: Path) -> None:
    """A site's kernels count together, and the median over the sites counts."""
    folder = ROOT / "traces" / "llama-3-8b"
    trace = read_trace(folder / "decode-b32-c2048.parquet")
    sites: dict[str, int] = {}
    for kernel in trace.kernels:
        if kernel.site.endswith("mm.wo#0"):
            sites[kernel.site] = sites.get(kernel.site, 0) + kernel.duration_ns
    assert len(sites) == 32 and sum(k.site in sites for k in trace.kernels) > 32  # split over two kernels each
    us = float(np.median(list(sites.values()))) / 1e3
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "u.parquet").write_bytes((folder / "decode-b32-c2048.parquet").read_bytes())
    table = pd.DataFrame({"m": [32, 33], "n": 4096, "k": 4096, "time_us": 1.0, "cold_us": us / 1.5}).assign(**GEMM)
    table.to_csv(tmp_path / "t.csv", index=False)
    found = lines(tmp_path / "t.csv", "--tables", tmp_path, "--traces", tmp_path / "traces")
    assert found["gemm", "captured"] == (1, 0.5, 0.5)


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "kernel_kind,time_us,p10_us\nrope,1,1\n"])
def test_what_is_no_table_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.csv").write_text(content)
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "t.csv"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and str(tmp_path / "t.csv") in done.stderr
