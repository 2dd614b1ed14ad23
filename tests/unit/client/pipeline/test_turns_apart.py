"""Which microbatches begin one behind the other."""

from __future__ import annotations

import pytest
import torch

from lightning_swarm.client.pipeline.pipeline import turns_apart
from lightning_swarm.network import SMALL_BYTES
from lightning_swarm.protocol.serialization import Tree


@pytest.mark.parametrize(
    ("sent", "are_apart"),
    [
        (torch.zeros(SMALL_BYTES, dtype=torch.uint8), False),
        (torch.zeros(SMALL_BYTES + 1, dtype=torch.uint8), True),
        ({"hidden": torch.zeros(SMALL_BYTES, dtype=torch.uint8), "mask": [torch.zeros(1)]}, True),
        ([], False),
    ],
    ids=["small", "large", "large together", "nothing"],
)
def test_what_does_not_travel_beside_calls_begins_apart(sent: Tree, are_apart: bool) -> None:
    assert (turns_apart(sent) > 0) == are_apart
