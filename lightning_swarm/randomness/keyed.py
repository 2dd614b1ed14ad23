"""The mode under which a thread's random operations draw from a keyed stream."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch._dynamo.decorators import skip
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from lightning_swarm.errors import ConfigError
from lightning_swarm.randomness.attention import plain_attention
from lightning_swarm.randomness.rules import RULES
from lightning_swarm.randomness.stream import key_seed


class KeyedRandom(TorchDispatchMode):
    """Makes the random operations of this thread draw from a keyed stream.

    A microbatch may be computed again, elsewhere, and must meet the same dropout masks. So a stage that draws runs
    inside this mode, which takes the place of torch's generators: each draw is a function of (seed, number of the draw,
    index of the element). Generators are neither read nor moved::

        with KeyedRandom(key_seed(step, microbatch, stage)):
            output = stage(inputs)  # and again, later or elsewhere, with the same masks

    Entering begins the stream again. A generator that the caller passes explicitly is honoured. Operations that
    have no rule of their own but take a generator (``multinomial``, ``poisson``, ...) get one seeded from the
    stream: the same on devices of one kind.

    Backward needs no draws, but that of a forward that drew belongs inside too: there, a block that recomputes itself
    (``torch.utils.checkpoint``) is found out, unless it was given `checkpoint_contexts`.
    """

    def __init__(self, seed: int, *, first_draw: int = 0) -> None:
        """Prepare a stream; it begins when entered.

        Args:
            seed: 64 bits.
            first_draw: How many draws to pass over.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.draw = self._first_draw = first_draw
        self._attention: AbstractContextManager[object] = nullcontext()
        self._depth = 0
        self._graph_task = -1

    def __enter__(self) -> Self:
        # A rule enters again, while the mode is suspended, to run the parts of a composite operation.
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
        """Run an operation: by its rule, or as it is, which is nearly always."""
        rule = RULES[func]
        if rule is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(self, func, args, dict(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have blocks compiled. What compiled code draws from is drawn here when it runs, so it is keyed like all else.

        A backend that computes random numbers in kernels of its own (inductor) draws their seed.
        """
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch's own guard around the method above takes longer than the method; `skip` costs nothing.
        return False

    def next_key(self, func: object) -> int:
        """The 64-bit key of the next draw, which `func` makes."""
        if torch._C._current_graph_task_id() != self._graph_task:
            raise ConfigError(
                f"blocks must draw their random numbers in forward, got {func} in backward: a block that recomputes "
                "itself with `torch.utils.checkpoint` would meet other numbers there. Give it `use_reentrant=False, "
                "context_fn=lightning_swarm.randomness.checkpoint_contexts`, or leave it out: the swarm recomputes "
                "stages by itself."
            )
        self.draw += 1
        return key_seed(self.seed, self.draw)


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The ``context_fn`` with which ``torch.utils.checkpoint`` recomputes a block with the same draws.

    Outside of `KeyedRandom` it does nothing, so a model may always pass it.
    """
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, KeyedRandom):
            return nullcontext(), KeyedRandom(mode.seed, first_draw=mode.draw)
    return nullcontext(), nullcontext()
