"""Computes the float32 linear layers of joint steps by oneDNN, where that is faster than torch's own product.

For float32, torch calls its BLAS library. On AMD processors, MKL takes 1.3 to 2.5 times as long as oneDNN for a few
rows and a large weight. The two differ by rounding, so steps of a single text keep torch's product.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from time import thread_time  # processor time does not count interruptions
from typing import Final

import torch
from torch import Tensor, nn

_ROWS: Final = 8
_SIZE: Final = 2048  # inputs and outputs of the product that is timed; its weight exceeds a core's own cache
_REPEATS: Final = 6  # oneDNN makes its kernel in the first few, which are slow
_IS_JOINT: Final = ContextVar("_IS_JOINT", default=False)


def use_onednn(modules: Iterable[nn.Module]) -> None:
    """Let oneDNN compute plain float32 layers on the CPU in `joint_step`, if it is faster here."""
    for layer in modules:
        if type(layer) is nn.Linear and (layer.weight.device.type, layer.weight.dtype) == ("cpu", torch.float32):
            if not is_onednn_faster():
                return
            vars(layer)["forward"] = functools.partial(_forward, layer)


@contextlib.contextmanager
def joint_step() -> Iterator[None]:
    """Inside, a forward is of several texts, so its rounding may differ from that of separate forwards."""
    token = _IS_JOINT.set(True)
    try:
        yield
    finally:
        _IS_JOINT.reset(token)


def _forward(layer: nn.Linear, hidden: Tensor) -> Tensor:
    if (
        not _IS_JOINT.get()
        or hidden.numel() <= hidden.shape[-1]  # an expert's single row is as fast by torch
        or not hidden.dtype == layer.weight.dtype == torch.float32
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
    ):
        return nn.Linear.forward(layer, hidden)
    return _product(hidden, layer.weight, layer.bias)


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")
    return found


@functools.cache
def is_onednn_faster() -> bool:
    """Measure, in some milliseconds, whether oneDNN computes several rows faster on this machine."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    hidden, weight = torch.ones(_ROWS, _SIZE), torch.ones(_SIZE, _SIZE)

    def seconds(product: Callable[[Tensor, Tensor], Tensor]) -> float:
        begin_s = thread_time()
        product(hidden, weight)
        return thread_time() - begin_s

    with torch.no_grad():
        pairs = [(seconds(_product), seconds(nn.functional.linear)) for _ in range(_REPEATS)]
    return min(own for own, _ in pairs) < min(other for _, other in pairs)
