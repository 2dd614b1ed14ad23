"""Memory for what arrives."""

from __future__ import annotations

import pytest
import torch

from lightning_swarm.network.room import _HUGE_BYTES, new_bytes


@pytest.mark.parametrize("n", [0, 1, _HUGE_BYTES - 1, _HUGE_BYTES, _HUGE_BYTES + 8])
def test_new_memory_is_as_large_and_lies_as_torchs_does(n: int) -> None:
    for _ in range(8):
        room = new_bytes(n)
        assert (room.shape, room.dtype) == ((n,), torch.uint8)
        assert room.data_ptr() % 64 == 0
        room.fill_(7)
        assert room.numel() == 0 or int(room[-1]) == 7
