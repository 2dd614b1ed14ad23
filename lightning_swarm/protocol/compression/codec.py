"""What a codec is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from lightning_swarm.core.errors import ProtocolError

Layout = tuple[tuple[torch.dtype, int], ...]
"""Dtype and length of each part."""

_HIGHEST: Final = torch.finfo(torch.float32).max


class NotFinite(ValueError):
    """A tensor holds NaN, an infinity, or what float32 has no room for."""


class Codec(ABC):
    """Writes tensors of real numbers in fewer bits.

    The same tensor gives the same bytes, and the same bytes give the same bits again on every device: decoding adds and
    multiplies element by element, and nothing whose order a device may choose.

    Attributes:
        name: As users write it.
        bits: That an element of a large tensor takes.
    """

    name: str
    bits: float

    @abstractmethod
    def layout(self, numel: int) -> Layout:
        """What `encode` makes of a tensor of so many elements."""

    @abstractmethod
    def _encode(self, flat: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
        """Encode ``[n]`` in float32, finite, of at least one element; `shape` is that of the tensor."""

    @abstractmethod
    def _decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The way back, of parts that are as `layout` says: ``[n]`` in float32."""

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """What travels of a tensor: one-dimensional parts, on its device.

        Args:
            tensor: Of any shape and any dtype of real numbers; it is read as float32.

        Raises:
            NotFinite: It cannot be encoded.
        """
        flat = tensor.detach().reshape(-1)
        if flat.numel() and not are_within(flat, -_HIGHEST, _HIGHEST):
            raise NotFinite(f"{self.name} takes finite numbers of float32's range only")
        flat = flat.to(torch.float32)
        if not flat.numel():
            return tuple(torch.empty(0, dtype=dtype, device=flat.device) for dtype, _ in self.layout(0))
        with _as_written(flat.device):
            return self._encode(flat, tensor.shape)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """The tensor, but for what is lost, on the parts' device.

        Args:
            parts: Whoever's.
            dtype: Of the tensor.
            shape: Likewise.

        Raises:
            ProtocolError: They are not what `encode` makes of such a tensor. No memory was taken.
        """
        numel = math.prod(shape)
        found = tuple((part.dtype, part.numel()) for part in parts)
        flat = all(part.dim() == 1 for part in parts)
        if not dtype.is_floating_point or not flat or found != self.layout(numel):
            raise ProtocolError(
                f"{self.name} makes {self.layout(numel)} of {numel} elements, got {found} for {dtype}"[:500]
            )
        if not numel:
            return torch.empty(*shape, dtype=dtype, device=parts[0].device)
        self._check(parts)
        with _as_written(parts[0].device):
            return self._decode(parts, shape).to(dtype).reshape(tuple(shape))

    def _check(self, parts: Sequence[Tensor]) -> None:
        """Refuse scales that none has: NaN, infinite, negative.

        Raises:
            ProtocolError: One is.
        """
        for part in parts:
            if part.is_floating_point() and not are_within(part, 0.0, torch.finfo(part.dtype).max):
                raise ProtocolError(f"{self.name} has scales that are finite and not negative, got others")


def check_finite(name: str, part: Tensor) -> None:
    """Refuse what no codec writes.

    Raises:
        ProtocolError: A number is NaN or infinite.
    """
    highest = torch.finfo(part.dtype).max
    if not are_within(part, -highest, highest):
        raise ProtocolError(f"{name} makes finite numbers only, got others")


def _as_written(device: torch.device) -> AbstractContextManager[Any]:
    """Whoever encodes may be in autocast's context, which would choose other dtypes."""
    if not torch.amp.autocast_mode.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def are_within(tensor: Tensor, low: float, high: float) -> bool:
    """Whether all of its elements, of which there must be one, are; NaN is not. Many times as fast as `isfinite`."""
    lowest, highest = torch.aminmax(tensor)
    # In float64, for a narrow format has no room for the bounds: as infinity they would let infinity pass.
    return bool((lowest.double() >= low) & (highest.double() <= high))
