"""Captures the autocast and other modes of a trainer's thread, and enters them where a stage computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias, cast

import torch

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network.tensors import dtype_name
from lightning_swarm.protocol.messages.calls import ComputeMode, MatmulPrecision

_Flags: TypeAlias = tuple[torch.dtype, bool, bool, bool, MatmulPrecision]  # the arguments of `_set_flags`

_DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def capture(device_type: str, *, training: bool, grad: bool, input_grad: bool) -> ComputeMode:
    """Return the calling thread's modes, together with the arguments; `ComputeMode` explains them."""
    autocast = torch.is_autocast_enabled(device_type)
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return ComputeMode(
        training=training,
        grad=grad,
        input_grad=input_grad,
        autocast=dtype_name(torch.get_autocast_dtype(device_type)) if autocast else None,
        default_dtype=dtype_name(torch.get_default_dtype()),
        deterministic=("warn" if warn_only else "on") if deterministic else "off",
        anomaly=torch.is_anomaly_enabled(),
        matmul_precision=_matmul_precision(),
    )


def _matmul_precision() -> MatmulPrecision:
    """Return this process's precision of float32 matrix products; one for each of `_backends` if they were set."""
    try:
        return cast(MatmulPrecision, torch.get_float32_matmul_precision())
    except RuntimeError:  # user code has set the backends' own precisions
        return cast(MatmulPrecision, tuple(backend.fp32_precision for backend in _backends()))


def _backends() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)


@contextlib.contextmanager
def enter_modes(mode: ComputeMode, device_type: str) -> Iterator[None]:
    """Compute in the trainer's modes inside, and restore the thread's modes afterwards."""
    # Inference tensors could serve neither a later backward nor another thread.
    with _global_flags(mode), torch.inference_mode(False), torch.set_grad_enabled(mode.grad):
        if mode.autocast is None and not torch.is_autocast_enabled(device_type):
            yield  # most calls end here, because entering autocast takes as long as a small layer
            return
        dtype = None if mode.autocast is None else _dtype(mode.autocast)
        # No cache, as in Lightning: a cached cast sums the gradients of a weight that is used twice in half precision.
        with torch.autocast(device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            yield


@contextlib.contextmanager
def enter_backward_modes(mode: ComputeMode) -> Iterator[None]:
    """Run a backward in the trainer's modes: outside autocast, but with its flags."""
    with _global_flags(mode), torch.inference_mode(False), on_this_thread():
        yield


def on_this_thread() -> contextlib.AbstractContextManager[None]:
    """Run the backwards that this thread begins on this thread, also on a GPU."""
    # Autograd has one thread for each GPU. A trainer's backward would hold it and wait for a stage, whose backward
    # needs the same thread. Ctrl-C could not end this deadlock.
    return torch.autograd.set_multithreading_enabled(False)


def _global_flags(mode: ComputeMode) -> contextlib.AbstractContextManager[None]:
    # These flags belong to the process, not to the thread, so they are set only if they differ.
    before: _Flags = (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_anomaly_enabled(),
        _matmul_precision(),
    )
    wanted: _Flags = (
        _dtype(mode.default_dtype),
        mode.deterministic != "off",
        mode.deterministic == "warn",
        mode.anomaly,
        mode.matmul_precision,
    )
    return contextlib.nullcontext() if before == wanted else _changed_flags(wanted, before)


@contextlib.contextmanager
def _changed_flags(wanted: _Flags, before: _Flags) -> Iterator[None]:
    try:
        _set_flags(*wanted)
        yield
    finally:
        _set_flags(*before)


def _set_flags(
    default_dtype: torch.dtype, deterministic: bool, warn_only: bool, anomaly: bool, precision: MatmulPrecision
) -> None:
    torch.set_default_dtype(default_dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.autograd.set_detect_anomaly(anomaly)
    _set_matmul_precision(precision)


def _set_matmul_precision(precision: MatmulPrecision) -> None:
    # First reset the process's setting, because torch raises an error if it contradicts the backends' own settings.
    torch.set_float32_matmul_precision(precision if isinstance(precision, str) else "highest")
    if isinstance(precision, str):
        return
    for backend, wanted in zip(_backends(), precision, strict=True):
        if not hasattr(backend, "fp32_precision"):
            raise ProtocolError(
                "the trainer set `fp32_precision` of `torch.backends`, which this server's torch does not know: "
                f"{torch.__version__}. Update torch, or use `torch.set_float32_matmul_precision`."
            )
        backend.fp32_precision = wanted


def _dtype(name: str) -> torch.dtype:
    try:
        return _DTYPES[name]
    except KeyError:
        raise ProtocolError(f"a mode's dtype must be one of {sorted(_DTYPES)}, got {name!r}") from None
