"""Digests of the first steps of sessions, by which clients that share prefixes name them.

Each server computes these digests from the steps that it received and from the outputs that it sent on, so a message
cannot give a prefix the digest of another one. The digest of what a stage sent is the next stage's of what it received.
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
    """A step as a stage receives it: with caches and weights, it determines the step's results there and later."""

    stage_index: int
    modes: Sequence[ComputeMode]  # of this stage and of the later ones
    adapters: Sequence[bytes | None]  # likewise; empty: none
    recipe: CacheRecipe | None
    exact: bool  # computed alone, so that its rounding does not depend on other texts
    tree: serialization.Tree  # hidden state and extras

    def digest(self, before: bytes) -> bytes:
        """Return the digest of the steps up to this one, from the digest of the steps before it."""
        structure, tensors = serialization.flatten(self.tree)
        head = (before, self.stage_index, self.modes, self.adapters, self.recipe, self.exact, structure)
        return digest(tensors, msgspec.msgpack.encode(head))


@dataclass(eq=False)
class PrefixDigests:
    """The digests of a session's steps at a stage, as received and as sent to the next stage."""

    received: bytes = b""
    sent: bytes = b""
    found: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)  # received -> (number of steps, sent)

    def add(self, number: int, received: bytes, sent: bytes) -> None:
        """Add the digests of the steps up to `number`."""
        self.received, self.sent = received, sent
        self.found[received] = number, sent

    def upto(self, number: int) -> PrefixDigests:
        """Return the digests of the steps up to `number`."""
        found = {received: entry for received, entry in self.found.items() if entry[0] <= number}
        received = next(reversed(found))
        return PrefixDigests(received, found[received][1], found)
