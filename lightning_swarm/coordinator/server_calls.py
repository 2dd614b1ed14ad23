"""The coordinator's calls to the servers of a run (settle, freeze, average, apply), and to trainers (replay)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    Damaged,
    DeadlineExceeded,
    NotCoordinator,
    ProtocolError,
    SwarmError,
    Unreachable,
)
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.access import Rpc
from lightning_swarm.protocol import rpc
from lightning_swarm.protocol.bans import apply_received_ban
from lightning_swarm.protocol.messages.run import CoordinatorTerm, RunAborted
from lightning_swarm.protocol.messages.step import (
    AverageReply,
    AverageRequest,
    Closing,
    FreezeReply,
    FreezeRequest,
    NamedReceipts,
    Record,
    SettleRequest,
)
from lightning_swarm.protocol.patience import MIN_UNFAMILIAR_S, Durations
from lightning_swarm.protocol.queries import MAX_TRIES, ask_each, is_superseded
from lightning_swarm.protocol.rpc import A, Call, Q


async def dismiss(transport: Transport, peers: Iterable[PeerId], *, broken_off: str = "", timeout: float) -> None:
    """Notify peers that the run is over for them, with the reason if it was aborted; a peer may be gone."""
    peers = sorted(set(peers))
    # A peer that was never admitted refuses the call, and continues to wait for a run.
    if broken_off:
        await ask_each(transport, peers, rpc.BREAK_OFF, RunAborted(reason=broken_off), timeout=timeout, tries=MAX_TRIES)
    else:
        await ask_each(transport, peers, rpc.LEAVE, None, timeout=timeout, tries=MAX_TRIES)


_T = TypeVar("_T")

ROUND_TIMEOUTS: Final = 5.0
"""Timeout of a round, in call timeouts: a server waits for parts, then for means, and PowerSGD averages twice."""

_MAX_DAMAGED: Final = 3  # repetitions of a call whose messages were damaged in transit
_FIRST_PAUSE_S: Final = 1.0  # wait before a record is sent to a server again; doubles each time
_LONGEST_PAUSE_S: Final = 30.0


class ServerSilent(DeadlineExceeded):
    """A server answers pings but not the coordinator's call, in a run with strangers."""


class ServerCalls:
    """The coordinator's calls to all servers that hold a stage."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._transport, self._run = context.transport, context.run
        self._term = context.proposer.term
        self._spawn = context.spawn
        self._timeout, self._silence_s = context.limits.call_timeout, context.limits.silence_timeout
        self._behind: dict[PeerId, Record] = {}  # server that may not have applied the newest record -> that record
        self.unsettled: dict[PeerId, SwarmError] = {}  # servers that did not confirm SETTLE of the open step
        self._has_strangers = context.run.electorate.has_strangers  # if not, calls have full timeouts
        self._durations = defaultdict[Rpc, Durations](Durations)  # method -> durations, from which deadlines follow
        self._durations_of = defaultdict[tuple[Rpc, PeerId], Durations](Durations)  # (method, server) -> durations

    @property
    def own(self) -> PeerId:
        """The coordinator's own id."""
        return self._transport.peer_id

    async def address(self) -> str:
        """Return an address of the coordinator."""
        return (await self._transport.addresses())[0]

    async def settle(self, request: SettleRequest) -> None:
        """Have the servers begin the open step with a change; exclude servers that fail from the step.

        Raises SwarmError if the coordinator's own server fails, or all servers of a stage.
        """
        _, failed = await self.ask_all(rpc.SETTLE, self._run.servers, request)
        for roster in self._run.rosters:
            if all(member.peer_id in failed for member in roster):
                raise failed[roster[0].peer_id]
        self.unsettled = failed

    async def freeze(
        self, requests: Mapping[PeerId, FreezeRequest]
    ) -> tuple[dict[PeerId, FreezeReply], dict[PeerId, SwarmError]]:
        """Have each server freeze its sums and report its ledgers; a server that missed a record gets it first."""

        async def freeze(peer: PeerId, request: FreezeRequest) -> FreezeReply:
            record = self._behind.get(peer)
            if record is not None:
                await self._apply(peer, record)
            # At least `MIN_UNFAMILIAR_S`: a late microbatch, replayed elsewhere, may still hold the compute thread.
            timeout = min(max(self._deadline_s(rpc.FREEZE, self._timeout, peer), MIN_UNFAMILIAR_S), self._timeout)
            answer = await self._call(peer, rpc.FREEZE, request, timeout=timeout)
            for signed in answer.bans or ():
                apply_received_ban(self._transport, signed)  # the step's record then includes it
            return answer

        works = {peer: partial(freeze, peer, request) for peer, request in requests.items()}
        return await self._each(rpc.FREEZE, works)

    async def average(
        self,
        closing: Closing,
        named: Mapping[PeerId, list[NamedReceipts]],
        *,
        is_late_step: bool,
        choose_blamed: Callable[[Mapping[PeerId, Sequence[PeerId]]], list[PeerId]],
    ) -> tuple[dict[PeerId, AverageReply], dict[PeerId, SwarmError]]:
        """Run a round of averaging. If no server fails or reports a failure, all hold their stages' means.

        `choose_blamed` names the servers to blame for a failed round, from the peers that each server did not reach.
        """
        patience_s = self._deadline_s(rpc.AVERAGE, self._timeout)
        waits = _AverageWaits(patience_s, choose_blamed)

        async def ask(peer: PeerId, request: AverageRequest) -> AverageReply:
            # Until the round fails, servers have time to wait for a silent server and report it before they are late.
            timeout = patience_s if waits.has_failed else ROUND_TIMEOUTS * patience_s
            async with waits.until_blamed(peer):
                reply = await self._call(peer, rpc.AVERAGE, request, timeout=timeout)
            if any(part.squared_norm < 0.0 for part in reply.parts):
                norms = [part.squared_norm for part in reply.parts]
                raise ProtocolError(f"squared norms must not be negative, got {norms}")
            if self._has_strangers:
                waits.note(peer, reply.unreached)
            return reply

        request = partial(AverageRequest, closing=closing, late=is_late_step, patience_s=patience_s)
        works = {peer: partial(ask, peer, request(named=receipts)) for peer, receipts in sorted(named.items())}
        return await self._each(rpc.AVERAGE, works)

    async def ask(self, peer: PeerId, method: Call[Q, A], request: Q, *, num_timeouts: float) -> A:
        """Call a peer, which has `num_timeouts` call timeouts to answer; raise its error."""
        return await self._call(peer, method, request, timeout=num_timeouts * self._timeout)

    async def apply(self, record: Record) -> None:
        """Have all servers that averaged, and newcomers, apply a decided record; retry servers that do not answer.

        Raises SwarmError if the coordinator's own server did not.
        """
        self._behind.clear()
        self.unsettled.clear()
        # These include servers that the record releases, because they stay until they have applied it.
        rosters = [*self._run.present(record.closing.absent), [newcomer.member for newcomer in record.newcomers]]
        peers = sorted({member.peer_id for roster in rosters for member in roster})
        _, unanswered = await self.ask_all(rpc.APPLY, peers, record)
        self._behind = dict.fromkeys(unanswered, record)
        for peer in unanswered:
            self._spawn(self._repeat_apply(peer, record))

    async def _repeat_apply(self, peer: PeerId, record: Record) -> None:
        """Retry until the peer answers, or the next step closes and sends the record before the freeze."""
        pause_s = _FIRST_PAUSE_S
        while self._behind.get(peer) is record:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                await self._apply(peer, record)
            except SwarmError:  # the next record removes a server that stays unreachable
                continue

    async def _apply(self, peer: PeerId, record: Record) -> None:
        await self._call(peer, rpc.APPLY, record)
        if self._behind.get(peer) is record:
            del self._behind[peer]

    async def ask_all(
        self, method: Call[Q, A], peers: Iterable[PeerId], request: Q
    ) -> tuple[dict[PeerId, A], dict[PeerId, SwarmError]]:
        """Call peers in parallel; return the answers, and the errors of the other peers."""
        return await self._each(method, {peer: partial(self._call, peer, method, request) for peer in peers})

    async def _each(
        self, method: Rpc, works: Mapping[PeerId, Callable[[], Awaitable[_T]]]
    ) -> tuple[dict[PeerId, _T], dict[PeerId, SwarmError]]:
        """Run all calls at once, and return answers and errors; an error of the coordinator's own server is raised.

        If servers are untrusted, calls do not wait for a server that is much later than the others. Raises
        NotCoordinator if a server follows a higher term and the voters confirm it; a single report is not enough.
        """
        replies = await gather(self._answer_of(method, peer, work) for peer, work in works.items())
        results = dict(zip(works, replies, strict=True))
        if self._has_strangers and self._are_most_silent(results):
            # The whole swarm is slow, or this peer's own link. So silent servers get twice the time, and it is doubled
            # again whenever most are silent.
            self._durations[method].extend()
            silent = [peer for peer, result in results.items() if isinstance(result, ServerSilent)]
            late_replies = await gather(self._answer_of(method, peer, works[peer]) for peer in silent)
            results.update(zip(silent, late_replies, strict=True))
            if self._are_most_silent(results):  # then no server is held to be silent
                results = {
                    peer: DeadlineExceeded(str(result)) if isinstance(result, ServerSilent) else result
                    for peer, result in results.items()
                }
        failed = {peer: result for peer, result in results.items() if isinstance(result, SwarmError)}
        deposed = next((error for error in failed.values() if isinstance(error, NotCoordinator)), None)
        if deposed is not None and await is_superseded(self._transport, self._run, self._term, timeout=self._silence_s):
            raise deposed
        return {peer: result for peer, result in results.items() if not isinstance(result, SwarmError)}, failed

    def _are_most_silent(self, results: Mapping[PeerId, object]) -> bool:
        """Return whether most servers, not counting the coordinator's own, gave no answer in time."""
        num_silent = sum(isinstance(result, ServerSilent) for result in results.values())
        return 2 * num_silent > len(results) - (self.own in results)

    async def _answer_of(self, method: Rpc, peer: PeerId, work: Callable[[], Awaitable[_T]]) -> _T | SwarmError:
        """Return a call's answer or error, and record its duration; raise an error of the coordinator's own server."""
        began_s = now_s()
        try:
            answer = await work()
        except SwarmError as error:
            if peer == self.own:
                raise
            is_silent = self._has_strangers and isinstance(error, DeadlineExceeded)
            return ServerSilent(str(error)) if is_silent else error
        if self._has_strangers and peer != self.own:
            self._durations[method].add(now_s() - began_s)
            self._durations_of[method, peer].add(now_s() - began_s)
        return answer

    def _deadline_s(self, method: Rpc, longest_s: float, peer: PeerId | None = None) -> float:
        """Return the seconds that a server may take; if servers are untrusted, a multiple of its usual time."""
        if not self._has_strangers:
            return longest_s
        usual = self._durations[method]
        # Without a peer, all servers do the work together.
        slower = 1.0 if peer is None else usual.slowdown(self._durations_of[method, peer])
        return usual.deadline_s(longest_s=longest_s, slowdown=slower)

    async def _call(self, peer: PeerId, method: Call[Q, A], request: Q, *, timeout: float | None = None) -> A:
        """Call a peer under this coordinator's term. `timeout` is in seconds; None: the result of `_deadline_s`."""
        try:
            if timeout is None:
                timeout = self._deadline_s(method, self._timeout, peer)
            if peer == self.own:  # this server is no stranger, and the step fails if it fails
                timeout = max(timeout, self._timeout)
            ask = partial(method.ask, self._transport, peer, request, timeout=timeout)
            for _ in range(_MAX_DAMAGED):
                with contextlib.suppress(Damaged):  # a repeated call takes effect only once
                    return await self._as_coordinator(peer, ask)
            return await self._as_coordinator(peer, ask)
        except Unreachable as error:
            members = ({member.peer_id for member in roster} for roster in self._run.rosters)
            stages = [f"stage {index}" for index, peers in enumerate(members) if peer in peers]
            held = " and ".join(stages) or "no stage yet"
            raise Unreachable(f"peer {peer}, which holds {held}, is gone ({error})") from error

    async def _as_coordinator(self, peer: PeerId, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Call a peer; if it does not know this coordinator yet, announce the term and call again.

        Raises NotCoordinator if the peer knows a coordinator under a higher term.
        """
        try:
            return await ask()
        except NotCoordinator:
            run = self._run
            announced = CoordinatorTerm(term=self._term, generation=run.manifest.generation, version=run.version)
            await rpc.ANNOUNCE_TERM.ask(self._transport, peer, announced, timeout=self._timeout)
            return await ask()


class _AverageWaits:
    """Ends the wait for a server that does not answer, once other servers' reports blame it for a failed round."""

    def __init__(
        self, patience_s: float, choose_blamed: Callable[[Mapping[PeerId, Sequence[PeerId]]], list[PeerId]]
    ) -> None:
        self._patience_s, self._choose_blamed = patience_s, choose_blamed
        self._unreached: dict[PeerId, Sequence[PeerId]] = {}  # server -> peers that it did not reach
        self._timeouts: dict[PeerId, asyncio.Timeout] = {}  # timeouts of servers that have not answered
        self._earliest_s = now_s() + patience_s  # before this time, no wait ends

    @property
    def has_failed(self) -> bool:
        """True if the round will have no mean."""
        return any(self._unreached.values())

    @contextlib.asynccontextmanager
    async def until_blamed(self, peer: PeerId) -> AsyncIterator[None]:
        """Wait for an answer within the context; raise DeadlineExceeded if the server is blamed before it answers."""
        try:
            async with asyncio.timeout(None) as timeout:
                self._timeouts[peer] = timeout
                yield
        except TimeoutError as error:
            reason = f"{peer} sent other servers no part of a mean, and did not answer, for {self._patience_s:g} s"
            raise DeadlineExceeded(reason) from error
        finally:
            self._timeouts.pop(peer, None)

    def note(self, peer: PeerId, unreached: Sequence[PeerId]) -> None:
        """Record the peers that a server did not reach."""
        self._unreached[peer] = unreached
        while self._timeouts and self.has_failed:
            open_reports = {
                reporter: [silent for silent in reported if silent in self._timeouts]
                for reporter, reported in self._unreached.items()
            }
            blamed = self._choose_blamed(open_reports)
            # Continue only with a single, awaited server: of two that accuse each other, either may report falsely.
            if len(blamed) != 1 or blamed[0] not in self._timeouts:
                return
            self._timeouts.pop(blamed[0]).reschedule(self._earliest_s)
