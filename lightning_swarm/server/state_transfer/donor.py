"""What a member of a stage does for a server that joins: meet it, hand it the state, keep the records that follow."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, PeerError, ProtocolError, TicketGone
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.membership import (
    FollowReply,
    FollowRequest,
    NextReply,
    NextRequest,
    PieceRequest,
    TensorLayout,
)
from lightning_swarm.protocol.messages.run import SeatedMembers
from lightning_swarm.protocol.messages.state import Snapshot
from lightning_swarm.protocol.messages.step import Candidate, Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import FOLLOW, MEET, NEXT, PIECE
from lightning_swarm.protocol.serialization import named
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.state_transfer.snapshots import copied
from lightning_swarm.server.step_handlers import StepHandlers


@dataclass(frozen=True, eq=False)
class StageCopy:
    """All that a stage is, apart from the stage: records go on changing that.

    Args:
        head: Says what the tensors are.
        tensors: Contiguous, on the CPU.
    """

    head: FollowReply
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, stage: Stage, generation: int) -> StageCopy:
        """As the stage is now. On the compute thread, so that it falls between two records."""
        message = copied(stage, generation)
        tensors = tuple(tensor.contiguous() for tensor in message.tensors)
        layouts = [TensorLayout(shape=list(one.shape), dtype=_name(one)) for one in tensors]
        return cls(FollowReply(snapshot=decode(message.body, Snapshot), layouts=layouts), tensors)

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.head.snapshot.version

    def is_of(self, stage_index: int, version: int) -> bool:
        """Whether it is what somebody asks for."""
        return (self.head.snapshot.stage_index, self.version) == (stage_index, version)

    @property
    def num_bytes(self) -> int:
        """Of all tensors, one after the other."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def piece(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """The bytes from `start` to `stop` of all tensors, one after the other. Shared, not copied."""
        return tuple(_overlaps(self.tensors, start, stop))


class IncomingSnapshot:
    """What a snapshot is to become, piece by piece.

    Args:
        head: Of the snapshot.
        stage: That takes it.
        max_bytes: The largest that is allocated.

    Raises:
        ProtocolError: It is no snapshot of the stage, or too large. Nothing was allocated.
    """

    def __init__(self, head: FollowReply, stage: Stage, *, max_bytes: int) -> None:
        own = [(list(one.shape), _name(one)) for one in stage.weights().values()]
        if [(one.shape, one.dtype) for one in head.layouts[: len(head.snapshot.weights)]] != own:
            raise ProtocolError(f"the weights of a snapshot of stage {stage.index} are other tensors than the stage's")
        sizes = [math.prod(one.shape) * _dtype(one).itemsize for one in head.layouts]
        self.num_bytes = sum(sizes)
        if self.num_bytes > max_bytes:
            raise ProtocolError(
                f"a stage's state is at most `Limits.max_message_bytes` = {max_bytes} bytes, got {self.num_bytes}. "
                "Raise it, or cut the model into more stages."
            )
        self.head = head
        self._tensors = [torch.empty(one.shape, dtype=_dtype(one)) for one in head.layouts]

    def fill(self, start: int, parts: Sequence[Tensor], *, at_most: int) -> int:
        """Enter a piece. Returns how many bytes it has.

        Raises:
            ProtocolError: It is no piece that was asked for. Nothing was entered.
        """
        num_bytes = sum(part.numel() for part in parts)
        if not 0 < num_bytes <= at_most or any(part.dtype != torch.uint8 or part.ndim != 1 for part in parts):
            raise ProtocolError(f"a piece has 1 to {at_most} bytes, got {num_bytes} elements in {len(parts)} tensors")
        places = list(_overlaps(self._tensors, start, start + num_bytes))
        if [place.numel() for place in places] != [part.numel() for part in parts]:
            raise ProtocolError(f"a piece from byte {start} on is cut where tensors end; this one is cut otherwise")
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)
        return num_bytes

    def values(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights, and the optimizer's state, by their names.

        Raises:
            ProtocolError: The names are not as many as the values, or a bool is none.
        """
        for tensor in self._tensors:
            # torch computes nonsense with a bool that is neither 0 nor 1.
            if tensor.dtype is torch.bool and tensor.numel() and int(_flat(tensor).max()) > 1:
                raise ProtocolError("a bool tensor of a snapshot holds a byte that is neither 0 nor 1")
        snapshot, count = self.head.snapshot, len(self.head.snapshot.weights)
        state = serialization.unflatten(snapshot.structure, self._tensors[count:])
        return named(snapshot.weights, self._tensors[:count]), named(snapshot.optimizer, state)


class Throttle:
    """Bytes a second, on the average; who comes first is served first.

    Args:
        bytes_per_s: At most.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # when all that was promised is through

    async def acquire(self, num_bytes: int) -> None:
        """Wait until they may be sent."""
        at_s = now_s()
        wait_s = max(self._free_s - at_s, 0.0)
        self.charge(num_bytes)
        if wait_s:
            await asyncio.sleep(wait_s)

    def charge(self, num_bytes: int) -> None:
        """They are sent at once, whatever was promised to others: those wait for longer."""
        at_s = now_s()
        self._free_s = max(self._free_s, at_s) + num_bytes / self._bytes_per_s


def _overlaps(tensors: Sequence[Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """The bytes from `start` to `stop` of all tensors, one after the other."""
    first = 0
    for tensor in tensors:
        end = first + tensor.nbytes
        if first < stop and start < end:
            yield _flat(tensor)[max(start - first, 0) : min(stop, end) - first]
        first = end


def _flat(tensor: Tensor) -> Tensor:
    # Not `reshape`: a single row of a column is contiguous and keeps the column's stride, which no byte view allows.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtype(layout: TensorLayout) -> torch.dtype:
    dtype = getattr(torch, layout.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex != layout.dtype.startswith("complex"):
        raise ProtocolError(f"a tensor of a snapshot has a dtype of torch's, got {layout.dtype!r}")
    return dtype


_MAX_MET: Final = 256
_MAX_JOINING: Final = 3  # at once; more wait for their turn, so that each is in sooner
_MAX_PIECES: Final = 4  # that are under way to one peer
_MAX_PIECE_BYTES: Final = 4 << 20
_MIN_PIECE_BYTES: Final = 64 << 10
_IDLE_S: Final = 60.0  # then a download is given up
_HOLD_S: Final = 20.0
_CATCH_UP: Final = 4.0  # times as fast as records come, at least
_CONNECT_TIMEOUT_S: Final = 8.0  # the coordinator asks for a little longer


@dataclass
class _CatchingUp:
    """A joiner that needs this stage's records from `version` on."""

    stage_index: int
    version: int
    last_heard_s: float
    entered: bool = False  # by the last record, which it may still ask for


@dataclass
class _OutgoingCopy:
    last_heard_s: float
    copy: StageCopy | None = None  # it is being made
    num_pieces: int = 0  # under way


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
        self, transport: Transport, executor: Executor, admission: Admission, stepping: StepHandlers, *, limits: Limits
    ) -> None:
        self._transport = transport
        self._executor = executor
        self._admission = admission
        self._stepping = stepping
        self._limits = limits
        self._met: dict[PeerId, Candidate] = {}
        self._followers: dict[PeerId, _CatchingUp] = {}
        self._downloads: dict[PeerId, _OutgoingCopy] = {}
        self._copies: dict[int, StageCopy] = {}  # the newest of each stage, while somebody downloads it
        self._queued: set[PeerId] = set()  # for a place
        self._freed = asyncio.Event()  # a place, perhaps; another event then
        self._throttle = Throttle(limits.max_upload)
        self._noted_s = 0.0  # when the newest record was applied
        self._interval_s = 0.0  # between it and the one before
        self._kept: dict[
            int, tuple[Record, Mapping[int, Tensor], SeatedMembers]
        ] = {}  # by step, with who was in before
        transport.handle_call(MEET, self._handle_meet)
        transport.handle_stream(FOLLOW, self._handle_follow, max_bytes=0)
        transport.handle_stream(PIECE, self._handle_piece, max_bytes=0)
        transport.handle_stream(NEXT, self._handle_next, max_bytes=0)

    def keep_record(self, record: Record, gradients: Mapping[int, Tensor]) -> None:
        """A record was applied here."""
        at_s = now_s()
        self._interval_s, self._noted_s = at_s - self._noted_s, at_s
        self._followers = {peer: one for peer, one in self._followers.items() if not one.entered}
        for newcomer in record.newcomers:
            peer = newcomer.member.peer_id
            self._met.pop(peer, None)
            self._end_download(peer)  # it may have had another copy's pieces, and not say so
            if peer in self._followers:
                self._followers[peer].entered = True
        if self._followers:
            self._kept[record.step] = (record, gradients, self._admission.run.seats_before)
        self._drop_needless()
        self._give_up_idle()
        self._notify()

    def go_back(self) -> None:
        """The run entered its next generation: whoever followed the old one begins again."""
        self._followers.clear()
        self._downloads.clear()
        self._copies.clear()
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
        self._end_download(peer)
        self._met[peer] = candidate
        # Who downloads stays, for as long as that may take.
        for other in [one for one in self._met if one not in self._followers][: max(0, len(self._met) - _MAX_MET)]:
            del self._met[other]
        return b""

    async def _handle_follow(self, caller: PeerId, message: Message) -> Message:
        request = decode(message.body, FollowRequest)
        stage = self._asked_stage(caller, request.stage_index)
        if stage.index not in self._admission.loaded:
            raise Busy(f"stage {stage.index} has no weights here yet")
        if request.version not in (None, stage.version):
            raise TicketGone(f"stage {stage.index} is at version {stage.version} here")
        await self._place(caller, helps=request.version is not None, within_s=min(request.hold_s, _HOLD_S))
        at_s = now_s()
        download = self._downloads[caller] = _OutgoingCopy(at_s)
        if request.version is None:
            # Before the copy is made: of what is applied after it nothing may be missed.
            self._followers[caller] = _CatchingUp(stage.index, self._stepping.version, at_s)
        try:
            # On the compute thread, so that it falls between two records.
            copy, _ = await self._executor.submit(FIRST, lambda: self._copied(stage))
            if request.version not in (None, copy.version):
                raise TicketGone(f"stage {stage.index} is at version {copy.version} here")
        except BaseException:
            if self._downloads.get(caller) is download:
                self._end_download(caller)
            raise
        download.copy, download.last_heard_s = copy, now_s()
        return Message(encode(copy.head))

    def _copied(self, stage: Stage) -> StageCopy:
        """All who download the same version share one copy."""
        copy = self._copies.get(stage.index)
        if copy is None or copy.version != stage.version:
            copy = self._copies[stage.index] = StageCopy.of(stage, self._admission.run.manifest.generation)
        return copy

    async def _handle_piece(self, caller: PeerId, message: Message) -> Message:
        request = decode(message.body, PieceRequest)
        start, stop = request.start, request.stop
        self._asked_stage(caller, request.stage_index)
        download = self._downloads.get(caller)
        copy = download.copy if download is not None else None
        if download is None or copy is None or not copy.is_of(request.stage_index, request.version):
            raise TicketGone("nothing of that version is held here for this peer (any more); it has to begin again")
        if start == stop:
            self._end_download(caller)
            return Message()
        if not start < stop <= copy.num_bytes:
            raise ProtocolError(f"a copy of {copy.num_bytes} bytes has none from {start} to {stop}")
        if download.num_pieces >= _MAX_PIECES:
            raise Busy(f"{download.num_pieces} pieces are on their way to this peer, at most {_MAX_PIECES} may be")
        # A fraction of a second's worth, so that nothing waits for long behind it.
        stop = min(stop, start + min(_MAX_PIECE_BYTES, max(_MIN_PIECE_BYTES, self._limits.max_upload // 10)))
        download.num_pieces += 1
        try:
            await self._throttle.acquire(stop - start)
        finally:
            download.num_pieces -= 1
            download.last_heard_s = now_s()
            if caller in self._followers:
                self._followers[caller].last_heard_s = download.last_heard_s
        return Message(tensors=copy.piece(start, stop))

    async def _handle_next(self, caller: PeerId, message: Message) -> Message:
        request = decode(message.body, NextRequest)
        stage = self._asked_stage(caller, request.stage_index)
        follower = self._followers.get(caller)
        self._check_generation(request.generation)
        if follower is None or follower.stage_index != stage.index:
            raise TicketGone("no records are kept here for this peer (any more); it has to begin again")
        follower.version, follower.last_heard_s = request.version, now_s()
        self._end_download(caller)
        self._drop_needless()
        await self._stepping.passed(request.version, within_s=min(request.hold_s, _HOLD_S))
        self._check_generation(request.generation)  # it may have changed meanwhile
        if request.version >= self._stepping.version:
            known = request.seated or request.version > self._stepping.version
            return Message(encode(NextReply(record=None, seats=None if known else self._admission.run.seats)))
        if request.version not in self._kept:
            self._followers.pop(caller, None)
            raise TicketGone(f"record {request.version} is not kept here (any more); the joiner has to begin again")
        record, gradients, seats = self._kept[request.version]
        gradient = gradients[stage.index].cpu()
        self._throttle.charge(gradient.nbytes)  # before any download: who falls behind begins that again
        if request.version + 1 < self._stepping.version:
            # Many records one right after the other would fill the line before activations.
            at_most_s = min(self._interval_s / _CATCH_UP, self._limits.call_timeout / _CATCH_UP)
            await asyncio.sleep(min(gradient.nbytes / self._limits.max_upload, at_most_s))
        return Message(encode(NextReply(record=record, seats=None if request.seated else seats)), (gradient,))

    async def _place(self, caller: PeerId, *, helps: bool, within_s: float) -> None:
        """Wait until the stage may be sent once more. Each has one download under way, and few join by this server.

        Raises:
            Busy: There is no place.
        """
        end_s = now_s() + within_s
        if caller in self._downloads or caller in self._queued:
            raise Busy("this peer has a download under way, or asks for one")
        self._queued.add(caller)
        try:
            while (taken := self._num_joining(caller, helps=helps)) >= _MAX_JOINING:
                try:
                    async with asyncio.timeout_at(end_s):
                        await self._freed.wait()
                except TimeoutError:
                    raise Busy(f"{taken} peers join by this one, at most {_MAX_JOINING} may at once") from None
        finally:
            self._queued.discard(caller)

    def _num_joining(self, caller: PeerId, *, helps: bool) -> int:
        """Who follows the records counts, too: each is sent a gradient with every step."""
        self._give_up_idle()
        oldest_s = now_s() - _IDLE_S
        following = {
            peer for peer, one in self._followers.items() if not one.entered and one.last_heard_s >= oldest_s
        } - {caller}
        return len(self._downloads.keys() | (set() if helps else following))

    def _give_up_idle(self) -> None:
        oldest_s = now_s() - _IDLE_S
        idle = [
            peer
            for peer, one in self._downloads.items()
            if one.copy is not None and not one.num_pieces and one.last_heard_s < oldest_s
        ]
        for peer in idle:
            self._end_download(peer)

    def _end_download(self, peer: PeerId) -> None:
        """Its copy goes with the last one who wants it."""
        self._downloads.pop(peer, None)
        if all(one.copy is not None for one in self._downloads.values()):
            wanted = {id(one.copy) for one in self._downloads.values()}
            self._copies = {index: copy for index, copy in self._copies.items() if id(copy) in wanted}
        self._notify()

    def _notify(self) -> None:
        self._freed.set()
        self._freed = asyncio.Event()

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
        oldest_s = now_s() - self._limits.join_timeout
        followers = {peer: one for peer, one in self._followers.items() if one.last_heard_s >= oldest_s}
        while True:
            first = min((one.version for one in followers.values()), default=None)
            kept = {step: one for step, one in self._kept.items() if first is not None and step >= first}
            num_bytes = sum(tensor.nbytes for _, gradients, _ in kept.values() for tensor in gradients.values())
            if num_bytes <= self._limits.join_bytes:
                break
            followers = {peer: one for peer, one in followers.items() if one.version != first}
        self._followers, self._kept = followers, kept
