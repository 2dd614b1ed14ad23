"""Evaluates audits: whether a server's claims are true, and whether an auditor's accusation is false. Pure.

An auditor computes a server's work again. Machines of one kind must get the same bits, so digests are compared. Between
machines of different kinds, numbers are compared within a tolerance. If the auditor's findings contradict the server's
claims, that is an accusation, and the coordinator's own server computes the work a third time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from msgspec import UnsetType

from lightning_swarm.coordinator.audit.policy import (
    TOUCHED,
    StageProjection,
    Tolerance,
    WorkClaim,
    WorkComparison,
    read_claims,
    relative_deviation,
    sum_tolerance,
)
from lightning_swarm.protocol.messages.audits import AuditFinding
from lightning_swarm.protocol.messages.calls import Origin, Receipt, unpack, unpack_origins

# Recent steps in which a server's accusations were refuted, before it is convicted. Some are tolerated, because in a
# diverging step the results of two kinds of machines may differ by more than the tolerance.
MAX_REFUTED: Final = 5

MAX_UNPROVEN: Final = 2  # unproven accusations of one server by another, before the coordinator audits instead


@dataclass(frozen=True)
class AuditResult:
    """One auditor's findings on one server's work."""

    # Digests of the auditor's own computation. If numbers are compared, the digests of results are those that the
    # audited server sent.
    claims: Mapping[Receipt, WorkClaim]
    origins: Mapping[int, Origin]  # place of a batch -> its origin, as received by the auditor
    refused: frozenset[Receipt]  # microbatches of which the audited server sent no usable tensors
    unheard: frozenset[Receipt]  # microbatches about which the audited server did not answer
    sum_digest: bytes  # BLAKE3 of the auditor's sum
    projection: StageProjection  # sketch of the auditor's sum
    magnitude: float  # sum of the norms of the added gradients
    precision: str  # dtype of the computation
    touched: bytes  # bitmap over the stage's parameters that got a gradient
    distance: float | None  # between both servers' results, relative to their norms; None: not compared

    @classmethod
    def read(cls, finding: AuditFinding) -> AuditResult:
        """Read an auditor's answer; raise ProtocolError if it is malformed."""
        receipts, distance = unpack(finding.receipts), finding.distance
        return cls(
            claims=read_claims(finding.claims, receipts),
            origins=unpack_origins(finding.origins, {first for first, _, _ in receipts}),
            refused=frozenset(unpack(finding.refused) - receipts),
            unheard=frozenset(unpack(finding.unheard) - receipts),
            sum_digest=finding.sum_digest,
            projection=StageProjection(tuple(finding.values)),
            magnitude=finding.magnitude,
            precision=finding.precision,
            touched=finding.touched,
            distance=None if isinstance(distance, UnsetType) else distance,
        )


@dataclass(frozen=True)
class ClaimedWork:
    """A server's commitment to its work of one step in one stage."""

    claims: Mapping[Receipt, WorkClaim]
    origins: Mapping[int, Origin]  # place of a batch -> its granted origin
    sum_digest: bytes
    touched: bytes  # bitmap over the stage's parameters that have a gradient

    def has_claimed_inputs(self, finding: AuditResult) -> bool:
        """Return whether an auditor computed all microbatches, each from its claimed inputs."""
        return len(self.with_claimed_inputs(finding)) == len(self.claims)

    def with_claimed_inputs(self, finding: AuditResult) -> list[Receipt]:
        """Return the microbatches that an auditor computed from their claimed inputs."""
        with_other_origin = self.with_other_origin(finding)
        # The auditor's claims show the inputs that it used. The audited server may have sent it other inputs.
        inputs_used = {receipt: (claim.input, claim.output_gradient) for receipt, claim in finding.claims.items()}
        return [
            receipt
            for receipt, claim in self.claims.items()
            if inputs_used.get(receipt) == (claim.input, claim.output_gradient) and receipt[0] not in with_other_origin
        ]

    def with_other_origin(self, finding: AuditResult) -> set[int]:
        """Return places of batches that an auditor got with another weight, or from another trainer."""
        return {first for first, origin in finding.origins.items() if self.origins.get(first, origin) != origin}


class WorkTolerance(NamedTuple):
    """The tolerance between results of machines of different kinds."""

    results: float  # largest relative distance of outputs and input gradients
    sum: Tolerance

    @classmethod
    def around(cls, finding: AuditResult, codec_bits: float | None, dtype: str) -> WorkTolerance:
        """Return the tolerance around an auditor's findings. `dtype` is that of its sum, which no codec compressed."""
        in_transit = relative_deviation(finding.precision, codec_bits)
        return cls(in_transit, sum_tolerance(finding.magnitude, relative_deviation(finding.precision), dtype))

    @property
    def half(self) -> WorkTolerance:
        """Half of this tolerance."""
        return WorkTolerance(self.results / 2, self.sum._replace(distance=self.sum.distance / 2))

    def holds(self, finding: AuditResult, sum_sketch: StageProjection) -> bool:
        """Return whether a server's results and sum are within the tolerance of an auditor's findings."""
        return (finding.distance or 0.0) <= self.results and sum_sketch.agrees(finding.projection, tolerance=self.sum)


def compare(
    claimed: ClaimedWork, finding: AuditResult, sum_sketch: StageProjection, *, tolerance: WorkTolerance | None
) -> WorkComparison:
    """Compare a server's claims, and the sketch of its sum, with an auditor's findings.

    Without a `tolerance`, the machines are of one kind, so all bits must be equal.
    """
    if finding.refused:
        return WorkComparison(frozenset({"refused"}))
    if claimed.with_other_origin(finding):
        return WorkComparison(is_whole=False, is_misweighed=True)
    if not claimed.claims.keys() <= finding.claims.keys():
        return WorkComparison(is_whole=False, is_silent=bool(finding.unheard))
    wrong = {
        name
        for receipt, claim in claimed.claims.items()
        for name, digest, computed in zip(WorkClaim._fields, claim, finding.claims[receipt], strict=True)
        if digest != computed
    }
    if tolerance is None:
        wrong |= {"sum"} if finding.sum_digest != claimed.sum_digest else set()
    else:
        wrong |= {"output"} if (finding.distance or 0.0) > tolerance.results else set()
        wrong |= set() if sum_sketch.agrees(finding.projection, tolerance=tolerance.sum) else {"sum"}
    wrong |= {TOUCHED} if finding.touched != claimed.touched else set()
    return WorkComparison(frozenset(wrong))


class Accusation(Enum):
    """The coordinator's conclusion on an accusation, if its own computation cleared the accused."""

    FALSE = auto()  # no machine of this kind computes the auditor's results, so the auditor is convicted
    REFUTED = auto()  # the auditor's results are too far from the coordinator's; convicts if repeated in many steps
    UNPROVEN = auto()  # the accused may have sent other inputs to the auditor than to the coordinator


class SameKind(NamedTuple):
    """Whether the machines of the auditor and of the coordinator are of the audited server's kind."""

    auditor: bool
    referee: bool  # the coordinator's own server


def resolve_accusation(
    claimed: ClaimedWork,  # claims of the accused, which are true by the coordinator's computation
    sum_sketch: StageProjection,  # sketch of its sum, by the seed of both findings
    finding: AuditResult,  # the auditor's
    own_finding: AuditResult,  # the coordinator's
    *,
    tolerance: WorkTolerance,  # between machines of different kinds
    same_kind: SameKind,
) -> Accusation:
    """Decide on an auditor's accusation, by the findings of the coordinator's own server on the same work."""
    is_whole = claimed.has_claimed_inputs(finding)
    differs = any(
        finding.claims[receipt] != own_finding.claims.get(receipt) for receipt in claimed.with_claimed_inputs(finding)
    )
    agrees = (
        finding.projection.agrees(own_finding.projection, tolerance=tolerance.sum)
        and finding.touched == own_finding.touched
    )
    if all(same_kind):
        if differs or (is_whole and not agrees):
            return Accusation.FALSE
        return Accusation.REFUTED if is_whole else Accusation.UNPROVEN
    # Between two kinds, the auditor's claims have digests of results that the accused sent it, which may be others.
    if differs or not is_whole:
        return Accusation.UNPROVEN
    if not agrees:
        return Accusation.REFUTED
    if same_kind.auditor:  # the accusation is about bits, which the coordinator's kind of machine cannot check
        return Accusation.UNPROVEN
    # The accused could choose results within the tolerance of one machine, but beyond the tolerance of another.
    is_close = same_kind.referee or tolerance.half.holds(own_finding, sum_sketch)
    return Accusation.REFUTED if is_close else Accusation.UNPROVEN
