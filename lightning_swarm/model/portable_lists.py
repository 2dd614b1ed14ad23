"""Portable operations on whole lists of tensors, because steps of many small tensors are dominated by overhead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

_Tensors: TypeAlias = Sequence[Tensor]
_Values: TypeAlias = _Tensors | Sequence[float] | Tensor | float

_DTYPES: Final = (torch.float32, torch.float64)
_SPACE: Final = "aten::_foreach_"


def list_rule(func: Any, operands: Sequence[Any]) -> Callable[..., _Tensors] | None:
    """Return the rule that computes torch's operation on whole lists at once; None: compute tensors one by one."""
    rule = _rule(func)
    if rule is None or not _are_alike(operands):
        return None
    if rule is _RULES["div"] and not _are_tensors(operands[1]):
        return None  # a GPU would multiply by the number's inverse, which is rounded, too
    return rule if rule is not _lerp or isinstance(operands[2], (int, float)) else None


@cache  # the look-up would take longer than a small kernel
def _rule(func: Any) -> Callable[..., _Tensors] | None:
    name = func._schema.name.removesuffix("_")
    return _RULES.get(name.removeprefix(_SPACE)) if name.startswith(_SPACE) else None


def _are_tensors(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and bool(values) and isinstance(values[0], Tensor)


def _are_alike(operands: Sequence[Any]) -> bool:
    """Return whether all tensors have one supported dtype, one device, and in each place of the lists one shape."""
    if not _are_tensors(operands[0]):
        return False
    tensors = operands[0]
    dtype, device = tensors[0].dtype, tensors[0].device
    if dtype not in _DTYPES:
        return False
    for values in operands:
        if isinstance(values, Tensor) and (values.dtype != dtype or values.device != device):
            return False
        if _are_tensors(values) and not all(
            one.dtype == dtype and one.device == device and one.shape == first.shape
            for one, first in zip(values, tensors, strict=True)
        ):
            return False
    return True


def _single(name: str, first: _Tensors, *others: _Values, in_place: bool = False) -> _Tensors:
    """Compute an operation of IEEE 754; `in_place` writes over the tensors of the first list."""
    found: _Tensors = getattr(torch, f"_foreach_{name}_" if in_place else f"_foreach_{name}")(first, *others)
    return first if in_place else found


def _scaled(name: str) -> Callable[..., _Tensors]:
    """Return the rule of adding or subtracting a multiple of the second list."""

    def rule(first: _Tensors, other: Any, alpha: float = 1, *, in_place: bool) -> _Tensors:
        if alpha != 1:
            other = _single("mul", other, alpha) if _are_tensors(other) else other * alpha
        return _single(name, first, other, in_place=in_place)

    return rule


def _with_term(combine: str) -> Callable[..., _Tensors]:
    """Return the rule of adding a multiple of the product or quotient of two lists."""

    def rule(first: _Tensors, left: _Tensors, right: _Tensors, value: _Values = 1, *, in_place: bool) -> _Tensors:
        term = _single("mul", left, value)
        return _single("add", first, _single(combine, term, right, in_place=True), in_place=in_place)

    return rule


def _lerp(first: _Tensors, end: _Tensors, weight: float, *, in_place: bool) -> _Tensors:
    # Start from the nearer end, as torch does, so that a weight of one gives the end itself.
    way = _single("sub", end, first)
    if weight < 0.5:
        return _single("add", first, _single("mul", way, weight, in_place=True), in_place=in_place)
    found = _single("sub", end, _single("mul", way, 1.0 - weight, in_place=True))
    return _single("copy", first, found, in_place=True) if in_place else found


_RULES: Final[Mapping[str, Callable[..., _Tensors]]] = {
    "add": _scaled("add"),
    "sub": _scaled("sub"),
    **{name: partial(_single, name) for name in ("mul", "div", "sqrt")},
    "addcmul": _with_term("mul"),
    "addcdiv": _with_term("div"),
    "lerp": _lerp,
}
