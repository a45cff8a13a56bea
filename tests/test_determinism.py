"""The same sweep gives the same bytes, whatever the hash seed and the number of jobs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweep_cases import write_tiny_sweep

#: Files that say when and how long, which no hash covers.
SIDECARS = {"journal.jsonl", ".lock", ".workers"}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_sweep(tmp_path_factory.mktemp("spec"))


def sweep(spec: Path, out: Path, hash_seed: int, jobs: int, *more: str) -> dict[str, str]:
    """Run the tiny sweep in a process of its own; file -> hash."""
    command = [sys.executable, "-m", "tesserasim", "sweep", str(spec), "--out", str(out), "--jobs", str(jobs), *more]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return hashes(out)


def hashes(out: Path) -> dict[str, str]:
    found = {}
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.name not in SIDECARS:
            found[str(path.relative_to(out))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def test_same_bytes_under_every_hash_seed_and_one_or_two_jobs(spec: Path, tmp_path: Path) -> None:
    """Mutation: `"salt": hash("x")` added to the row in `Bench._run`: result files differ between hash seeds.

    Mutation: `"pid": os.getpid()` added there: they differ between runs.
    """
    first = sweep(spec, tmp_path / "first", 0, 1, "--quick")
    assert {"summary.csv", "summary.parquet", "verdicts.txt", "figure.png", "figure.pdf"} <= set(first)
    assert sum(name.startswith("experiments/") for name in first) == 24
    for seed in range(10):
        assert sweep(spec, tmp_path / f"seed{seed}", seed, 1 + seed % 2, "--quick") == first, f"hash seed {seed}"


def test_the_whole_tiny_sweep_with_one_and_two_jobs(spec: Path, tmp_path: Path) -> None:
    assert sweep(spec, tmp_path / "one", 1, 1) == sweep(spec, tmp_path / "two", 2, 2)


def test_result_files_do_not_depend_on_where_the_mix_lies(spec: Path, tmp_path: Path) -> None:
    """Mutation: `del asked["mix"]` removed in `inputs`: the path becomes part of every key."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = write_tiny_sweep(elsewhere)
    assert sweep(spec, tmp_path / "a", 0, 1, "--quick") == sweep(other, tmp_path / "b", 0, 1, "--quick")
