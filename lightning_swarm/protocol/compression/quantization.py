"""All codecs: float16, bfloat16, and quantization to 8, 6 and 4 bits."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.protocol.compression.codec import Codec, Layout, NotFinite, are_within
from lightning_swarm.protocol.settings import CodecName

BLOCK: Final = 256  # elements that share a scale in `Blockwise8Bit`


# Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861, as in bitsandbytes.
class Blockwise8Bit(Codec):
    """Rounds blocks of 256 elements, each scaled by its largest element, to the 256 values of the dynamic map."""

    # The largest element is exact. An element's error is at most 2**-7 of the largest element of its block. For
    # normally distributed elements the norm of the error is about a hundredth of the block's. Both sides know the 256
    # values, so these are not sent. bitsandbytes chooses other codes on a GPU than on a CPU, within that error;
    # decoding is the same everywhere.
    name = "8bit"
    bits = 8 + 32 / BLOCK
    cpu_s = 9.6e-9
    signed = (0,)

    def __init__(self) -> None:
        self._functional = _bitsandbytes()

    @override
    def layout(self, numel: int) -> Layout:
        return (torch.float32, -(-numel // BLOCK)), (torch.uint8, numel)

    @override
    def _encode(self, flat: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
        blocks = flat.new_zeros(-(-len(flat) // BLOCK), BLOCK)
        blocks.view(-1)[: len(flat)] = flat
        lowest, highest = blocks.amin(dim=1), blocks.amax(dim=1)
        # The map has 1 but not -1, so without signs a negative largest element would become a hundredth too small. This
        # would bias gradients of a cross entropy, because their largest elements are negative.
        signs = torch.where(highest < -lowest, -1.0, 1.0)
        # A block whose largest element is subnormal becomes zero, because the inverse of its scale would overflow.
        is_zero = torch.maximum(highest, -lowest) < torch.finfo(torch.float32).tiny
        signs = torch.where(is_zero, 0.0, signs).to(torch.float32)
        signed = (blocks * signs[:, None]).view(-1)[: len(flat)]
        codes, state = self._functional.quantize_blockwise(signed, code=dynamic_map(flat.device), blocksize=BLOCK)
        return state.absmax * signs, codes.reshape(-1)

    @override
    def _decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        # bitsandbytes' own decoding rounds the tiniest numbers differently on GPUs.
        scales, codes = parts
        flat = dynamic_map(codes.device).index_select(0, codes.int())
        whole = len(flat) // BLOCK
        flat[: whole * BLOCK].view(whole, BLOCK).mul_(scales[:whole, None])
        flat[whole * BLOCK :] *= scales[whole:]
        return flat


def _bitsandbytes() -> Any:
    """Import bitsandbytes' functions late, because the import takes seconds; suppress its advice to install more."""

    def is_needed(record: logging.LogRecord) -> bool:  # no codec needs products of 4-bit matrices
        return not record.getMessage().startswith("Failed to load CPU gemm_4bit_forward")

    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    log.addFilter(is_needed)
    try:
        from bitsandbytes import functional
    finally:
        log.removeFilter(is_needed)
    return functional


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """Compute the 256 values that codes stand for, ascending, in float32."""
    # bitsandbytes' own values differ in their last bits from processor to processor, and so would decoded tensors.
    values = [0.0, 1.0]
    for exponent in range(7):
        for index in range(2**exponent):
            middle = (0.1 + 0.9 * (index + 0.5) / 2**exponent) * 10.0 ** (exponent - 6)
            values += [middle, -middle]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


_HIGHEST_EXPONENT: Final = 14  # the largest element is scaled below 2**14, because float16 ends at 65504


class Float16(Codec):
    """Rounds to float16 times a power of two, so that no element is too large for it."""

    # An element's error is at most 2**-11 of the element or 2**-38 of the tensor's largest, whichever is larger.
    name = "float16"
    bits = 16.0
    cpu_s = 1.3e-9
    signed = (1,)

    @override
    def layout(self, numel: int) -> Layout:
        return (torch.float32, 1 if numel else 0), (torch.float16, numel)

    @override
    def _encode(self, flat: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
        _, exponent = torch.frexp(flat.abs().amax())
        # Clamped, so that the scale and its inverse are normal numbers.
        exponent = (exponent.to(torch.int32) - _HIGHEST_EXPONENT).clamp(-120, 120)
        scale = torch.ldexp(torch.ones((), dtype=torch.float32, device=flat.device), exponent)
        return scale.reshape(1), (flat / scale).to(torch.float16)

    @override
    def _decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        scale, halves = parts
        return halves.to(torch.float32).mul_(scale)


class BFloat16(Codec):
    """Rounds to the nearest finite bfloat16."""

    # An element's error is at most 2**-8 of the element.
    name = "bfloat16"
    bits = 16.0
    cpu_s = 0.8e-9
    signed = (0,)

    @override
    def layout(self, numel: int) -> Layout:
        return ((torch.bfloat16, numel),)

    @override
    def _encode(self, flat: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
        highest = torch.finfo(torch.bfloat16).max
        return (flat.clamp(-highest, highest).to(torch.bfloat16),)

    @override
    def _decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        return parts[0].to(torch.float32)


ROTATED_BLOCK: Final = 128  # elements that are rotated together, and share a scale, in `Rotated`
_SEED: Final = 2301_11913  # seed of the signs, equal on all peers
_NUM_BINS: Final = 1024  # size of the look-up table for the nearest value; a search takes several times as long

SLICE: Final = 1 << 17  # elements that are encoded at a time, few enough to stay in a processor's cache
_HIGHEST_ROTATED: Final = 2.0**120
_LOWEST: Final = 2.0**-100
_CPU: Final = torch.device("cpu")


class _Tables(NamedTuple):
    signs: Tensor  # [ROTATED_BLOCK, 1], the signs of the rotation
    values: Tensor  # code -> value
    nearest: Tensor  # bin -> code


# The rotation (signs drawn once and for all, then a Walsh-Hadamard transform) spreads outliers over their block, so
# that they resemble noise. Blocks below 2**-93 become zero; elements above 2**120 are refused. Source of the rotation:
# Suresh et al., Distributed Mean Estimation with Limited Communication, arXiv:1611.00429.
class Rotated(Codec):
    """Rotates blocks of 128 elements, and rounds each element to one of a few values times its block's scale."""

    num_bits: int  # bits per element
    positive: Sequence[float]  # the positive half of the symmetric values, ascending; only their ratios matter

    def __init__(self) -> None:
        signs = torch.randint(2, (ROTATED_BLOCK, 1), generator=torch.Generator("cpu").manual_seed(_SEED), device=_CPU)
        both = [*(-value for value in reversed(self.positive)), *self.positive]
        values = torch.tensor(both, dtype=torch.float32, device=_CPU) / self.positive[-1]
        bins = torch.linspace(-1.0, 1.0, _NUM_BINS, dtype=torch.float32, device=_CPU)
        nearest = (bins[:, None] - values).abs().argmin(dim=1).to(torch.uint8)
        self._tables = {_CPU: _Tables(2 * signs.to(torch.float32) - 1, values, nearest)}

    @abstractmethod
    def _pack(self, codes: Tensor) -> Tensor:
        """Pack the codes of whole blocks into bytes."""

    @abstractmethod
    def _unpack(self, packed: Tensor) -> Sequence[Tensor]:
        """Unpack bytes into codes, in several pieces."""

    @override
    def layout(self, numel: int) -> Layout:
        num_blocks = -(-numel // ROTATED_BLOCK)
        return (torch.bfloat16, num_blocks), (torch.uint8, num_blocks * ROTATED_BLOCK * self.num_bits // 8)

    @override
    def _encode(self, flat: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
        if not are_within(flat, -_HIGHEST_ROTATED, _HIGHEST_ROTATED):
            raise NotFinite(f"{self.name} encodes only numbers up to {_HIGHEST_ROTATED:g}")
        tables = self._tables_on(flat.device)
        slices = [self._encode_slice(piece, tables, is_vector=len(shape) == 1) for piece in flat.split(SLICE)]
        return torch.cat([scales for scales, _ in slices]), torch.cat([codes for _, codes in slices])

    def _encode_slice(self, flat: Tensor, tables: _Tables, *, is_vector: bool) -> tuple[Tensor, Tensor]:
        """Return the scales of a slice's blocks, and the packed codes of its elements."""
        num_blocks = -(-len(flat) // ROTATED_BLOCK)
        padded = flat.new_zeros(num_blocks * ROTATED_BLOCK)
        padded[: len(flat)] = flat
        # A block should consist of similar elements: neighbours in a vector, or a few features of a hidden state at
        # many positions. The latter are the columns if a slice is read as a matrix of 128 rows.
        blocks = (
            padded.view(num_blocks, ROTATED_BLOCK).t().contiguous()
            if is_vector
            else padded.view(ROTATED_BLOCK, num_blocks)
        )
        # Two rotations multiply a block by 128. Divide before the first, so that no sum leaves float32's range.
        blocks *= tables.signs / ROTATED_BLOCK
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
        values = torch.empty(len(scales) * ROTATED_BLOCK, dtype=torch.float32, device=codes.device)
        slices = scales.split(SLICE // ROTATED_BLOCK), codes.split(SLICE * self.num_bits // 8), values.split(SLICE)
        for pieces in zip(*slices, strict=True):
            self._decode_slice(*pieces, tables, is_vector=len(shape) == 1)
        return values[: math.prod(shape)]

    def _decode_slice(self, scales: Tensor, packed: Tensor, into: Tensor, tables: _Tables, *, is_vector: bool) -> None:
        pieces = self._unpack(packed)
        for codes, piece in zip(pieces, into.chunk(len(pieces)), strict=True):
            torch.index_select(tables.values, 0, codes.int(), out=piece)
        blocks = into.view(ROTATED_BLOCK, -1)
        blocks *= scales.float()
        # The transform is its own inverse, except for the factor `ROTATED_BLOCK`, by which the encoder has divided.
        _rotate(blocks)
        blocks *= tables.signs
        if is_vector:
            into.copy_(blocks.t().reshape(-1))

    def _tables_on(self, device: torch.device) -> _Tables:
        if device not in self._tables:
            self._tables[device] = _Tables(*(table.to(device) for table in self._tables[_CPU]))
        return self._tables[device]


class Rotated4Bit(Rotated):
    """Rounds to 16 values, which are optimal for normally distributed elements."""

    # The error of a rotated element is at most an eighth of the block's largest. The norm of the error is about a tenth
    # of the block's, for any distribution. Source of the values: J. Max, 1960, Quantizing for Minimum Distortion.
    name = "4bit"
    num_bits = 4
    bits = num_bits + 16 / ROTATED_BLOCK
    cpu_s = 6.5e-9
    positive = (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326)

    @override
    def _pack(self, codes: Tensor) -> Tensor:
        low, high = codes.chunk(2)
        return low | high << 4

    @override
    def _unpack(self, packed: Tensor) -> Sequence[Tensor]:
        return packed & 15, packed >> 4


class Rotated6Bit(Rotated):
    """Rounds to 64 values at equal distances; in blocks this small, other values would not be more accurate."""

    # The error of a rotated element is at most a fiftieth of the block's largest. The norm of the error is about a
    # fortieth of the block's, for any distribution.
    name = "6bit"
    num_bits = 6
    bits = num_bits + 16 / ROTATED_BLOCK
    cpu_s = 7.0e-9
    positive = range(1, 64, 2)

    @override
    def _pack(self, codes: Tensor) -> Tensor:
        a, b, c, d = codes.chunk(4)
        return torch.cat((a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2))

    @override
    def _unpack(self, packed: Tensor) -> Sequence[Tensor]:
        a, b, c = packed.chunk(3)
        return a & 63, (a >> 6 | b << 2) & 63, (b >> 4 | c << 4) & 63, c >> 2


def _rotate(blocks: Tensor) -> None:
    """Apply the unnormalized Walsh-Hadamard transform to columns in place, by pairwise sums in a fixed order."""
    distance = 1
    while distance < ROTATED_BLOCK:
        pairs = blocks.view(ROTATED_BLOCK // (2 * distance), 2, -1)
        first, second = pairs[:, 0], pairs[:, 1]
        differences = first - second
        first += second
        second.copy_(differences)
        distance *= 2


CODECS: Final[dict[str, type[Codec]]] = {
    kind.name: kind for kind in (Float16, BFloat16, Blockwise8Bit, Rotated6Bit, Rotated4Bit)
}


@cache
def codec(name: CodecName) -> Codec | None:
    """Return the codec with this name; None for "none", which leaves tensors unencoded."""
    return None if name == "none" else CODECS[name]()
