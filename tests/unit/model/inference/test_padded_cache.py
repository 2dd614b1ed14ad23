"""A padded cache of several texts leaves in each text's own cache what steps of that text alone would."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from lightning_swarm.model.inference import attention_cache
from lightning_swarm.model.inference.joint_attention import CannotJoin, PerText
from lightning_swarm.model.inference.padded_cache import PaddedCache, leave_slab, pads, slab_of

ROWS = [1, 2, 1, 3]
HEADS, DIM, LAYERS = 2, 3, 2


def keys(rows: int, tokens: int) -> Tensor:
    return torch.randn(rows, HEADS, tokens, DIM)


def begun() -> tuple[list[DynamicCache], list[DynamicCache]]:
    """Return the caches of texts of different lengths, twice."""
    made = [DynamicCache() for _ in ROWS], [DynamicCache() for _ in ROWS]
    for own, other, rows, length in zip(*made, ROWS, (5, 3, 7, 4), strict=True):
        for layer in range(LAYERS):
            new = keys(rows, length), keys(rows, length)
            own.update(*new, layer)
            other.update(*new, layer)
    return made


def step(caches: list[Any], others: list[Any], chosen: list[int], tokens: int = 1) -> None:
    """Append to some caches together, and to the others one by one; compare what attention would see."""
    rows = [ROWS[index] for index in chosen]
    joint = PaddedCache([caches[index] for index in chosen], rows, tokens)
    for layer in range(LAYERS):
        new = keys(sum(rows), tokens), keys(sum(rows), tokens)
        found = joint.update(*new, layer)
        parts = [list(zip(*(one.split(rows) for one in pair), strict=True)) for pair in (new, found)]
        for index, own, seen in zip(chosen, *parts, strict=True):
            wanted = others[index].update(*own, layer)
            for one, other in zip(seen, wanted, strict=True):
                assert torch.equal(one[:, :, : other.shape[2]], other)
                assert not one[:, :, other.shape[2] :].isnan().any()


def assert_same(caches: list[Any], others: list[Any]) -> None:
    for own, other in zip(caches, others, strict=True):
        for one, wanted in zip(attention_cache.tensors(own), attention_cache.tensors(other), strict=True):
            assert torch.equal(one, wanted)


@pytest.mark.parametrize("seed", range(5))
def test_texts_come_together_leave_and_change_between_steps(seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    caches, others = begun()
    for _ in range(60):
        kind = rng.choice(["together", "together", "together", "alone", "crop", "reorder"])
        index = rng.randrange(len(ROWS))
        if kind == "together":
            step(caches, others, rng.sample(range(len(ROWS)), rng.randint(2, len(ROWS))), rng.randint(1, 3))
        elif kind == "alone":
            leave_slab(caches[index])
            for layer in range(LAYERS):
                new = keys(ROWS[index], 1), keys(ROWS[index], 1)
                caches[index].update(*new, layer)
                others[index].update(*new, layer)
        else:
            for cache in (caches[index], others[index]):
                if kind == "crop":
                    cache.crop(-2)
                else:
                    cache.reorder_cache(torch.arange(ROWS[index]).flip(0))
        assert_same(caches, others)


def test_steps_of_the_same_texts_append_in_place() -> None:
    caches, others = begun()
    step(caches, others, [0, 1, 2, 3])
    before = [tensor.untyped_storage().data_ptr() for cache in caches for tensor in attention_cache.tensors(cache)]
    for _ in range(5):
        step(caches, others, [0, 1, 2, 3])
    after = [tensor.untyped_storage().data_ptr() for cache in caches for tensor in attention_cache.tensors(cache)]
    assert before == after
    assert_same(caches, others)


def test_no_text_holds_the_memory_of_others_that_have_left() -> None:
    caches, others = begun()
    step(caches, others, [0, 1, 2, 3])
    room = sum(map(attention_cache.num_bytes, caches))
    layers = slab_of(caches[0]).layers.values()  # type: ignore[union-attr]
    assert room == sum(tensor.nbytes for layer in layers for tensor in layer.tensors), "the room counts"
    step(caches, others, [1, 2])  # 0 and 3 leave
    leave_slab(caches[1])
    for cache in caches:
        assert slab_of(cache) is None
        for tensor in attention_cache.tensors(cache):
            assert tensor.nbytes == tensor.untyped_storage().nbytes()
    assert_same(caches, others)


@pytest.mark.parametrize("remove", [0, 2])
def test_a_branch_shares_no_memory_that_texts_append_to(remove: int) -> None:
    caches, others = begun()
    step(caches, others, [0, 1, 2, 3])
    branch, other = (attention_cache.branch_of(each[2], remove=remove) for each in (caches, others))
    assert slab_of(branch) is None
    shared = {tensor.untyped_storage().data_ptr() for tensor in attention_cache.tensors(caches[2])}
    assert not shared & {tensor.untyped_storage().data_ptr() for tensor in attention_cache.tensors(branch)}
    for _ in range(3):  # the source goes on in its slab
        step(caches, others, [0, 1, 2, 3])
        assert_same([branch], [other])
    caches[1], others[1] = caches[2], others[2]
    caches[2], others[2] = branch, other
    for _ in range(3):
        step(caches, others, [0, 2, 3])
        assert_same(caches, others)


def test_masks_hide_the_padding() -> None:
    caches, _ = begun()
    joint = PaddedCache(caches[:2], ROWS[:2], 1)  # 5 tokens, and 3 in two rows
    like = torch.zeros(1, dtype=torch.bfloat16)
    found = joint.arguments({"attention_mask": None, "x": 1}, like)
    assert found["x"] == 1
    mask = found["attention_mask"]
    assert (mask.dtype, mask.shape) == (torch.bfloat16, (3, 1, 1, 6))
    assert (mask == 0).flatten(1).sum(1).tolist() == [6, 4, 4]
    own = PerText([torch.ones(1, 1, 1, 6, dtype=torch.bool), torch.ones(2, 1, 1, 4, dtype=torch.bool)])
    found = joint.arguments({"attention_mask#1": own}, like)
    assert found["attention_mask#1"].flatten(1).sum(1).tolist() == [6, 4, 4]
    with pytest.raises(CannotJoin):
        joint.arguments({"bias": own}, like)


def test_very_different_lengths_are_not_padded() -> None:
    caches, _ = begun()
    assert pads(caches, 1)
    caches[0].update(keys(1, 90), keys(1, 90), 0)
    assert not pads(caches, 1)
