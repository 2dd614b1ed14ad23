"""Eight bits an element, by bitsandbytes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.compression.codec import Codec, Layout, check_finite

BLOCK: Final = 256

_LOG: Final = "bitsandbytes.backends.cpu.ops"
_MISSING: Final = "Failed to load CPU gemm_4bit_forward"
"""How that logger begins where a package for products of 4-bit matrices is not installed. No codec computes any."""


class Blockwise8Bit(Codec):
    """Blocks of 256 elements, each scaled by its largest, which is exact, in the 256 values of the dynamic map.

    An element's error is at most ``2**-7`` of the largest one's of its block; of normally distributed elements about a
    hundredth of them is lost. The values are known to both sides, and are not on the wire.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861, as implemented by
    bitsandbytes.
    """

    name = "8bit"
    bits = 8 + 32 / BLOCK

    def __init__(self) -> None:
        self._functional = _bitsandbytes()
        self._values: dict[torch.device, Tensor] = {}

    @override
    def layout(self, numel: int) -> Layout:
        return (torch.float32, -(-numel // BLOCK)), (torch.uint8, numel)

    @override
    def _encode(self, flat: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
        blocks = flat.new_zeros(-(-len(flat) // BLOCK), BLOCK)
        blocks.view(-1)[: len(flat)] = flat
        lowest, highest = blocks.amin(dim=1), blocks.amax(dim=1)
        # The map has 1, and -1 it has not. Were the largest of a block a hundredth too small wherever it is negative,
        # gradients of a cross entropy would be biased, whose largest are.
        signs = torch.where(highest < -lowest, -1.0, 1.0)
        # Below this a block is zero: a scale's inverse must be a number, too.
        is_zero = torch.maximum(highest, -lowest) < torch.finfo(torch.float32).tiny
        signs = torch.where(is_zero, 0.0, signs).to(torch.float32)
        signed = (blocks * signs[:, None]).view(-1)[: len(flat)]
        codes, state = self._functional.quantize_blockwise(signed, code=self._map(flat.device), blocksize=BLOCK)
        return state.absmax * signs, codes.reshape(-1)

    @override
    def _decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        # Not by bitsandbytes, which rounds the tiniest numbers otherwise on GPUs.
        scales, codes = parts
        flat = self._map(codes.device).index_select(0, codes.int())
        whole = len(flat) // BLOCK
        flat[: whole * BLOCK].view(whole, BLOCK).mul_(scales[:whole, None])
        flat[whole * BLOCK :] *= scales[whole:]
        return flat

    @override
    def _check(self, parts: Sequence[Tensor]) -> None:
        check_finite(self.name, parts[0])

    def _map(self, device: torch.device) -> Tensor:
        if device not in self._values:
            self._values[device] = dynamic_map().to(device)
        return self._values[device]


def _bitsandbytes() -> Any:
    """Its functions. The first import takes seconds, and would tell people to install what is not needed."""
    log = logging.getLogger(_LOG)
    log.addFilter(_is_needed)
    try:
        from bitsandbytes import functional
    finally:
        log.removeFilter(_is_needed)
    return functional


def _is_needed(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_MISSING)


def dynamic_map() -> Tensor:
    """The 256 values that codes stand for, ascending, in float32.

    Those of bitsandbytes differ in their last bits from processor to processor, and so would what peers decode.
    """
    found = [0.0, 1.0]
    for exponent in range(7):
        for place in range(2**exponent):
            middle = (0.1 + 0.9 * (place + 0.5) / 2**exponent) * 10.0 ** (exponent - 6)
            found += [middle, -middle]
    return torch.tensor(sorted(found), dtype=torch.float32, device="cpu")
