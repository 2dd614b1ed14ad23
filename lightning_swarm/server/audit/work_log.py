"""Keeps a server's work on microbatches in an audited run, and commits to it when a sum is frozen."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from msgspec.structs import replace
from typing_extensions import override

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.protocol.messages.calls import CallKey, Receipt
from lightning_swarm.protocol.messages.state import StateKind
from lightning_swarm.protocol.messages.step import StageLedger, pack_order
from lightning_swarm.protocol.serialization import Tree
from lightning_swarm.server.activation_cache import CachedForward
from lightning_swarm.server.audit.borrowed import BorrowedStages
from lightning_swarm.server.audit.kept_work import KeptWork, KeptWorks, output_digest, sum_digest
from lightning_swarm.server.audit.state_proofs import StateProofs
from lightning_swarm.server.compute import ForwardResult, SavedGraph
from lightning_swarm.server.context import RunMembership
from lightning_swarm.server.gradient_buffer import ReceiptLedger
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.server.oversight import KeepWork, WorkLog
from lightning_swarm.server.stage import Stage


class AuditedWorkLog(WorkLog):
    """Keeps the data by which auditors recompute microbatches, and digests of their results."""

    def __init__(
        self, membership: RunMembership, sums: GradientSums, borrowed: BorrowedStages, *, max_bytes: int
    ) -> None:
        self._membership, self._sums, self._borrowed = membership, sums, borrowed
        self._max_bytes = max_bytes  # memory for the kept work of all stages together
        self._works = WeakKeyDictionary[ReceiptLedger, KeptWorks]()  # dropped with their ledger

    def kept_work(self, step: int, stage_index: int, receipt: Receipt) -> KeptWork:
        """Return the kept work on a microbatch in an open step's sum; raise `ProtocolError` if none is kept."""
        works = self._works_of(self._sums.ledger(step, stage_index))
        if receipt not in works:
            raise ProtocolError(f"no work is kept here on microbatch {receipt} of step {step} in stage {stage_index}")
        return works.get(receipt)

    def _works_of(self, ledger: ReceiptLedger) -> KeptWorks:
        works = self._works.get(ledger)
        if works is None:
            works = self._works[ledger] = KeptWorks(self._max_bytes // max(1, len(self._sums.stages)))
        return works

    @override
    def note_output(self, kept: CachedForward, result: ForwardResult) -> None:
        kept.output_digest = output_digest(result)

    @override
    def graph_of(self, stage: Stage, kept: CachedForward, *, adds: bool) -> SavedGraph:
        graph = kept.take_graph()
        if adds and not kept.output_digest:  # the forward is not kept here any more, or never was
            forward = stage.computation.forward(kept.call)
            graph, kept.output_digest = forward.graph, output_digest(forward)
        return graph or stage.computation.graph(kept.call)

    @override
    def keep_function(
        self, stage: Stage, receipt: Receipt, kept: CachedForward, gradients: Tree, input_gradients: Tree
    ) -> KeepWork:
        is_first = stage.index == 0
        work = KeptWork.of(kept.call, kept.output_digest, gradients, input_gradients, is_first=is_first)

        def keep(ledger: ReceiptLedger) -> None:
            if not ledger.holds(receipt):  # a repeated backward adds nothing, so its work does not count
                self._works_of(ledger).keep(receipt, work)

        return keep

    @override
    def commit(self, report: StageLedger, stage: Stage, ledger: ReceiptLedger, step: int) -> StageLedger:
        if stage.on_trainers:
            return report
        works = self._works_of(ledger)
        return replace(
            report,
            claims=b"".join(works.claim(receipt) for receipt in sorted(ledger.held)),
            sum_digest=sum_digest(stage.sum_of(step).values),
            order=pack_order(ledger.in_order),
        )

    @override
    def borrows(self, key: CallKey, stage_index: int) -> bool:
        # Trainers compare the output of a probe. The coordinator computes probes even of stages that it does not hold.
        run = self._membership.run
        run.check_generation(key.generation)
        is_valid = key.is_probe and not key.weights and stage_index < len(run.rosters)
        return is_valid and run.coordinator == self._membership.me.peer_id and stage_index not in self._sums.stages

    @override
    async def borrowed(self, stage_index: int, version: int) -> Stage:
        return await self._borrowed.get(stage_index, version)

    @override
    def state_hash(self, stage: Stage) -> StateProofs:
        return StateProofs(stage)

    @override
    def prover(self, challenge: int, kind: StateKind) -> Callable[[Stage], bytes]:
        def prove(stage: Stage) -> bytes:
            assert isinstance(stage.state_hash, StateProofs)
            return stage.state_hash.proof(challenge, [kind])

        return prove
