"""The registry of models, a user's own module, and the grids."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
from hw.errors import HardwareError
from hw.workloads import check_workload, load_workload, workload_names
from hw.workloads.base import UnitSpec, decode_grid, prefill_grid

pytestmark = pytest.mark.quick

OWN = """
from hw.workloads import NamedTensor, UnitSpec, Workload

class Own(Workload):
    name = model = "own"
    def units(self): return [UnitSpec("decode", "decode", 1, 1, 8)]
    def prepare(self, unit): return lambda: None
    def named_tensors(self): return []
    def weights_of(self, module): return "other"

def make(device): return Own(device)
def wrong(device): return 3
"""


def test_a_users_own_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    workload = load_workload(f"{path}:make", device="cpu")
    assert (workload.name, workload.device, len(workload.units())) == ("own", "cpu", 1)
    for name, message in (
        (f"{path}:gone", "no function or class 'gone'"), (f"{path}:wrong", "returned int"),
        (f"{tmp_path}/absent.py:make", "no file"), ("llama", "unknown model 'llama'; known: llama-3-8b"),
    ):  # fmt: skip
        with pytest.raises(HardwareError, match=message):
            load_workload(name, device="cpu")


def test_every_known_name_passes_the_check() -> None:
    for name in workload_names():
        check_workload(name)


def test_file_names() -> None:
    """Captured files keep their names; only a prefill on a past says its context."""
    assert UnitSpec("prefill", "prefill", 1, 2048, 2048).file_stem == "prefill-b1-t2048"
    assert UnitSpec("prefill", "prefill", 1, 2048, 6144).file_stem == "prefill-b1-t2048-c6144"
    assert UnitSpec("decode", "decode", 8, 1, 512).file_stem == "decode-b8-c512"
    assert UnitSpec("denoise", "denoise", 1).file_stem == "denoise-b1"


def test_grids() -> None:
    stems = [u.file_stem for u in prefill_grid()]
    assert [f"prefill-b1-t{t}" for t in (256, 512, 1024, 2048, 4096, 8192)] == stems[:6]
    assert stems[6:] == ["prefill-b1-t2048-c6144", "prefill-b1-t2048-c18432"]
    decode = decode_grid(lambda b, c: b * c <= 256 * 2048)
    assert len(decode) == 13 and {u.batch for u in decode} == {1, 8, 32, 128, 256}
    assert {u.context for u in decode} == {512, 2048, 8192}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module\n", r"mine.py:1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1\ndef make(:\n", r"mine.py:2: SyntaxError"),
        ("def make(device):\n    x = 1\n    raise ValueError('bad')\n", r"mine.py:3: ValueError: bad"),
        ("def make():\n    return 1\n", r"TypeError: make\(\) got an unexpected keyword argument 'device'"),
    ],
)
def test_a_failing_file_of_a_user_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    """Mutation: the error comes through as a bug of ours."""
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(HardwareError, match=message):
        load_workload(f"{tmp_path}/mine.py:make", device="cpu")


def test_units_that_no_model_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are captured first. Mutation: a misspelt unit is skipped without a word."""
    pytest.importorskip("cuda.bindings")
    from hw.capture import run

    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "decode-b1-c8.parquet").write_bytes(b"captured before")
    monkeypatch.setattr(run, "machine", dict)
    monkeypatch.setattr(run, "_launch", lambda out, info: {})
    monkeypatch.setattr(run, "load_workload", lambda name: load_workload(name, "cpu"))
    manifests = []
    monkeypatch.setattr(run, "write_manifest", manifests.append)
    name = f"{tmp_path}/mine.py:make"
    assert run.capture_all([name], tmp_path, ["decode-b1-c8"], [], 60.0) == 0
    with pytest.raises(HardwareError, match=r"no unit decode-b2-c8 in .*mine.py:make; there are decode-b1-c8$"):
        run.capture_all([name], tmp_path, ["decode-b1-c8", "decode-b2-c8"], [], 60.0)
    assert manifests == [tmp_path, tmp_path]


def test_left_out_points_of_a_model_that_has_none_are_refused(tmp_path: Path) -> None:
    """Mutation: they are skipped without a word."""
    pytest.importorskip("cuda.bindings")
    from hw.capture import run

    with pytest.raises(HardwareError, match="left out of llama-3-8b only; add --model llama-3-8b"):
        run.capture_all(["gpt-oss-20b"], tmp_path, [], ["16x1536"], 60.0)
