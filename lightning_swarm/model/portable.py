"""Arithmetic that has the same bits on every machine, so that an optimizer step gives equal weights on all machines.

Every processor and GPU rounds single additions, subtractions, multiplications, divisions and square roots as IEEE 754
specifies. Kernels of other operations round differently: some round a product and a sum together, and some add in the
order of their vector units. `PortableArithmetic` replaces such kernels by single operations in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.portable_lists import are_alike, are_tensors, compute_lists
from lightning_swarm.model.portable_products import exact_product, tree_sum

_Number: TypeAlias = Tensor | float

_NATIVE: Final = (torch.float32, torch.float64)  # computed in their own dtype
_NARROW: Final = (torch.float16, torch.bfloat16)  # computed in float32
_MAX_POWER: Final = 64  # largest integer exponent of a power that is computed by multiplications
_MAX_COUNT: Final = 1 << 53  # float64 holds all integers up to it
# Operations that move, compare or choose numbers, and round nothing, or each number by itself.
_EXACT: Final = frozenset(
    """
    _local_scalar_dense _reshape_alias _to_copy _unsafe_view abs alias all amax amin any arange argmax argmin
    argsort as_strided bitwise_and bitwise_not bitwise_or bitwise_xor cat ceil clamp clamp_max clamp_min clone
    constant_pad_nd copy copysign count_nonzero detach diagonal empty empty_like empty_strided eq equal expand eye
    fill flip floor frac full full_like gather ge gt index index_copy index_fill index_put index_select isfinite
    isinf isnan le lift lift_fresh logical_and logical_not logical_or logical_xor lt masked_fill masked_scatter
    masked_select max maximum min minimum nan_to_num narrow ne neg new_empty new_empty_strided new_full new_ones
    new_zeros nonzero ones ones_like permute positive relu repeat resize roll round scalar_tensor scatter select
    select_scatter set sgn sign signbit slice slice_scatter sort split split_with_sizes squeeze stack t take topk
    transpose tril triu trunc unbind unfold unsqueeze view where zero zeros zeros_like
    """.split()  # noqa: SIM905 - one line for each would take a hundred
)
_EXACT_SPACES: Final = ("profiler", "prim")  # namespaces whose operations round nothing


class Unportable(ConfigError):
    """An operation that machines of different kinds round differently."""

    def __init__(self, operation: str) -> None:
        super().__init__(
            "if machines of different kinds hold one stage, its optimizer must use operations that all of them round "
            f"alike, got an optimizer with `{operation}`. Use another optimizer, or run all servers of a stage on "
            "machines of one kind."
        )
        self.operation = operation


class PortableArithmetic(TorchDispatchMode):
    """A mode in which tensor operations give the same bits on every machine, or raise `Unportable` if they cannot."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        schema, kwargs, (exact, is_aten, rule, list_rule) = func._schema, dict(kwargs or {}), _treatment(func)
        if exact or (is_aten and not _has_floats((*args, *kwargs.values()))):  # torch's operations round no integers
            return func(*args, **kwargs)
        if rule is None:
            raise Unportable(schema.name)
        target = kwargs.pop("out", None)  # receives the results; the first argument of an in-place operation
        if target is None:
            target = args[0] if schema.is_mutable else None
            # One kernel for a whole list of similar tensors is faster than a kernel for each tensor.
            if list_rule is not None and _is_for_lists(list_rule, args):
                lists = list_rule(*args, **kwargs, out=target)
                return lists if schema.returns else None
        if isinstance(target, Tensor) and rule in _ACCEPTS_OUT:
            return rule(*args, **kwargs, out=target)
        result = rule(*args, **kwargs)
        if target is None:
            return result
        for old, new in zip(target, result, strict=True) if isinstance(target, (list, tuple)) else ((target, result),):
            old.copy_(new)
        return target if schema.returns else None


def is_exact(operation: str) -> bool:
    """Return whether the kernel of this qualified name gives the same bits on every machine."""
    space, _, name = operation.partition("::")
    return space in _EXACT_SPACES or (space == "aten" and name.removesuffix("_").removeprefix("_foreach_") in _EXACT)


@cache  # without it, the look-up would take longer than the kernel on small tensors
def _treatment(func: Any) -> tuple[bool, bool, Callable[..., Any] | None, Callable[..., Any] | None]:
    """Return whether an operation is exact, whether it is torch's own, its rule, and its rule for lists of tensors."""
    space, _, name = func._schema.name.partition("::")
    name, is_aten = name.removesuffix("_"), space == "aten"
    rule, base = _rule(name) if is_aten else None, _RULES.get(name.removeprefix("_foreach_"))
    list_rule = base if is_aten and name.startswith("_foreach_") and base in _ACCEPTS_OUT else None
    return is_exact(func._schema.name), is_aten, rule, list_rule


def _has_floats(values: Sequence[Any]) -> bool:
    if values and isinstance(values[0], Tensor) and values[0].is_floating_point():
        return True  # a shortcut for most operations
    return any(
        _has_floats(value)
        if isinstance(value, (list, tuple))
        else isinstance(value, (float, complex))
        or (isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()))
        for value in values
    )


def _rule(name: str) -> Callable[..., Any] | None:
    rule = _RULES.get(name.removeprefix("_foreach_"))
    return rule if rule is None or name in _RULES else lambda *lists, **options: _map_rule(rule, lists, options)


def _map_rule(rule: Callable[..., Any], lists: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    """Apply a rule to the elements of lists one by one, with the same values of arguments that are not lists."""

    def element(index: int, value: Any) -> Any:
        return value[index] if isinstance(value, (list, tuple)) else value

    return [
        rule(*(element(index, value) for value in lists), **{key: element(index, v) for key, v in options.items()})
        for index in range(len(lists[0]))
    ]


# ---------------------------------------------------------------------- the rules

# A rule has the arguments of torch's operation. The rules in `_ACCEPTS_OUT` also accept lists of similar tensors,
# because overhead dominates the steps of many small tensors.


def _widened(value: _Number, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Convert a number or tensor to the dtype in which results of `dtype` are computed.

    A tensor without dimensions also moves to `device`, because torch combines such tensors with tensors of a GPU.
    """
    if dtype.is_complex:
        raise Unportable("complex numbers")
    wide = torch.float32 if dtype in _NARROW else dtype
    if isinstance(value, Tensor):
        return value.to(wide) if device is None or value.device == device or value.dim() else value.to(device, wide)
    return torch.scalar_tensor(value, dtype=wide, device=device)


def _ieee_rule(name: str) -> Callable[..., Tensor]:
    """Return the rule of a single operation of IEEE 754."""
    compute = getattr(torch, name)

    def rule(first: Any, *others: Any, out: Any = None) -> Any:
        if not isinstance(first, Tensor):
            return compute_lists(name, first, others, out)
        if first.dtype in _NATIVE and _need_no_conversion(first, (*others, out), compute):
            return compute(first, *others, out=out)
        dtype = first.dtype
        for other in others:
            dtype = torch.result_type(first, other)
        if not dtype.is_floating_point and not dtype.is_complex:
            dtype = torch.get_default_dtype()  # the dtype of a quotient of integers
        tensors = [value for value in (first, *others) if isinstance(value, Tensor)]
        device = next((tensor.device for tensor in tensors if tensor.dim()), first.device)
        result = compute(*(_widened(value, dtype, device) for value in (first, *others))).to(dtype)
        return result if out is None else out.copy_(result)

    return rule


def _need_no_conversion(first: Tensor, others: Sequence[_Number | None], compute: Callable[..., Tensor]) -> bool:
    """Return whether operands and result can be passed to torch as they are."""
    for other in others:
        if isinstance(other, Tensor):
            if other.dtype != first.dtype or other.device != first.device:
                return False
        elif other is not None and compute is torch.div:
            return False  # a GPU would multiply by the number's inverse, and round twice
    return True


_plus, _minus, _mul, _sqrt, _quotient = map(_ieee_rule, ("add", "sub", "mul", "sqrt", "div"))


def _div(first: Tensor, other: _Number, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Tensor:
    if rounding_mode is not None:
        raise Unportable(f"aten::div with rounding mode {rounding_mode}")
    return _quotient(first, other, out=out)


def _is_for_lists(rule: Callable[..., Any], operands: Sequence[Any]) -> bool:
    """Return whether a rule may compute whole lists at once."""
    if rule is _div and not are_tensors(operands[1]):
        return False  # see `_need_no_conversion`
    return are_alike(operands) and (rule is not _lerp or isinstance(operands[2], (int, float)))


def _scaled(value: Any, factor: Any) -> Any:
    if isinstance(factor, (int, float)) and factor == 1:
        return value
    return _mul(value, factor) if isinstance(value, (Tensor, list, tuple)) else value * factor


def _combined(
    combine: Callable[..., Tensor], first: Tensor, other: _Number, alpha: float = 1, *, out: Tensor | None = None
) -> Tensor:
    return combine(first, _scaled(other, alpha), out=out)


_add, _sub = partial(_combined, _plus), partial(_combined, _minus)


def _rsub(first: Tensor, other: _Number, alpha: float = 1) -> Tensor:
    return _plus(_mul(_scaled(first, alpha), -1.0), other)


def _with_term(
    combine: Callable[..., Tensor],
    first: Tensor,
    left: Tensor,
    right: Tensor,
    value: float = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Add the product or quotient of `left` and `right`, times `value`, to `first`."""
    term = _scaled(left, value)
    # If scaling has made new tensors of the right shapes, they may hold the result.
    is_reusable = term is not left and getattr(term, "shape", None) == getattr(right, "shape", None)
    return _plus(first, combine(term, right, out=term if is_reusable else None), out=out)


_addcmul, _addcdiv = partial(_with_term, _mul), partial(_with_term, _quotient)


def _lerp(first: Tensor, end: Tensor, weight: _Number, *, out: Tensor | None = None) -> Tensor:
    # Start from the nearer end, as torch does, so that a weight of one gives the end itself.
    difference = _minus(end, first)
    if not isinstance(weight, Tensor):
        if weight < 0.5:
            return _plus(first, _mul(difference, weight, out=difference), out=out)
        return _minus(end, _mul(difference, 1.0 - weight, out=difference), out=out)
    from_end = _minus(end, _mul(difference, _rsub(weight, 1.0)))
    result = torch.where(weight < 0.5, _plus(first, _mul(difference, weight)), from_end)
    return result if out is None else out.copy_(result)


def _reciprocal(first: Tensor) -> Tensor:
    return _quotient(torch.ones((), dtype=first.dtype, device=first.device), first)


def _rsqrt(first: Tensor) -> Tensor:
    return _reciprocal(_sqrt(first))


def _pow(first: Tensor, exponent: _Number) -> Tensor:
    if not isinstance(first, Tensor):
        raise Unportable("aten::pow of a number to tensors")
    if isinstance(exponent, Tensor):
        return integer_power(first, exponent)
    whole = int(exponent) if exponent == exponent // 1 and abs(exponent) <= _MAX_POWER else None
    if whole is not None:
        result = torch.ones_like(first)
        for _ in range(abs(whole)):
            result = _mul(result, first)
        return result if whole >= 0 else _reciprocal(result)
    if abs(exponent) == 0.5:
        return _sqrt(first) if exponent > 0 else _rsqrt(first)
    raise Unportable(f"aten::pow to the {exponent:g}")


def integer_power(base: Tensor, exponents: Tensor) -> Tensor:
    """Raise numbers to nonnegative integer powers, by multiplications in a fixed order."""
    if not bool(((exponents >= 0) & (exponents == exponents.floor()) & (exponents < _MAX_COUNT)).all()):
        raise Unportable("aten::pow to exponents that are not nonnegative integers")
    result, remaining = torch.ones_like(base * exponents), exponents.to(torch.int64)
    while bool(remaining.any()):
        result = torch.where((remaining & 1).bool(), _mul(result, base), result)
        base, remaining = _mul(base, base), remaining >> 1
    return result


def _sum(
    values: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dtype = dtype or (values.dtype if values.is_floating_point() else torch.int64)
    if not dtype.is_floating_point:
        return torch.sum(values, dim=_dims(values, dim), keepdim=keepdim, dtype=dtype)
    dims = _dims(values, dim)
    ordered = values.to(torch.float64).permute([*dims, *(d for d in range(values.dim()) if d not in dims)])
    total = tree_sum(ordered.reshape(math.prod(ordered.shape[: len(dims)]), *ordered.shape[len(dims) :]))
    shape = [1 if d in dims else size for d, size in enumerate(values.shape)]
    return (total.reshape(shape) if keepdim else total).to(dtype)


def _dims(values: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """Return the dimensions of a reduction as nonnegative indices; all dimensions if `dim` is None or empty."""
    chosen = [dim] if isinstance(dim, int) else list(dim or range(values.dim()))
    return sorted(d % max(values.dim(), 1) for d in chosen) if values.dim() else []


def _mean(values: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    count = math.prod(values.shape[d] for d in _dims(values, dim))
    total = _sum(values.to(torch.float64), dim, keepdim)
    return _quotient(total, float(count)).to(dtype or values.dtype)


def _var(values: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    wide = values.to(torch.float64)
    count = math.prod(values.shape[d] for d in _dims(values, dim))
    deviation = wide - _mean(wide, dim, True)
    divisor = max(count - (1 if correction is None else correction), 0)
    return _quotient(_sum(deviation * deviation, dim, keepdim), float(divisor)).to(values.dtype)


def _std(values: Tensor, dim: Any = None, **options: Any) -> Tensor:
    return _sqrt(_var(values.to(torch.float64), dim, **options)).to(values.dtype)


def _norm(
    values: Tensor, order: float | None = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    sizes, norm = values.to(torch.float64).abs(), None
    if order in (None, 2):
        norm = _sum(sizes * sizes, dim, keepdim).sqrt()
    elif order == 1:
        norm = _sum(sizes, dim, keepdim)
    elif order == math.inf:
        norm = sizes.amax(dim=_dims(values, dim), keepdim=keepdim)
    if norm is None:
        raise Unportable(f"aten::linalg_vector_norm of order {order}")
    return norm.to(dtype or values.dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    return exact_product(left, right).to(torch.promote_types(left.dtype, right.dtype))


def _addmm(first: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _scaled(exact_product(left, right), alpha)
    return (product if beta == 0 else _plus(_scaled(first.to(torch.float64), beta), product)).to(first.dtype)


def _addr(first: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _plus(_scaled(first, beta), _scaled(_mul(left[:, None], right[None]), alpha))


_RULES: Final[Mapping[str, Callable[..., Any]]] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _mul,
    "div": _div,
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "reciprocal": _reciprocal,
    "square": lambda first: _mul(first, first),
    "pow": _pow,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": _lerp,
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": _std,
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "mm": _product,
    "bmm": _product,
    "mv": lambda left, right: _product(left, right[:, None])[:, 0],
    "dot": lambda left, right: _product(left[None], right[:, None])[0, 0],
    "addmm": _addmm,
    "baddbmm": _addmm,
    "addmv": lambda first, left, right, **options: _addmm(first[..., None], left, right[..., None], **options)[..., 0],
    "addr": _addr,
}
_ACCEPTS_OUT: Final = frozenset((_add, _sub, _mul, _div, _sqrt, _addcmul, _addcdiv, _lerp))
