"""Messages by which a step closes: ledgers, averages, the record, and the votes on it.

``FREEZE -> AVERAGE -> PROPOSE -> APPLY``, all from the coordinator. Before AVERAGE it may fence struck batches, and let
trainers replay microbatches that no sum holds. A new coordinator sends PREPARE to the voters before it proposes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Final, Literal

import msgspec

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import MAX_RECEIPTS, Origins, Receipt, Receipts, Run, to_ranges
from lightning_swarm.protocol.messages.reports import EventCounts
from lightning_swarm.protocol.messages.run import (
    Bans,
    BatchNumber,
    Convictions,
    InvitedBy,
    Keepers,
    Member,
    SomeSnapshots,
    SomeTrainers,
    StepChange,
    Term,
)
from lightning_swarm.protocol.messages.state import SnapshotOrder
from lightning_swarm.protocol.messages.wire import (
    Addresses,
    Challenge,
    Count,
    NotNegative,
    Positive,
    Seconds,
    ShortText,
    WireMessage,
)


class SettleRequest(WireMessage, frozen=True):
    """The coordinator asks every server to begin a step with a change, before the step's first lease."""

    generation: int
    step: int
    change: StepChange


class NamedReceipts(WireMessage, frozen=True):
    """The receipts that the sum of one stage on one server must hold."""

    stage_index: Count
    receipts: Receipts
    origins: Origins  # origins of their batches, as granted


Batches = Annotated[list[Count], msgspec.Meta(max_length=1 << 16)]
"""Batches, identified by their first positions in the step."""


class FreezeRequest(WireMessage, frozen=True):
    """The coordinator asks a server to add no more gradients to a step's sums, and to send their ledgers.

    `named` is set if a microbatch is missing or in two sums. Then the server discards a sum that holds any other
    receipt and begins it anew, and the named receipts may be added until the next request.
    """

    generation: int
    step: int
    round: Count = 0  # rises with each request of a step, so that a late request is refused
    named: list[NamedReceipts] | None = None  # one entry per stage of this server
    struck: Batches | None = None  # the step takes other batches instead; a sum that holds any of these begins anew
    # An unpredictable number under which weights are hashed, if servers are strangers or one joins; 0: a quick hash.
    challenge: Challenge = 0
    expected: Closing | None = None  # the expected closing, with which the server begins to average at once
    each_tensor: bool = False  # replicas differ, so also send a hash of each tensor


class FenceRequest(WireMessage, frozen=True):
    """The coordinator orders a server to drop struck batches, and to add no gradient of these batches any more."""

    generation: Count
    step: Count
    batches: Batches


class ReceiptsRequest(WireMessage, frozen=True):
    """The coordinator asks a server which of these microbatches are in its sums, and which may still be added."""

    generation: Count
    step: Count
    trainer: PeerId  # their batch's trainer
    receipts: list[Receipt]


class StageReceipts(WireMessage, frozen=True):
    """The state of one stage's sum, as bitmaps over the receipts of the request."""

    stage_index: Count
    held: bytes
    pending: bytes  # their backward is being computed


class ReceiptsReply(WireMessage, frozen=True):
    """A server reports to the coordinator which microbatches its sums hold, for each of its stages."""

    stages: list[StageReceipts]


DIGEST_BYTES: Final = 32
CLAIM_BYTES: Final = 4 * DIGEST_BYTES
"""Bytes of a claim: the digests of a microbatch's input, output, output's gradient and input's gradient."""

ORDER_BYTES: Final = 4
"""Bytes of a microbatch's place in the order in which a server added gradients."""

Claims = Annotated[bytes, msgspec.Meta(max_length=MAX_RECEIPTS * CLAIM_BYTES)]
AddingOrder = Annotated[bytes, msgspec.Meta(max_length=MAX_RECEIPTS * ORDER_BYTES)]
SumDigest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
PartDigests = Annotated[list[SumDigest], msgspec.Meta(max_length=1 << 12)]


def pack_order(receipts: Iterable[Receipt]) -> bytes:
    """Pack the order of distinct receipts as their indices in the sorted list, four bytes each."""
    ordered = list(receipts)
    indices = {receipt: index for index, receipt in enumerate(sorted(ordered))}
    return b"".join(indices[receipt].to_bytes(ORDER_BYTES, "little") for receipt in ordered)


def unpack_order(packed: bytes, receipts: Collection[Receipt]) -> list[Receipt]:
    """Return receipts in their packed order; raise `ProtocolError` unless it is a permutation of them."""
    known = sorted(receipts)
    indices = [
        int.from_bytes(packed[begin : begin + ORDER_BYTES], "little") for begin in range(0, len(packed), ORDER_BYTES)
    ]
    if len(packed) != ORDER_BYTES * len(known) or sorted(indices) != list(range(len(known))):
        raise ProtocolError(
            f"an order of {len(known)} microbatches must name each of their indices once, in {ORDER_BYTES} bytes "
            f"each; got {len(packed)} bytes"
        )
    return [known[index] for index in indices]


class StageLedger(WireMessage, frozen=True):
    """A server's ledger of one stage: the receipts in its sum, and measurements of its work."""

    stage_index: int
    held: Receipts
    origins: Origins  # origins of the batches in the sum, as received with their gradients
    touched: bytes  # bitmap over the stage's parameters: those that got a gradient from a counted microbatch
    version_hash: int | None  # hash of weights and optimizer state before the step; None: no server to compare with
    samples_per_s: Positive | None = None  # forward and backward; None: not measured yet
    queued: NotNegative = 0.0  # waiting jobs, on average
    busy_share: NotNegative | None = None  # share of the last steps' time spent computing, 0..1; None: not known yet
    lacks_memory: bool = False  # the latest microbatches did not fit into its memory
    tied: dict[str, int] | msgspec.UnsetType = msgspec.UNSET  # hashes of weights that other stages hold, too
    tensors: dict[str, int] | msgspec.UnsetType = msgspec.UNSET  # hashes of each tensor, if asked for
    # The server's commitments to its work, if servers are strangers. Claims are in the order of the receipts.
    claims: Claims | msgspec.UnsetType = msgspec.UNSET
    sum_digest: SumDigest | msgspec.UnsetType = msgspec.UNSET  # BLAKE3 of the sum
    order: AddingOrder | msgspec.UnsetType = msgspec.UNSET  # order of adding the microbatches


class FreezeReply(WireMessage, frozen=True):
    """A server sends the coordinator a ledger for each of its stages."""

    boot_id: int
    ledgers: list[StageLedger]
    noted: EventCounts  # the server's events so far
    bans: Bans = msgspec.UNSET  # bans that no record carries yet
    snapshots: SomeSnapshots | msgspec.UnsetType = msgspec.UNSET  # snapshots of its stages that no record lists yet
    arithmetic: ShortText = ""  # servers with equal values of this compute equal bits


class Replay(WireMessage, frozen=True):
    """A microbatch whose gradient is missing in some stages, and the servers that must add it there."""

    receipt: Receipt
    holders: dict[Count, PeerId]  # stage index -> server


class ReplayRequest(WireMessage, frozen=True):
    """The coordinator asks a trainer to send microbatches again, from its copies, because a sum was lost."""

    generation: Count
    step: Count
    work: list[Replay]
    avoid: list[PeerId]  # servers that are gone


class ReplayReply(WireMessage, frozen=True):
    """A trainer reports to the coordinator which microbatches it could not replay; the rest was added."""

    lost: list[Receipt]  # microbatches without a copy at the trainer (any more), or with unreachable holders
    unreached: list[PeerId]  # holders that did not add their microbatches, as far as the trainer knows


class AvoidRequest(WireMessage, frozen=True):
    """The coordinator notifies a trainer of servers that take no part in a step any more."""

    generation: Count
    step: Count
    peers: Annotated[list[PeerId], msgspec.Meta(max_length=4096)]  # servers to avoid from now on
    lost: Annotated[list[PeerId], msgspec.Meta(max_length=4096)]  # all servers that left this step so far
    reason: ShortText


class Closing(WireMessage, frozen=True):
    """The coordinator's announcement of the batches and members that count in a step, equal for all servers.

    It comes with the freeze, and again with the request to average, which lists members that did not answer as absent.
    It does not list the microbatches of each server, which only that server receives. The round identifies the sums,
    because no two rounds of a step share a number, even under different coordinators.
    """

    generation: int
    step: int
    round: Count  # round of the preceding freeze
    batches: list[Run]  # places of the counted batches
    num_samples: Count
    total_weight: Positive
    absent: list[PeerId]  # members of the step's rosters that take no part in it any more
    gradient_scale: Positive = 1.0  # the sums are scaled by this factor, and the mean is not

    def counts(self, first: int) -> bool:
        """Return whether the batch at this place counts."""
        return any(first in places for places in to_ranges(self.batches))


class AverageRequest(WireMessage, frozen=True):
    """The coordinator asks a server for the mean of a round's frozen sums, if they hold exactly the named receipts.

    The server may have begun to average them when it froze them.
    """

    closing: Closing
    named: list[NamedReceipts]  # one entry per stage of this server
    late: bool = False  # the next step already takes batches
    # Longest wait for another server's part, after which that server is reported; at most a call's timeout.
    patience_s: Seconds = sys.float_info.max


class PartNorm(WireMessage, frozen=True):
    """The squared norm of the part of a stage's mean gradient that a server has reduced."""

    stage_index: int
    squared_norm: float


class AverageReply(WireMessage, frozen=True):
    """A server reports to the coordinator that it holds the mean gradients of all its stages, or why it does not."""

    parts: list[PartNorm]
    failure: str = ""  # why the round failed at this server
    unreached: list[PeerId] = msgspec.field(default_factory=list)  # servers whose death would explain the failure
    refusing: list[PeerId] = msgspec.field(default_factory=list)  # servers that answered without usable data


class Candidate(WireMessage, frozen=True):
    """A server that wants to join a stage's roster, and its addresses."""

    member: Member
    stage_index: Count
    addresses: Addresses


class Departure(WireMessage, frozen=True):
    """A server that leaves a stage's roster in order to join the stage `stage_index`."""

    member: Member
    stage_index: Count


MAX_DIFFERENCE: Final = 1000  # characters of the reason why a server's weights differ


class Vacancy(WireMessage, frozen=True):
    """A server that leaves a stage's roster, for any reason."""

    member: Member
    stage_index: Count
    # The difference of its weights from the stage's, with possible causes; unset: it leaves for another reason.
    reason: Annotated[str, msgspec.Meta(max_length=MAX_DIFFERENCE)] | msgspec.UnsetType = msgspec.UNSET


class Record(WireMessage, frozen=True):
    """The decided outcome of a step, which the coordinator sends to every peer: ``v_{k+1} = f(v_k, record)``.

    It lists only changes of the run's members, because every peer receives it.
    """

    closing: Closing
    touched: list[bytes]  # one bitmap per stage, as in `StageLedger`
    outcome: Literal["apply", "skip"]  # skip: the mean gradient is not finite
    squared_norm: float  # squared norm of the mean gradient over all stages, each part once
    clip_factor: Annotated[float, msgspec.Meta(ge=0, le=1)]
    hyperparameters: list[dict[str, Any]]  # one dict for each parameter group
    change: StepChange  # change with which the step began
    left: list[Vacancy]
    newcomers: list[Candidate]  # new members, at the end of the rosters
    next_voters: list[Member] | None  # None: the same as before
    departures: list[Departure]  # the vacancies of servers that move to another stage
    snapshot: SnapshotOrder | None  # order for a snapshot of the version after this record
    enlisted: SomeTrainers  # new trainers, at the end of the list
    retired: SomeTrainers  # trainers that leave
    position: BatchNumber | None = None  # the first batch of the next step; None: trainers share no order
    # Invitation of each newcomer and new trainer; unset: there are none, or the run needs no invitations.
    invited: dict[PeerId, InvitedBy] | msgspec.UnsetType = msgspec.UNSET
    bans: Bans = msgspec.UNSET  # new bans
    # Snapshots ordered by earlier records, with the digests that most servers of their stages report; unset: none.
    snapshots: SomeSnapshots | msgspec.UnsetType = msgspec.UNSET
    keepers: Keepers = msgspec.UNSET  # newcomers that are keepers; unset: none
    convicted: Convictions = msgspec.UNSET  # peers convicted in this step; unset: none
    # A convicted peer's work was counted in earlier steps, so the lead rolls the run back to a version before them.
    goes_back: bool | msgspec.UnsetType = msgspec.UNSET
    # Stages that step their optimizer in arithmetic that all machines round alike, because their servers' machines
    # round differently.
    portable: Annotated[list[Count], msgspec.Meta(max_length=1 << 12)] | msgspec.UnsetType = msgspec.UNSET

    @property
    def step(self) -> int:
        """The step that the record decides. The weights after it have version ``step + 1``."""
        return self.closing.step


class Accepted(WireMessage, frozen=True):
    """The record that a voter accepted last for a step, and the term of its proposal."""

    term: Term
    record: Record


class Prepare(WireMessage, frozen=True):
    """A server that is about to coordinate asks a voter to reject lower terms, and for its accepted record."""

    term: Term
    boot_id: int  # the voter's boot id, because a restarted voter has forgotten its votes
    generation: Count
    step: Count
    fence: bool = False  # also bar lower terms: from this step on, none of their proposals will be completed


class Promise(WireMessage, frozen=True):
    """A voter answers `Prepare`."""

    promised: bool
    term: Term  # the highest that the voter knows
    accepted: Accepted | None = None
    fence: Term = (0, "", 0)  # lower terms are barred: their records that this voter accepted will not be completed
    behind: bool = False  # the voter has had a proposal for a later step, so this step was decided


class Proposal(WireMessage, frozen=True):
    """The coordinator asks a voter to accept a record under its term."""

    term: Term
    boot_id: int  # the voter's boot id, as in `Prepare`
    record: Record


class Vote(WireMessage, frozen=True):
    """A voter answers `Proposal`."""

    accepted: bool
    term: Term  # the highest that the voter knows
