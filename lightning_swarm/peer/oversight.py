"""Plugs audits into a peer that trains, serves or coordinates in a run with strangers; other runs import no audit code.

Other runs use `ResultCheck` (trainer), `Oversight` (server) and `RunOversight` (coordinator), which accept all work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network.task_transport import TaskTransport
from lightning_swarm.protocol import rpc
from lightning_swarm.protocol.messages.run import Manifest
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.protocol.settings import RunSettings
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.oversight import NO_OVERSIGHT, Oversight
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.server.step_handlers import StepHandlers


def allow_run(manifest: Manifest) -> None:
    """Raise `ConfigError` if strangers serve the run but their work could not be audited."""
    if manifest.settings.has_strangers:
        from lightning_swarm.coordinator.audit.auditable import check_auditable

        check_auditable(manifest)


def oversee_results(context: PipelineContext, run: RunState, *, max_in_flight: int) -> None:
    """If strangers serve the run, check the results that this trainer receives, and send servers' work to auditors."""
    if run.manifest.settings.has_strangers:
        from lightning_swarm.client.audit.checked_results import CheckedResults
        from lightning_swarm.client.audit.sender import AuditSender

        context.results = CheckedResults(lambda: run.coordinator)
        AuditSender(context, run, max_in_flight=max_in_flight)  # kept alive by the handlers that it registers


def overseer(
    context: ServerContext, steps: StepHandlers, model: Callable[[], PeerModel]
) -> Callable[[RunSettings], Oversight]:
    """Return a function from a run's settings to its audit hooks; outside of audited runs, audit calls are refused."""
    max_bytes = context.limits.max_message_bytes
    audit_transport = TaskTransport(
        context.transport,
        [rpc.SKETCH.name, rpc.FINDINGS.name, rpc.PROJECT.name, rpc.EXAMINE.name],
        {rpc.AUDIT.name: max_bytes, rpc.REPLACE_MEAN.name: max_bytes, rpc.KEPT_WORK.name: 0, rpc.VECTOR.name: 0},
        idle="is in no audited run",
        refusal=ProtocolError,
    )

    @cache  # the handlers are registered once, for all audited runs of this server
    def audited() -> Oversight:
        from lightning_swarm.coordinator.audit.oversight import RunAudits
        from lightning_swarm.server.audit.borrowed import BorrowedStages
        from lightning_swarm.server.audit.handlers import AuditHandlers
        from lightning_swarm.server.audit.join_checks import AuditedJoinChecks
        from lightning_swarm.server.audit.mean_checks import AuditedRoundLog, MeanChecks
        from lightning_swarm.server.audit.work_log import AuditedWorkLog

        borrowed = BorrowedStages(context, steps, model)
        work = AuditedWorkLog(context.membership, steps.sums, borrowed, max_bytes=context.limits.cache_bytes)
        AuditHandlers(context, steps, borrowed, work, audit_transport)
        MeanChecks(context, steps, audit_transport)
        return Oversight(work, AuditedRoundLog(context.membership), AuditedJoinChecks(context, steps), RunAudits.after)

    return lambda settings: audited() if settings.has_strangers else NO_OVERSIGHT
