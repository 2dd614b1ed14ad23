"""Evaluates audits: whether a server's claims are true, and whether an auditor's accusation is false. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from msgspec import UnsetType

from lightning_swarm.coordinator.audit.policy import (
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

# Recent steps with refuted accusations by a server, before it is convicted. Some are tolerated, because in a diverging
# step the results of two kinds of machines may be farther apart than ever before.
MAX_REFUTED: Final = 5

MAX_UNPROVEN: Final = 2  # unproven accusations of one server by another, before the coordinator audits instead


@dataclass(frozen=True)
class AuditResult:
    """One auditor's findings on one server's work."""

    # Digests of the auditor's own computation. If numbers are compared, the digests of results are those of the
    # results that the audited server sent.
    claims: Mapping[Receipt, WorkClaim]
    origins: Mapping[int, Origin]  # place of a batch -> its origin, as received by the auditor
    refused: frozenset[Receipt]  # the audited server sent no usable tensors of these
    unheard: frozenset[Receipt]  # the audited server gave no answer on these
    sum_digest: bytes  # BLAKE3 of the auditor's sum
    projection: StageProjection  # sketch of the auditor's sum
    magnitude: float  # sum of the norms of the added gradients
    precision: str  # dtype of the computation
    touched: bytes  # bitmap over the stage's parameters that got a gradient
    distance: float | None  # between both servers' results, relative to their norms; None: not compared

    @classmethod
    def read(cls, finding: AuditFinding) -> AuditResult:
        """Read an auditor's answer; raises ProtocolError if it is malformed."""
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

    def has_claimed_inputs(self, found: AuditResult) -> bool:
        """Return whether an auditor computed all microbatches, each from its claimed inputs."""
        return len(self.with_claimed_inputs(found)) == len(self.claims)

    def with_claimed_inputs(self, found: AuditResult) -> list[Receipt]:
        """Return the microbatches that an auditor computed from their claimed inputs."""
        with_other_origin = self.with_other_origin(found)
        # If an auditor got other inputs, its claims show them; the audited server may have sent them.
        return [
            receipt
            for receipt, claim in self.claims.items()
            if (its := found.claims.get(receipt)) is not None
            and (its.input, its.output_gradient) == (claim.input, claim.output_gradient)
            and receipt[0] not in with_other_origin
        ]

    def with_other_origin(self, found: AuditResult) -> set[int]:
        """Return places of the batches that came to an auditor with another weight, or from another trainer."""
        return {first for first, origin in found.origins.items() if self.origins.get(first, origin) != origin}


class WorkTolerance(NamedTuple):
    """The tolerance between results of machines of different kinds."""

    results: float  # relative distance of outputs and input gradients
    sum: Tolerance

    @classmethod
    def around(cls, found: AuditResult, codec_bits: float | None, dtype: str) -> WorkTolerance:
        """Return the tolerance around an auditor's findings, whose sum has this dtype."""
        allowed = relative_deviation(found.precision)
        far = relative_deviation(found.precision, codec_bits)
        return cls(far, sum_tolerance(found.magnitude, allowed, dtype))

    @property
    def half(self) -> WorkTolerance:
        """Half of this tolerance."""
        return WorkTolerance(self.results / 2, self.sum._replace(distance=self.sum.distance / 2))

    def holds(self, found: AuditResult, sum_sketch: StageProjection) -> bool:
        """Return whether a server's results and sum are this close to an auditor's findings."""
        return (found.distance or 0.0) <= self.results and sum_sketch.agrees(found.projection, tolerance=self.sum)


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
        for name, one, other in zip(WorkClaim._fields, claim, finding.claims[receipt], strict=True)
        if one != other
    }
    if tolerance is None:
        wrong |= {"sum"} if finding.sum_digest != claimed.sum_digest else set()
    else:
        wrong |= {"output"} if (finding.distance or 0.0) > tolerance.results else set()
        wrong |= set() if sum_sketch.agrees(finding.projection, tolerance=tolerance.sum) else {"sum"}
    wrong |= {"list of what has a gradient"} if finding.touched != claimed.touched else set()
    return WorkComparison(frozenset(wrong))


class Accusation(Enum):
    """The coordinator's conclusion on an accusation, if its own computation cleared the accused."""

    FALSE = auto()  # no machine of its kind computes the auditor's results
    REFUTED = auto()  # the auditor's results are farther off than an honest machine's, or differ in the last bits
    UNPROVEN = auto()  # the accused may have sent other inputs to the auditor than to the coordinator


class Kinds(NamedTuple):
    """Whether the machines of the auditor and the coordinator are of the audited server's kind."""

    auditor: bool
    referee: bool  # the coordinator's own


def resolve_accusation(
    claimed: ClaimedWork,  # claims of the accused, which are true as far as the coordinator can tell
    sum_sketch: StageProjection,  # sketch of its sum, by the seed of both findings
    finding: AuditResult,  # by the auditor
    own_finding: AuditResult,  # by the coordinator's own server
    *,
    tolerance: WorkTolerance,  # between machines of different kinds
    kinds: Kinds,
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
    if all(kinds):
        if differs or (is_whole and not agrees):
            return Accusation.FALSE
        return Accusation.REFUTED if is_whole else Accusation.UNPROVEN
    # Between two kinds, an auditor's claims name the results that the audited server sent, which may differ.
    if differs or not is_whole:
        return Accusation.UNPROVEN
    if not agrees:
        return Accusation.REFUTED
    if kinds.auditor:  # the accusation is about bits, which a machine of another kind cannot check
        return Accusation.UNPROVEN
    # The accused could choose results that are within the tolerance of one machine, and beyond that of another.
    is_close = kinds.referee or tolerance.half.holds(own_finding, sum_sketch)
    return Accusation.REFUTED if is_close else Accusation.UNPROVEN
