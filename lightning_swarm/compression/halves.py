"""Sixteen bits an element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.compression.codec import Codec, Layout, check_finite

_HIGHEST: Final = 14
"""Exponent of two that the largest elements are scaled to: float16 goes to 65504."""


class Float16(Codec):
    """float16 times a power of two, so that nothing leaves its range at the upper end.

    An element's error is at most ``2**-11`` of it, or ``2**-38`` of the tensor's largest, whichever is more.
    """

    name = "float16"
    bits = 16.0

    @override
    def layout(self, numel: int) -> Layout:
        return (torch.float32, 1 if numel else 0), (torch.float16, numel)

    @override
    def _encode(self, flat: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
        _, exponent = torch.frexp(flat.abs().amax())
        # So that the scale itself, and its inverse, are ordinary numbers.
        exponent = (exponent.to(torch.int32) - _HIGHEST).clamp(-120, 120)
        scale = torch.ldexp(torch.ones((), dtype=torch.float32, device=flat.device), exponent)
        return scale.reshape(1), (flat / scale).to(torch.float16)

    @override
    def _decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        scale, halves = parts
        return halves.to(torch.float32).mul_(scale)

    @override
    def _check(self, parts: Sequence[Tensor]) -> None:
        super()._check(parts[:1])
        check_finite(self.name, parts[1])


class BFloat16(Codec):
    """bfloat16, rounded to nearest.

    An element's error is at most ``2**-8`` of it. What is above bfloat16's largest number becomes that one.
    """

    name = "bfloat16"
    bits = 16.0

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

    @override
    def _check(self, parts: Sequence[Tensor]) -> None:
        check_finite(self.name, parts[0])
