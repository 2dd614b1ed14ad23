"""Downloads a stage for a joiner: from one replica, and in pieces from others that help."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from lightning_swarm.core.errors import Busy, DeadlineExceeded, PeerError, ProtocolError, SwarmError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import ended, gather
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.protocol.messages.membership import FollowReply, FollowRequest, PieceRequest
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import FOLLOW, PIECE
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.state_transfer.stage_copy import IncomingSnapshot

_log = logging.getLogger(__name__)

PIECE_BYTES: Final = 4 << 20
"""The bytes that are asked for at once; a donor may send less."""

_MAX_HELPERS: Final = 3
_PULLS: Final = 2
"""Pieces that are asked of a donor at once, so that its link is never idle."""

_MAX_HEAD_BYTES: Final = 0  # the head is all in the body
_BUSY_S: Final = 1.0
_HOLD_S: Final = 15.0  # for a place, at all replicas together
_RELEASE_S: Final = 2.0


class StageDownload:
    """The download of one stage. `stage`, of the joiner's own copy of the model, says what the tensors must be."""

    def __init__(self, transport: Transport, stage: Stage, *, limits: Limits) -> None:
        self._transport = transport
        self._stage = stage
        self._limits = limits
        self._missing: dict[int, int] = {}  # the end of each missing piece, by its begin
        self._asked: dict[int, set[PeerId]] = {}  # the peers that were asked for a piece, by its begin
        self.helpers: set[PeerId] = set()  # peers that sent a piece beside the donor
        self._copied: list[PeerId] = []  # peers that hold a copy for this one beside the donor

    async def download(self, donors: Sequence[PeerId], *, alone: bool) -> tuple[PeerId, IncomingSnapshot]:
        """Download all of a stage; returns also the replica that keeps the records from its version on.

        The donors are asked in their order; with `alone`, one of them sends everything. Raises `PeerError` if the donor
        is gone, or no longer holds the copy, and `DeadlineExceeded` after `Limits.join_timeout`.
        """
        try:
            async with asyncio.timeout(self._limits.join_timeout):
                donor, head = await self._follow_first(donors)
                incoming = IncomingSnapshot(head, self._stage, max_bytes=self._limits.max_message_bytes)
                self._missing = {
                    start: min(start + PIECE_BYTES, incoming.num_bytes)
                    for start in range(0, incoming.num_bytes, PIECE_BYTES)
                }
                others = [] if alone else [peer for peer in donors if peer != donor][:_MAX_HELPERS]
                await self._pull_all(donor, others, incoming)
                return donor, incoming
        except TimeoutError:
            raise DeadlineExceeded(
                f"stage {self._stage.index} was not here within `Limits.join_timeout` = {self._limits.join_timeout:g} s"
            ) from None

    async def _follow_first(self, donors: Sequence[PeerId]) -> tuple[PeerId, FollowReply]:
        """Follow the first donor that has a place; joiners wait for one, for a few are served at a time."""
        hold_s = 0.0
        while True:
            for donor in donors:
                try:
                    return donor, await self._follow(donor, None, hold_s=hold_s / len(donors))
                except Busy as error:
                    _log.info("%s has no place for one more download: %s", donor, error)
            await asyncio.sleep(_BUSY_S if hold_s else 0.0)  # it may be busy with something else, and not wait
            hold_s = _HOLD_S

    async def _follow(self, donor: PeerId, version: int | None, *, hold_s: float = 0.0) -> FollowReply:
        request = Message(encode(FollowRequest(stage_index=self._stage.index, version=version, hold_s=hold_s)))
        timeout = hold_s + self._limits.call_timeout
        message = await self._transport.stream(donor, FOLLOW, request, timeout=timeout, max_bytes=_MAX_HEAD_BYTES)
        head = decode(message.body, FollowReply)
        there = head.snapshot
        if there.stage_index != self._stage.index or version not in (None, there.version):
            raise ProtocolError(
                f"stage {self._stage.index} was asked for, at version {version}; {donor} has stage {there.stage_index} "
                f"at version {there.version}"
            )
        return head

    async def _pull_all(self, donor: PeerId, others: Sequence[PeerId], incoming: IncomingSnapshot) -> None:
        helping = asyncio.ensure_future(gather(self._help(peer, incoming) for peer in others))
        try:
            await gather(self._pull(donor, incoming, to_the_end=True) for _ in range(_PULLS))
        finally:
            await ended([helping])
        if not helping.cancelled():
            helping.result()
        await gather(self._release(peer, incoming) for peer in self._copied)

    async def _help(self, peer: PeerId, incoming: IncomingSnapshot) -> None:
        """Have one more replica send pieces. That it cannot is no fault."""
        try:
            head = await self._follow(peer, incoming.head.snapshot.version)
            self._copied.append(peer)
            if head != incoming.head:
                raise ProtocolError(f"stage {self._stage.index} is not the same at {peer}")
            await gather(self._pull(peer, incoming, to_the_end=False) for _ in range(_PULLS))
        except SwarmError as error:
            _log.info("%s does not help with the download: %s", peer, error)

    async def _pull(self, peer: PeerId, incoming: IncomingSnapshot, *, to_the_end: bool) -> None:
        """Ask for pieces, one after the other; `to_the_end`: also those that other peers were asked for."""
        while (start := self._next_piece(peer, to_the_end=to_the_end)) is not None:
            asked = self._asked.setdefault(start, set())
            asked.add(peer)
            stop = self._missing[start]
            try:
                message = await self._piece(peer, incoming, start, stop)
            except Busy:
                if not to_the_end:
                    return
                await asyncio.sleep(_BUSY_S)
                continue
            finally:
                asked.discard(peer)
            if self._missing.get(start) != stop:
                continue  # another peer was quicker
            num_bytes = incoming.fill(start, message.tensors, at_most=stop - start)
            del self._missing[start]
            if start + num_bytes < stop:
                self._missing[start + num_bytes] = stop
            if not to_the_end:
                self.helpers.add(peer)

    def _next_piece(self, peer: PeerId, *, to_the_end: bool) -> int | None:
        free = (start for start in self._missing if not self._asked.get(start))
        owed = (start for start in self._missing if to_the_end and peer not in self._asked.get(start, ()))
        return next(free, None) if not to_the_end else next(free, next(owed, None))

    async def _piece(self, peer: PeerId, incoming: IncomingSnapshot, start: int, stop: int) -> Message:
        request = PieceRequest(
            stage_index=self._stage.index, version=incoming.head.snapshot.version, start=start, stop=stop
        )
        timeout = self._limits.call_timeout if stop > start else _RELEASE_S
        return await self._transport.stream(
            peer, PIECE, Message(encode(request)), timeout=timeout, max_bytes=stop - start
        )

    async def _release(self, peer: PeerId, incoming: IncomingSnapshot) -> None:
        try:
            await self._piece(peer, incoming, 0, 0)
        except PeerError as error:
            _log.info("%s was not told that the download is done: %s", peer, error)
