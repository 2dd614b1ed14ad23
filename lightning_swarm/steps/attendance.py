"""Which servers take part in a step that closes, and who is done without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from lightning_swarm.errors import DeadlineExceeded, StepError, SwarmError
from lightning_swarm.events import EventLog
from lightning_swarm.network import PeerId
from lightning_swarm.run_state import RunState
from lightning_swarm.steps.servers import Servers
from lightning_swarm.types.runs import Member

_MAX_BLAMELESS: Final = 3


class Attendance:
    """In one step.

    Args:
        run: As the coordinator's server knows it.
        servers: All that hold a stage. Who does not know what the step trains takes no part in it.
        step: Its number.
        events: Of the coordinator.

    Attributes:
        gone: Who takes no part in the step any more, and why.
    """

    def __init__(self, run: RunState, servers: Servers, step: int, events: EventLog) -> None:
        self._run = run
        self._own = servers.own
        self._step = step
        self._events = events
        self._num_blameless = 0
        self._suspected: Counter[PeerId] = Counter()
        self.gone: dict[PeerId, SwarmError] = {}
        for peer, error in servers.unsettled.items():
            self.lose(peer, error)

    @property
    def rosters(self) -> list[list[Member]]:
        """Of each stage, who is there."""
        return self._run.present(self.gone)

    @property
    def peers(self) -> list[PeerId]:
        """All who are there."""
        return sorted({member.peer_id for roster in self.rosters for member in roster})

    def lose(self, peer: PeerId, error: SwarmError) -> None:
        """Go on without a server.

        Raises:
            SwarmError: It is the coordinator's own.
        """
        if peer == self._own:
            raise error
        if peer not in self.gone:
            self._events.note("gone", peer=peer, step=self._step, reason=str(error))
        self.gone[peer] = error

    def suspect(self, peer: PeerId, error: SwarmError) -> None:
        """Go on without a server; but not yet if it only was not heard of in time: a message may have been lost."""
        self._suspected[peer] += 1
        if self._suspected[peer] > 1 or not isinstance(error, DeadlineExceeded):
            self.lose(peer, error)

    def note_blameless(self, reason: str) -> None:
        """A round failed, and everybody was there: a message was damaged, perhaps.

        Raises:
            StepError: That happens too often.
        """
        self._num_blameless += 1
        if self._num_blameless > _MAX_BLAMELESS:
            raise StepError(f"{self._num_blameless} rounds failed, and nobody is gone: {reason}")

    def look_again(self, peers: Iterable[PeerId]) -> None:
        """They may have come back."""
        for peer in peers:
            self.gone.pop(peer, None)
