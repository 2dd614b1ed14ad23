"""Implementations of torch's random operations by keyed draws, for use inside `KeyedRandom`."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from lightning_swarm.model.random.keyed_stream import long_bits, normal, random_mask, uniform

_plain = torch.ops.aten._scaled_dot_product_attention_math


class PlainAttention(TorchFunctionMode):
    """Computes attention with dropout by matrix products, as torch does on the CPU."""

    # The fused kernels of GPUs draw their own numbers, so only attention without dropout may use them. The usual way
    # to choose a kernel, ``torch.nn.attention.sdpa_kernel``, sets flags of the whole process, which other threads see.
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, and replace attention with dropout."""
        return _PLAIN.get(func, func)(*args, **(kwargs or {}))


def plain_attention() -> AbstractContextManager[object]:
    """Return `PlainAttention` if there is a GPU, because on the CPU torch computes attention with dropout so anyway."""
    return PlainAttention() if torch.cuda.is_initialized() else nullcontext()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    if not dropout_p:
        output: Tensor = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return output
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    weighted: Tensor = _plain(query, key, value, attn_mask, dropout_p, is_causal, None, **options)[0]
    return weighted


def _calling_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function of torch so that it calls `_attention`, because a mode does not notice calls inside functions."""
    if not isinstance(function, FunctionType):  # another library has wrapped it
        return function
    names = {**function.__globals__, scaled_dot_product_attention.__name__: _attention}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_PLAIN: Final[Mapping[Any, Callable[..., Any]]] = {
    scaled_dot_product_attention: _attention,
    multi_head_attention_forward: _calling_plain(multi_head_attention_forward),
}


Handler = Callable[..., Any]  # called with the key of a draw, and arguments as in torch's schema

# dtype -> bits of its mantissa
_MANTISSA: Final = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def _fill(target: Tensor, values: Tensor) -> Tensor:
    # In the order of indices, not of memory, because strides differ between devices.
    return target.copy_(values.view(target.shape))


def _fill_uniform(key: int, self: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    if self.is_complex():
        _fill_uniform(key, torch.view_as_real(self), low, high)
        return self
    values = uniform(key, self.numel(), self.dtype, self.device)
    return _fill(self, values if (low, high) == (0.0, 1.0) else values.mul_(high - low).add_(low))


def _fill_normal(key: int, self: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    if std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    if self.is_complex():
        _fill_normal(key, torch.view_as_real(self), 0.0, std * math.sqrt(0.5))
        return self.add_(mean)
    values = normal(key, self.numel(), self.dtype, self.device)
    return _fill(self, values if (mean, std) == (0.0, 1.0) else values.mul_(std).add_(mean))


def _fill_exponential(key: int, self: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    wide = torch.float64 if self.dtype == torch.float64 else torch.float32
    values = uniform(key, self.numel(), wide, self.device).neg_().log1p_().neg_()
    # Never zero, because `gumbel_softmax` takes the logarithm.
    return _fill(self, values.clamp_(min=torch.finfo(wide).tiny).mul_(1.0 / rate))


def _fill_integers(key: int, self: Tensor, low: int, high: int) -> Tensor:
    span = high - low
    if span <= 0:
        raise RuntimeError(f"random integers expect low < high, got {low} and {high}")
    values = long_bits(key, self.numel(), self.device)
    if span <= 2**63:
        values.bitwise_and_(2**63 - 1)
        return _fill(self, (values if span == 2**63 else values.remainder_(span)).add_(low))
    # The span is more than half of all int64 numbers. As unsigned numbers, values are less than twice the span, so one
    # subtraction gives the remainder, as in torch. int64 arithmetic wraps around, and int64 numbers with a flipped sign
    # bit compare like unsigned numbers.
    sign_bit, span = -(2**63), span - 2**64
    is_below = values.bitwise_xor(sign_bit) < (span ^ sign_bit)
    return _fill(self, values.where(is_below, values - span).add_(low))


def _random(key: int, self: Tensor, *bounds: int | None, **_: Any) -> Tensor:
    """Fill with integers of ``low <= number < high``; a single bound is `high`, and `low` is 0 by default.

    Without `high`, the largest integer is the last to which the dtype holds all integers.
    """
    low, high = (0, *bounds) if len(bounds) == 1 else (bounds or (0, None))
    if high is None:
        if self.dtype == torch.bool:
            high = 2
        elif self.is_floating_point():
            high = 2 ** _MANTISSA.get(self.dtype, 8) + 1
        else:
            high = torch.iinfo(self.dtype).max + 1
    return _fill_integers(key, self, low or 0, high)


def _bernoulli_(key: int, self: Tensor, p: float = 0.5, **_: Any) -> Tensor:
    return random_mask(key, self, p, out=self)


def _bernoulli_by(key: int, self: Tensor, p: Tensor, **_: Any) -> Tensor:
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    draws = uniform(key, self.numel(), wide, self.device).view(self.shape)
    return self.copy_(draws < p.to(self.device))


def _native_dropout(key: int, self: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return self.clone(), torch.ones_like(self, dtype=torch.bool)
    mask = random_mask(key, self, 1.0 - p)
    return self.mul(mask).mul_(0.0 if p == 1 else 1.0 / (1.0 - p)), mask


def _rrelu(
    key: int, self: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, *_: Any
) -> Tensor:
    if not training:
        return torch.nn.functional.leaky_relu(self, (lower + upper) / 2)
    # Backward takes the gradient from `noise`, so it must hold the slope of every element.
    _fill_uniform(key, noise, lower, upper)
    noise.masked_fill_(self > 0, 1.0)
    return self * noise


def _normal_of(key: int, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    options.pop("generator", None)
    if size is None:
        tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
        target = torch.empty_like(torch.broadcast_tensors(*tensors)[0], memory_format=torch.contiguous_format)
    else:
        target = torch.empty(size, **options)
    return _fill_normal(key, target).mul_(std).add_(mean)


def _new(fill: Handler, dtype: torch.dtype | None = None) -> Handler:
    """Return the handler of an operation that makes a tensor: ``(*fill's arguments, size, *, options)``."""

    def rule(key: int, *args: Any, generator: None = None, out: Tensor | None = None, **options: Any) -> Tensor:
        *bounds, size = args
        if out is not None:
            return fill(key, out.resize_(size), *bounds)  # type: ignore[no-any-return]
        if options.get("dtype") is None and dtype is not None:
            options["dtype"] = dtype
        return fill(key, torch.empty(size, **options), *bounds)  # type: ignore[no-any-return]

    return rule


def _like(fill: Handler) -> Handler:
    """Return the handler of an operation that makes a tensor like `self`: ``(self, *fill's arguments, *, options)``."""

    def rule(key: int, self: Tensor, *bounds: Any, generator: None = None, **options: Any) -> Tensor:
        numbers = [bound.item() if isinstance(bound, Tensor) else bound for bound in bounds]
        return fill(key, torch.empty_like(self, **options), *numbers)  # type: ignore[no-any-return]

    return rule


def _randperm(key: int, n: int, *, generator: None = None, out: Tensor | None = None, **options: Any) -> Tensor:
    device = out.device if out is not None else torch.empty(0, device=options.get("device")).device
    # Stable, so that every device sorts equal draws alike.
    order = torch.argsort(long_bits(key, n, device), stable=True)
    if out is not None:
        return out.resize_(n).copy_(order)
    return torch.empty(n, **{"dtype": torch.int64, **options}).copy_(order)


_aten: Final = torch.ops.aten
HANDLERS: Final[dict[Any, Handler]] = {
    _aten.native_dropout.default: _native_dropout,
    _aten.bernoulli.default: lambda key, p, **_: _bernoulli_by(key, torch.empty_like(p), p),
    _aten.bernoulli.p: lambda key, like, p, **_: _bernoulli_(key, torch.empty_like(like), p),
    _aten.bernoulli_.float: _bernoulli_,
    _aten.bernoulli_.Tensor: _bernoulli_by,
    _aten.uniform_.default: _fill_uniform,
    _aten.normal_.default: _fill_normal,
    _aten.exponential_.default: _fill_exponential,
    _aten.random_.default: _random,
    _aten.random_.to: _random,
    getattr(_aten.random_, "from"): _random,
    _aten.rrelu_with_noise.default: _rrelu,
    _aten.rrelu_with_noise_.default: lambda key, target, *args: target.copy_(_rrelu(key, target, *args)),
}
_USUAL: Final = ("default", "generator", "out", "generator_out")  # names of most operations' overloads
# operation -> handler, and the overloads that the handler implements
_VARIANTS: Final[dict[str, tuple[Handler, Sequence[str]]]] = {
    "rand": (_new(_fill_uniform), _USUAL),
    "randn": (_new(_fill_normal), _USUAL),
    "randint": (_new(_random, torch.int64), (*_USUAL, "low", "low_generator", "low_out", "low_generator_out")),
    "randperm": (_randperm, _USUAL),
    "rand_like": (_like(_fill_uniform), ("default", "generator")),
    "randn_like": (_like(_fill_normal), ("default", "generator")),
    "randint_like": (
        _like(_random),
        ("default", "generator", "Tensor", "Tensor_generator", "low_dtype", "low_generator_dtype"),
    ),
    "normal": (_normal_of, ("Tensor_Tensor", "Tensor_float", "float_Tensor", "float_float")),
}
for _name, (_handler, _overloads) in _VARIANTS.items():
    _packet = getattr(_aten, _name)
    for _overload in _overloads:
        if _overload in _packet.overloads():  # not all versions of torch have all overloads
            HANDLERS[getattr(_packet, _overload)] = _handler
