"""Writes a text with drafts: servers compute drafted tokens before the model has chosen them.

`generate` runs its ordinary loop, so that processors, criteria and streamers see each token as without drafts. Only the
blocks' calls change. Drafted tokens are sent in chunks, without waiting for their outputs. If the model chooses the
token that the draft has predicted, the blocks' call returns this token's part of its chunk. Any other token ends the
draft: the servers remove the remaining drafted tokens from their caches, and the next draft begins.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from lightning_swarm.client.inference.forwards import SentStep
from lightning_swarm.client.inference.prefixes import num_common
from lightning_swarm.model.inference import attention_cache
from lightning_swarm.model.inference.attention_cache import CacheHandle
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.inference import CacheOperation
from lightning_swarm.serving.blocks import ForwardStopped, ServedBlocks
from lightning_swarm.serving.draft_policy import MAX_CHUNKS, DraftPolicy
from lightning_swarm.serving.prefixes import is_plain_text

DRAFT_OPTIONS: Final = ("assistant_model", "prompt_lookup_num_tokens")
"""Options of `generate` that ask for drafts."""

# With these options, `generate` verifies drafts in another way, or chooses other tokens than without drafts.
_UNSUPPORTED: Final = (
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "constraints",
    "force_words_ids",
    "speculation_type",
    "use_mtp",
)
# Options that the assistant's drafts need, because they change which token is the likeliest.
_RULES: Final = ("eos_token_id", "pad_token_id", "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens")
_DEFAULT_LENGTH: Final = 20  # Hugging Face's default of `max_length`

Draft = Callable[[Tensor, int], Sequence[int]]
"""Predicts tokens that follow a text ``[1, tokens]``, at most the given number."""


@dataclass(eq=False)
class _Chunk:
    """Tokens that went to the servers in one step."""

    sent: SentStep
    sent_s: float
    output: Any = None  # None: not received yet


@dataclass(frozen=True, eq=False)
class _SentToken:
    """A token that was sent, and that the text has not reached."""

    token: int
    chunk: _Chunk
    index: int  # position in the chunk


class Speculation:
    """Computes the blocks in the forwards of one text, ahead of its tokens if a draft predicts them.

    Args:
        model: The Hugging Face model.
        served: Its blocks.
        draft: Predicts tokens.
        max_chunk: The maximum number of drafted tokens in a chunk.
        length: The maximum number of tokens of prompt and text.
        ends: The tokens that end the text.
    """

    def __init__(
        self, model: Any, served: ServedBlocks, draft: Draft, *, max_chunk: int, length: int, ends: Collection[int]
    ) -> None:
        self._model, self._served, self._draft = model, served, draft
        self._length, self._ends = length, frozenset(ends)
        self.policy = DraftPolicy(max_chunk)
        self._tokens: Tensor | None = None  # prompt and text so far, ``[1, tokens]``
        self._cache: Any = None  # the text's cache, whose length counts only tokens that the text has reached
        self._ahead: deque[_SentToken] = deque()
        self._has_ended = False  # whether the draft predicts no further tokens
        self._records = False  # whether the caches also keep keys and values outside their attention windows
        self._returned_s: float | None = None  # time of the last call's end
        self._received_s = 0.0  # time of the newest output
        self._takes_position = "position_ids" in inspect.signature(model.forward).parameters

    def write(self, generate: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Call the model's `generate` with these options, without its own drafts."""
        kept = {name: value for name, value in options.items() if name not in DRAFT_OPTIONS}
        config = kept.pop("generation_config", None) or (args[1] if len(args) > 1 else None)
        if config is not None:
            config = copy.deepcopy(config)
            config.prompt_lookup_num_tokens = None
        if config is None or self._model.generation_config.prompt_lookup_num_tokens is not None:
            kept["prompt_lookup_num_tokens"] = None  # overrides the model's default
        criteria = [*(kept.pop("stopping_criteria", None) or ()), self._record_tokens]
        with self._served.computed_by(self):
            try:
                return generate(*args[:1], generation_config=config, stopping_criteria=criteria, **kept)
            finally:
                self._discard()

    def _record_tokens(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Record the tokens so far, as a stopping criterion that never holds."""
        self._tokens = input_ids
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def __call__(self, hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
        """Compute the blocks' output for a forward of `generate`."""
        if cache is not self._cache or not self._is_next(hidden):
            if cache is self._cache:
                self._discard()
            output = self._served.step(hidden, extras, cache)
            if self._cache is None and attention_cache.is_restorable(cache) and _has_token_parts(output, hidden, cache):
                self._cache = cache
            return output
        assert self._tokens is not None
        if self._returned_s is not None:
            self.policy.measure_token(time.perf_counter() - self._returned_s)
        token = int(self._tokens[0, -1])
        is_predicted = bool(self._ahead) and self._ahead[0].token == token
        if self._ahead:
            self.policy.verify(accepted=is_predicted)
        if not is_predicted:
            self._discard()
            self._begin_draft(token, hidden, extras)
        self._continue_draft()
        output = self._receive_first()
        self._returned_s = time.perf_counter()
        return output

    def _is_next(self, hidden: Any) -> bool:
        """Return whether a forward with the text's cache computes only the newest token."""
        if self._tokens is None or not isinstance(hidden, Tensor) or hidden.shape[:2] != (1, 1):
            return False
        return self._tokens.shape[1] == CacheHandle.of(self._cache).length + 1

    def _begin_draft(self, token: int, hidden: Tensor, extras: dict[str, Any]) -> None:
        """Send the newest token, alone or with the beginning of a draft."""
        self._has_ended = False
        if not self._records:
            self._records = True
            self._cache.activate_past_recording()
        policy = self.policy
        policy.begin()
        drafted = self._draft_tokens(policy.chunk) if policy.num_ahead and policy.is_cheap else []
        if drafted:
            self._send([token, *drafted])
        else:
            self._append_chunk([token], self._served.send(hidden, extras, self._cache))

    def _continue_draft(self) -> None:
        """Send a chunk of the draft, and further chunks until the newest token's output has come."""
        policy = self.policy
        while not self._has_ended and len(self._ahead) + policy.chunk <= policy.num_ahead + 1:
            if len({id(sent.chunk) for sent in self._ahead if sent.chunk.output is None}) >= MAX_CHUNKS:
                return
            if drafted := self._draft_tokens(policy.chunk):
                self._send(drafted)
            first = self._ahead[0].chunk
            if first.output is not None or first.sent.has_arrived:
                return

    def _draft_tokens(self, count: int) -> Sequence[int]:
        """Draft at most `count` tokens after the tokens that were sent, up to the text's end."""
        assert self._tokens is not None
        ahead = [sent.token for sent in self._ahead][1:]  # the first one is already the text's newest token
        tokens = torch.cat([self._tokens, self._tokens.new_tensor([ahead])], dim=1) if ahead else self._tokens
        count = min(count, self._length - 1 - tokens.shape[1])  # blocks never compute the text's last token
        began_s = time.perf_counter()
        drafted = [*self._draft(tokens, count)] if count > 0 else []
        if drafted:
            self.policy.measure_draft(time.perf_counter() - began_s, len(drafted))
        end = next((index for index, token in enumerate(drafted) if token in self._ends), len(drafted))
        self._has_ended = end < max(len(drafted), 1)
        return drafted[:end]

    def _send(self, tokens: Sequence[int]) -> None:
        """Run a forward of the next tokens up to the blocks, and send the blocks' input."""
        assert self._tokens is not None
        cache, handle, forwards = self._cache, CacheHandle.of(self._cache), self._served.forwards
        ahead = [sent.token for sent in self._ahead]
        all_tokens = [*self._tokens[0].tolist()[: handle.length], *ahead, *tokens]
        ids = self._tokens.new_tensor([all_tokens])
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        options = {"position_ids": positions} if self._takes_position else {}
        steps: list[SentStep] = []

        def send(hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
            steps.append(self._served.send(hidden, extras, cache))
            raise ForwardStopped

        with forwards.growing(cache, len(ahead)), self._served.computed_by(send), contextlib.suppress(ForwardStopped):
            inputs = self._model.prepare_inputs_for_generation(
                ids, next_sequence_length=len(tokens), past_key_values=cache, use_cache=True, **options
            )
            self._model(**inputs, return_dict=True)
        self._append_chunk(tokens, *steps)

    def _append_chunk(self, tokens: Sequence[int], sent: SentStep) -> None:
        chunk = _Chunk(sent, time.perf_counter())
        self._ahead.extend(_SentToken(token, chunk, index) for index, token in enumerate(tokens))

    def _receive_first(self) -> Any:
        """Return the output of the first token that was sent ahead, which the text has just reached."""
        first = self._ahead[0]
        chunk = first.chunk
        if chunk.output is None:
            has_waited = not chunk.sent.has_arrived
            chunk.output = self._served.forwards.receive(chunk.sent)
            now_s, before_s = time.perf_counter(), self._received_s
            self._received_s = now_s
            if has_waited:
                self.policy.measure_chunk(now_s - chunk.sent_s, now_s - before_s)
        self._ahead.popleft()
        self._served.forwards.grow(self._cache, 1)
        structure, tensors = serialization.flatten(attention_cache.without_cache(chunk.output, self._cache))
        parts = [tensor[..., first.index : first.index + 1, :] for tensor in tensors]
        return attention_cache.with_cache(serialization.unflatten(structure, parts), self._cache)

    def _discard(self) -> None:
        """Have the servers remove all tokens that were sent ahead before the next step, and ignore their outputs."""
        if self._cache is not None and (self._ahead or self._records):
            handle = CacheHandle.bound_to(self._cache)
            handle.operations.append(CacheOperation(kind="crop", values=[len(self._ahead)]))
        self._ahead.clear()


def _has_token_parts(output: Any, hidden: Any, cache: Any) -> bool:
    """Return whether each tensor of an output has a part for each token, as hidden states and attention weights do."""
    _, tensors = serialization.flatten(attention_cache.without_cache(output, cache))
    return all(tensor.ndim > 2 and tensor.shape[-2] == hidden.shape[1] for tensor in tensors)


def speculation_for(
    model: Any,
    served: ServedBlocks,
    prompt: Any,
    chosen: Callable[[str], Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    *,
    step_tokens: int,
) -> Speculation | None:
    """Return the speculation of a call of `generate`; None if it has no drafts, or `generate` itself handles them.

    `chosen` returns an option by its name. `args` and `options` are the call's arguments.
    """
    lookup, assistant = chosen("prompt_lookup_num_tokens"), options.get("assistant_model")
    names = {*options} - {"assistant_model"}
    if (lookup is None and assistant is None) or len(args) > 2 or any(map(chosen, _UNSUPPORTED)):
        return None
    if not is_plain_text(model, prompt, chosen, names) or model._is_stateful or served.text_adapters() is None:
        return None
    ends = chosen("eos_token_id")
    ends = [] if ends is None else [ends] if isinstance(ends, int) else [*ends]
    new = chosen("max_new_tokens")
    length = chosen("max_length") or _DEFAULT_LENGTH if new is None else prompt.shape[1] + new
    # Models with learned positions have none beyond this, and the text may end before `length`.
    length = min(length, getattr(model.config.get_text_config(), "max_position_embeddings", None) or length)
    if lookup is not None:
        drafter = _lookup(lookup, chosen("max_matching_ngram_size"), length)
    else:
        drafter = _assisted(model, assistant, prompt, {name: chosen(name) for name in _RULES}, length)
    if drafter is None:
        return None
    draft, max_chunk = drafter
    max_chunk = min(max_chunk, step_tokens - 1)
    return Speculation(model, served, draft, max_chunk=max_chunk, length=length, ends=ends) if max_chunk > 0 else None


def _lookup(max_chunk: int, ngram: int | None, length: int) -> tuple[Draft, int] | None:
    """Return drafts from the text itself, by Hugging Face's prompt lookup, and their maximum length."""
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    if max_chunk < 1 or (ngram is not None and ngram < 1):  # `generate` raises the error
        return None
    generator = PromptLookupCandidateGenerator(max_matching_ngram_size=ngram or 2, max_length=length)
    return _draft_by(generator, "num_output_tokens"), max_chunk


def _assisted(
    model: Any, assistant: Any, prompt: Tensor, rules: Mapping[str, Any], length: int
) -> tuple[Draft, int] | None:
    """Return drafts of an assistant model, by Hugging Face's assisted generation, and their maximum length."""
    import transformers
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    is_supported = (
        isinstance(assistant, transformers.PreTrainedModel)
        and not assistant.config.is_encoder_decoder
        and not assistant._is_stateful
        and getattr(assistant, "swarm", None) is None
        and not type(assistant).__name__.startswith("Gemma4")
        and _vocabulary_size(assistant) == _vocabulary_size(model)
    )
    if not is_supported:
        return None
    # Drafts are greedy, so that a text draws the same random numbers as without an assistant.
    config = transformers.GenerationConfig(
        **rules, do_sample=False, temperature=1.0, top_p=1.0, top_k=50, min_length=0, max_length=length, use_cache=True
    )
    generator: Any = AssistedCandidateGenerator(prompt, assistant, config, model_kwargs={})  # type: ignore[arg-type]
    for generation_config in (generator.generation_config, generator.assistant_generation_config):
        generation_config.assistant_confidence_threshold = 0.0  # `DraftPolicy` decides how long a draft is
    draft = _draft_by(generator, "num_assistant_tokens")
    before = prompt[0, :0]  # text and draft of the newest call

    def drafted(tokens: Tensor, count: int) -> Sequence[int]:
        nonlocal before
        cache = generator.assistant_kwargs.get("past_key_values")
        num_same = num_common(before, tokens[0])
        # If the text has grown without a call, Hugging Face would keep the last draft's tokens, which may be wrong.
        if cache is not None and num_same < min(cache.get_seq_length(), tokens.shape[1] - 2):
            cache.crop(num_same - cache.get_seq_length())
        predicted = draft(tokens, count)
        before = torch.cat([tokens[0], tokens.new_tensor(predicted)])
        for layer in generator.assistant_kwargs["past_key_values"].layers:
            if hasattr(layer, "sliding_window"):
                vars(layer)["crop"] = functools.partial(_crop, layer)
        return predicted

    return drafted, max(1, int(generator.num_assistant_tokens))


def _crop(layer: Any, tokens: int) -> None:
    """Remove tokens from a layer that records its past, but keep tokens outside the window, for later removals."""
    if tokens:
        layer.keys, layer.values = layer.keys[:, :, : -abs(tokens)], layer.values[:, :, : -abs(tokens)]
        layer.cumulative_length -= abs(tokens)


def _vocabulary_size(model: Any) -> int:
    size: int = model.config.get_text_config().vocab_size
    return size


def _draft_by(generator: Any, attribute: str) -> Draft:
    """Return the drafts of a candidate generator, which reads their length from an attribute."""

    def draft(tokens: Tensor, count: int) -> list[int]:
        setattr(generator, attribute, count)
        predicted: list[int] = generator.get_candidates(tokens)[0][0, tokens.shape[1] :].tolist()
        return predicted[:count]

    return draft
