"""Parameters and buffers that report when code reads or writes them, at no cost to other code."""

from __future__ import annotations

import copy
import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, nn

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

_PROPERTIES: Final = (
    *("dtype", "device", "layout", "shape", "ndim", "grad", "grad_fn", "requires_grad", "is_leaf", "is_meta"),
    *("is_cuda", "is_cpu", "is_mps", "is_sparse", "is_quantized", "is_nested", "names", "nbytes", "itemsize"),
    *("_backward_hooks", "_base", "_grad", "_version", "output_nr", "retains_grad"),
)
_METHODS: Final = (
    *("dim", "size", "stride", "numel", "nelement", "element_size", "storage_offset", "is_contiguous", "get_device"),
    *("is_floating_point", "is_complex", "is_inference", "is_pinned", "is_shared", "is_same_size", "data_ptr"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__len__", "__hash__"),
    "_is_view",
)
PROPERTY_FUNCTIONS: Final = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "_grad") if hasattr(Tensor, name)),
    *(getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_inference, torch.is_same_size),
    torch._has_compatible_shallow_copy_type,
}
"""Functions that read or set a tensor's properties, such as its shape or gradient, but not its values."""


class _WatchedTensor:
    """Base of watched parameters and buffers: reports each use, except by `PROPERTY_FUNCTIONS`."""

    _on_use: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in PROPERTY_FUNCTIONS:
            for tensor in _watched((*args, *kwargs.values())):
                tensor._on_use()
        with unwatched():
            return func(*args, **kwargs)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = copy.deepcopy(_plain(self), memo)
        return copied

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


class WatchedParameter(_WatchedTensor, nn.Parameter):
    """A parameter while it is watched."""


class WatchedBuffer(_WatchedTensor, Tensor):
    """A buffer while it is watched."""


# class of a tensor -> class while it is watched
_KINDS: Final[Mapping[type, type]] = {nn.Parameter: WatchedParameter, Tensor: WatchedBuffer, nn.Buffer: WatchedBuffer}


def watch(tensor: Tensor, on_use: Callable[[], None]) -> Callable[[], None] | None:
    """Call `on_use` before each use of a tensor, until the returned function is called; None if that is impossible."""
    kind = type(tensor)
    if kind not in _KINDS or tensor.is_meta:
        return None
    tensor.__class__ = _KINDS[kind]  # torch itself does so when it fills an `UninitializedParameter`
    tensor._on_use = on_use  # type: ignore[attr-defined]

    def release() -> None:
        if type(tensor) is _KINDS[kind]:  # unless `torch.utils.swap_tensors` exchanged the tensor with another one
            tensor.__class__ = kind
            del tensor._on_use  # type: ignore[attr-defined]

    return release


def is_watched(tensor: Tensor) -> bool:
    """Return whether uses of a tensor are reported."""
    return isinstance(tensor, _WatchedTensor)


def unwatched() -> AbstractContextManager[None]:
    """Return a context in which this thread's uses of tensors are not reported."""
    return torch._C.DisableTorchFunctionSubclass()


def aliased(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of watched tensors that user code can also use unreported, by views or arrays that it holds."""
    watched = {id(tensor): (name, tensor) for name, tensor in tensors.items() if is_watched(tensor)}
    with unwatched():
        storages = [(name, tensor.untyped_storage()) for name, tensor in watched.values()]
    own = Counter(storage._cdata for _, storage in storages)  # `storages` adds one user to each storage
    return [name for name, storage in storages if _num_users(storage) > own[storage._cdata] + 1]


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal dtypes, shapes and values; NaN equals NaN."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if _have_same_bytes(one, other):
        return True
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _have_same_bytes(one: Tensor, other: Tensor) -> bool:
    """Compare bytes on the CPU, in a sixth of `torch.equal`'s time; tensors of other bytes may still be equal."""
    return (
        all(
            tensor.device.type == "cpu"
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
            for tensor in (one, other)
        )
        and _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes) == 0
    )


def _watched(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, _WatchedTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _watched(value)


def _num_users(storage: torch.UntypedStorage) -> int:
    num_users: int = torch._C._storage_Use_Count(storage._cdata)
    return num_users


def _plain(tensor: Any) -> Tensor:
    """Return an unwatched tensor with the same memory."""
    tensor._on_use()
    with unwatched():
        plain: Tensor = tensor.detach()
        return nn.Parameter(plain, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else plain
