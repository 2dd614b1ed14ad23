"""Recognizes out-of-memory errors of devices and processes, and frees the objects that such an error keeps alive."""

from __future__ import annotations

import contextlib
import gc
import inspect
import traceback
from typing import Final

import torch

# Errors of allocators and libraries that raise a plain `RuntimeError`. Only torch's caching allocators have their own
# class.
_TEXTS: Final = (
    "out of memory",  # CUDA's own calls, and torch's allocators before they had a class
    "can't allocate memory",  # torch's CPU allocator on Linux and macOS
    "not enough memory: you tried to allocate",  # the same on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, reports that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def free_memory(error: BaseException, device: torch.device) -> None:
    """Free the objects in the frames of a failed computation, and return the device's cached blocks to it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_flags & inspect.CO_COROUTINE:  # clearing would close a coroutine that still waits
            with contextlib.suppress(RuntimeError):  # raised if the frame still runs
                frame.clear()
    gc.collect()  # a graph may be part of a cycle
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
