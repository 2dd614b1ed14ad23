"""Deciding a record: a majority of the previous record's voters accepted it under one term.

A term is a number and the peer id of who proposes. A voter never goes back to a lower term, and under one term it
accepts one record for a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_swarm.errors import PeerError, ProtocolError, StepError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.steps import PROPOSE
from lightning_swarm.tasks import gather
from lightning_swarm.types import Member, Proposal, Record, Vote, decode, encode

Term = tuple[int, str]


class Voter:
    """One vote. Pure; `serve` puts it on a transport."""

    def __init__(self) -> None:
        self._term: Term = (0, "")
        self._accepted: dict[tuple[int, int], tuple[Term, bytes]] = {}

    def consider(self, proposal: Proposal) -> Vote:
        """Accept the record, or refuse it because of a higher term, or of another record under this term."""
        record = proposal.record
        slot = (record.closing.generation, record.step)
        known = self._accepted.get(slot)
        if proposal.term < self._term or (
            known is not None and known[0] == proposal.term and known[1] != encode(record)
        ):
            return Vote(accepted=False, term=self._term)
        self._term = proposal.term
        # Older records were decided before this one could be proposed.
        self._accepted = {slot: (proposal.term, encode(record))}
        return Vote(accepted=True, term=self._term)

    def serve(self, transport: Transport) -> None:
        """Answer proposals; the term must be the caller's own."""

        async def handle(caller: PeerId, body: bytes) -> bytes:
            proposal = decode(body, Proposal)
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
        except PeerError:
            return False
        return decode(reply, Vote).accepted

    num_accepted = sum(await gather(ask(voter) for voter in voters))
    if num_accepted * 2 <= len(voters):
        raise StepError(f"record {record.step} was accepted by {num_accepted} of {len(voters)} voters; no majority")
