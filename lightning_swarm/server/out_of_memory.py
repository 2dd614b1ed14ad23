"""Recognizes errors of a device, or a process, that has no memory left, and frees what they keep alive."""

from __future__ import annotations

import contextlib
import gc
import inspect
import traceback
from typing import Final

import torch

# Allocators and libraries that raise a plain `RuntimeError`: torch has a class of its own only for its caching ones.
_TEXTS: Final = (
    "out of memory",  # CUDA's own calls, and torch's allocators before they had a class
    "can't allocate memory",  # torch's CPU allocator on Linux and macOS
    "not enough memory: you tried to allocate",  # likewise, on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, says that there is no memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def free_memory(error: BaseException, device: torch.device) -> None:
    """Free what the frames of a failed computation hold, and return the device's cached blocks to it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_flags & inspect.CO_COROUTINE:  # one that waits for this to end would be closed
            with contextlib.suppress(RuntimeError):  # it runs
                frame.clear()
    gc.collect()  # a graph may be part of a cycle
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
