"""The digest by which calls name an adapter to a server."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_swarm.model.fingerprint import digest
from lightning_swarm.protocol.messages.tuning import Lora
from lightning_swarm.protocol.messages.wire import encode


def adapter_digest(stage: int, loras: Sequence[Lora], tensors: Sequence[Tensor]) -> bytes:
    """Return the name of an adapter's part of a stage: the BLAKE3 digest of all that its outputs depend on."""
    head = b"".join(map(encode, loras))
    return digest(tensors, f"adapter of stage {stage};{len(head)};".encode() + head)
