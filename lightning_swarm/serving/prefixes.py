"""Begins a client's texts with prefixes that the servers keep, so that only the rest of a prompt is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lightning_swarm.client.inference.prefixes import KeptTexts
from lightning_swarm.client.inference.session import SessionInput
from lightning_swarm.model.inference.attention_cache import CacheHandle
from lightning_swarm.protocol.messages.inference import CacheRecipe
from lightning_swarm.serving.blocks import ForwardStopped, ServedBlocks, TextInProgress
from lightning_swarm.serving.model_traits import has_own_prompt, positions_depend_on_length

PREFILL_CHUNK: Final = 256
"""Tokens of each row in a step of a long prompt. Clients share prefixes of whole chunks."""

# Arguments of `generate` outside its config that do not change the blocks' computation.
_HARMLESS: Final = {
    "input_ids",
    "inputs",
    "attention_mask",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "streamer",
    "tokenizer",
}


def call_options(model: Any, args: Sequence[Any], options: Mapping[str, Any]) -> tuple[Any, Callable[[str], Any]]:
    """Return the prompt of a call of `generate`, and a function that returns an option of the call by its name."""
    prompt = options.get("input_ids", options.get("inputs", args[0] if args else None))
    config = options.get("generation_config") or (args[1] if len(args) > 1 else None)

    def chosen(name: str) -> Any:
        if name in options:
            return options[name]
        value = getattr(config, name, None)
        return getattr(model.generation_config, name, None) if value is None else value  # as Hugging Face does

    return prompt, chosen


def can_begin_with_prefix(model: Any, prompt: Any, chosen: Callable[[str], Any], options: Collection[str]) -> bool:
    """Return whether a call of `generate` writes one plain text without drafts; see `is_plain_text`."""
    return not chosen("prompt_lookup_num_tokens") and is_plain_text(model, prompt, chosen, options)


def is_plain_text(model: Any, prompt: Any, chosen: Callable[[str], Any], options: Collection[str]) -> bool:
    """Return whether a call of `generate` writes one text, whose tokens alone determine the servers' computation.

    `chosen` returns an option by its name. `options` are the names of the call's own options.
    """
    if not isinstance(prompt, Tensor) or prompt.ndim != 2 or len(prompt) != 1:
        return False
    if any(name not in _HARMLESS and not hasattr(model.generation_config, name) for name in options):
        return False
    if max(chosen("num_beams") or 1, chosen("num_return_sequences") or 1) > 1 or chosen("use_cache") is False:
        return False
    if any(map(chosen, ("cache_implementation", "penalty_alpha", "dola_layers"))):
        return False
    mask, pad = chosen("attention_mask"), chosen("pad_token_id")
    # Without a mask, Hugging Face masks padding tokens.
    is_masked = (prompt == pad if pad is not None else torch.zeros(1)) if mask is None else mask != 1
    return not bool(is_masked.any()) and not has_own_prompt(model) and not positions_depend_on_length(model)


class TextPrefixes:
    """Begins texts with prefixes that the servers keep, and remembers the texts that were written."""

    def __init__(self, model: Any, served: ServedBlocks, shares: Callable[[], bool]) -> None:
        self._model, self._served = model, served
        self._shares = shares  # whether the servers share the prefixes of all clients
        self.texts = KeptTexts()

    def begin(self, prompt: Tensor, text: TextInProgress) -> dict[str, Any]:
        """Return the options of `generate` that begin a text with a prefix of its prompt, if servers keep one.

        Args:
            prompt: Tokens, ``[1, tokens]``. `generate` still gets all of them.
            text: The text; its `num_kept_tokens` is set.
        """
        adapters = self._served.text_adapters()
        if adapters is None:
            return {}
        longest = self.texts.find(prompt[0].cpu(), adapters, text.scope, exact=self._served.exact)
        branched = None
        if longest is not None:
            kept, num_steps = longest
            source = kept.session
            assert source.recipe is not None
            branched = self._served.branched(source.recipe, source.log[:num_steps], adapters, source)
        if branched is None and self._shares() and prompt.shape[1] > PREFILL_CHUNK and not self._model._is_stateful:
            recipe, steps = self._recorded(prompt)
            branched = self._served.branched(recipe, steps, adapters)
        if branched is None:
            return {}
        cache, text.num_kept_tokens = branched
        return {"past_key_values": cache}

    def keep(self, tokens: Tensor, text: TextInProgress) -> None:
        """Remember a text with the given tokens ``[1, tokens]`` for later prompts that begin like it."""
        if text.num_caches == 1:
            handle = CacheHandle.of(text.cache)
            # A cache of recurrent states alone has no length, so `generate` cannot tell how much of a prompt it covers.
            if handle.session is not None and handle.length:
                self.texts.keep(handle.session, tokens[0], text.scope)

    def _recorded(self, prompt: Tensor) -> tuple[CacheRecipe, list[SessionInput]]:
        """Return the recipe of a prompt's cache, and the input of the blocks for each whole chunk of the prompt."""
        import transformers

        cache = transformers.DynamicCache(config=self._model.config.get_text_config(decoder=True))
        with self._served.recording() as steps, torch.no_grad():
            for end in range(PREFILL_CHUNK, prompt.shape[1], PREFILL_CHUNK):
                inputs = self._model.prepare_inputs_for_generation(
                    prompt[:, :end],
                    next_sequence_length=PREFILL_CHUNK,
                    past_key_values=cache,
                    attention_mask=torch.ones_like(prompt[:, :end]),
                    is_first_iteration=end == PREFILL_CHUNK,
                    use_cache=True,
                )
                with contextlib.suppress(ForwardStopped):
                    self._model(**inputs)
        return CacheHandle.of(cache).recipe, steps
