"""What becomes of tensors that travel encoded, on one machine: for the references of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.compression import Codec, Codecs, decoded, encoded


def travelled(tensor: Tensor, by: Codec | None) -> Tensor:
    """What whoever receives it has of a tensor."""
    found: Tensor = decoded(encoded(tensor, by), by, tensor.device)
    return found


class Wire(torch.autograd.Function):
    """Hidden states of one microbatch on their way to the next stage, and their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codecs: Codecs) -> Tensor:
        ctx.codecs = codecs
        return travelled(x, codecs.activations)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return travelled(gradients[0], ctx.codecs.gradients), None


def sent(x: Tensor, codecs: Codecs) -> Tensor:
    found: Tensor = Wire.apply(x, codecs)
    return found


def averaged(sums: Sequence[Tensor], total_weight: float, by: Codec | None) -> Tensor:
    """The mean of what the peers of a roster hold, of which each reduces a part."""
    length, mean = len(sums[0]), torch.empty_like(sums[0])
    for place in range(len(sums)):
        part = slice(length * place // len(sums), length * (place + 1) // len(sums))
        total = torch.zeros_like(mean[part])
        for sender, one in enumerate(sums):
            total += one[part] if sender == place else travelled(one[part], by)
        mean[part] = travelled(total / total_weight, by)
    return mean
