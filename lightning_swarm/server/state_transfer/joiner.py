"""How a server joins a run that is under way: download a stage, follow its records, enter a roster by one of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from msgspec.structs import replace
from torch import Tensor

from lightning_swarm.core.errors import Busy, ConfigError, DeadlineExceeded, PeerError, ProtocolError, SwarmError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import ended, gather
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.protocol import handshake
from lightning_swarm.protocol.messages.membership import (
    FollowReply,
    FollowRequest,
    JoinReply,
    JoinRequest,
    ListenReply,
    ListenRequest,
    NextReply,
    NextRequest,
    PieceRequest,
    ReadyRequest,
)
from lightning_swarm.protocol.messages.run import RunView, SeatedMembers
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, decode, encode
from lightning_swarm.protocol.methods import FOLLOW, JOIN, LISTEN, NEXT, PIECE, READY, VIEW
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.server.state_transfer.donor import IncomingSnapshot
from lightning_swarm.server.step_handlers import StepHandlers

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


class StageDownload:
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

    async def download(self, donors: Sequence[PeerId], *, alone: bool) -> tuple[PeerId, IncomingSnapshot]:
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
                blank = IncomingSnapshot(head, self._stage, max_bytes=self._limits.max_message_bytes)
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

    async def _pull_all(self, donor: PeerId, others: Sequence[PeerId], blank: IncomingSnapshot) -> None:
        helping = asyncio.ensure_future(gather(self._help(peer, blank) for peer in others))
        try:
            await gather(self._pull(donor, blank, to_the_end=True) for _ in range(_PULLS))
        finally:
            await ended([helping])
        if not helping.cancelled():
            helping.result()
        await gather(self._release(peer, blank) for peer in self._copied)

    async def _help(self, peer: PeerId, blank: IncomingSnapshot) -> None:
        """Have one more member send pieces. That it cannot is no fault."""
        try:
            head = await self._follow(peer, blank.head.snapshot.version)
            self._copied.append(peer)
            if head != blank.head:
                raise ProtocolError(f"stage {self._stage.index} is not the same at {peer}")
            await gather(self._pull(peer, blank, to_the_end=False) for _ in range(_PULLS))
        except SwarmError as error:
            _log.info("%s does not help with the download: %s", peer, error)

    async def _pull(self, peer: PeerId, blank: IncomingSnapshot, *, to_the_end: bool) -> None:
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

    async def _piece(self, peer: PeerId, blank: IncomingSnapshot, start: int, stop: int) -> Message:
        request = PieceRequest(
            stage_index=self._stage.index, version=blank.head.snapshot.version, start=start, stop=stop
        )
        timeout = self._limits.call_timeout if stop > start else _RELEASE_S
        return await self._transport.stream(
            peer, PIECE, Message(encode(request)), timeout=timeout, max_bytes=stop - start
        )

    async def _release(self, peer: PeerId, blank: IncomingSnapshot) -> None:
        try:
            await self._piece(peer, blank, 0, 0)
        except PeerError as error:
            _log.info("%s was not told that the download is through: %s", peer, error)


_POLL_S: Final = 1.0
_MAX_ATTEMPTS: Final = 8  # with pauses of two minutes in all: a record may have to leave out an earlier life first
_MAX_WISHES: Final = 3  # attempts to get the stage that it moves to
_FIRST_PAUSE_S: Final = 1.0


class Joiner:
    """A server on its way into a run.

    Args:
        transport: Its network.
        tickets: Where rounds are collected from.
        executor: Computes.
        model: Its copy of the model.
        admission: Its place in the run.
        stepping: Gets the stage.
        limits: Bounds.
    """

    def __init__(
        self,
        transport: Transport,
        tickets: TicketStore,
        executor: Executor,
        model: PeerModel,
        admission: Admission,
        stepping: StepHandlers,
        *,
        limits: Limits,
    ) -> None:
        self._transport = transport
        self._tickets = tickets
        self._executor = executor
        self.model = model
        self._admission = admission
        self._stepping = stepping
        self._limits = limits
        self._stage: Stage | None = None
        self._joined_at = 0  # the version of the run then
        self._wish: int | None = None  # which stage it was told to hold
        self._former: int | None = None  # which one it had before
        self._alone = False  # one member shall send everything
        transport.handle_call(LISTEN, self._handle_listen)

    def keep(self, stages: Sequence[Stage], holders: Sequence[int]) -> None:
        """Join with a stage that this server has built: of several the one that the fewest hold.

        Args:
            stages: Of a run that it is in no more.
            holders: How many there are, for each stage of the run.
        """
        self._wish = self._former = None
        self._stage = min(stages, key=lambda stage: holders[stage.index], default=self._stage)

    def move_to(self, stage_index: int, *, former: int) -> None:
        """Join with another stage than this server had.

        Args:
            stage_index: Which.
            former: Which it had, to join with again if that one is not to be had.
        """
        self._stage, self._wish, self._former = None, stage_index, former

    async def enter(self, find: Callable[[], Awaitable[Sequence[PeerId]]]) -> None:
        """Come into a run: be admitted at its beginning, or join it. There may be none for long.

        Args:
            find: Names coordinators of runs that may be under way, and makes their servers reachable.

        Raises:
            ConfigError: This peer's model or version is not the run's.
            PeerError: The run is there, but does not let this peer in.
        """
        while not self._done:
            coordinator = await self._find_coordinator(find)
            if coordinator is not None:
                async with self._admission.asking(coordinator) as free:
                    if free:
                        await self._join(coordinator, find)
                    return
            await asyncio.sleep(_POLL_S)

    async def _find_coordinator(self, find: Callable[[], Awaitable[Sequence[PeerId]]]) -> PeerId | None:
        """Who coordinates the run that is under way, if there is one."""
        for named in await find():
            coordinator = await self._coordinator_of(named)
            if coordinator is not None:
                return coordinator
        return None

    async def _coordinator_of(self, named: PeerId) -> PeerId | None:
        """Who coordinates the run that was announced, in the eyes of whom it named; announcements outlive runs."""
        coordinator = named
        try:
            there = (await handshake.meet(self._transport, named, timeout=self._timeout)).greeting.protocol_version
            if there == PROTOCOL_VERSION:  # else its answer may not be readable here
                coordinator = PeerId((await self._view(named)).term[1])
        except SwarmError as error:
            _log.info("No run at %s: %s", named, error)
            return None
        if there != PROTOCOL_VERSION:
            raise ConfigError(
                f"`protocol_version` is {there} in the run and {PROTOCOL_VERSION} here. "
                "Install the same version of lightning_swarm on all peers."
            )
        return coordinator

    async def _view(self, coordinator: PeerId) -> RunView:
        return decode(await self._transport.call(coordinator, VIEW, b"", timeout=self._timeout), RunView)

    async def _join(self, coordinator: PeerId, find: Callable[[], Awaitable[Sequence[PeerId]]]) -> None:
        """Try a few times. Another peer may come to coordinate meanwhile."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                if attempt > 1 and not self._admission.has_run:  # else this server follows who leads it
                    coordinator = await self._find_coordinator(find) or coordinator
                    self._admission.ask(coordinator)
                await self._try(coordinator, attempt)
            except SwarmError as error:
                if self._done:  # the record came another way meanwhile
                    return
                if not isinstance(error, PeerError):
                    raise
                _log.warning("Could not join the run (attempt %d of %d): %s", attempt, _MAX_ATTEMPTS, error)
                if attempt == _MAX_ATTEMPTS:
                    raise PeerError(
                        f"a run must let a server in within {_MAX_ATTEMPTS} attempts, and {coordinator} named the last "
                        f"reason: {error} See with `lightning-swarm doctor --peer` what is in the way, then join again."
                    ) from error
                await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            if self._done:
                return

    @property
    def _done(self) -> bool:
        """Whether there is nothing left to do: this server is in, or the run is over."""
        return self._admission.is_member or self._admission.left.is_set()

    async def _try(self, coordinator: PeerId, attempt: int) -> None:
        if self._admission.has_run:  # which may be led by another peer since
            coordinator = self._admission.run.coordinator
        view = await self._view(coordinator)
        if self._wish != self._former and attempt > _MAX_WISHES:
            _log.warning("Stage %s is not to be had: this peer goes back to stage %s.", self._wish, self._former)
            self._stage, self._wish = None, self._former
        if self._stage is None:
            self.model.check(view.manifest)  # before anyone is asked for anything
        request = JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            boot_id=self._admission.me.boot_id,
            addresses=list(await self._transport.addresses()),
            stage_index=self._stage.index if self._stage is not None else self._wish,
        )
        reply = decode(await self._transport.call(coordinator, JOIN, encode(request), timeout=self._timeout), JoinReply)
        if self._stage is None:
            stages, _ = await self._executor.submit(FIRST, lambda: self.model.build(view.manifest, [reply.stage_index]))
            self._stage = stages[reply.stage_index]
        roster = [member.peer_id for member in reply.view.seats.rosters[self._stage.index]]
        # Joiners of one stage go round its members, and so do the attempts of one: a member may be gone.
        first = (self._admission.me.boot_id + attempt) % len(roster)
        donor, version = await self._download([*roster[first:], *roster[:first]], self._stage)
        self._joined_at = reply.view.version
        await self._admission.follow(RunState.seen(reply.view, version), self._stage)
        await self._follow(donor, self._stage)

    async def _download(self, donors: Sequence[PeerId], stage: Stage) -> tuple[PeerId, int]:
        """Take over the state that members have; returns the one to follow, and its version."""
        download = StageDownload(self._transport, stage, limits=self._limits)
        donor, blank = await download.download(donors, alone=self._alone)
        snapshot = blank.head.snapshot
        weights, state = blank.values()

        def load() -> int:
            if self._done:  # loading would undo what the record that let this peer in did
                raise PeerError("a record let this peer in while it was downloading")
            stage.go_back(snapshot.version, snapshot.selection)
            stage.load_weights(weights)
            stage.load_optimizer_state(state)
            return stage.fingerprint()

        version_hash, _ = await self._executor.submit(FIRST, load)
        if version_hash != snapshot.version_hash and download.helpers:
            self._alone = True
            raise PeerError(f"the state that {donor} and {download.helpers} sent in pieces is not that of one version")
        if version_hash != snapshot.version_hash:
            raise ConfigError(
                f"a joiner must hold the bytes that it downloads; stage {stage.index} came out different from what "
                f"{donor} sent. Use the run's precision, optimizer and versions here."
            )
        return donor, snapshot.version

    async def _follow(self, donor: PeerId, stage: Stage) -> None:
        """Apply the records that come, until one of them makes this server a member."""
        hold_s, seated = 0.0, False
        generation = self._admission.run.manifest.generation
        while not self._done:
            version = self._stepping.version
            request = NextRequest(
                generation=generation, stage_index=stage.index, version=version, hold_s=hold_s, seated=seated
            )
            message = await self._transport.stream(
                donor,
                NEXT,
                Message(encode(request)),
                timeout=hold_s + self._limits.call_timeout,  # a donor that froze is not waited for like a download
                max_bytes=self._limits.max_message_bytes,
            )
            reply = decode(message.body, NextReply)
            record = reply.record
            if not seated and reply.seats is not None and version == self._stepping.version:
                self._sit(reply.seats, version)
                seated = True
            if record is None:
                coordinator = self._admission.run.coordinator
                ready = encode(ReadyRequest(generation=generation, version=version))
                try:
                    await self._transport.call(coordinator, READY, ready, timeout=self._timeout)
                except ProtocolError as error:  # its place may have gone to another while it was downloading
                    raise PeerError(f"{coordinator} does not expect this peer (any more): {error}") from error
                hold_s = _HOLD_S
                continue
            if record.step >= self._stepping.version:  # else the coordinator was quicker
                await self._stepping.reselect(record.step, record.selection)
                await self._stepping.commit(record, {stage.index: _gradient(message, stage)})
            hold_s = 0.0

    def _sit(self, seats: SeatedMembers, version: int) -> None:
        """Know who is in the run at this version. This peer was out when it joined, whoever named it before."""
        self._admission.run.check_seats(seats)
        rosters = seats.rosters
        if version <= self._joined_at:
            rosters = [[member for member in roster if member != self._admission.me] for roster in rosters]
        self._admission.run.sit(replace(seats, rosters=rosters))

    # ------------------------------------------------------------------ a round

    async def _handle_listen(self, caller: PeerId, body: bytes) -> bytes:
        """Hold a round's mean gradient, so that its record may let this server in."""
        request = decode(body, ListenRequest)
        closing = request.closing
        stage = self._stage
        if stage is None or self._admission.is_member or not self._admission.led_by(caller):
            raise ProtocolError(f"this peer is not joining a run of {caller}")
        await self._stepping.reached(closing.step)
        self._stepping.sums.check(caller, closing.generation, closing.step, closing.attempt)
        self._stepping.sums.check_stages(closing)
        rosters = self._admission.run.present(closing.absent)
        if not all(rosters[: self._admission.run.num_pipeline_stages]):
            raise ProtocolError(f"a round of stage {stage.index} must have members")
        held = self._stepping.rounds.holds(closing)  # asked again, shortly before the record is decided
        if not held:
            await self._stepping.reselect(closing.step, request.selection)
            mean, carried = await self._stepping.rounds.collect(closing, stage, rosters)
        version_hash, _ = await self._executor.submit(FIRST, stage.fingerprint)
        self._stepping.sums.check(caller, closing.generation, closing.step, closing.attempt)
        if not held:
            self._stepping.rounds.hold(closing, {stage.index: mean}, {stage.index: carried})
        return encode(ListenReply(boot_id=self._admission.me.boot_id, version_hash=version_hash))

    @property
    def _timeout(self) -> float:
        return min(self._limits.call_timeout, 30.0)


def _gradient(message: Message, stage: Stage) -> Tensor:
    like = stage.next_sum.like
    wanted = (stage.mean_length,), like.dtype
    found = [(tuple(tensor.shape), tensor.dtype) for tensor in message.tensors]
    if found != [wanted]:
        raise ProtocolError(f"a mean gradient of stage {stage.index} has {wanted}; got {found}")
    return message.tensors[0].to(like.device)
