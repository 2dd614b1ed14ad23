"""Tensors as bytes: the tensors that can be sent, and their encoding. Nothing here is ever pickled."""

from __future__ import annotations

import math
import sys
from typing import Annotated, Final

import msgspec
import torch
from torch import Tensor

from lightning_swarm.core.errors import ProtocolError

if sys.byteorder != "little":
    raise ImportError("lightning_swarm sends tensors as they lie in memory, so it runs on little-endian machines only.")

MAX_DIMS: Final = 64


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


DTYPES: Final = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}
"""Dtypes that can be sent, by their names on the wire."""

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_NUMPY_DTYPES: Final = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32})


class TensorSpec(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Dtype and shape of a tensor, as they are written on the wire."""

    dtype: str
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_DIMS)]


def check_tensor(tensor: Tensor) -> None:
    """Raise `ProtocolError` if a tensor cannot be sent."""
    if tensor.dtype not in _NAMES or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise ProtocolError(
            f"Only dense CPU tensors of {', '.join(DTYPES)} can be sent, got {tensor.dtype} ({tensor.layout}) on "
            f"{tensor.device}. Convert the tensor first."
        )
    if tensor.dim() > MAX_DIMS:
        raise ProtocolError(f"A tensor has at most {MAX_DIMS} dimensions, got {tensor.dim()}.")


def spec_of(tensor: Tensor) -> TensorSpec:
    """Describe a tensor that can be sent."""
    return TensorSpec(_NAMES[tensor.dtype], tuple(tensor.shape))


def parse_spec(spec: TensorSpec) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape of a description; refuse a description that no tensor can have."""
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise ProtocolError(f"The dtype of a tensor is one of {', '.join(DTYPES)}, got {spec.dtype[:32]!r}.")
    # Strides are products of sizes, also in an empty tensor, and must not overflow.
    if math.prod(max(size, 1) for size in spec.shape) * dtype.itemsize >= 1 << 62:
        raise ProtocolError(f"A tensor of shape {spec.shape} is too large to exist.")
    return dtype, spec.shape


def to_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes, without a copy if it is contiguous."""
    has_bytes = tensor.is_contiguous() and tensor.numel() and not tensor.requires_grad and not tensor.is_neg()
    if has_bytes and (tensor.dtype in _NUMPY_DTYPES or tensor.dtype is torch.bfloat16):
        # With few calls, because each releases the interpreter's lock, and has to wait if another thread takes it.
        same_width = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
        return same_width.numpy().data.cast("B")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not `reshape`: a contiguous tensor of one element may have any stride, and `view(torch.uint8)` refuses most.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def from_bytes(buffer: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Make the tensor whose bytes `buffer` holds, without a copy; refuse bytes that are invalid for the dtype."""
    # torch computes nonsense with a bool that is neither 0 nor 1.
    if dtype is torch.bool and buffer.numel() and int(buffer.max()) > 1:
        raise ProtocolError("A bool tensor holds a byte that is neither 0 nor 1.")
    return buffer.view(dtype).reshape(shape)
