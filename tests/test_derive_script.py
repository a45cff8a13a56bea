"""The comparison of derived with captured units: same configurations, same accounts on both sides."""

from __future__ import annotations

import json
from typing import Any

import pytest
from derive_cases import CONFIGS
from test_oracle_scripts import FOLDER, load

from tesserasim.derive.config import parse_config
from tesserasim.trace.parquet import read_trace

pytestmark = pytest.mark.quick

TRACES = FOLDER.parents[1] / "traces"


@pytest.fixture(scope="module")
def script() -> Any:
    return load("derived_vs_captured")


@pytest.mark.parametrize(("key", "name"), [("llama-3-8b", "Llama-3-8B"), ("gpt-oss-20b", "gpt-oss-20b")])
def test_its_configurations_are_the_published_ones(script: Any, key: str, name: str) -> None:
    assert parse_config(json.loads(script.CONFIGS[key]), "", "x") == parse_config(CONFIGS[name], "", "x")


def test_a_unit_is_compared_like_with_like(script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides without launch cost; what kernels do adds up to the unit; every row says how far it is."""
    real = read_trace(TRACES / "llama-3-8b" / "decode-b8-c512.parquet")
    key = ("decode", 8, 512)
    monkeypatch.setattr(script, "captured", lambda model: {key: real})
    rows = list(script.compare("llama-3-8b", True))
    text = capsys.readouterr().out
    assert script.unit_us(real) == pytest.approx((real.replay_ns - real.launch_ns) / 1e3)
    for side in (real, script.derived("llama-3-8b", {key: real})[key]):
        assert sum(script.by_role(side).values()) == pytest.approx(script.unit_us(side))
        assert set(script.by_role(side)) >= {"attention", "gemm wqkv", "gemm w2", "norms, rope, SwiGLU, sampling"}
    ((*_, captured_us, derived_us, error),) = rows
    assert error == pytest.approx(derived_us / captured_us - 1.0) and f"{error:+.1%}" in text
