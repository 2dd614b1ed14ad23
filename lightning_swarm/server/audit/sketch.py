"""Random projections of long vectors: sketches of a sum's parts add up to the sketch of the sum.

A seed is drawn after the vectors are fixed, so a malicious peer cannot choose a vector whose sketch hides its errors.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from lightning_swarm.model.random.keyed_stream import bits, key_seed
from lightning_swarm.protocol.messages.parts import SKETCH_LENGTH

_SLICE: Final = 1 << 20  # elements that are projected at once; a multiple of the buckets and of the bits of a word
_WORD: Final = 32  # bits of a random word; each bit gives one sign


def project(values: Tensor, seed: int, *, num_buckets: int = SKETCH_LENGTH) -> Tensor:
    """Project a float vector ``[n]`` to ``[num_buckets]`` float64 on the CPU; this keeps the squared norm on average.

    Each element is added to one bucket, with a random sign. `num_buckets` divides 2**20.
    """
    total = torch.zeros(num_buckets, dtype=torch.float64)
    for number, part in enumerate(values.split(_SLICE)):
        # Computed on the vector's device, so that a GPU sends only the buckets.
        signed = part.to(torch.float64) * _signs(key_seed(seed, number), len(part), part.device)
        total += in_buckets(signed, num_buckets)
    return total


def in_buckets(values: Tensor, num_buckets: int) -> Tensor:
    """Sum a vector ``[n]`` into ``[num_buckets]`` on the CPU, with the same buckets as in `project`."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % num_buckets))
    return padded.view(-1, num_buckets).sum(dim=0).cpu()


def _signs(key: int, length: int, device: torch.device) -> Tensor:
    """Draw ``[length]`` random signs, 1 or -1."""
    words = bits(key, -(-length // _WORD), device).unsqueeze(1)
    shifts = torch.arange(_WORD, dtype=torch.int32, device=device)
    return ((words >> shifts).bitwise_and_(1).mul_(2).sub_(1)).view(-1)[:length]
