"""Who coordinates, as far as one server is concerned: it watches, takes over, coordinates, steps down.

Every server holds a long poll at the coordinator. When that breaks, the voters take over by rank, each a little later
than the one before it: the first that gets a majority's promises coordinates, under a term higher than all before. The
others hear of it by LEAD; whoever missed that hears of it from any server. Two may believe that they coordinate, for a
term is not known to all at once; only one of them gets votes, and the other steps down as soon as it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from lightning_swarm.coordinator.consensus import Proposer
from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.coordinator import Coordinator
from lightning_swarm.coordinator.step.step_state import StepState
from lightning_swarm.coordinator.takeover import gather_books
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, NotCoordinator, ProtocolError, SwarmError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.role import Role
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.run import CoordinatorTerm, Member, PullRequest, Term, WatchReply, WatchRequest
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import APPLY, LEAD, METRICS, PULL, ROLE_CALLS, TAKE_METRICS, TAKE_OVER, WATCH
from lightning_swarm.protocol.queries import GRACE_S, look_around, watch
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.server.step_handlers import StepHandlers

_log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0
_MAX_HOLD_S: Final = 60.0
_RANKS_PER_SILENCE: Final = 5


class Leadership:
    """One server's part in it.

    Args:
        transport: Its network.
        stepping: Its stages.
        me: This server in this life.
        over: Set when the run is over here.
        limits: Bounds.
        events: Of this peer.
        announce: Tells those who come later that this peer coordinates.

    Attributes:
        coordinator: The role, while this server plays it.
        behind: Set when the others have a record that this server cannot have: it may be left out.
    """

    def __init__(
        self,
        transport: Transport,
        stepping: StepHandlers,
        me: Member,
        over: asyncio.Event,
        *,
        limits: Limits,
        events: EventLog,
        announce: Callable[[PeerId], Awaitable[None]],
    ) -> None:
        self._transport = transport
        self._stepping = stepping
        self._me = me
        self._over = over
        self._limits = limits
        self._events = events
        self._announce = announce
        self._role = Role(transport, ROLE_CALLS, {METRICS: limits.max_metric_bytes, TAKE_METRICS: 0})
        self._run: RunState | None = None
        self._tasks = TaskOwner()
        self._changed = asyncio.Event()
        self._leads = False  # from the promises on, before there are books
        self._taking = asyncio.Lock()
        self._number = 0  # the highest that any term is known to have had
        self.coordinator: Coordinator | None = None
        self.behind = asyncio.Event()
        transport.handle_call(LEAD, self._handle_lead)
        transport.handle_call(WATCH, self._handle_watch)
        transport.handle_call(PULL, self._handle_pull)
        transport.handle_call(TAKE_OVER, self._handle_take_over)

    async def enter_run(self, run: RunState) -> None:
        """The run begins, and its manifest says who coordinates.

        That one may be admitted last: until then it is busy, and nobody takes over for that within the start timeout.
        """
        if run.coordinator == self._me.peer_id:
            await self._coordinate(run, self._proposer(run, run.term), None)
        await self.follow(run, waits_until_s=now_s() + self._limits.start_timeout)

    async def follow(self, run: RunState, *, waits_until_s: float = 0.0) -> None:
        """Watch who coordinates a run; until then, on the loop's clock, one that begins may not coordinate yet."""
        self._run = run
        await self._tasks.close()
        self._tasks = TaskOwner()
        await self._tasks.start()
        self._tasks.spawn(self._keep_watch(run, waits_until_s))

    async def go_back(self) -> None:
        """The run entered its next generation."""
        if self.coordinator is not None:
            await self.coordinator.enter_generation()

    async def step_out(self) -> None:
        """This server is in the run no more."""
        self._run = None
        await self._tasks.close()
        await self._step_down()

    async def abdicate(self) -> None:
        """Have another server coordinate, before this one leaves. Nothing, if it does not coordinate.

        Raises:
            PeerError: None of the others came to.
        """
        run = self._run
        if run is None or self.coordinator is None:
            return
        others = [member.peer_id for member in run.voters if member != self._me]
        others += [peer for peer in run.servers if peer not in others and peer != self._me.peer_id]
        request = encode(CoordinatorTerm(term=run.term, generation=run.manifest.generation, version=run.version))
        for peer in others:
            try:
                await self._transport.call(peer, TAKE_OVER, request, timeout=self._limits.call_timeout)
            except SwarmError as error:
                _log.info("Server %s does not take over: %s", peer, error)
                continue
            if self.coordinator is None:
                return
        raise Busy(f"none of {others} came to coordinate in place of {self._me.peer_id}")

    def _step_aside(self) -> None:
        self._tasks.spawn(self._try_to_abdicate())

    async def _try_to_abdicate(self) -> None:
        try:
            await self.abdicate()
        except SwarmError as error:
            _log.info("This peer goes on to coordinate, and does not move: %s", error)

    async def close(self) -> None:
        """The run is over. Raises what a task of the coordinator raised."""
        await self._tasks.close()
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is not None:
            await coordinator.close(over=self._over.is_set())

    # ------------------------------------------------------------------ what others say

    async def _handle_lead(self, caller: PeerId, body: bytes) -> bytes:
        """Another peer, or this one, has a majority's promises."""
        leading = decode(body, CoordinatorTerm)
        run = self._following()
        if caller != leading.term[1] or caller not in run.servers:
            raise ProtocolError(f"a run is led by one of its servers, under its own term; {caller} has {leading.term}")
        run.check_generation(leading.generation)
        if leading.term < run.term:
            raise NotCoordinator(f"the run is led under the term {run.term}, which is higher than {leading.term}")
        await self._follow_term(run, leading.term)
        return encode(CoordinatorTerm(term=run.term, generation=run.manifest.generation, version=run.version))

    async def _handle_take_over(self, caller: PeerId, body: bytes) -> bytes:
        """The coordinator leaves, and asks this server to be the next."""
        asked = decode(body, CoordinatorTerm)
        run = self._following()
        run.check_generation(asked.generation)
        run.check_coordinator(caller)
        if asked.term != run.term or asked.version != run.version:
            raise Busy(f"this server is at version {run.version} under the term {run.term}, not where {caller} is")
        await self._take_over(run, f"{caller} leaves")
        if self.coordinator is None:
            raise Busy("no majority of the voters let this server coordinate")
        return b""

    async def _follow_term(self, run: RunState, term: Term) -> None:
        if not run.follow(term):
            return
        await self._step_down()
        await self._stepping.reopen()
        self._notify()

    async def _step_down(self) -> None:
        self._leads = False
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is not None:
            self._role.retire()
            _log.info("This peer does not coordinate any more.")
            await coordinator.retire()
        self._notify()

    async def _handle_watch(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, WatchRequest)
        if self._run is None:  # at a run's beginning those that were admitted before this peer look for it
            raise Busy("this peer was not admitted to a run yet")
        run = self._run
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(request.hold_s, _MAX_HOLD_S)):
                while self._leads and run.term == request.term and run.version <= request.version:
                    await self._changed.wait()
        return encode(WatchReply(term=run.term, version=run.version, coordinates=self._leads))

    async def _handle_pull(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, PullRequest)
        run = self._following()
        if caller not in run.servers:
            raise ProtocolError(f"records are for the run's servers, and {caller} is none")
        run.check_generation(request.generation)
        if run.newest is None or run.newest.step != request.step:
            raise ProtocolError(f"this peer is at version {run.version}, and keeps no record but the newest")
        return encode(run.newest)

    def _following(self) -> RunState:
        if self._run is None:
            raise ProtocolError("this peer was not admitted to a run yet")
        return self._run

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------ watching

    async def _keep_watch(self, run: RunState, waits_until_s: float) -> None:
        while not self._over.is_set():
            coordinator = self.coordinator
            if coordinator is not None:
                await self._look_after(run, coordinator)
                continue
            asked = run.term
            try:
                reply = await self._watch(run)
            except SwarmError as error:
                if isinstance(error, Busy) and run.version == run.manifest.first_step and now_s() < waits_until_s:
                    await asyncio.sleep(_RETRY_S)
                elif run.term == asked:
                    await self._miss(run, str(error))
                continue
            await self._follow_term(run, reply.term)
            if run.term != asked:
                continue
            if reply.version > run.version:
                await self._catch_up(run, run.coordinator)
            elif not reply.coordinates:
                await self._miss(run, "it stepped down")
            elif reply.term < run.term:
                await asyncio.sleep(_RETRY_S)  # it will hear of its own term

    async def _look_after(self, run: RunState, coordinator: Coordinator) -> None:
        """Until this server coordinates no more. If it was frozen, or cut off, nobody may have told it."""
        while self.coordinator is coordinator and not coordinator.deposed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * self._limits.silence_timeout):
                    await self._changed.wait()
                    continue
            for reply in (await look_around(self._transport, run, timeout=self._limits.silence_timeout)).values():
                await self._follow_term(run, reply.term)
        if self.coordinator is coordinator:
            await self._step_down()

    async def _watch(self, run: RunState) -> WatchReply:
        if run.coordinator == self._me.peer_id:
            raise NotCoordinator("this peer stepped down, and nobody else is known to coordinate")
        hold_s = min(2 * self._limits.silence_timeout, _MAX_HOLD_S)
        request = WatchRequest(term=run.term, version=run.version, hold_s=hold_s)
        return await watch(self._transport, run.coordinator, request, timeout=hold_s + self._limits.silence_timeout)

    async def _miss(self, run: RunState, reason: str) -> None:
        """The coordinator is gone, or does not coordinate: find the next one, or be it."""
        missed = run.term
        replies = await look_around(self._transport, run, timeout=self._limits.silence_timeout)
        for peer, reply in replies.items():
            self._number = max(self._number, reply.term[0])
            if reply.term > run.term:
                await self._follow_term(run, reply.term)
            if reply.version > run.version:
                await self._catch_up(run, peer)
        candidates = [one for one in run.voters if one.peer_id != run.coordinator or one == self._me]
        if run.term == missed and self._me in candidates:
            # The ranks behind give the one before them the time that it needs to be heard of.
            rank = candidates.index(self._me)
            await asyncio.sleep(rank * self._limits.silence_timeout / _RANKS_PER_SILENCE)
            if run.term == missed and not self._over.is_set():
                await self._take_over(run, reason)
        if self.coordinator is None:
            await asyncio.sleep(_RETRY_S)

    async def _catch_up(self, run: RunState, peer: PeerId) -> None:
        """Apply a record that this server has not heard of, with what it holds of its round."""
        request = PullRequest(generation=run.manifest.generation, step=run.version)
        try:
            body = await self._transport.call(peer, PULL, encode(request), timeout=self._limits.silence_timeout)
            await self._take(run, decode(body, Record))
        except SwarmError as error:
            _log.info("Record %d could not be had from %s: %s", request.step, peer, error)
            self.behind.set()
            await asyncio.sleep(_RETRY_S)

    async def _take(self, run: RunState, record: Record) -> None:
        if (record.closing.generation, record.step) == (run.manifest.generation, run.version):
            await self._stepping.apply_record(record)

    # ------------------------------------------------------------------ taking over

    async def _take_over(self, run: RunState, reason: str) -> None:
        async with self._taking:
            if self.coordinator is None:
                await self._try_to_lead(run, reason)

    async def _try_to_lead(self, run: RunState, reason: str) -> None:
        before = run.coordinator
        number = max(self._number, run.term[0]) + 1
        term: Term = (number, self._me.peer_id, self._me.boot_id)
        self._number = number
        timeout = self._limits.silence_timeout
        proposer = self._proposer(run, term)
        try:
            while True:
                async with asyncio.timeout(timeout):
                    accepted = await proposer.prepare()
                await self._lead(run, term, accepted)
                if accepted is None:
                    break
                async with asyncio.timeout(timeout):
                    await proposer.decide(accepted)
                await self._apply(run, accepted)
        except (TimeoutError, SwarmError) as error:
            why = str(error) or "no majority of the voters let it in time"
            _log.info("This peer did not come to coordinate under the term %s: %s", term, why)
            self._number = max(self._number, proposer.rival_number)
            self._leads = False
            return
        books = await gather_books(self._transport, run, self._stepping.sums.reselected, timeout=timeout)
        if run.term != term:
            return  # another one was quicker meanwhile
        await self._coordinate(run, proposer, books)
        self._events.note("takeover", peer=self._me.peer_id, step=run.version, reason=f"from {before}: {reason}")
        self._tasks.spawn(self._say_so(run))

    async def _say_so(self, run: RunState) -> None:
        try:
            await self._announce(run.coordinator)
        except SwarmError as error:
            _log.warning("Who joins later may not find who coordinates: %s", error)

    def _proposer(self, run: RunState, term: Term) -> Proposer:
        return Proposer(
            self._transport,
            run,
            term,
            timeout=self._limits.call_timeout,
            patience_s=self._limits.stage_timeout,
            events=self._events,
        )

    async def _coordinate(self, run: RunState, proposer: Proposer, books: StepState | None) -> None:
        books = books or StepState.of(run.manifest)
        context = CoordinatorContext(self._role, run, proposer, books, limits=self._limits, events=self._events)
        coordinator = Coordinator(context, on_deposed=self._notify, step_aside=self._step_aside)
        await coordinator.start()
        self.coordinator, self._leads = coordinator, True
        self._notify()
        if run.term != proposer.term:  # it was told so while there was no coordinator to step down
            await self._step_down()

    async def _lead(self, run: RunState, term: Term, accepted: Record | None) -> None:
        """Say that this server leads, to itself first. Who does not hear of it now is told by the first one it asks."""
        await self._follow_term(run, term)
        self._leads = True
        newcomers = [] if accepted is None else [one.member.peer_id for one in accepted.newcomers]
        body = encode(CoordinatorTerm(term=term, generation=run.manifest.generation, version=run.version))

        async def tell(peer: PeerId) -> None:
            try:
                answer = await self._transport.call(peer, LEAD, body, timeout=self._limits.silence_timeout)
                if (
                    run.newest is not None and decode(answer, CoordinatorTerm).version == run.newest.step
                ):  # it was not told
                    await self._transport.call(peer, APPLY, encode(run.newest), timeout=self._limits.call_timeout)
            except SwarmError as error:
                _log.info("Server %s does not know yet who coordinates: %s", peer, error)

        await self._to_all({*run.servers, *newcomers}, tell)

    async def _apply(self, run: RunState, record: Record) -> None:
        """Have what was finished applied; here, too, if the record does not leave this peer out."""
        body = encode(record)

        async def tell(peer: PeerId) -> None:
            try:
                await self._transport.call(peer, APPLY, body, timeout=self._limits.call_timeout)
            except SwarmError as error:
                _log.info("Server %s did not apply record %d: %s", peer, record.step, error)

        peers = {member.peer_id for roster in run.present(record.closing.absent) for member in roster}
        await self._to_all(peers | {one.member.peer_id for one in record.newcomers}, tell)
        await self._take(run, record)  # last: who is left out cannot, and then another one coordinates those who can

    async def _to_all(self, peers: set[PeerId], tell: Callable[[PeerId], Coroutine[Any, Any, None]]) -> None:
        """Tell all but this one at once. Who does not answer soon is told all the same, and not waited for."""
        telling = {self._tasks.spawn(tell(peer)) for peer in sorted(peers - {self._me.peer_id})}
        if telling:
            await asyncio.wait(telling, timeout=GRACE_S)
