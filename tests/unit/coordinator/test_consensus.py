"""Deciding: a majority under one term, voters that keep their promises, and records that a new term finishes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from lightning_swarm.coordinator.consensus import Ballot, Proposer, Voter, serve
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import NotCoordinator, ProtocolError, StepError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.run import NO_CHANGE, Manifest, Member, Term
from lightning_swarm.protocol.messages.step import Accepted, Closing, Prepare, Promise, Proposal, Record
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, decode, encode
from lightning_swarm.protocol.rpc import PREPARE, PROPOSE
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.protocol.settings import RunSettings

COORDINATOR, RIVAL, LATE = PeerId("coordinator"), PeerId("rival"), PeerId("late")
TERM: Term = (1, COORDINATOR, 0)


def record(step: int = 0, *, clip_factor: float = 1.0, generation: int = 0) -> Record:
    closing = Closing(
        generation=generation,
        step=step,
        round=0,
        batches=[],
        num_samples=0,
        total_weight=1.0,
        absent=[],
    )
    return Record(
        closing=closing,
        touched=[],
        outcome="apply",
        squared_norm=0.0,
        clip_factor=clip_factor,
        hyperparameters=[],
        change=NO_CHANGE,
        left=[],
        newcomers=[],
        next_voters=None,
        departures=[],
        snapshot=None,
        enlisted=[],
        retired=[],
    )


def prepare(step: int = 0, term: Term = TERM, **changes: Any) -> Prepare:
    return Prepare(**{"term": term, "boot_id": 0, "generation": 0, "step": step, **changes})


def accepts(voter: Voter, proposed: Record, term: Term = TERM) -> bool:
    return voter.consider(Proposal(term=term, boot_id=0, record=proposed)).accepted


class Election:
    """Two candidates, and some voters."""

    def __init__(self, loop: VirtualLoop, num_voters: int) -> None:
        self.loop = loop
        self.network = MemoryNetwork(latency_s=0.01)
        self.voters = [Voter(i) for i in range(num_voters)]
        self.members = [Member(peer_id=PeerId(f"voter-{i}"), boot_id=i) for i in range(num_voters)]
        self.transports: list[Transport] = []
        for voter, member in zip(self.voters, self.members, strict=True):
            self.transports.append(self.network.transport(member.peer_id))
            may_propose = (COORDINATOR, RIVAL, LATE).__contains__
            serve(voter, self.transports[-1], may_propose, self.may_succeed, self.check_slot, self.check_record)
        self.run = RunState(
            Manifest(
                protocol_version=PROTOCOL_VERSION,
                run_id="run",
                generation=0,
                seed=0,
                lead=COORDINATOR,
                trainers=[],
                coordinator=COORDINATOR,
                voters=self.members,
                settings=RunSettings(target_batch_size=None),
                gradient_clip_norm=None,
                gradient_clip_value=None,
                total_steps=None,
                stages=[],
            )
        )
        self.events = EventLog()
        self.coordinated = False  # no coordinator answers the voters
        self.proposer = self.proposes(COORDINATOR, TERM)

    def proposes(self, name: PeerId, term: Term, run: RunState | None = None) -> Proposer:
        transport = self.network.transport(name)
        return Proposer(
            transport,
            run or self.run,
            term,
            timeout=1.0,
            patience_s=10.0,
            events=self.events,
            check_record=lambda _: None,
        )

    def check_slot(self, generation: int, step: int) -> None:
        """Accept any slot."""

    async def check_record(self, record: Record) -> None:
        """Accept any record."""

    async def may_succeed(self, candidate: PeerId) -> bool:
        return not self.coordinated

    def begin(self, proposer: Proposer) -> Record | None:
        return self.loop.run_until_complete(proposer.prepare())

    def decide(self, proposed: Record, proposer: Proposer | None = None) -> None:
        proposer = proposer or self.proposer
        self.begin(proposer)
        self.loop.run_until_complete(proposer.decide(proposed))

    def kill(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.network.kill(self.members[number].peer_id)


# ---------------------------------------------------------------------- a voter


def test_a_voter_never_goes_back_to_a_lower_term() -> None:
    voter = Voter(0)
    assert accepts(voter, record(0), (5, "x", 1))
    for lower in ((4, "x", 1), (4, "z", 1), (5, "a", 1), (5, "x", 0)):
        assert not accepts(voter, record(0), lower)
        assert not accepts(voter, record(1), lower)
        assert not voter.promise(prepare(0, lower)).promised
    vote = voter.consider(Proposal(term=(4, "x", 1), boot_id=0, record=record(1)))
    assert vote.term == (5, "x", 1), "the proposer learns which term it has to exceed"
    assert accepts(voter, record(1), (5, "x", 1))
    assert accepts(voter, record(1), (6, "a", 0))


def test_one_number_is_promised_to_one_peer() -> None:
    """The number distinguishes rounds, leases and places."""
    voter, member = Voter(0), Member(peer_id=PeerId("v"), boot_id=0)
    assert voter.promise(prepare(0, (5, "x", 1))).promised
    for other in ((5, "y", 1), (5, "x", 2)):
        refused = voter.promise(prepare(0, other))
        assert (refused.promised, refused.term) == (False, (5, "x", 1))
        assert not accepts(voter, record(0), other)
        ballot = Ballot(other, (0, 0), [member])
        ballot.record_promise(member, refused)
        assert ballot.lost
        assert ballot.rival == (5, "x", 1), "the next number is a higher one"
    assert accepts(voter, record(0), (5, "x", 1))


def test_a_promise_binds_before_anything_is_accepted() -> None:
    voter = Voter(0)
    assert voter.promise(prepare(0, (2, "x", 0))).promised
    assert not accepts(voter, record(0), (1, "z", 0))
    assert accepts(voter, record(3), (2, "x", 0)), "in all later steps, too"


def test_a_promise_tells_what_was_accepted() -> None:
    voter = Voter(0)
    assert accepts(voter, record(1), (1, "x", 0))
    promise = voter.promise(prepare(1, (2, "y", 0)))
    assert promise.accepted is not None
    assert (promise.accepted.term, promise.accepted.record) == ((1, "x", 0), record(1))
    assert voter.promise(prepare(2, (2, "y", 0))).accepted is None
    late = voter.promise(prepare(0, (3, "y", 0)))
    assert (late.promised, late.behind) == (False, True)


def test_at_most_one_record_is_accepted_per_step() -> None:
    voter = Voter(0)
    assert accepts(voter, record(0))
    assert accepts(voter, record(1))
    assert not accepts(voter, record(0, clip_factor=0.5)), "a later record was proposed, so this one's step is decided"
    assert not accepts(voter, record(0, clip_factor=0.5), (2, *TERM[1:]))
    assert not accepts(voter, record(1, clip_factor=0.5)), "one record under one term"
    assert accepts(voter, record(1)), "a refusal changes nothing"
    assert accepts(voter, record(0, generation=1)), "a generation begins anew"
    assert not accepts(voter, record(2))


def test_a_restarted_voter_has_no_vote() -> None:
    voter = Voter(9)
    with pytest.raises(ProtocolError, match="with boot id 9; got a call to 0"):
        voter.promise(prepare())
    with pytest.raises(ProtocolError, match="with boot id 9"):
        accepts(voter, record())


# ---------------------------------------------------------------------- a ballot


def test_a_ballot_finishes_what_the_highest_term_proposed() -> None:
    voters = [Voter(i) for i in range(3)]
    members = [Member(peer_id=PeerId(f"v{i}"), boot_id=i) for i in range(3)]
    old, new = record(0, clip_factor=0.1), record(0, clip_factor=0.2)
    for i, (proposed, term) in enumerate([(old, (1, "x", 0)), (new, (2, "y", 0))]):
        assert voters[i].consider(Proposal(term=term, boot_id=i, record=proposed)).accepted
    ballot = Ballot((3, "z", 0), (0, 0), members)
    with pytest.raises(ProtocolError, match="promises are missing"):
        ballot.proposal(members[0], record())
    for voter, member in zip(voters[:2], members, strict=False):
        ballot.record_promise(member, voter.promise(ballot.prepare(member)))
    assert ballot.prepared
    assert ballot.chosen == new
    with pytest.raises(ProtocolError, match="may be fenced once"):
        ballot.prepare(members[0], fence=True)
    with pytest.raises(ProtocolError, match="another record must be finished"):
        ballot.proposal(members[0], old)
    ballot.proposal(members[0], new)


def test_what_was_fenced_off_is_finished_by_nobody() -> None:
    """Its round's mean gradients may be overwritten on the servers."""
    voters = [Voter(i) for i in range(3)]
    members = [Member(peer_id=PeerId(f"v{i}"), boot_id=i) for i in range(3)]
    assert voters[0].consider(Proposal(term=(1, "x", 0), boot_id=0, record=record())).accepted

    second = Ballot((2, "y", 0), (0, 0), members)
    for fence in (False, True):
        for i in (1, 2):
            request = second.prepare(members[i], fence=fence)
            second.record_promise(members[i], voters[i].promise(request), fence=fence)
    assert second.may_begin

    third = Ballot((3, "z", 0), (0, 0), members)
    for i in (0, 1):
        third.record_promise(members[i], voters[i].promise(third.prepare(members[i])))
    assert third.prepared
    assert third.chosen is None


def test_a_fence_of_a_later_slot_leaves_the_open_one_open() -> None:
    """A proposer may be a slot ahead of the voter, or malicious. Only two fences prove earlier slots decided."""
    voter = Voter(0)
    assert accepts(voter, record(1), (1, "x", 0))
    assert voter.promise(prepare(2, (2, "liar", 0), fence=True)).promised
    promise = voter.promise(prepare(1, (3, "y", 0)))
    assert promise.accepted is not None
    assert promise.accepted.record == record(1)
    assert promise.fence == (0, "", 0), "that of slot 2 voids nothing of slot 1"
    assert voter.promise(prepare(2, (4, "y", 0))).fence == (2, "liar", 0)
    assert voter.promise(prepare(3, (5, "y", 0), fence=True)).promised
    assert voter.promise(prepare(1, (6, "z", 0))).behind


@pytest.mark.parametrize(
    ("num_fenced", "num_heard", "voids"), [(1, 3, True), (1, 4, False), (2, 5, False), (3, 5, True)]
)
def test_a_fence_voids_a_record_if_a_majority_may_have_noted_it(num_fenced: int, num_heard: int, voids: bool) -> None:
    members = [Member(peer_id=PeerId(f"v{i}"), boot_id=i) for i in range(5)]
    ballot = Ballot((3, "z", 0), (0, 0), members)
    promise = Promise(promised=True, term=ballot.term, accepted=Accepted(term=(1, "x", 0), record=record()))
    for i, member in enumerate(members[:num_heard]):
        ballot.record_promise(member, replaced(promise, fence=(2, "y", 0)) if i < num_fenced else promise)
    assert (ballot.chosen is None) == voids
    assert ballot.doubtful == (voids and num_heard < 5), "others may know better"


def test_promises_hold_on_for_the_same_voters_only() -> None:
    voters = [Voter(i) for i in range(3)]
    members = [Member(peer_id=PeerId(f"v{i}"), boot_id=i) for i in range(3)]
    ballot = Ballot(TERM, (0, 0), members)
    for fence in (False, True):
        for voter, member in zip(voters, members, strict=True):
            ballot.record_promise(member, voter.promise(ballot.prepare(member, fence=fence)), fence=fence)
    after = ballot.after((0, 1), members)
    assert (after.prepared, after.may_begin, after.chosen) == (True, True, None)
    restarted = [*members[:2], replaced(members[2], boot_id=7)]
    after = ballot.after((0, 1), restarted)
    assert (after.prepared, after.may_begin) == (False, False)


# ---------------------------------------------------------------------- over a network


@pytest.mark.parametrize("num_voters", [1, 3, 5])
def test_deciding_takes_a_majority(loop: VirtualLoop, num_voters: int) -> None:
    majority = num_voters // 2 + 1
    election = Election(loop, num_voters)
    election.kill(range(num_voters - majority))
    election.decide(record())
    assert not election.events.counts

    election = Election(loop, num_voters)
    election.kill(range(num_voters - majority + 1))
    with pytest.raises(StepError, match=r"needs a majority of its voters .* has not promised"):
        election.decide(record())
    assert loop.time() >= 10.0
    assert election.events.counts == {"pause": 1}


def test_half_of_the_voters_is_no_majority(loop: VirtualLoop) -> None:
    election = Election(loop, 4)
    election.kill([0, 1])
    with pytest.raises(StepError):
        election.decide(record())


def test_a_majority_that_comes_back_decides(loop: VirtualLoop) -> None:
    election = Election(loop, 3)
    election.begin(election.proposer)
    for number in (0, 1):
        election.network.freeze(election.members[number].peer_id)
    loop.call_later(5.0, election.network.thaw, election.members[0].peer_id)
    election.decide(record())
    assert 5.0 <= loop.time() < 8.0
    assert election.events.counts == {"pause": 1, "resume": 1}


def test_a_silent_voter_is_not_waited_for(loop: VirtualLoop) -> None:
    election = Election(loop, 3)
    election.network.freeze(election.members[0].peer_id)
    election.decide(record())
    assert loop.time() <= 0.1


def test_a_voter_that_answers_nonsense_is_no_majority_and_no_obstacle(loop: VirtualLoop) -> None:
    async def nonsense(caller: PeerId, body: bytes) -> bytes:
        return b"yes"

    election = Election(loop, 3)
    election.transports[0]._call_handlers[PROPOSE.name] = nonsense  # type: ignore[attr-defined]
    election.decide(record())
    election.run.version = 1
    election.transports[1]._call_handlers[PROPOSE.name] = nonsense  # type: ignore[attr-defined]
    with pytest.raises(StepError, match="accepted"):
        election.decide(record(1))


def test_one_rival_among_the_voters_is_no_obstacle(loop: VirtualLoop) -> None:
    election = Election(loop, 3)
    assert election.voters[0].promise(prepare(0, (7, RIVAL, 0))).promised
    election.decide(record())
    assert election.voters[0].promise(prepare(0, (7, RIVAL, 0))).accepted is None


def test_who_lost_the_voters_promise_decides_nothing(loop: VirtualLoop) -> None:
    election = Election(loop, 3)
    election.begin(election.proposer)
    rival = election.proposes(RIVAL, (2, RIVAL, 0))
    assert election.begin(rival) is None
    with pytest.raises(NotCoordinator, match="which a voter has promised"):
        election.decide(record())
    election.decide(record(clip_factor=0.5), rival)
    with pytest.raises(NotCoordinator):
        election.begin(election.proposes(LATE, (2, LATE, 0)))


def test_a_new_term_finishes_what_a_majority_accepted(loop: VirtualLoop) -> None:
    election = Election(loop, 3)
    election.decide(record(clip_factor=0.5))
    election.kill([0])
    rival = election.proposes(RIVAL, (2, RIVAL, 0))
    assert election.begin(rival) == record(clip_factor=0.5)
    with pytest.raises(ProtocolError, match="another record must be finished"):
        election.decide(record(clip_factor=0.1), rival)
    election.decide(record(clip_factor=0.5), rival)


@pytest.mark.parametrize(
    ("lie", "num_dead"),
    [
        ({"fence": (2**30, "z", 0)}, 2),
        ({"fence": (4, "z", 0)}, 1),  # possibly true of that voter
        ({"accepted": Accepted(term=(2**30, "z", 0), record=record(clip_factor=0.1))}, 2),
        ({"accepted": Accepted(term=(5, RIVAL, 0), record=record(clip_factor=0.1))}, 2),
    ],
)
def test_one_voter_that_lies_voids_no_decided_record(loop: VirtualLoop, lie: dict[str, Any], num_dead: int) -> None:
    election = Election(loop, 5)
    election.decide(record(clip_factor=0.5))
    loop.run_until_complete(asyncio.sleep(1.0))  # all must have the record
    election.kill(range(num_dead))
    honest = election.transports[4]._call_handlers[PREPARE.name]  # type: ignore[attr-defined]

    async def answer(caller: PeerId, body: bytes) -> bytes:
        return encode(replaced(decode(await honest(caller, body), Promise), **lie))

    election.transports[4]._call_handlers[PREPARE.name] = answer  # type: ignore[attr-defined]
    rival = election.proposes(RIVAL, (5, RIVAL, 0))
    assert election.begin(rival) == record(clip_factor=0.5)
    election.decide(record(clip_factor=0.5), rival)


def test_who_is_behind_decides_nothing(loop: VirtualLoop) -> None:
    election = Election(loop, 3)
    behind = RunState(election.run.manifest)
    election.decide(record(0))
    election.run.version = 1
    election.decide(record(1))
    with pytest.raises(NotCoordinator):
        election.begin(election.proposes(RIVAL, (2, RIVAL, 0), behind))


def test_the_same_voters_promise_once(loop: VirtualLoop) -> None:
    election = Election(loop, 3)
    asked = []
    for transport in election.transports:
        handler = transport._call_handlers[PREPARE.name]  # type: ignore[attr-defined]

        async def counting(caller: PeerId, body: bytes, handler: Any = handler) -> bytes:
            asked.append(caller)
            answer: bytes = await handler(caller, body)
            return answer

        transport._call_handlers[PREPARE.name] = counting  # type: ignore[attr-defined]
    for step in range(3):
        election.run.version = step
        election.decide(record(step))
    num_asked = len(asked)
    assert num_asked <= 6, "promise and fence"
    election.run.version = 3
    election.run.voters = election.run.voters[:1]
    election.decide(record(3))
    assert len(asked) == num_asked + 2


def test_a_foreign_term_is_refused(loop: VirtualLoop) -> None:
    election = Election(loop, 1)
    coordinator = election.proposer._transport
    stranger = election.network.transport("stranger")
    for method, request, own in (
        (
            PROPOSE.name,
            Proposal(term=(7, "someone", 0), boot_id=0, record=record()),
            Proposal(term=(7, "stranger", 0), boot_id=0, record=record()),
        ),
        (PREPARE.name, prepare(0, (7, "someone", 0)), prepare(0, (7, "stranger", 0))),
    ):
        with pytest.raises(ProtocolError, match="its proposer's id"):
            loop.run_until_complete(coordinator.call(PeerId("voter-0"), method, encode(request), timeout=1.0))
        with pytest.raises(ProtocolError, match="not stranger"):
            loop.run_until_complete(stranger.call(PeerId("voter-0"), method, encode(own), timeout=1.0))
    assert election.voters[0].term == (0, "", 0)
    election.decide(record())


def test_a_term_beyond_all_is_refused(loop: VirtualLoop) -> None:
    """No peer could ever lead under it, nor under a higher one."""
    election = Election(loop, 1)
    coordinator = election.proposer._transport
    request = prepare(0, (1 << 40, "coordinator", 0))
    with pytest.raises(ProtocolError):
        loop.run_until_complete(coordinator.call(PeerId("voter-0"), PREPARE.name, encode(request), timeout=1.0))
    assert election.voters[0].term == (0, "", 0)
    election.decide(record())
