"""The matrix: every fault in every phase, one at a time and in random pairs.

Every kind of message fault strikes each phase, at any peer that answers. The same faults strike the coordinator, a
server and each trainer in rotation: each pair of a phase, a kind and a peer is in some plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_swarm.testing import FaultPlan, Phase
from lightning_swarm.testing.faults import ANSWER_PHASES

STAGES = ("a b c", "d e f")
VOTERS = "a b c d e"
COORDINATOR = "a"
LEAD = "trainer"
TRAINERS = f"{LEAD} other"
STEP = 1
"""The step in which faults strike, with one step before it and one after."""

COMPUTING = [
    Phase.FORWARD,
    Phase.FORWARD_ACCEPTED,
    Phase.FORWARD_DONE,
    Phase.SEND_OUTPUT,
    Phase.BACKWARD,
    Phase.BACKWARD_ACCEPTED,
    Phase.BACKWARD_DONE,
    Phase.RECEIPT_SEEN,
    Phase.SEND_GRADIENT,
]
CLOSING = [
    Phase.CLOSE,
    Phase.CLOSE_DONE,
    Phase.AVERAGE,
    Phase.AVERAGE_SEND,
    Phase.AVERAGE_REDUCE,
    Phase.AVERAGE_DONE,
    Phase.DECIDE,
    Phase.DECIDE_DONE,
    Phase.APPLY,
    Phase.APPLY_DONE,
]
TRAINING = [Phase.GRANT, Phase.GRANT_DONE, Phase.DONE, Phase.DONE_DONE, Phase.RECORD, Phase.RECORD_DONE]
OF_TRAINERS = [
    Phase.FORWARD,
    Phase.FORWARD_ACCEPTED,
    Phase.BACKWARD,
    Phase.BACKWARD_ACCEPTED,
    Phase.RECEIPT_SEEN,
    *TRAINING,
]
CANCELLING = [Phase.CANCEL, Phase.CANCEL_DONE]
REPLAYING = [Phase.REPLAY, Phase.REPLAY_DONE]
PREPARING = [Phase.PREPARE, Phase.PREPARE_DONE]
JOINING = [
    Phase.JOIN,
    Phase.JOIN_DONE,
    Phase.DONATE,
    Phase.DONATE_DONE,
    Phase.PIECE,
    Phase.PIECE_DONE,
    Phase.FOLLOW,
    Phase.FOLLOW_DONE,
    Phase.LISTEN,
    Phase.LISTEN_DONE,
]
LEAVING_PHASES = [Phase.LEAVE, Phase.LEAVE_DONE]
SENDING = frozenset({Phase.SEND_OUTPUT, Phase.SEND_GRADIENT, Phase.AVERAGE_SEND, Phase.AVERAGE_REDUCE})
"""Phases that send a tensor."""
BETWEEN = frozenset({Phase.GRANT, Phase.GRANT_DONE, Phase.RECORD_DONE, Phase.APPLY_DONE})
"""Phases in which possibly no microbatch is under way."""

PHASES_OF = {
    "b": [*COMPUTING[:-1], *CLOSING],
    "e": [*COMPUTING, *CLOSING],
    COORDINATOR: [*COMPUTING[:-1], *CLOSING, *TRAINING],
    "other": OF_TRAINERS,
    LEAD: OF_TRAINERS,
}
"""Phase -> peers that can be struck in it. The first stage receives no request to send a gradient."""

BRIEFLY_S = 4.0
"""Shorter than the silence timeout."""
LATE_S = 12.0
LONG_S = 40.0
"""Longer than the silence timeout."""
PARTITIONS = (
    ("b", "a c d e f trainer other"),
    ("a", "b c d e f trainer other"),
    ("a b d", "c e f trainer other"),
    ("e other", "a b c d f trainer"),
)


@dataclass(frozen=True)
class Case:
    """One fault at one moment."""

    kind: str
    whom: str | None
    phase: Phase
    for_s: float = 0.0
    groups: tuple[str, ...] = ()
    of: str | None = None  # the peer that the phase belongs to, if not `whom`
    # Peers that are killed, or absent for so long that they may be excluded.
    away: frozenset[str] = field(default=frozenset())
    times: int | None = 1  # number of lost messages; None: all

    def __str__(self) -> str:
        whom = "|".join(group.replace(" ", "") for group in self.groups) or self.whom or "any"
        for_ = f"-{self.for_s:g}s" if self.for_s else ""
        of = f"-of-{self.of}" if self.of else ""
        return f"{self.kind}-{whom}-{self.phase.name}{of}{for_}"

    @property
    def parts(self) -> dict[str, object]:
        """Properties that the chosen plans must cover: each kind for each time, each victim, each moment."""
        return {
            "kind": (self.kind, self.for_s),
            "victim": (self.whom, self.groups),
            "moment": (self.phase.name, self.of),
        }

    @property
    def struck(self) -> frozenset[str]:
        """Return the peers that the fault names as victims."""
        return frozenset(self.groups[0].split() if self.groups else [self.whom] if self.whom else [])

    def add_to(self, plan: FaultPlan) -> None:
        """Add the fault to a plan."""
        when: dict[str, Any] = {"at": self.phase}
        if self.of is not None:
            when["of"] = self.of
        if self.phase in (*JOINING, *LEAVING_PHASES):
            pass  # a server joins or leaves in one step only
        elif self.phase in TRAINING and self.whom == "other":
            pass  # it may not reach a second batch
        elif self.phase in (*CANCELLING, *REPLAYING):
            pass  # caused by another fault, whose step it has
        elif self.phase in TRAINING and self.whom == LEAD:
            when["step"] = STEP
        elif self.phase not in (*CLOSING, *PREPARING) and (self.whom or self.groups):
            when["nth"] = 2  # not every peer has work in every step
        elif self.phase in (Phase.GRANT, Phase.GRANT_DONE):
            when |= {"step": STEP, "nth": 2}  # while the first of its two batches is under way
        else:
            when["step"] = STEP
        match self.kind:
            case "partition":
                plan.partition(*(group.split() for group in self.groups), for_s=self.for_s, **when)
            case "freeze":
                plan.freeze(self.whom, for_s=self.for_s, **when)
            case "delay":
                plan.delay(self.whom, by_s=self.for_s, **when)
            case "drop":
                plan.drop(self.whom, times=self.times, **when)
            case "duplicate":
                plan.duplicate(self.whom, again_after_s=self.for_s, **when)
            case _:
                getattr(plan, self.kind)(self.whom, **when)


def cases() -> list[Case]:
    """Return every fault in every phase in which it can strike."""
    return [*_to_messages(), *_to_peers(), *_partitions()]


def _to_messages() -> Iterator[Case]:
    for phase in [*COMPUTING, *CLOSING, *TRAINING]:
        yield from _of_messages(None, phase, drops=phase in TRAINING)
        if phase not in TRAINING:
            yield from (
                Case("drop", whom, phase, away=frozenset({whom})) for whom in ("c", "e")[phase is Phase.SEND_GRADIENT :]
            )
    for first, whom in enumerate(("e", COORDINATOR, "other", LEAD)):
        for index, phase in enumerate(PHASES_OF[whom]):
            possible = list(_of_messages(whom, phase))
            yield possible[(first + index) % len(possible)]


def _of_messages(whom: str | None, phase: Phase, *, drops: bool = True) -> Iterator[Case]:
    """Yield the faults that can strike a phase's messages."""
    yield Case("delay", whom, phase, BRIEFLY_S)
    yield Case("delay", whom, phase, LATE_S)
    if drops:  # a peer that does not answer for long may count as gone
        yield Case("drop", whom, phase, away=frozenset([whom] if whom else []))
    if phase is not Phase.RECEIPT_SEEN:  # the receipt is in no message any more
        yield Case("corrupt", whom, phase)
    if phase not in ANSWER_PHASES:
        yield Case("duplicate", whom, phase)
        yield Case("duplicate", whom, phase, 3.0)


def _to_peers() -> Iterator[Case]:
    for whom, phases in PHASES_OF.items():
        for phase in phases:
            yield from _of_a_peer(whom, phase)


def _of_a_peer(whom: str, phase: Phase) -> Iterator[Case]:
    """Yield the faults that can strike a peer, except for the lead's death, which ends the run."""
    if whom != LEAD:
        yield Case("kill", whom, phase, away=frozenset({whom}))
    yield Case("freeze", whom, phase, BRIEFLY_S)
    yield Case("freeze", whom, phase, LONG_S, away=frozenset({whom}))


def _partitions() -> Iterator[Case]:
    for groups in PARTITIONS:
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.CLOSE, Phase.AVERAGE, Phase.DECIDE, Phase.APPLY):
            yield Case("partition", None, phase, BRIEFLY_S, groups)
            parted = groups[0].split()
            if COORDINATOR in parted and len(parted) > 1:  # the first to decide determines the excluded side
                parted = " ".join(groups).split()
            yield Case("partition", None, phase, LONG_S, groups, away=frozenset(parted))


def caused() -> Iterator[tuple[Case, ...]]:
    """Yield faults in phases that only occur after other faults, which come first."""
    # All answers are lost, because a repeat of the request would make up for a single one.
    lost_by = {
        whom: (Case("drop", whom, Phase.BACKWARD_ACCEPTED, away=frozenset({whom}), times=None),)
        for whom in ("e", LEAD, "other")
    }
    # Two of a stage's three servers die, so that each trainer loses a microbatch.
    lost = tuple(Case("kill", whom, Phase.CLOSE, away=frozenset({whom})) for whom in ("e", "f"))
    leaderless = (Case("kill", COORDINATOR, Phase.CLOSE, away=frozenset({COORDINATOR})),)
    for phase in CANCELLING:
        yield from ((*lost_by["e"], case) for case in _of_messages(None, phase))
        for whom, cause in lost_by.items():
            yield from ((*cause, case) for case in _of_a_peer(whom, phase))
    for phase in REPLAYING:
        yield from ((*lost, case) for case in _of_messages(None, phase))
        for whom in (COORDINATOR, LEAD, "other"):
            yield from ((*lost, case) for case in _of_a_peer(whom, phase))
    for phase in PREPARING:
        yield from ((*leaderless, case) for case in _of_messages(None, phase))
        for whom in ("b", "e"):
            yield from ((*leaderless, case) for case in _of_a_peer(whom, phase))


SMALL_STAGES = ("a b c", "d e")
JOINER, DONOR, LEAVER = "g", "d", "e"


def joining() -> Iterator[Case]:
    """Yield faults at a joining server, at its donor, and at the coordinator."""
    for index, phase in enumerate(JOINING):
        asked = COORDINATOR if phase.name.startswith(("JOIN", "LISTEN")) else DONOR
        for whom in dict.fromkeys((JOINER, asked, DONOR)):
            of = JOINER if whom == DONOR != asked else None
            yield Case("kill", whom, phase, of=of, away=frozenset({whom}))
            yield Case("freeze", whom, phase, BRIEFLY_S, of=of)
            yield Case("freeze", whom, phase, LONG_S, of=of, away=frozenset({whom}))
        yield from _sample(_of_messages(JOINER, phase), index)


def leaving() -> Iterator[Case]:
    """Yield faults at a leaving server, and at the coordinator."""
    for index, phase in enumerate(LEAVING_PHASES):
        yield from _of_a_peer(LEAVER, phase)
        yield from _of_a_peer(COORDINATOR, phase)
        yield from _sample(_of_messages(LEAVER, phase), index)
    for phase in (Phase.CLOSE, Phase.AVERAGE, Phase.DECIDE, Phase.APPLY, Phase.APPLY_DONE):
        yield from _of_a_peer(LEAVER, phase)


def _sample(cases: Iterator[Case], number: int) -> Iterator[Case]:
    """Yield one case of each kind, a different one for each number."""
    by_kind: dict[str, list[Case]] = {}
    for case in cases:
        by_kind.setdefault(case.kind, []).append(case)
    yield from (found[number // 2 % len(found)] for found in by_kind.values())


def pairs(num_pairs: int) -> list[tuple[Case, Case]]:
    """Draw pairs of faults at random.

    They leave each stage a peer, the voters a majority, and a trainer. No fault strikes a peer that the other one
    removed.
    """
    rng = random.Random(0)
    found: list[tuple[Case, Case]] = []
    every = cases()
    while len(found) < num_pairs:
        one, other = rng.sample(every, 2)
        clash = (one.away and one.away & other.struck) or (other.away and other.away & one.struck)
        if not clash and _bearable(one.away | other.away):
            found.append((one, other))
    return found


def _bearable(away: frozenset[str]) -> bool:
    there = all(set(stage.split()) - away for stage in STAGES) and set(TRAINERS.split()) - away
    return bool(there) and len(set(VOTERS.split()) - away) * 2 > len(VOTERS.split())
