"""`derive`: its document, its files, a simulation of them, and one clear line for what cannot be derived."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from derive_cases import CONFIGS, TINY, write_config

from tesserasim import api
from tesserasim.cli import main
from tesserasim.trace.mix import load_mix

pytestmark = pytest.mark.quick

GRID = ("--prefill", "64,128", "--batches", "1,4,8", "--contexts", "64,256", "--input-tokens", "64",
        "--output-tokens", "4")  # fmt: skip


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


def check(document: Any) -> None:
    text = resources.files("tesserasim").joinpath("schemas", "derive.json").read_text(encoding="utf-8")
    jsonschema.validate(document, json.loads(text), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(("more", "ranks"), [((), 1), (("--tp", "2", "--weights", "fp8"), 2)])
def test_document_and_files(more: tuple[str, ...], ranks: int, tmp_path: Path, capsys: Any) -> None:
    config = write_config(tmp_path, TINY)
    found = output(capsys, "derive", str(config), *GRID, *more, "--out", str(tmp_path / "out"), "--json")
    check(found)
    assert found["origin"] == "derived" and found["tp"] == ranks
    assert len(found["units"]) == 2 + 3 * 2
    assert (found["collectives"] is None) == (ranks == 1)
    mix = load_mix(found["mix"])
    assert mix.origins == ("derived",) and (mix.input_tokens, mix.output_tokens) == (64, 4)
    traces = [t for unit in mix.units for t in mix.traces[unit]]
    assert sorted(len(t) for t in traces) == sorted(u["kernels"] for u in found["units"])
    total = sum(t.busy_ns + sum(t.replay_gaps_ns) for t in traces) / 1e3
    assert sum(u["modelled_us"] for u in found["units"]) == pytest.approx(total, abs=0.01)


@pytest.mark.parametrize("policy", ["replicas-lo", "pd", "af", "kernel"])
def test_a_derived_mix_is_simulated_and_marked(policy: str, tmp_path: Path, capsys: Any) -> None:
    moe = {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    config, out = write_config(tmp_path, moe), tmp_path / "out"
    mix = output(capsys, "derive", str(config), *GRID, "--out", str(out), "--json")["mix"]
    case = ("--mix", mix, "--cluster", "A100-80GB-PCIe+L40S@200Gbps", "--policy", policy, "--max-seqs", "8")
    row = output(capsys, "simulate", *case, "--check", "--json")
    assert row["status"] == "ok" and row["origins"] == ["derived"] and row["throughput_per_s"] > 0
    assert main(["simulate", *case]) == 0
    assert "derived from a configuration, nothing was measured" in capsys.readouterr().out


def test_text_says_derived_and_defaults_follow_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {**CONFIGS["gpt-oss-20b"], "num_hidden_layers": 2, "vocab_size": 4096}
    config = write_config(tmp_path, small, "mini-oss")
    assert main(["derive", str(config), *GRID]) == 0
    text = capsys.readouterr().out
    assert "DERIVED, nothing was measured" in text and "derived/mini-oss-mxfp4/mini-oss-mxfp4.toml" in text
    assert api.load_mix(tmp_path / "derived" / "mini-oss-mxfp4" / "mini-oss-mxfp4.toml").model == "mini-oss-mxfp4"


def test_mla_is_said_to_be_analytic(tmp_path: Path, capsys: Any) -> None:
    small = {**CONFIGS["DeepSeek-V3"], "num_hidden_layers": 5, "n_routed_experts": 16, "vocab_size": 4096}
    config = write_config(tmp_path, small)
    found = output(capsys, "derive", str(config), *GRID, "--out", str(tmp_path / "o"), "--json")
    check(found)
    assert found["weights"] == "fp8" and any("MLA is modelled analytically" in n for n in found["notes"])
    assert any("multi-token prediction" in n for n in found["notes"])


def test_an_unknown_quantisation_is_said(tmp_path: Path, capsys: Any) -> None:
    config = write_config(tmp_path, {**TINY, "quantization_config": {"quant_method": "awq"}})
    found = output(capsys, "derive", str(config), *GRID, "--out", str(tmp_path / "o"), "--json")
    assert found["weights"] == "bf16" and any("'awq'" in n for n in found["notes"])


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in TINY.items() if k != key}


HOSTILE: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "no hidden size": (without("hidden_size"), (), "hidden_size"),
    "no layers": (without("num_hidden_layers"), (), "num_hidden_layers"),
    "no vocabulary": (without("vocab_size"), (), "vocab_size"),
    "no feed-forward": (without("intermediate_size"), (), "intermediate_size"),
    "heads over ranks": (TINY, ("--tp", "3"), "num_attention_heads 8 is not divisible by --tp 3"),
    "kv heads over ranks": ({**TINY, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 32},
                            ("--tp", "4"), "num_key_value_heads 6"),
    "width over ranks": ({**TINY, "intermediate_size": 510}, ("--tp", "4"), "intermediate_size 510"),
    "too many ranks": (TINY, ("--tp", "4096"), "--tp"),
    "absurd width": ({**TINY, "hidden_size": 10**30}, (), "hidden_size"),
    "absurd total": ({**TINY, "hidden_size": 1 << 18, "num_hidden_layers": 1000, "vocab_size": 1 << 24,
                      "intermediate_size": 1 << 22}, (), "trillion"),
    "negative": ({**TINY, "num_attention_heads": -8}, (), "num_attention_heads"),
    "zero layers": ({**TINY, "num_hidden_layers": 0}, (), "num_hidden_layers"),
    "a float": ({**TINY, "hidden_size": 256.5}, (), "hidden_size"),
    "not a number": (json.dumps(TINY).replace("256", "NaN", 1), (), "hidden_size"),
    "a word": ({**TINY, "hidden_size": "256"}, (), "hidden_size"),
    "a boolean": ({**TINY, "num_hidden_layers": True}, (), "num_hidden_layers"),
    "kv heads do not divide": ({**TINY, "num_key_value_heads": 3}, (), "num_key_value_heads"),
    "heads do not divide": ({**TINY, "num_attention_heads": 6, "num_key_value_heads": 6}, (), "head_dim"),
    "tied by a word": ({**TINY, "tie_word_embeddings": "no"}, (), "tie_word_embeddings"),
    "layer types": ({**TINY, "layer_types": ["full_attention"]}, (), "layer_types"),
    "other layer types": ({**TINY, "layer_types": ["linear_attention"] * 2}, (), "layer_types"),
    "more choices than experts": ({**TINY, "num_local_experts": 4, "num_experts_per_tok": 9}, (),
                                  "num_experts_per_tok"),
    "experts without a choice": ({**TINY, "num_local_experts": 4}, (), "num_experts_per_tok"),
    "dense layers by words": ({**TINY, "num_local_experts": 4, "num_experts_per_tok": 1, "mlp_only_layers": "x"}, (),
                              "mlp_only_layers"),
    "mxfp4 without experts": (TINY, ("--weights", "mxfp4"), "mxfp4"),
    "an encoder and decoder": ({"model_type": "t5", "is_encoder_decoder": True, "d_model": 512}, (), "t5"),
    "a state-space model": ({"model_type": "mamba2", "hidden_size": 64, "state_size": 128}, (), "mamba2"),
    "a list": ([1, 2], (), "JSON object"),
    "a word alone": ('"x"', (), "JSON object"),
    "empty": ("", (), "not JSON"),
    "cut off": (json.dumps(TINY)[:-9], (), "not JSON"),
    "nested": ("[" * 100_000, (), "nested"),
    "huge": (" " * ((4 << 20) + 1), (), "larger than 4 MiB"),
    "name with new lines": ({**TINY, "model_type": "a\nb"}, (), "model_type"),
    "unknown GPU": (TINY, ("--gpu", "H2000"), "H2000"),
    "unknown link": (TINY, ("--link", "nvlink9"), "nvlink9"),
    "no batches": (TINY, ("--batches", "0"), "batches"),
    "prompts per prefill": (TINY, ("--prefill-batch", "100000"), "--prefill-batch"),
    "long answers": (TINY, ("--output-tokens", "100001"), "--output-tokens"),
    "twice a batch": (TINY, ("--batches", "4,4"), "batches"),
    "a path as name": (TINY, ("--name", "a/b"), "--name"),
    "weights": (TINY, ("--weights", "int3"), "weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_configurations_are_one_line(case: str, tmp_path: Path, capsys: Any) -> None:
    config, options, word = HOSTILE[case]
    path = write_config(tmp_path, config)
    try:
        code = main(["derive", str(path), *options, "--out", str(tmp_path / "out")])
    except SystemExit as end:
        code = int(str(end.code))
    seen = capsys.readouterr()
    assert code == 2 and seen.out == ""
    assert seen.err.count("\n") == 1 and word in seen.err, seen.err
    assert not (tmp_path / "out").exists()


def test_files_that_are_none(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "taken").write_text("x")
    good = write_config(tmp_path, TINY)
    lines = [
        ["derive", str(tmp_path / "none.json")], ["derive", str(tmp_path)], ["derive", str(tmp_path / "binary.json")],
        ["derive", str(good), "--out", str(tmp_path / "taken")],
    ]  # fmt: skip
    for line in lines:
        assert main(line) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "taken").read_text() == "x"
