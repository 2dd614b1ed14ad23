"""How a server, or a trainer, joins a run that is under way, and leaves one."""

from __future__ import annotations

from typing import Annotated

import msgspec

from lightning_swarm.protocol.messages.run import RunView, SeatedMembers, Selection
from lightning_swarm.protocol.messages.state import Snapshot
from lightning_swarm.protocol.messages.step import Closing, Record
from lightning_swarm.protocol.messages.wire import Addresses, Count, Seconds, ShortText, WireMessage


class JoinRequest(WireMessage, frozen=True):
    """A server asks the coordinator to become a member."""

    protocol_version: int
    boot_id: int
    addresses: Addresses
    stage_index: Count | None  # the one that it has built, if it asks again


class JoinReply(WireMessage, frozen=True):
    """Every server can reach the joiner and knows it for a candidate."""

    view: RunView
    stage_index: Count  # which it shall take


class FollowRequest(WireMessage, frozen=True):
    """A candidate asks a member of its stage for the state, and to keep the records from then on."""

    stage_index: Count
    version: Count | None  # of the state, if another member is followed and this one helps; None: the newest
    hold_s: Seconds  # how long to wait for a place: few join by one member at once


class TensorLayout(WireMessage, frozen=True):
    """One tensor, without what is in it."""

    shape: Annotated[list[Count], msgspec.Meta(max_length=64)]
    dtype: ShortText


class FollowReply(WireMessage, frozen=True):
    """A copy is held for the candidate. The bytes of its tensors come in pieces."""

    snapshot: Snapshot
    layouts: list[TensorLayout]


class PieceRequest(WireMessage, frozen=True):
    """Bytes of a copy that is held, its tensors one after the other; less may come. None: no more is needed."""

    stage_index: Count
    version: Count
    start: Count
    stop: Count


class NextRequest(WireMessage, frozen=True):
    """A candidate that holds a stage at a version asks for the record that comes next."""

    generation: int
    stage_index: Count
    version: Count
    hold_s: Seconds  # how long to wait for it
    seated: bool = False  # it knows who is in the run at that version


class NextReply(WireMessage, frozen=True):
    """With the stage's mean gradient of that record as the only tensor. None: nothing is newer, as yet."""

    record: Record | None
    seats: SeatedMembers | None = None  # at the version that was asked from, for who does not know them


class ReadyRequest(WireMessage, frozen=True):
    """A candidate has caught up."""

    generation: int
    version: Count


class ListenRequest(WireMessage, frozen=True):
    """A round begins: a candidate that has caught up shall hold its result, too."""

    closing: Closing
    selection: Selection | None  # as in `Record`


class ListenReply(WireMessage, frozen=True):
    """A candidate holds the mean gradient of the round that is under way."""

    boot_id: int
    version_hash: int  # of weights and optimizer state before the step


class DrainRequest(WireMessage, frozen=True):
    """A server asks to be let go by one of the next records. One that is joining says that it does so no more."""

    generation: Count
    boot_id: int


class DrainReply(WireMessage, frozen=True):
    """It is noted, and goes without saying again."""

    alone: list[Count]  # its stages that nobody else would hold: until somebody does, no record lets it go


class EnlistRequest(WireMessage, frozen=True):
    """Who asks would train from the next record on. The answer is held until that is decided, for a while."""

    protocol_version: int
    generation: Count | None  # that it was in; None: in none, so what one of this name has under way is void


class EnlistReply(WireMessage, frozen=True):
    """Who asked is a trainer of the run by now; without a view not yet, and it asks again."""

    view: RunView | None = None
    epoch: Count = 0  # of the lead's loop


class RetireReply(WireMessage, frozen=True):
    """Whether a record has let the trainer go by now; else one will, and it may ask again."""

    retired: bool


class ClaimReply(WireMessage, frozen=True):
    """Of a program that would begin a run, too: whether it lets the one that asks begin it."""

    gives_way: bool
