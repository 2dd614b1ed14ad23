"""Other tensors with the same fingerprint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_swarm.model.fingerprint import _PRIME


def cancelling_words() -> tuple[int, int]:
    """Return two changes that cancel out if the second word is a row or tensor after the first, in the same column."""
    # Euclid's algorithm finds multiples of the prime that are close to multiples of 2^64.
    before, now = (1 << 64, 0), (_PRIME, 1)
    while now[0] >= 1 << 31:
        quotient = before[0] // now[0]
        before, now = now, (before[0] - quotient * now[0], before[1] - quotient * now[1])
    rest, factor = now
    assert (factor * _PRIME - rest) % (1 << 64) == 0
    return factor, -rest


def forged(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Change two words of each pair of neighbours in a column where the changes fit into 32 bits, if there is one."""
    found = [tensor.clone() for tensor in tensors]
    factor, rest = cancelling_words()
    for first, second in zip(found[::2], found[1::2], strict=False):
        if max(first.nbytes, second.nbytes) > 1 << 17 or first.nbytes % 4 or second.nbytes % 4:
            continue
        one, other = (tensor.view(-1).view(torch.int32) for tensor in (first, second))
        for column in range(min(len(one), len(other))):
            for sign in (1, -1):
                changed = int(one[column]) + sign * factor, int(other[column]) + sign * rest
                if all(-(1 << 31) <= word < 1 << 31 for word in changed):
                    one[column], other[column] = changed
                    break
    return found
