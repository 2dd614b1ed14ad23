"""Memory for received messages."""

from __future__ import annotations

import pytest
import torch

from lightning_swarm.network.framing import _HUGE_BYTES, BufferPool, new_bytes


@pytest.mark.parametrize("n", [0, 1, _HUGE_BYTES - 1, _HUGE_BYTES, _HUGE_BYTES + 8])
def test_new_memory_is_as_large_and_lies_as_torchs_does(n: int) -> None:
    for _ in range(8):
        room = new_bytes(n)
        assert (room.shape, room.dtype) == ((n,), torch.uint8)
        assert room.data_ptr() % 64 == 0
        room.fill_(7)
        assert room.numel() == 0 or int(room[-1]) == 7


def test_recycled_memory_is_given_out_when_nobody_refers_to_it() -> None:
    recycled = BufferPool(2, max_bytes=2 * _HUGE_BYTES)
    first = recycled.new_bytes(_HUGE_BYTES)
    place, view = first.data_ptr(), first.view(torch.float64)[8:9]
    view.fill_(2.5)
    del first
    other = recycled.new_bytes(_HUGE_BYTES)  # a view is left
    other.fill_(0)
    assert other.data_ptr() != place
    assert float(view) == 2.5
    del view
    assert recycled.new_bytes(_HUGE_BYTES + 64).data_ptr() != place  # another size
    assert recycled.new_bytes(_HUGE_BYTES).data_ptr() == place


def test_recycled_memory_is_bounded() -> None:
    recycled = BufferPool(2, max_bytes=2 * _HUGE_BYTES)
    pieces = [recycled.new_bytes(_HUGE_BYTES) for _ in range(3)]
    large = recycled.new_bytes(3 * _HUGE_BYTES)
    del pieces, large
    assert [len(one) // _HUGE_BYTES for one in recycled._spare] == [1, 1]


@pytest.mark.parametrize("n", [0, _HUGE_BYTES - 1, _HUGE_BYTES + 8])
def test_recycled_memory_lies_as_torchs_does(n: int) -> None:
    recycled = BufferPool(2, max_bytes=2 * _HUGE_BYTES)
    for _ in range(4):
        room = recycled.new_bytes(n)
        assert (room.shape, room.data_ptr() % 64) == ((n,), 0)
        del room
