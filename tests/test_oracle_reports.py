"""The tables over the oracle's reports, on reports with known answers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "experiments" / "validation"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def access(buffer: int, mode: str, nbytes: int, **more: Any) -> dict[str, Any]:
    plain = {"offset": 0, "extent": "exact", "covers": mode == "W", "evidence": "schema"}
    return {"buffer": buffer, "mode": mode, "nbytes": nbytes} | plain | more


def kernel(node: int, accesses: list[dict[str, Any]], writes: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    roles = {9: "state", 8: "weight"}
    buffers = {
        str(a["buffer"]): {
            "name": f"b{a['buffer']}", "nbytes": 1000, "role": roles.get(a["buffer"], "activation"),
            "bytes_per_token": 0, "bytes_per_sequence": 0,
        }
        for a in accesses
    }  # fmt: skip
    plain = {"status": "ok", "reason": "", "unknown": False, "reads": []}
    name = {"node": node, "site": f"layers.1/op#{node}", "name": f"k{node}"}
    return {**name, "accesses": accesses, "buffers": buffers, "writes": writes, **plain, **more}


def report(*kernels: dict[str, Any]) -> dict[str, Any]:
    head = {"model": "m", "unit": {"name": "decode"}, "gpu": "H200", "same_kernels_as_trace": True}
    return {**head, "kernels": list(kernels)}


def chain(declared: int, written: int, **more: Any) -> dict[str, Any]:
    """A writes b0, which B reads as a whole."""
    seen = {"access": 0, "bytes": written, "first": 0, "end": written, "spans": [[0, written]]}
    first = kernel(0, [access(0, "W", declared, **more)], [seen])
    return report(first, kernel(1, [access(0, "R", 1000), access(1, "W", 10)], []))


@pytest.mark.parametrize(
    "declared, written, more, want",
    [(600, 600, {}, 1.0), (600, 400, {}, 1.5), (900, 300, {"covers": False, "extent": "superset"}, 3.0)],
)
def test_ratio_of_a_chain(declared: int, written: int, more: dict[str, Any], want: float) -> None:
    found = load("transfer_ratio").ratios(chain(declared, written, **more))
    assert len(found) > 50 and set(found) == {want}


def test_old_bytes_of_a_partial_write_count_against_it() -> None:
    """A writes b0; B is declared to write perhaps all of it, so A's bytes go to B and all goes back."""
    whole = {"access": 0, "bytes": 1000, "first": 0, "end": 1000, "spans": [[0, 1000]]}
    half = {"access": 0, "bytes": 500, "first": 0, "end": 500, "spans": [[0, 500]]}
    kernels = [
        kernel(0, [access(0, "W", 1000)], [whole]),
        kernel(1, [access(0, "W", 1000, covers=False, extent="superset")], [half]),
        kernel(2, [access(0, "R", 1000)], []),
    ]
    found = load("transfer_ratio").ratios(report(*kernels))
    # Placements 0|12, 01|2, 02|1: declared 1000, 1000, 2000; observed 500, 1000, 500 bytes.
    assert set(found) == {2.0, 1.0, 4.0}


def test_appends_to_state_count_by_their_bytes() -> None:
    append = access(9, "W", 64, covers=False)
    seen = {"access": 0, "bytes": 32, "first": 400, "end": 900, "intervals": 200}
    found = load("transfer_ratio").ratios(
        report(kernel(0, [append], [seen]), kernel(1, [access(9, "R", 1000), access(1, "W", 10)], []))
    )
    assert set(found) == {2.0}


def test_groups_stay_together() -> None:
    unknown = [dict(a, evidence="unknown") for a in (access(0, "R", 1000), access(1, "W", 10))]
    kernels = [*chain(600, 400)["kernels"][:1], kernel(1, unknown, [])]
    assert load("transfer_ratio").ratios(report(*kernels)) == []


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = load("oracle_summary")
    folder = tmp_path / "m"
    folder.mkdir()
    assert summary.main(tmp_path) == 2
    fine = [kernel(i, [access(0, "W", 8)], [], reads=[{"seen": "observed"}]) for i in range(50)]

    def outcome(*more: dict[str, Any]) -> int:
        (folder / "u.json").write_text(json.dumps(report(*fine, *more)))
        return int(summary.main(tmp_path))

    assert outcome() == 0
    assert "50/50" in capsys.readouterr().out
    assert outcome(kernel(50, [], [], status="skipped", reason="nondeterministic")) == 0  # 1 of 51
    assert outcome(*(kernel(i, [], [], status="skipped") for i in (50, 51))) == 1
    assert outcome(*(kernel(i, [], [], unknown=True) for i in (50, 51))) == 1
    capsys.readouterr()
    assert outcome(kernel(50, [], [], status="missed_read", reason="3 bytes", unknown=True)) == 1
    assert "missed_read layers.1/op#50: 3 bytes" in capsys.readouterr().out
