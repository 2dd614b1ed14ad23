"""Promises and votes over a network: voters answer, and a proposer has its records decided."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from lightning_swarm.clock import now_s
from lightning_swarm.errors import NotCoordinator, ProtocolError, StepError, SwarmError
from lightning_swarm.events import EventLog
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.steps import PREPARE, PROPOSE
from lightning_swarm.steps.voting import Ballot, Voter, slot_of
from lightning_swarm.types.runs import Member, Term
from lightning_swarm.types.steps import Prepare, Promise, Proposal, Record, Vote
from lightning_swarm.types.wire import Wire, decode, encode

_log = logging.getLogger(__name__)
_T = TypeVar("_T", bound=Wire)

_RETRY_S: Final = 1.0
_SAY_S: Final = 60.0


def serve(voter: Voter, transport: Transport, may_propose: Callable[[PeerId], bool]) -> None:
    """Answer proposers who may be one; the term must be the caller's own."""

    def check(caller: PeerId, term: Term) -> None:
        if not may_propose(caller):
            raise ProtocolError(f"records are proposed by the run's servers, not by {caller}")
        if term[1] != caller:
            raise ProtocolError(f"a term carries its proposer's id, got {term} from {caller}")

    async def handle_prepare(caller: PeerId, body: bytes) -> bytes:
        request = decode(body, Prepare)
        check(caller, request.term)
        return encode(voter.promise(request))

    async def handle_propose(caller: PeerId, body: bytes) -> bytes:
        proposal = decode(body, Proposal)
        check(caller, proposal.term)
        return encode(voter.consider(proposal))

    transport.handle_call(PREPARE, handle_prepare)
    transport.handle_call(PROPOSE, handle_propose)


class Proposer:
    """Has the records of a run decided, one after the other, under one term.

    Args:
        transport: The coordinator's.
        run: As its own server knows it: its open step is what is decided, and its voters decide.
        term: The coordinator's own.
        timeout: Seconds for a voter to answer.
        patience_s: Seconds to go on asking while a majority of the voters does not answer.
        events: Of the coordinator.
    """

    def __init__(
        self,
        transport: Transport,
        run: RunState,
        term: Term,
        *,
        timeout: float,
        patience_s: float,
        events: EventLog,
    ) -> None:
        self._transport = transport
        self._run = run
        self._timeout = timeout
        self._patience_s = patience_s
        self._events = events
        self._ballot: Ballot | None = None
        self.term = term

    @property
    def first_round(self) -> int:
        """Where rounds of averaging begin in each step: beyond those of all lower terms, and of nobody's else."""
        return (self.term[0] - 1) << 20

    @property
    def rival_number(self) -> int:
        """The highest that a voter was heard to have promised to another peer, this one's own included; 0: none."""
        return 0 if self._ballot is None or self._ballot.rival is None else self._ballot.rival[0]

    async def begin(self) -> Record | None:
        """Get the right to work towards the open step's record. Before any round of averaging; cheap when repeated.

        Returns:
            What must be decided for this step instead, for another coordinator may have begun to; mostly None.

        Raises:
            NotCoordinator: Another term has the voters' promise, or the step was decided without this proposer.
            StepError: No majority of the voters answers.
        """
        slot = (self._run.manifest.generation, self._run.version)
        if self._ballot is None:
            self._ballot = Ballot(self.term, slot, self._run.voters)
        elif self._ballot.slot != slot:
            self._ballot = self._ballot.after(slot, self._run.voters)
        ballot = self._ballot
        await self._until(ballot, "promised", lambda: ballot.prepared, lambda one: self._prepare(ballot, one))
        chosen = ballot.chosen
        if chosen is None:
            fence = partial(self._prepare, ballot, fence=True)
            await self._until(ballot, "taken note", lambda: ballot.may_begin, fence)
        return chosen

    async def decide(self, record: Record) -> None:
        """Have the open step's record accepted by a majority of its voters. After `begin`.

        Raises:
            NotCoordinator: Another term has the voters' promise.
            StepError: No majority of the voters answers; the record is not known to be decided.
        """
        ballot = self._ballot
        if ballot is None or ballot.slot != slot_of(record):
            raise ProtocolError(f"record {record.step} is decided after its voters' promises, and by them")
        proposals = {voter: ballot.proposal(voter, record) for voter in ballot.voters}
        await self._until(ballot, "accepted", lambda: ballot.decided, lambda one: self._propose(ballot, one, proposals))

    async def _prepare(self, ballot: Ballot, voter: Member, *, fence: bool = False) -> None:
        promise = await self._ask(voter, PREPARE, ballot.prepare(voter, fence=fence), Promise)
        if promise is not None:
            ballot.hear_promise(voter, promise, fence=fence)

    async def _propose(self, ballot: Ballot, voter: Member, proposals: Mapping[Member, Proposal]) -> None:
        vote = await self._ask(voter, PROPOSE, proposals[voter], Vote)
        if vote is not None:
            ballot.hear_vote(voter, vote)

    async def _ask(self, voter: Member, method: str, request: Wire, kind: type[_T]) -> _T | None:
        try:
            body = await self._transport.call(voter.peer_id, method, encode(request), timeout=self._timeout)
            return decode(body, kind)
        except SwarmError as error:  # whatever is wrong with one voter, a majority of the others decides
            _log.info("Voter %s did not answer %s: %s", voter.peer_id, method, error)
            return None

    async def _until(
        self, ballot: Ballot, what: str, reached: Callable[[], bool], ask: Callable[[Member], Coroutine[Any, Any, None]]
    ) -> None:
        """Ask the voters, again and again, until a majority has done what is asked."""
        step = ballot.slot[1]
        deadline_s = now_s() + self._patience_s
        paused, said_s = False, now_s()
        while not reached():
            await _ask_all(ballot, reached, ask)
            if reached():
                break
            if ballot.lost or ballot.rival is not None:
                # Who has promised another term may be who is missing, and does not come back to this one.
                rival = "another one" if ballot.rival is None else f"{ballot.rival}, which a voter has promised"
                raise NotCoordinator(f"step {step} is not for the term {self.term} to decide, but for {rival}")
            if now_s() >= deadline_s:
                raise StepError(
                    f"step {step}: a majority of its voters {[one.peer_id for one in ballot.voters]} must have {what} "
                    f"to decide it, and has not within {self._patience_s:g} s. See that they run and can be reached."
                )
            if not paused:
                self._events.note("pause", step=step, reason=f"no majority of the voters has {what}; asking again")
            elif now_s() >= said_s + _SAY_S:
                names = ", ".join(one.peer_id for one in ballot.voters)
                _log.warning("Step %d waits for a majority of its voters: %s.", step, names)
                said_s = now_s()
            paused = True
            await asyncio.sleep(_RETRY_S)
        if paused:
            self._events.note("resume", step=step, reason=f"a majority of the voters has {what}")


async def _ask_all(
    ballot: Ballot, reached: Callable[[], bool], ask: Callable[[Member], Coroutine[Any, Any, None]]
) -> None:
    """Ask all voters at once; the last ones' answers are not waited for when they can change nothing."""
    async with asyncio.TaskGroup() as group:
        asking = {group.create_task(ask(voter)) for voter in ballot.voters}
        while asking and not reached() and not ballot.lost:
            _, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        for one in asking:
            one.cancel()
