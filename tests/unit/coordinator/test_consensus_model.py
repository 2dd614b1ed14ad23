"""Deciding under random schedules: peers crash, restart, freeze, join; messages are lost, doubled and reordered.

The model:

- Three to six initial peers, one to five of them voters. Each runs `Voter` and, at random times, a `Ballot` for the
  next step that it knows of; both are the production code. The network and the proposers' pace are the model's own.
- Messages of all ballots, old ballots included, arrive in any order, twice, late or never.
- Peers crash, and return as new peers: with another boot id, no promises and no records. Peers freeze and thaw
  without losing state.
- New peers join under new names at any time: they fetch records like a peer that missed some, and a record makes them
  voters, like members that were no voters. Records also remove voters.

Two invariants are checked: one record for a slot, and no record decided whose round of averaging may have been
overwritten since. The model must catch broken variants of both, so that it can be trusted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from lightning_swarm.coordinator.consensus import Ballot, Slot, Voter
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import NO_TERM, Member, Term
from lightning_swarm.protocol.messages.step import Prepare, Promise, Proposal, Record, Vote
from lightning_swarm.protocol.messages.wire import encode
from tests.unit.coordinator.test_consensus import record

NUM_SCHEDULES = 20_000
NUM_EVENTS = 300
MAX_NEWCOMERS = 3
EMPTY = record()


def voters_of(record: Record) -> list[Member]:
    """Return the voters after a record, which each record of the model names."""
    assert record.next_voters is not None
    return record.next_voters


class Broken(AssertionError):
    """An invariant was violated."""


@dataclass
class Node:
    member: Member
    voter: Voter
    log: list[Record] = field(default_factory=list)  # decided records that it knows
    ballot: Ballot | None = None
    record: Record | None = None  # its ballot's proposal
    number: int = 0
    alive: bool = True
    frozen: bool = False

    @property
    def acts(self) -> bool:
        return self.alive and not self.frozen


Mail = tuple[str, int, int, Ballot, Any]  # kind, sender, receiver, ballot, content


class Schedule:
    """One random run of the protocol.

    Args:
        seed: Seed of all random choices.
        new_voter: Makes voters, possibly of a broken variant.
        new_ballot: Makes ballots, possibly of a broken variant.
        forgetful: Whether a restarted voter claims to be its predecessor.
    """

    def __init__(
        self,
        seed: int,
        *,
        new_voter: Callable[[int], Voter] = Voter,
        new_ballot: Callable[..., Ballot] = Ballot,
        forgetful: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.new_voter, self.new_ballot, self.forgetful = new_voter, new_ballot, forgetful
        self.num_first = self.rng.choice((3, 4, 5, 6))
        self.nodes = [self.node(i, i) for i in range(self.num_first)]
        self.boots = self.num_first
        self.first_voters = [one.member for one in self.nodes[: self.rng.choice((1, 3, 3, 5))]]
        self.mail: list[Mail] = []
        self.num_records = 0
        self.decided: dict[Slot, bytes] = {}
        self.origin: dict[bytes, Term] = {}  # record -> term under which it was first proposed
        self.begun: dict[Slot, Term] = {}  # the highest term that began a round for the slot
        self.seen: Counter[str] = Counter()

    def node(self, index: int, boot_id: int) -> Node:
        return Node(Member(peer_id=PeerId(f"p{index}"), boot_id=boot_id), self.new_voter(boot_id))

    def run(self) -> Counter[str]:
        for _ in range(NUM_EVENTS):
            chance = self.rng.random()
            if chance < 0.78 and self.mail:
                self.deliver()
            elif chance < 0.975:
                node = self.rng.choice(self.nodes)
                if node.acts:
                    self.drive(node)
            else:
                self.trouble()
        return self.seen

    # ------------------------------------------------------------------ the network

    def deliver(self) -> None:
        place = self.rng.randrange(len(self.mail))
        chance = self.rng.random()
        if chance < 0.08:
            self.seen["doubled"] += 1
            mail = self.mail[place]
        else:
            self.mail[place], self.mail[-1] = self.mail[-1], self.mail[place]
            mail = self.mail.pop()
        kind, sender, receiver, ballot, content = mail
        node = self.nodes[receiver]
        if 0.08 <= chance < 0.14:
            self.seen["lost"] += 1
        elif node.frozen:
            self.mail.append(mail)  # kept until it thaws
        elif node.alive:
            self.handle(kind, sender, receiver, node, ballot, content)

    def handle(self, kind: str, sender: int, receiver: int, node: Node, ballot: Ballot, content: Any) -> None:
        try:
            if kind == "prepare":
                promise = node.voter.promise(content)
                self.mail.append(
                    ("fenced" if content.fence else "promise", receiver, sender, ballot, (node.member, promise))
                )
            elif kind == "propose":
                vote = node.voter.consider(content)
                self.mail.append(("vote", receiver, sender, ballot, (node.member, vote)))
            elif kind == "apply":
                self.learn(node, content)
            elif kind == "vote":
                ballot.record_vote(*content)
            else:
                ballot.record_promise(*content, fence=kind == "fenced")
        except ProtocolError:
            self.seen["other_life"] += 1

    # ------------------------------------------------------------------ proposers

    def voters(self, node: Node) -> list[Member]:
        return voters_of(node.log[-1]) if node.log else self.first_voters

    def drive(self, node: Node) -> None:
        ballot = node.ballot
        if ballot is None:
            if self.rng.random() < 0.5:
                self.fetch(node)
            else:
                node.number = max(node.number, node.voter.term[0]) + 1
                term = (node.number, node.member.peer_id, node.member.boot_id)
                node.ballot = self.new_ballot(term, (0, len(node.log)), self.voters(node))
                node.record = None
                self.ask(node)
        elif ballot.decided:
            assert node.record is not None
            self.decide(node, ballot, node.record)
        elif ballot.lost or self.rng.random() < 0.04:
            node.number = max(node.number, (ballot.rival or NO_TERM)[0])
            node.ballot = None
            self.seen["gave_up"] += 1
        else:
            self.ask(node)

    def ask(self, node: Node) -> None:
        ballot = node.ballot
        assert ballot is not None
        me = self.nodes.index(node)
        content: Prepare | Proposal
        ready = ballot.prepared and (ballot.chosen is not None or ballot.may_begin)
        if ready and node.record is None:
            node.record = ballot.chosen or self.fresh(ballot)
            self.seen["finished" if ballot.chosen is not None else "fresh"] += 1
        for voter in ballot.voters:
            if ready:
                assert node.record is not None
                kind, content = "propose", ballot.proposal(voter, node.record)
            else:
                kind, content = "prepare", ballot.prepare(voter, fence=ballot.prepared)
            self.mail.append((kind, me, int(voter.peer_id[1:]), ballot, content))

    def fresh(self, ballot: Ballot) -> Record:
        """Make a new record; preparing it overwrites the servers' state of earlier rounds."""
        self.num_records += 1
        self.begun[ballot.slot] = max(ballot.term, self.begun.get(ballot.slot, NO_TERM))
        voters = self.next_voters(list(ballot.voters))
        closing = replaced(EMPTY.closing, step=ballot.slot[1])
        made = replaced(EMPTY, closing=closing, squared_norm=float(self.num_records), next_voters=voters)
        self.origin[encode(made)] = ballot.term
        return made

    def next_voters(self, voters: list[Member]) -> list[Member]:
        """Return mostly the same voters, whose promises stay valid; otherwise random members, or one new voter."""
        members = [one.member for one in self.nodes]
        newcomers = [one for one in members[self.num_first :] if one not in voters]
        chance = self.rng.random()
        if newcomers and chance < 0.5:
            voters[self.rng.randrange(len(voters))] = self.rng.choice(newcomers)
        elif chance > 0.6:
            voters = self.rng.sample(members, self.rng.choice((1, 3)))
        return voters

    def decide(self, node: Node, ballot: Ballot, made: Record) -> None:
        body = encode(made)
        names = [f"p{index}" for index in range(self.num_first, len(self.nodes))]
        self.seen["newcomers_decided"] += any(voter.peer_id in names for voter in ballot.voters)
        if self.decided.setdefault(ballot.slot, body) != body:
            raise Broken(f"two records for {ballot.slot}")
        if self.origin[body] < self.begun.get(ballot.slot, NO_TERM) and not self.seen[f"applied {ballot.slot}"]:
            raise Broken(f"{ballot.slot}: decided is a record whose round nobody holds any more")
        self.seen[f"applied {ballot.slot}"] += 1
        self.seen["decided"] += 1
        self.learn(node, made)
        me = self.nodes.index(node)
        node.ballot = ballot.after((0, len(node.log)), voters_of(made))
        node.record = None
        for other in range(len(self.nodes)):
            if other != me:
                self.mail.append(("apply", me, other, ballot, made))

    def learn(self, node: Node, made: Record) -> None:
        if made.step == len(node.log):
            node.log.append(made)
            if node.ballot is not None and node.ballot.slot <= (0, made.step):
                node.ballot = None

    def fetch(self, node: Node) -> None:
        other = self.rng.choice(self.nodes)
        if other.acts and len(other.log) > len(node.log):
            self.learn(node, other.log[len(node.log)])

    # ------------------------------------------------------------------ faults

    def trouble(self) -> None:
        index = self.rng.randrange(len(self.nodes))
        node = self.nodes[index]
        chance = self.rng.random()
        if chance < 0.25 and len(self.nodes) < self.num_first + MAX_NEWCOMERS:
            self.seen["joined"] += 1
            self.boots += 1
            self.nodes.append(self.node(len(self.nodes), self.boots))
        elif not node.alive:
            self.seen["restarted"] += 1
            self.boots += 1
            self.nodes[index] = self.node(index, node.member.boot_id if self.forgetful else self.boots)
        elif node.frozen:
            self.seen["thawed"] += 1
            node.frozen = False
        elif chance < 0.6:
            self.seen["crashed"] += 1
            node.alive, node.ballot = False, None
        elif chance < 0.8:
            self.seen["frozen"] += 1
            node.frozen = True


@pytest.mark.thorough
def test_never_two_records_for_one_slot() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        counts = Schedule(seed).run()
        seen.update({kind: count for kind, count in counts.items() if not kind.startswith("applied")})
    for kind in ("crashed", "restarted", "frozen", "thawed", "lost", "doubled", "other_life", "gave_up", "joined"):
        assert seen[kind] > NUM_SCHEDULES / 10, kind
    assert seen["decided"] > NUM_SCHEDULES / 2, "there was something to get wrong"
    assert seen["newcomers_decided"] > NUM_SCHEDULES / 20, "voters that were not there at first took part"
    assert seen["finished"] > NUM_SCHEDULES / 5, "what others had proposed was finished"


class NoPromise(Ballot):
    """Proposes without asking for accepted records."""

    prepared = may_begin = property(lambda self: True)  # type: ignore[assignment]


class FirstBest(Ballot):
    """Finishes any accepted record, not that of the highest term."""

    @property
    def chosen(self) -> Record | None:
        heard = [one for one in self._promises.values() if one is not None]
        return next((one.accepted.record for one in heard if one.accepted is not None), None)


class HalfIsEnough(Ballot):
    """Takes a half for a majority."""

    def _is_majority(self, some: Any) -> bool:
        return len(some) * 2 >= len(self.voters) - 1


class Unfenced(Ballot):
    """Begins a round of its own while an older record may still come back."""

    @property
    def may_begin(self) -> bool:
        return self.prepared


class OneWord(Ballot):
    """Uses its promises with other voters."""

    def after(self, slot: Slot, voters: Any) -> Ballot:
        return OneWord(self.term, slot, voters, promised=voters, fenced=voters)


class FallsBack(Voter):
    """Accepts proposals under any term."""

    def consider(self, proposal: Proposal) -> Vote:
        self.term = min(self.term, proposal.term)
        return super().consider(proposal)


class Silent(Voter):
    """Conceals its accepted record."""

    def promise(self, request: Prepare) -> Promise:
        return replaced(super().promise(request), accepted=None)


@pytest.mark.parametrize(
    "broken",
    [
        {"new_ballot": NoPromise},
        {"new_ballot": FirstBest},
        {"new_ballot": HalfIsEnough},
        {"new_ballot": Unfenced},
        {"new_ballot": OneWord},
        {"new_voter": FallsBack},
        {"new_voter": Silent},
        {"forgetful": True},
    ],
    ids=lambda broken: "-".join(getattr(one, "__name__", "forgetful") for one in broken.values()),
)
def test_the_model_catches_a_broken_variant(broken: dict[str, Any]) -> None:
    def play() -> None:
        for seed in range(NUM_SCHEDULES):
            Schedule(seed, **broken).run()

    with pytest.raises(Broken):
        play()
