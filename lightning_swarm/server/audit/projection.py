"""Random projections of the parts of sums and means, by which a coordinator checks a round's averaging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lightning_swarm.model.fingerprint import digest
from lightning_swarm.protocol.messages.parts import part_bounds
from lightning_swarm.server.audit.sketch import in_buckets, project
from lightning_swarm.server.averaging.deterministic import quotient

_SLICE: Final = 1 << 20  # elements converted at once; a multiple of any number of buckets


def parts_of(vector: Tensor, num_parts: int) -> list[Tensor]:
    """Split vectors ``[..., n]`` along their last dimension, one part per member of a round."""
    return [vector[..., bounds] for bounds in part_bounds(vector.shape[-1], num_parts)]


def sum_parts(values: Tensor, num_parts: int) -> list[Tensor]:
    """Split a sum, in floats or in fixed point, into parts in floats."""
    if values.is_floating_point():
        return parts_of(values, num_parts)
    return [quotient(part, 1.0) for part in parts_of(values[:, :-1], num_parts)]


def part_digest(part: Sequence[Tensor]) -> bytes:
    """Return the BLAKE3 digest of a part of a sum or a mean."""
    return digest(part, b"part;")


def part_digests(mean: Tensor, num_parts: int) -> list[bytes]:
    """Digest each part of a mean."""
    return [part_digest([part]) for part in parts_of(mean, num_parts)]


def project_parts(parts: Sequence[Tensor], seed: int, *, num_buckets: int) -> list[float]:
    """Project each part to `num_buckets` numbers; return the numbers of all parts, in order."""
    return [number for part in parts for number in project(part, seed, num_buckets=num_buckets).tolist()]


def bucket_norms(parts: Sequence[Tensor], *, num_buckets: int) -> list[float]:
    """Return the norms of the elements that `project_parts` adds up in each bucket."""
    return [norm for part in parts for norm in _norms(part, num_buckets).tolist()]


def _norms(part: Tensor, num_buckets: int) -> Tensor:
    total = torch.zeros(num_buckets, dtype=torch.float64)
    if not part.numel():
        return total
    # Scaled by the largest element, because squares of small float64 numbers would underflow.
    largest = float(part.abs().max()) or 1.0
    for piece in part.split(_SLICE):
        total += in_buckets(piece.to(torch.float64).div(largest).square_(), num_buckets)
    return total.sqrt_().mul_(largest)
