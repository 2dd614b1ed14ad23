"""The sum of the gradients that a stage was given in one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class GradientSum:
    """Of some parameters.

    Args:
        parameters: Whose gradients are added up.
        device: Where.

    Attributes:
        values: ``[elements of the parameters]``, float32 or float64.
        touched: For each parameter, whether it was given a gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        dtypes = [parameter.dtype for parameter in parameters]
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self._shapes = [parameter.shape for parameter in parameters]
        self.values = torch.zeros(sum(map(torch.Size.numel, self._shapes)), dtype=dtype, device=device)
        self.touched = [False] * len(self._shapes)

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
