"""The sum of the gradients of one stage in one step: in floats, or in fixed point."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.core.errors import LeaseRevoked, ProtocolError
from lightning_swarm.protocol.messages.calls import Origin, Receipt
from lightning_swarm.server.averaging import deterministic

_NO_ORIGINS: Final = MappingProxyType[int, Origin]({})


# The ledger makes a repeated call harmless: a receipt is entered before its gradient is added, and never twice.
class ReceiptLedger:
    """The receipts of one stage for one step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._receipts: dict[Receipt, None] = {}
        self._named: frozenset[Receipt] | None = None  # the only receipts that a frozen sum accepts; None: not frozen
        self.origins: dict[int, Origin] = {}  # place -> origin of each batch with a receipt here
        self._granted: Mapping[int, Origin] = _NO_ORIGINS  # origins of the named batches

    @property
    def final(self) -> bool:
        """True if the sum is frozen and holds every receipt that it accepts."""
        return self._named is not None and self._named <= self._receipts.keys()

    @property
    def begun(self) -> bool:
        """True if it holds a receipt, or the step is closing."""
        return self._named is not None or bool(self._receipts)

    def holds(self, receipt: Receipt) -> bool:
        """Return whether the microbatch's gradient is in the sum."""
        return receipt in self._receipts

    def add(self, receipt: Receipt, origin: Origin) -> bool:
        """Enter a receipt; return False if it is known already, or if the sum holds its batch from another trainer."""
        first, _, _ = receipt
        if receipt in self._receipts:
            return False
        # The coordinator does not name a microbatch if its batch was struck or granted by a former coordinator, or if
        # another server's sum must hold it.
        if self._named is not None and receipt not in self._named:
            raise LeaseRevoked(f"step {self.step} is closed, and its closing does not name microbatch {receipt} here")
        granted = self._granted.get(first)
        if granted is not None and granted.trainer != origin.trainer:
            raise ProtocolError(
                f"the batch at {first} of step {self.step} was granted to {granted.trainer}, got a gradient of it from "
                f"{origin.trainer}"
            )
        expected = granted or self.origins.get(first, origin)
        # Only the coordinator knows which of two trainers owns the batch. The owner must get no error because the other
        # trainer was faster, so the sum is cleared when the step closes, and the owner sends the batch again.
        if expected.trainer != origin.trainer:
            return False
        if expected != origin:
            raise ProtocolError(
                f"the batch at {first} of step {self.step} has the weight {expected.weight!r}, got a gradient with "
                f"{origin.weight!r}. A trainer sends all of a batch's gradients with the weight of its lease."
            )
        self._receipts[receipt] = None
        self.origins[first] = origin
        return True

    def freeze(self, named: AbstractSet[Receipt] = frozenset(), granted: Mapping[int, Origin] = _NO_ORIGINS) -> None:
        """Accept only the receipts in `named` from now on. The coordinator names none until it has read all ledgers."""
        self._named, self._granted = frozenset(named), granted

    def freeze_like(self, replaced: ReceiptLedger) -> None:
        """Accept only the receipts that the replaced ledger accepted."""
        self._named, self._granted = replaced._named, replaced._granted

    def agrees(self, named: AbstractSet[Receipt], granted: Mapping[int, Origin]) -> bool:
        """Return whether the sum holds only named receipts, with these origins of their batches."""
        return self._receipts.keys() <= named and all(
            granted[first] == origin for first, origin in self.origins.items()
        )

    def thaw(self) -> None:
        """Accept any receipt again, because the step takes batches again."""
        self._named, self._granted = None, _NO_ORIGINS

    @property
    def held(self) -> frozenset[Receipt]:
        """All receipts whose gradients are in the sum."""
        return frozenset(self._receipts)

    @property
    def in_order(self) -> Collection[Receipt]:
        """All receipts, in the order of adding, on which the sum's bits depend."""
        return self._receipts.keys()

    def holds_any(self, batches: Collection[int]) -> bool:
        """Return whether a microbatch of these batches, given by their places, is in the sum."""
        return any(first in batches for first, _, _ in self._receipts)


class GradientSum:
    """The sum of the gradients of some parameters, in floats."""

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        dtypes = [parameter.dtype for parameter in parameters]
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self._shapes = [parameter.shape for parameter in parameters]
        length = sum(map(torch.Size.numel, self._shapes))
        # Has the shape ``[elements of all parameters]``, dtype and device of the mean, but no memory for values.
        self.like = torch.empty((), dtype=dtype, device=device).expand(length)
        self.values = self._zeros(length, dtype, device)  # the sum
        self.touched = [False] * len(self._shapes)  # per parameter, whether a gradient was added

    @staticmethod
    def _zeros(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(length, dtype=dtype, device=device)

    def converted(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Convert gradients to the sum's dtype. This needs memory; adding the results needs none."""
        return [None if gradient is None else gradient.to(self.values.dtype) for gradient in gradients]

    def add(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        """Add one microbatch's gradients, times `weight`."""
        sums, added = [], []
        for i, (view, gradient) in enumerate(zip(self.views(self.values), self.converted(gradients), strict=True)):
            if gradient is not None:
                self.touched[i] = True
                sums.append(view)
                added.append(gradient)
        if sums:
            torch._foreach_add_(sums, added, alpha=weight)

    def clear(self) -> None:
        """Reset the sum to zero."""
        self.values.zero_()
        self.touched = [False] * len(self._shapes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of a tensor like `values`, one for each parameter."""
        parts = flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class ExactSum(GradientSum):
    """A gradient sum in fixed point, see `averaging.deterministic`: its bits do not depend on the order of adding."""

    @staticmethod
    @override
    def _zeros(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return deterministic.empty_sum(length, device)

    @override
    def converted(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return gradients  # added in slices, as integers

    @override
    def add(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        present = [gradient for gradient in gradients if gradient is not None]
        self.touched = [had or gradient is not None for had, gradient in zip(self.touched, gradients, strict=True)]
        fits = deterministic.fits(present, weight)
        deterministic.count_vector(self.values, was_added=fits)
        if not fits:  # the sum only counts it, and then has no mean
            return
        begin = 0
        for shape, gradient in zip(self._shapes, gradients, strict=True):
            end = begin + shape.numel()
            if gradient is not None:
                deterministic.add(self.values[:, begin:end], gradient.reshape(-1), weight)
            begin = end
