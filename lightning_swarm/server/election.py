"""One server's part in electing the coordinator: it watches the coordinator, takes over, coordinates, steps down.

Every server has a long poll open at the coordinator (WATCH). When it breaks, the voters stand for election by rank: the
first that gets promises from a majority coordinates, under a term higher than all before. A voter promises only if the
coordinator does not answer it either, or hands over. The other servers learn the term by ANNOUNCE_TERM, or from any
server, and follow it once a majority of the voters confirms that it promised this term. Two servers may act as
coordinators, but only one of them gets votes, and the other steps down when it learns the higher term.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final

from lightning_swarm.coordinator.consensus import Proposer, Voter, serve, slot_of
from lightning_swarm.coordinator.context import CoordinatorContext, StepState
from lightning_swarm.coordinator.coordinator import Coordinator
from lightning_swarm.coordinator.record_check import check_record
from lightning_swarm.coordinator.step.oversight import RunOversight
from lightning_swarm.coordinator.takeover import gather_step_state
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, NotCoordinator, ProtocolError, SwarmError
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.network import PeerId
from lightning_swarm.network.task_transport import TaskTransport
from lightning_swarm.protocol.bans import unrecorded
from lightning_swarm.protocol.keepers import is_certified_keeper
from lightning_swarm.protocol.messages.run import NO_TERM, CoordinatorTerm, StepRequest, Term, WatchReply, WatchRequest
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.queries import GRACE_S, ask_servers, find_promised, is_superseded
from lightning_swarm.protocol.rpc import ANNOUNCE_TERM, APPLY, METRICS, PULL, RPCS, TAKE_METRICS, TAKE_OVER, WATCH, Call
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.step_handlers import StepHandlers

_log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0  # pause before the next search for a coordinator
_MAX_HOLD_S: Final = 60.0  # longest wait of one WATCH call
_RANKS_PER_SILENCE: Final = 5  # voters that may stand for election in turn during one silence timeout


class Election:
    """Watches the coordinator of this server's run, and coordinates itself when it is elected."""

    def __init__(self, context: ServerContext, steps: StepHandlers, over: asyncio.Event) -> None:
        transport, limits = context.transport, context.limits
        self._transport, self._limits, self._events = transport, limits, context.events
        self._membership, self._steps, self._me = context.membership, steps, context.me
        self._announce = context.announce
        self._oversight = RunOversight()  # what this peer found out about servers when it last coordinated
        self._over = over  # set when the run is over here
        calls = [rpc.name for rpc in RPCS if rpc.only_coordinator and isinstance(rpc, Call)]
        self._role = TaskTransport(transport, calls, {METRICS.name: limits.max_metric_bytes, TAKE_METRICS.name: 0})
        self._run: RunState | None = None  # the run that this server follows; None until it does
        self._tasks = TaskOwner()  # tasks of the run
        self._changed = asyncio.Event()  # set, and replaced, when the term or the coordinator changes
        self._has_majority = False  # true once a majority promised, before `coordinator` is set
        self._electing = asyncio.Lock()
        self._highest_number = 0  # a new term needs a higher number: this server used this one, or a voter knew it
        self._ended_term = NO_TERM  # the term whose coordinator this server replaces: it is gone, or stepped down
        self._successor: PeerId | None = None  # the server that this coordinator asks to take over, before it leaves
        self._waits_until_s = 0.0  # time until which the coordinator of a new run may be absent
        self.voter = Voter(context.boot_id, pace_s=limits.silence_timeout / 2)
        self.coordinator: Coordinator | None = None  # set while this server coordinates
        self.left_out_because = ""  # reason, if the newest record excludes this server
        self.behind = asyncio.Event()  # set if a record could not be fetched, perhaps because it excludes this server
        ANNOUNCE_TERM.serve(transport, self._handle_term)
        WATCH.serve(transport, self._handle_watch)
        PULL.serve(transport, self._handle_pull)
        TAKE_OVER.serve(transport, self._handle_take_over)
        may_propose, may_succeed = self._membership.may_coordinate, self._may_succeed
        serve(self.voter, transport, may_propose, may_succeed, self._check_slot, self._check_proposed)

    async def enter_run(self, run: RunState) -> None:
        """Enter a run at its beginning, and follow the coordinator of its manifest."""
        self.voter.follow(run.term)
        if run.coordinator == self._me.peer_id:
            await self._coordinate(run, self._proposer(run, run.term), StepState.of(run))
        # The coordinator may be admitted last. Until then it answers `Busy`, which is no reason to take over.
        await self.follow(run, waits_until_s=now_s() + self._limits.start_timeout)

    async def follow(self, run: RunState, *, waits_until_s: float = 0.0) -> None:
        """Watch a run's coordinator; in a new run it may be absent until `waits_until_s`, a time of `now_s`."""
        self._run, self._waits_until_s = run, waits_until_s
        self.voter.follow(run.term)
        await self._tasks.close()
        self._tasks = TaskOwner()
        await self._tasks.start()
        self._tasks.spawn(self._keep_watch(run))

    async def enter_generation(self) -> None:
        """Follow this server's run into its next generation."""
        if self.coordinator is not None:
            await self.coordinator.enter_generation()

    async def step_out(self) -> None:
        """Stop following the run, and stop coordinating."""
        self._run, self.left_out_because = None, ""
        await self._tasks.close()
        await self._step_down()

    async def abdicate(self) -> None:
        """Hand over to another coordinator before this server leaves; raise `PeerError` if no other server can."""
        run = self._membership.run_or_none
        if run is None or self.coordinator is None:
            return
        candidates = [member.peer_id for member in run.voters if member != self._me]
        candidates += [
            peer for peer in run.servers if peer not in candidates and peer != self._me.peer_id and run.decides(peer)
        ]
        request = CoordinatorTerm(term=run.term, generation=run.manifest.generation, version=run.version)
        for peer in candidates:
            self._successor = peer
            try:
                await TAKE_OVER.ask(self._transport, peer, request, timeout=self._limits.call_timeout)
            except SwarmError as error:
                _log.info("Server %s does not take over: %s", peer, error)
                continue
            finally:
                self._successor = None
            if self.coordinator is None:  # it stepped down when the new coordinator announced its term
                return
        raise Busy(f"none of {candidates} took over from {self._me.peer_id} as coordinator{run.electorate.remedy}")

    async def close(self) -> None:
        """End with the run; raise the error of a coordinator's task, if any."""
        await self._tasks.close()
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is not None:
            await coordinator.close(over=self._over.is_set())

    # ------------------------------------------------------------------ calls of other servers

    async def _handle_term(self, caller: PeerId, announced: CoordinatorTerm) -> CoordinatorTerm:
        """Follow another server that reports promises of a majority, once the voters confirm them."""
        run = self._membership.running
        if caller != announced.term[1] or caller not in run.servers:
            raise ProtocolError(
                f"a server of the run must announce its own term as coordinator, got {announced.term} from {caller}"
            )
        run.electorate.check_decides(caller, "coordinate")
        run.check_generation(announced.generation)
        if announced.term < run.term:
            raise NotCoordinator(
                f"the run is coordinated under the term {run.term}, which is higher than {announced.term}"
            )
        await self._follow_promised(run, [announced.term])
        if run.term < announced.term:
            raise ProtocolError(
                f"a term is followed if a majority of the voters promised it; too few of the voters that answered have "
                f"promised {announced.term}. Get promises from a majority before announcing a term."
            )
        return CoordinatorTerm(term=run.term, generation=run.manifest.generation, version=run.version)

    async def _handle_take_over(self, caller: PeerId, asked: CoordinatorTerm) -> None:
        """Become the coordinator, because the present coordinator leaves and asks for it."""
        run = self._membership.running
        run.check_generation(asked.generation)
        run.check_coordinator(caller)
        run.electorate.check_decides(self._me.peer_id, "coordinate")
        if asked.term != run.term or asked.version != run.version:
            raise Busy(f"{caller} is not at version {run.version} under the term {run.term}, as this server is")
        await self._take_over(run, f"{caller} leaves")
        if self.coordinator is None:
            raise Busy("this server got no majority of the voters")

    async def _follow_promised(self, run: RunState, terms: Iterable[Term]) -> None:
        """Follow the highest of these terms that a majority of the voters promised, if it is above the known term."""

        def agrees(term: Term) -> bool:
            if term == self.voter.term:  # this voter promised it
                return True
            # This voter also agrees to a higher term that other voters promised, within its limit for numbers, if the
            # known coordinator is gone: it does not answer, or is this server itself, which has stepped down.
            has_stepped_down = run.coordinator == self._me.peer_id and not self._has_majority
            coordinator_is_gone = self._ended_term == run.term or has_stepped_down
            return coordinator_is_gone and self.voter.term < term and term[0] <= self.voter.highest_number

        term = await find_promised(self._transport, run, terms, timeout=self._limits.silence_timeout, own=agrees)
        if term is not None:
            await self._follow_term(run, term)

    async def _follow_term(self, run: RunState, term: Term) -> None:
        """Follow a term if it is higher than the known term, and end work for the former coordinator."""
        if not run.follow_term(term):
            return
        self.voter.follow(term)
        await self._step_down()
        await self._steps.reopen()
        self._notify()

    async def _step_down(self) -> None:
        self._has_majority = False
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is not None:
            self._role.retire()
            _log.info("This peer stepped down as coordinator.")
            await coordinator.retire()
        self._notify()

    async def _handle_watch(self, caller: PeerId, request: WatchRequest) -> WatchReply:
        """Answer a watching server once its term or version is outdated, or this server does not coordinate."""
        run = self._run
        if run is None:  # a peer that a new run admitted first may call already
            raise Busy("this peer was not admitted to a run yet")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(request.hold_s, _MAX_HOLD_S)):
                while self._has_majority and run.term == request.term and run.version <= request.version:
                    await self._changed.wait()
        return WatchReply(
            term=run.term,
            version=run.version,
            coordinates=self._has_majority,
            promised=max(run.term, self.voter.term),
            successor=self._successor,
        )

    async def _may_succeed(self, candidate: PeerId) -> bool:
        """Return whether this voter may promise to a candidate: the coordinator is gone, or hands over to it."""
        run = self._membership.running
        if self._has_majority:
            return self._successor == candidate
        if self._ended_term == run.term or run.coordinator == self._me.peer_id:
            return True
        request = WatchRequest(term=run.term, version=run.version, hold_s=0.0)
        try:
            reply = await WATCH.ask(self._transport, run.coordinator, request, timeout=self._limits.silence_timeout / 2)
        except SwarmError as error:
            return not self._is_beginning(run, error)
        return not reply.coordinates or reply.successor == candidate

    def _check_slot(self, generation: int, step: int) -> None:
        """Refuse to promise for steps beyond the next: none can be open for a voter that lacks one record at most."""
        run = self._membership.running
        run.check_generation(generation)
        if step > run.version + 1:  # a voter that lacks more than one record cannot vote, see `_check_proposed`
            raise Busy(f"this voter is at version {run.version}, and cannot promise for step {step}")

    async def _check_proposed(self, record: Record) -> None:
        """Refuse to vote for a record that cannot follow from the previous record, which must be known here."""
        run = self._membership.running
        if slot_of(record) > (run.manifest.generation, run.version):
            with contextlib.suppress(SwarmError):
                await self._pull_next(run)
        if slot_of(record) > (run.manifest.generation, run.version):
            raise Busy(f"this voter is at version {run.version}, and lacks the record before record {record.step}")
        self._check_record(record)

    def _check_record(self, record: Record) -> None:
        """Refuse a record that cannot follow from the state known here."""
        run, closing = self._membership.running, record.closing
        check_record(run, record)
        for signed in unrecorded(run.bans, record.bans):
            self._transport.ban(signed)
        for peer in record.keepers or ():
            if is_certified_keeper(self._transport, peer) is False:  # None: its certificate is not known here yet
                raise ProtocolError(f"record {record.step} names {peer} as a keeper, and its certificate does not")
        if self._me.peer_id not in closing.absent:
            self._steps.rounds.means_for(record)  # called because it raises if the round is not held here

    def _is_beginning(self, run: RunState, error: SwarmError) -> bool:
        """Return whether the run has only begun, and its coordinator was not admitted yet."""
        return isinstance(error, Busy) and run.version == run.manifest.first_step and now_s() < self._waits_until_s

    async def _handle_pull(self, caller: PeerId, request: StepRequest) -> Record:
        run = self._membership.running
        if caller not in run.servers:
            raise ProtocolError(f"records are sent only to the run's servers, got a call of {caller}")
        run.check_generation(request.generation)
        if run.newest is None or run.newest.step != request.step:
            raise ProtocolError(f"this peer keeps only the newest record, got a request for record {request.step}")
        return run.newest

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------ watching

    async def _keep_watch(self, run: RunState) -> None:
        """Watch the coordinator until the run is over: follow new terms, fetch missed records, and take over."""
        while not self._over.is_set():
            coordinator = self.coordinator
            if coordinator is not None:
                await self._until_deposed(run, coordinator)
                continue
            watched_term = run.term
            try:
                reply = await self._watch(run)
            except SwarmError as error:
                if self._is_beginning(run, error):
                    await asyncio.sleep(_RETRY_S)
                elif run.term == watched_term:
                    await self._replace_coordinator(run, str(error))
                continue
            await self._follow_promised(run, [reply.term])
            if run.term != watched_term:
                continue
            if reply.version > run.version:
                await self._catch_up(run)
            elif not reply.coordinates:
                await self._replace_coordinator(run, "it stepped down")
            elif reply.term < run.term:
                await asyncio.sleep(_RETRY_S)  # the coordinator has not yet adopted its own newer term

    async def _until_deposed(self, run: RunState, coordinator: Coordinator) -> None:
        """Wait until this server no longer coordinates. Ask the voters for higher terms, because it may be cut off."""
        while self.coordinator is coordinator and not coordinator.deposed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * self._limits.silence_timeout):
                    await self._changed.wait()
                    continue  # the voters are asked only after a timeout
            if await is_superseded(self._transport, run, run.term, timeout=self._limits.silence_timeout):
                break
        if self.coordinator is coordinator:
            await self._step_down()

    async def _watch(self, run: RunState) -> WatchReply:
        if run.coordinator == self._me.peer_id:
            raise NotCoordinator("this peer stepped down as coordinator, and no other is known")
        hold_s = min(2 * self._limits.silence_timeout, _MAX_HOLD_S)
        request = WatchRequest(term=run.term, version=run.version, hold_s=hold_s)
        return await WATCH.ask(self._transport, run.coordinator, request, timeout=hold_s + self._limits.silence_timeout)

    async def _replace_coordinator(self, run: RunState, reason: str) -> None:
        """Find the next coordinator or become it, because the present coordinator is gone or stepped down."""
        self._ended_term = run.term
        try:
            await self._find_successor(run, reason)
        finally:
            self._ended_term = NO_TERM
        if self.coordinator is None:
            await asyncio.sleep(_RETRY_S)

    async def _find_successor(self, run: RunState, reason: str) -> None:
        """Follow a coordinator that other servers know; if they know none, stand for election in this voter's turn."""
        ended_term = run.term
        replies = await ask_servers(self._transport, run)
        await self._follow_promised(run, {reply.term for reply in replies.values()})
        # A missed record comes only from the coordinator. If it is gone, its successor sends the record, or a promise.
        if run.coordinator in replies and replies[run.coordinator].version > run.version:
            await self._catch_up(run)
        # The former coordinator may stand again, but the other voters do not wait for its turn.
        candidates = [voter for voter in run.voters if voter.peer_id != run.coordinator or voter == self._me]
        if run.term == ended_term and self._me in candidates:
            # Each rank waits long enough for the rank before it to announce its term.
            rank = candidates.index(self._me)
            await asyncio.sleep(rank * self._limits.silence_timeout / _RANKS_PER_SILENCE)
            if run.term == ended_term and not self._over.is_set():
                await self._take_over(run, reason)

    async def _catch_up(self, run: RunState) -> None:
        """Fetch and apply a missed record. That suffices, because this server holds the mean gradients of its round."""
        peer, step = run.coordinator, run.version
        try:
            await self._pull_next(run)
        except SwarmError as error:
            _log.info("Record %d could not be fetched from %s: %s", step, peer, error)
            self.behind.set()
            await asyncio.sleep(_RETRY_S)

    async def _pull_next(self, run: RunState) -> None:
        """Fetch the next record from the coordinator and apply it; remember the reason if it excludes this server."""
        request = StepRequest(generation=run.manifest.generation, step=run.version)
        record = await PULL.ask(self._transport, run.coordinator, request, timeout=self._limits.silence_timeout)
        check_record(run, record)
        reasons = (departed.reason or "" for departed in record.left if departed.member == self._me)
        self.left_out_because = next(reasons, "")
        await self._apply_next(run, record)

    async def _apply_next(self, run: RunState, record: Record) -> None:
        if (record.closing.generation, record.step) == (run.manifest.generation, run.version):
            await self._steps.apply_record(record)

    # ------------------------------------------------------------------ taking over

    async def _take_over(self, run: RunState, reason: str) -> None:
        async with self._electing:
            if self.coordinator is None:
                await self._try_to_coordinate(run, reason)

    async def _try_to_coordinate(self, run: RunState, reason: str) -> None:
        """Get promises for a new term, decide a record that an earlier term left undecided, then coordinate."""
        former = run.coordinator
        number = max(self._highest_number, run.term[0]) + 1
        term: Term = (number, self._me.peer_id, self._me.boot_id)
        timeout = self._limits.silence_timeout
        proposer = self._proposer(run, term)
        try:
            while True:
                async with asyncio.timeout(timeout):
                    accepted = await proposer.prepare()
                self._highest_number = number  # the term must not be used again
                await self._announce_term(run, term, accepted)
                if accepted is None:  # no earlier record is undecided
                    break
                async with asyncio.timeout(timeout):
                    await proposer.decide(accepted)
                await self._apply_everywhere(run, accepted)
        except (TimeoutError, SwarmError) as error:
            why = str(error) or "no majority of the voters promised in time"
            _log.info("This peer did not become the coordinator under the term %s: %s", term, why)
            # The next number exceeds a majority's, but stays within this voter's own limit (see `Voter`): false reports
            # cannot use up the numbers.
            blocking_number = min(proposer.number_in_the_way, self.voter.highest_number - 1)
            self._highest_number = max(self._highest_number, blocking_number)
            self._has_majority = False
            return
        state = await gather_step_state(
            self._transport,
            run,
            self._steps.sums.next.change,
            timeout=timeout,
            max_metric_bytes=self._limits.max_metric_bytes,
        )
        if run.term != term:
            return  # another server was faster
        await self._coordinate(run, proposer, state)
        self._events.note("takeover", peer=self._me.peer_id, step=run.version, reason=f"from {former}: {reason}")
        announcing = partial(self._announce, run.coordinator)
        self._tasks.spawn(_logged(announcing, "Later joiners may not find the coordinator: %s", level=logging.WARNING))

    def _proposer(self, run: RunState, term: Term) -> Proposer:
        return Proposer(
            self._transport,
            run,
            term,
            timeout=self._limits.call_timeout,
            patience_s=self._limits.stage_timeout,
            events=self._events,
            check_record=self._check_record,
        )

    async def _coordinate(self, run: RunState, proposer: Proposer, state: StepState) -> None:
        """Begin to coordinate, with the state of the open step."""

        def hand_over() -> asyncio.Task[None]:
            return self._tasks.spawn(_logged(self.abdicate, "This peer remains the coordinator: %s"))

        self._oversight = self._membership.oversight.coordinating(self._oversight)  # with earlier findings
        context = CoordinatorContext(
            self._role, run, proposer, state, self._limits, self._events, hand_over, self._oversight
        )
        coordinator = Coordinator(context, on_deposed=self._notify)
        await coordinator.generation.start()
        self.coordinator, self._has_majority = coordinator, True
        self._notify()
        if run.term != proposer.term:  # a higher term came before `coordinator` was set
            await self._step_down()

    async def _announce_term(self, run: RunState, term: Term, accepted: Record | None) -> None:
        """Adopt the new term, and announce it to all servers; a server that misses it learns it from another server."""
        await self._follow_term(run, term)
        self._has_majority = True
        newcomers = [] if accepted is None else [newcomer.member.peer_id for newcomer in accepted.newcomers]
        announced = CoordinatorTerm(term=term, generation=run.manifest.generation, version=run.version)

        async def announce(peer: PeerId) -> None:
            answer = await ANNOUNCE_TERM.ask(self._transport, peer, announced, timeout=self._limits.silence_timeout)
            if run.newest is not None and answer.version == run.newest.step:
                # The peer missed the newest record.
                await APPLY.ask(self._transport, peer, run.newest, timeout=self._limits.call_timeout)

        await self._send_all({*run.servers, *newcomers}, announce, "Server %s has not learned the new term yet: %s")

    async def _apply_everywhere(self, run: RunState, record: Record) -> None:
        """Send a decided record to its round's servers and to newcomers, and apply it here, too."""

        async def send(peer: PeerId) -> None:
            await APPLY.ask(self._transport, peer, record, timeout=self._limits.call_timeout)

        peers = {member.peer_id for roster in run.present(record.closing.absent) for member in roster}
        peers |= {newcomer.member.peer_id for newcomer in record.newcomers}
        await self._send_all(peers, send, f"Server %s did not apply record {record.step}: %s")
        # This server applies it last: that raises if the record excludes it, and then another server must coordinate.
        await self._apply_next(run, record)

    async def _send_all(
        self, peers: set[PeerId], send: Callable[[PeerId], Coroutine[Any, Any, None]], failure: str
    ) -> None:
        """Send to all other peers at once, and wait at most `GRACE_S` for their answers."""
        others = sorted(peers - {self._me.peer_id})
        sending = {self._tasks.spawn(_logged(partial(send, peer), failure, peer)) for peer in others}
        if sending:
            await asyncio.wait(sending, timeout=GRACE_S)


async def _logged(
    work: Callable[[], Awaitable[None]], failure: str, *values: object, level: int = logging.INFO
) -> None:
    """Run work whose failure others repair, and log its error; `failure` is a format for `values` and the error."""
    try:
        await work()
    except SwarmError as error:
        _log.log(level, failure, *values, error)
