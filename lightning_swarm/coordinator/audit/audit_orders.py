"""Has servers' work computed again: orders trainers to send it to auditors, and collects the findings."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.coordinator.audit.disputes import AuditResult
from lightning_swarm.coordinator.audit.policy import StageProjection, Unit
from lightning_swarm.coordinator.server_calls import ROUND_TIMEOUTS, ServerCalls
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.core.errors import ProtocolError, SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.audits import (
    AuditOrder,
    AuditWork,
    FindingsRequest,
    SketchRequest,
)
from lightning_swarm.protocol.messages.calls import Direction, Receipt, unpack
from lightning_swarm.protocol.messages.run import StepRequest
from lightning_swarm.protocol.messages.step import DIGEST_BYTES
from lightning_swarm.protocol.messages.wire import draw_challenge
from lightning_swarm.protocol.rpc import FINDINGS, ORDER_AUDITS, RESULTS, SKETCH

_log = logging.getLogger(__name__)

_MAX_WORK: Final = 64  # microbatches that a trainer sends to one auditor in one call


@dataclass(frozen=True)
class Assignment:
    """Microbatches of one server's work that another server computes again."""

    unit: Unit  # the audited server and its stage
    auditor: PeerId
    receipts: Sequence[Receipt]  # microbatches, in the order in which the audited server added them
    within_tolerance: bool = False  # the machines compute different bits, so numbers are compared instead of digests


@dataclass
class TrainerResults:
    """The trainers' reports on which servers computed a step's microbatches."""

    # (direction, microbatch) -> server that sent the result, and the result's digest.
    sent: dict[tuple[Direction, Receipt], tuple[PeerId, bytes]] = field(default_factory=dict)
    # Microbatch -> servers that failed and were replaced, after they may have sent results.
    replaced: defaultdict[Receipt, set[Unit]] = field(default_factory=lambda: defaultdict(set))


@dataclass
class AuditResults:
    """The results of one audit order."""

    order_id: int  # random; names this audit order
    seed: int  # seed of the sketches
    findings: dict[tuple[Unit, PeerId], AuditResult] = field(default_factory=dict)  # (unit, auditor) -> findings
    sums: dict[Unit, StageProjection] = field(default_factory=dict)  # unit -> sketch of its sum, by the same seed
    failed: dict[PeerId, SwarmError] = field(default_factory=dict)  # server without a usable answer -> error
    lost: set[Receipt] = field(default_factory=set)  # microbatches of which no trainer has a copy
    # (stage, auditor) -> trainers that report that the auditor answers pings, but not their audits.
    silent: defaultdict[Unit, set[PeerId]] = field(default_factory=lambda: defaultdict(set))


class AuditOrders:
    """Orders audits of one step's work, and collects their results."""

    def __init__(self, servers: ServerCalls, step: OpenStep, generation: int) -> None:
        self._servers, self._step, self._generation = servers, step, generation

    async def sketch(
        self, units: Iterable[Unit], round_: int, seed: int
    ) -> tuple[dict[Unit, StageProjection], dict[PeerId, SwarmError]]:
        """Ask for sketches of sums; also return errors of the servers that do not send all their sketches."""
        wanted = sorted(units)
        request = SketchRequest(generation=self._generation, step=self._step.step, round=round_, seed=seed)
        replies, failed = await self._servers.ask_all(SKETCH, sorted({unit.peer for unit in wanted}), request)
        sums: dict[Unit, StageProjection] = {}
        for peer, reply in replies.items():
            reported = {Unit(stage.stage_index, peer): StageProjection(tuple(stage.values)) for stage in reply.stages}
            due = [unit for unit in wanted if unit.peer == peer]
            if missing := [unit for unit in due if unit not in reported]:
                failed[peer] = ProtocolError(f"{peer} sent no sketch of its sum of stage {missing[0].stage_index}")
            else:
                sums.update({unit: reported[unit] for unit in due})  # sketches of other stages are ignored
        return sums, failed

    async def results(self) -> TrainerResults:
        """Ask the step's trainers for digests of the results that servers sent, and for servers that failed."""
        request = StepRequest(generation=self._generation, step=self._step.step)
        trainers = sorted({self._step.trainer_of(first) for first, _, _ in self._step.counted})
        results = TrainerResults()
        replies, failed = await self._servers.ask_all(RESULTS, trainers, request)
        for trainer, error in failed.items():
            _log.warning("Trainer %s does not report the results that servers sent: %s", trainer, error)
        for reply in replies.values():
            for sent in reply.results:
                receipts = sorted(unpack(sent.receipts))
                if len(sent.digests) != DIGEST_BYTES * len(receipts):
                    raise ProtocolError(
                        f"{len(receipts)} results have digests of {DIGEST_BYTES} bytes, got {len(sent.digests)} bytes"
                    )
                for index, receipt in enumerate(receipts):
                    digest = sent.digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]
                    results.sent[sent.direction, receipt] = sent.server, digest
            for replaced in reply.replaced:
                for receipt in unpack(replaced.receipts):
                    results.replaced[receipt].add(Unit(replaced.stage_index, replaced.server))
        return results

    async def audit(self, assignments: Sequence[Assignment], round_: int) -> AuditResults:
        """Have auditors compute their assignments; failed assignments are missing in the results."""
        results = AuditResults(draw_challenge(), draw_challenge())
        if not assignments:
            return results
        order_id, seed = results.order_id, results.seed
        # Each auditor has its own calls, so that a slow auditor delays no other auditor's work.
        await gather(
            self._order_all(trainer, results, compares_numbers, work)
            for (trainer, compares_numbers, _), work in self._by_trainer(assignments).items()
        )
        pairs = {(assignment.unit, assignment.auditor) for assignment in assignments}
        results.findings, results.failed = await self.ask_findings(order_id, pairs, seed)
        results.sums, failed = await self.sketch({unit for unit, _ in pairs}, round_, seed)
        results.failed |= failed
        return results

    async def ask_findings(
        self, order_id: int, pairs: Collection[tuple[Unit, PeerId]], seed: int
    ) -> tuple[dict[tuple[Unit, PeerId], AuditResult], dict[PeerId, SwarmError]]:
        """Ask for the findings of (unit, auditor) pairs under an order, sketched by a seed; also return errors."""
        request = FindingsRequest(generation=self._generation, step=self._step.step, order=order_id, seed=seed)
        findings: dict[tuple[Unit, PeerId], AuditResult] = {}
        replies, failed = await self._servers.ask_all(FINDINGS, sorted({auditor for _, auditor in pairs}), request)
        for auditor, reply in replies.items():
            reported = {(Unit(finding.stage_index, finding.audited), auditor): finding for finding in reply.findings}
            try:
                # Findings on other units are not unpacked, because a few bytes may name many microbatches.
                findings |= {pair: AuditResult.read(finding) for pair, finding in reported.items() if pair in pairs}
            except ProtocolError as error:
                failed[auditor] = error
        return findings, failed

    def _by_trainer(self, assignments: Sequence[Assignment]) -> dict[tuple[PeerId, bool, PeerId], list[AuditWork]]:
        """Group the work by the calls that order it: (trainer, whether numbers are compared, auditor) -> work."""
        work_by_call: defaultdict[tuple[PeerId, bool, PeerId], list[AuditWork]] = defaultdict(list)
        for assignment in assignments:
            unit, auditor = assignment.unit, assignment.auditor
            for index, receipt in enumerate(assignment.receipts):
                work = AuditWork(
                    receipt=receipt,
                    stage_index=unit.stage_index,
                    audited=unit.peer,
                    auditor=auditor,
                    place=index,  # among the work of its assignment
                )
                call = self._step.trainer_of(receipt[0]), assignment.within_tolerance, auditor
                work_by_call[call].append(work)
        return work_by_call

    async def _order_all(
        self, trainer: PeerId, results: AuditResults, compares_numbers: bool, work: list[AuditWork]
    ) -> None:
        """Have a trainer send all its work to one auditor, in several calls."""
        # The calls are made one after the other, because an auditor buffers inputs that arrive before their turn.
        for begin in range(0, len(work), _MAX_WORK):
            await self._order(trainer, results, compares_numbers, work[begin : begin + _MAX_WORK])

    async def _order(
        self, trainer: PeerId, results: AuditResults, compares_numbers: bool, work: list[AuditWork]
    ) -> None:
        """Have a trainer send work to an auditor; record microbatches without a copy, and a silent auditor."""
        request = AuditOrder(self._generation, self._step.step, results.order_id, work, compare=compares_numbers)
        try:
            reply = await self._servers.ask(trainer, ORDER_AUDITS, request, num_timeouts=ROUND_TIMEOUTS)
        except SwarmError as error:
            _log.warning("Trainer %s sent nothing to an auditor: %s", trainer, error)
            return
        results.lost |= set(reply.lost)
        for item in work:
            if item.auditor in reply.silent:
                results.silent[Unit(item.stage_index, item.auditor)].add(trainer)
        undone = reply.undone
        for index, reason in sorted(undone.items())[:1]:  # index among the `work` of this request
            first = work[index] if index < len(work) else None
            _log.warning("%d of %d audits were not done; the first: %s: %s", len(undone), len(work), first, reason)
