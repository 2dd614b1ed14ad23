"""What a peer is doing, read off the message that it has before it."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from lightning_swarm import server, steps, tickets
from lightning_swarm.network import PeerId

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
    server.CANCEL: Phase.CANCEL,
    steps.REPLAY: Phase.REPLAY,
    steps.GRANT: Phase.GRANT,
    steps.DONE: Phase.DONE,
    steps.RECORD: Phase.RECORD,
    steps.FREEZE: Phase.CLOSE,
    steps.AVERAGE: Phase.AVERAGE,
    steps.PREPARE: Phase.PREPARE,
    steps.PROPOSE: Phase.DECIDE,
    steps.APPLY: Phase.APPLY,
    steps.JOIN: Phase.JOIN,
    server.FOLLOW: Phase.DONATE,
    server.PIECE: Phase.PIECE,
    server.NEXT: Phase.FOLLOW,
    steps.LISTEN: Phase.LISTEN,
    steps.DRAIN: Phase.LEAVE,
}
_MICROBATCH: Final = re.compile(r"g\d+\.s(\d+)\.a\d+\.t\d+\+(\d+)\.c\d+/(\d+)/(forward|backward)")
_OF_RESULTS: Final = {
    "forward": (Phase.FORWARD_DONE, Phase.SEND_OUTPUT),
    "backward": (Phase.BACKWARD_DONE, Phase.SEND_GRADIENT),
}
_OF_SHARES: Final = {"part": Phase.AVERAGE_SEND, "reduced": Phase.AVERAGE_REDUCE, "tied": Phase.AVERAGE_TIED}
_ROUND: Final = re.compile(r"g\d+\.s(\d+)\.a\d+\.r\d+/average/(\d+)/(?:left/|right/)?(part|reduced|tied)\d*")


@dataclass(frozen=True, kw_only=True)
class Passing:
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
) -> Passing:
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
        return Passing(phases=phases, caller=caller, peer=peer, doers=doers, **found)
    phase = _of_request(method, side)
    found = {} if phase is None else _found(_fields(request))
    return Passing(phases=() if phase is None else (phase,), caller=caller, peer=peer, doers=both, **found)


def _of_request(method: str, side: Side) -> Phase | None:
    if method in (server.FORWARD, server.BACKWARD):
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
