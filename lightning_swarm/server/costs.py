"""What a sample costs a stage, seen while one of its microbatches goes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_swarm.compression import number_bytes
from lightning_swarm.types.reports import SampleCosts

_BOTH_WAYS: Final = 3.0
"""Times what the forward computes: the backward takes twice as much."""


class Flops(TorchDispatchMode):
    """Counts what the products of matrices inside compute, as `FlopCounterMode` does, but on this thread alone.

    That one's hooks are on the modules of all threads.

    Attributes:
        flop: So far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.flop = 0.0

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True  # a stage is to be compiled in its first forward, too

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        count: Callable[..., Any] | None = flop_registry.get(getattr(func, "overloadpacket", None))
        if count is not None:
            self.flop += count(*args, **(kwargs or {}), out_val=out)
        return out


class Saved:
    """Counts what autograd keeps for a backward of the forward inside, but for some tensors' own memory."""

    def __init__(self, own: Sequence[Tensor]) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._saved: dict[int, int] = {}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Inside them it is counted."""

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own:
                self._saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # a saved output would otherwise hold itself alive through its own graph

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        """So far."""
        return sum(self._saved.values())


def of_sample(
    inputs: Sequence[Tensor],
    extras: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    forward_flop: float,
    graph_bytes: int,
) -> SampleCosts:
    """A sample's share of a microbatch. Its bytes are those of tensors as they are computed with, not as they travel.

    Args:
        inputs: Of the blocks; those that want a gradient require it.
        extras: Beside them; what has another first dimension is shared by all microbatches.
        outputs: Of the blocks.
        forward_flop: Of the microbatch.
        graph_bytes: Likewise.
    """
    num_rows = max((len(one) for one in inputs if one.dim()), default=1) or 1
    return SampleCosts(
        flop=_BOTH_WAYS * forward_flop / num_rows,
        input_bytes=_bytes(inputs) // num_rows,
        extra_bytes=_bytes([one for one in extras if one.dim() and len(one) == num_rows]) // num_rows,
        gradient_bytes=_bytes([one for one in inputs if one.requires_grad]) // num_rows,
        output_bytes=_bytes(outputs) // num_rows,
        graph_bytes=graph_bytes // num_rows,
        input_number_bytes=number_bytes(inputs),
        output_number_bytes=number_bytes(outputs),
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
