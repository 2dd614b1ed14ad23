"""At the lead: what its loop is at goes to a few peers that could take the run over, with each snapshot."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from torch import Tensor

from lightning_swarm.config import Limits
from lightning_swarm.errors import SwarmError
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.server import KEEP_LOOP
from lightning_swarm.steps.succession import seniority
from lightning_swarm.tasks import gather
from lightning_swarm.types.snapshots import KeptLoop
from lightning_swarm.types.wire import encode

_log = logging.getLogger(__name__)

_NUM_HEIRS: Final = 3
"""Of those that are there. One that dies takes what it has along."""

_MAX_TRIED: Final = 4 * _NUM_HEIRS
"""For one snapshot; those that did not take it are tried after all others for the next."""

PackLoop = Callable[[], Sequence[Tensor]]
"""What travels of a loop's state; called if there is somebody to send it to. Raises `NotPlain` where it cannot."""


class Heirs:
    """Those of a run, as its lead knows them.

    Args:
        transport: The lead's.
        known: Names the peers that announced that they could take a run over.
        limits: Bounds.

    Attributes:
        holding: Who was sent the newest state.
    """

    def __init__(
        self, transport: Transport, known: Callable[[], Awaitable[Collection[PeerId]]], *, limits: Limits
    ) -> None:
        self._transport = transport
        self._known = known
        self._limits = limits
        self._warned = False
        self._deaf: set[PeerId] = set()  # did not take what they were sent last
        self.holding: Collection[PeerId] = ()

    async def send(self, run: RunState, version: int, pack: PackLoop) -> None:
        """Send what the loop was at when the weights had this version. Who does not take it is no heir."""
        generation, known = run.manifest.generation, set(await self._known()) - {self._transport.peer_id}
        chosen = sorted((peer for peer in seniority(run) if peer in known), key=self._deaf.__contains__)
        if not chosen:
            self.holding = ()
            return
        try:
            tensors = pack()
        except SwarmError as error:
            self._warn(str(error))
            return
        size = sum(tensor.nbytes for tensor in tensors)
        if size > self._limits.loop_bytes:
            self._warn(f"it has {size} bytes, and `Limits.loop_bytes` are {self._limits.loop_bytes}: raise that")
            return
        message = Message(encode(KeptLoop(generation=generation, version=version)), tuple(tensors))
        self.holding = await self._keep_at_some(chosen[:_MAX_TRIED], message) or self.holding

    async def _keep_at_some(self, peers: Sequence[PeerId], message: Message) -> list[PeerId]:
        """Those that keep it: as many as there shall be, the first of these peers that do."""
        kept: list[PeerId] = []
        while peers and len(kept) < _NUM_HEIRS:
            missing = _NUM_HEIRS - len(kept)
            tried, peers = peers[:missing], peers[missing:]
            there = await gather(self._keeps(peer, message) for peer in tried)
            kept += [peer for peer, keeps in zip(tried, there, strict=True) if keeps]
        return kept

    async def _keeps(self, peer: PeerId, message: Message) -> bool:
        self._deaf.add(peer)  # until it answers: the next snapshot's state breaks this off
        try:
            await self._transport.stream(peer, KEEP_LOOP, message, timeout=self._limits.call_timeout, max_bytes=0)
        except SwarmError as error:
            _log.info("%s does not keep the state of this trainer's loop: %s", peer, error)
            return False
        self._deaf.discard(peer)
        return True

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "Nobody could take this run over if this process died, for its loop's state stays here: %s", reason
            )
