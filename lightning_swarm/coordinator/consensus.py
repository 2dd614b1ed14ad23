"""Decides a record: a majority of the voters that the previous record names must accept it under one term.

Source: single-decree Paxos (Lamport, The Part-Time Parliament, 1998), with promises kept from slot to slot while the
voters stay the same. Beyond Paxos, there is a *fence*. A record can be applied only with the mean gradients of its own
round, and servers hold the gradients of only one round. So before a new coordinator averages a round of its own, a
majority records a fence: from then on, proposals of lower terms for the slot are void, even if accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec.structs import replace as replaced

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, NotCoordinator, ProtocolError, StepError, SwarmError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.run import NO_TERM, Member, Term
from lightning_swarm.protocol.messages.step import Accepted, Prepare, Promise, Proposal, Record, Vote
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import PREPARE, PROPOSE, A, Call, Q
from lightning_swarm.protocol.run_state import RunState

MAX_STEP: Final = 64
"""The most by which a term's number may exceed all numbers that a voter knows, so that no peer uses up all numbers."""

_MAX_BURST: Final = 8  # new terms of one candidate in quick succession: rival candidates may need several

Slot = tuple[int, int]
"""``(run generation, step)``: later ones compare higher."""


class Voter:
    """A voter in one life of its process. It refuses calls to an earlier life, whose votes it does not know."""

    def __init__(self, boot_id: int, *, pace_s: float = 0.0) -> None:
        self._boot_id = boot_id
        self._pace_s = pace_s  # average seconds between new terms of one candidate; 0: no limit
        self.void_promises()

    def void_promises(self) -> None:
        """Forget all promises: their run is over, and the next run's slots are of a later generation."""
        self.term = NO_TERM  # the highest term that it promised, or that its server follows
        self._raised_to = 0  # number to which repeated requests have raised the limit
        self._due_s: dict[str, float] = {}  # candidate -> time by which all its terms are due at the average pace
        self._accepted: dict[Slot, tuple[Term, bytes]] = {}  # at most one: earlier slots are decided
        # (slot, term): from this slot on, proposals of lower terms are void. At most two are kept, because the newer
        # fence may be of a slot after the open slot.
        self._fences: list[tuple[Slot, Term]] = [((-1, 0), NO_TERM)]

    def promise(self, request: Prepare) -> Promise:
        """Promise to accept no record of a lower term; refuse if the term's number was promised or the slot decided."""
        self._check_life(request.boot_id)
        slot = (request.generation, request.step)
        if self._is_decided(slot):
            return Promise(promised=False, term=self.term, behind=True)
        if self._refuses(request.term) or self._exceeds_pace(request.term):
            return Promise(promised=False, term=self.term)
        self.term = request.term
        if request.fence:
            # No earlier term was higher, so this fence replaces those of this slot and of later slots.
            earlier = [fence for fence in self._fences if fence[0] < slot]
            self._fences = [*earlier, (slot, request.term)][-2:]
        known = self._accepted.get(slot)
        accepted = None if known is None else Accepted(term=known[0], record=decode(known[1], Record))
        fence = max((term for since, term in self._fences if since <= slot), default=NO_TERM)
        return Promise(promised=True, term=self.term, accepted=accepted, fence=fence)

    def consider(self, proposal: Proposal) -> Vote:
        """Accept the record, unless its term is too low, another record has that term, or the step was decided."""
        self._check_life(proposal.boot_id)
        body = encode(proposal.record)
        slot = slot_of(proposal.record)
        known = self._accepted.get(slot)
        is_rival = known is not None and known[0] == proposal.term and known[1] != body
        if self._refuses(proposal.term) or self._is_decided(slot) or is_rival or self._exceeds_pace(proposal.term):
            return Vote(accepted=False, term=self.term)
        self.term = proposal.term
        # Older records were decided before this one could be proposed, so they are forgotten.
        self._accepted = {slot: (proposal.term, body)}
        return Vote(accepted=True, term=self.term)

    def follow(self, term: Term) -> None:
        """From now on, promise nothing to terms below `term`, which the voter's server follows."""
        self._due_s.clear()  # the election is over
        self.term = max(self.term, term)

    @property
    def highest_number(self) -> int:
        """The highest number of a term that this voter would promise next."""
        return max(self.term[0], self._raised_to) + MAX_STEP

    def _exceeds_pace(self, term: Term) -> bool:
        """Return whether a term's number is too far above known numbers, or its candidate had too many terms lately."""
        if term == self.term:
            return False
        # A new term may abort another candidate's election. And if only one voter knows a high number, the other voters
        # need long to reach it. So each candidate gets new terms only at a pace at which the other voters can follow.
        if self._pace_s > 0.0:
            at_s = now_s()
            due_s = max(self._due_s.get(term[1], at_s), at_s)
            if due_s > at_s + (_MAX_BURST - 1) * self._pace_s:
                return True
            self._due_s[term[1]] = due_s + self._pace_s
        if term[0] <= self.highest_number:
            return False
        # Repeated requests raise the limit, because the other voters may have reached high numbers without this voter.
        self._raised_to = self.highest_number
        return True

    def _refuses(self, term: Term) -> bool:
        """Return whether a term is lower, or another term of the same number."""
        # No two coordinators may have the same number, because rounds, leases and places begin at multiples of it.
        return term != self.term and term[0] <= self.term[0]

    def _is_decided(self, slot: Slot) -> bool:
        """Return whether a later slot has a proposal, or two later slots have fences: either proves a decision."""
        # One fence proves nothing, because its proposer may be a slot ahead of this voter, or malicious.
        is_fenced = len(self._fences) > 1 and slot < self._fences[0][0]
        return is_fenced or any(slot < later for later in self._accepted)

    def _check_life(self, boot_id: int) -> None:
        if boot_id != self._boot_id:
            raise ProtocolError(
                f"a voter answers calls to its present process, with boot id {self._boot_id}; got a call to {boot_id}"
            )


class Ballot:
    """One proposer's part in one slot, under one term: promises, then perhaps a fence, then votes on one record."""

    def __init__(
        self,
        term: Term,  # unique to one life of a peer
        slot: Slot,
        voters: Sequence[Member],  # voters that the record before named
        *,
        promised: Collection[Member] = (),  # promises and fences of an earlier slot that still hold
        fenced: Collection[Member] = (),
    ) -> None:
        self.term = term
        self.slot = slot
        self.voters = tuple(voters)
        self.rival: Term | None = None  # another term that a voter knows, of the same number or a higher one
        self.behind = False  # a voter reports that this slot is decided already
        self._refused: set[Member] = set()  # voters that will not agree under this term
        self._numbers: dict[Member, int] = {}  # voter -> number of a rival term; 0: none
        self._promises: dict[Member, Promise | None] = dict.fromkeys(promised)  # None: too late for its record to count
        self._settled = False  # the record to finish was chosen, and later promises must not change it
        self._fence_voters = set(fenced)  # voters that recorded the fence
        self._proposed: bytes | None = None  # the encoded record of this proposer
        self._votes: set[Member] = set()

    def prepare(self, voter: Member, *, fence: bool = False) -> Prepare:
        """Make the first request to a voter; with `fence`, the request that `may_begin` waits for."""
        if fence and (not self.prepared or self.chosen is not None):
            raise ProtocolError(f"{self.slot} may be fenced once a majority promised, if no record must be finished")
        self._settled |= fence
        generation, step = self.slot
        return Prepare(term=self.term, boot_id=voter.boot_id, generation=generation, step=step, fence=fence)

    def record_promise(self, voter: Member, promise: Promise, *, fence: bool = False) -> None:
        """Record a voter's answer to `prepare`."""
        if promise.behind:
            # If a majority still promises, the decided record is among its accepted records.
            self.behind = True
            self._refused.add(voter)
        if not self._counts(voter, promise.promised, promise.term):
            return
        self._promises.setdefault(voter, None if self._settled else promise)
        if fence:
            self._fence_voters.add(voter)

    @property
    def prepared(self) -> bool:
        """Return whether a majority promised."""
        return self._is_majority(self._promises)

    @property
    def chosen(self) -> Record | None:
        """The record that must be finished, once `prepared`; None: no lower term has decided one or still can."""
        valid = [accepted for accepted in self._accepted if accepted.term >= self._fence]
        return max(valid, key=lambda accepted: accepted.term).record if valid else None

    @property
    def doubtful(self) -> bool:
        """Return whether a fence voids an accepted record, but further answers may still change that."""
        is_void = any(accepted.term < self._fence for accepted in self._accepted)
        return is_void and self.chosen is None and not self._settled and len(self._full_promises) < len(self.voters)

    @property
    def _full_promises(self) -> list[Promise]:
        return [promise for promise in self._promises.values() if promise is not None]

    @property
    def _accepted(self) -> list[Accepted]:
        return [promise.accepted for promise in self._full_promises if promise.accepted is not None]

    @property
    def _fence(self) -> Term:
        """The highest term under which a majority may have fenced the slot, by the answers so far."""
        # Before a proposer begins a round, a majority has recorded its fence. Of this majority, all voters that have
        # answered now report the fence. A fence with fewer reports is false, or its proposer never began a round.
        fences = sorted((promise.fence for promise in self._full_promises), reverse=True)
        num_silent = len(self.voters) - len(fences)
        num_reports = max(len(self.voters) // 2 + 1 - num_silent, 1)
        return fences[num_reports - 1] if fences else NO_TERM

    @property
    def may_begin(self) -> bool:
        """Return whether this proposer may work towards its own record: no record of a lower term will be finished."""
        return self._is_majority(self._fence_voters)

    def proposal(self, voter: Member, record: Record) -> Proposal:
        """Make the second request to a voter; raise ProtocolError if it is too early or another record is due."""
        body = encode(record)
        chosen = self.chosen
        may_propose = self.may_begin if chosen is None else encode(chosen) == body
        if not self.prepared or not may_propose or self._proposed not in (None, body) or slot_of(record) != self.slot:
            raise ProtocolError(
                f"term {self.term} cannot propose this record for {self.slot}: promises are missing, or another record "
                "must be finished first"
            )
        self._proposed, self._settled = body, True
        return Proposal(term=self.term, boot_id=voter.boot_id, record=record)

    def record_vote(self, voter: Member, vote: Vote) -> None:
        """Record a voter's answer to `proposal`."""
        if self._counts(voter, vote.accepted, vote.term):
            self._votes.add(voter)

    @property
    def decided(self) -> bool:
        """Return whether a majority accepted the record."""
        return self._is_majority(self._votes)

    @property
    def lost(self) -> bool:
        """Return whether this term can no longer get a majority."""
        return not self._is_majority(set(self.voters) - self._refused)

    @property
    def number_in_the_way(self) -> int:
        """The number above which a majority would promise any term, by the answers so far; 0: any number will do."""
        # A single voter may report any number, so a majority's numbers decide, unless fewer voters answer.
        numbers = sorted(self._numbers.values())
        return numbers[min(len(self.voters) // 2, len(numbers) - 1)] if numbers else 0

    def after(self, slot: Slot, voters: Sequence[Member]) -> Ballot:
        """Begin the same proposer's part in a later slot. Promises stay valid if the voters are the same."""
        stay_valid = set(voters) == set(self.voters) and self.prepared
        promised, fenced = (self._promises, self._fence_voters) if stay_valid else ((), ())
        return Ballot(self.term, slot, voters, promised=promised, fenced=fenced)

    def _counts(self, voter: Member, agreed: bool, term: Term) -> bool:
        """Record a rival term in a voter's answer; return whether the voter agreed to this ballot's term."""
        is_rival = term != self.term and term[0] >= self.term[0]
        self._numbers[voter] = term[0] if is_rival else 0
        if is_rival:
            self.rival = max(term, self.rival or NO_TERM)
            self._refused.add(voter)
        return agreed and term == self.term and voter in self.voters

    def _is_majority(self, members: Collection[Member]) -> bool:
        return len(members) * 2 > len(self.voters)


def slot_of(record: Record) -> Slot:
    """Return the slot of a record."""
    return (record.closing.generation, record.step)


_log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0
_GRACE_S: Final = 2.0  # longest wait for slow voters, once a majority has answered
_LOG_EVERY_S: Final = 60.0


def serve(
    voter: Voter,
    transport: Transport,
    may_propose: Callable[[PeerId], bool],
    # Whether a new coordinator is needed: the present one is silent, or hands over.
    may_succeed: Callable[[PeerId], Awaitable[bool]],
    check_slot: Callable[[int, int], None],  # raises if no slot of this generation and step can be open
    check_record: Callable[[Record], Awaitable[None]],  # raises if the voter can tell that a record is wrong
) -> None:
    """Answer the calls of proposers, which must be permitted to propose and use a term of their own."""

    async def check(caller: PeerId, term: Term) -> None:
        if not may_propose(caller):
            raise ProtocolError(
                f"only the run's servers propose records, or its keepers in a run with strangers, not {caller}"
            )
        if term[1] != caller:
            raise ProtocolError(f"a term carries its proposer's id, got {term} from {caller}")
        if term > voter.term and not await may_succeed(caller):
            raise Busy(f"the coordinator still answers this voter, which therefore promises nothing to {caller}")

    async def handle_prepare(caller: PeerId, request: Prepare) -> Promise:
        await check(caller, request.term)
        check_slot(request.generation, request.step)
        return voter.promise(request)

    async def handle_propose(caller: PeerId, proposal: Proposal) -> Vote:
        await check(caller, proposal.term)
        await check_record(proposal.record)
        return voter.consider(proposal)

    PREPARE.serve(transport, handle_prepare)
    PROPOSE.serve(transport, handle_propose)


class Proposer:
    """Has the records of a run decided, one after the other, under one term."""

    def __init__(
        self,
        transport: Transport,
        run: RunState,  # state of the coordinator's own server; its voters decide its open step
        term: Term,
        *,
        timeout: float,  # seconds that a voter has to answer
        patience_s: float,  # seconds for which voters are asked again until a majority answers
        events: EventLog,
        check_record: Callable[[Record], None],
    ) -> None:
        self._transport, self._run, self._events = transport, run, events
        self._check_record = check_record
        self._timeout, self._patience_s = timeout, patience_s
        self._ballot: Ballot | None = None
        self.term = term
        self.first_round = (term[0] - 1) << 20  # number of its first round in a step, above all lower terms' rounds

    @property
    def number_in_the_way(self) -> int:
        """The number that the proposer's next term must exceed for a majority to promise it; 0: any number will do."""
        return 0 if self._ballot is None else self._ballot.number_in_the_way

    async def prepare(self) -> Record | None:
        """Get the right to work towards the open step's record, or return a record that another coordinator began."""
        # This comes before any round of averaging, and is cheap when repeated.
        slot = (self._run.manifest.generation, self._run.version)
        if self._ballot is None:
            self._ballot = Ballot(self.term, slot, self._run.voters)
        elif self._ballot.slot != slot:
            self._ballot = self._ballot.after(slot, self._run.voters)
        ballot = self._ballot
        ask = partial(self._prepare, ballot)
        await self._until(ballot, "promised", lambda: ballot.prepared, ask)
        if ballot.doubtful:  # further answers may show that too few voters know the fence
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_GRACE_S, self._timeout / 4)):
                    await _ask_all(ballot, lambda: not ballot.doubtful, ask)
        chosen = ballot.chosen
        if chosen is None:
            fence = partial(self._prepare, ballot, fence=True)
            await self._until(ballot, "recorded the fence", lambda: ballot.may_begin, fence)
        return chosen

    async def decide(self, record: Record) -> None:
        """Have a majority of the voters accept the open step's record. After an error, it may be decided or not."""
        ballot = self._ballot
        if ballot is None or ballot.slot != slot_of(record):
            raise ProtocolError(f"record {record.step} may be proposed only after its voters have promised")
        proposals = {voter: ballot.proposal(voter, record) for voter in ballot.voters}
        ask = partial(self._propose, ballot, proposals)
        await self._until(ballot, "accepted", lambda: ballot.decided, ask)

    async def _prepare(self, ballot: Ballot, voter: Member, *, fence: bool = False) -> None:
        promise = await self._ask(voter, PREPARE, ballot.prepare(voter, fence=fence))
        if promise is not None:
            ballot.record_promise(voter, self._checked(ballot, voter, promise), fence=fence)

    def _checked(self, ballot: Ballot, voter: Member, promise: Promise) -> Promise:
        """Return a promise without a false fence or record, either of which would block all other records."""
        if promise.fence > ballot.term:  # an honest voter with this fence promises nothing to a lower term
            _log.warning("Voter %s promised a term that its fence %s forbids", voter.peer_id, promise.fence)
            promise = replaced(promise, fence=NO_TERM)
        if promise.accepted is None:
            return promise
        record = promise.accepted.record
        try:
            if promise.accepted.term >= ballot.term:
                raise ProtocolError(f"a record of a term below {ballot.term} is due, got {promise.accepted.term}")
            if slot_of(record) != ballot.slot:
                raise ProtocolError(f"the request was about {ballot.slot}, got a record for {slot_of(record)}")
            self._check_record(record)
        except ProtocolError as error:
            _log.warning("Voter %s reports that it accepted a record that it must refuse: %s", voter.peer_id, error)
            return replaced(promise, accepted=None)
        return promise

    async def _propose(self, ballot: Ballot, proposals: Mapping[Member, Proposal], voter: Member) -> None:
        vote = await self._ask(voter, PROPOSE, proposals[voter])
        if vote is not None:
            ballot.record_vote(voter, vote)

    async def _ask(self, voter: Member, method: Call[Q, A], request: Q) -> A | None:
        try:
            return await method.ask(self._transport, voter.peer_id, request, timeout=self._timeout)
        except SwarmError as error:  # a majority of the other voters can still decide
            _log.info("Voter %s did not answer %s: %s", voter.peer_id, method.name, error)
            return None

    async def _until(
        self, ballot: Ballot, what: str, reached: Callable[[], bool], ask: Callable[[Member], Coroutine[Any, Any, None]]
    ) -> None:
        """Ask the voters until a majority agrees; raise NotCoordinator if a rival term has them, or StepError."""
        step, names = ballot.slot[1], ", ".join(voter.peer_id for voter in ballot.voters)
        deadline_s = now_s() + self._patience_s
        has_paused, logged_s = False, now_s()
        while not reached():
            await _ask_all(ballot, reached, ask)
            if reached():
                break
            if ballot.lost or ballot.behind or ballot.rival is not None:
                # A voter that has promised a rival term will not agree any more, and the majority may need its vote.
                rival = "another term" if ballot.rival is None else f"{ballot.rival}, which a voter has promised"
                raise NotCoordinator(f"step {step} cannot be decided under the term {self.term}, but by {rival}")
            if now_s() >= deadline_s:
                raise StepError(
                    f"step {step} needs a majority of its voters {[voter.peer_id for voter in ballot.voters]}, which "
                    f"has not {what} within {self._patience_s:g} s. See that they run and can be reached"
                    f"{self._run.electorate.remedy}."
                )
            if not has_paused:
                self._events.note("pause", step=step, reason=f"no majority of the voters has {what}; asking again")
            elif now_s() >= logged_s + _LOG_EVERY_S:
                _log.warning("Step %d waits for a majority of its voters: %s.", step, names)
                logged_s = now_s()
            has_paused = True
            await asyncio.sleep(_RETRY_S)
        if has_paused:
            self._events.note("resume", step=step, reason=f"a majority of the voters has {what}")


async def _ask_all(
    ballot: Ballot, reached: Callable[[], bool], ask: Callable[[Member], Coroutine[Any, Any, None]]
) -> None:
    """Ask all voters at once, and stop waiting once further answers can change nothing."""
    async with asyncio.TaskGroup() as group:
        asking = {group.create_task(ask(voter)) for voter in ballot.voters}
        while asking and not reached() and not ballot.lost:
            _, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        for task in asking:
            task.cancel()
