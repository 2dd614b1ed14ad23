"""`Codec`, the base class of all codecs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from lightning_swarm.core.errors import ProtocolError

Layout = tuple[tuple[torch.dtype, int], ...]  # dtype and number of elements of each part of an encoded tensor

_HIGHEST: Final = torch.finfo(torch.float32).max


class NotFinite(ValueError):
    """A tensor holds NaN, an infinity, or a number that float32 cannot hold."""


class Codec(ABC):
    """Encodes tensors of real numbers in fewer bits, and decodes them equally on every device."""

    # Encoding a tensor twice gives equal bytes. Decoding gives equal bits everywhere, because codecs add and multiply
    # element by element, without any sum whose order a device may choose.
    name: str  # the name in `Compression`
    bits: float  # average bits per element of a large tensor
    cpu_s: float  # seconds of one core to encode and decode one element, measured by `benchmarks.codecs`
    signed: Sequence[int] = ()  # indices of the floating-point parts that may have negative elements

    @abstractmethod
    def layout(self, numel: int) -> Layout:
        """Return the dtype and length of each part that `encode` returns for `numel` elements."""

    @abstractmethod
    def _encode(self, flat: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
        """Encode one or more finite elements, ``[n]`` in float32; `shape`: the tensor's, before flattening."""

    @abstractmethod
    def _decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Decode parts that match `layout` into ``[n]`` in float32."""

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Convert a tensor to float32, and encode it into flat parts on its device; raise `NotFinite`."""
        flat = tensor.detach().reshape(-1)
        if flat.numel() and not are_within(flat, -_HIGHEST, _HIGHEST):
            raise NotFinite(f"{self.name} encodes only finite numbers within the range of float32")
        flat = flat.to(torch.float32)
        if not flat.numel():
            return tuple(torch.empty(0, dtype=dtype, device=flat.device) for dtype, _ in self.layout(0))
        with _without_autocast(flat.device):
            return self._encode(flat, tensor.shape)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Decode a tensor on the device of its parts, which are untrusted."""
        numel = math.prod(shape)
        layout = tuple((part.dtype, part.numel()) for part in parts)
        are_flat = all(part.dim() == 1 for part in parts)
        # Checked before memory is allocated, because `shape` is untrusted, too.
        if not dtype.is_floating_point or not are_flat or layout != self.layout(numel):
            raise ProtocolError(
                f"{self.name} encodes {numel} elements as {self.layout(numel)}, got {layout} for {dtype}"[:500]
            )
        if not numel:
            return torch.empty(*shape, dtype=dtype, device=parts[0].device)
        self._check(parts)
        with _without_autocast(parts[0].device):
            return self._decode(parts, shape).to(dtype).reshape(tuple(shape))

    def _check(self, parts: Sequence[Tensor]) -> None:
        """Refuse NaN and infinity, which no codec writes, and negative scales."""
        for index, part in enumerate(parts):
            if not part.is_floating_point():
                continue
            highest = torch.finfo(part.dtype).max
            if index in self.signed:
                lowest, allowed = -highest, "finite numbers"
            else:
                lowest, allowed = 0.0, "finite scales that are not negative"
            if not are_within(part, lowest, highest):
                raise ProtocolError(
                    f"{self.name} encodes tensors with {allowed}, got others: NaN, an infinity or a negative scale"
                )


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast, which would change dtypes if the caller has enabled it."""
    if not torch.amp.autocast_mode.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def are_within(tensor: Tensor, low: float, high: float) -> bool:
    """Return whether all elements of a non-empty tensor are within bounds; NaN is not."""
    lowest, highest = torch.aminmax(tensor)  # much faster than `isfinite`
    # Compare in float64, because a narrow dtype may round a bound to infinity, and then infinity would pass.
    return bool((lowest.double() >= low) & (highest.double() <= high))
