"""Deciding a record: a majority of the previous record's voters accepted it under one term. Pure.

A slot is a step of a run's generation; one record is decided for it. Whoever wants to decide first has a majority
promise to accept nothing of a lower term any more, hears from them what they have accepted, and finishes the one of the
highest term. `Voter` is one vote; `Ballot` is one proposer's part in one slot. `proposer.py` puts both on a network.

Source: single-decree Paxos (Lamport, The Part-Time Parliament, 1998), with promises kept from slot to slot while the
voters stay the same. Beyond it: a *fence*. The servers hold the mean gradients of one round only, and a record can be
applied only by those that hold its round's. So before a new coordinator has a round of its own averaged, a majority
notes that whatever lower terms proposed for the slot is dead, although some voter may have accepted it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_swarm.errors import ProtocolError
from lightning_swarm.types.runs import NO_TERM, Member, Term
from lightning_swarm.types.steps import Accepted, Prepare, Promise, Proposal, Record, Vote
from lightning_swarm.types.wire import decode, encode

Slot = tuple[int, int]
"""``(run generation, step)``: later ones compare higher."""


class Voter:
    """One vote, in one life of its process.

    Args:
        boot_id: Of that life. What was asked of another one is refused, for what it accepted is forgotten.
    """

    def __init__(self, boot_id: int) -> None:
        self._boot_id = boot_id
        self.forget()

    def forget(self) -> None:
        """The run of all that was promised is void; the next one's slots are of a later generation."""
        self._term = NO_TERM
        self._accepted: dict[Slot, tuple[Term, bytes]] = {}  # at most one: those before it are decided
        self._fence: tuple[Slot, Term] = ((-1, 0), NO_TERM)  # from this slot on, what is below this term is dead

    @property
    def term(self) -> Term:
        """The highest one that it knows of."""
        return self._term

    def promise(self, request: Prepare) -> Promise:
        """Promise to accept nothing of a lower term; or refuse: its number was promised, or the slot was decided."""
        self._check_life(request.boot_id)
        slot = (request.generation, request.step)
        if self._is_decided(slot):
            return Promise(promised=False, term=self._term, behind=True)
        if self._refuses(request.term):
            return Promise(promised=False, term=self._term)
        self._term = request.term
        if request.fence:
            self._fence = (slot, request.term)
        known = self._accepted.get(slot)
        accepted = None if known is None else Accepted(term=known[0], record=decode(known[1], Record))
        return Promise(promised=True, term=self._term, accepted=accepted, fence=self._fence[1])

    def consider(self, proposal: Proposal) -> Vote:
        """Accept the record; or refuse it: the term is too low, or has another record, or the step was decided."""
        self._check_life(proposal.boot_id)
        body = encode(proposal.record)
        slot = slot_of(proposal.record)
        known = self._accepted.get(slot)
        rival = known is not None and known[0] == proposal.term and known[1] != body
        if self._refuses(proposal.term) or self._is_decided(slot) or rival:
            return Vote(accepted=False, term=self._term)
        self._term = proposal.term
        # Older records were decided before this one could be proposed, so of them only the place is remembered.
        self._accepted = {slot: (proposal.term, body)}
        return Vote(accepted=True, term=self._term)

    def _refuses(self, term: Term) -> bool:
        """A lower term, or one of the same number that is not its own: coordinators are told apart by their numbers.

        Rounds, leases and places begin at multiples of it.
        """
        return term != self._term and term[0] <= self._term[0]

    def _is_decided(self, slot: Slot) -> bool:
        """Whether a later slot was proposed for, or fenced: nobody does that before this one is decided."""
        return slot < self._fence[0] or any(slot < later for later in self._accepted)

    def _check_life(self, boot_id: int) -> None:
        if boot_id != self._boot_id:
            raise ProtocolError(
                f"voters keep their word for one life: this one's boot id is {self._boot_id}, got a call to {boot_id}"
            )


class Ballot:
    """One proposer's part in one slot, under one term: promises, then perhaps a fence, then votes on one record.

    Args:
        term: The proposer's own; no two lives of a peer share one.
        slot: Which.
        voters: Those of the record before.
        promised: Of them, those whose promise for an earlier slot holds for this one.
        fenced: Likewise.
    """

    def __init__(
        self,
        term: Term,
        slot: Slot,
        voters: Sequence[Member],
        *,
        promised: Collection[Member] = (),
        fenced: Collection[Member] = (),
    ) -> None:
        self.term = term
        self.slot = slot
        self.voters = tuple(voters)
        self.rival: Term | None = None  # of this number or a higher one, that a voter knows of
        self._behind = False  # the slot was decided without this proposer
        self._refused: set[Member] = set()
        self._promises: dict[Member, Promise | None] = dict.fromkeys(promised)  # None: it binds, and tells nothing
        self._fenced = set(fenced)
        self._proposed: bytes | None = None
        self._votes: set[Member] = set()

    def prepare(self, voter: Member, *, fence: bool = False) -> Prepare:
        """What to ask a voter first; with `fence` when `may_begin` is what is wanted."""
        if fence and (not self.prepared or self.chosen is not None):
            raise ProtocolError(f"{self.slot} may be fenced when a majority promised and nothing is to be finished")
        generation, step = self.slot
        return Prepare(term=self.term, boot_id=voter.boot_id, generation=generation, step=step, fence=fence)

    def hear_promise(self, voter: Member, promise: Promise, *, fence: bool = False) -> None:
        """The answer to `prepare`."""
        self._behind = self._behind or promise.behind
        if not self._counts(voter, promise.promised, promise.term):
            return
        # What the first majority accepted settles what is to be finished; what others did changes it no more.
        self._promises.setdefault(voter, None if self.prepared else promise)
        if fence:
            self._fenced.add(voter)

    @property
    def prepared(self) -> bool:
        """Whether a majority promised."""
        return self._is_majority(self._promises)

    @property
    def chosen(self) -> Record | None:
        """Once `prepared`: the record that must be finished; None: none can have been decided, and none will be."""
        heard = [promise for promise in self._promises.values() if promise is not None]
        fence = max((promise.fence for promise in heard), default=NO_TERM)
        accepted = [one.accepted for one in heard if one.accepted is not None and one.accepted.term >= fence]
        return max(accepted, key=lambda one: one.term).record if accepted else None

    @property
    def may_begin(self) -> bool:
        """Whether a record of this proposer's own may be worked towards: nothing of lower terms will be finished."""
        return self._is_majority(self._fenced)

    def proposal(self, voter: Member, record: Record) -> Proposal:
        """What to ask a voter then; one record for all of them.

        Raises:
            ProtocolError: It is too early, or another record.
        """
        body = encode(record)
        chosen = self.chosen
        free = self.may_begin if chosen is None else encode(chosen) == body
        if not self.prepared or not free or self._proposed not in (None, body) or slot_of(record) != self.slot:
            raise ProtocolError(f"under term {self.term} another record is to be finished for {self.slot} first")
        self._proposed = body
        return Proposal(term=self.term, boot_id=voter.boot_id, record=record)

    def hear_vote(self, voter: Member, vote: Vote) -> None:
        """The answer to `proposal`."""
        if self._counts(voter, vote.accepted, vote.term):
            self._votes.add(voter)

    @property
    def decided(self) -> bool:
        """Whether a majority accepted the record."""
        return self._is_majority(self._votes)

    @property
    def lost(self) -> bool:
        """Whether no majority can come under this term any more."""
        return self._behind or not self._is_majority(set(self.voters) - self._refused)

    def after(self, slot: Slot, voters: Sequence[Member]) -> Ballot:
        """The same proposer's part in a later slot. What was promised holds on, if the voters are the same."""
        same = set(voters) == set(self.voters) and self.prepared
        promised, fenced = (self._promises, self._fenced) if same else ((), ())
        return Ballot(self.term, slot, voters, promised=promised, fenced=fenced)

    def _counts(self, voter: Member, agreed: bool, term: Term) -> bool:
        if term != self.term and term[0] >= self.term[0]:
            self.rival = max(term, self.rival or NO_TERM)
            self._refused.add(voter)
        return agreed and term == self.term and voter in self.voters

    def _is_majority(self, some: Collection[Member]) -> bool:
        return len(some) * 2 > len(self.voters)


def slot_of(record: Record) -> Slot:
    """Which slot the record is for."""
    return (record.closing.generation, record.step)
