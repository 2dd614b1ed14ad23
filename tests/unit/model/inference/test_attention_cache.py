"""Caches of keys and values: lengths at the client, contents at servers, and compatibility with transformers."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, MistralConfig, StaticCache, cache_utils

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.model.inference.attention_cache import (
    _CHANGES,
    CacheHandle,
    LayerLengths,
    apply,
    build,
    is_cache,
    num_bytes,
)
from lightning_swarm.protocol.messages.inference import CacheLayer, CacheOperation, CacheRecipe

SMALL: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
READS = {
    *("get_seq_length", "get_max_length", "get_mask_sizes", "get_query_offset", "has_previous_state"),
    *("is_recording_past", "batch_size", "is_compileable", "is_initialized", "is_croppable", "is_sliding"),
    *("is_linear", "is_dummy", "get_conv_state", "get_recurrent_state"),
}
"""Methods and properties of `Cache` that change nothing."""
STEPS = {"update", "update_conv_state", "update_recurrent_state", "update_indexer"}
"""Called by blocks, on servers."""
ELSEWHERE = {"offload", "prefetch", "early_initialization"}
"""Methods of refused caches, and of static caches."""


def test_every_method_of_a_cache_is_known() -> None:
    """A new method may change a cache without a message to the servers, which would silently change texts."""
    found = {name for name, _ in inspect.getmembers(cache_utils.Cache) if not name.startswith("_")}
    assert found == READS | STEPS | ELSEWHERE | set(_CHANGES)


def step(cache: Any, layers: range, length: int, rows: int = 2) -> None:
    """Update the cache as blocks do."""
    for index in layers:
        cache.update(torch.ones(rows, 2, length, 4), torch.ones(rows, 2, length, 4), index)


def op(kind: Any, *values: int) -> CacheOperation:
    return CacheOperation(kind=kind, values=list(values))


@pytest.mark.parametrize("config", [None, LlamaConfig(**SMALL), MistralConfig(**SMALL, sliding_window=4)])
def test_lengths_are_those_of_a_cache_with_contents(config: Any) -> None:
    plain, own = DynamicCache(config=config), DynamicCache(config=config)
    assert is_cache(own)
    handle = CacheHandle.of(own)
    for length in (5, 1, 1, 3):
        step(plain, range(3), length)
        handle.grow(own, rows=2, length=length, num_layers=3)
        if config is None:
            for one in (plain, own):
                one.crop(-1)
        for one in (plain, own):
            one.reorder_cache(torch.tensor([1, 0]))
        assert CacheHandle.of(own) is handle
        assert own.get_seq_length() == plain.get_seq_length()
        for index in range(3):
            assert own.get_mask_sizes(2, index) == plain.get_mask_sizes(2, index)
    assert num_bytes(own) < 100
    kinds = [one.kind for one in handle.take_operations()]
    assert kinds == (["crop", "reorder"] if config is None else ["reorder"]) * 4
    assert handle.take_operations() == []


@pytest.mark.parametrize("config", [None, LlamaConfig(**SMALL), MistralConfig(**SMALL, sliding_window=4)])
def test_a_server_has_the_contents_of_its_own_blocks_and_all_lengths(config: Any) -> None:
    plain, original = DynamicCache(config=config), DynamicCache(config=config)
    handle = CacheHandle.of(original)
    served = build(handle.recipe)
    for length in (5, 1, 2):
        step(plain, range(3), length)
        lengths = LayerLengths(served, first_block=1, rows=2, length=length)
        assert served.get_seq_length() == plain.get_seq_length(), "as at the second block of one machine"
        step(served, range(1, 2), length)
        lengths.follow()
        handle.grow(original, rows=2, length=length, num_layers=3)
        for one in (op("reorder", 1, 0), op("repeat", 2), op("select", 0, 3)):
            apply(served, one)
            apply(plain, one)
        for index in range(len(served.layers)):
            assert served.layers[index].get_seq_length() == plain.layers[index].get_seq_length()
    assert torch.equal(served.layers[1].keys, plain.layers[1].keys)
    assert served.layers[0].keys.device.type == "meta"
    assert num_bytes(served) >= 2 * served.layers[1].keys.nbytes


def test_a_changed_layer_is_noticed() -> None:
    cache = DynamicCache()
    CacheHandle.of(cache).grow(cache, rows=1, length=4, num_layers=2)
    for layer in cache.layers:
        layer.crop(-1)
    with pytest.raises(ConfigError, match="it has 3 tokens here and 4 on servers"):
        CacheHandle.of(cache)


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda: StaticCache(config=LlamaConfig(**SMALL), max_cache_len=8), "got StaticCache"),
        (lambda: DynamicCache(offloading=True), "not offloaded"),
        (lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), "EncoderDecoderCache"),
    ],
)
def test_other_caches_are_refused(make: Any, refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        CacheHandle.of(make())


def test_a_cache_with_contents_is_refused() -> None:
    cache = DynamicCache()
    step(cache, range(2), 3)
    with pytest.raises(ConfigError, match="this DynamicCache has 3 tokens"):
        CacheHandle.of(cache)


def test_a_bound_cache_is_neither_copied_nor_saved() -> None:
    cache = DynamicCache()
    CacheHandle.of(cache)
    with pytest.raises(ConfigError, match="must not be copied"):
        copy.deepcopy(cache)
    with pytest.raises(ConfigError, match="must not be saved"):
        pickle.dumps(cache)


@pytest.mark.parametrize(
    "operation",
    [op("crop"), op("crop", 1, 2), op("repeat"), op("reorder", 2), op("select", 7), op("crop", 9)],
)
def test_what_no_cache_can_do_is_refused_and_changes_nothing(operation: CacheOperation) -> None:
    cache = build(CacheRecipe(layers=[CacheLayer(kind="full"), CacheLayer(kind="full")], records_past=False))
    step(cache, range(2), 3)
    with pytest.raises(ProtocolError):
        apply(cache, operation)
    assert [layer.get_seq_length() for layer in cache.layers] == [3, 3]
