"""Rows of a cache: against marking the elements of the tensor itself."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hw.errors import HardwareError  # noqa: E402
from hw.replay.rows import Row, appended  # noqa: E402

LAYOUTS = [  # shape, order of axes in memory, tokens
    ((2, 3, 9, 4), (0, 1, 2, 3), 1), ((2, 3, 9, 4), (2, 0, 1, 3), 2), ((2, 3, 9, 4), (0, 2, 1, 3), 3),
    ((1, 3, 9, 4), (0, 1, 2, 3), 9), ((1, 1, 9, 4), (0, 1, 2, 3), 2), ((2, 3, 9, 4), (1, 2, 0, 3), 1),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("shape", "axes", "tokens"), LAYOUTS)
def test_rows_are_the_bytes_of_the_last_positions(shape: tuple[int, ...], axes: tuple[int, ...], tokens: int) -> None:
    memory = torch.zeros([shape[i] for i in axes], dtype=torch.int16)
    view = memory.permute(*(axes.index(i) for i in range(4)))
    view[:, :, -tokens:] = -1
    marked = bytearray(memory.numel() * 2)
    for r in appended(shape, view.stride(), 2, tokens, 9):
        for i in range(r.count):
            at = r.offset + i * r.pitch
            marked[at : at + r.nbytes] = b"\xff" * r.nbytes
    assert bytes(marked) == memory.flatten().numpy().tobytes()


@pytest.mark.quick
def test_one_copy_where_one_is_enough_and_no_guess() -> None:
    strides = (8 * 512 * 128, 512 * 128, 128, 1)
    assert appended((4, 8, 512, 128), strides, 2, 1, 512) == (Row(511 * 256, 256, 32, 131072),)
    assert len(appended((512, 4), (4, 1), 2, 8, 512)) == 1
    for shape in ((4, 9, 9), (4, 8, 2)):
        with pytest.raises(HardwareError, match="a cache of shape"):
            appended(shape, (81, 9, 1), 2, 1, 9)
