"""How a step closes: ledgers, averages, the record, and the votes on it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt, Receipts, Run, to_ranges
from lightning_swarm.protocol.messages.events import EventCounts
from lightning_swarm.protocol.messages.run import BatchNumber, Member, Selection, SomeTrainers, Term
from lightning_swarm.protocol.messages.state import SnapshotOrder
from lightning_swarm.protocol.messages.wire import Addresses, Count, NotNegative, Positive, WireMessage


class SettleRequest(WireMessage, frozen=True):
    """Open(k), where the selection changed: every server settles it before the first grant."""

    generation: int
    step: int
    attempt: int
    selection: Selection


class NamedReceipts(WireMessage, frozen=True):
    """What the sum of one stage on one server shall hold."""

    stage_index: Count
    receipts: Receipts


Batches = Annotated[list[Count], msgspec.Meta(max_length=1 << 16)]
"""By their first positions."""


class FreezeRequest(WireMessage, frozen=True):
    """Close(k), first part: add nothing more, and say what was added.

    Where something is missing, or in two sums: with `named`. Then a sum that holds others begins anew, and what is
    named may be added until the next request.
    """

    generation: int
    step: int
    attempt: int
    round: Count = 0  # rises with each request of a step: what comes late is refused
    named: list[NamedReceipts] | None = None  # for each stage of this server
    struck: Batches | None = None  # the step takes others in their place: sums that hold any of them begin anew
    joining: bool = False  # somebody may enter with the step's record: say hashes of stages with one replica, too


class FenceRequest(WireMessage, frozen=True):
    """Batches were struck: give up what is under way of them, and add nothing of them any more."""

    generation: Count
    step: Count
    attempt: Count
    batches: Batches


class ReceiptsRequest(WireMessage, frozen=True):
    """Which of these microbatches are in your sums, and which may still come there?"""

    generation: Count
    step: Count
    attempt: Count
    receipts: list[Receipt]


class StageReceipts(WireMessage, frozen=True):
    """For one stage: bitmaps over the receipts that were asked for."""

    stage_index: Count
    held: bytes
    pending: bytes  # their backward is under way


class ReceiptsReply(WireMessage, frozen=True):
    """One entry for each stage that the server holds."""

    stages: list[StageReceipts]


class StageLedger(WireMessage, frozen=True):
    """A server's ledger of one stage."""

    stage_index: int
    held: Receipts
    touched: bytes  # bitmap over the stage's parameters: some counted microbatch gave it a gradient
    version_hash: int | None  # of weights and optimizer state before the step; None: nobody else has them
    samples_per_s: Positive | None = None  # forward and backward, as measured; None: not yet
    queued: NotNegative = 0.0  # jobs that wait here, on the average
    busy_share: NotNegative | None = None  # of the last steps' time, the part in which it computed; None: not known yet
    tied: dict[str, int] | msgspec.UnsetType = msgspec.UNSET  # hashes of the weights that other stages hold, too


class FreezeReply(WireMessage, frozen=True):
    """One ledger for each stage that the server holds."""

    boot_id: int
    ledgers: list[StageLedger]
    noted: EventCounts  # by the server, so far


class Replay(WireMessage, frozen=True):
    """A microbatch whose gradient is missing in some stages, and who shall add it there."""

    receipt: Receipt
    holders: dict[Count, PeerId]  # by stage index


class ReplayRequest(WireMessage, frozen=True):
    """Close(k), where a sum was lost: its trainer sends microbatches again, from the copies that it kept."""

    generation: Count
    step: Count
    attempt: Count
    work: list[Replay]
    avoid: list[PeerId]  # they are gone


class ReplayReply(WireMessage, frozen=True):
    """What was neither lost nor has a holder among the unreached was added by its holders."""

    lost: list[Receipt]  # nothing is kept of them here (any more), or no way leads to their holders
    unreached: list[PeerId]  # holders that did not do it, as seen from here


class Closing(WireMessage, frozen=True):
    """Close(k): what counts, for all alike. Who holds which microbatch is between each server and who coordinates.

    The round says which sums are meant: no two closings of a step share one, whoever coordinates.
    """

    generation: int
    step: int
    attempt: int
    round: Count  # of the freeze that it follows
    batches: list[Run]  # their places
    num_samples: Count
    total_weight: Positive
    absent: list[PeerId]  # of the step's rosters, who takes no part in it any more
    touched: list[bytes]  # for each stage, over its parameters: some counted microbatch gave it a gradient
    gradient_scale: Positive = 1.0  # the sums are gradients times this; the mean is not

    def counts(self, first: int) -> bool:
        """Whether the batch at this place counts."""
        return any(first in places for places in to_ranges(self.batches))


class AverageRequest(WireMessage, frozen=True):
    """Average the frozen sums of a round, if they hold what is named here, and nothing else."""

    closing: Closing
    named: list[NamedReceipts]  # for each stage of this server
    late: bool = False  # the next step takes batches meanwhile


class PartNorm(WireMessage, frozen=True):
    """The squared norm of the part of a stage's mean gradient that this server reduced."""

    stage_index: int
    squared_norm: float


class AverageReply(WireMessage, frozen=True):
    """The server holds the mean gradients of all its stages; or says why not."""

    parts: list[PartNorm]
    failure: str = ""  # the round failed here
    unreached: list[PeerId] = msgspec.field(default_factory=list)  # as it does when one of these is gone


class Candidate(WireMessage, frozen=True):
    """A server that wants to join a stage's roster, and where it is reached."""

    member: Member
    stage_index: Count
    addresses: Addresses


class Departure(WireMessage, frozen=True):
    """A server that the next rosters name no more: it is to join another stage."""

    member: Member
    stage_index: Count


class Vacancy(WireMessage, frozen=True):
    """A server that the next roster of a stage names no more, for whatever reason."""

    member: Member
    stage_index: Count


class Record(WireMessage, frozen=True):
    """The decided outcome of a step; ``v_{k+1} = f(v_k, record)``.

    It says what changes of who is in the run, not who is: it goes to everyone.
    """

    closing: Closing
    outcome: Literal["apply", "skip"]
    squared_norm: float  # of the mean gradient, over all stages, each part once
    clip_factor: Annotated[float, msgspec.Meta(ge=0, le=1)]
    hyperparameters: list[dict[str, Any]]
    selection: Selection | None  # of this step, if it is not that of the step before
    left: list[Vacancy]
    newcomers: list[Candidate]  # the rosters' new members, behind the others
    next_voters: list[Member] | None  # None: as they are
    departures: list[Departure]  # those of this roster that move
    snapshot: SnapshotOrder | None  # of the version after it
    enlisted: SomeTrainers  # new trainers, behind the others
    retired: SomeTrainers  # who trains no more
    position: BatchNumber | None = None  # the first batch of the next step; None: trainers bring what they like

    @property
    def step(self) -> int:
        """The step that it decides; the weights after it have version ``step + 1``."""
        return self.closing.step


class Accepted(WireMessage, frozen=True):
    """What a voter accepted last for a slot."""

    term: Term
    record: Record


class Prepare(WireMessage, frozen=True):
    """Ask a voter to accept nothing of a lower term any more, and what it has accepted for a step."""

    term: Term
    boot_id: int  # of the voter that is meant
    generation: Count
    step: Count
    fence: bool = False  # also note that nothing of a lower term will be finished, from this step on


class Promise(WireMessage, frozen=True):
    """A voter's answer; `term` is the highest it knows."""

    promised: bool
    term: Term
    accepted: Accepted | None = None
    fence: Term = (0, "", 0)  # what it accepted of lower terms is dead
    behind: bool = False  # a later step was proposed for: this one was decided


class Proposal(WireMessage, frozen=True):
    """Ask a voter to accept a record under a term."""

    term: Term
    boot_id: int  # of the voter that is meant
    record: Record


class Vote(WireMessage, frozen=True):
    """A voter's answer; `term` is the highest it knows."""

    accepted: bool
    term: Term
