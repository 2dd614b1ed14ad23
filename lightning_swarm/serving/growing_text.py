"""A text that a Hugging Face model writes step by step, as `generate` would.

`generate` itself prepares each text: its cache, its masks and the rules of the model's generation config. Its loop of
steps is replaced, so that steps of several texts can be computed together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_swarm.model.inference.attention_cache import CacheHandle, is_cache
from lightning_swarm.network import PeerId
from lightning_swarm.serving.blocks import TextInProgress
from lightning_swarm.serving.prefixes import TextPrefixes, call_options, can_begin_with_prefix
from lightning_swarm.serving.sampling import TextSampler

_HANDLED = ("MaxLengthCriteria", "EosTokenCriteria")  # `GrowingText.add` checks these stopping criteria itself


class TextListener(Protocol):
    """Receives a text's tokens. Its methods are called on the thread that computes the text's steps."""

    num_cached: int  # tokens of the prompt that servers had computed before; set before the first token

    @property
    def is_cancelled(self) -> bool:
        """Whether the text is no longer wanted."""

    def begin(self) -> None:
        """Receive the beginning of the text, before its first step."""

    def add(self, token: int, logits: Tensor | None) -> None:
        """Receive a token, with its logits ``[tokens]`` if the sampler keeps them."""

    def end(self, *, is_complete: bool, error: BaseException | None) -> None:
        """Receive the end of the text. It is complete unless its maximum length or an error has ended it."""


class GrowingText:
    """A text's prompt, cache, tokens so far, and the rules by which its tokens are drawn.

    Args:
        model: The Hugging Face model, or peft's model around it.
        encoded: The tokenized prompt: `input_ids` ``[1, tokens]`` and `attention_mask`.
        options: Further options of `generate`.
        sampler: Draws the tokens.
        num_new: The maximum number of new tokens.
        ends: The tokens that end the text.
        listener: Receives the tokens.
        is_exact: Each step is computed alone, and no prefix is shared, so that no rounding depends on other texts.
        scope: Only texts of the same scope share prefixes.

    Attributes:
        is_joinable: Whether its steps may share forwards with other texts.
        windows: Lengths of the sliding windows of attention.
    """

    def __init__(
        self,
        model: Any,
        encoded: Mapping[str, Any],
        options: Mapping[str, Any],
        sampler: TextSampler,
        listener: TextListener,
        *,
        num_new: int,
        ends: Collection[int],
        is_exact: bool = False,
        scope: Hashable = "",
    ) -> None:
        self._outer, self._encoded, self._options = model, encoded, options
        self.sampler, self.listener, self.is_exact = sampler, listener, is_exact
        self._num_new, self._ends = num_new, frozenset(ends)
        self.num_prompt = int(encoded["input_ids"].shape[1])
        self.tokens: list[int] = []  # new tokens
        self.num_fed = 0  # tokens of the prompt that the model has computed
        self.is_prepared = self.is_joinable = self._is_over = False
        self._kwargs: dict[str, Any] = {}  # arguments that `generate` would pass from step to step
        self._scope = scope
        self._prefixes: TextPrefixes | None = None  # set if the text may begin with a prefix

    @property
    def length(self) -> int:
        """The number of tokens of prompt and text."""
        return self.num_prompt + len(self.tokens)

    def prepare(self) -> bool:
        """Have `generate` prepare the text, without computing any step; return whether it has new tokens."""
        self.listener.begin()
        if self._num_new:
            length = {"max_new_tokens": self._num_new}
            prefix = self._begin_with_prefix()
            self._outer.generate(**self._encoded, **self._options, **length, **prefix, custom_generate=self._keep)
            self.is_prepared = True
        return self.is_prepared

    def _begin_with_prefix(self) -> dict[str, Any]:
        """Return the cache of a prefix that servers keep, if any, as an option of `generate`."""
        client, options = getattr(self._outer, "swarm", None), {**self._encoded, **self._options}
        prompt, option = call_options(self._outer, (), options)
        if client is None or self.is_exact or not can_begin_with_prefix(self._outer, prompt, option, {*options}):
            return {}
        self._prefixes, text = client.prefixes, TextInProgress(self._scope)
        cache_option: dict[str, Any] = client.prefixes.begin(prompt, text)
        self.num_fed = self.listener.num_cached = text.num_kept_tokens
        return cache_option

    def _keep(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Collection[Callable[[Tensor, Tensor], Tensor]],
        stopping_criteria: Collection[Any],
        generation_config: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Replace the decoding loop of `generate`: keep what it has prepared."""
        self.model, self._kwargs, self._ids = model, kwargs, input_ids
        # Kept now, because peft replaces the method only during `generate`.
        self._prepare_inputs: Callable[..., dict[str, Any]] = model.prepare_inputs_for_generation
        self.sampler.rules = [partial(self._process, processor) for processor in logits_processor]
        self._criteria = [criterion for criterion in stopping_criteria if type(criterion).__name__ not in _HANDLED]
        self._num_behind = 0  # new tokens that `_kwargs` do not count yet
        pefts_method = vars(model).get("prepare_inputs_for_generation")  # puts soft tokens before the prompt
        self.is_joinable = bool(kwargs["use_cache"]) and self.cache is not None and pefts_method is None
        layers = [] if self.cache is None else self.cache.layers
        self.windows = sorted({int(layer.sliding_window) for layer in layers if hasattr(layer, "sliding_window")})
        return input_ids

    @property
    def cache(self) -> Any:
        """The text's cache; None if the model keeps none."""
        return next((value for value in self._kwargs.values() if is_cache(value)), None)

    @property
    def route(self) -> tuple[PeerId, ...]:
        """The server of each stage; empty without servers."""
        handle = None if self.cache is None else CacheHandle.find(self.cache)
        return () if handle is None or handle.session is None else handle.session.route

    # ------------------------------------------------------------------ steps

    def feed(self, num_tokens: int) -> Tensor | None:
        """Compute the next part of the prompt; return the logits ``[tokens]`` of the next token after the last part."""
        end = min(self.num_prompt, self.num_fed + num_tokens)
        kwargs = self._kwargs
        if self.num_fed or end < self.num_prompt:
            sliced = {"attention_mask": slice(end), "position_ids": slice(self.num_fed, end)}
            cut = {name: kwargs[name][..., part] for name, part in sliced.items() if kwargs.get(name) is not None}
            ids, kwargs = self._ids[:, self.num_fed : end], {**kwargs, **cut}
        else:
            ids = self._ids
        outputs = self.model(**self._prepare_inputs(ids, is_first_iteration=True, **kwargs), return_dict=True)
        self.num_fed = end
        if end < self.num_prompt:
            return None
        self._kwargs = self.model._update_model_kwargs_for_generation(outputs, self._kwargs)
        return self._last(outputs)

    def step(self) -> Tensor:
        """Compute the newest token's step, as `generate` does; return the logits ``[tokens]`` of the next token."""
        outputs = self.model(**self.inputs(), return_dict=True)
        self._kwargs = self.model._update_model_kwargs_for_generation(outputs, self._kwargs)
        return self._last(outputs)

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of the newest token's forward, once the steps of joint forwards are counted."""
        if self._num_behind:
            num_behind, self._num_behind = self._num_behind, 0
            self._kwargs = self.model._update_model_kwargs_for_generation({}, self._kwargs, num_new_tokens=num_behind)
        length = 1 if self._kwargs["use_cache"] else None
        return self._prepare_inputs(self._all_ids(), next_sequence_length=length, **self._kwargs)

    def follow(self) -> None:
        """Record that a joint forward has computed the step of the newest token."""
        self._num_behind += 1

    def _last(self, outputs: Any) -> Tensor:
        logits: Tensor = outputs.logits[0, -1]
        return logits

    def _all_ids(self) -> Tensor:
        """Return the tokens of prompt and text, ``[1, tokens]``."""
        if new := self.tokens[self._ids.shape[1] - self.num_prompt :]:
            self._ids = torch.cat([self._ids, self._ids.new_tensor([new])], dim=-1)
        return self._ids

    # ------------------------------------------------------------------ tokens

    def _process(self, processor: Callable[[Tensor, Tensor], Tensor], row: Tensor) -> None:
        row.copy_(processor(self._all_ids(), row.unsqueeze(0))[0])

    def add(self, token: int) -> bool:
        """Append a token and report it; return whether it is the last one."""
        self.tokens.append(token)
        self.sampler.add(token)
        self.listener.add(token, self.sampler.logits)
        if self._is_complete or len(self.tokens) >= self._num_new:
            return True
        return any(bool(criterion(self._all_ids(), None).all()) for criterion in self._criteria)

    @property
    def _is_complete(self) -> bool:
        """Whether an end token or the grammar has ended the text."""
        mask = self.sampler.mask
        return (mask is not None and mask.is_done) or (bool(self.tokens) and self.tokens[-1] in self._ends)

    def end(self, error: BaseException | None = None) -> None:
        """Drop the cache, which servers may keep, and report the end. A second call does nothing."""
        if not self._is_over:
            self._is_over = True
            if self._prefixes is not None and error is None and self.cache is not None:
                text = TextInProgress(self._scope)
                text.use(self.cache)
                self._prefixes.keep(self._all_ids(), text)
                del text  # drops its reference to the cache
            self._kwargs = {}
            self.listener.end(is_complete=self._is_complete or len(self.tokens) < self._num_new, error=error)
