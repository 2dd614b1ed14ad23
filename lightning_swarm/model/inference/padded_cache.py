"""Presents the caches of several texts as one padded batch with masks, like Hugging Face's own batches.

The keys of all texts are rows of one tensor, a slab, and the texts' own caches are views of it. So a step appends in
place, and one call computes the attention of all texts. A step of other texts makes a new slab.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import Tensor

from lightning_swarm.model.inference import attention_cache
from lightning_swarm.model.inference.attention_cache import SLAB
from lightning_swarm.model.inference.joint_attention import CannotJoin, PerText
from lightning_swarm.model.partition import argument_of

_MASK: Final = "attention_mask"  # name of the blocks' argument
_MOST_PADDING: Final = 2.0  # largest ratio of a batch's tokens, with padding, to the texts' own
# A new slab has room for 1/4 of the longest text's tokens, and for 32 tokens, beside the text itself.
_SPARE_DIVISOR: Final = 4
_SPARE_TOKENS: Final = 32


def pads(caches: Sequence[Any], tokens: int) -> bool:
    """Return whether a step of these texts can be a padded batch, without too much padding."""
    lengths = [attention_cache.length_of(cache) + tokens for cache in caches]
    all_full = all(type(layer).__name__ == "DynamicLayer" for cache in caches for layer in cache.layers)
    return all_full and max(lengths) * len(lengths) <= _MOST_PADDING * sum(lengths)


@dataclass(eq=False)
class _Layer:
    """The keys and the values of one block, each ``[rows, heads, capacity, dim]``, and each text's views of them."""

    tensors: tuple[Tensor, Tensor]
    views: list[tuple[Tensor, Tensor]]


class Slab:
    """The tensors that the caches of some texts share."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self._caches = [weakref.ref(cache) for cache in caches]  # weak, because a text may end
        self.layers: dict[int, _Layer] = {}

    @classmethod
    def of(cls, caches: Sequence[Any]) -> Slab:
        """Return the slab of exactly these caches, or make it and dissolve their former slabs."""
        slabs = {id(slab): slab for slab in map(slab_of, caches) if slab is not None}
        first = next(iter(slabs.values()), None)
        if len(slabs) == 1 and first is not None and first._is_of(caches):
            return first
        for slab in slabs.values():
            slab.dissolve(but=caches)
        new = cls(caches)
        for cache in caches:
            vars(cache)[SLAB] = new
        return new

    def _is_of(self, caches: Sequence[Any]) -> bool:
        return len(caches) == len(self._caches) and all(
            ref() is cache for ref, cache in zip(self._caches, caches, strict=True)
        )

    def dissolve(self, but: Sequence[Any] = ()) -> None:
        """Copy the texts' tensors, except those of `but`, so that no text keeps the memory of texts that have ended."""
        for text_index, ref in enumerate(self._caches):
            cache = ref()
            if cache is None or vars(cache).get(SLAB) is not self or any(cache is other for other in but):
                continue
            del vars(cache)[SLAB]
            for index, layer in self.layers.items():
                own = cache.layers[index] if index < len(cache.layers) else None
                if own is not None and _is_view(own, layer.views[text_index]):
                    own.keys, own.values = own.keys.clone(), own.values.clone()


def slab_of(cache: Any) -> Slab | None:
    """Return the slab that holds a cache's tensors."""
    found: Slab | None = None if cache is None else vars(cache).get(SLAB)
    return found


def leave_slab(cache: Any) -> None:
    """Before a step of one text alone, free the memory that it shares with other texts."""
    if (slab := slab_of(cache)) is not None:
        slab.dissolve()


def _is_view(layer: Any, view: tuple[Tensor, Tensor]) -> bool:
    return layer.keys is view[0] and layer.values is view[1]


class PaddedCache:
    """Presents the caches of several texts to blocks as one cache, for one step."""

    def __init__(self, caches: Sequence[Any], rows: Sequence[int], tokens: int) -> None:
        """Present the caches of texts; `rows` has each text's number of rows, and the step has `tokens` per row."""
        self._caches, self._slab, self._tokens = caches, Slab.of(caches), tokens
        ends = list(accumulate(rows, initial=0))
        self._rows = [slice(begin, end) for begin, end in pairwise(ends)]
        self._lengths = [attention_cache.length_of(cache) for cache in caches]
        self._longest = max(self._lengths) + tokens
        self._are_equal = len({*self._lengths}) == 1
        row_lengths = [length for length, number in zip(self._lengths, rows, strict=True) for _ in range(number)]
        self._positions = torch.tensor(row_lengths)[:, None] + torch.arange(tokens)  # [rows, tokens]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the padded length before this step."""
        return self._longest - self._tokens

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append each text's rows to its cache, and return the keys and values of all texts, padded at the end."""
        texts, new = [cache.layers[layer_idx] for cache in self._caches], (keys, values)
        layer = self._slab.layers.get(layer_idx)
        if layer is None or layer.tensors[0].shape[2] < self._longest or not all(map(_is_view, texts, layer.views)):
            layer = self._slab.layers[layer_idx] = self._gather(texts, new)
        for tensor, added in zip(layer.tensors, new, strict=True):
            if self._are_equal:
                tensor[:, :, self._longest - self._tokens : self._longest] = added
            else:
                positions = self._positions.to(tensor.device)
                tensor[torch.arange(len(tensor), device=tensor.device)[:, None], :, positions] = added.transpose(1, 2)
        for index, (text, rows, length) in enumerate(zip(texts, self._rows, self._lengths, strict=True)):
            text.keys, text.values = (tensor[rows, :, : length + self._tokens] for tensor in layer.tensors)
            layer.views[index] = text.keys, text.values
        padded_keys, padded_values = (tensor[:, :, : self._longest] for tensor in layer.tensors)
        return padded_keys, padded_values

    def _gather(self, texts: Sequence[Any], new: tuple[Tensor, Tensor]) -> _Layer:
        """Copy the texts' keys and values into new tensors."""
        capacity = self._longest + self._longest // _SPARE_DIVISOR + _SPARE_TOKENS
        tensors = []
        for name, added in zip(("keys", "values"), new, strict=True):
            # Zeros, because attention multiplies padding by 0, and 0 times NaN would be NaN.
            tensor = added.new_zeros(added.shape[0], added.shape[1], capacity, added.shape[3])
            for text, rows, length in zip(texts, self._rows, self._lengths, strict=True):
                present = getattr(text, name)
                if present.dtype != added.dtype or present.shape[2:3] != (length,):
                    raise CannotJoin("a text's keys have another dtype or length than expected")
                tensor[rows, :, :length] = present
            tensors.append(tensor)
        return _Layer((tensors[0], tensors[1]), [(text.keys, text.values) for text in texts])  # `update` replaces them

    def arguments(self, keywords: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
        """Return the blocks' arguments with masks for the padding; new masks have the dtype and device of `like`."""
        return {name: self._argument(argument_of(name), value, like) for name, value in keywords.items()}

    def _argument(self, name: str, value: Any, like: Tensor) -> Any:
        if isinstance(value, PerText):
            if name != _MASK:
                raise CannotJoin("an argument has another shape in each text")
            return torch.cat([self._padded(mask) for mask in value])
        if name != _MASK or value is not None or self._are_equal:
            return value
        if self._tokens > 1:
            raise CannotJoin("texts of unequal length need a mask for a step of several tokens, and got none")
        is_padding = torch.arange(self._longest) > self._positions  # [rows, keys]
        mask = torch.zeros(is_padding.shape, dtype=like.dtype).masked_fill(is_padding, torch.finfo(like.dtype).min)
        return mask[:, None, None].to(like.device)

    def _padded(self, mask: Tensor) -> Tensor:
        missing = self._longest - mask.shape[-1]
        value = False if mask.dtype is torch.bool else torch.finfo(mask.dtype).min
        return torch.nn.functional.pad(mask, (0, missing), value=value)
