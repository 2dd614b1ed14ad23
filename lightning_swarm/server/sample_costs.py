"""Measures a sample's costs at a stage, in the first forward that keeps a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import number_bytes
from lightning_swarm.protocol.messages.reports import SampleCosts

_BOTH_WAYS: Final = 3.0  # FLOP of forward and backward together, relative to a forward


# Not torch's `FlopCounterMode`, because its hooks act on the modules of all threads.
class _FlopCounter(TorchDispatchMode):
    """Counts the FLOP of matrix products, on the current thread only."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.flop = 0.0

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch would not compile a stage in its first forward

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        count: Callable[..., Any] | None = flop_registry.get(getattr(func, "overloadpacket", None))
        if count is not None:
            self.flop += count(*args, **(kwargs or {}), out_val=out)
        return out


@contextlib.contextmanager
def _saved_bytes(parameters: Sequence[Tensor]) -> Iterator[dict[int, int]]:
    """Record the bytes of each storage that autograd saves inside, except the storages of the parameters."""
    ignored = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a saved output with its graph would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the number of bytes of the tensors' elements."""
    return sum(tensor.nbytes for tensor in tensors)


def measured(
    run: Callable[[], Any], parameters: Sequence[Tensor], inputs: Sequence[Tensor], extras: Sequence[Tensor]
) -> tuple[Any, SampleCosts]:
    """Return the output of `run` and its costs per sample. Parameters do not count as saved for the backward."""
    with _saved_bytes(parameters) as saved, _FlopCounter() as flops:
        output = run()
    outputs = serialization.flatten(output)[1]
    num_rows = max((len(tensor) for tensor in inputs if tensor.dim()), default=1) or 1
    # Extras with another first dimension are shared by all microbatches.
    cut_extras = [tensor for tensor in extras if tensor.dim() and len(tensor) == num_rows]
    return output, SampleCosts(
        flop=_BOTH_WAYS * flops.flop / num_rows,
        input_bytes=num_bytes(inputs) // num_rows,
        extra_bytes=num_bytes(cut_extras) // num_rows,
        gradient_bytes=num_bytes([tensor for tensor in inputs if tensor.requires_grad]) // num_rows,
        output_bytes=num_bytes(outputs) // num_rows,
        graph_bytes=sum(saved.values()) // num_rows,
        input_number_bytes=number_bytes(inputs),
        output_number_bytes=number_bytes(outputs),
    )
