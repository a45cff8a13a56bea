"""`costs predict|evaluate|fit` on small inputs: documents fit their schemas, bad input is one line."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd
import pytest

from tesserasim.cli import main
from tesserasim.costs import learn, validate
from tesserasim.costs.boost import BoostParams
from tesserasim.costs.shipped import KINDS, model_from, shipped_text, text_of
from tesserasim.trace.model import Kernel, Trace, TraceMeta
from tesserasim.trace.parquet import write_trace

pytestmark = pytest.mark.quick

SAMPLE = Path(__file__).parent / "data" / "costs"


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


def check(document: Any, name: str) -> None:
    text = resources.files("tesserasim").joinpath("schemas", f"{name}.json").read_text(encoding="utf-8")
    jsonschema.validate(document, json.loads(text), cls=jsonschema.Draft202012Validator)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    shape = {"m": 32, "n": 4096, "k": 4096}
    kernels = (
        Kernel(0, "g", "layers.0.mlp|mm|0", "gemm", shape=shape, duration_ns=12_000, act_dtype="bf16"),
        Kernel(1, "c", "conv|0", "conv", duration_ns=5_000, read_bytes=10**6),
    )
    path = tmp_path / "t.parquet"
    write_trace(Trace(TraceMeta("captured", "m", {"name": "u"}, "H200-SXM"), kernels), path)
    return path


def test_predict(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = output(capsys, "costs", "predict", str(trace), "--cluster", "2xL40S+1xH200-SXM", "--json")
    check(found, "costs-predict")
    assert [g["gpu"] for g in found["gpus"]] == ["L40S", "H200-SXM"] and len(found["times"]) == 4
    assert found["gpus"][1] == {"gpu": "H200-SXM", "total_us": 17.0, "time_by_source": {"captured": 1.0}}
    sums = sum(t["us"] for t in found["times"] if t["gpu"] == "L40S")
    assert sums == pytest.approx(found["gpus"][0]["total_us"], abs=0.01)
    site = "layers.0.mlp|mm|0"
    found = output(capsys, "costs", "predict", str(trace), "--cluster", "L40S", "--explain", site, "--json")
    check(found, "costs-predict")
    (row,) = found["explained"]
    assert row["source"] == "calibrated" and row["shape"]["n"] == 4096 and row["low_us"] < row["us"] < row["high_us"]
    assert main(["costs", "predict", str(trace), "--cluster", "L40S", "--explain", site]) == 0
    assert "mechanisms_us" in capsys.readouterr().out


def test_evaluate_as_shipped(capsys: pytest.CaptureFixture[str]) -> None:
    table = str(SAMPLE / "attention_decode.parquet")
    for reference in ("H200", "none"):
        rows = output(capsys, "costs", "evaluate", table, "--as-shipped", "--reference", reference, "--json")
        check(rows, "costs-evaluate")
        gpus = {r["gpu"] for r in rows}
        assert len(gpus) == len(rows) >= 6 and ("H200-SXM" in gpus) == (reference == "none")
        assert all(r["mape"] < 0.3 for r in rows)
    assert main(["costs", "evaluate", table]) == 0
    assert "median_ape" in capsys.readouterr().out


def test_fit_writes_what_ships(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Twice the same bytes, in the format that ships; with few trees, since only the way is tested here."""
    few = BoostParams(trees=3, depth=3)
    for function in (learn.fit_gpu, validate.hold_out):
        monkeypatch.setattr(function, "__defaults__", tuple(
            few if isinstance(d, BoostParams) else d for d in function.__defaults__ or ()))  # fmt: skip
    monkeypatch.setattr(validate, "INNER", few)
    table = str(SAMPLE / "elementwise_quant.parquet")
    rows = output(capsys, "costs", "fit", table, "--out", str(tmp_path / "a"), "--json")
    check(rows, "costs-fit")
    assert {Path(r["file"]).name for r in rows} == {"elementwise.H200-SXM.json", "elementwise.none.json"}
    assert main(["costs", "fit", table, "--out", str(tmp_path / "b")]) == 0
    for name in ("elementwise.H200-SXM.json", "elementwise.none.json"):
        first = (tmp_path / "a" / name).read_bytes()
        assert first == (tmp_path / "b" / name).read_bytes()
        assert set(json.loads(first)) == set(json.loads(shipped_text("elementwise", None)))


def test_shipped_files_are_whole_and_small() -> None:
    total = 0
    for kind in KINDS:
        for reference in ("H200-SXM", None):
            text = shipped_text(kind, reference)
            document = json.loads(text)
            assert text == text_of(document) and document["source"] and document["rows"]
            assert (document["kind"], document["reference"]) == (kind, reference)
            model = model_from(document)
            assert document["schema"] == 2 and set(model.forests) == set(model.spreads)
            assert model.between.dies >= 4 and 0 < model.between.systematic < 1
            total += len(text)
    assert total < 5_000_000


BAD = {
    "no action": ["costs"],
    "no such trace": ["costs", "predict", "/nonexistent.parquet", "--cluster", "L40S"],
    "no such table": ["costs", "evaluate", "/nonexistent.parquet"],
    "two ways": ["costs", "evaluate", "x", "--as-shipped", "--cross-validate"],
    "unknown reference": ["costs", "evaluate", "x", "--reference", "A100"],
    "fit without out": ["costs", "fit", "x"],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(BAD[name])
    except SystemExit as end:
        code = int(str(end.code))
    captured = capsys.readouterr()
    assert code == 2 and not captured.out and captured.err.count("\n") == 1 and "Traceback" not in captured.err


def test_unknown_sites_and_other_tables(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["costs", "predict", str(trace), "--cluster", "L40S", "--explain", "layers.0.mlp|mm|1"]) == 2
    assert "did you mean" in capsys.readouterr().err
    other = tmp_path / "nccl.parquet"
    pd.DataFrame({"kernel_kind": ["collective"], "gpu": ["L40S"], "time_us": [1.0]}).to_parquet(other)
    assert main(["costs", "evaluate", str(other)]) == 2
    assert "no rows of a kind that has a model" in capsys.readouterr().err
