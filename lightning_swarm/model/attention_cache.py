"""Caches of keys and values of Hugging Face models: lengths where the forward runs, contents where the blocks are.

A forward that gets a `transformers.Cache` reads lengths from it to build masks and positions, and hands it to its
blocks. Where blocks are on servers, the object stays with the forward, its layers on the meta device; each server has
one of its own, in which only the layers of its blocks hold numbers. This module and `joint_attention` alone know
transformers.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.protocol.messages.inference import CacheLayer, CacheOperation, CacheRecipe, LayerKind

IN_SESSION: Final = "the session's cache"
"""Stands in the extras of a call for the cache, which does not travel."""

_HANDLE: Final = "_swarm_handle"
_LAYERS: Final[dict[str, LayerKind]] = {
    "DynamicLayer": "full",
    "DynamicSlidingWindowLayer": "sliding",
    "LinearAttentionLayer": "linear",
    "LinearAttentionAndFullAttentionLayer": "linear_full",
    "LinearAttentionAndSlidingWindowAttentionLayer": "linear_sliding",
}
_CLASSES: Final = {kind: name for name, kind in _LAYERS.items()}

# What changes a cache between two forwards, by the operation that servers are told.
_CHANGES: Final = {
    "crop": "crop",
    "batch_repeat_interleave": "repeat",
    "reorder_cache": "reorder",
    "batch_select_indices": "select",
    "activate_past_recording": "record",
    "reset": "reset",
}


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache of keys and values."""
    module = sys.modules.get("transformers.cache_utils")  # who has a cache has imported it
    return module is not None and isinstance(value, module.Cache)


def without_cache(tree: Any, cache: Any) -> Any:
    """Put `IN_SESSION` in the place of the cache in a block's output, for it does not travel."""
    return _replaced(tree, lambda value: value is cache, IN_SESSION)


def with_cache(tree: Any, cache: Any) -> Any:
    """Put the forward's own cache in the place of `IN_SESSION`."""
    return _replaced(tree, is_in_session, cache)


def _replaced(tree: Any, is_place: Callable[[Any], bool], value: Any) -> Any:
    if is_place(tree):
        return value
    if isinstance(tree, dict):
        return {key: _replaced(one, is_place, value) for key, one in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_replaced(one, is_place, value) for one in tree)
    return tree


def is_in_session(value: Any) -> bool:
    """Return whether an extra stands for the session's cache."""
    return type(value) is str and value == IN_SESSION


class CacheHandle:
    """The forward's side of a cache whose contents are on servers: it notes what servers have to do, too."""

    def __init__(self, cache: Any) -> None:
        self.recipe = _recipe_of(cache)
        self.operations: list[CacheOperation] = []  # since the last step
        self.session: Any = None  # of the pipeline that it is used in
        self.in_step = False  # a step has begun, and is not done; if it has failed, contents and lengths may differ
        self._refused = ""  # why it is of no use; empty: it is
        self.length = 0  # in tokens, as of the last step or operation
        for method, kind in _CHANGES.items():
            if hasattr(cache, method):
                vars(cache)[method] = _Noted(self, cache, kind)

    @classmethod
    def of(cls, cache: Any) -> CacheHandle:
        """Return a cache's handle; the first call binds the cache, which must be empty and of a known kind."""
        handle: CacheHandle | None = vars(cache).get(_HANDLE)
        if handle is None:
            handle = vars(cache)[_HANDLE] = cls(cache)
        elif handle._refused:
            raise ConfigError(handle._refused)
        elif not handle.in_step and length_of(cache) != handle.length:
            raise ConfigError(
                f"a cache that servers hold must be changed by its own methods alone: it has {length_of(cache)} "
                f"tokens here and {handle.length} there. Call `cache.crop(...)` and the like, not those of its layers."
            )
        return handle

    def refuse_use(self, reason: str) -> None:
        """Have the cache refuse whatever is done with it from now on: it has not what it should."""
        self._refused = self._refused or reason

    def note(self, cache: Any, operation: CacheOperation) -> None:
        """Change the lengths here, and have the servers change the contents before the next step."""
        apply(cache, operation)
        self.length = length_of(cache)
        self.operations.append(operation)

    def take_operations(self) -> list[CacheOperation]:
        """Return what servers have to do before the next step, and begin to note anew."""
        taken, self.operations = self.operations, []
        return taken

    def grow(self, cache: Any, *, rows: int, length: int, num_layers: int) -> None:
        """Enter a step of `length` tokens in `rows` rows."""
        _grow(cache, range(max(len(cache.layers), num_layers)), rows=rows, length=length)
        self.length = length_of(cache)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ConfigError(
            "a cache whose keys and values are on servers must not be copied: a copy would have none. Give the copy's "
            "text to a forward with a new cache."
        )

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a cache whose keys and values are on servers must not be saved. Save the text.")


class _Noted:
    """Takes the place of a cache's method that changes it."""

    def __init__(self, handle: CacheHandle, cache: Any, kind: str) -> None:
        # Weak: the session ends as soon as nobody has the cache any more.
        self._handle, self._cache, self._kind = handle, weakref.ref(cache), kind

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        cache = self._cache()
        assert cache is not None
        value = next(iter((*args, *kwargs.values())), None)  # each of these methods takes one
        if isinstance(value, Tensor) and value.dtype == torch.bool:
            value = value.nonzero()
        if self._kind == "crop" and value is not None and value > 0:
            type(cache).crop(cache, value)  # raises
        if isinstance(value, Tensor):
            values = [int(one) for one in value.flatten().tolist()]
        else:
            values = [] if value is None else [abs(int(value))]
        self._handle.note(cache, CacheOperation(kind=self._kind, values=values))  # type: ignore[arg-type]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._handle.__deepcopy__(memo)

    def __reduce__(self) -> NoReturn:
        self._handle.__reduce__()


def _recipe_of(cache: Any) -> CacheRecipe:
    from transformers import cache_utils

    kind, remedy = type(cache).__name__, "Leave `cache_implementation` out, or pass `use_cache=False`"
    # A class of its own may keep something else, and servers make one of these.
    if type(cache) not in (cache_utils.Cache, cache_utils.DynamicCache) or cache.offloading:
        raise ConfigError(f"a cache on servers must be a `DynamicCache` that is not offloaded, got {kind}. {remedy}.")
    unknown = [type(layer).__name__ for layer in cache.layers if type(layer).__name__ not in _LAYERS]
    replicated = cache.layer_class_to_replicate
    if unknown or replicated not in (None, cache_utils.DynamicLayer):
        found = unknown[0] if unknown else replicated.__name__
        raise ConfigError(f"layers of a cache on servers must be one of {sorted(_LAYERS)}, got {found}. {remedy}.")
    if length_of(cache) or any(map(_has_state, cache.layers)):
        raise ConfigError(
            f"a cache must be empty when the first block on a server gets it: this {kind} has {length_of(cache)} "
            "tokens, or states, which were computed elsewhere. Begin with a new cache, and give the forward the whole "
            "text."
        )
    layers = [_describe(layer) for layer in cache.layers] if replicated is None else None
    return CacheRecipe(layers=layers, records_past=any(getattr(one, "record_past", False) for one in cache.layers))


def _describe(layer: Any) -> CacheLayer:
    return CacheLayer(
        kind=_LAYERS[type(layer).__name__],
        window=int(getattr(layer, "sliding_window", 0)),
        num_states=int(getattr(layer, "number_of_states", 1)),
    )


def build(recipe: CacheRecipe) -> Any:
    """Make the empty cache of a recipe, at a server."""
    try:
        from transformers import cache_utils
    except ImportError as error:
        raise ConfigError("caches of Hugging Face models need `pip install transformers` on all servers.") from error

    if recipe.layers is None:
        return cache_utils.DynamicCache()
    layers = []
    for one in recipe.layers:
        own: dict[str, int] = {}
        if "sliding" in one.kind:
            own["sliding_window"] = one.window
        if "linear" in one.kind:
            own["number_of_states"] = one.num_states
        layer = getattr(cache_utils, _CLASSES[one.kind])(**own)
        if recipe.records_past and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
        layers.append(layer)
    return cache_utils.Cache(layers=layers)


def apply(cache: Any, operation: CacheOperation, *, max_bytes: int | None = None) -> None:
    """Change a cache between two steps.

    `ProtocolError` refuses rows and tokens that there are not, and a cache that would come to have more bytes.
    """
    kind, values = operation.kind, operation.values
    if kind in ("crop", "repeat") and len(values) != 1:
        raise ProtocolError(f"`{kind}` takes one number, got {len(values)}")
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if kind in ("reorder", "select") and keys is not None and values and max(values) >= len(keys):
            raise ProtocolError(f"row {max(values)} of a cache with {len(keys)} was asked for")
        if kind == "crop" and _has_length(layer) and values[0] > layer.get_seq_length():
            raise ProtocolError(f"{values[0]} tokens of {layer.get_seq_length()} were to be removed")
    if max_bytes is not None and kind in ("repeat", "reorder", "select"):
        rows = max((len(layer.keys) for layer in cache.layers if getattr(layer, "keys", None) is not None), default=1)
        times = values[0] if kind == "repeat" else len(values) / max(rows, 1)
        if times > 1 and num_bytes(cache) * times > max_bytes:
            raise ProtocolError(f"a cache may have {max_bytes} bytes, and {times:g} times {num_bytes(cache)} are more")
    for layer in cache.layers:
        _apply(layer, kind, values)


def _apply(layer: Any, kind: str, values: list[int]) -> None:
    keys = getattr(layer, "keys", None)
    device = keys.device if keys is not None else "cpu"
    match kind:
        case "crop":
            layer.crop(-values[0])
        case "repeat":
            layer.batch_repeat_interleave(values[0])
        case "reorder":
            layer.reorder_cache(torch.tensor(values, device=device))
        case "select":
            layer.batch_select_indices(torch.tensor(values, device=device))
        case "record":
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        case "reset":
            layer.reset()


class Shadow:
    """Lets a stage's cache have the right lengths in the layers of other stages' blocks, which hold no numbers."""

    def __init__(self, cache: Any, *, first_block: int, rows: int, length: int) -> None:
        """Before a step: enter it in the layers of the blocks before, where one machine has it by now."""
        self._cache, self._first, self._rows, self._length = cache, first_block, rows, length
        number = first_block if cache.layer_class_to_replicate is not None else min(first_block, len(cache.layers))
        _grow(cache, [index for index in range(number) if not self._is_own(index)], rows=rows, length=length)
        self._before = self._lengths()

    def follow(self) -> None:
        """After the step: enter it in the layers of the blocks behind."""
        now = self._lengths()
        behind = [i for i in range(self._first, len(now)) if i >= len(self._before) or now[i] == self._before[i]]
        grown = [index for index in behind if not self._is_own(index)]
        _grow(self._cache, grown, rows=self._rows, length=self._length)

    def _is_own(self, index: int) -> bool:
        layers = self._cache.layers
        keys = getattr(layers[index], "keys", None) if index < len(layers) else None
        return isinstance(keys, Tensor) and keys.device.type != "meta"

    def _lengths(self) -> list[int]:
        return [layer.get_seq_length() if _has_length(layer) else -1 for layer in self._cache.layers]


def can_be_put_back(cache: Any) -> bool:
    """Return whether each step gives a cache's layers new tensors, and writes into none that it had before."""
    return cache is not None and all(_LAYERS.get(type(one).__name__) in ("full", "sliding") for one in cache.layers)


def putting_back(cache: Any) -> Callable[[], None]:
    """Return what gives a cache that can be put back the contents that it has now."""
    layers = [(layer, dict(vars(layer))) for layer in cache.layers]

    def put_back() -> None:
        cache.layers[:] = [layer for layer, _ in layers]
        for layer, state in layers:
            vars(layer).clear()
            vars(layer).update(state)

    return put_back


def num_bytes(cache: Any) -> int:
    """The bytes of a cache's tensors."""
    return sum(tensor.nbytes for tensor in tensors(cache))


def tensors(cache: Any) -> list[Tensor]:
    """The tensors with a cache's contents."""
    found = [value for layer in cache.layers for value in _tensors_of(vars(layer).values())]
    return [tensor for tensor in found if tensor.device.type != "meta"]


def _tensors_of(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors_of(value.values())


def _grow(cache: Any, indices: Iterable[int], *, rows: int, length: int) -> None:
    update: Callable[..., Any] = type(cache).update
    nothing = torch.empty(rows, 1, length, 1, device="meta")
    grown: dict[int, Tensor] = {}  # by length: nothing reads or changes these
    for index in indices:
        layer = cache.layers[index] if index < len(cache.layers) else None
        if type(layer).__name__ == "DynamicLayer" and layer.is_initialized:  # type: ignore[union-attr]
            # As `update` does, which takes a tenth of a millisecond: torch computes on meta in Python.
            total = layer.get_seq_length() + length  # type: ignore[union-attr]
            if total not in grown:
                grown[total] = torch.empty(rows, 1, total, 1, device="meta")
            layer.keys = layer.values = grown[total]  # type: ignore[union-attr]
            continue
        if layer is not None and hasattr(layer, "has_previous_state"):
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        if layer is None or _has_length(layer):
            update(cache, nothing, nothing, index)


def _has_length(layer: Any) -> bool:
    return hasattr(layer, "get_seq_length")


def _has_state(layer: Any) -> bool:
    """Return whether a layer of linear attention has seen anything."""
    return any(map(bool, dict(getattr(layer, "has_previous_state", {})).values()))


def length_of(cache: Any) -> int:
    """Return the number of tokens in a cache; 0: it has none, or only states."""
    return max((layer.get_seq_length() for layer in cache.layers if _has_length(layer)), default=0)
