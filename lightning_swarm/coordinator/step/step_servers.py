"""Tracks the servers that take part in one step, and excludes servers that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.server_calls import ServerCalls, ServerSilent
from lightning_swarm.core.errors import DeadlineExceeded, StepError, SwarmError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Member

_MAX_FAILED_ROUNDS: Final = 3  # failed rounds of a step although no server is gone


class StepServers:
    """The servers that take part in one step, and the servers that were excluded from it."""

    def __init__(self, context: CoordinatorContext, servers: ServerCalls, step: int) -> None:
        self._run, self._events, self._oversight = context.run, context.events, context.oversight
        self._own, self._step = servers.own, step
        self._num_failed_rounds = 0
        self._suspected: Counter[PeerId] = Counter()
        self.gone: dict[PeerId, SwarmError] = {}  # excluded server -> reason
        for peer, error in servers.unsettled.items():  # servers without the change with which the step began
            self.exclude(peer, error)

    @property
    def rosters(self) -> list[list[Member]]:
        """The present members of each stage."""
        return self._run.present(self.gone)

    @property
    def peers(self) -> list[PeerId]:
        """All present servers."""
        return sorted({member.peer_id for roster in self.rosters for member in roster})

    def exclude(self, peer: PeerId, error: SwarmError) -> None:
        """Exclude a server from the step; raise the error if it is the coordinator's own."""
        if peer == self._own:
            raise error
        if peer not in self.gone:
            self._events.note("gone", peer=peer, step=self._step, reason=str(error))
            if isinstance(error, ServerSilent) and not self._run.electorate.is_keeper(peer):
                self._oversight.note_silence(peer, self._step)
        self.gone[peer] = error

    def suspect(self, peer: PeerId, error: SwarmError) -> None:
        """Exclude a server, but not for its first timeout, because a message may have been lost."""
        self._suspected[peer] += 1
        if self._suspected[peer] > 1 or not isinstance(error, DeadlineExceeded):
            self.exclude(peer, error)

    def note_failed_round(self, reason: str, involved: Collection[PeerId]) -> None:
        """Count a round that failed although no server is gone; perhaps a message was damaged.

        If that happens too often, exclude the `involved` servers, or raise StepError if these are all servers.
        """
        self._num_failed_rounds += 1
        if self._num_failed_rounds <= _MAX_FAILED_ROUNDS:
            return
        error = StepError(f"{self._num_failed_rounds} rounds failed, and no server is gone: {reason}")
        if set(involved) >= set(self.peers):
            raise error
        for peer in involved:
            self.exclude(peer, error)
