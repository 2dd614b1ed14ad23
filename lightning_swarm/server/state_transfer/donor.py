"""Brings a joiner into a stage: a replica connects to it, sends it the state, and keeps the records that follow."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from lightning_swarm.coordinator.membership.servers import JoinBackoff
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, PeerError, ProtocolError, TicketGone
from lightning_swarm.core.readable import short_name
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.messages.membership import (
    FollowReply,
    FollowRequest,
    NextReply,
    NextRequest,
    PieceRequest,
)
from lightning_swarm.protocol.messages.run import RecordDigestReply, SeatedMembers, StepRequest
from lightning_swarm.protocol.messages.step import Candidate, Record
from lightning_swarm.protocol.rpc import FOLLOW, MEET, NEXT, PIECE, RECORD_DIGEST, WithTensors
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.gradients import WrittenByStage
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.state_transfer.stage_copy import StageCopy
from lightning_swarm.server.step_handlers import StepHandlers

_MAX_INTRODUCED: Final = 256  # most introduced joiners that are remembered
_MAX_JOINING: Final = 3  # most joiners at once; further joiners wait, so that each joins sooner
_MAX_PIECES: Final = 4  # most pieces in transit to one peer
_MAX_PIECE_BYTES: Final = 4 << 20
_MIN_PIECE_BYTES: Final = 64 << 10
_IDLE_S: Final = 60.0  # seconds without a request after which a download is dropped
_MIN_BYTES_PER_S: Final = 64 << 10  # lowest mean rate of a download, because other joiners wait for its slot
# After its download, a joiner must be admitted within this many records, plus as many as it missed meanwhile.
_RECORDS_TO_ADMIT: Final = 16
_HOLD_S: Final = 20.0  # longest time that a request may wait here
_KEEP_TURN_S: Final = 30.0  # a joiner without a slot keeps its turn for this time between two of its requests
_CATCH_UP: Final = 4.0  # missed records are sent at least this many times as fast as new records come
_CONNECT_TIMEOUT_S: Final = 8.0  # a little less than the coordinator's own timeout


class Throttle:
    """Limits the mean number of bytes sent per second; requests are served in order."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # time when all admitted bytes are sent

    async def acquire(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may be sent."""
        wait_s = self._free_s - now_s()
        self.charge(num_bytes)
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)

    def charge(self, num_bytes: int) -> None:
        """Count bytes that are sent without waiting, so that later requests wait longer."""
        self._free_s = max(self._free_s, now_s()) + num_bytes / self._bytes_per_s


@dataclass
class _Follower:
    """A joiner whose donor is this server, and that needs the stage's records from `version` on."""

    stage_index: int
    version: int
    last_heard_s: float
    admit_by: int | None = None  # version by which a record must admit it, or it loses its slot; None: it downloads
    is_admitted: bool = False  # the last record admitted it, and it may still request that record


@dataclass
class _Download:
    """A joiner's download from this server, in progress."""

    began_s: float
    last_heard_s: float
    num_bytes: int = 0  # bytes sent
    copy: StageCopy | None = None  # None: the copy is being made
    num_pieces: int = 0  # pieces in transit


@dataclass
class _DonorGeneration:
    """The donor's followers, copies and records, none of which outlive a generation of the run."""

    followers: dict[PeerId, _Follower] = field(default_factory=dict)
    downloads: dict[PeerId, _Download] = field(default_factory=dict)
    copies: dict[int, StageCopy] = field(default_factory=dict)  # stage -> newest copy, while a peer downloads it
    # step -> record, its mean gradients, weights written before it, and the members before it
    kept: dict[int, tuple[Record, Mapping[int, Tensor], WrittenByStage, SeatedMembers]] = field(default_factory=dict)


# The coordinator introduces a joiner to the members of its stage (MEET). The joiner chooses one of them, its donor, and
# follows it (FOLLOW without a version): it downloads the newest state in pieces (PIECE), and then requests the records
# that came since (NEXT) until it has caught up. Other members only help: they send pieces of the same version, which
# FOLLOW names there. The digests of the records (RECORD_DIGEST) come from other servers, so that the joiner need not
# trust its donor.
class Donor:
    """Sends this server's stages to joiners, and keeps records with their mean gradients while joiners need them."""

    def __init__(self, context: ServerContext, steps: StepHandlers) -> None:
        transport, limits = context.transport, context.limits
        self._transport, self._limits, self._compute = transport, limits, context.compute
        self._membership, self._steps = context.membership, steps
        self._state = _DonorGeneration()
        self._introduced: dict[PeerId, Candidate] = {}  # joiners that the coordinator introduced here
        self._membership.introduced = self._introduced
        self._queued: set[PeerId] = set()  # joiners that wait for a slot
        self._turns: dict[PeerId, float] = {}  # joiners without a slot, by their first request -> time of the last one
        self._backoff = JoinBackoff()  # delays joiners that began downloads and never joined
        self._freed = asyncio.Event()  # set when a slot may be free, and then replaced
        self._throttle = Throttle(limits.max_upload)
        self._applied_s = 0.0  # when the newest record was applied
        self._interval_s = 0.0  # seconds between the last two records
        MEET.serve(transport, self._handle_meet)
        RECORD_DIGEST.serve(transport, self._handle_record_digest)
        FOLLOW.serve(transport, self._handle_follow)
        PIECE.serve(transport, self._handle_piece)
        NEXT.serve(transport, self._handle_next)

    def keep_record(self, record: Record, gradients: Mapping[int, Tensor], written: WrittenByStage) -> None:
        """Keep a record that was applied here, if a joiner will request it."""
        at_s, state = now_s(), self._state
        self._interval_s, self._applied_s = at_s - self._applied_s, at_s
        state.followers = {peer: follower for peer, follower in state.followers.items() if not follower.is_admitted}
        for newcomer in record.newcomers:
            peer = newcomer.member.peer_id
            self._introduced.pop(peer, None)
            self._backoff.clear(peer)
            self._end_download(peer)  # a copy here may remain even if the peer followed another donor
            if peer in state.followers:
                state.followers[peer].is_admitted = True
        for conviction in record.convicted or ():  # a convicted peer may be about to join again
            self._introduced.pop(conviction.peer, None)
            state.followers.pop(conviction.peer, None)
            self._end_download(conviction.peer)
        if state.followers:
            state.kept[record.step] = (record, gradients, written, self._membership.run.seats_before)
        self._give_up_stalled()
        self._drop_unneeded()
        self._notify()

    def enter_generation(self) -> None:
        """Drop all copies and records: the run is over, or in its next generation, and joiners have to begin again."""
        self._state = _DonorGeneration()

    async def _handle_meet(self, caller: PeerId, candidate: Candidate) -> None:
        """Connect to a joiner that the coordinator introduces."""
        if not self._membership.coordinated_by(caller):
            raise ProtocolError(f"a joiner is introduced by the coordinator, not by {caller}")
        peer = candidate.member.peer_id
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._transport.connect(candidate.addresses)
        except TimeoutError:
            raise PeerError(f"no connection to {peer} within {_CONNECT_TIMEOUT_S:g} s") from None
        self._introduced.pop(peer, None)
        self._state.followers.pop(peer, None)  # it begins to join again, so it needs no old records
        self._end_download(peer)
        self._introduced[peer] = candidate
        # Followers stay, however long their downloads take.
        idle_peers = [idle for idle in self._introduced if idle not in self._state.followers]
        for idle in idle_peers[: max(0, len(self._introduced) - _MAX_INTRODUCED)]:
            del self._introduced[idle]

    async def _handle_record_digest(self, caller: PeerId, request: StepRequest) -> RecordDigestReply:
        """Return the digest of a decided record, so that a joiner need not trust its donor."""
        run = self._membership.running
        if not self._membership.knows_server(caller):
            raise ProtocolError(f"record digests are for servers and joiners of the run, and {caller} is neither")
        run.check_generation(request.generation)
        await self._steps.wait_for_next(request.step + 1)  # the caller's donor may apply records earlier
        run.check_generation(request.generation)
        return RecordDigestReply(digest=run.decided_digest(request.step))

    async def _handle_follow(self, caller: PeerId, request: FollowRequest) -> WithTensors[FollowReply]:
        """Wait for a slot for a joiner, and copy the stage for its download; return the description of the copy."""
        stage = self._requested_stage(caller, request.stage_index)
        if stage.index not in self._membership.loaded:
            raise Busy(f"stage {stage.index} has no weights here yet")
        if request.version not in (None, stage.version):
            raise TicketGone(f"stage {stage.index} is at version {stage.version} here")
        count, wait_s = self._backoff.missed(caller, now_s=now_s())
        if wait_s > 0:
            raise Busy(f"{caller} began {count} downloads here and never joined. It may try again in {wait_s:.0f} s.")
        state = self._state
        # With a version, the joiner follows another donor, and this server only sends pieces.
        await self._wait_for_slot(caller, helps=request.version is not None, within_s=min(request.hold_s, _HOLD_S))
        if state is not self._state:
            raise TicketGone("this server left the run, or its generation, meanwhile; the joiner has to begin again")
        at_s, generation = now_s(), self._membership.run.manifest.generation
        download = state.downloads[caller] = _Download(at_s, at_s)
        if request.version is None:
            self._backoff.add(caller, now_s=at_s)
            # Added before the copy is made, so that no later record is missed.
            state.followers[caller] = _Follower(stage.index, self._steps.version, at_s)
        try:
            # On the compute thread, so that the copy falls between two records.
            copy = await self._compute(lambda: _shared_copy(state, stage, generation))
            if request.version not in (None, copy.version):
                raise TicketGone(f"stage {stage.index} is at version {copy.version} here")
        except BaseException:
            if self._state.downloads.get(caller) is download:
                self._end_download(caller)
            raise
        download.copy, download.last_heard_s = copy, now_s()
        return copy.head, ()

    async def _handle_piece(self, caller: PeerId, request: PieceRequest) -> Message:
        """Send a piece of a joiner's copy, within the limit of upload; an empty piece ends the download."""
        start, stop = request.start, request.stop
        self._requested_stage(caller, request.stage_index)
        download = self._state.downloads.get(caller)
        copy = download.copy if download is not None else None
        asked = (request.stage_index, request.version)
        if download is None or copy is None or (copy.head.snapshot.stage_index, copy.version) != asked:
            raise TicketGone("no copy of that version is kept here for this peer (any more); it has to begin again")
        if start == stop:  # the joiner has all pieces
            self._end_download(caller)
            return Message()
        if not start < stop <= copy.num_bytes:
            raise ProtocolError(f"a piece lies within the copy's {copy.num_bytes} bytes, got {start} to {stop}")
        if download.num_pieces >= _MAX_PIECES:
            raise Busy(f"at most {_MAX_PIECES} pieces may be in transit to one peer")
        # A piece takes a fraction of a second, so that no message waits long behind it.
        stop = min(stop, start + min(_MAX_PIECE_BYTES, max(_MIN_PIECE_BYTES, self._limits.max_upload // 10)))
        download.num_pieces += 1
        download.num_bytes += stop - start
        try:
            await self._throttle.acquire(stop - start)
        finally:
            download.num_pieces -= 1
            download.last_heard_s = now_s()
            if caller in self._state.followers:
                self._state.followers[caller].last_heard_s = download.last_heard_s
        return Message(tensors=copy.piece(start, stop))

    async def _handle_next(self, caller: PeerId, request: NextRequest) -> WithTensors[NextReply]:
        """Return the record after a joiner's version, or the open step's change; wait for it up to `request.hold_s`."""
        stage = self._requested_stage(caller, request.stage_index)
        follower = self._state.followers.get(caller)
        self._check_generation(request.generation)
        if follower is None or follower.stage_index != stage.index:
            raise TicketGone("no records are kept here for this peer (any more); it has to begin again")
        follower.version, follower.last_heard_s = request.version, now_s()
        if follower.admit_by is None:
            missed = max(0, self._steps.version - request.version)
            follower.admit_by = self._steps.version + missed + _RECORDS_TO_ADMIT
        self._end_download(caller)
        self._drop_unneeded()
        await self._steps.wait_for_later(
            request.version, after_change=request.written, within_s=min(request.hold_s, _HOLD_S)
        )
        self._check_generation(request.generation)  # it may have changed meanwhile
        if request.version >= self._steps.version:
            has_seats = request.seated or request.version > self._steps.version
            return self._open_step_reply(request, None if has_seats else self._membership.run.seats)
        if request.version not in self._state.kept:
            self._state.followers.pop(caller, None)
            raise TicketGone(f"record {request.version} is not kept here (any more); the joiner has to begin again")
        record, gradients, written, seats = self._state.kept[request.version]
        gradient, weights = gradients[stage.index].cpu(), written.get(stage.index, {})
        # Records precede pieces, because a joiner that falls behind has to download everything again.
        self._throttle.charge(gradient.nbytes)
        if request.version + 1 < self._steps.version:
            # Missed records sent without pauses would delay activations on the link.
            at_most_s = min(self._interval_s / _CATCH_UP, self._limits.call_timeout / _CATCH_UP)
            await asyncio.sleep(min(gradient.nbytes / self._limits.max_upload, at_most_s))
        reply = NextReply(record=record, seats=None if request.seated else seats, names=list(weights))
        return reply, (gradient, *(tensor.cpu() for tensor in weights.values()))

    def _open_step_reply(self, request: NextRequest, seats: SeatedMembers | None) -> WithTensors[NextReply]:
        """Return the reply to a joiner that has all records, with the open step's change if the joiner lacks it."""
        open_step = self._steps.sums.next
        if request.version != self._steps.version or request.written == open_step.change.number:
            return NextReply(record=None, seats=seats), ()
        weights = open_step.written.get(request.stage_index, {})
        reply = NextReply(record=None, seats=seats, change=open_step.change, names=list(weights))
        return reply, [tensor.cpu() for tensor in weights.values()]

    async def _wait_for_slot(self, caller: PeerId, *, helps: bool, within_s: float) -> None:
        """Wait for one of `_MAX_JOINING` slots, in turn; `Busy` if that takes too long, or the caller has one."""
        end_s = now_s() + within_s
        if caller in self._state.downloads or caller in self._queued:
            raise Busy("this peer has a download in progress, or waits for one")
        self._queued.add(caller)
        turns = self._turns = {
            peer: at_s for peer, at_s in self._turns.items() if peer in self._queued or now_s() < at_s + _KEEP_TURN_S
        }
        if helps:
            turns.pop(caller, None)
        else:
            turns[caller] = now_s()
        try:
            while self._num_joining(caller, helps=helps) >= _MAX_JOINING or not (helps or self._is_next(caller)):
                try:
                    async with asyncio.timeout_at(end_s):
                        await self._freed.wait()
                except TimeoutError:
                    num_before = [*self._turns, caller].index(caller)
                    raise Busy(
                        f"at most {_MAX_JOINING} peers may join through {short_name(self._transport.peer_id)} at once, "
                        f"and {num_before} wait before this peer"
                    ) from None
            self._turns.pop(caller, None)
        finally:
            if caller in self._turns:
                self._turns[caller] = now_s()
            self._queued.discard(caller)
            self._notify()  # the turn passes to the next one

    def _is_next(self, caller: PeerId) -> bool:
        """Return whether the caller is the first in turn of the joiners that wait now."""
        return next(peer for peer in self._turns if peer in self._queued) == caller

    def _num_joining(self, caller: PeerId, *, helps: bool) -> int:
        """Count peers that download and, unless this server only `helps`, followers, to which each gradient is sent."""
        self._give_up_stalled()
        oldest_s, followers = now_s() - _IDLE_S, {} if helps else self._state.followers
        joining = {
            peer
            for peer, follower in followers.items()
            if not follower.is_admitted and follower.last_heard_s >= oldest_s
        }
        return len(self._state.downloads.keys() | (joining - {caller}))

    def _give_up_stalled(self) -> None:
        """Free the slots of joiners that make no progress."""
        at_s, state = now_s(), self._state
        bytes_per_s = min(_MIN_BYTES_PER_S, self._limits.max_upload / (2 * _MAX_JOINING))
        for peer, download in list(state.downloads.items()):
            if download.copy is None:
                continue
            is_slow = at_s > download.began_s + _IDLE_S + download.num_bytes / bytes_per_s
            if is_slow or (not download.num_pieces and at_s > download.last_heard_s + _IDLE_S):
                self._end_download(peer)
        for peer, follower in list(state.followers.items()):
            if follower.admit_by is not None and self._steps.version > follower.admit_by and not follower.is_admitted:
                del state.followers[peer]

    def _end_download(self, peer: PeerId) -> None:
        """End a download; drop its copy unless another peer still downloads it."""
        self._state.downloads.pop(peer, None)
        in_use = [download.copy for download in self._state.downloads.values()]
        if None not in in_use:  # a download without a copy yet may be about to use one of `copies`
            self._state.copies = {index: copy for index, copy in self._state.copies.items() if copy in in_use}
        self._notify()

    def _notify(self) -> None:
        """Wake the joiners that wait for a slot."""
        self._freed.set()
        self._freed = asyncio.Event()

    def _check_generation(self, generation: int) -> None:
        if generation != self._membership.run.manifest.generation:
            raise TicketGone("the run rolled back; a joiner that follows its records has to begin again")

    def _requested_stage(self, caller: PeerId, stage_index: int) -> Stage:
        """Return the stage of a request; refuse a caller that neither joins it nor is a member."""
        stage = self._steps.stage(stage_index)
        candidate = self._introduced.get(caller)
        is_introduced = candidate is not None and candidate.stage_index == stage_index
        # This server may apply the record that admits the caller before the caller does.
        if not is_introduced and caller not in (member.peer_id for member in self._membership.run.rosters[stage_index]):
            raise ProtocolError(f"the coordinator did not introduce {caller} as a joiner of stage {stage_index}")
        return stage

    def _drop_unneeded(self) -> None:
        """Drop records that no joiner needs and, above `Limits.join_bytes`, joiners that need the oldest records."""
        oldest_s = now_s() - self._limits.join_timeout
        followers = {
            peer: follower for peer, follower in self._state.followers.items() if follower.last_heard_s >= oldest_s
        }
        while True:
            first = min((follower.version for follower in followers.values()), default=None)
            kept = {step: record for step, record in self._state.kept.items() if first is not None and step >= first}
            num_bytes = sum(
                tensor.nbytes
                for _, gradients, written, _ in kept.values()
                for tensors in (gradients.values(), *(weights.values() for weights in written.values()))
                for tensor in tensors
            )
            if num_bytes <= self._limits.join_bytes:
                break
            followers = {peer: follower for peer, follower in followers.items() if follower.version != first}
        self._state.followers, self._state.kept = followers, kept


def _shared_copy(state: _DonorGeneration, stage: Stage, generation: int) -> StageCopy:
    """Copy a stage on the compute thread, or return its copy at this version, which all downloads share."""
    # `state` is that of the request's generation, so that no copy of an old generation enters the next.
    copy = state.copies.get(stage.index)
    if copy is None or copy.version != stage.version:
        copy = state.copies[stage.index] = StageCopy.of(stage, generation)
    return copy
