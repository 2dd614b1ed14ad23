"""A joiner's download: one member is followed, others help with pieces as long as they are at the same version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from lightning_swarm.config import Limits
from lightning_swarm.errors import Busy, DeadlineExceeded, PeerError, ProtocolError, SwarmError
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.server import FOLLOW, PIECE
from lightning_swarm.server.pieces import Blank
from lightning_swarm.server.stage import Stage
from lightning_swarm.tasks import ended, gather
from lightning_swarm.types.joining import FollowReply, FollowRequest, PieceRequest
from lightning_swarm.types.wire import decode, encode

_log = logging.getLogger(__name__)

PIECE_BYTES: Final = 4 << 20
"""What is asked for at once; a donor may send less."""

_MAX_HELPERS: Final = 3
_PULLS: Final = 2
"""Pieces that are asked of a donor at once, so that its line is never idle."""

_MAX_HEAD_BYTES: Final = 0  # the head is all in the body
_BUSY_S: Final = 1.0
_HOLD_S: Final = 15.0  # for a place, at all members together
_RELEASE_S: Final = 2.0


class Download:
    """Of one stage.

    Args:
        transport: The joiner's.
        stage: Of its own copy of the model: says what the tensors must be.
        limits: Bounds.
    """

    def __init__(self, transport: Transport, stage: Stage, *, limits: Limits) -> None:
        self._transport = transport
        self._stage = stage
        self._limits = limits
        self._missing: dict[int, int] = {}  # pieces: where each begins, and ends
        self._asked: dict[int, set[PeerId]] = {}  # of whom, by where a piece begins
        self.helpers: set[PeerId] = set()  # who sent a piece beside the donor
        self._copied: list[PeerId] = []  # who holds a copy for this peer beside the donor

    async def run(self, donors: Sequence[PeerId], *, alone: bool) -> tuple[PeerId, Blank]:
        """All of it, and which member keeps the records from its version on.

        Args:
            donors: The stage's members, in the order in which to ask them.
            alone: Have one of them send everything.

        Raises:
            PeerError: The donor is gone, or no longer holds it.
            DeadlineExceeded: It took longer than `Limits.join_timeout`.
        """
        try:
            async with asyncio.timeout(self._limits.join_timeout):
                donor, head = await self._first(donors)
                blank = Blank(head, self._stage, max_bytes=self._limits.max_message_bytes)
                self._missing = {
                    start: min(start + PIECE_BYTES, blank.num_bytes) for start in range(0, blank.num_bytes, PIECE_BYTES)
                }
                others = [] if alone else [peer for peer in donors if peer != donor][:_MAX_HELPERS]
                await self._pull_all(donor, others, blank)
                return donor, blank
        except TimeoutError:
            raise DeadlineExceeded(
                f"stage {self._stage.index} was not here within `Limits.join_timeout` = {self._limits.join_timeout:g} s"
            ) from None

    async def _first(self, donors: Sequence[PeerId]) -> tuple[PeerId, FollowReply]:
        """The first that is not busy with others. It is waited for: they are served a few at once."""
        hold_s = 0.0
        while True:
            for donor in donors:
                try:
                    return donor, await self._follow(donor, None, hold_s=hold_s / len(donors))
                except Busy as error:
                    _log.info("%s has no time for one more download: %s", donor, error)
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

    async def _pull_all(self, donor: PeerId, others: Sequence[PeerId], blank: Blank) -> None:
        helping = asyncio.ensure_future(gather(self._help(peer, blank) for peer in others))
        try:
            await gather(self._pull(donor, blank, to_the_end=True) for _ in range(_PULLS))
        finally:
            await ended([helping])
        if not helping.cancelled():
            helping.result()
        await gather(self._release(peer, blank) for peer in self._copied)

    async def _help(self, peer: PeerId, blank: Blank) -> None:
        """Have one more member send pieces. That it cannot is no fault."""
        try:
            head = await self._follow(peer, blank.head.snapshot.version)
            self._copied.append(peer)
            if head != blank.head:
                raise ProtocolError(f"stage {self._stage.index} is not the same at {peer}")
            await gather(self._pull(peer, blank, to_the_end=False) for _ in range(_PULLS))
        except SwarmError as error:
            _log.info("%s does not help with the download: %s", peer, error)

    async def _pull(self, peer: PeerId, blank: Blank, *, to_the_end: bool) -> None:
        """Ask for pieces, one after the other. `to_the_end`: for those, too, that others were asked for and owe."""
        while (start := self._next(peer, to_the_end=to_the_end)) is not None:
            asked = self._asked.setdefault(start, set())
            asked.add(peer)
            stop = self._missing[start]
            try:
                message = await self._piece(peer, blank, start, stop)
            except Busy:
                if not to_the_end:
                    return
                await asyncio.sleep(_BUSY_S)
                continue
            finally:
                asked.discard(peer)
            if self._missing.get(start) != stop:
                continue  # another one was quicker
            num_bytes = blank.fill(start, message.tensors, at_most=stop - start)
            del self._missing[start]
            if start + num_bytes < stop:
                self._missing[start + num_bytes] = stop
            if not to_the_end:
                self.helpers.add(peer)

    def _next(self, peer: PeerId, *, to_the_end: bool) -> int | None:
        free = (start for start in self._missing if not self._asked.get(start))
        owed = (start for start in self._missing if to_the_end and peer not in self._asked.get(start, ()))
        return next(free, None) if not to_the_end else next(free, next(owed, None))

    async def _piece(self, peer: PeerId, blank: Blank, start: int, stop: int) -> Message:
        request = PieceRequest(
            stage_index=self._stage.index, version=blank.head.snapshot.version, start=start, stop=stop
        )
        timeout = self._limits.call_timeout if stop > start else _RELEASE_S
        return await self._transport.stream(
            peer, PIECE, Message(encode(request)), timeout=timeout, max_bytes=stop - start
        )

    async def _release(self, peer: PeerId, blank: Blank) -> None:
        try:
            await self._piece(peer, blank, 0, 0)
        except PeerError as error:
            _log.info("%s was not told that the download is through: %s", peer, error)
