"""Lists of devices, and what a machine makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from hw import partition
from hw.devices import DeviceSpec, make_devices, names, parse_devices
from hw.errors import HardwareError
from hw.partition import Partition

pytestmark = pytest.mark.quick


def test_lists_are_read() -> None:
    assert parse_devices("0,1") == (DeviceSpec(0), DeviceSpec(1))
    assert parse_devices("0:64, 1~32") == (DeviceSpec(0, 64), DeviceSpec(1, None, 32))
    assert parse_devices("0:48~16,0:68") == (DeviceSpec(0, 48, 16), DeviceSpec(0, 68))


@pytest.mark.parametrize("bad", ["", "a", "0:", "0~", "0:64:3", "-1", "0,0", "0:0", "9999", "0:64,,1", "0 1", "²"])
def test_what_is_no_list_is_refused(bad: str) -> None:
    with pytest.raises(ValueError):
        parse_devices(bad)


def test_parts_of_one_gpu_get_letters() -> None:
    assert names(parse_devices("0:64,1~32")) == ["gpu0", "gpu1"]
    assert names(parse_devices("0:64,0:68")) == ["a", "b"]
    assert names(parse_devices("0:64,0:68,1")) == ["a", "b", "c"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """GPUs of 132 multiprocessors; what is asked of them."""
    asked: list[tuple[int, list[int]]] = []

    def split(sms: Sequence[int], device: int, labels: Sequence[str], rest: bool) -> list[Partition]:
        asked.append((device, list(sms)))
        left, made = 132, []
        for i, (name, n) in enumerate(zip(labels, sms, strict=True)):
            count = left if rest and i + 1 == len(sms) else min(left, -(-n // 8) * 8)
            left -= count
            made.append(Partition(name, count, device, object()))
        return made

    monkeypatch.setattr(partition, "split", split)
    monkeypatch.setattr(partition, "connect", lambda gpus: asked.append((-1, list(gpus))))
    monkeypatch.setattr(partition, "whole", lambda device, name: Partition(name, 132, device))
    return asked


def test_what_takes_the_rest_comes_last_and_throttles_are_beside(machine: list[tuple[int, list[int]]]) -> None:
    found = make_devices(parse_devices("0:64,1~32"), 2)
    assert [(p.name, p.device) for p in found.parts] == [("gpu0", 0), ("gpu1", 1)]
    assert found.parts[1].sms == 100 and found.throttles["gpu1"].sms == 32
    assert found.facts()["gpu1"] == {"sms": 100, "gpu": 1, "throttle": 32}
    assert found.gpu_name("H200-SXM", found.parts[1]) == "H200-SXM/100sm~32"
    assert machine[0] == (-1, [0, 1])  # both can read each other's memory


def test_one_device_of_a_gpu_has_the_multiprocessors_that_were_asked_for(machine: list[tuple[int, list[int]]]) -> None:
    found = make_devices(parse_devices("0:64,1"), 2)
    assert [p.sms for p in found.parts] == [64, 132] and found.facts()["gpu0"] == {"sms": 64, "gpu": 0}


def test_parts_keep_the_order_of_the_list(machine: list[tuple[int, list[int]]]) -> None:
    found = make_devices(parse_devices("0,0:40"), 1)
    assert [(p.name, p.sms) for p in found.parts] == [("a", 92), ("b", 40)]
    with pytest.raises(HardwareError, match="no GPU 1 here"):
        make_devices(parse_devices("0,1"), 1)
