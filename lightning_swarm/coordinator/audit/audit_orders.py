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

_MOST_AT_ONCE: Final = 64  # microbatches that a trainer sends to one auditor in one call


@dataclass(frozen=True)
class Assignment:
    """Microbatches of one server's work that another server computes again."""

    unit: Unit  # the audited server and its stage
    auditor: PeerId
    receipts: Sequence[Receipt]  # ordered as they were added
    within_tolerance: bool = False  # the auditor's machine is of another kind, so numbers are compared, not digests


@dataclass
class TrainerResults:
    """The trainers' reports on which servers computed a step's microbatches."""

    # (direction, microbatch) -> server that sent the result, and the result's digest.
    given: dict[tuple[Direction, Receipt], tuple[PeerId, bytes]] = field(default_factory=dict)
    # Microbatch -> servers that failed and were replaced, after they may have sent results.
    replaced: defaultdict[Receipt, set[Unit]] = field(default_factory=lambda: defaultdict(set))


@dataclass
class AuditResults:
    """The results of one audit order."""

    order_id: int  # random; names this audit order
    seed: int  # seed of the sketches
    found: dict[tuple[Unit, PeerId], AuditResult] = field(default_factory=dict)  # unit, auditor -> findings
    sums: dict[Unit, StageProjection] = field(default_factory=dict)  # audited sums, by the same seed
    failed: dict[PeerId, SwarmError] = field(default_factory=dict)  # servers that do not answer
    lost: set[Receipt] = field(default_factory=set)  # microbatches of which no trainer has a copy
    # (stage, auditor) -> trainers that report that it answers pings, but no audits.
    silent: defaultdict[Unit, set[PeerId]] = field(default_factory=lambda: defaultdict(set))


class AuditOrders:
    """Orders audits of one step's work, and collects their results."""

    def __init__(self, servers: ServerCalls, step: OpenStep, generation: int) -> None:
        self._servers, self._step, self._generation = servers, step, generation

    async def sketch(
        self, units: Iterable[Unit], round_: int, seed: int
    ) -> tuple[dict[Unit, StageProjection], dict[PeerId, SwarmError]]:
        """Ask for sketches of sums; also return the servers that do not send all of their sketches."""
        wanted = sorted(units)
        request = SketchRequest(generation=self._generation, step=self._step.step, round=round_, seed=seed)
        replies, failed = await self._servers.ask_all(SKETCH, sorted({unit.peer for unit in wanted}), request)
        sums: dict[Unit, StageProjection] = {}
        for peer, reply in replies.items():
            reported = {Unit(one.stage_index, peer): StageProjection(tuple(one.values)) for one in reply.stages}
            own = [unit for unit in wanted if unit.peer == peer]
            if lacking := [unit for unit in own if unit not in reported]:
                failed[peer] = ProtocolError(f"{peer} gives no sketch of its sum of stage {lacking[0].stage_index}")
            else:
                sums.update({unit: reported[unit] for unit in own})  # sketches of other stages are ignored
        return sums, failed

    async def results(self) -> TrainerResults:
        """Ask the step's trainers for digests of the results that servers sent, and for servers that failed."""
        request = StepRequest(generation=self._generation, step=self._step.step)
        trainers = sorted({self._step.trainer_of(first) for first, _, _ in self._step.counted})
        found = TrainerResults()
        replies, failed = await self._servers.ask_all(RESULTS, trainers, request)
        for trainer, error in failed.items():
            _log.warning("Trainer %s does not say what servers gave it: %s", trainer, error)
        for reply in replies.values():
            for one in reply.results:
                receipts = sorted(unpack(one.receipts))
                if len(one.digests) != DIGEST_BYTES * len(receipts):
                    raise ProtocolError(f"each result has {DIGEST_BYTES} bytes of digest, got {len(one.digests)} bytes")
                for index, receipt in enumerate(receipts):
                    digest = one.digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]
                    found.given[one.direction, receipt] = one.server, digest
            for replaced in reply.replaced:
                for receipt in unpack(replaced.receipts):
                    found.replaced[receipt].add(Unit(replaced.stage_index, replaced.server))
        return found

    async def audit(self, assignments: Sequence[Assignment], round_: int) -> AuditResults:
        """Have assignments computed; failed assignments are missing in the results."""
        results = AuditResults(draw_challenge(), draw_challenge())
        if not assignments:
            return results
        order_id, seed = results.order_id, results.seed
        # Each auditor has its own calls, so that a slow auditor delays no other auditor's work.
        await gather(
            self._order_all(trainer, results, compare, work)
            for (trainer, compare, _), work in self._by_trainer(assignments).items()
        )
        about = {(one.unit, one.auditor) for one in assignments}
        results.found, results.failed = await self.ask_findings(order_id, about, seed)
        results.sums, failed = await self.sketch({one.unit for one in assignments}, round_, seed)
        results.failed |= failed
        return results

    async def ask_findings(
        self, order_id: int, about: Collection[tuple[Unit, PeerId]], seed: int
    ) -> tuple[dict[tuple[Unit, PeerId], AuditResult], dict[PeerId, SwarmError]]:
        """Ask auditors for their findings on units under an order, sketched by a seed; also return failed auditors."""
        request = FindingsRequest(generation=self._generation, step=self._step.step, order=order_id, seed=seed)
        found: dict[tuple[Unit, PeerId], AuditResult] = {}
        replies, failed = await self._servers.ask_all(FINDINGS, sorted({auditor for _, auditor in about}), request)
        for auditor, reply in replies.items():
            reported = {(Unit(one.stage_index, one.audited), auditor): one for one in reply.findings}
            try:
                # Other findings are not read, because a few bytes may name many microbatches.
                found |= {key: AuditResult.read(one) for key, one in reported.items() if key in about}
            except ProtocolError as error:
                failed[auditor] = error
        return found, failed

    def _by_trainer(self, assignments: Sequence[Assignment]) -> dict[tuple[PeerId, bool, PeerId], list[AuditWork]]:
        """Group the work by the calls that order it: (trainer, whether numbers are compared, auditor) -> work."""
        found: defaultdict[tuple[PeerId, bool, PeerId], list[AuditWork]] = defaultdict(list)
        for one in assignments:
            for index, receipt in enumerate(one.receipts):
                work = AuditWork(
                    receipt=receipt,
                    stage_index=one.unit.stage_index,
                    audited=one.unit.peer,
                    auditor=one.auditor,
                    place=index,  # among the work of its assignment
                )
                found[self._step.trainer_of(receipt[0]), one.within_tolerance, one.auditor].append(work)
        return found

    async def _order_all(self, trainer: PeerId, results: AuditResults, compare: bool, work: list[AuditWork]) -> None:
        """Have a trainer send all its work to one auditor, in several calls."""
        # Send one call after the other, because an auditor keeps inputs that arrive before their turn.
        for begin in range(0, len(work), _MOST_AT_ONCE):
            await self._order(trainer, results, compare, work[begin : begin + _MOST_AT_ONCE])

    async def _order(self, trainer: PeerId, results: AuditResults, compare: bool, work: list[AuditWork]) -> None:
        """Have a trainer send work to an auditor; record the work that had no copy, and a silent auditor."""
        request = AuditOrder(
            generation=self._generation, step=self._step.step, order=results.order_id, work=work, compare=compare
        )
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
            one = work[index] if index < len(work) else None
            _log.warning("%d of %d audits were not done; the first: %s: %s", len(undone), len(work), one, reason)
