"""Four bits an element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.compression.codec import Codec, Layout, NotFinite

BLOCK: Final = 128
_SEED: Final = 2301_11913
_POSITIVE: Final = (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326)
"""Of the 16 values that lose least of a normal distribution. Source: J. Max, 1960, Quantizing for Minimum
Distortion."""

_NUM_BINS: Final = 1024
"""The nearest value is looked up: as a search it takes several times as long."""

_HIGHEST: Final = 2.0**120
_LOWEST: Final = 2.0**-100


class Rotated4Bit(Codec):
    """Blocks of 128 elements, rotated, in 16 values that lose least where elements are normally distributed.

    The rotation (signs drawn once and for all, then a Walsh-Hadamard transform) makes outliers of a block into
    something like noise in all of it. An element of the rotated block is off by at most an eighth of the largest one
    there; of the whole block about a tenth is lost, whatever its distribution. Blocks below ``2**-93`` become zero,
    and what is above ``2**120`` is not taken.

    Source: Suresh et al., Distributed Mean Estimation with Limited Communication, arXiv:1611.00429, for the rotation.
    """

    name = "4bit"
    bits = 4 + 16 / BLOCK

    def __init__(self) -> None:
        signs = torch.randint(2, (BLOCK,), generator=torch.Generator().manual_seed(_SEED))
        both = [*(-value for value in reversed(_POSITIVE)), *_POSITIVE]
        values = torch.tensor(both, dtype=torch.float32) / _POSITIVE[-1]
        bins = torch.linspace(-1.0, 1.0, _NUM_BINS, dtype=torch.float32)
        bytes_ = torch.arange(256)
        self._signs = 2 * signs.to(torch.float32) - 1
        self._nearest = (bins[:, None] - values).abs().argmin(dim=1).to(torch.uint8)  # of each bin
        self._pairs = torch.stack((values[bytes_ % 16], values[bytes_ // 16]), dim=1)  # of each byte

    @override
    def layout(self, numel: int) -> Layout:
        num_blocks = -(-numel // BLOCK)
        return (torch.bfloat16, num_blocks), (torch.uint8, num_blocks * BLOCK // 2)

    @override
    def _encode(self, flat: Tensor) -> tuple[Tensor, ...]:
        if bool(flat.abs().amax() > _HIGHEST):
            raise NotFinite(f"4bit takes numbers up to {_HIGHEST:g} only")
        blocks = flat.new_zeros(-(-len(flat) // BLOCK), BLOCK)
        blocks.view(-1)[: len(flat)] = flat
        # So that no sum leaves float32's range. Twice rotated, a block is 128 times what it was.
        blocks *= self._signs.to(flat.device) / BLOCK
        _rotate(blocks)
        largest = blocks.abs().amax(dim=1)
        scales = torch.where(largest < _LOWEST, 0.0, largest).to(torch.bfloat16)
        inverse = torch.where(scales > 0, 1.0 / scales.float(), 0.0)
        blocks *= inverse[:, None] * ((_NUM_BINS - 1) / 2)
        bins = blocks.add_(_NUM_BINS / 2).clamp_(0, _NUM_BINS - 1).to(torch.int32)
        codes = self._nearest.to(flat.device)[bins.view(-1)].view(-1, 2)
        return scales, codes[:, 0] | codes[:, 1] << 4

    @override
    def _decode(self, parts: Sequence[Tensor], numel: int) -> Tensor:
        scales, codes = parts
        blocks = self._pairs.to(codes.device)[codes.int()].view(-1, BLOCK)
        blocks *= scales.float()[:, None]
        _rotate(blocks)
        blocks *= self._signs.to(codes.device)
        return blocks.view(-1)[:numel]


def _rotate(blocks: Tensor) -> None:
    """Walsh-Hadamard, in place, without its factor: in sums of two, whose order is the same everywhere."""
    distance = 1
    while distance < BLOCK:
        pairs = blocks.view(-1, BLOCK // (2 * distance), 2, distance)
        ones, others = pairs[:, :, 0], pairs[:, :, 1]
        differences = ones - others
        ones += others
        others.copy_(differences)
        distance *= 2
