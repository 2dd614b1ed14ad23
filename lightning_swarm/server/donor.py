"""What a member of a stage does for a server that joins: meet it, hand it the state, keep the records that follow."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from lightning_swarm.config import Limits
from lightning_swarm.errors import Busy, PeerError, ProtocolError, TicketGone
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.server import FOLLOW, NEXT
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.executor import Executor
from lightning_swarm.server.snapshots import copied
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.stepping import Stepping
from lightning_swarm.steps import MEET
from lightning_swarm.types.joining import FollowRequest, NextReply, NextRequest
from lightning_swarm.types.steps import Candidate, Record
from lightning_swarm.types.wire import decode, encode

_MAX_MET: Final = 256
_MAX_COPIES: Final = 8  # of a stage, on their way to followers
_HOLD_S: Final = 20.0
_CONNECT_TIMEOUT_S: Final = 8.0  # the coordinator asks for a little longer


@dataclass
class _Follower:
    """A joiner that needs this stage's records from `version` on."""

    stage_index: int
    version: int
    last_heard_s: float
    downloading: bool = True  # until it asks for the first record
    entered: bool = False  # by the last record, which it may still ask for


class Donor:
    """Keeps records, with the mean gradients of this server's stages, as long as a follower needs them.

    Args:
        transport: Its network.
        executor: Computes.
        admission: Knows the run.
        stepping: Its stages.
        limits: Bounds.
    """

    def __init__(
        self, transport: Transport, executor: Executor, admission: Admission, stepping: Stepping, *, limits: Limits
    ) -> None:
        self._transport = transport
        self._executor = executor
        self._admission = admission
        self._stepping = stepping
        self._limits = limits
        self._met: dict[PeerId, Candidate] = {}
        self._followers: dict[PeerId, _Follower] = {}
        self._kept: dict[int, tuple[Record, Mapping[int, Tensor]]] = {}  # by step
        transport.handle_call(MEET, self._handle_meet)
        transport.handle_stream(FOLLOW, self._handle_follow, max_bytes=0)
        transport.handle_stream(NEXT, self._handle_next, max_bytes=0)

    def note(self, record: Record, gradients: Mapping[int, Tensor]) -> None:
        """A record was applied here."""
        self._followers = {peer: one for peer, one in self._followers.items() if not one.entered}
        for newcomer in record.newcomers:
            peer = newcomer.member.peer_id
            self._met.pop(peer, None)
            if peer in self._followers:
                self._followers[peer].entered = True
        if self._followers:
            self._kept[record.step] = (record, gradients)
        self._drop_needless()

    def go_back(self) -> None:
        """The run entered its next generation: whoever followed the old one begins again."""
        self._followers.clear()
        self._kept.clear()

    async def _handle_meet(self, caller: PeerId, body: bytes) -> bytes:
        """The coordinator's word that somebody joins."""
        if not self._admission.led_by(caller):
            raise ProtocolError(f"who joins is introduced by the coordinator, not by {caller}")
        candidate = decode(body, Candidate)
        peer = candidate.member.peer_id
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._transport.connect(candidate.addresses)
        except TimeoutError:
            raise PeerError(f"no connection to {peer} within {_CONNECT_TIMEOUT_S:g} s") from None
        self._met.pop(peer, None)
        self._followers.pop(peer, None)  # it joins anew, so what it followed is no use to it
        self._met[peer] = candidate
        # Who downloads stays, for as long as that may take.
        for other in [one for one in self._met if one not in self._followers][: max(0, len(self._met) - _MAX_MET)]:
            del self._met[other]
        return b""

    async def _handle_follow(self, caller: PeerId, message: Message) -> Message:
        stage = self._asked_stage(caller, decode(message.body, FollowRequest).stage_index)
        if stage.index not in self._admission.loaded:
            raise Busy(f"stage {stage.index} has no weights here yet")
        self._check_copies(caller)
        # Before the copy is made: of what is applied after it nothing may be missed.
        now_s = asyncio.get_running_loop().time()
        follower = self._followers[caller] = _Follower(stage.index, self._stepping.version, now_s)
        # On the compute thread, so that it falls between two records.
        message, _ = await self._executor.submit((-1,), lambda: copied(stage, self._admission.run.manifest.generation))
        follower.last_heard_s = asyncio.get_running_loop().time()
        return message

    async def _handle_next(self, caller: PeerId, message: Message) -> Message:
        request = decode(message.body, NextRequest)
        stage = self._asked_stage(caller, request.stage_index)
        follower = self._followers.get(caller)
        self._check_generation(request.generation)
        if follower is None or follower.stage_index != stage.index:
            raise TicketGone("no records are kept here for this peer (any more); it has to begin again")
        follower.version, follower.last_heard_s = request.version, asyncio.get_running_loop().time()
        follower.downloading = False
        self._drop_needless()
        await self._stepping.passed(request.version, within_s=min(request.hold_s, _HOLD_S))
        self._check_generation(request.generation)  # it may have changed meanwhile
        if request.version >= self._stepping.version:
            return Message(encode(NextReply(record=None)))
        if request.version not in self._kept:
            self._followers.pop(caller, None)
            raise TicketGone(f"record {request.version} is not kept here (any more); the joiner has to begin again")
        record, gradients = self._kept[request.version]
        return Message(encode(NextReply(record=record)), (gradients[stage.index].cpu(),))

    def _check_copies(self, caller: PeerId) -> None:
        """Refuse to copy a stage once more for who has a copy on its way, or when many have."""
        oldest_s = asyncio.get_running_loop().time() - self._limits.join_timeout
        downloading = {
            peer for peer, one in self._followers.items() if one.downloading and one.last_heard_s >= oldest_s
        }
        if caller in downloading or len(downloading) >= _MAX_COPIES:
            raise Busy(f"{len(downloading)} peers download from here, at most {_MAX_COPIES} may, each once for a join")

    def _check_generation(self, generation: int) -> None:
        if generation != self._admission.run.manifest.generation:
            raise TicketGone("the run went back; who follows its records has to begin again")

    def _asked_stage(self, caller: PeerId, stage_index: int) -> Stage:
        stage = self._stepping.stage(stage_index)
        candidate = self._met.get(caller)
        known = candidate is not None and candidate.stage_index == stage_index
        # Its record may have been applied here before it was there.
        if not known and caller not in (member.peer_id for member in self._admission.run.rosters[stage_index]):
            raise ProtocolError(f"{caller} was not introduced as one that joins stage {stage_index}")
        return stage

    def _drop_needless(self) -> None:
        """Keep what some follower still needs, within bounds; those that need the oldest begin again."""
        oldest_s = asyncio.get_running_loop().time() - self._limits.join_timeout
        followers = {peer: one for peer, one in self._followers.items() if one.last_heard_s >= oldest_s}
        while True:
            first = min((one.version for one in followers.values()), default=None)
            kept = {step: one for step, one in self._kept.items() if first is not None and step >= first}
            num_bytes = sum(tensor.nbytes for _, gradients in kept.values() for tensor in gradients.values())
            if num_bytes <= self._limits.join_bytes:
                break
            followers = {peer: one for peer, one in followers.items() if one.version != first}
        self._followers, self._kept = followers, kept
