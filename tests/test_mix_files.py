"""Damaged mix files, and traces that do not belong together: one line, never another number."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sweep_cases import write_tiny_mixes

from tesserasim.errors import InputError
from tesserasim.trace import mix as mixes
from tesserasim.trace.mix import load_mix, with_lengths
from tesserasim.trace.model import Buffer, Trace
from tesserasim.trace.parquet import read_trace, write_trace

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixes")
    write_tiny_mixes(directory)
    return directory


@pytest.fixture
def files(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "mix")
    return tmp_path / "mix"


def refused(path: Path, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_mix(path)
    line = str(caught.value)
    assert line.isprintable() and len(line) < 600 and line.startswith(str(path.parent))
    for word in words:
        assert word in line


def changed(file: Path, key: str, value: str) -> None:
    """Set `key = value` in a mix file; a key that it lacks is added."""
    lines = [x for x in file.read_text().splitlines() if not x.startswith(f"{key} =")]
    file.write_text("\n".join([*lines, f"{key} = {value}"]))


WRONG = ["0", "-1", "1.9", "true", '"64"', "nan", "inf", "1e308", str(10**18), "[]", "9" * 5000]


class TestKeys:
    """Mutations tried: `int(table.take(key))` for lengths; no `table.finish`; read_toml without RecursionError."""

    @pytest.mark.parametrize("value", WRONG)
    @pytest.mark.parametrize("key", ["input_tokens", "output_tokens", "prefill_batch"])
    def test_lengths(self, files: Path, key: str, value: str) -> None:
        changed(files / "tiny.toml", key, value)
        refused(files / "tiny.toml", key if len(value) < 5000 else "not valid TOML")

    @pytest.mark.parametrize("value", ["5", '""', "[]", '"x\\ny"', "true"])
    @pytest.mark.parametrize("key", ["name", "model", "kind"])
    def test_texts(self, files: Path, key: str, value: str) -> None:
        changed(files / "tiny.toml", key, value)
        refused(files / "tiny.toml", key)

    def test_unknown_keys_name_the_near_one(self, files: Path) -> None:
        changed(files / "tiny.toml", "prefil_batch", "4")
        refused(files / "tiny.toml", "unknown key 'prefil_batch'; did you mean 'prefill_batch'?")
        changed(files / "pixels.toml", "x" * 5000, "4")
        refused(files / "pixels.toml", "unknown key 'xxx")

    @pytest.mark.parametrize("value", ["5", '"abc"', "[5]"])
    def test_incomplete(self, files: Path, value: str) -> None:
        changed(files / "tiny.toml", "incomplete", value)
        refused(files / "tiny.toml", "incomplete")

    @pytest.mark.parametrize("value", [
        "[]", "5", '[["denoise"]]', '[["denoise", 0]]', '[["denoise", 1.9]]', '[["denoise", true]]', '"ab"', '["a1"]',
        '[["denoise", 100000000000]]', '[["nope", 1]]', '[["denoise", 1], ["denoise", 1]]', "[[1, 1]]",
    ])  # fmt: skip
    def test_stages(self, files: Path, value: str) -> None:
        changed(files / "pixels.toml", "stages", value)
        refused(files / "pixels.toml")

    @pytest.mark.parametrize("text", [b"\xff\xfe", b"a=" + b"[" * 50_000, b"", b"a = ", b"x = 1\n" * 300_000])
    def test_what_is_no_mix(self, files: Path, text: bytes) -> None:
        (files / "tiny.toml").write_bytes(text)
        refused(files / "tiny.toml")

    def test_only_regular_files(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.toml")
        refused(tmp_path / "pipe.toml", "a pipe, not a mix file")
        with pytest.raises(InputError, match="a device"):
            load_mix("/dev/zero")


class TestPatterns:
    """Mutations tried: absolute patterns allowed; no MAX_FILES in `_matches` -> fails."""

    @pytest.mark.parametrize("value", [
        "[]", '"x"', "[5]", '["nope*.parquet"]', '["**"]', '["**/*.parquet"]', '["/etc/passwd"]', '["/tmp/*.parquet"]',
        '[""]', '["\\u0000"]', '["*"]', '["[z"]', '["none.parquet"]', '["' + "x" * 5000 + '"]',
    ])  # fmt: skip
    def test_patterns(self, files: Path, value: str) -> None:
        changed(files / "tiny.toml", "traces", value)
        with pytest.raises(InputError) as caught:
            load_mix(files / "tiny.toml")
        assert str(caught.value).isprintable() and len(str(caught.value)) < 600

    @pytest.mark.parametrize("pattern", ["/tmp/*.parquet", "**/*.parquet"])
    def test_a_pattern_stays_beside_the_mix(self, files: Path, pattern: str) -> None:
        changed(files / "tiny.toml", "traces", f'["{pattern}"]')
        refused(files / "tiny.toml", "a pattern is relative to the mix file, without '**'")

    def test_too_many_files(self, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mixes, "MAX_FILES", 3)
        changed(files / "tiny.toml", "traces", '["tiny-decode-*.parquet"]')
        refused(files / "tiny.toml", "matches more than 3 files")


def rewritten(path: Path, change: Callable[[Trace], Trace]) -> None:
    write_trace(change(read_trace(path)), path)


def meta(**fields: Any) -> Callable[[Trace], Trace]:
    return lambda trace: dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, **fields))


def buffers(role: str, change: Callable[[Buffer], Buffer]) -> Callable[[Trace], Trace]:
    return lambda t: dataclasses.replace(t, buffers=tuple(change(b) if b.role == role else b for b in t.buffers))


class TestTracesThatDisagree:
    """Mutations tried: state left out of `_SHARED_FIELDS`; no test of the model; no test of points -> each fails."""

    @pytest.mark.parametrize("name", ["bytes_per_token", "bytes_per_sequence"])
    def test_state(self, files: Path, name: str) -> None:
        def more(b: Buffer) -> Buffer:
            return dataclasses.replace(b, **{name: getattr(b, name) + 1}, nbytes=b.nbytes + 1)  # type: ignore[arg-type]

        rewritten(files / "tiny-decode-0.parquet", buffers("state", more))
        refused(files / "tiny.toml", f"{name} is", "prefill", "decode (batch 1")

    def test_weights(self, files: Path) -> None:
        more = buffers("weight", lambda b: dataclasses.replace(b, nbytes=b.nbytes + 1))
        rewritten(files / "tiny-decode-0.parquet", more)
        refused(files / "tiny.toml", "nbytes is")

    def test_models(self, files: Path) -> None:
        rewritten(files / "tiny-decode-3.parquet", meta(model="another"))
        refused(files / "tiny.toml", "traces of several models", "'another'")

    def test_two_traces_at_one_point_are_both_named(self, files: Path) -> None:
        shutil.copy(files / "tiny-decode-0.parquet", files / "tiny-decode-00.parquet")
        changed(files / "tiny.toml", "traces", '["tiny-*.parquet"]')
        refused(files / "tiny.toml", "two traces of decode", "tiny-decode-0.parquet", "tiny-decode-00.parquet")

    def test_a_unit_that_no_request_launches(self, files: Path) -> None:
        unit = {"name": "zz", "phase": "decode", "batch": 1, "tokens": 1, "context": 64}
        rewritten(files / "tiny-decode-0.parquet", meta(unit=unit))
        refused(files / "tiny.toml", "unit 'zz', which no request launches")

    def test_a_trace_without_kernels(self, files: Path) -> None:
        def empty(trace: Trace) -> Trace:
            unused = tuple(dataclasses.replace(b, first_use=-1, last_use=-1) for b in trace.buffers)
            return Trace(trace.meta, (), unused)

        rewritten(files / "tiny-decode-0.parquet", empty)
        refused(files / "tiny.toml", "without kernels")

    def test_an_imported_profile_of_two_clocks(self, files: Path) -> None:
        """It can be read, but no request has a gap of a century."""

        def torn(trace: Trace) -> Trace:
            kernels = (*trace.kernels[:1], dataclasses.replace(trace.kernels[1], gap_ns=2**62), *trace.kernels[2:])
            return dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, origin="imported"), kernels=kernels)

        rewritten(files / "tiny-decode-0.parquet", torn)
        refused(files / "tiny.toml", "tiny-decode-0.parquet: row 1: gap_ns")


class TestOtherLengths:
    """Mutations tried: `input_tokens or mix.input_tokens`; no MAX_LENGTHS in `validate` -> each fails."""

    @pytest.mark.parametrize("value", [0, -1, 100_001, 10**18, 1.5, True, "4"])
    def test_with_lengths_keeps_the_limits(self, files: Path, value: Any) -> None:
        mix = load_mix(files / "tiny.toml")
        with pytest.raises(InputError, match=re.escape("output_tokens must be a whole number from 1 to 100000")):
            with_lengths(mix, output_tokens=value)
        with pytest.raises(InputError, match="input_tokens"):
            with_lengths(mix, input_tokens=value if not isinstance(value, int) or value < 1 or value is True else 10**7)

    def test_absent_lengths_stay(self, files: Path) -> None:
        mix = load_mix(files / "tiny.toml")
        assert with_lengths(mix) == mix
        assert with_lengths(mix, output_tokens=3).output_tokens == 3
