"""The sum of the gradients that a stage was given in one step: in floats, or in fixed point."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.averaging import fixed_point


class GradientSum:
    """Of some parameters.

    Args:
        parameters: Whose gradients are added up.
        device: Where.

    Attributes:
        like: ``[elements of the parameters]``, float32 or float64: of the dtype and on the device of the mean. Its
            values mean nothing.
        values: The sum; of the same kind.
        touched: For each parameter, whether it was given a gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        dtypes = [parameter.dtype for parameter in parameters]
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self._shapes = [parameter.shape for parameter in parameters]
        length = sum(map(torch.Size.numel, self._shapes))
        self.like = torch.empty((), dtype=dtype, device=device).expand(length)
        self.values = self._nothing(length, dtype, device)
        self.touched = [False] * len(self._shapes)

    @staticmethod
    def _nothing(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As `values` are at first."""
        return torch.zeros(length, dtype=dtype, device=device)

    def add(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        """Add one microbatch's gradients, times `weight`."""
        sums, added = [], []
        for i, (view, gradient) in enumerate(zip(self.views(self.values), gradients, strict=True)):
            if gradient is not None:
                self.touched[i] = True
                sums.append(view)
                added.append(gradient.to(self.values.dtype))
        if sums:
            torch._foreach_add_(sums, added, alpha=weight)

    def clear(self) -> None:
        """Hold nothing."""
        self.values.zero_()
        self.touched = [False] * len(self._shapes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """A tensor like `values`, seen as one for each parameter."""
        parts = flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class ExactSum(GradientSum):
    """The same in fixed point: its bits do not depend on the order in which microbatches come, nor on where they come.

    What does not fit is not added but counted: then the sum has no mean.

    Attributes:
        values: As in `averaging.fixed_point`.
    """

    @staticmethod
    @override
    def _nothing(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return fixed_point.nothing(length, device)

    @override
    def add(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        given = [gradient for gradient in gradients if gradient is not None]
        self.touched = [had or one is not None for had, one in zip(self.touched, gradients, strict=True)]
        fits = fixed_point.fit(given, weight)
        fixed_point.note(self.values, fits=fits)
        if not fits:
            return
        begin = 0
        for shape, gradient in zip(self._shapes, gradients, strict=True):
            end = begin + shape.numel()
            if gradient is not None:
                fixed_point.add(self.values[:, begin:end], gradient.reshape(-1), weight)
            begin = end
