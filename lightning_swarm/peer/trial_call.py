"""Calls a model before it is served, with blocks that compute nothing: a form that cannot be served is refused then."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Any

import torch

from lightning_swarm.client.pipeline.interception import BlockChain, Interception
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import few, shorten
from lightning_swarm.model.attention_cache import CacheHandle
from lightning_swarm.model.attribute_values import is_plain
from lightning_swarm.model.pretrained import PretrainedModel
from lightning_swarm.protocol import serialization

_log = logging.getLogger(__name__)

_ROWS, _PROMPT = 2, 3  # texts, and tokens of each


@dataclass(frozen=True, kw_only=True)
class ModelForm:
    """What a model is built from."""

    config: str  # of Hugging Face, in JSON
    generation_config: str  # likewise; empty: there is none
    dtype: str
    blocks: str | None  # the name of the list of blocks; None: it is found

    def without_cache(self) -> ModelForm:
        """Return the form whose forwards make no cache of keys and values."""
        texts = (json.dumps({**json.loads(one or "{}"), "use_cache": False}) for one in self._texts)
        return replaced(self, **dict(zip(("config", "generation_config"), texts, strict=True)))

    @property
    def _texts(self) -> tuple[str, str]:
        return self.config, self.generation_config


def servable(form: ModelForm) -> ModelForm:
    """Return the form in which clients can write text; `ConfigError` says why there is none.

    That is without a cache where servers cannot hold the model's own.
    """
    try:
        _call(form, use_cache=True)
    except ConfigError as error:
        try:
            _call(form, use_cache=False)
        except ConfigError:
            raise ConfigError(f"this model cannot be served: {error}") from error
        return form.without_cache()
    return form


def _call(form: ModelForm, *, use_cache: bool) -> None:
    """Make a client's first calls, where each block returns its input, and all weights around them are zeros."""
    model = PretrainedModel(form.config, form.generation_config, dtype=form.dtype, blocks=form.blocks)
    around = model.around
    # Zeros that are only read take no memory.
    model.fill(around, lambda name: torch.zeros(around[name].shape, dtype=around[name].dtype), torch.device("cpu"))
    num_blocks = len(model.blocks.modules)

    def write(hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
        rows, length = serialization.leaves(hidden)[0].shape[:2]
        if length > _PROMPT and length % _PROMPT == 0:  # soft prompts before the text have another length
            raise ConfigError(
                f"servers count a text's tokens by its hidden states, and this model has {length} for {_PROMPT} tokens"
            )
        CacheHandle.of(cache).grow(cache, rows=rows, length=length, num_layers=num_blocks)
        return hidden

    Interception(model.blocks, BlockChain(model.blocks, lambda hidden, *_, **__: hidden, write, "cpu"))
    before = _attributes(model)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = torch.ones(_ROWS, _PROMPT, dtype=torch.long)
            found = model.module(input_ids=ids, use_cache=use_cache)
            if use_cache:
                model.module(input_ids=ids[:, :1], past_key_values=found.past_key_values, use_cache=True)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - the model's code may want other arguments
        _log.debug("What a client's call would be is not known before the first one: %s", shorten(repr(error)))
    if changed := [name for name, value in _attributes(model).items() if before.get(name) != value]:
        raise ConfigError(
            f"a model's forward must leave its blocks as they are, for they are on servers, and it changes "
            f"{few(changed)}. Save the model with a config by which it does not."
        )


def _attributes(model: PretrainedModel) -> dict[str, Any]:
    """Return the plain attributes of all modules in blocks, by their names."""
    return {
        f"{name}.{key}": value
        for name, module in model.blocks.named_modules()
        for key, value in vars(module).items()
        if is_plain(value)
    }
