"""Digests of the first steps of sessions, by which clients name prefixes that several texts share.

Each server computes these digests from the inputs that it received and from the outputs that it sent to the next stage,
so a message cannot give a prefix the digest of another prefix. A stage's digest of its outputs equals the next stage's
digest of its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from lightning_swarm.model.fingerprint import digest
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.inference import CacheRecipe


@dataclass(frozen=True, kw_only=True)
class StageInput:
    """A step as a stage receives it. With caches and weights, it determines the results of this and later stages."""

    stage_index: int
    modes: Sequence[ComputeMode]  # one each for this stage and later stages
    adapters: Sequence[bytes | None]  # one each for this stage and later stages; empty: no adapters
    recipe: CacheRecipe | None
    exact: bool  # the step is computed alone, so that its rounding does not depend on other texts
    tree: serialization.Tree  # hidden state and extras

    def digest(self, before: bytes) -> bytes:
        """Return the digest of all steps up to this step, from `before`, the digest of the earlier steps."""
        structure, tensors = serialization.flatten(self.tree)
        head = (before, self.stage_index, self.modes, self.adapters, self.recipe, self.exact, structure)
        return digest(tensors, msgspec.msgpack.encode(head))


@dataclass(eq=False)
class PrefixDigests:
    """The digests of a session's steps at a stage, as received and as sent to the next stage."""

    received: bytes = b""
    sent: bytes = b""
    by_received: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)  # received -> (number of steps, sent)

    def add(self, number: int, received: bytes, sent: bytes) -> None:
        """Add the digests of the steps up to `number`."""
        self.received, self.sent = received, sent
        self.by_received[received] = number, sent

    def upto(self, number: int) -> PrefixDigests:
        """Return the digests of the steps up to `number`, which include the first step."""
        kept = {received: entry for received, entry in self.by_received.items() if entry[0] <= number}
        received = next(reversed(kept))
        return PrefixDigests(received, kept[received][1], kept)
