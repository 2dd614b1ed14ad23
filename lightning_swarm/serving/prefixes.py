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
from lightning_swarm.serving.blocks import Recorded, ServedBlocks, TextInProgress
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
    """Return the prompt of a call of `generate`, and a function that returns the call's option of a name."""
    prompt = options.get("input_ids", options.get("inputs", args[0] if args else None))
    config = options.get("generation_config") or (args[1] if len(args) > 1 else None)

    def chosen(name: str) -> Any:
        if name in options:
            return options[name]
        found = getattr(config, name, None)
        return getattr(model.generation_config, name, None) if found is None else found  # as Hugging Face does

    return prompt, chosen


def can_begin_with_prefix(model: Any, prompt: Any, chosen: Callable[[str], Any], options: Collection[str]) -> bool:
    """Return whether a call of `generate` writes one plain text without drafts; see `is_plain_text`."""
    return not chosen("prompt_lookup_num_tokens") and is_plain_text(model, prompt, chosen, options)


def is_plain_text(model: Any, prompt: Any, chosen: Callable[[str], Any], options: Collection[str]) -> bool:
    """Return whether a call of `generate` writes one text, whose tokens alone determine the servers' computation.

    `chosen` returns an option by name, and `options` are the names of those that the call itself has.
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
    # Without a mask, Hugging Face masks tokens that pad.
    masks = (prompt == pad if pad is not None else torch.zeros(1)) if mask is None else mask != 1
    return not bool(masks.any()) and not has_own_prompt(model) and not positions_depend_on_length(model)


class TextPrefixes:
    """Begins texts with prefixes that the servers keep, and remembers the texts that were written."""

    def __init__(self, model: Any, served: ServedBlocks, shares: Callable[[], bool]) -> None:
        self._model, self._served = model, served
        self._shares = shares  # whether the servers share the prefixes of all clients
        self.texts = KeptTexts()

    def begin(self, prompt: Tensor, text: TextInProgress) -> dict[str, Any]:
        """Return the options of `generate` with which a text begins: its cache, if servers keep a prefix of the prompt.

        Args:
            prompt: Tokens, ``[1, tokens]``. They stay the whole prompt for `generate`.
            text: The text, of which this sets `num_kept_tokens`.
        """
        adapters = self._served.adapters_of_texts()
        if adapters is None:
            return {}
        found = self.texts.find(prompt[0].cpu(), adapters, text.scope, exact=self._served.exact)
        branched = None
        if found is not None:
            kept, number = found
            source = kept.session
            assert source.recipe is not None
            branched = self._served.branched(source.recipe, source.log[:number], adapters, source)
        if branched is None and self._shares() and prompt.shape[1] > PREFILL_CHUNK and not self._model._is_stateful:
            recipe, steps = self._recorded(prompt)
            branched = self._served.branched(recipe, steps, adapters)
        if branched is None:
            return {}
        cache, text.num_kept_tokens = branched
        return {"past_key_values": cache}

    def keep(self, tokens: Tensor, text: TextInProgress) -> None:
        """Remember a text, of these tokens ``[1, tokens]``, for later prompts that begin like it."""
        if text.num_caches == 1:
            handle = CacheHandle.of(text.cache)
            # A cache without a length, of states alone, does not say to `generate` how much of a prompt it has.
            if handle.session is not None and handle.length:
                self.texts.keep(handle.session, tokens[0], text.scope)

    def _recorded(self, prompt: Tensor) -> tuple[CacheRecipe, list[SessionInput]]:
        """Return the recipe of a prompt's cache, and its whole chunks as steps, computed only up to the blocks."""
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
                with contextlib.suppress(Recorded):
                    self._model(**inputs)
        return CacheHandle.of(cache).recipe, steps
