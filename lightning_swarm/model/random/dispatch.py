"""A dispatch mode in which random operations draw from a keyed stream, and a runner that enters it only if needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._dynamo.decorators import skip
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.random.keyed_stream import key_seed
from lightning_swarm.model.random.operators import HANDLERS, plain_attention

# Runs a random operation inside the mode; called as (mode, func, args, kwargs).
Rule: TypeAlias = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]

# These operations are tagged as random, but only choose a kernel, or use numbers that another operation drew.
_DRAWS_NOTHING: Final = frozenset({"aten::_fused_sdp_choice", "aten::_nested_tensor_softmax_with_shape"})


class _Rules(dict[Any, Rule | None]):
    """Maps operations to their rules, or to None; finds a rule at the operation's first call."""

    def __missing__(self, func: Any) -> Rule | None:
        rule = _rule_of(func)
        # torch.compile must not trace into a rule.
        self[func] = rule if rule is None else torch.compiler.disable(rule)
        return self[func]


RULES: Final = _Rules()


def _rule_of(func: Any) -> Rule | None:
    """Return the rule of an operation, or None if it draws nothing."""
    if (handler := HANDLERS.get(func)) is not None:
        return lambda mode, func, args, kwargs: handler(mode.next_key(func), *args, **kwargs)
    name: str = func._schema.name  # torch tags random operations, so this also finds those without a handler
    if torch.Tag.nondeterministic_seeded not in func.tags or name in _DRAWS_NOTHING or name.endswith("_backward"):
        return None
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return _decomposed
    indices = [i for i, argument in enumerate(func._schema.arguments) if argument.name == "generator"]
    return _seeded(indices[0]) if indices else _refuse_unless_dropout_off


def _decomposed(mode: KeyedRandom, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Autograd decomposes composite operations before they arrive here, but inference mode does not.
    with mode:
        return func.decompose(*args, **kwargs)


def _seeded(index: int) -> Rule:
    """Return a rule that passes an operation a generator seeded from the stream, as argument number `index`."""

    def rule(mode: KeyedRandom, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = mode.next_key(func)
        device = _device(args, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs)
        generator = torch.Generator(device).manual_seed(key)
        if index < len(args):
            return func(*args[:index], generator, *args[index + 1 :], **kwargs)
        return func(*args, **{**kwargs, "generator": generator})

    return rule


def _refuse_unless_dropout_off(mode: KeyedRandom, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation whose random numbers cannot be replaced; raise `ConfigError` unless its dropout is off."""
    values = {
        argument.name: args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(func._schema.arguments)
    }
    is_off = values.get("train") is False or 0 in (values.get(name) for name in ("dropout_p", "dropout", "p"))
    if not is_off:
        raise ConfigError(
            f"random operations in a block must draw from the swarm's keyed stream, got {func}, which draws by itself. "
            "For attention, set its dropout to 0 or run it inside "
            "`torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`; for an RNN, set its dropout to 0 and put "
            "`torch.nn.Dropout` between single-layer RNNs."
        )
    return func(*args, **kwargs)


def _has_generator(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("generator") is not None or any(isinstance(value, torch.Generator) for value in args)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
    return torch.get_default_device()


class KeyedRandom(TorchDispatchMode):
    """Makes the random operations of this thread draw from a keyed stream.

    A microbatch may be computed again, on another peer, and must get the same dropout masks. So a stage that draws
    runs inside this mode, which replaces torch's generators. Each draw is a function of (seed, number of the draw,
    index of the element). Generators are neither read nor moved::

        with KeyedRandom(key_seed(step, microbatch, stage)):
            output = stage(inputs)  # the same masks each time, on each peer

    Entering restarts the stream. An operation to which the caller passes a generator draws from that generator. Other
    operations without a handler here that accept a generator (``multinomial``, ``poisson``, ...) get a generator
    seeded from the stream. Their draws are equal on devices of one kind.

    If a forward drew, run its backward in this mode as well. It needs no draws, but the mode then detects a block that
    recomputes itself (``torch.utils.checkpoint``) without `checkpoint_contexts`.
    """

    def __init__(self, seed: int, *, first_draw: int = 0) -> None:
        """Prepare a stream of a 64-bit seed that skips `first_draw` draws and begins when entered."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.draw = self._first_draw = first_draw  # number of the latest draw
        self._attention: AbstractContextManager[object] = nullcontext()
        self._depth = 0
        self._graph_task = -1  # the backward inside which the mode was entered; -1: none

    def __enter__(self) -> Self:
        # Nested entries come from `_decomposed`, because torch suspends the mode while a rule runs.
        if self._depth == 0:
            self.draw = self._first_draw
            self._graph_task = torch._C._current_graph_task_id()
            self._attention = plain_attention()
            self._attention.__enter__()
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._attention.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    @skip
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation by its rule, or, nearly always, as it is."""
        rule = RULES[func]
        if rule is None or _has_generator(args, kwargs or {}):
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(self, func, args, dict(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let blocks be compiled: compiled code draws its random numbers, or the seeds of its kernels, in this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # instead of torch's slow wrapper against tracing, `skip` protects `__torch_dispatch__`

    def next_key(self, func: object) -> int:
        """Return the 64-bit key of the next draw, which `func` makes."""
        if torch._C._current_graph_task_id() != self._graph_task:
            raise ConfigError(
                f"blocks must draw their random numbers in forward, got {func} in backward, where a block that "
                "recomputes itself with `torch.utils.checkpoint` would draw other numbers. Pass `checkpoint` the "
                "arguments `use_reentrant=False, context_fn=lightning_swarm.randomness.checkpoint_contexts`, or leave "
                "it out, because the swarm recomputes stages itself."
            )
        self.draw += 1
        return key_seed(self.seed, self.draw)


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts for a block's forward and its recomputation, so that both make the same draws.

    For ``context_fn`` of ``torch.utils.checkpoint``. Without effect outside of `KeyedRandom`, so models may always
    pass it.
    """
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, KeyedRandom):
            return nullcontext(), KeyedRandom(mode.seed, first_draw=mode.draw)
    return nullcontext(), nullcontext()


_T = TypeVar("_T")

_MAX_REPEATS: Final = 3
"""After this many repeated runs, a kind of computation always runs in the mode.

Without this limit, each computation would run twice if other threads draw all the time.
"""


# Every operation inside `KeyedRandom` passes through Python, which takes a few per cent of a stage's time on a CPU.
# Most models draw nothing, so the mode is entered only where it is needed. A computation that drew nothing in the mode
# runs without the mode from then on, and torch's generators are compared before and after. If a generator has moved,
# the computation runs again in the mode, which shows whether it or another thread of this process drew. A draw that
# leaves no trace in the generators (in ``torch.random.fork_rng``) is noticed only if it occurs in the first run.
class KeyedOnDemand:
    """Runs computations of a stage, inside `KeyedRandom` only if they draw random numbers."""

    def __init__(self, device: torch.device) -> None:
        self._can_watch_generators = device.type in ("cpu", "cuda")  # if not, all computations run in the mode
        # `device` may lack an index ("cuda"); a tensor that is made there has it.
        self._cuda_index = torch.empty(0, device=device).device.index if device.type == "cuda" else None
        self._drawless: set[Hashable] = set()
        self._num_repeats: Counter[Hashable] = Counter()

    def run(
        self,
        kind: Hashable,  # computations of one kind all draw or all do not
        seed: int,
        compute: Callable[[], _T],
        anew: Callable[[], Callable[[], _T]] | None = None,  # returns another `compute`, if it can run only once
    ) -> tuple[_T, bool]:
        """Compute, and return the result and whether random numbers were drawn."""
        if kind not in self._drawless:
            return self._run_keyed(kind, seed, compute)
        before = self._states()
        with plain_attention():  # as in the mode, because another kind of attention would compile the code again
            result = compute()
        if all(map(torch.equal, before, self._states())):
            return result, False
        del result  # the second result needs the memory
        self._drawless.discard(kind)
        self._num_repeats[kind] += 1
        try:
            result, has_drawn = self._run_keyed(kind, seed, compute if anew is None else anew())
        except BaseException:
            self._restore(before)
            raise
        if has_drawn:  # other threads' draws are undone as well, and repeat, which is harmless
            self._restore(before)
        return result, has_drawn

    def _run_keyed(self, kind: Hashable, seed: int, compute: Callable[[], _T]) -> tuple[_T, bool]:
        with KeyedRandom(seed) as mode:
            result = compute()
        if not mode.draw and self._can_watch_generators and self._num_repeats[kind] < _MAX_REPEATS:
            self._drawless.add(kind)
        return result, mode.draw > 0

    def _generators(self) -> list[torch.Generator]:
        cuda = [] if self._cuda_index is None else [torch.cuda.default_generators[self._cuda_index]]
        return [torch.default_generator, *cuda]

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _restore(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state)
