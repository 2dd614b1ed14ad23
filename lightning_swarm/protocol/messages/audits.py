"""Messages by which servers' work is checked: sketches of sums, microbatches that others compute again, findings.

``FREEZE (claims) -> SKETCH -> orders to trainers -> AUDIT calls on other servers -> FINDINGS -> a verdict``. What a
server claims is settled before anybody knows what is looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Final

import msgspec

from lightning_swarm.core.errors import ProtocolError
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
from lightning_swarm.protocol.messages.wire import (
    Challenge,
    Count,
    NotNegative,
    Positive,
    Seconds,
    ShortText,
    WireMessage,
)

DIGEST_BYTES: Final = 32
CLAIM_BYTES: Final = 4 * DIGEST_BYTES
"""Digests of a microbatch's input, output, the output's gradient and the input's gradient, in this order."""

ORDER_BYTES: Final = 4
"""Of a microbatch's place in the order of adding."""

SKETCH_LENGTH: Final = 64
_MAX_WORK: Final = 1 << 16

Sketch = Annotated[list[float], msgspec.Meta(min_length=SKETCH_LENGTH, max_length=SKETCH_LENGTH)]
Claims = Annotated[bytes, msgspec.Meta(max_length=MAX_RECEIPTS * CLAIM_BYTES)]
AddingOrder = Annotated[bytes, msgspec.Meta(max_length=MAX_RECEIPTS * ORDER_BYTES)]
SumDigest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


def pack_order(receipts: Iterable[Receipt]) -> bytes:
    """Pack the order of distinct receipts as their places in the sorted list, four bytes each."""
    ordered = list(receipts)
    places = {receipt: place for place, receipt in enumerate(sorted(ordered))}
    return b"".join(places[receipt].to_bytes(ORDER_BYTES, "little") for receipt in ordered)


def unpack_order(packed: bytes, receipts: Collection[Receipt]) -> list[Receipt]:
    """Return receipts in their packed order; `ProtocolError` refuses anything but an order of exactly these."""
    known = sorted(receipts)
    places = [
        int.from_bytes(packed[begin : begin + ORDER_BYTES], "little") for begin in range(0, len(packed), ORDER_BYTES)
    ]
    if len(packed) != ORDER_BYTES * len(known) or sorted(places) != list(range(len(known))):
        raise ProtocolError(
            f"an order of {len(known)} microbatches names each of their places once in {ORDER_BYTES} "
            f"bytes, got {len(packed)} bytes"
        )
    return [known[place] for place in places]


class SketchRequest(WireMessage, frozen=True):
    """The coordinator asks a server for sketches of its frozen sums, by a seed drawn once they were settled."""

    generation: Count
    step: Count
    round: Count  # of the freeze
    seed: Challenge


class StageSketch(WireMessage, frozen=True):
    """A sketch of one stage's sum."""

    stage_index: Count
    values: Sketch  # see `model.sketch.project`


class SketchReply(WireMessage, frozen=True):
    """A server answers with a sketch of each of its stages' sums."""

    stages: list[StageSketch]


class AuditWork(WireMessage, frozen=True):
    """A microbatch that one server counted in its sum of a stage, and that another one shall compute again."""

    receipt: Receipt
    stage_index: Count
    audited: PeerId
    auditor: PeerId
    place: Count  # in the order in which the audited server added


class AuditOrder(WireMessage, frozen=True):
    """The coordinator has a trainer send microbatches to auditors, from its copies."""

    generation: Count
    step: Count
    order: Challenge  # names what the auditors find
    work: Annotated[list[AuditWork], msgspec.Meta(max_length=_MAX_WORK)]
    compare: bool = False  # the auditor computes on another kind of machine: it compares numbers, not digests


class AuditOrderReply(WireMessage, frozen=True):
    """A trainer tells the coordinator which microbatches no auditor computed."""

    undone: dict[Count, Annotated[str, msgspec.Meta(max_length=500)]]  # reasons, by their places in the order
    lost: list[Receipt]  # those of which the trainer has no copy
    # Auditors that answered pings, and not an audit in time.
    silent: Annotated[list[PeerId], msgspec.Meta(max_length=4096)] = msgspec.field(default_factory=list)


class AuditRequest(WireMessage, frozen=True):
    """A trainer asks a server to compute once more what another one did for a microbatch in one stage."""

    key: CallKey
    stage_index: Count
    mode: ComputeMode
    weight: Positive  # of the batch
    audited: PeerId
    order: Challenge
    place: Count  # the auditor adds in the order of these, so that sums are equal to the bit
    compare: bool
    # Tree of a pair, whose tensors come with the message. First: (inputs or None, extras) as in `ForwardRequest`.
    # Second: the gradient or None of each output leaf. What is None is at the audited server.
    structure: Any
    patience_s: Seconds = (
        sys.float_info.max
    )  # for which the auditor may wait for the audited server; at most a call's timeout


class KeptWorkRequest(WireMessage, frozen=True):
    """An auditor asks a server for what of a microbatch's work the trainer does not know."""

    generation: Count
    step: Count
    stage_index: Count
    receipt: Receipt
    input: bool
    gradients: bool  # of the output
    results: bool  # the output and the input's gradient, to be compared


class KeptWorkReply(WireMessage, frozen=True):
    """A server sends an auditor what it asked for."""

    # Tree of four: the input, the output's gradient, the output and the input's gradient; None where not asked for.
    structure: Any
    wants_grad: Annotated[list[bool], msgspec.Meta(max_length=1 << 16)]  # for each tensor of the input
    requires_grad: Annotated[list[bool], msgspec.Meta(max_length=1 << 16)]  # for each of the output


class FindingsRequest(WireMessage, frozen=True):
    """The coordinator asks an auditor what it found under an order."""

    generation: Count
    step: Count
    order: Challenge
    seed: Challenge  # of the sketches


class AuditFinding(WireMessage, frozen=True):
    """An auditor tells what it computed of one server's work in one stage."""

    audited: PeerId
    stage_index: Count
    receipts: Receipts  # that it computed
    origins: Origins  # of their batches, as they came: weights scale what is added to the sum
    claims: Claims  # of these in order, as its own computation gives them
    refused: Receipts  # the audited server did not give what it had kept of these
    unheard: Receipts  # it gave no answer of these
    sum_digest: SumDigest  # of the sum of what it computed
    values: Sketch  # likewise
    magnitude: NotNegative  # the norms of what it added up, added up: what rounding is measured by
    precision: ShortText  # dtype that it computed in
    touched: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]  # bitmap over the parameters that have a gradient
    # Where numbers are compared: the largest relative distance of an output, and of an input's gradient.
    distance: NotNegative | msgspec.UnsetType = msgspec.UNSET


class FindingsReply(WireMessage, frozen=True):
    """An auditor tells all that it found under an order."""

    findings: Annotated[list[AuditFinding], msgspec.Meta(max_length=4096)]


class ResultsRequest(WireMessage, frozen=True):
    """The coordinator asks a trainer what servers gave it in a step: nobody else claims to have got that."""

    generation: Count
    step: Count


class GivenResults(WireMessage, frozen=True):
    """What one server gave a trainer at one end of the pipeline: outputs, or gradients of inputs."""

    server: PeerId
    direction: Direction
    receipts: Receipts
    digests: Annotated[bytes, msgspec.Meta(max_length=MAX_RECEIPTS * DIGEST_BYTES)]  # of these, in order


class ReplacedServer(WireMessage, frozen=True):
    """A server that failed in some microbatches, so that another one of its stage took its place."""

    server: PeerId
    stage_index: Count
    receipts: Receipts


class ResultsReply(WireMessage, frozen=True):
    """A trainer tells all that it was given in a step, and who failed there."""

    results: Annotated[list[GivenResults], msgspec.Meta(max_length=1 << 13)]
    replaced: Annotated[list[ReplacedServer], msgspec.Meta(max_length=1 << 13)]


class AvoidRequest(WireMessage, frozen=True):
    """The coordinator tells a trainer which servers take no part in a step any more."""

    generation: Count
    step: Count
    peers: Annotated[list[PeerId], msgspec.Meta(max_length=4096)]
    lost: Annotated[list[PeerId], msgspec.Meta(max_length=4096)]  # those that the step goes on without altogether
    reason: ShortText
