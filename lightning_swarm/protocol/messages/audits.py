"""Messages by which servers' work is audited: sketches of sums, orders to recompute microbatches, and findings.

``FREEZE (claims) -> SKETCH -> orders to trainers -> AUDIT calls on other servers -> FINDINGS -> a verdict``. Servers
commit to their claims before the work to audit is drawn.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import msgspec

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import (
    MAX_RECEIPTS,
    CallKey,
    ComputeMode,
    Direction,
    Origins,
    Receipt,
    Receipts,
)
from lightning_swarm.protocol.messages.parts import Sketch
from lightning_swarm.protocol.messages.step import DIGEST_BYTES, Claims, SumDigest
from lightning_swarm.protocol.messages.wire import (
    Challenge,
    Count,
    NotNegative,
    Positive,
    Seconds,
    ShortText,
    WireMessage,
)

_MAX_WORK: Final = 1 << 16


class SketchRequest(WireMessage, frozen=True):
    """The coordinator asks a server for sketches of its frozen sums, under a seed drawn after they were frozen."""

    generation: Count
    step: Count
    round: Count  # round of the freeze
    seed: Challenge


class StageSketch(WireMessage, frozen=True):
    """A sketch of one stage's sum."""

    stage_index: Count
    values: Sketch  # see `server.audit.sketch.project`


class SketchReply(WireMessage, frozen=True):
    """A server answers with a sketch of each of its stages' sums."""

    stages: list[StageSketch]


class AuditWork(WireMessage, frozen=True):
    """A microbatch in a server's sum of a stage, which another server is to recompute."""

    receipt: Receipt
    stage_index: Count
    audited: PeerId
    auditor: PeerId
    place: Count  # position in the order in which the audited server added gradients


class AuditOrder(WireMessage, frozen=True):
    """The coordinator orders a trainer to send microbatches to auditors, from its copies."""

    generation: Count
    step: Count
    order: Challenge  # identifies the auditors' findings
    work: Annotated[list[AuditWork], msgspec.Meta(max_length=_MAX_WORK)]
    compare: bool = False  # auditors are machines of another kind, so they compare numbers instead of digests


class AuditOrderReply(WireMessage, frozen=True):
    """A trainer reports to the coordinator which microbatches no auditor computed."""

    undone: dict[Count, Annotated[str, msgspec.Meta(max_length=500)]]  # index in the order's work -> reason
    lost: list[Receipt]  # microbatches of which the trainer has no copy
    # Auditors that answered pings, but not an audit in time.
    silent: Annotated[list[PeerId], msgspec.Meta(max_length=4096)] = msgspec.field(default_factory=list)


class AuditRequest(WireMessage, frozen=True):
    """A trainer asks a server to recompute another server's work on a microbatch in one stage."""

    key: CallKey
    stage_index: Count
    mode: ComputeMode
    weight: Positive  # the batch's weight
    audited: PeerId
    order: Challenge
    place: Count  # the auditor adds gradients in the order of places, so that sums are equal to the bit
    compare: bool  # as in `AuditOrder`
    # Tree of a pair, whose tensors come with the message. First: (inputs or None, extras) as in `ForwardRequest`.
    # Second: the gradient or None of each output leaf. The audited server has the parts that are None.
    structure: Any
    # Longest wait of the auditor for the audited server; at most a call's timeout.
    patience_s: Seconds = sys.float_info.max


class KeptWorkRequest(WireMessage, frozen=True):
    """An auditor asks a server for the tensors of a microbatch that the trainer does not have."""

    generation: Count
    step: Count
    stage_index: Count
    receipt: Receipt
    input: bool
    gradients: bool  # gradients of the output
    results: bool  # the output and the input's gradient, for comparison


class KeptWorkReply(WireMessage, frozen=True):
    """A server sends an auditor the requested tensors."""

    # Tree of four: the input, the output's gradient, the output and the input's gradient; None where not asked for.
    structure: Any
    wants_grad: Annotated[list[bool], msgspec.Meta(max_length=1 << 16)]  # one flag per tensor of the input
    requires_grad: Annotated[list[bool], msgspec.Meta(max_length=1 << 16)]  # one flag per tensor of the output


class FindingsRequest(WireMessage, frozen=True):
    """The coordinator asks an auditor for its findings under an order."""

    generation: Count
    step: Count
    order: Challenge
    seed: Challenge  # seed of the sketches


class AuditFinding(WireMessage, frozen=True):
    """An auditor's results of recomputing one server's work in one stage."""

    audited: PeerId
    stage_index: Count
    receipts: Receipts  # the recomputed microbatches
    origins: Origins  # origins of their batches, as received; the weights scale the gradients in the sum
    # In the order of the receipts. Digests of the auditor's own results or, if numbers are compared, of the results
    # that the audited server sent.
    claims: Claims
    refused: Receipts  # microbatches whose kept tensors the audited server did not send
    unheard: Receipts  # microbatches about which the audited server did not answer
    sum_digest: SumDigest  # digest of the recomputed sum
    values: Sketch  # sketch of the recomputed sum
    magnitude: NotNegative  # sum of the norms of the added gradients, to which rounding errors are relative
    precision: ShortText  # dtype of the computation
    touched: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]  # bitmap over the parameters that have a gradient
    # If numbers are compared: the largest relative distance between the auditor's and the audited server's results.
    distance: NotNegative | msgspec.UnsetType = msgspec.UNSET


class FindingsReply(WireMessage, frozen=True):
    """An auditor reports all its findings under an order."""

    findings: Annotated[list[AuditFinding], msgspec.Meta(max_length=4096)]


class GivenResults(WireMessage, frozen=True):
    """Results that one server sent a trainer at one end of the pipeline: outputs, or gradients of inputs."""

    server: PeerId
    direction: Direction
    receipts: Receipts
    digests: Annotated[bytes, msgspec.Meta(max_length=MAX_RECEIPTS * DIGEST_BYTES)]  # one digest per receipt, in order


class ReplacedServer(WireMessage, frozen=True):
    """A server that failed in some microbatches, so that another server of its stage took its place."""

    server: PeerId
    stage_index: Count
    receipts: Receipts


class ResultsReply(WireMessage, frozen=True):
    """A trainer reports all results that it received in a step, and the servers that failed."""

    results: Annotated[list[GivenResults], msgspec.Meta(max_length=1 << 13)]
    replaced: Annotated[list[ReplacedServer], msgspec.Meta(max_length=1 << 13)]
