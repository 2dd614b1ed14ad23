"""Calls a model before it is served, with blocks that compute nothing, to refuse models that cannot be served."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_swarm.client.pipeline.interception import BlockChain, Interception
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import few, shorten
from lightning_swarm.model.fidelity.attribute_values import same
from lightning_swarm.model.fidelity.module_states import plain_attributes
from lightning_swarm.model.inference.attention_cache import CacheHandle
from lightning_swarm.model.pretrained import PretrainedModel
from lightning_swarm.protocol import serialization

_log = logging.getLogger(__name__)

_ROWS, _PROMPT = 2, 3  # texts of the trial, and tokens of each


@dataclass(frozen=True, kw_only=True)
class ModelForm:
    """The settings from which a model is built."""

    config: str  # Hugging Face's `config.json`
    generation_config: str  # Hugging Face's `generation_config.json`; empty: derived from `config`
    dtype: str
    blocks: str | None  # name of the list of blocks; None: it is found

    def without_cache(self) -> ModelForm:
        """Return the form of the same model without a cache of keys and values."""
        config = json.loads(self.config)
        # The config of a model of several parts, such as text and images, contains a config for each part.
        inner = [value for value in config.values() if isinstance(value, dict) and "hidden_size" in value]
        for part in (config, *inner):
            part["use_cache"] = False
        generation = self.generation_config and json.dumps({**json.loads(self.generation_config), "use_cache": False})
        return replace(self, config=json.dumps(config), generation_config=generation)


def servable(form: ModelForm) -> tuple[ModelForm, str]:
    """Return the form in which clients can generate text, and the reason if this form has no cache.

    Raises `ConfigError` if clients cannot generate text without a cache, either.
    """
    try:
        _call(form, use_cache=True)
    except ConfigError as error:
        try:
            _call(form, use_cache=False)
        except ConfigError as uncached_error:
            raise ConfigError(f"this model cannot be served: {uncached_error}") from error
        return form.without_cache(), str(error)
    return form, ""


def _call(form: ModelForm, *, use_cache: bool) -> None:
    """Make the calls that a client makes first. Blocks return their input, and the weights around them are zeros.

    Raises `ConfigError` if the model changes its blocks, or makes several hidden states of a token.
    """
    model = PretrainedModel(form.config, form.generation_config, dtype=form.dtype, blocks=form.blocks)
    around = model.around
    # Zeros that are only read take no memory.
    model.fill(around, lambda name: torch.zeros(around[name].shape, dtype=around[name].dtype), torch.device("cpu"))
    num_blocks = len(model.blocks.modules)

    def grow_cache(hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
        rows, length = serialization.leaves(hidden)[0].shape[:2]
        # A multiple means several hidden states for each token. Other lengths come from soft prompts.
        if length > _PROMPT and length % _PROMPT == 0:
            raise ConfigError(
                f"a served model must make one hidden state of each token, got {length} of {_PROMPT} tokens"
            )
        CacheHandle.of(cache).grow(cache, rows=rows, length=length, num_layers=num_blocks)
        return hidden

    Interception(model.blocks, BlockChain(model.blocks, lambda hidden, *_, **__: hidden, grow_cache, "cpu"))
    root = model.blocks.root
    before = plain_attributes(root)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = torch.ones(_ROWS, _PROMPT, dtype=torch.long)
            output = model.module(input_ids=ids, use_cache=use_cache)
            if use_cache:
                model.module(input_ids=ids[:, :1], past_key_values=output.past_key_values, use_cache=True)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - the model's code may want other arguments
        _log.debug("The trial call failed, so the arguments of a real call are unknown: %s", shorten(repr(error)))
    changed = [
        f"`{key}` of block {name}"
        for name, attributes in plain_attributes(root).items()
        for key, value in attributes.items()
        if key not in (old := before.get(name, {})) or not same(value, old[key])  # a block may get new modules
    ]
    if changed:
        raise ConfigError(
            "a model's forward must not change its blocks, which are on servers, got a forward that changes "
            f"{few(changed)}. Save the model with a config that avoids this."
        )
