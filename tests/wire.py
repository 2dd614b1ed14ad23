"""The effect of codecs on tensors, computed on one machine for reference runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swarm.protocol.compression import Codec, Codecs, decoded, encoded
from lightning_swarm.protocol.settings import Compression
from lightning_swarm.server.averaging.powersgd import LowRank


def travelled(tensor: Tensor, by: Codec | None) -> Tensor:
    """Return a tensor as its receiver decodes it."""
    found: Tensor = decoded(encoded(tensor, by), by, tensor.device)
    return found


class Wire(torch.autograd.Function):
    """Sends hidden states of one microbatch to the next stage, and their gradients back."""

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
    """Make a chain of blocks on one machine compute like stages that begin at `cuts`.

    Each microbatch travels to the first stage, from one to the next, and back from the last one.
    """
    codecs = Codecs.of(compression)

    def send(x: Tensor) -> Tensor:
        return torch.cat([sent(part, codecs) for part in x.split(microbatch_size)])

    net[0].register_forward_pre_hook(lambda _, args: send(args[0]))
    for cut in [*cuts, len(net)]:
        net[cut - 1].register_forward_hook(lambda _, __, output: send(output))


class Averaging:
    """Averages the sums of one stage's peers step by step, with each peer's carried error.

    PowerSGD is computed with LAPACK: every matrix is projected on the directions that its basis finds.

    Args:
        compression: Codecs of the sums.
        shapes: Shapes of the parameters.
        like: A tensor with the sums' dtype.
    """

    def __init__(self, compression: Compression, shapes: Sequence[torch.Size], like: Tensor) -> None:
        self._shapes = shapes
        self._codecs = Codecs.of(compression)
        self._lost: dict[object, Tensor] = {}
        self._bases: list[Tensor | None] = []
        rank = self._codecs.rank
        if rank is not None:
            begin = LowRank(shapes, rank).initial_basis(like)
            for shape in shapes:
                rows, columns = (shape[0], shape[1:].numel()) if len(shape) > 1 else (shape.numel(), 1)
                self._bases.append(None)
                if rank * (rows + columns) < rows * columns:
                    self._bases[-1], begin = begin[: columns * rank].view(-1, rank), begin[columns * rank :]

    def mean(self, sums: Mapping[Any, Tensor], total_weight: float) -> Tensor:
        """Return the mean of the peers' sums, in the order of their roster. A single peer sends no tensor."""
        nothing = torch.zeros_like(next(iter(sums.values())))
        before = {peer: self._lost.get(peer, nothing) for peer in sums}
        self._lost = {}
        if len(sums) == 1:
            return sum(sums.values(), nothing) / total_weight + sum(before.values(), nothing)
        way = self._butterfly if self._codecs.rank is None else self._projected
        mean, lost = way(sums, total_weight, before)
        if self._codecs.error_feedback:
            self._lost = lost
        return mean

    def _butterfly(
        self, sums: Mapping[Any, Tensor], total_weight: float, before: Mapping[Any, Tensor]
    ) -> tuple[Tensor, dict[object, Tensor]]:
        """Return the mean if each peer reduces a part, and the errors."""
        nothing = torch.zeros_like(next(iter(sums.values())))
        mean, lost, by = nothing.clone(), {peer: nothing.clone() for peer in sums}, self._codecs.averaging
        for place, reducer in enumerate(sums):
            part = slice(len(mean) * place // len(sums), len(mean) * (place + 1) // len(sums))
            total = torch.zeros_like(mean[part])
            for sender, one in sums.items():
                if sender == reducer:
                    total += one[part]
                    continue
                own = one[part] + total_weight * before[sender][part]
                received = travelled(own, by)
                lost[sender][part] = (own - received) / total_weight
                total += received
            reduced = total / total_weight + before[reducer][part]
            mean[part] = travelled(reduced, by)
            lost[reducer][part] = reduced - mean[part]
        return mean, lost

    def _projected(
        self, sums: Mapping[Any, Tensor], total_weight: float, before: Mapping[Any, Tensor]
    ) -> tuple[Tensor, dict[object, Tensor]]:
        sizes = [shape.numel() for shape in self._shapes]
        own = {peer: (one / total_weight + before[peer]).split(sizes) for peer, one in sums.items()}
        means = []
        left_over: dict[object, list[Tensor]] = {peer: [] for peer in sums}
        for i, basis in enumerate(self._bases):
            whole = sum((parts[i] for parts in own.values()), torch.zeros_like(own[next(iter(own))][i]))
            if basis is None:
                means.append(whole)
                for one in left_over.values():
                    one.append(torch.zeros_like(whole))
                continue
            rows = self._shapes[i][0]
            left = torch.linalg.qr(whole.view(rows, -1) @ basis).Q
            right = whole.view(rows, -1).T @ left
            self._bases[i] = right / right.norm(dim=0)
            means.append((left @ right.T).reshape(-1))
            for peer, parts in own.items():
                matrix = parts[i].view(rows, -1)
                left_over[peer].append((matrix - left @ (left.T @ matrix)).reshape(-1))
        return torch.cat(means), {peer: torch.cat(parts) for peer, parts in left_over.items()}
