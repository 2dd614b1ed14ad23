"""Deciding: a majority under one term, and voters that keep their word."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace as replaced

from lightning_swarm.clock import VirtualLoop
from lightning_swarm.errors import ProtocolError, StepError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.steps import PROPOSE
from lightning_swarm.steps.voting import Voter, decide
from lightning_swarm.types.runs import Member
from lightning_swarm.types.steps import Closing, Proposal, Record
from lightning_swarm.types.wire import encode

COORDINATOR = PeerId("coordinator")
TERM = (1, str(COORDINATOR))


def record(step: int = 0, *, clip_factor: float = 1.0, generation: int = 0) -> Record:
    closing = Closing(
        generation=generation,
        step=step,
        attempt=0,
        round=0,
        counted=[],
        batches=[],
        num_samples=0,
        total_weight=1.0,
        stages=[],
    )
    return Record(
        closing=closing,
        outcome="apply",
        squared_norm=0.0,
        clip_factor=clip_factor,
        hyperparameters=[],
        selection=None,
        next_roster=[],
        next_voters=[],
        next_trainers=[],
        newcomers=[],
    )


def accepts(voter: Voter, proposed: Record, term: tuple[int, str] = TERM) -> bool:
    return voter.consider(Proposal(term=term, record=proposed)).accepted


class Election:
    """A coordinator and some voters."""

    def __init__(self, loop: VirtualLoop, num_voters: int) -> None:
        self.loop = loop
        self.network = MemoryNetwork(latency_s=0.01)
        self.coordinator = self.network.transport(COORDINATOR)
        self.voters = [Voter() for _ in range(num_voters)]
        self.members = [Member(peer_id=PeerId(f"voter-{i}"), boot_id=i) for i in range(num_voters)]
        self.transports: list[Transport] = []
        for voter, member in zip(self.voters, self.members, strict=True):
            self.transports.append(self.network.transport(member.peer_id))
            voter.serve(self.transports[-1], lambda peer: peer == COORDINATOR)

    def decide(self, proposed: Record, term: tuple[int, str] = TERM) -> None:
        self.loop.run_until_complete(decide(self.coordinator, self.members, term, proposed, timeout=1.0))

    def kill(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.network.kill(self.members[number].peer_id)


@pytest.mark.parametrize("num_voters", [1, 3, 5])
def test_deciding_takes_a_majority(loop: VirtualLoop, num_voters: int) -> None:
    majority = num_voters // 2 + 1
    election = Election(loop, num_voters)
    election.kill(range(num_voters - majority))
    election.decide(record())

    election = Election(loop, num_voters)
    election.kill(range(num_voters - majority + 1))
    with pytest.raises(StepError, match=f"accepted by {majority - 1} of {num_voters} voters"):
        election.decide(record())


def test_half_of_the_voters_is_no_majority(loop: VirtualLoop) -> None:
    election = Election(loop, 4)
    election.kill([0, 1])
    with pytest.raises(StepError):
        election.decide(record())


def test_a_silent_voter_is_waited_for_no_longer_than_the_deadline(loop: VirtualLoop) -> None:
    election = Election(loop, 3)
    election.network.freeze(election.members[0].peer_id)
    election.decide(record())
    assert loop.time() <= 1.1


def test_a_voter_that_answers_nonsense_is_no_majority_and_no_obstacle(loop: VirtualLoop) -> None:
    async def nonsense(caller: PeerId, body: bytes) -> bytes:
        return b"yes"

    election = Election(loop, 3)
    election.transports[0]._call_handlers[PROPOSE] = nonsense  # type: ignore[attr-defined]
    election.decide(record())
    election.transports[1]._call_handlers[PROPOSE] = nonsense  # type: ignore[attr-defined]
    with pytest.raises(StepError, match="1 of 3"):
        election.decide(record())


def test_a_voter_never_goes_back_to_a_lower_term(loop: VirtualLoop) -> None:
    voter = Voter()
    assert accepts(voter, record(0), (5, "x"))
    for lower in ((4, "x"), (4, "z"), (5, "a")):
        assert not accepts(voter, record(0), lower)
        assert not accepts(voter, record(1), lower)
    vote = voter.consider(Proposal(term=(4, "x"), record=record(1)))
    assert vote.term == (5, "x"), "the proposer learns which term it has to exceed"
    assert accepts(voter, record(1), (5, "x"))
    assert accepts(voter, record(1), (5, "y"))

    election = Election(loop, 3)
    for one in election.voters[:2]:
        accepts(one, record(0), (9, "z"))
    with pytest.raises(StepError):
        election.decide(record(1))


def test_at_most_one_record_is_decided_under_a_term(loop: VirtualLoop) -> None:
    election = Election(loop, 3)
    election.decide(record(0))
    election.decide(record(0))  # the same one, told twice
    with pytest.raises(StepError, match="0 of 3"):
        election.decide(record(0, clip_factor=0.5))
    election.decide(record(1))


def test_of_two_records_under_one_term_one_wins(loop: VirtualLoop) -> None:
    first, second = record(0), record(0, clip_factor=0.5)
    election = Election(loop, 3)
    accepts(election.voters[0], second)
    election.decide(first)
    with pytest.raises(StepError, match="1 of 3"):
        election.decide(second)


def test_at_most_one_record_is_decided_per_step() -> None:
    voter = Voter()
    assert accepts(voter, record(0))
    assert accepts(voter, record(1))
    assert not accepts(voter, record(0, clip_factor=0.5)), "a later record was proposed, so this one's step is decided"
    assert not accepts(voter, record(0, clip_factor=0.5), (2, TERM[1]))
    assert accepts(voter, record(1)), "a refusal changes nothing"
    assert accepts(voter, record(0, generation=1)), "a generation begins anew"
    assert not accepts(voter, record(2))


def test_a_foreign_term_is_refused(loop: VirtualLoop) -> None:
    election = Election(loop, 1)
    proposal = encode(Proposal(term=(7, "someone"), record=record()))
    with pytest.raises(ProtocolError, match="its proposer's id"):
        loop.run_until_complete(election.coordinator.call(PeerId("voter-0"), PROPOSE, proposal, timeout=1.0))
    stranger = election.network.transport("stranger")
    own = encode(replaced(Proposal(term=(7, "stranger"), record=record())))
    with pytest.raises(ProtocolError, match="not by stranger"):
        loop.run_until_complete(stranger.call(PeerId("voter-0"), PROPOSE, own, timeout=1.0))
    election.decide(record())
