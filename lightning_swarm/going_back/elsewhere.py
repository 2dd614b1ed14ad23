"""At the lead: its loop's state goes to peers that could take the run over, once for each snapshot."""

from __future__ import annotations

from functools import partial

from lightning_swarm.assembly import Peer
from lightning_swarm.data import STATE
from lightning_swarm.going_back import inheritance
from lightning_swarm.going_back.orders import Orders
from lightning_swarm.going_back.states import Between, LoopStates
from lightning_swarm.session import Session


class Elsewhere:
    """Has others keep what the lead's loop is at.

    Of several trainers it can be gone on from where their place in the data is the run's. Others have each their own.

    Args:
        peer: The trainer's.
        session: In the run. If it does not lead, nothing is sent.
        states: Of its loop.
        orders: Of snapshots.
    """

    def __init__(self, peer: Peer, session: Session, states: LoopStates, orders: Orders) -> None:
        self._peer = peer
        self._session = session
        self._states = states
        self._orders = orders
        self._newest: int | None = None  # that was sent
        self._left_out: set[str] = set()  # what was warned of

    def look(self) -> None:
        """The loop is between two batches, or its next one has a place: records may have come in between."""
        session, version = self._session, self._session.version
        if not session.is_lead or version == self._newest or version not in self._orders.versions:
            return
        between = self._states.find(version)
        if between is None or between.heard_at(version).lost or (session.is_shared and not _is_at_a_batch(between)):
            return
        self._newest = version
        position = session.run.position_at(version)
        self._peer.keep_loop(version, partial(inheritance.pack, between, version, position, self._left_out))


def _is_at_a_batch(between: Between) -> bool:
    """Whether its place in the data is a batch that all trainers know by its number."""
    return STATE in between.state.checkpoint["loops"]["fit_loop"]["state_dict"]
