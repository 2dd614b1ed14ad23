"""A temporary file of tensors, for tensors that do not fit into memory."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor


class TensorPlace(NamedTuple):
    """A tensor's place in a file."""

    begin: int  # bytes
    dtype: torch.dtype
    shape: torch.Size


class TensorFile:
    """Appends tensors to a temporary file that no other process opens, and reads them."""

    # Reads and writes use explicit offsets and no buffer. So a failed write leaves earlier tensors intact, and threads
    # may read while another thread writes.
    def __init__(self) -> None:
        self._file: IO[Any] | None = None
        self._end = 0

    def write(self, tensors: Sequence[Tensor]) -> list[TensorPlace]:
        """Append tensors; raise `OSError`, and keep none of them, if there is no room."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="lightning_swarm-", buffering=0)  # noqa: SIM115 - closed later
            weakref.finalize(self, _close, self._file)
        descriptor, end, places = self._file.fileno(), self._end, []
        for tensor in tensors:
            places.append(TensorPlace(end, tensor.dtype, tensor.shape))
            left = _bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
            while left:
                written = os.pwrite(descriptor, left, end)
                left, end = left[written:], end + written
        self._end = end
        return places

    def read(self, places: Sequence[TensorPlace]) -> list[Tensor]:
        """Read tensors at these places; raise `OSError` if that fails."""
        assert self._file is not None
        descriptor, tensors = self._file.fileno(), []
        for place in places:
            tensor, begin = torch.empty(place.shape, dtype=place.dtype), place.begin
            left = _bytes_of(tensor)
            while left:
                num_read = os.preadv(descriptor, [left], begin)
                if not num_read:
                    raise OSError("a temporary file has lost bytes that were written to it")
                left, begin = left[num_read:], begin + num_read
            tensors.append(tensor)
        return tensors

    def clear(self) -> None:
        """Drop all tensors."""
        if self._file is not None:
            self._file.truncate(0)
        self._end = 0

    def close(self) -> None:
        """Remove the file; the next write begins a new file."""
        file, self._file, self._end = self._file, None, 0
        if file is not None:
            _close(file)


def _close(file: IO[Any]) -> None:
    with contextlib.suppress(OSError):
        file.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    # Not `reshape`: one element of a column counts as contiguous, but keeps its stride, which no view of bytes allows.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
