"""Sends microbatches of an undecided step, from a trainer's copies, to auditors that the coordinator names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.replay_buffer import ReplayCopy
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import DeadlineExceeded, ProtocolError, SwarmError
from lightning_swarm.core.readable import shorten
from lightning_swarm.core.tasks import gather_bounded
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.audits import (
    AuditOrder,
    AuditOrderReply,
    AuditRequest,
    AuditWork,
    GivenResults,
    ReplacedServer,
    ResultsReply,
)
from lightning_swarm.protocol.messages.calls import CallKey, Receipt, pack
from lightning_swarm.protocol.messages.run import StepRequest
from lightning_swarm.protocol.patience import MAX_SLOWDOWN, MIN_UNFAMILIAR_S, deadline_s
from lightning_swarm.protocol.rpc import AUDIT, ORDER_AUDITS, RESULTS
from lightning_swarm.protocol.run_state import RunState


class _AuditorSilent(DeadlineExceeded):
    """An auditor answers pings, but not an audit."""


class AuditSender:
    """Sends the work of servers to auditors, which recompute it. Runs on the event loop, without the main thread."""

    # An auditor gets the trainer's own tensors from the trainer, and the rest from the audited server. That server
    # could falsify the rest, but its neighbours hold the same tensors, and the coordinator compares their digests.
    def __init__(self, context: PipelineContext, run: RunState, *, max_in_flight: int) -> None:
        self._context = context
        self._run = run
        self._max_in_flight = max_in_flight
        self._num_audits: Counter[PeerId] = Counter()  # auditor -> audits under way, from all orders
        ORDER_AUDITS.serve(context.transport, self._handle_order, admit=run.check_coordinator)
        RESULTS.serve(context.transport, self._handle_results, admit=run.check_coordinator)

    async def _handle_order(self, caller: PeerId, order: AuditOrder) -> AuditOrderReply:
        """Send an order's microbatches to their auditors; report the microbatches that no auditor computed."""
        self._run.check_generation(order.generation)
        last = len(self._context.routers) - 1
        for work in order.work:
            if work.stage_index > last or work.auditor == work.audited:
                raise ProtocolError(
                    f"an audit order must name one of {last + 1} stages and two different servers, got "
                    f"stage {work.stage_index}, auditor {work.auditor}, audited server {work.audited}"
                )
        undone, lost, silent = dict[int, str](), set[Receipt](), set[PeerId]()

        async def send(index: int, work: AuditWork) -> None:
            key = CallKey.of(order.generation, order.step, work.receipt)
            copy = await self._context.replay_buffer.find(key)
            if copy is None:
                lost.add(work.receipt)
                return
            try:
                if work.auditor in silent:
                    raise _AuditorSilent(f"{work.auditor} did not answer about another microbatch of this order")
                # A coordinator that audits may convict the audited server if it gets no answer from that server.
                may_convict = work.auditor == caller
                await self._send(order, work, copy, num_ahead=self._num_audits[work.auditor], may_convict=may_convict)
            except SwarmError as error:
                undone[index] = shorten(str(error))[:500]
                if isinstance(error, _AuditorSilent):
                    silent.add(work.auditor)

        orders = Counter(work.auditor for work in order.work)
        self._num_audits.update(orders)
        try:
            await gather_bounded([send(index, work) for index, work in enumerate(order.work)], self._max_in_flight)
        finally:
            self._num_audits.subtract(orders)
        return AuditOrderReply(undone=undone, lost=sorted(lost), silent=sorted(silent))

    async def _send(
        self, order: AuditOrder, work: AuditWork, copy: ReplayCopy, *, num_ahead: int, may_convict: bool
    ) -> None:
        """Send a microbatch to its auditor; raise the auditor's error, or `_AuditorSilent` if it does not answer."""
        context = self._context
        patience_s = self._auditor_patience_s(
            work.stage_index, copy.microbatch.num_rows, num_ahead, may_convict=may_convict
        )
        # Half of the time is for the audited server's answer. Twice the time if that server recomputes its part too, or
        # may be convicted for its silence.
        patience_s *= 2 if order.compare or may_convict else 1
        structure, tensors = serialization.flatten(_trainer_tensors(copy, work.stage_index))
        request = AuditRequest(
            key=copy.microbatch.key,
            stage_index=work.stage_index,
            mode=copy.microbatch.modes[work.stage_index],
            weight=copy.microbatch.weight,
            audited=work.audited,
            order=order.order,
            place=work.place,
            compare=order.compare,
            structure=structure,
            patience_s=patience_s / 2,  # the auditor's longest wait for the audited server
        )
        begin_s = now_s()
        try:
            await AUDIT.ask(context.transport, work.auditor, request, tensors, timeout=patience_s, max_bytes=0)
        except DeadlineExceeded as error:
            if now_s() < begin_s + patience_s:
                raise  # the auditor's own error: the audited server did not answer it in time
            raise _AuditorSilent(str(error)) from error

    def _auditor_patience_s(self, stage: int, num_rows: int, num_ahead: int, *, may_convict: bool) -> float:
        """Return the seconds that an auditor may take for a microbatch, with `num_ahead` audits under way there."""
        # `num_ahead` includes the whole order, so it is an upper bound of the audits before this one. More time if the
        # audited server may be convicted for its silence, because its link may be the slowest.
        context = self._context
        samples_per_s, whole_s = context.routers[stage].median_rate(), context.durations.usual_s  # whole_s: all stages
        if samples_per_s is None or whole_s is None:
            return context.timeout
        usual_s = max(MAX_SLOWDOWN * num_rows / samples_per_s, whole_s) * (1 + num_ahead)
        if may_convict:
            return deadline_s(MAX_SLOWDOWN * usual_s, longest_s=context.timeout, least_s=MIN_UNFAMILIAR_S)
        return deadline_s(usual_s, longest_s=context.timeout)

    async def _handle_results(self, caller: PeerId, request: StepRequest) -> ResultsReply:
        self._run.check_generation(request.generation)
        digests_by_server = self._context.replay_buffer.result_digests(request.generation, request.step)
        results = [
            GivenResults(
                server=server,
                direction=direction,
                receipts=pack(digests),
                digests=b"".join(digest for _, digest in sorted(digests.items())),
            )
            for (server, direction), digests in digests_by_server.items()
        ]
        replaced_peers = self._context.replay_buffer.replaced(request.generation, request.step)
        replaced = [
            ReplacedServer(server=server, stage_index=stage, receipts=pack(receipts))
            for (stage, server), receipts in replaced_peers.items()
        ]
        return ResultsReply(results=results, replaced=replaced)


def _trainer_tensors(
    copy: ReplayCopy, stage: int
) -> tuple[tuple[tuple[object, ...] | None, Mapping[str, object]], object]:
    """Return the tensors that the trainer sent to a stage: extras, first stage's inputs, last stage's gradients."""
    microbatch = copy.microbatch
    last = len(microbatch.extras) - 1
    inputs = microbatch.inputs if stage == 0 else None
    return (inputs, microbatch.extras[stage]), copy.gradients if stage == last else None
