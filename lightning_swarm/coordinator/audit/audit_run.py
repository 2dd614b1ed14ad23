"""Has servers' work computed again: orders to trainers, calls on auditors, and what these found."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec import UnsetType

from lightning_swarm.coordinator.audit.policy import (
    StageProjection,
    Tolerance,
    Unit,
    WorkClaim,
    WorkComparison,
    read_claims,
)
from lightning_swarm.coordinator.server_calls import ServerCalls
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.core.errors import ProtocolError, SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.audits import (
    DIGEST_BYTES,
    AuditFinding,
    AuditOrder,
    AuditWork,
    FindingsRequest,
    ResultsRequest,
    SketchRequest,
    StageSketch,
)
from lightning_swarm.protocol.messages.calls import Direction, Receipt, unpack
from lightning_swarm.protocol.messages.wire import draw_challenge

_log = logging.getLogger(__name__)

_MOST_AT_ONCE: Final = 64  # microbatches that a trainer sends to one auditor in one call


@dataclass(frozen=True)
class Assignment:
    """Microbatches of one server's work that another one computes again."""

    unit: Unit
    auditor: PeerId
    receipts: Sequence[Receipt]
    compare: bool = False  # the auditor's machine is of another kind


@dataclass(frozen=True)
class AuditResult:
    """What one auditor found of one server's work."""

    claims: Mapping[Receipt, WorkClaim]  # as its own computation gives them
    refused: frozenset[Receipt]  # the audited server did not give what it had kept of these
    unheard: frozenset[Receipt]  # it gave no answer of these
    projection: StageProjection  # of the sum of what it computed
    magnitude: float
    precision: str  # that it computed in
    touched: bytes  # bitmap over the stage's parameters to which it gave a gradient
    distance: float | None  # of the results from its own, relative to their norms; None: they were not compared

    @classmethod
    def read(cls, finding: AuditFinding, *, exact: bool) -> AuditResult:
        """Read an auditor's answer; raises ProtocolError if it is malformed."""
        receipts, distance = unpack(finding.receipts), finding.distance
        return cls(
            claims=read_claims(finding.claims, receipts),
            refused=frozenset(unpack(finding.refused) - receipts),
            unheard=frozenset(unpack(finding.unheard) - receipts),
            projection=_projection(finding, exact=exact),
            magnitude=finding.magnitude,
            precision=finding.precision,
            touched=finding.touched,
            distance=None if isinstance(distance, UnsetType) else distance,
        )


@dataclass
class TrainerResults:
    """What trainers know of a step's microbatches."""

    given: dict[tuple[Direction, Receipt], tuple[PeerId, bytes]] = field(default_factory=dict)  # by whom, as digests
    # Servers that failed after they may have given something, so that others took their places.
    replaced: defaultdict[Receipt, set[Unit]] = field(default_factory=lambda: defaultdict(set))


@dataclass
class AuditResults:
    """All that came of one run of audits."""

    order: int  # its number
    seed: int  # of the sketches
    found: dict[tuple[Unit, PeerId], AuditResult] = field(default_factory=dict)  # by unit and auditor
    sums: dict[Unit, StageProjection] = field(default_factory=dict)  # of the audited, by the same seed
    failed: dict[PeerId, SwarmError] = field(default_factory=dict)  # servers that do not answer
    lost: set[Receipt] = field(default_factory=set)  # microbatches of which no trainer has a copy
    # Auditors, by stage, that answered pings and no audit, and the trainers that report it.
    silent: defaultdict[Unit, set[PeerId]] = field(default_factory=lambda: defaultdict(set))


def compare(
    claims: Mapping[Receipt, WorkClaim],
    its: AuditResult,
    told: StageProjection,
    *,
    tolerance: Tolerance,
    is_far: bool,
    touches_alike: bool,
) -> WorkComparison:
    """Compare a server's claims, and what it told of its sum, with what an auditor found. Pure."""
    if its.refused:
        return WorkComparison(frozenset({"refused"}))
    if not claims.keys() <= its.claims.keys():
        return WorkComparison(is_whole=False, is_silent=bool(its.unheard))
    wrong = {
        name
        for receipt, claim in claims.items()
        for name, said, found in zip(WorkClaim._fields, claim, its.claims[receipt], strict=True)
        if said != found
    }
    wrong |= {"output"} if is_far else set()
    wrong |= set() if told.agrees(its.projection, tolerance=tolerance) else {"sum"}
    wrong |= set() if touches_alike else {"list of what has a gradient"}
    return WorkComparison(frozenset(wrong))


def is_false_accusation(
    claims: Mapping[Receipt, WorkClaim], its: AuditResult, true: AuditResult, *, tolerance: Tolerance
) -> bool:
    """Tell whether an auditor found another result of what it was given, which was what the server claims. Pure."""
    # If it was given something else, which the server may have done, it says so in its claims.
    given = [
        receipt
        for receipt, claim in its.claims.items()
        if receipt in claims and (claim.input, claim.output_gradient) == (claims[receipt][0], claims[receipt][2])
    ]
    if any(its.claims[receipt] != true.claims.get(receipt) for receipt in given):
        return True
    return len(given) == len(claims) and not its.projection.agrees(true.projection, tolerance=tolerance)


def _projection(sketch: StageSketch | AuditFinding, *, exact: bool) -> StageProjection:
    whole = None if isinstance(sketch.exact, UnsetType) else tuple(sketch.exact)
    if (whole is not None) != exact:
        raise ProtocolError(f"sums in fixed point, and no others, have exact sketches; got {whole}")
    return StageProjection(tuple(sketch.values), whole)


class AuditRun:
    """Runs audits of one step's work."""

    def __init__(self, servers: ServerCalls, step: OpenStep, generation: int, *, exact: bool) -> None:
        self._servers, self._step, self._generation = servers, step, generation
        self._exact = exact  # sums are in fixed point

    async def sketch(
        self, units: Iterable[Unit], round_: int, seed: int
    ) -> tuple[dict[Unit, StageProjection], dict[PeerId, SwarmError]]:
        """Ask for sketches of sums; returns also the servers that do not give all of theirs."""
        wanted = sorted(units)
        request = SketchRequest(generation=self._generation, step=self._step.step, round=round_, seed=seed)
        replies = await self._servers.sketch(sorted({unit.peer for unit in wanted}), request)
        sums, failed = dict[Unit, StageProjection](), dict[PeerId, SwarmError]()
        for peer, reply in replies.items():
            try:
                if isinstance(reply, SwarmError):
                    raise reply
                told = {Unit(one.stage_index, peer): _projection(one, exact=self._exact) for one in reply.stages}
                own = [unit for unit in wanted if unit.peer == peer]
                if lacking := [unit for unit in own if unit not in told]:
                    raise ProtocolError(f"{peer} gives no sketch of its sum of stage {lacking[0].stage_index}")
                sums.update({unit: told[unit] for unit in own})  # and none of what it does not hold
            except SwarmError as error:
                failed[peer] = error
        return sums, failed

    async def results(self) -> TrainerResults:
        """Ask the step's trainers which server gave them what, as digests, and which servers failed."""
        request = ResultsRequest(generation=self._generation, step=self._step.step)
        trainers = sorted({self._step.trainer_of(first) for first, _, _ in self._step.counted})
        found = TrainerResults()
        for trainer, reply in (await self._servers.results(trainers, request)).items():
            if isinstance(reply, SwarmError):
                _log.warning("Trainer %s does not say what servers gave it: %s", trainer, reply)
                continue
            for one in reply.results:
                receipts = sorted(unpack(one.receipts))
                if len(one.digests) != DIGEST_BYTES * len(receipts):
                    raise ProtocolError(f"each result has {DIGEST_BYTES} bytes of digest, got {len(one.digests)} bytes")
                for place, receipt in enumerate(receipts):
                    digest = one.digests[DIGEST_BYTES * place : DIGEST_BYTES * (place + 1)]
                    found.given[one.direction, receipt] = one.server, digest
            for failed in reply.replaced:
                for receipt in unpack(failed.receipts):
                    found.replaced[receipt].add(Unit(failed.stage_index, failed.server))
        return found

    async def audit(self, assignments: Sequence[Assignment], round_: int) -> AuditResults:
        """Have assignments computed; what was not is missing in the results."""
        results = AuditResults(draw_challenge(), draw_challenge())
        if not assignments:
            return results
        order, seed = results.order, results.seed
        # Apart for each auditor: one that keeps a trainer waiting holds up no other's work.
        await gather(
            self._order(trainer, results, compare, work[begin : begin + _MOST_AT_ONCE])
            for (trainer, compare, _), work in self._by_trainer(assignments).items()
            for begin in range(0, len(work), _MOST_AT_ONCE)
        )
        results.found, results.failed = await self.ask(order, {(one.unit, one.auditor) for one in assignments}, seed)
        results.sums, failed = await self.sketch({one.unit for one in assignments}, round_, seed)
        results.failed |= failed
        return results

    async def ask(
        self, order: int, about: Collection[tuple[Unit, PeerId]], seed: int
    ) -> tuple[dict[tuple[Unit, PeerId], AuditResult], dict[PeerId, SwarmError]]:
        """Ask auditors what they found of units under an order, sketched by a seed; also who does not answer."""
        request = FindingsRequest(generation=self._generation, step=self._step.step, order=order, seed=seed)
        found, failed = dict[tuple[Unit, PeerId], AuditResult](), dict[PeerId, SwarmError]()
        auditors = sorted({auditor for _, auditor in about})
        for auditor, reply in (await self._servers.findings(auditors, request)).items():
            try:
                if isinstance(reply, SwarmError):
                    raise reply
                told = {(Unit(one.stage_index, one.audited), auditor): one for one in reply.findings}
                # Nothing else is read: a few bytes may name many microbatches.
                found |= {key: AuditResult.read(one, exact=self._exact) for key, one in told.items() if key in about}
            except SwarmError as error:
                failed[auditor] = error
        return found, failed

    def _by_trainer(self, assignments: Sequence[Assignment]) -> dict[tuple[PeerId, bool, PeerId], list[AuditWork]]:
        found: defaultdict[tuple[PeerId, bool, PeerId], list[AuditWork]] = defaultdict(list)
        for one in assignments:
            for receipt in one.receipts:
                work = AuditWork(
                    receipt=receipt, stage_index=one.unit.stage_index, audited=one.unit.peer, auditor=one.auditor
                )
                found[self._step.trainer_of(receipt[0]), one.compare, one.auditor].append(work)
        return found

    async def _order(self, trainer: PeerId, results: AuditResults, compare: bool, work: list[AuditWork]) -> None:
        request = AuditOrder(
            generation=self._generation, step=self._step.step, order=results.order, work=work, compare=compare
        )
        try:
            reply = await self._servers.order_audits(trainer, request)
        except SwarmError as error:
            _log.warning("Trainer %s sent nothing to an auditor: %s", trainer, error)
            return
        results.lost |= set(reply.lost)
        for one in work:
            if one.auditor in reply.silent:
                results.silent[Unit(one.stage_index, one.auditor)].add(trainer)
        undone = reply.undone
        for place, reason in sorted(undone.items())[:1]:
            one = work[place] if place < len(work) else None
            _log.warning("%d of %d audits were not done; the first: %s: %s", len(undone), len(work), one, reason)
