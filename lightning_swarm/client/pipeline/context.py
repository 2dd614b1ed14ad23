"""State that all microbatches of a trainer share: the network, the routers, recent failures, the replay copies."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from torch import Tensor

from lightning_swarm.client.pipeline.replay_buffer import ReplayBuffer
from lightning_swarm.client.pipeline.result_check import ResultCheck
from lightning_swarm.client.pipeline.router import PeerCharge, StageRouter
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import LeaseRevoked, NotEnlisted, OutOfMemory, PeerError, SwarmError, Unreachable
from lightning_swarm.core.tasks import gather, nothing
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.events import EventLog, OutageWait
from lightning_swarm.protocol.messages.calls import StageReport
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import Candidate, Record
from lightning_swarm.protocol.patience import MIN_UNFAMILIAR_S, Durations, deadline_s
from lightning_swarm.protocol.rpc import A, Call, Q, StreamRpc
from lightning_swarm.protocol.tickets import TicketStore

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_CONNECT_TIMEOUT_S = 10.0
_CONNECT_AGAIN_S = 300.0  # pause between attempts; long, because an attempt may delay a record
_ACCEPT_TIMEOUT_S = 10.0  # wait until a peer accepts a request, without the transfer time of its tensors
_CHECK_TIMEOUT_S = 10.0  # limit of a check whether this trainer is in the run
_SLOWEST_BYTES_PER_S = 100e3  # a peer with a slower link counts as late
_DEFAULT_COPIES_BYTES = 4 << 30


class Refusal(PeerError):
    """Raised if a server answered with an error or a message that no server of the run should send."""

    def __init__(self, peer: PeerId, error: SwarmError) -> None:
        super().__init__(f"{peer} answered {type(error).__name__}: {error}")
        self.error = error


class AnswersOf:
    """Context manager that turns errors of a server's answer into `Refusal`, except `PeerError` and `LeaseRevoked`."""

    # A class, because every call enters it, and a generator would take three times as long.
    def __init__(self, peer: PeerId) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, SwarmError) and not isinstance(error, PeerError | LeaseRevoked):
            raise Refusal(self._peer, error) from error


async def send(
    transport: Transport,
    peer: PeerId,
    method: Call[Q, A] | StreamRpc[Q, A],
    request: Q,
    tensors: Sequence[Tensor],
    *,
    timeout: float,
    accept_s: float = _ACCEPT_TIMEOUT_S,
) -> A:
    """Send a request whose answer has no tensors; raise `Refusal` for errors as in `AnswersOf`."""
    # Peers answer before they compute, so a living peer that does not answer soon has not received the request.
    timeout = min(timeout, accept_s + sum(tensor.nbytes for tensor in tensors) / _SLOWEST_BYTES_PER_S)
    with AnswersOf(peer):
        if isinstance(method, Call):
            assert not tensors  # calls carry none
            return await method.ask(transport, peer, request, timeout=timeout)
        answer, _ = await method.ask(transport, peer, request, tensors, timeout=timeout, max_bytes=0)
        return answer


@dataclass
class PipelineContext:
    """Network, routers and recent failures, shared by a trainer's microbatches across generations of the run."""

    transport: Transport
    tickets: TicketStore
    routers: Sequence[StageRouter]  # one for each stage
    timeout: float  # seconds; limit of a call with the wait for its input, and of a microbatch's attempts
    events: EventLog
    replay_buffer: ReplayBuffer = field(default_factory=lambda: ReplayBuffer(_DEFAULT_COPIES_BYTES))  # replay copies
    stage_timeout: float = 0.0  # seconds to wait for a stage without reachable peers, if more than `timeout`
    results: ResultCheck = field(default_factory=ResultCheck)
    ensure_enlisted: Callable[[], Awaitable[None]] = nothing  # enlists a removed trainer again; raises if the run ended
    fault_counts: Counter[str] = field(default_factory=Counter)  # busy peers, repeated calls and replaced peers
    # A server may get no microbatches for these reasons:
    # - unreached: it had no connection when it joined. Ends with a later attempt, or if the whole stage is unreached.
    # - silent: it could not be reached in a call. Ends with an answer. Microbatches wait while a whole stage is silent.
    # - avoided: the coordinator asked for it. Ends with the next record, or if all other servers of the stage failed.
    # - lost: the open step continues without it, as the coordinator announced. Ends only with the next record.
    # - ejected: it failed recently. The stage's router ejects servers, and ends each ejection after a while.
    # The event `ban` reports avoided and ejected servers.
    unreached: dict[PeerId, tuple[Candidate, float]] = field(default_factory=dict)  # with the time of the last attempt
    revokers: set[PeerId] = field(default_factory=set)  # servers that reported a batch of the open step as struck
    num_under_way: int = 0  # microbatches in a forward or backward
    durations: Durations = field(default_factory=Durations)  # seconds of a forward or backward through all stages
    secret: bytes = field(default_factory=partial(secrets.token_bytes, 32))  # from which result keys are derived
    _alone: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a microbatch is sent alone
    _progress: asyncio.Event = field(default_factory=asyncio.Event)  # set when a microbatch ends or rosters change
    _avoided: dict[int, set[PeerId]] = field(default_factory=dict)  # stage -> avoided servers, including lost servers
    _lost: set[PeerId] = field(default_factory=set)  # servers lost to the open step
    _silent: dict[PeerId, PeerError] = field(default_factory=dict)  # silent peers -> the last error

    def __post_init__(self) -> None:
        self._outage_wait = OutageWait(self.events, stage_timeout=self.stage_timeout)

    async def follow(self, record: Record, members: Sequence[Sequence[Member]]) -> None:
        """Route by the record's rosters from now on; connect to newcomers, and retry unreached servers."""
        # Trainers except the lead may skip records. If a trainer also serves, its server has already connected to the
        # newcomers of a skipped record, otherwise `TrainerRole` has.
        await self.replay_buffer.release(record.step)
        self.revokers.clear()
        rosters = [[member.peer_id for member in roster] for roster in members]
        self._log_changes(rosters, step=record.step + 1)
        for conviction in record.convicted or ():
            self.events.log_only("convicted", peer=conviction.peer, step=record.step, reason=conviction.reason)
        newcomers = {candidate.member.peer_id: candidate for candidate in record.newcomers}
        await gather(
            self._connect(candidate)
            for peer, candidate in (self._due_unreached(rosters) | newcomers).items()
            if peer != self.transport.peer_id
        )
        present = {peer for roster in rosters for peer in roster}
        self._silent = {peer: error for peer, error in self._silent.items() if peer in present}
        self._avoided.clear()
        self._lost.clear()
        for router, roster in zip(self.routers, rosters, strict=False):  # stages on trainers have no router
            router.set_peers([peer for peer in roster if peer not in self.unreached] or roster)
        self._progress.set()

    def _log_changes(self, rosters: Sequence[Sequence[PeerId]], *, step: int) -> None:
        """Log which servers joined and left. Only the coordinator, perhaps another peer, counts these events."""
        known = {*self.unreached, *(peer for router in self.routers for peer in router.peers)}
        stages = list(zip(range(len(self.routers)), rosters, strict=False))
        for stage, roster in stages:
            for peer in sorted(set(roster) - known):
                self.events.log_only("joined", peer=peer, stage=stage, step=step)
        for peer in sorted(known.difference(*(roster for _, roster in stages))):
            self.events.log_only("left", peer=peer, step=step)

    def _due_unreached(self, rosters: Sequence[Sequence[PeerId]]) -> dict[PeerId, Candidate]:
        """Return the unreached servers to retry: each after a pause, or at once if its whole stage is unreached."""
        present = {peer for roster in rosters for peer in roster}
        self.unreached = {peer: tried for peer, tried in self.unreached.items() if peer in present}
        needed = {peer for roster in rosters if self.unreached.keys() >= set(roster) for peer in roster}
        return {
            peer: candidate
            for peer, (candidate, tried_s) in self.unreached.items()
            if peer in needed or now_s() >= tried_s + _CONNECT_AGAIN_S
        }

    async def _connect(self, newcomer: Candidate) -> None:
        """Connect to a server, or record it as unreached."""
        peer = newcomer.member.peer_id
        self.unreached.pop(peer, None)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self.transport.connect(newcomer.addresses)
        except (SwarmError, TimeoutError) as error:
            self.unreached[peer] = newcomer, now_s()
            _log.warning(
                "Server %s joined, but this peer cannot connect to it, and sends it no microbatches while its stage "
                "has other servers: %r",
                peer,
                error,
            )

    async def send(
        self, peer: PeerId, method: Call[Q, A] | StreamRpc[Q, A], request: Q, tensors: Sequence[Tensor] = ()
    ) -> A:
        """Send a request, as `send` does; if the peer does not know this trainer, retry once."""
        accept_s = self.durations.deadline_s(longest_s=_ACCEPT_TIMEOUT_S)
        ask = partial(send, self.transport, peer, method, request, tensors, timeout=self.timeout, accept_s=accept_s)
        try:
            return await ask()
        except NotEnlisted:  # the run continued without this trainer, or the peer does not know it yet
            await self.ensure_enlisted()
            return await ask()

    async def wait_for_room(self) -> None:
        """Wait while a microbatch is sent alone, or a stage has enough forwards until its slow peers are known."""
        while self._alone.locked() or any(router.is_full for router in self.routers):
            self._progress.clear()
            await self._progress.wait()

    async def with_memory(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run a microbatch's forward or backward; if servers lack memory for it, run it again while no other runs."""
        try:
            return await work()
        except OutOfMemory as error:
            _log.info("No server has memory for a microbatch, which is sent once more, alone: %s", error)
        self.num_under_way -= 1  # another microbatch that is sent alone must not wait for this one
        self._progress.set()
        try:
            async with self._alone:
                while self.num_under_way:
                    self._progress.clear()
                    await self._progress.wait()
                return await work()
        finally:
            self.num_under_way += 1

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Within this context, count a microbatch as under way; others may wait for its end."""
        self.num_under_way += 1
        try:
            yield
        finally:
            self.num_under_way -= 1
            self._progress.set()

    def patience_s(self, stage: int, charge: PeerCharge, shapes: int) -> float:
        """Return the seconds that a stage's peer may take once it has its input."""
        # The whole `timeout`, if the peer is unmeasured or has no replacement. `shapes` is a hash of the microbatch's
        # shapes, because the peer may have to compile code for new shapes.
        load = self.routers[stage].peers.get(charge.peer)
        if load is None or load.samples_per_s is None or not self.has_other_peer(stage, charge.peer):
            return self.timeout
        # At least the time of a whole microbatch, because that includes the links.
        is_familiar = self.durations.usual_s is not None and shapes in load.shapes
        whole_s = 0.0 if self.durations.usual_s is None else self.durations.deadline_s(longest_s=self.timeout)
        least_s = whole_s if is_familiar else max(whole_s, MIN_UNFAMILIAR_S)
        expected_s, queued = self.results.expected(self.routers[stage], charge)
        usual_s = expected_s * (1 + self.num_under_way + queued)  # includes work that may be ahead of the microbatch
        return deadline_s(usual_s, longest_s=self.timeout, least_s=least_s)

    def has_other_peer(self, stage: int, peer: PeerId) -> bool:
        """Return whether a stage has another peer that may replace `peer`."""
        return self.routers[stage].has_other_peer(peer, now_s=now_s())

    def is_ejected(self, stage: int, peer: PeerId) -> bool:
        """Return whether a stage's router avoids `peer`, because it failed recently."""
        return self.routers[stage].is_ejected(peer, now_s=now_s())

    def note_forward(
        self, route: Sequence[PeerCharge], reports: Sequence[StageReport], *, took_s: float, step: int
    ) -> None:
        """Record a microbatch's forward, with the reports of all stages, last stage first, or none if unknown."""
        # Recorded now, for the next microbatch, because the backward may end much later. No stage can have taken longer
        # than the whole forward.
        are_known = len(reports) == len(route)
        times = [min(report.busy_s, took_s) for report in reversed(reports)] if are_known else [None] * len(route)
        for router, charge, busy_s in zip(self.routers, route, times, strict=True):
            self.note_answer(charge.peer, step=step)
            router.note_forward(charge, busy_s=busy_s)

    def note_answer(self, peer: PeerId, *, step: int) -> None:
        """Record that a peer answered. If it was silent, its stage is no longer empty, so end the wait for stages."""
        if self._silent.pop(peer, None) is not None:
            self._outage_wait.stage_found(step=step)

    async def check_reachable(self, peer: PeerId) -> None:
        """Ping a peer that missed a deadline; record it as silent if it cannot be reached."""
        try:
            await self.transport.ping(peer)
        except Unreachable as error:
            self._silent[peer] = error

    def is_empty(self, stage: int) -> bool:
        """Return whether to wait for a stage: all its peers are silent, and `stage_timeout` exceeds `timeout`."""
        return self.stage_timeout > self.timeout and self.routers[stage].peers.keys() <= self._silent.keys()

    async def wait_for_stage(self, stage: int, *, step: int) -> None:
        """Log that the caller waits for an empty stage; raise if that takes too long, or if the run has ended."""
        gone = {peer: self._silent[peer] for peer in self.routers[stage].peers}
        address = (await self.transport.addresses())[0]
        self._outage_wait.keep(stage, gone, step=step, address=address, now_s=now_s())
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                await self.ensure_enlisted()
        except (PeerError, TimeoutError) as error:
            _log.info("It is unknown whether the run continues: %r", error)

    def avoid(self, peers: Collection[PeerId], lost: Collection[PeerId], *, step: int, reason: str) -> None:
        """Until the next record, send nothing to `lost` servers, and to `peers` only if a stage has no other server."""
        self._lost.update(lost)
        for stage, router in enumerate(self.routers):
            avoided = self._avoided.setdefault(stage, set())
            known, allowed = {*router.peers, *avoided}, self.peers_of(stage)  # `allowed`: without lost servers
            usable = allowed - avoided - {*peers} or allowed  # avoided servers only as a last resort
            if not usable or usable == {*router.peers}:
                continue
            for peer in sorted({*router.peers} - usable):
                self.events.note("ban", peer=peer, stage=stage, step=step, reason=reason)
            self._avoided[stage] = known - usable
            router.set_peers(sorted(usable))

    def peers_of(self, stage: int) -> set[PeerId]:
        """Return a stage's servers that may work in the open step, even if only as a last resort."""
        return {*self.routers[stage].peers, *self._avoided.get(stage, ())} - self._lost

    def _readmit_avoided(self, stage: int) -> None:
        """Use a stage's avoided servers again if all its other servers failed, because the accusations may be false."""
        router, avoided = self.routers[stage], self._avoided.get(stage, set())
        if avoided - self._lost and all(self.is_ejected(stage, peer) for peer in router.peers):
            router.set_peers(sorted(self.peers_of(stage)))
            avoided &= self._lost

    def eject(self, stage: int, peer: PeerId, step: int, error: PeerError) -> None:
        """Eject a peer for a while in all stages, because it failed in `stage`."""
        if isinstance(error, Unreachable):
            self._silent[peer] = error
        ejected = [router.eject(peer, now_s=now_s()) for router in self.routers]
        self._readmit_avoided(stage)
        if any(ejected):
            self.events.note("ban", peer=peer, stage=stage, step=step, reason=str(error))
