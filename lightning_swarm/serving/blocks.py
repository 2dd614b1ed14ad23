"""A client's stand-in for the blocks of a served model, which sends their calls to servers.

A call of the blocks is one of three things. With a cache, it is a step of a text, whose keys and values servers keep in
a session. If gradients flow or an adapter trains, it is a forward for tuning, as in `tuning_client`. Without a cache
and without gradients, servers compute it once and keep nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from lightning_swarm.client.inference.forwards import SentStep, SessionForwards, TextStep
from lightning_swarm.client.inference.session import InferenceSession, SessionInput, SessionWeights
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.autocast import capture
from lightning_swarm.model.inference.attention_cache import CacheHandle, is_in_session
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.inference import CacheRecipe
from lightning_swarm.protocol.messages.serving import ModelCard

if TYPE_CHECKING:
    from lightning_swarm.client.inference.adapters import FoundAdapters, PackedAdapter
    from lightning_swarm.serving.tuning_client import AdaptedBlocks


_NO_CACHE: Final = (
    "a forward that may train cannot continue a text from a cache, because servers keep no keys and values of such "
    "forwards, got a cache with tokens. Generate text under `torch.no_grad()`, freeze the adapter with "
    "`requires_grad_(False)`, or pass `use_cache=False` and the whole text each time."
)
_ONLY_HIDDEN: Final = (
    "through a served model's blocks, gradients reach only the hidden state, got another argument of the blocks that "
    "requires a gradient. Detach that argument, or train a LoRA adapter instead."
)
_WEIGHTS: Final = SessionWeights(generation=0, version=0, number=0)  # served weights never change


def _check_not_empty(hidden: Tensor) -> None:
    if not hidden.numel():
        raise ConfigError(
            f"a served model needs at least one text of at least one token, got a hidden state {list(hidden.shape)}."
        )


def _wants_gradient(tree: Any) -> bool:
    """Return whether gradients are enabled and a tensor of a tree needs one."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in serialization.flatten(tree)[1])


def _needs_backward(adapters: FoundAdapters, hidden: Any) -> bool:
    """Return whether a forward needs a backward later, for adapters or for the hidden state."""
    return adapters.wants_grad or _wants_gradient(hidden)


@dataclass
class TextInProgress:
    """A text that a thread generates, with the cache that its forwards use."""

    scope: Hashable = ""  # only texts of the same scope share prefixes
    cache: Any = None  # cache of the newest forward; its session ends when it is garbage-collected
    num_caches: int = 0  # number of caches so far
    num_kept_tokens: int = 0  # tokens whose keys and values the servers had before the text

    def use(self, cache: Any) -> None:
        """Record the cache of a forward."""
        self.num_caches += cache is not self.cache
        self.cache = cache


class ForwardStopped(BaseException):
    """Ends a model's forward at its blocks, because only the blocks' input was wanted."""


class ServedBlocks:
    """Computes calls of a model's blocks on servers."""

    def __init__(
        self,
        forwards: SessionForwards,
        card: ModelCard,
        blocks: Sequence[nn.Module],
        *,
        device: torch.device,
        adapted: AdaptedBlocks | None = None,  # None: blocks have no adapters
        exact: bool = False,  # servers compute each text alone
    ) -> None:
        self.exact = exact
        self._num_stages, self._device, self._adapted = len(card.stages), device, adapted
        self._blocks = blocks
        self._on_thread = threading.local()  # has `call`, `exact`, `text` and `recorded`
        self._num_writing = 0  # calls of `generate` in progress, on all threads
        self.forwards = forwards

    @contextlib.contextmanager
    def writing(self, scope: Hashable = "") -> Iterator[TextInProgress]:
        """Within the context, treat forwards with a cache as steps of a text, even if an adapter trains.

        Yields this thread's text. A nested context yields the text of the outer context.
        """
        before = getattr(self._on_thread, "text", None)
        text = self._on_thread.text = before or TextInProgress(scope)
        self._num_writing += 1
        try:
            yield text
        finally:
            self._num_writing -= 1
            self._on_thread.text = before

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[SessionInput]]:
        """Within the context, stop this thread's forwards at the blocks; yields the list that receives their inputs."""
        self._on_thread.recorded = list[SessionInput]()
        try:
            yield self._on_thread.recorded
        finally:
            self._on_thread.recorded = None

    def text_adapters(self) -> list[PackedAdapter | None] | None:
        """Return each stage's adapter for texts, or an empty list; None if texts draw random numbers."""
        adapters = None if self._adapted is None else self._adapted.adapters()
        if self._trains or (adapters is not None and any(stage.drops for stage in adapters.stages)):
            return None
        return [] if self._adapted is None or adapters is None or adapters.is_empty else self._adapted.packed(adapters)

    def branched(
        self,
        recipe: CacheRecipe,
        steps: Sequence[SessionInput],
        adapters: Sequence[PackedAdapter | None],
        source: InferenceSession | None = None,
    ) -> tuple[Any, int] | None:
        """Return a cache that begins with kept steps, and their number of tokens; see `SessionForwards.branched`."""
        return self.forwards.branched(
            recipe, steps, weights=_WEIGHTS, adapters=adapters, source=source, exact=self.exact
        )

    @contextlib.contextmanager
    def computed_by(self, call: Callable[[Any, dict[str, Any], Any], Any]) -> Iterator[None]:
        """Within the context, and on this thread, compute forwards with a cache by `call` in place of `step`."""
        before, self._on_thread.call = getattr(self._on_thread, "call", None), call
        try:
            yield
        finally:
            self._on_thread.call = before

    @contextlib.contextmanager
    def exactly(self) -> Iterator[None]:
        """Make texts exact that begin within the context, on this thread: servers compute their steps alone."""
        self._on_thread.exact = True
        try:
            yield
        finally:
            self._on_thread.exact = False

    def call_with_cache(self, hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
        """Compute the blocks' output for a forward with a cache, by `step` or by its replacement; see `computed_by`."""
        call = getattr(self._on_thread, "call", None) or self.step
        return call(hidden, extras, cache)

    def step(self, hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
        """Compute the blocks' output for a forward with a cache, such as one step of Hugging Face's `generate`.

        The forward is a step of a text, unless gradients are needed, or an adapter trains outside of `writing`. Then it
        is a forward for tuning, which uses no cache, and refuses a cache that has tokens.
        """
        if (steps := getattr(self._on_thread, "recorded", None)) is not None:
            _check_not_empty(hidden)
            steps.append(self.forwards.recorded(hidden, extras, cache, self._modes()))
            raise ForwardStopped
        if (text := getattr(self._on_thread, "text", None)) is not None:
            text.use(cache)
        adapters = self._adapters(hidden, extras)
        if (step := self._text_step(hidden, extras, cache, adapters)) is not None:
            return self.forwards.step(step)
        assert self._adapted is not None
        assert adapters is not None
        handle = CacheHandle.of(cache)
        if handle.length or handle.session is not None:
            raise ConfigError(_NO_CACHE)
        # Compute the forward for tuning without the cache, which would lack its tokens from now on.
        handle.refuse_use(_NO_CACHE)
        extras = {name: None if is_in_session(value) else value for name, value in extras.items()}
        return self._adapted(hidden, extras, adapters)

    def send(self, hidden: Any, extras: dict[str, Any], cache: Any) -> SentStep:
        """Send a text's step, perhaps before earlier steps have returned; see `SessionForwards.receive`."""
        step = self._text_step(hidden, extras, cache, self._adapters(hidden, extras))
        if step is None:
            raise ConfigError(_NO_CACHE)
        return self.forwards.send(step)

    def step_many(self, steps: Sequence[tuple[Any, dict[str, Any], Any]]) -> list[Any]:
        """Compute the blocks' outputs for steps of texts with different caches; return each output, or its error.

        Args:
            steps: The hidden state ``[rows, tokens, ...]``, the blocks' other arguments and the cache of each text.
        """
        checked: list[TextStep | ConfigError] = []
        for hidden, extras, cache in steps:
            try:
                step = self._text_step(hidden, extras, cache, self._adapters(hidden, extras))
                checked.append(ConfigError(_NO_CACHE) if step is None else step)
            except ConfigError as error:
                checked.append(error)
        outputs = iter(self.forwards.step_many([step for step in checked if isinstance(step, TextStep)]))
        return [next(outputs) if isinstance(step, TextStep) else step for step in checked]

    def _text_step(
        self, hidden: Any, extras: dict[str, Any], cache: Any, adapters: FoundAdapters | None
    ) -> TextStep | None:
        """Return a text's step; None if the forward is for tuning."""
        _check_not_empty(hidden)
        exact = self.exact or getattr(self._on_thread, "exact", False)
        make = partial(TextStep, hidden=hidden, extras=extras, cache=cache, weights=_WEIGHTS, exact=exact)
        if self._adapted is None or adapters is None:
            return make(modes=self._modes(training=self._trains))
        # A cache alone does not make a forward a text's step, because a model creates caches in an evaluation, too.
        # `is_trained` is true if an adapter has parameters that train, even if gradients are off.
        is_text = self._num_writing > 0 or CacheHandle.of(cache).session is not None or not adapters.is_trained
        if not is_text or _needs_backward(adapters, hidden):
            return None
        packed, drops = self._adapted.packed(adapters), [stage.drops for stage in adapters.stages]
        return make(modes=self._modes(training=adapters.trains), adapters=packed, drops=drops)

    def __call__(self, hidden: Any, *carried: Any, **extras: Any) -> Any:
        """Compute a forward without a cache. `carried` are inputs beside the hidden state that require a gradient."""
        _check_not_empty(hidden)
        if carried and self._adapted is not None:
            raise ConfigError(_ONLY_HIDDEN)
        if carried:
            raise ConfigError(
                "a served model computes without gradients, got an input of its blocks that requires a gradient. Call "
                "the model under `torch.no_grad()`."
            )
        adapters = self._adapters(hidden, extras)
        if self._adapted is not None and adapters is not None:
            return self._adapted(hidden, extras, adapters)
        return self.forwards.once(hidden, extras, weights=_WEIGHTS, modes=self._modes(training=self._trains))

    @property
    def _trains(self) -> bool:
        """Whether a block without adapters is in train mode."""
        return any(block.training for block in self._blocks)

    def _adapters(self, hidden: Any, extras: dict[str, Any]) -> FoundAdapters | None:
        """Return the adapters; None if there are none and the call neither draws random numbers nor needs gradients."""
        if self._adapted is None:
            return None
        adapters = self._adapted.adapters()
        if _wants_gradient(extras):
            raise ConfigError(_ONLY_HIDDEN)
        draws = adapters.trains or any(stage.drops for stage in adapters.stages)
        return None if adapters.is_empty and not draws and not _needs_backward(adapters, hidden) else adapters

    def _modes(self, *, training: bool = False) -> list[ComputeMode]:
        mode = capture(self._device.type, training=training, grad=False, input_grad=False)
        return [mode] * self._num_stages
