"""Proves the state of a stage by BLAKE3, in one pass per version."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from typing_extensions import override

from lightning_swarm.model.state_proof import StateDigests, parts_of_optimizer, parts_of_weights
from lightning_swarm.protocol.messages.state import STATE_KINDS, StateKind
from lightning_swarm.server.stage import Stage, StateHash


class StateProofs(StateHash):
    """Hashes a stage's state with `StateDigests`, which resist collisions, and keeps the digests for one version."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._digests: StateDigests | None = None  # digests of the newest version's state

    @override
    def begin(self) -> None:
        self._digests = self._new_digests()

    @override
    def clear(self) -> None:
        self._digests = None

    @override
    def advance(self) -> bool:
        return self._digests is not None and self._digests.advance()

    @override
    def prove(self, challenge: int) -> int:
        return int.from_bytes(self.proof(challenge, STATE_KINDS, self._stage.selection)[:8], "little")

    def proof(self, challenge: int, kinds: Collection[StateKind], context: Any = None) -> bytes:
        """Return a proof of the stage's state and of a value, `context`, under a challenge; see `StateDigests`."""
        digests, new = self._digests, self._new_digests()
        if digests is None or digests.identity != new.identity:  # a tensor was written after `begin`
            digests = self._digests = new
        return digests.proof(challenge, kinds, context)

    def _new_digests(self) -> StateDigests:
        state = self._stage.optimizer.state()
        return StateDigests([*parts_of_weights(self._stage.weights()), *parts_of_optimizer(state)])
