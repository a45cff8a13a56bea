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
