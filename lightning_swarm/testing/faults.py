"""Planned faults of a swarm under test: their kinds, the moments when they strike, and counts of their strikes.

A `FaultPlan` only decides; `sabotage.py` carries it out, on the in-memory network and in real processes.
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
from lightning_swarm.protocol import rpc

Side = Literal["request", "answer", "arrived"]
"""A request has arrived and is not handled yet; its answer is about to leave; its answer has arrived."""


class Phase(enum.Enum):
    """The work that a peer is doing. ``X_DONE``: the work of ``X`` is done, and the answer is about to leave.

    The caller and the answering peer are both in a phase, unless the comment on the phase names other peers in
    parentheses. A small result leaves together with the notice that it is ready: such a message is in two phases at
    once, for example ``FORWARD_DONE`` and ``SEND_OUTPUT``.
    """

    FORWARD = enum.auto()  # a microbatch's forward is requested and has not begun
    FORWARD_ACCEPTED = enum.auto()  # the forward is accepted, and its input has not arrived
    FORWARD_DONE = enum.auto()  # the output is ready, and not yet announced (the server)
    SEND_OUTPUT = enum.auto()  # the output leaves for the next stage or the trainer (the server that has it)
    BACKWARD = enum.auto()
    BACKWARD_ACCEPTED = enum.auto()
    BACKWARD_DONE = enum.auto()  # the gradient is added, and the receipt is about to leave (the server)
    RECEIPT_SEEN = enum.auto()  # the receipt has arrived (the server and the caller)
    SEND_GRADIENT = enum.auto()  # the input's gradient leaves for the stage before (the server that has it)
    CANCEL = enum.auto()
    CANCEL_DONE = enum.auto()
    REPLAY = enum.auto()  # the coordinator has a trainer compute microbatches again
    REPLAY_DONE = enum.auto()
    GRANT = enum.auto()  # a trainer asks for its batch's places in the step
    GRANT_DONE = enum.auto()
    DONE = enum.auto()  # a trainer reports that its batch is complete
    DONE_DONE = enum.auto()
    RECORD = enum.auto()  # a trainer asks for a record
    RECORD_DONE = enum.auto()
    CLOSE = enum.auto()  # the coordinator has a server freeze its gradient sums
    CLOSE_DONE = enum.auto()
    SKETCH = enum.auto()  # the coordinator asks a server for sketches of its frozen sums
    SKETCH_DONE = enum.auto()
    AUDIT = enum.auto()  # a trainer has a server compute another server's microbatch again
    AUDIT_DONE = enum.auto()
    KEPT_WORK = enum.auto()  # an auditor asks the audited server for its kept work of the microbatch
    KEPT_WORK_DONE = enum.auto()
    FINDINGS = enum.auto()  # the coordinator asks a server for its findings as an auditor
    FINDINGS_DONE = enum.auto()
    AVERAGE = enum.auto()  # the coordinator has a server average
    AVERAGE_SEND = enum.auto()  # a server's own part of the sum leaves (the sender)
    AVERAGE_REDUCE = enum.auto()  # the part that a server reduced leaves (the reducer)
    AVERAGE_TIED = enum.auto()  # a stage's share of parameters that other stages also hold leaves (the sender)
    AVERAGE_DONE = enum.auto()
    PREPARE = enum.auto()  # a coordinator asks a voter for its promise
    PREPARE_DONE = enum.auto()
    DECIDE = enum.auto()  # a coordinator has a voter accept a record
    DECIDE_DONE = enum.auto()
    APPLY = enum.auto()  # a decided record is announced
    APPLY_DONE = enum.auto()
    JOIN = enum.auto()  # a server asks to join
    JOIN_DONE = enum.auto()
    DONATE = enum.auto()  # a joiner asks for a stage's state
    DONATE_DONE = enum.auto()
    PIECE = enum.auto()  # a joiner asks for a piece of that state
    PIECE_DONE = enum.auto()
    FOLLOW = enum.auto()  # a joiner asks for the next record
    FOLLOW_DONE = enum.auto()
    LISTEN = enum.auto()  # the coordinator has a joiner hold the result of the averaging
    LISTEN_DONE = enum.auto()
    LEAVE = enum.auto()  # a server asks to leave
    LEAVE_DONE = enum.auto()


ANSWER_PHASES: Final = frozenset(
    phase for phase in Phase if phase.name.endswith(("_DONE", "_ACCEPTED", "_SEEN")) or phase.name.startswith("SEND_")
) | {Phase.AVERAGE_SEND, Phase.AVERAGE_REDUCE, Phase.AVERAGE_TIED}
"""The phases in which an answer leaves or has arrived."""

# A phase is named after the work, and a method after the call. So the method FOLLOW, by which a joiner asks for a
# stage's state, is in the phase DONATE, and the phase FOLLOW has the method NEXT.
_PHASE_BY_METHOD: Final[Mapping[str, Phase]] = {
    rpc.CANCEL.name: Phase.CANCEL,
    rpc.REPLAY.name: Phase.REPLAY,
    rpc.GRANT.name: Phase.GRANT,
    rpc.DONE.name: Phase.DONE,
    rpc.RECORD.name: Phase.RECORD,
    rpc.FREEZE.name: Phase.CLOSE,
    rpc.SKETCH.name: Phase.SKETCH,
    rpc.AUDIT.name: Phase.AUDIT,
    rpc.KEPT_WORK.name: Phase.KEPT_WORK,
    rpc.FINDINGS.name: Phase.FINDINGS,
    rpc.AVERAGE.name: Phase.AVERAGE,
    rpc.PREPARE.name: Phase.PREPARE,
    rpc.PROPOSE.name: Phase.DECIDE,
    rpc.APPLY.name: Phase.APPLY,
    rpc.JOIN.name: Phase.JOIN,
    rpc.FOLLOW.name: Phase.DONATE,
    rpc.PIECE.name: Phase.PIECE,
    rpc.NEXT.name: Phase.FOLLOW,
    rpc.LISTEN.name: Phase.LISTEN,
    rpc.DRAIN.name: Phase.LEAVE,
}
_MICROBATCH: Final = re.compile(r"g\d+\.s(\d+)\.t\d+\+(\d+)\.c\d+/(\d+)/(forward|backward)@.+")
_RESULT_PHASES: Final = {
    "forward": (Phase.FORWARD_DONE, Phase.SEND_OUTPUT),
    "backward": (Phase.BACKWARD_DONE, Phase.SEND_GRADIENT),
}
_AVERAGING_PHASES: Final = {"part": Phase.AVERAGE_SEND, "reduced": Phase.AVERAGE_REDUCE, "tied": Phase.AVERAGE_TIED}
_AVERAGING: Final = re.compile(r"g\d+\.s(\d+)\.r\d+\.\d+/average/(\d+)/(?:left/|right/)?(part|reduced|tied)\d*")


class MessagePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A message at one point of its exchange."""

    phases: tuple[Phase, ...]  # empty if no phase is defined here
    caller: PeerId
    peer: PeerId  # answers the request
    doers: frozenset[PeerId]  # peers that are in these phases, of the caller and the answering peer
    step: int | None = None
    stage: int | None = None
    microbatch: int | None = None


def read_message(
    caller: PeerId, peer: PeerId, method: str, request: bytes, *, side: Side, answer: bytes | None = None
) -> MessagePoint:
    """Read a message's phases, peers and position from the control bodies of its request and, if known, its answer."""
    both, holder = frozenset((caller, peer)), frozenset((peer,))
    if method in (rpc.WAIT.name, rpc.FETCH.name):
        phases, position = _read_ticket(method, _fields(request).get("name"), side, answer)
        doers = both if Phase.RECEIPT_SEEN in phases else holder
        return MessagePoint(phases=phases, caller=caller, peer=peer, doers=doers, **position)
    phase = _request_phase(method, side)
    position = {} if phase is None else _read_position(_fields(request))
    return MessagePoint(phases=() if phase is None else (phase,), caller=caller, peer=peer, doers=both, **position)


def _request_phase(method: str, side: Side) -> Phase | None:
    """Return the phase of any other message; None if this point of its exchange has none."""
    if method in (rpc.FORWARD.name, rpc.BACKWARD.name):
        name = method.rpartition(".")[2].upper()
        return {"request": Phase[name], "answer": Phase[f"{name}_ACCEPTED"]}.get(side)
    phase = _PHASE_BY_METHOD.get(method)
    if phase is None or side == "arrived":
        return None
    return phase if side == "request" else Phase[f"{phase.name}_DONE"]


def _read_ticket(
    method: str, name: object, side: Side, answer: bytes | None
) -> tuple[tuple[Phase, ...], dict[str, int]]:
    """Read the phases and the position of a message that waits for a ticket's result, or fetches it."""
    reply = _fields(answer) if method == rpc.WAIT.name and answer is not None else {}
    sends_tensors = side == "answer" and (method == rpc.FETCH.name or reply.get("taken") is not None)
    if match := _AVERAGING.fullmatch(str(name)):
        return (_AVERAGING_PHASES[match[3]],) if sends_tensors else (), {"step": int(match[1]), "stage": int(match[2])}
    match = _MICROBATCH.fullmatch(str(name))
    if match is None:
        return (), {}
    done, send = _RESULT_PHASES[match[4]]
    phases = [done] if side == "answer" and reply.get("ready") is True else []
    phases += [send] if sends_tensors else []
    if side == "arrived" and reply.get("ready") is True and match[4] == "backward":
        phases.append(Phase.RECEIPT_SEEN)
    return tuple(phases), {"step": int(match[1]), "microbatch": int(match[2]), "stage": int(match[3])}


def _fields(body: bytes) -> Mapping[str, Any]:
    """Return the fields of a control body; none if it is malformed, as a corrupted one may be."""
    try:
        fields = msgspec.msgpack.decode(body)
    except msgspec.MsgspecError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _read_position(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the step, stage and microbatch that a message, or a record within it, names; outer values win."""
    records = [fields]
    for name in ("key", "record", "closing"):
        records += [record[name] for record in records if isinstance(record.get(name), dict)]
    names = {"step": "step", "stage_index": "stage", "index": "microbatch"}
    values = ((names[name], record.get(name)) for record in reversed(records) for name in names)
    return {name: value for name, value in values if isinstance(value, int)}


Kind: TypeAlias = Literal["kill", "freeze", "delay", "drop", "duplicate", "corrupt", "partition"]


class Moment(TypedDict, total=False):
    """Conditions that narrow down when a fault strikes."""

    of: str  # the peer that must be in the phase, by default the struck peer
    step: int
    stage: int
    microbatch: int  # index within its batch
    nth: int  # the first message that is struck, counted from 1 among all that meet the other conditions


class DidNotHappen(AssertionError):
    """Planned faults did not strike, so the test has not tested them."""


@dataclass(eq=False, kw_only=True)
class Fault:
    """One planned fault; made by the methods of `FaultPlan`."""

    kind: Kind
    peer: PeerId | None  # the struck peer; None: the answering peer
    at: Phase | None  # None: any message
    when: Moment
    for_s: float = 0.0  # duration in seconds, for kinds that have one
    times: int | None = 1  # maximum number of strikes; None: unlimited
    groups: tuple[frozenset[PeerId], ...] = ()  # groups of peers that a partition separates
    fired: int = field(default=0, init=False)  # number of strikes
    _seen: int = field(default=0, init=False)  # messages that met all conditions but `nth`

    @property
    def is_over(self) -> bool:
        """True once it has struck `times` times."""
        return self.times is not None and self.fired >= self.times

    def strikes(self, message: MessagePoint) -> bool:
        """Count a message, and return whether the fault strikes with it."""
        if self.is_over or not self._matches(message):
            return False
        self._seen += 1
        if self._seen < self.when.get("nth", 1):
            return False
        self.fired += 1
        return True

    def _matches(self, message: MessagePoint) -> bool:
        doer = self.when.get("of", self.peer)
        return (
            (self.at is None or self.at in message.phases)
            and (doer is None or doer in message.doers)
            and self.when.get("step", message.step) == message.step
            and self.when.get("stage", message.stage) == message.stage
            and self.when.get("microbatch", message.microbatch) == message.microbatch
        )

    def __str__(self) -> str:
        at = self.at.name if self.at else "any message"
        where = "".join(f", {name} {value}" for name, value in self.when.items())
        victim = " | ".join(" ".join(sorted(group)) for group in self.groups) or self.peer or "the answering peer"
        return f"{self.kind} {victim} at {at}{where}"


class FaultPlan:
    """Faults for a swarm under test, each with the moment at which it strikes.

    ``FaultPlan().kill("peer-2", at=Phase.BACKWARD, step=3).freeze("peer-1", for_s=30.0, at=Phase.APPLY)``

    Each method adds one fault and returns the plan. They have these arguments in common:

    - ``peer``: the name of the struck peer; None: the answering peer.
    - ``at``: a `Phase`. The caller and the answering peer are both in it, unless its comment names the peers.
    - ``of``, ``step``, ``stage``, ``microbatch``, ``nth``: see `Moment`.

    A test must assert `fired` or call `check`, because a test whose faults did not strike has shown nothing.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def kill(self, peer: str | None, *, at: Phase, **when: Unpack[Moment]) -> Self:
        """End a peer at once, as `kill -9` does."""
        return self._add("kill", peer, at, when)

    def freeze(self, peer: str | None, *, for_s: float, at: Phase, **when: Unpack[Moment]) -> Self:
        """Block all messages of a peer for a time, as SIGSTOP and SIGCONT do; no connection breaks."""
        return self._add("freeze", peer, at, when, for_s=for_s)

    def delay(
        self, peer: str | None, *, by_s: float, at: Phase | None = None, times: int | None = 1, **when: Unpack[Moment]
    ) -> Self:
        """Delay messages. Without `at`, and with `times=None`, all of the peer's messages are slow."""
        return self._add("delay", peer, at, when, for_s=by_s, times=times)

    def drop(self, peer: str | None, *, at: Phase, times: int | None = 1, **when: Unpack[Moment]) -> Self:
        """Lose a message silently: the caller waits for its answer until the deadline."""
        return self._add("drop", peer, at, when, times=times)

    def duplicate(
        self, peer: str | None, *, at: Phase, again_after_s: float = 0.0, times: int | None = 1, **when: Unpack[Moment]
    ) -> Self:
        """Deliver a request once more, `again_after_s` seconds after it was answered."""
        if at in ANSWER_PHASES:
            raise ConfigError(
                f"only requests can be duplicated, and {at.name} has an answer. Choose a request's phase."
            )
        return self._add("duplicate", peer, at, when, for_s=again_after_s, times=times)

    def corrupt(self, peer: str | None, *, at: Phase, times: int | None = 1, **when: Unpack[Moment]) -> Self:
        """Flip a bit of a message on its way. In memory only: an encrypted connection would break."""
        return self._add("corrupt", peer, at, when, times=times)

    def partition(self, *groups: Collection[str], for_s: float, at: Phase, **when: Unpack[Moment]) -> Self:
        """Block messages between groups of peers for a time; a peer in no group reaches all. In memory only."""
        if len(groups) < 2:
            raise ConfigError(f"a partition must separate at least two groups of peers, got {groups}. Name both sides.")
        sides = tuple(frozenset(map(PeerId, group)) for group in groups)
        return self._add("partition", None, at, when, for_s=for_s, groups=sides)

    def _add(self, kind: Kind, peer: str | None, at: Phase | None, when: Moment, **options: Any) -> Self:
        """Add a fault; `options` are further fields of `Fault`."""
        fault = Fault(kind=kind, peer=None if peer is None else PeerId(peer), at=at, when=when, **options)
        if when.get("nth", 1) < 1 or fault.for_s < 0.0 or (fault.times is not None and fault.times < 1):
            raise ConfigError(
                f"`nth` and `times` count from 1, and a duration must not be negative, got {dict(when)}, "
                f"times={fault.times}, {fault.for_s} s"
            )
        self.faults.append(fault)
        return self

    @property
    def fired(self) -> int:
        """The number of times that faults of this plan have struck."""
        return sum(fault.fired for fault in self.faults)

    @property
    def unfired(self) -> list[Fault]:
        """The faults that have not struck."""
        return [fault for fault in self.faults if not fault.fired]

    def check(self) -> None:
        """Raise `DidNotHappen` if any faults did not strike, and name them."""
        if self.unfired:
            raise DidNotHappen(f"These faults did not happen: {'; '.join(map(str, self.unfired))}.")

    def strike(self, message: MessagePoint, kinds: Collection[Kind]) -> Sequence[Fault]:
        """Count a message, and return the faults of these kinds that strike with it."""
        return [fault for fault in self.faults if fault.kind in kinds and fault.strikes(message)]
