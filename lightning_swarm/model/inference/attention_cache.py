"""Key-value caches of Hugging Face models whose blocks run on servers: the client's, with lengths only, and servers'.

A model's forward reads lengths from its `transformers.Cache` to build masks and positions, and passes it to the blocks.
If the blocks are on servers, the forward's cache has only lengths: its layers are on the meta device. Each server has a
cache of its own, in which only the layers of its blocks hold tensors. Only this module and `joint_attention` depend on
how transformers implements caches and attention.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.protocol.messages.inference import CacheLayer, CacheOperation, CacheRecipe, LayerKind

IN_SESSION: Final = "the session's cache"
"""Replaces the cache in a call's extras, because the cache itself is never sent."""

SLAB: Final = "_swarm_slab"  # attribute of a cache whose keys and values are rows of a shared tensor
_HANDLE: Final = "_swarm_handle"  # attribute of a cache that holds its `CacheHandle`
# class of a layer in transformers -> `CacheLayer.kind` that is sent to servers
_LAYERS: Final[dict[str, LayerKind]] = {
    "DynamicLayer": "full",
    "DynamicSlidingWindowLayer": "sliding",
    "LinearAttentionLayer": "linear",
    "LinearAttentionAndFullAttentionLayer": "linear_full",
    "LinearAttentionAndSlidingWindowAttentionLayer": "linear_sliding",
}
_CLASSES: Final = {kind: name for name, kind in _LAYERS.items()}

# method of a cache that changes its contents -> `CacheOperation.kind` that is sent to servers
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
    module = sys.modules.get("transformers.cache_utils")  # imported if any cache exists
    return module is not None and isinstance(value, module.Cache)


def without_cache(tree: Any, cache: Any) -> Any:
    """Replace the cache in a block's output by `IN_SESSION`, because the cache is never sent."""
    return _replaced(tree, lambda value: value is cache, IN_SESSION)


def with_cache(tree: Any, cache: Any) -> Any:
    """Replace `IN_SESSION` by the forward's own cache."""
    return _replaced(tree, is_in_session, cache)


def _replaced(tree: Any, matches: Callable[[Any], bool], value: Any) -> Any:
    if matches(tree):
        return value
    if isinstance(tree, dict):
        return {key: _replaced(item, matches, value) for key, item in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_replaced(item, matches, value) for item in tree)
    return tree


def is_in_session(value: Any) -> bool:
    """Return whether an extra stands for the session's cache."""
    return type(value) is str and value == IN_SESSION


# ---------------------------------------------------------------------- at the client


class CacheHandle:
    """Holds the lengths of a cache whose contents are on servers, and the operations that servers must still apply."""

    def __init__(self, cache: Any) -> None:
        self.recipe = _recipe_of(cache)
        self.operations: list[CacheOperation] = []  # recorded since the last step
        self.session: Any = None  # the inference session that uses the cache
        self.in_step = False  # True also after a failed step, because contents and lengths may then differ
        self._refused = ""  # the reason why the cache cannot be used any more; empty if it can
        self.length = 0  # tokens, after the last step or operation
        for method, kind in _CHANGES.items():
            if hasattr(cache, method):
                vars(cache)[method] = _RecordedMethod(self, cache, kind)

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
                f"a cache that servers hold must be changed by its own methods only: it has {length_of(cache)} tokens "
                f"here and {handle.length} on servers. Call methods of the cache, such as `crop`, not of its layers."
            )
        return handle

    @staticmethod
    def bound_to(cache: Any) -> CacheHandle:
        """Return the handle of a cache that is bound."""
        handle: CacheHandle = vars(cache)[_HANDLE]
        return handle

    @classmethod
    def find(cls, cache: Any) -> CacheHandle | None:
        """Return a cache's handle; None if the cache is not bound."""
        handle: CacheHandle | None = vars(cache).get(_HANDLE)
        return handle

    def refuse_use(self, reason: str) -> None:
        """Make all later uses of the cache raise `ConfigError` with this reason, because contents are missing."""
        self._refused = self._refused or reason

    def note(self, cache: Any, operation: CacheOperation) -> None:
        """Apply an operation to the lengths, and queue it for the servers, which apply it before the next step."""
        apply(cache, operation)
        self.length = length_of(cache)
        self.operations.append(operation)

    def take_operations(self) -> list[CacheOperation]:
        """Return the operations that servers must apply before the next step, and clear the queue."""
        taken, self.operations = self.operations, []
        return taken

    def grow(self, cache: Any, *, rows: int, length: int, num_layers: int) -> None:
        """Extend the lengths by a step of `length` tokens in `rows` rows; the cache then has at least `num_layers`."""
        _grow(cache, range(max(len(cache.layers), num_layers)), rows=rows, length=length)
        self.length = length_of(cache)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ConfigError(
            "a cache whose keys and values are on servers must not be copied, because the copy would have none. Pass "
            "the whole text to a forward with a new cache."
        )

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a cache whose keys and values are on servers must not be saved. Save the text.")


class _RecordedMethod:
    """Replaces a method that changes a cache, and records its calls in the cache's handle."""

    def __init__(self, handle: CacheHandle, cache: Any, kind: str) -> None:
        # Weak, because the session ends as soon as user code drops the cache.
        self._handle, self._cache, self._kind = handle, weakref.ref(cache), kind

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        cache = self._cache()
        assert cache is not None
        value = next(iter((*args, *kwargs.values())), None)  # each of these methods has at most one argument
        if isinstance(value, Tensor) and value.dtype == torch.bool:
            value = value.nonzero()  # a mask of rows, whose indices are sent
        if self._kind == "crop" and value is not None and value > 0:
            type(cache).crop(cache, value)  # raises transformers' own error: tokens to remove are a negative number
        if isinstance(value, Tensor):
            values = [int(number) for number in value.flatten().tolist()]
        else:
            values = [] if value is None else [abs(int(value))]
        self._handle.note(cache, CacheOperation(kind=self._kind, values=values))  # type: ignore[arg-type]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._handle.__deepcopy__(memo)

    def __reduce__(self) -> NoReturn:
        self._handle.__reduce__()


def _recipe_of(cache: Any) -> CacheRecipe:
    """Describe an empty cache so that servers can build one like it; refuse caches that servers cannot build."""
    from transformers import cache_utils

    kind, remedy = type(cache).__name__, "Leave `cache_implementation` out, or pass `use_cache=False`"
    # Servers build one of these two classes. A subclass may hold more state.
    if type(cache) not in (cache_utils.Cache, cache_utils.DynamicCache) or cache.offloading:
        raise ConfigError(f"a cache on servers must be a `DynamicCache` that is not offloaded, got {kind}. {remedy}.")
    unknown = [type(layer).__name__ for layer in cache.layers if type(layer).__name__ not in _LAYERS]
    replicated = cache.layer_class_to_replicate
    if unknown or replicated not in (None, cache_utils.DynamicLayer):
        found = unknown[0] if unknown else replicated.__name__
        raise ConfigError(f"layers of a cache on servers must be one of {sorted(_LAYERS)}, got {found}. {remedy}.")
    if length_of(cache) or any(map(_has_state, cache.layers)):
        raise ConfigError(
            f"a cache must be empty at its first use with blocks on servers: this {kind} has {length_of(cache)} "
            "tokens, or states, which were computed elsewhere. Begin with a new cache, and pass the whole text to the "
            "forward."
        )
    layers = [_describe(layer) for layer in cache.layers] if replicated is None else None
    return CacheRecipe(layers=layers, records_past=any(getattr(layer, "record_past", False) for layer in cache.layers))


def _describe(layer: Any) -> CacheLayer:
    return CacheLayer(
        kind=_LAYERS[type(layer).__name__],
        window=int(getattr(layer, "sliding_window", 0)),
        num_states=int(getattr(layer, "number_of_states", 1)),
    )


# ---------------------------------------------------------------------- at a server


def build(recipe: CacheRecipe) -> Any:
    """Build an empty cache from its recipe, on a server."""
    try:
        from transformers import cache_utils
    except ImportError as error:
        raise ConfigError("caches of Hugging Face models need `pip install transformers` on all servers.") from error

    if recipe.layers is None:
        return cache_utils.DynamicCache()
    layers = []
    for described in recipe.layers:
        arguments: dict[str, int] = {}
        if "sliding" in described.kind:
            arguments["sliding_window"] = described.window
        if "linear" in described.kind:
            arguments["number_of_states"] = described.num_states
        layer = getattr(cache_utils, _CLASSES[described.kind])(**arguments)
        if recipe.records_past and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
        layers.append(layer)
    return cache_utils.Cache(layers=layers)


def apply(cache: Any, operation: CacheOperation, *, max_bytes: int | None = None) -> None:
    """Apply an operation to a cache between two steps.

    Raises:
        ProtocolError: The cache does not have these rows or tokens, or would exceed `max_bytes`.
    """
    kind, values = operation.kind, operation.values
    if kind in ("crop", "repeat") and len(values) != 1:
        raise ProtocolError(f"`{kind}` takes one number, got {len(values)}")
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if kind in ("reorder", "select") and keys is not None and values and max(values) >= len(keys):
            raise ProtocolError(f"`{kind}` names row {max(values)} of a cache with {len(keys)} rows")
        if kind == "crop" and _has_length(layer) and values[0] > layer.get_seq_length():
            raise ProtocolError(f"`crop` removes {values[0]} tokens of a cache with {layer.get_seq_length()}")
    if max_bytes is not None and kind in ("repeat", "reorder", "select"):
        rows = max((len(layer.keys) for layer in cache.layers if getattr(layer, "keys", None) is not None), default=1)
        times = values[0] if kind == "repeat" else len(values) / max(rows, 1)
        if times > 1 and num_bytes(cache) * times > max_bytes:
            raise ProtocolError(f"a cache may have {max_bytes} bytes, got {times:g} times {num_bytes(cache)}")
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


class LayerLengths:
    """Extends the lengths of other stages' layers, which hold no tensors, in a stage's cache, during a step."""

    # Blocks of this stage may read these lengths, for masks and positions.
    def __init__(self, cache: Any, *, first_block: int, rows: int, length: int) -> None:
        """Before a step, extend the lengths of earlier blocks' layers, as a single machine would have by now."""
        self._cache, self._first, self._rows, self._length = cache, first_block, rows, length
        # If the cache makes its layers at their first use, earlier layers may be missing.
        number = first_block if cache.layer_class_to_replicate is not None else min(first_block, len(cache.layers))
        _grow(cache, [index for index in range(number) if not self._is_own(index)], rows=rows, length=length)
        self._before = self._lengths()

    def follow(self) -> None:
        """After the step, extend the lengths of later blocks' layers."""
        now = self._lengths()  # the step extended the layers of this stage's blocks
        unchanged = [i for i in range(self._first, len(now)) if i >= len(self._before) or now[i] == self._before[i]]
        later = [index for index in unchanged if not self._is_own(index)]
        _grow(self._cache, later, rows=self._rows, length=self._length)

    def _is_own(self, index: int) -> bool:
        layers = self._cache.layers
        keys = getattr(layers[index], "keys", None) if index < len(layers) else None
        return isinstance(keys, Tensor) and keys.device.type != "meta"

    def _lengths(self) -> list[int]:
        """Return the length of each layer; -1 for a layer that only has states."""
        return [layer.get_seq_length() if _has_length(layer) else -1 for layer in self._cache.layers]


def can_be_cut(cache: Any) -> bool:
    """Return whether a cache still has the keys and values of all tokens, so that its last tokens can be removed."""
    return all(
        (kind := _LAYERS.get(type(layer).__name__)) == "full"
        or (kind == "sliding" and not layer.record_past and layer.get_seq_length() < layer.sliding_window)
        for layer in cache.layers
    )


def branch_of(cache: Any, *, remove: int) -> Any:
    """Copy a cache without its last `remove` tokens; steps of either cache leave the other unchanged."""
    # Keys and values are shared, because steps replace these tensors. States of linear attention are cloned, because
    # they change in place, and so are rows of a slab, to which padded steps append in place.
    branch = copy.copy(cache)
    in_slab = vars(branch).pop(SLAB, None) is not None
    branch.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in branch.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(layer, name, {k: v.clone() if isinstance(v, Tensor) else v for k, v in value.items()})
        if remove:
            layer.crop(-remove)
        if in_slab and getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    return branch


def is_restorable(cache: Any) -> bool:
    """Return whether steps only replace the tensors of a cache's layers, so that `restorer_of` can restore them."""
    return cache is not None and all(_LAYERS.get(type(layer).__name__) in ("full", "sliding") for layer in cache.layers)


def restorer_of(cache: Any) -> Callable[[], None]:
    """Return a function that restores the present contents of a cache that `is_restorable`."""
    layers = [(layer, dict(vars(layer))) for layer in cache.layers]

    def restore() -> None:
        cache.layers[:] = [layer for layer, _ in layers]
        for layer, state in layers:
            vars(layer).clear()
            vars(layer).update(state)

    return restore


def num_bytes(cache: Any) -> int:
    """Return the bytes that a cache's tensors hold, including the unused room of rows in a larger tensor."""
    return sum(
        max(tensor.nbytes, len(tensor) * tensor.stride(0) * tensor.element_size()) if tensor.ndim else tensor.nbytes
        for tensor in tensors(cache)
    )


def tensors(cache: Any) -> list[Tensor]:
    """Return the tensors that hold a cache's contents."""
    found = [value for layer in cache.layers for value in _tensors_of(vars(layer).values())]
    return [tensor for tensor in found if tensor.device.type != "meta"]


def _tensors_of(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors_of(value.values())


def _grow(cache: Any, indices: Iterable[int], *, rows: int, length: int) -> None:
    """Extend the lengths of some layers by a step, with tensors on meta instead of its keys and values."""
    update: Callable[..., Any] = type(cache).update
    nothing = torch.empty(rows, 1, length, 1, device="meta")
    grown: dict[int, Tensor] = {}  # length -> shared tensor, which is never read or changed
    for index in indices:
        layer = cache.layers[index] if index < len(cache.layers) else None
        if type(layer).__name__ == "DynamicLayer" and layer.is_initialized:  # type: ignore[union-attr]
            # Same result as `update`, which takes 0.1 ms because torch runs meta operators in Python.
            total = layer.get_seq_length() + length  # type: ignore[union-attr]
            if total not in grown:
                grown[total] = torch.empty(rows, 1, total, 1, device="meta")
            layer.keys = layer.values = grown[total]  # type: ignore[union-attr]
            continue
        if layer is not None and hasattr(layer, "has_previous_state"):  # linear attention has processed tokens now
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        if layer is None or _has_length(layer):
            update(cache, nothing, nothing, index)


def _has_length(layer: Any) -> bool:
    return hasattr(layer, "get_seq_length")


def _has_state(layer: Any) -> bool:
    """Return whether a layer of linear attention has processed any token."""
    return any(map(bool, dict(getattr(layer, "has_previous_state", {})).values()))


def length_of(cache: Any) -> int:
    """Return the number of tokens in a cache; 0 if it is empty or has only states of linear attention."""
    return max((layer.get_seq_length() for layer in cache.layers if _has_length(layer)), default=0)
