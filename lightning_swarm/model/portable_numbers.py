"""Makes powers of hyperparameters, and an optimizer's choice of algorithm, the same on every machine."""

from __future__ import annotations

import decimal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Final

from torch import Tensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

# These optimizers can step all tensors at once by portable operations, which is faster if tensors are small. Large
# tensors are stepped one by one, so that each stays in the processor's cache; the overhead then does not matter. The
# sum of sizes is limited, too, because stepping at once needs one more copy of all tensors.
_AT_ONCE: Final = (Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, SGD)
_MAX_AT_ONCE: Final = 1 << 24  # elements of all tensors
_MAX_MEAN: Final = 1 << 16  # mean number of elements per tensor
_DIGITS: Final = decimal.Context(prec=40)
# operations whose results are `PortableFloat` again
_CLOSED_UNDER: Final = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg")


@lru_cache(maxsize=256)
def _power(base: float, exponent: float) -> float:
    """Raise a number to a power, rounded correctly; C's `pow` differs in its last bit between processors."""
    if exponent == 0.5:
        return float(decimal.Decimal(base).sqrt(_DIGITS))
    return float(_DIGITS.power(decimal.Decimal(base), decimal.Decimal(exponent)))


class PortableFloat(float):
    """A float whose powers are rounded correctly, like the powers of results computed from it."""

    __slots__ = ()

    def __pow__(self, exponent: float, mod: None = None) -> Any:
        return _raise(float(self), exponent, float.__pow__)

    def __rpow__(self, base: float, mod: None = None) -> Any:
        return _raise(base, float(self), lambda number, power: float(number) ** power)


def _raise(base: float, exponent: float, otherwise: Callable[[float, float], Any]) -> Any:
    if base > 0.0 and abs(base) != float("inf") and abs(exponent) != float("inf"):
        return PortableFloat(_power(float(base), float(exponent)))
    return otherwise(base, exponent)  # which is exact for a base of zero, infinity or NaN


def _closed_under(name: str) -> Callable[..., Any]:
    compute = getattr(float, name)

    def method(*operands: Any) -> Any:
        result = compute(*operands)
        return PortableFloat(result) if type(result) is float else result

    return method


for _name in _CLOSED_UNDER:
    setattr(PortableFloat, f"__{_name}__", _closed_under(f"__{_name}__"))


@contextmanager
def portable_groups(optimizer: Optimizer) -> Iterator[None]:
    """Inside, let an optimizer step by the same algorithm on all devices, with `PortableFloat` hyperparameters."""
    groups, algorithm = optimizer.param_groups, _one_algorithm(optimizer)
    before = [dict(group) for group in groups]
    for group in groups:
        group.update({key: _portable(value) for key, value in group.items() if key != "params"})
        group.update({key: value for key, value in algorithm.items() if key in group})
    try:
        yield
    finally:
        for group, old in zip(groups, before, strict=True):
            group.update({key: old[key] for key in algorithm if key in old})
            # Keep the other values, because a step may have changed them.
            group.update({key: _plain(value) for key, value in group.items() if key != "params"})
        for state in optimizer.state.values():
            state.update({key: _plain(value) for key, value in state.items() if type(value) is PortableFloat})


def _one_algorithm(optimizer: Optimizer) -> dict[str, bool]:
    """Choose an optimizer's algorithm by its parameters alone, because algorithms round differently."""
    groups = optimizer.param_groups
    sizes = [parameter.numel() for group in groups for parameter in group["params"]]
    is_small = sum(sizes) <= min(_MAX_AT_ONCE, _MAX_MEAN * len(sizes))
    at_once = (
        type(optimizer) in _AT_ONCE
        and is_small
        and not any(group.get("differentiable") or isinstance(group.get("lr"), Tensor) for group in groups)
    )
    return {"foreach": at_once, "fused": False, "capturable": False}


def _converted(kind: type[float], wanted: type[float], value: Any) -> Any:
    """Convert a number of exactly this kind, or such numbers in a tuple, and return other values unchanged."""
    if isinstance(value, tuple):
        return tuple(_converted(kind, wanted, item) for item in value)
    return wanted(value) if type(value) is kind else value


_portable, _plain = partial(_converted, float, PortableFloat), partial(_converted, PortableFloat, float)
