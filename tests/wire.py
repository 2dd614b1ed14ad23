"""What becomes of tensors that travel encoded, on one machine: for the references of tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swarm.compression import Codec, Codecs, decoded, encoded
from lightning_swarm.config import Compression
from lightning_swarm.types.runs import Encoding


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


def wired(net: nn.Sequential, compression: Compression, cuts: Sequence[int], microbatch_size: int) -> None:
    """Have a chain of blocks compute what stages that begin at `cuts` do, on one machine.

    Each microbatch travels to the first stage, from one to the next, and back from the last one.
    """
    codecs = Codecs.of(Encoding(**asdict(compression)))

    def send(x: Tensor) -> Tensor:
        return torch.cat([sent(part, codecs) for part in x.split(microbatch_size)])

    net[0].register_forward_pre_hook(lambda _, args: send(args[0]))
    for cut in [*cuts, len(net)]:
        net[cut - 1].register_forward_hook(lambda _, __, output: send(output))


def averaged(sums: Sequence[Tensor], total_weight: float, by: Codec | None) -> Tensor:
    """The mean of what the peers of a roster hold, of which each reduces a part; who is alone sends nothing."""
    if len(sums) == 1:
        return sums[0] / total_weight
    length, mean = len(sums[0]), torch.empty_like(sums[0])
    for place in range(len(sums)):
        part = slice(length * place // len(sums), length * (place + 1) // len(sums))
        total = torch.zeros_like(mean[part])
        for sender, one in enumerate(sums):
            total += one[part] if sender == place else travelled(one[part], by)
        mean[part] = travelled(total / total_weight, by)
    return mean


class LowRankMeans:
    """PowerSGD on one machine, by LAPACK: every matrix is projected on the directions that its basis finds.

    Args:
        shapes: Of the parameters.
        rank: Of the projections.
        bases: ``[columns, rank]`` of each parameter to begin with; None where it stays whole.
    """

    def __init__(self, shapes: Sequence[torch.Size], rank: int, bases: Sequence[Tensor | None]) -> None:
        self.shapes = shapes
        self.rank = rank
        self.bases = list(bases)
        self.lost: Tensor | None = None

    def mean(self, total: Tensor, total_weight: float, *, feedback: bool = False) -> Tensor:
        """Of the sum of all gradients; all that is lost is carried, if it is."""
        own = total / total_weight
        if feedback and self.lost is not None:
            own = own + self.lost
        means = []
        for i, part in enumerate(own.split([shape.numel() for shape in self.shapes])):
            basis = self.bases[i]
            if basis is None:
                means.append(part)
                continue
            matrix = part.view(self.shapes[i][0], -1)
            left = torch.linalg.qr(matrix @ basis).Q
            right = matrix.T @ left
            self.bases[i] = right / right.norm(dim=0)
            means.append((left @ right.T).reshape(-1))
        mean = torch.cat(means)
        self.lost = own - mean
        return mean
