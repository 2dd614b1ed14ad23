"""Deciding a record: a majority of the previous record's voters accepted it under one term.

A term is a number and the peer id of who proposes. A voter never goes back to a lower term, and under one term it
accepts one record for a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from lightning_swarm.errors import ProtocolError, StepError, SwarmError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.steps import PROPOSE
from lightning_swarm.tasks import gather
from lightning_swarm.types.runs import Member
from lightning_swarm.types.steps import Proposal, Record, Vote
from lightning_swarm.types.wire import decode, encode

_log = logging.getLogger(__name__)

Term = tuple[int, str]


class Voter:
    """One vote. Pure; `serve` puts it on a transport."""

    def __init__(self) -> None:
        self._term: Term = (0, "")
        self._accepted: dict[tuple[int, int], tuple[Term, bytes]] = {}

    def consider(self, proposal: Proposal) -> Vote:
        """Accept the record; or refuse it: the term is too low, or has another record, or the step was decided."""
        record = proposal.record
        slot = (record.closing.generation, record.step)
        known = self._accepted.get(slot)
        decided = any(slot < later for later in self._accepted)
        rival = known is not None and known[0] == proposal.term and known[1] != encode(record)
        if proposal.term < self._term or decided or rival:
            return Vote(accepted=False, term=self._term)
        self._term = proposal.term
        # Older records were decided before this one could be proposed, so of them only the place is remembered.
        self._accepted = {slot: (proposal.term, encode(record))}
        return Vote(accepted=True, term=self._term)

    def serve(self, transport: Transport, may_propose: Callable[[PeerId], bool]) -> None:
        """Answer proposals of those who may; the term must be the caller's own."""

        async def handle(caller: PeerId, body: bytes) -> bytes:
            proposal = decode(body, Proposal)
            if not may_propose(caller):
                raise ProtocolError(f"records are proposed by the run's coordinator, not by {caller}")
            if proposal.term[1] != caller:
                raise ProtocolError(f"a term carries its proposer's id, got {proposal.term} from {caller}")
            return encode(self.consider(proposal))

        transport.handle_call(PROPOSE, handle)


async def decide(transport: Transport, voters: Sequence[Member], term: Term, record: Record, *, timeout: float) -> None:
    """Have the record accepted by a majority of `voters`.

    Raises:
        StepError: No majority; the record is not decided.
    """
    body = encode(Proposal(term=term, record=record))

    async def ask(voter: Member) -> bool:
        try:
            reply = await transport.call(voter.peer_id, PROPOSE, body, timeout=timeout)
            vote = decode(reply, Vote)
        except SwarmError as error:  # whatever is wrong with one voter, a majority of the others decides
            _log.warning("Voter %s did not accept record %d: %s", voter.peer_id, record.step, error)
            return False
        return vote.accepted and vote.term == term

    num_accepted = sum(await gather(ask(voter) for voter in voters))
    if num_accepted * 2 <= len(voters):
        raise StepError(f"record {record.step} was accepted by {num_accepted} of {len(voters)} voters; no majority")
