"""Four or six bits an element."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.compression.codec import Codec, Layout, NotFinite, are_within

BLOCK: Final = 128
_SEED: Final = 2301_11913
_NUM_BINS: Final = 1024
"""The nearest value is looked up: as a search it takes several times as long."""

SLICE: Final = 1 << 17
"""Elements that are rotated together: they stay in a processor's cache."""

_HIGHEST: Final = 2.0**120
_LOWEST: Final = 2.0**-100


_CPU: Final = torch.device("cpu")


class _Tables(NamedTuple):
    signs: Tensor  # [BLOCK, 1], of the rotation
    values: Tensor  # of each code
    nearest: Tensor  # code, of each bin


class Rotated(Codec):
    """Blocks of 128 elements, rotated, each element of them as the nearest of some values times the block's scale.

    The rotation (signs drawn once and for all, then a Walsh-Hadamard transform) makes outliers of a block into
    something like noise in all of it. Blocks below ``2**-93`` become zero, and what is above ``2**120`` is not taken.

    What is like each other is best in one block. A vector's are neighbours. Of other tensors a slice of the elements is
    read as a matrix of 128 rows, whose columns are the blocks: so one has few of a hidden state's features, at many
    positions.

    Source: Suresh et al., Distributed Mean Estimation with Limited Communication, arXiv:1611.00429, for the rotation.

    Attributes:
        num_bits: Of an element.
        positive: The values, ascending; the others are their opposites. Only their ratios matter.
    """

    num_bits: int
    positive: Sequence[float]

    def __init__(self) -> None:
        signs = torch.randint(2, (BLOCK, 1), generator=torch.Generator("cpu").manual_seed(_SEED), device=_CPU)
        both = [*(-value for value in reversed(self.positive)), *self.positive]
        values = torch.tensor(both, dtype=torch.float32, device=_CPU) / self.positive[-1]
        bins = torch.linspace(-1.0, 1.0, _NUM_BINS, dtype=torch.float32, device=_CPU)
        nearest = (bins[:, None] - values).abs().argmin(dim=1).to(torch.uint8)
        self._tables = {_CPU: _Tables(2 * signs.to(torch.float32) - 1, values, nearest)}

    @abstractmethod
    def _pack(self, codes: Tensor) -> Tensor:
        """Bytes of as many codes as are in some blocks, in uint8."""

    @abstractmethod
    def _unpack(self, packed: Tensor) -> Sequence[Tensor]:
        """The way back: codes, in pieces."""

    @override
    def layout(self, numel: int) -> Layout:
        num_blocks = -(-numel // BLOCK)
        return (torch.bfloat16, num_blocks), (torch.uint8, num_blocks * BLOCK * self.num_bits // 8)

    @override
    def _encode(self, flat: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
        if not are_within(flat, -_HIGHEST, _HIGHEST):
            raise NotFinite(f"{self.name} takes numbers up to {_HIGHEST:g} only")
        tables = self._tables_on(flat.device)
        slices = [self._encode_slice(one, tables, is_vector=len(shape) == 1) for one in flat.split(SLICE)]
        return torch.cat([scales for scales, _ in slices]), torch.cat([codes for _, codes in slices])

    def _encode_slice(self, flat: Tensor, tables: _Tables, *, is_vector: bool) -> tuple[Tensor, Tensor]:
        num_blocks = -(-len(flat) // BLOCK)
        padded = flat.new_zeros(num_blocks * BLOCK)
        padded[: len(flat)] = flat
        blocks = padded.view(num_blocks, BLOCK).t().contiguous() if is_vector else padded.view(BLOCK, num_blocks)
        # So that no sum leaves float32's range. Twice rotated, a block is 128 times what it was.
        blocks *= tables.signs / BLOCK
        _rotate(blocks)
        largest = blocks.abs().amax(dim=0)
        scales = torch.where(largest < _LOWEST, 0.0, largest).to(torch.bfloat16)
        inverse = torch.where(scales > 0, 1.0 / scales.float(), 0.0)
        blocks *= inverse * ((_NUM_BINS - 1) / 2)
        bins = blocks.add_(_NUM_BINS / 2).clamp_(0, _NUM_BINS - 1).to(torch.int32)
        codes = tables.nearest.index_select(0, bins.view(-1))
        return scales, self._pack(codes)

    @override
    def _decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        scales, codes = parts
        tables = self._tables_on(codes.device)
        found = torch.empty(len(scales) * BLOCK, dtype=torch.float32, device=codes.device)
        slices = scales.split(SLICE // BLOCK), codes.split(SLICE * self.num_bits // 8), found.split(SLICE)
        for one in zip(*slices, strict=True):
            self._decode_slice(*one, tables, is_vector=len(shape) == 1)
        return found[: math.prod(shape)]

    def _decode_slice(self, scales: Tensor, packed: Tensor, into: Tensor, tables: _Tables, *, is_vector: bool) -> None:
        pieces = self._unpack(packed)
        for codes, piece in zip(pieces, into.chunk(len(pieces)), strict=True):
            torch.index_select(tables.values, 0, codes.int(), out=piece)
        blocks = into.view(BLOCK, -1)
        blocks *= scales.float()
        _rotate(blocks)
        blocks *= tables.signs
        if is_vector:
            into.copy_(blocks.t().reshape(-1))

    def _tables_on(self, device: torch.device) -> _Tables:
        if device not in self._tables:
            self._tables[device] = _Tables(*(table.to(device) for table in self._tables[_CPU]))
        return self._tables[device]


class Rotated4Bit(Rotated):
    """16 values, which lose least where elements are normally distributed.

    An element of the rotated block is off by at most an eighth of the largest one there; of the whole block about a
    tenth is lost, whatever its distribution.

    Source: J. Max, 1960, Quantizing for Minimum Distortion, for the values.
    """

    name = "4bit"
    num_bits = 4
    bits = num_bits + 16 / BLOCK
    positive = (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326)

    @override
    def _pack(self, codes: Tensor) -> Tensor:
        low, high = codes.chunk(2)
        return low | high << 4

    @override
    def _unpack(self, packed: Tensor) -> Sequence[Tensor]:
        return packed & 15, packed >> 4


class Rotated6Bit(Rotated):
    """64 values, all as far from each other: others would lose no less up to the largest element of so small a block.

    An element of the rotated block is off by at most a fiftieth of the largest one there; of the whole block about a
    fortieth is lost, whatever its distribution.
    """

    name = "6bit"
    num_bits = 6
    bits = num_bits + 16 / BLOCK
    positive = range(1, 64, 2)

    @override
    def _pack(self, codes: Tensor) -> Tensor:
        a, b, c, d = codes.chunk(4)
        return torch.cat((a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2))

    @override
    def _unpack(self, packed: Tensor) -> Sequence[Tensor]:
        one, two, three = packed.chunk(3)
        return one & 63, (one >> 6 | two << 2) & 63, (two >> 4 | three << 4) & 63, three >> 2


def _rotate(blocks: Tensor) -> None:
    """Walsh-Hadamard of columns, in place, without its factor: in sums of two, whose order is the same everywhere."""
    distance = 1
    while distance < BLOCK:
        pairs = blocks.view(BLOCK // (2 * distance), 2, -1)
        ones, others = pairs[:, 0], pairs[:, 1]
        differences = ones - others
        ones += others
        others.copy_(differences)
        distance *= 2
