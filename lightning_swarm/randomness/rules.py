"""Which operations are random, and what `KeyedRandom` does with each.

A rule is called as ``(mode, func, args, kwargs)``; most operations have none. Torch tags its random operations, so
one that this package has never heard of is noticed.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_swarm.errors import ConfigError
from lightning_swarm.randomness.handlers import HANDLERS, Handler


class Mode(Protocol):
    """What a rule needs of `KeyedRandom`."""

    def next_key(self, func: object) -> int:
        """The key of the next draw."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *error: object) -> Any: ...


Rule: TypeAlias = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]

# Tagged as random, but they only choose a kernel or compute from what another operation drew.
_DRAWS_NOTHING: Final = frozenset({"aten::_fused_sdp_choice", "aten::_nested_tensor_softmax_with_shape"})


class _Rules(dict[Any, Rule | None]):
    """The rule of each operation, found when it is first met: a look-up is all that most operations cost."""

    def __missing__(self, func: Any) -> Rule | None:
        rule = _rule_of(func)
        # What runs inside an operation is nothing for a compiler to look into.
        self[func] = rule if rule is None else torch.compiler.disable(rule)
        return self[func]


RULES: Final = _Rules()


def _rule_of(func: Any) -> Rule | None:
    if func in HANDLERS:
        return _drawn_by(HANDLERS[func])
    name: str = func._schema.name
    if torch.Tag.nondeterministic_seeded not in func.tags or name in _DRAWS_NOTHING or name.endswith("_backward"):
        return None
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return _decomposed
    places = [i for i, argument in enumerate(func._schema.arguments) if argument.name == "generator"]
    return _seeded(places[0]) if places else _refused_if_drawn


def _drawn_by(handler: Handler) -> Rule:
    def rule(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _has_generator(args, kwargs):
            return func(*args, **kwargs)
        return handler(mode.next_key(func), *args, **kwargs)

    return rule


def _decomposed(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Where autograd is off altogether (inference mode), composite operations arrive whole.
    with mode:
        return func.decompose(*args, **kwargs)


def _seeded(place: int) -> Rule:
    """Give an operation a generator of its own, at its place among the arguments."""

    def rule(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _has_generator(args, kwargs):
            return func(*args, **kwargs)
        key = mode.next_key(func)
        device = _device(args, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs)
        generator = torch.Generator(device).manual_seed(key)
        if place < len(args):
            return func(*args[:place], generator, *args[place + 1 :], **kwargs)
        return func(*args, **{**kwargs, "generator": generator})

    return rule


def _refused_if_drawn(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = {
        argument.name: args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(func._schema.arguments)
    }
    is_off = values.get("train") is False or 0 in (values.get(name) for name in ("dropout_p", "dropout", "p"))
    if not is_off:
        raise ConfigError(
            f"random operations in a block must draw from the swarm's keyed stream, got {func}, which has a source of "
            "its own. For attention, set its dropout to 0 or run it inside "
            "`torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`; for an RNN, set its dropout to 0 and put "
            "`torch.nn.Dropout` between single-layer RNNs."
        )
    return func(*args, **kwargs)


def _has_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("generator") is not None or any(isinstance(value, torch.Generator) for value in args)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
    return torch.get_default_device()
