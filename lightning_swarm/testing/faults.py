"""What shall go wrong, when, and whether it did: `FaultPlan`.

A plan only decides; `sabotage.py` does what it says, on the in-memory network and in real processes.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self, TypeAlias, TypedDict

import msgspec
from typing_extensions import Unpack

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import methods, tickets

Side = Literal["request", "answer", "arrived"]
"""A request has come and is not worked on yet; its answer is about to leave; the answer has come back."""


class Phase(enum.Enum):
    """What a peer is doing. With ``X_DONE`` the work of ``X`` is done and the answer about to leave.

    A request's phase is that of both peers, the one that asks and the one that answers, unless said otherwise. What is
    small leaves with the word that it is there: then ``FORWARD_DONE`` and ``SEND_OUTPUT`` are in one message.
    """

    FORWARD = enum.auto()  # a microbatch's forward is asked for: before it
    FORWARD_ACCEPTED = enum.auto()  # its input is still to come: during it
    FORWARD_DONE = enum.auto()  # the output is there and nobody knows yet (the server's)
    SEND_OUTPUT = enum.auto()  # the output leaves for the next stage or the trainer (the server's that has it)
    BACKWARD = enum.auto()
    BACKWARD_ACCEPTED = enum.auto()
    BACKWARD_DONE = enum.auto()  # the gradient is added; the receipt is about to leave (the server's)
    RECEIPT_SEEN = enum.auto()  # ... and has come (the server's, and of who asked)
    SEND_GRADIENT = enum.auto()  # the input's gradient leaves for the stage before (the server's that has it)
    CANCEL = enum.auto()
    CANCEL_DONE = enum.auto()
    REPLAY = enum.auto()  # the coordinator has a trainer do microbatches again
    REPLAY_DONE = enum.auto()
    GRANT = enum.auto()  # a trainer asks for a place
    GRANT_DONE = enum.auto()
    DONE = enum.auto()  # a trainer says that its batch is through
    DONE_DONE = enum.auto()
    RECORD = enum.auto()  # a trainer asks for a record
    RECORD_DONE = enum.auto()
    CLOSE = enum.auto()  # the coordinator has a server freeze its sums
    CLOSE_DONE = enum.auto()
    AVERAGE = enum.auto()  # the coordinator has a server average
    AVERAGE_SEND = enum.auto()  # its own part of the sum leaves (the sender's)
    AVERAGE_REDUCE = enum.auto()  # the part that it reduced leaves (the reducer's)
    AVERAGE_TIED = enum.auto()  # its stage's share of what other stages hold, too, leaves (the sender's)
    AVERAGE_DONE = enum.auto()
    PREPARE = enum.auto()  # a coordinator asks a voter for its promise
    PREPARE_DONE = enum.auto()
    DECIDE = enum.auto()  # a coordinator has a voter accept a record
    DECIDE_DONE = enum.auto()
    APPLY = enum.auto()  # a decided record is told
    APPLY_DONE = enum.auto()
    JOIN = enum.auto()  # a server asks to join
    JOIN_DONE = enum.auto()
    DONATE = enum.auto()  # a joiner asks for a stage's state
    DONATE_DONE = enum.auto()
    PIECE = enum.auto()  # a joiner asks for a piece of that state
    PIECE_DONE = enum.auto()
    FOLLOW = enum.auto()  # a joiner asks for the next record
    FOLLOW_DONE = enum.auto()
    LISTEN = enum.auto()  # a joiner is to hold the round's result
    LISTEN_DONE = enum.auto()
    LEAVE = enum.auto()  # a server asks to be let go
    LEAVE_DONE = enum.auto()


LEAVING: Final = frozenset(
    phase for phase in Phase if phase.name.endswith(("_DONE", "_ACCEPTED", "_SEEN")) or phase.name.startswith("SEND_")
) | {Phase.AVERAGE_SEND, Phase.AVERAGE_REDUCE, Phase.AVERAGE_TIED}
"""The phases in which an answer leaves or has come."""

_METHODS: Final[Mapping[str, Phase]] = {
    methods.CANCEL: Phase.CANCEL,
    methods.REPLAY: Phase.REPLAY,
    methods.GRANT: Phase.GRANT,
    methods.DONE: Phase.DONE,
    methods.RECORD: Phase.RECORD,
    methods.FREEZE: Phase.CLOSE,
    methods.AVERAGE: Phase.AVERAGE,
    methods.PREPARE: Phase.PREPARE,
    methods.PROPOSE: Phase.DECIDE,
    methods.APPLY: Phase.APPLY,
    methods.JOIN: Phase.JOIN,
    methods.FOLLOW: Phase.DONATE,
    methods.PIECE: Phase.PIECE,
    methods.NEXT: Phase.FOLLOW,
    methods.LISTEN: Phase.LISTEN,
    methods.DRAIN: Phase.LEAVE,
}
_MICROBATCH: Final = re.compile(r"g\d+\.s(\d+)\.a\d+\.t\d+\+(\d+)\.c\d+/(\d+)/(forward|backward)")
_OF_RESULTS: Final = {
    "forward": (Phase.FORWARD_DONE, Phase.SEND_OUTPUT),
    "backward": (Phase.BACKWARD_DONE, Phase.SEND_GRADIENT),
}
_OF_SHARES: Final = {"part": Phase.AVERAGE_SEND, "reduced": Phase.AVERAGE_REDUCE, "tied": Phase.AVERAGE_TIED}
_ROUND: Final = re.compile(r"g\d+\.s(\d+)\.a\d+\.r\d+/average/(\d+)/(?:left/|right/)?(part|reduced|tied)\d*")


@dataclass(frozen=True, kw_only=True)
class MessagePoint:
    """A message at one point of its way."""

    phases: tuple[Phase, ...]  # none: one that has no name
    caller: PeerId
    peer: PeerId  # who answers
    doers: frozenset[PeerId]  # whose phase it is
    step: int | None = None
    stage: int | None = None
    microbatch: int | None = None


def read_passing(
    caller: PeerId, peer: PeerId, method: str, request: bytes, *, side: Side, answer: bytes | None = None
) -> MessagePoint:
    """Look at a message.

    Args:
        caller: Who asks.
        peer: Who answers.
        method: What.
        request: The control body of the request.
        side: Where it is.
        answer: The control body of the answer, where it is known.
    """
    both, holder = frozenset((caller, peer)), frozenset((peer,))
    if method in (tickets.WAIT_METHOD, tickets.FETCH_METHOD):
        phases, found = _of_ticket(method, _fields(request).get("name"), side, answer)
        doers = both if Phase.RECEIPT_SEEN in phases else holder
        return MessagePoint(phases=phases, caller=caller, peer=peer, doers=doers, **found)
    phase = _of_request(method, side)
    found = {} if phase is None else _found(_fields(request))
    return MessagePoint(phases=() if phase is None else (phase,), caller=caller, peer=peer, doers=both, **found)


def _of_request(method: str, side: Side) -> Phase | None:
    if method in (methods.FORWARD, methods.BACKWARD):
        name = method.rpartition(".")[2].upper()
        return {"request": Phase[name], "answer": Phase[f"{name}_ACCEPTED"]}.get(side)
    asked = _METHODS.get(method)
    if asked is None or side == "arrived":
        return None
    return asked if side == "request" else Phase[f"{asked.name}_DONE"]


def _of_ticket(method: str, name: object, side: Side, answer: bytes | None) -> tuple[tuple[Phase, ...], dict[str, int]]:
    reply = _fields(answer) if method == tickets.WAIT_METHOD and answer is not None else {}
    leaves = side == "answer" and (method == tickets.FETCH_METHOD or reply.get("taken") is not None)
    if found := _ROUND.fullmatch(str(name)):
        return (_OF_SHARES[found[3]],) if leaves else (), {"step": int(found[1]), "stage": int(found[2])}
    found = _MICROBATCH.fullmatch(str(name))
    if found is None:
        return (), {}
    done, send = _OF_RESULTS[found[4]]
    phases = [done] if side == "answer" and reply.get("ready") is True else []
    phases += [send] if leaves else []
    if side == "arrived" and reply.get("ready") is True and found[4] == "backward":
        phases.append(Phase.RECEIPT_SEEN)
    return tuple(phases), {"step": int(found[1]), "microbatch": int(found[2]), "stage": int(found[3])}


def _fields(body: bytes) -> Mapping[str, Any]:
    """Of a record, whichever it is."""
    try:
        fields = msgspec.msgpack.decode(body)
    except msgspec.MsgspecError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _found(fields: Mapping[str, Any]) -> dict[str, int]:
    """The step, stage and microbatch that a record names, itself or in what it is about."""
    inner = [fields]
    for name in ("key", "record", "closing"):
        inner += [one[name] for one in inner if isinstance(one.get(name), dict)]
    names = {"step": "step", "stage_index": "stage", "index": "microbatch"}
    return {
        short: one[name] for one in reversed(inner) for name, short in names.items() if isinstance(one.get(name), int)
    }


Kind: TypeAlias = Literal["kill", "freeze", "delay", "drop", "duplicate", "corrupt", "partition"]


class Moment(TypedDict, total=False):
    """What narrows down when a fault strikes."""

    of: str  # whose phase it is, if not the peer's own
    step: int
    stage: int
    microbatch: int  # of its batch, counted from 0
    nth: int  # from the nth such message on, counted from 1


class DidNotHappen(AssertionError):
    """Faults were planned that did not strike: what was to be tested was not."""


@dataclass(eq=False, kw_only=True)
class Fault:
    """One thing that shall happen; made by the methods of `FaultPlan`.

    Args:
        kind: What.
        peer: To whom; None: to whoever answers.
        at: In which phase; None: with any message.
        when: What else must hold.
        for_s: How long it lasts, in seconds, if it does.
        times: How often; None: again and again.
        groups: Who is parted from whom.

    Attributes:
        fired: How often it has happened.
    """

    kind: Kind
    peer: PeerId | None
    at: Phase | None
    when: Moment
    for_s: float = 0.0
    times: int | None = 1
    groups: tuple[frozenset[PeerId], ...] = ()
    fired: int = field(default=0, init=False)
    _seen: int = field(default=0, init=False)

    def strikes(self, passing: MessagePoint) -> bool:
        """Take note of a message; whether it is one with which this happens."""
        if (self.times is not None and self.fired >= self.times) or not self._matches(passing):
            return False
        self._seen += 1
        if self._seen < self.when.get("nth", 1):
            return False
        self.fired += 1
        return True

    def _matches(self, passing: MessagePoint) -> bool:
        doer = self.when.get("of", self.peer)
        return (
            (self.at is None or self.at in passing.phases)
            and (doer is None or doer in passing.doers)
            and self.when.get("step", passing.step) == passing.step
            and self.when.get("stage", passing.stage) == passing.stage
            and self.when.get("microbatch", passing.microbatch) == passing.microbatch
        )

    def __str__(self) -> str:
        at = self.at.name if self.at else "any message"
        where = "".join(f", {name} {value}" for name, value in self.when.items())
        whom = " | ".join(" ".join(sorted(group)) for group in self.groups) or self.peer or "whoever answers"
        return f"{self.kind} {whom} at {at}{where}"


class FaultPlan:
    """Faults for a swarm under test, each with the moment at which it strikes.

    ``FaultPlan().kill("peer-2", at=Phase.BACKWARD, step=3).freeze("peer-1", for_s=30.0, at=Phase.APPLY)``

    Each method adds one fault and returns the plan. They have these arguments in common:

    - ``peer``: whom it strikes, by name; None: whoever answers.
    - ``at``: a `Phase`. Whoever asks and whoever answers are both in it, where it does not say otherwise.
    - ``of``, ``step``, ``stage``, ``microbatch``, ``nth``: see `Moment`.

    A test must look at `fired`, or call `check`: one whose faults did not strike has shown nothing.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def kill(self, peer: str | None, *, at: Phase, **when: Unpack[Moment]) -> Self:
        """End a peer at once, as `kill -9` does."""
        return self._add("kill", peer, at, when)

    def freeze(self, peer: str | None, *, for_s: float, at: Phase, **when: Unpack[Moment]) -> Self:
        """Let nothing reach or leave a peer for a time, as SIGSTOP and SIGCONT do; no connection breaks."""
        return self._add("freeze", peer, at, when, for_s=for_s)

    def delay(
        self,
        peer: str | None,
        *,
        by_s: float,
        at: Phase | None = None,
        times: int | None = 1,
        **when: Unpack[Moment],
    ) -> Self:
        """Hold messages back. With neither `at` nor `times`: all of the peer's, so that it is slow."""
        return self._add("delay", peer, at, when, for_s=by_s, times=times)

    def drop(self, peer: str | None, *, at: Phase, times: int | None = 1, **when: Unpack[Moment]) -> Self:
        """Lose a message without a word: who waits for the answer waits until its deadline."""
        return self._add("drop", peer, at, when, times=times)

    def duplicate(
        self, peer: str | None, *, at: Phase, again_after_s: float = 0.0, times: int | None = 1, **when: Unpack[Moment]
    ) -> Self:
        """Have a request come once more, `again_after_s` seconds after it was answered."""
        if at in LEAVING:
            raise ConfigError(f"requests come twice, and {at.name} is when an answer leaves. Choose a request's phase.")
        return self._add("duplicate", peer, at, when, for_s=again_after_s, times=times)

    def corrupt(self, peer: str | None, *, at: Phase, times: int | None = 1, **when: Unpack[Moment]) -> Self:
        """Turn a bit of a message over on its way. In memory only: an encrypted connection would break."""
        return self._add("corrupt", peer, at, when, times=times)

    def partition(self, *groups: Collection[str], for_s: float, at: Phase, **when: Unpack[Moment]) -> Self:
        """Let nothing pass between groups of peers for a time; who is in none reaches all. In memory only."""
        if len(groups) < 2:
            raise ConfigError(f"a partition parts at least two groups of peers, got {groups}. Name both sides.")
        parted = tuple(frozenset(map(PeerId, group)) for group in groups)
        return self._add("partition", None, at, when, for_s=for_s, groups=parted)

    def _add(
        self,
        kind: Kind,
        peer: str | None,
        at: Phase | None,
        when: Moment,
        *,
        for_s: float = 0.0,
        times: int | None = 1,
        groups: tuple[frozenset[PeerId], ...] = (),
    ) -> Self:
        if when.get("nth", 1) < 1 or for_s < 0.0 or (times is not None and times < 1):
            raise ConfigError(
                f"`nth` and `times` count from 1, and no time is negative, got {dict(when)}, times={times}, {for_s} s"
            )
        name = None if peer is None else PeerId(peer)
        fault = Fault(kind=kind, peer=name, at=at, when=when, for_s=for_s, times=times, groups=groups)
        self.faults.append(fault)
        return self

    # ------------------------------------------------------------------ what came of it

    @property
    def fired(self) -> int:
        """How often faults of this plan have struck."""
        return sum(fault.fired for fault in self.faults)

    @property
    def unfired(self) -> list[Fault]:
        """The faults that have not struck."""
        return [fault for fault in self.faults if not fault.fired]

    def check(self) -> None:
        """Raise `DidNotHappen`, which names the faults that did not strike, if there are any."""
        if self.unfired:
            raise DidNotHappen(f"These faults did not happen: {'; '.join(map(str, self.unfired))}.")

    def strike(self, passing: MessagePoint, kinds: Collection[Kind]) -> Sequence[Fault]:
        """The faults of these kinds that happen with a message. Counts them."""
        return [fault for fault in self.faults if fault.kind in kinds and fault.strikes(passing)]
