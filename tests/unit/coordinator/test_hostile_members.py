"""A malicious member cannot become coordinator, keep other peers from it, or end the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from lightning_swarm.coordinator.consensus import MAX_STEP
from lightning_swarm.core.errors import Busy, NotCoordinator, ProtocolError, SwarmError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import CoordinatorTerm, HeldSnapshot, InheritRequest, Term, WatchReply
from lightning_swarm.protocol.messages.step import Accepted, Prepare, Promise, Proposal, Record, Vacancy, Vote
from lightning_swarm.protocol.messages.wire import WireMessage, decode, encode
from lightning_swarm.protocol.rpc import ANNOUNCE_TERM, FREEZE, INHERIT, PREPARE, PROPOSE, TAKE_OVER, WATCH
from lightning_swarm.testing import FaultPlan
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.test_takeover import Trial

A, B, C, D, E = map(PeerId, "abcde")
LIAR = C
HIGHEST = 1 << 30
LEADS_WITHIN_S = 120.0


class Coup(Trial):
    """Five voters, of which `c` is malicious."""

    def __init__(self, make_swarm: MakeSwarm) -> None:
        super().__init__(make_swarm, FaultPlan(), "a b c e", "d b c e")
        self.train(1)
        self.handlers = self.swarm.servers[LIAR]._transport._call_handlers  # type: ignore[attr-defined]
        self.num_lies = 0

    def term(self, number: int) -> Term:
        return (number, LIAR, self.swarm.members[LIAR].boot_id)

    def tell(self, peer: PeerId, method: str, message: WireMessage) -> bytes:
        transport = self.swarm.servers[LIAR]._transport
        return self.swarm.run(transport.call(peer, method, encode(message), timeout=30.0))

    def prepare(self, peer: PeerId, number: int, **changes: Any) -> Prepare:
        boot_id = self.swarm.members[peer].boot_id
        prepare = Prepare(term=self.term(number), boot_id=boot_id, generation=0, step=len(self.records))
        return replaced(prepare, **changes)

    def stand(self, peers: Sequence[PeerId], **changes: Any) -> None:
        """Make the malicious voter request promises, under a term just above the voters'."""
        for peer in peers:
            number = self.swarm.servers[peer].voter.term[0] + 1
            with contextlib.suppress(Busy, ProtocolError):
                self.tell(peer, PREPARE.name, self.prepare(peer, number, **changes))

    def answer(self, method: str, lie: Callable[[bytes], bytes]) -> None:
        """Make the malicious voter falsify its answers to a method."""
        honest = self.handlers[method]

        async def answer(caller: PeerId, body: bytes) -> bytes:
            self.num_lies += 1
            return lie(await honest(caller, body))

        self.handlers[method] = answer

    def lie(self, method: str, kind: type[Any], **changes: Any) -> None:
        self.answer(method, lambda body: encode(replaced(decode(body, kind), **changes)))

    def claim(self, **changes: Any) -> None:
        """Make it claim that it accepted a record of the open step, under the term of an absent peer."""
        newest = self.records[-1]
        closing = replaced(newest.closing, **{"step": len(self.records), **changes})
        record = replaced(newest, closing=closing, next_voters=None)
        self.lie(PREPARE.name, Promise, accepted=Accepted(term=(1, "z", 0), record=record))

    def talk_nonsense(self, *methods: str) -> None:
        for method in methods:
            self.answer(method, lambda _: b"\xc1")

    def refuse(self, method: str, error: SwarmError) -> None:
        async def answer(caller: PeerId, body: bytes) -> bytes:
            self.num_lies += 1
            raise error

        self.handlers[method] = answer

    def check_led_by(self, leader: PeerId, *, below: int) -> None:
        for name in {A, B, C, D, E} - self.dead:
            run = self.swarm.servers[name].membership.run
            assert (run.coordinator, run.term[0] < below) == (leader, True), name
        assert self.swarm.steps.run.coordinator == leader

    @property
    def dead(self) -> set[PeerId]:
        return {A} if self.swarm.servers[A]._transport.closed else set()


@pytest.mark.parametrize("number", [2, HIGHEST])
def test_who_has_no_promises_leads_nobody(make_swarm: MakeSwarm, number: int) -> None:
    coup = Coup(make_swarm)
    for peer in (A, B, D):
        with pytest.raises(ProtocolError, match="a term is followed if a majority of the voters promised it"):
            coup.tell(peer, ANNOUNCE_TERM.name, CoordinatorTerm(term=coup.term(number), generation=0, version=1))
        with pytest.raises((ProtocolError, NotCoordinator), match="coordinated by a"):
            coup.tell(peer, TAKE_OVER.name, CoordinatorTerm(term=coup.term(number), generation=0, version=1))
        with pytest.raises(NotCoordinator, match="coordinated by a"):
            coup.tell(peer, INHERIT.name, InheritRequest(generation=0, new_lead=LIAR, first_step=0))
    coup.train(2)
    coup.check_led_by(A, below=2)
    coup.check()


@pytest.mark.parametrize("number", [2, HIGHEST])
def test_a_voter_promises_nothing_while_its_coordinator_answers(make_swarm: MakeSwarm, number: int) -> None:
    coup = Coup(make_swarm)
    proposal = Proposal(term=coup.term(number), boot_id=0, record=coup.records[0])
    for peer in (A, B):
        before = coup.swarm.servers[peer].voter.term
        with pytest.raises(Busy, match="the coordinator still answers this voter"):
            coup.tell(peer, PREPARE.name, coup.prepare(peer, number))
        with pytest.raises(Busy, match="the coordinator still answers this voter"):
            coup.tell(peer, PROPOSE.name, replaced(proposal, boot_id=coup.swarm.members[peer].boot_id))
        assert coup.swarm.servers[peer].voter.term == before
    coup.train(2)
    coup.check_led_by(A, below=2)
    coup.check()


def test_terms_rise_by_small_steps_where_there_is_no_coordinator(make_swarm: MakeSwarm) -> None:
    coup = Coup(make_swarm)
    coup.swarm.network.kill(A)
    for _ in range(3):
        promise = decode(coup.tell(B, PREPARE.name, coup.prepare(B, HIGHEST)), Promise)
        assert not promise.promised
    coup.train(2, avoid="a")
    (leader,) = set(coup.coordinators) - {A}
    coup.check_led_by(leader, below=5 * MAX_STEP)
    coup.check()


def test_a_voter_that_was_away_for_long_promises_high_terms_in_the_end(make_swarm: MakeSwarm) -> None:
    """The other voters had many elections meanwhile."""
    coup = Coup(make_swarm)
    for name in (B, C, D, E):
        coup.swarm.servers[name].admission.election._highest_number = 5 * MAX_STEP
    coup.swarm.network.kill(A)
    coup.train(2, avoid="a")
    (leader,) = set(coup.coordinators) - {A}
    coup.check_led_by(leader, below=6 * MAX_STEP)
    assert coup.swarm.steps.run.term[0] > 5 * MAX_STEP
    coup.check()


EARLY = {
    "the next slot": {"step": 2},
    "a slot far beyond": {"step": 10**9},
    "a later generation": {"generation": 10**9},
    "the next generation": {"generation": 1},
    "a slot before": {"step": 0},
    "the slot itself": {},
}


@pytest.mark.first_cells(4)
@pytest.mark.parametrize("fence", [False, True], ids=["promise", "fence"])
@pytest.mark.parametrize("early", EARLY, ids=lambda early: early.replace(" ", "-"))
def test_a_promise_for_another_slot_ends_no_vote(make_swarm: MakeSwarm, early: str, fence: bool) -> None:
    """The voters decide the open slot, although a member that does not coordinate has fenced another one."""
    coup = Coup(make_swarm)
    coup.swarm.network.kill(A)
    coup.stand([B, D, E], **{**EARLY[early], "fence": fence})
    coup.train(2, avoid="a")
    coup.swarm.settle()
    (leader,) = set(coup.coordinators) - {A}
    coup.check_led_by(leader, below=MAX_STEP)
    coup.check()


@pytest.mark.thorough
@pytest.mark.parametrize("asked", ["b", "b d e"])
def test_numbers_rise_no_faster_than_the_others_follow(make_swarm: MakeSwarm, asked: str) -> None:
    """However often a member asks while there is no coordinator, one leads soon after it stops."""
    coup = Coup(make_swarm)
    voters = {peer: coup.swarm.servers[peer].voter for peer in map(PeerId, asked.split())}
    transport = coup.swarm.servers[LIAR]._transport
    coup.swarm.network.kill(A)

    async def storm() -> None:
        for _ in range(10_000 // len(voters)):
            for peer, voter in voters.items():
                request = coup.prepare(peer, voter.highest_number)
                with contextlib.suppress(SwarmError):
                    await transport.call(peer, PREPARE.name, encode(request), timeout=1.0)

    coup.swarm.run(storm())
    coup.refuse(PREPARE.name, Busy("not now"))
    coup.refuse(WATCH.name, Busy("not now"))

    async def until_led() -> None:
        async with asyncio.timeout(LEADS_WITHIN_S):
            while not set(coup.coordinators) - {A}:  # noqa: ASYNC110 - it tells nobody here
                await asyncio.sleep(1.0)

    coup.swarm.run(until_led())
    coup.train(1, avoid="a")
    coup.check()


WATCHED = ("a term that nobody promised", "a record that nobody decided")
LIES: dict[str, Callable[[Coup], None]] = {
    "a term that nobody promised": lambda coup: coup.lie(
        WATCH.name, WatchReply, term=coup.term(HIGHEST), promised=coup.term(HIGHEST), coordinates=True
    ),
    "a record that nobody decided": lambda coup: coup.lie(WATCH.name, WatchReply, version=1000),
    "a rival at the end of the numbers": lambda coup: coup.lie(
        PREPARE.name, Promise, promised=False, term=(HIGHEST, "d", 103)
    ),
    "that the step was decided": lambda coup: coup.lie(PREPARE.name, Promise, promised=False, behind=True),
    "that it accepted what nobody averaged": lambda coup: coup.claim(round=7),
    "that it accepted a record of another step": lambda coup: coup.claim(step=9),
    "that its slot was fenced under a term beyond all": lambda coup: coup.lie(
        PREPARE.name, Promise, promised=True, fence=(HIGHEST, "z", 0)
    ),
    "a vote for another": lambda coup: coup.lie(PROPOSE.name, Vote, accepted=False, term=(HIGHEST, "d", 103)),
    "no message": lambda coup: coup.talk_nonsense(WATCH.name, PREPARE.name, PROPOSE.name),
}


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.replace(" ", "-"))
def test_what_one_voter_says_is_no_majority(make_swarm: MakeSwarm, lie: str) -> None:
    """The other voters decide without it, or with its vote if they need it."""
    coup = Coup(make_swarm)
    LIES[lie](coup)
    if lie in WATCHED:  # peers with a coordinator poll no other peer
        coup.swarm.network.kill(A)
    coup.train(1, avoid="a" if lie in WATCHED else "")
    coup.swarm.settle()
    coup.train(1)
    assert coup.num_lies > 0, "somebody asked it"
    leaders = set(coup.coordinators) - coup.dead
    assert len(leaders) == 1
    coup.check_led_by(leaders.pop(), below=5 * MAX_STEP)
    coup.check()


def test_a_server_that_says_it_follows_another_is_left_out(make_swarm: MakeSwarm) -> None:
    coup = Coup(make_swarm)
    for method in (FREEZE.name, ANNOUNCE_TERM.name):
        coup.refuse(method, NotCoordinator(f"the run is coordinated under the term {coup.term(HIGHEST)}"))
    coup.train(2, avoid="c")
    assert coup.num_lies > 0
    assert coup.count("takeover") == 0
    assert coup.members() == [[A, B, E], [D, B, E]]
    assert coup.coordinators == [A]
    coup.check()


def test_a_voter_refuses_a_record_that_cannot_follow_from_the_run(make_swarm: MakeSwarm) -> None:
    """Each of these invalid records is refused before the honest record is accepted."""
    coup = Coup(make_swarm)
    swarm, num_refused = coup.swarm, 0
    calls = swarm.servers[B]._transport._call_handlers  # type: ignore[attr-defined]
    vote, ahead = calls[PROPOSE.name], list[asyncio.Task[bytes]]()

    def forged(record: Record) -> list[Record]:
        closing, stranger = record.closing, swarm.members[D]
        taken = HeldSnapshot(stage_index=0, version=closing.step, digest=bytes(32))
        return [
            replaced(record, clip_factor=0.5),
            replaced(record, outcome="skip"),
            replaced(record, squared_norm=-1.0),
            replaced(record, squared_norm=float("inf")),
            replaced(record, hyperparameters=[*record.hyperparameters, {"lr": 1.0}]),
            replaced(record, left=[Vacancy(member=stranger, stage_index=0)]),
            replaced(record, left=[Vacancy(member=one, stage_index=1) for one in swarm.rosters_now[1]]),
            replaced(record, next_voters=[swarm.members[LIAR]]),
            replaced(record, next_voters=[swarm.members[LIAR]] * 5),
            replaced(record, retired=[swarm.manifest.lead]),
            replaced(record, enlisted=[PeerId("stranger")]),
            replaced(record, snapshots=[replaced(taken, stage_index=2)]),
            replaced(record, snapshots=[replaced(taken, version=closing.step + 1)]),
            replaced(record, snapshots=[taken, replaced(taken, digest=bytes(32))]),
            replaced(record, closing=replaced(closing, absent=[LIAR])),
            replaced(record, closing=replaced(closing, total_weight=closing.total_weight * 10)),
        ]

    async def tempted(caller: PeerId, body: bytes) -> bytes:
        nonlocal num_refused
        proposal = decode(body, Proposal)
        closing = proposal.record.closing
        later = replaced(proposal.record, closing=replaced(closing, step=closing.step + 1))
        ahead.append(asyncio.create_task(vote(caller, encode(replaced(proposal, record=later)))))
        for record in forged(proposal.record):
            with pytest.raises(ProtocolError):
                await vote(caller, encode(replaced(proposal, record=record)))
            num_refused += 1
        answer: bytes = await vote(caller, body)
        assert decode(answer, Vote).accepted
        return answer

    calls[PROPOSE.name] = tempted
    coup.train(1)
    assert num_refused == 16
    with pytest.raises(Busy, match="lacks the record before record 2"):
        swarm.run(ahead[0])  # type: ignore[arg-type]
    coup.check()
