"""Messages by which servers and trainers join a run that has begun, and leave one.

A server that joins, a candidate, sends JOIN to the coordinator, copies its stage from a member by FOLLOW and PIECE,
requests later records by NEXT, and once it has caught up, sends READY. The coordinator then has it take part in a round
by LISTEN, and that round's record admits it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from lightning_swarm.protocol.messages.run import NO_CHANGE, RunView, SeatedMembers, StepChange
from lightning_swarm.protocol.messages.state import Snapshot
from lightning_swarm.protocol.messages.step import Closing, PartDigests, Record
from lightning_swarm.protocol.messages.wire import Addresses, Challenge, Count, Seconds, ShortText, WireMessage


class JoinRequest(WireMessage, frozen=True):
    """A server asks the coordinator to admit it."""

    protocol_version: int
    boot_id: int
    addresses: Addresses
    stage_index: Count | None  # the stage that it has built, if it asks again; it may get another one
    arithmetic: ShortText = ""  # see `FreezeReply`


class JoinReply(WireMessage, frozen=True):
    """The coordinator assigns a server its stage, when every other server can reach it and knows it as a candidate."""

    view: RunView
    stage_index: Count
    # The server's machine is of another kind than the stage's servers, so the stage's optimizer steps use portable
    # arithmetic from now on.
    is_unlike: bool = False


class FollowRequest(WireMessage, frozen=True):
    """A candidate asks a member of its stage for the stage's state, and to keep all later records for it."""

    stage_index: Count
    version: Count | None  # version to copy, set for members that only help the followed member; None: the newest
    hold_s: Seconds  # how long to wait for a free slot: a member serves few candidates at once


class TensorLayout(WireMessage, frozen=True):
    """Shape and dtype of one tensor."""

    shape: Annotated[list[Count], msgspec.Meta(max_length=64)]
    dtype: ShortText


class FollowReply(WireMessage, frozen=True):
    """A member offers a candidate a copy of the stage, whose bytes can be fetched in pieces."""

    snapshot: Snapshot
    layouts: list[TensorLayout]


class PieceRequest(WireMessage, frozen=True):
    """A candidate asks a member for bytes of the copy; an empty range means that it needs no more."""

    stage_index: Count
    version: Count
    start: Count  # bytes, as if the copy's tensors lay one after the other; fewer may come
    stop: Count


class NextRequest(WireMessage, frozen=True):
    """A candidate asks the member that it follows for the record after the version that it holds."""

    generation: int
    stage_index: Count
    version: Count
    hold_s: Seconds  # how long to wait for the record
    seated: bool = False  # the candidate knows the members of the run at that version
    written: Count = 0  # number of the written weights that it holds at that version; 0: none


class NextReply(WireMessage, frozen=True):
    """A member sends a candidate the next record with the stage's mean gradient, or the change of the open step.

    The weights that were written for that step come after the gradient, or alone.
    """

    record: Record | None  # None: there is no newer one yet
    seats: SeatedMembers | None = None  # the members at the requested version, if the candidate does not know them
    change: StepChange = NO_CHANGE  # without a record: the change with which the open step began
    names: list[str] = msgspec.field(default_factory=list)  # names of the written weights


class ReadyRequest(WireMessage, frozen=True):
    """A candidate reports to the coordinator that it has caught up with the run."""

    generation: int
    version: Count


class ReadyReply(WireMessage, frozen=True):
    """The coordinator expects the candidate, and will admit other candidates of its stage before it."""

    num_before: Count


class ListenRequest(WireMessage, frozen=True):
    """The coordinator asks a candidate that has caught up to take part in a round, so that it holds the result."""

    closing: Closing
    change: StepChange  # see `Record`
    challenge: Challenge  # see `FreezeRequest`


class ListenReply(WireMessage, frozen=True):
    """A candidate reports that it holds the mean gradient of the round, and proves that it holds the stage."""

    boot_id: int
    version_hash: int  # hash of weights and optimizer state before the step, under the challenge
    parts: PartDigests | msgspec.UnsetType = msgspec.UNSET  # digests of its mean's parts, if servers are strangers


class DrainRequest(WireMessage, frozen=True):
    """A server asks the coordinator to let it leave by one of the next records, or withdraws its request to join."""

    generation: Count
    boot_id: int


class DrainReply(WireMessage, frozen=True):
    """The coordinator confirms that it will let a server leave, so that the server need not ask again."""

    alone: list[Count]  # stages that only this server holds: no record lets it leave before another server holds them


class EnlistRequest(WireMessage, frozen=True):
    """A peer asks the coordinator to let it train from the next record on. The answer waits for that record."""

    protocol_version: int
    # Generation in which it trains already; None: it is new, so batches under its peer id are void.
    generation: Count | None


class EnlistReply(WireMessage, frozen=True):
    """The coordinator confirms that a peer is a trainer of the run now; without a view, the peer has to ask again."""

    view: RunView | None = None
    epoch: Count = 0  # epoch of the lead's loop


class RetireReply(WireMessage, frozen=True):
    """The coordinator answers whether a record has let a trainer leave; if not, a later record will."""

    retired: bool


class ClaimReply(WireMessage, frozen=True):
    """Two programs want to begin the same run: one answers whether it lets the other begin it."""

    gives_way: bool
