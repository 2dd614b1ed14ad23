"""Builds the parts of a server that only audited runs have."""

from __future__ import annotations

from collections.abc import Callable

from lightning_swarm.network import Transport
from lightning_swarm.server.audit.borrowed import BorrowedStages
from lightning_swarm.server.audit.handlers import AuditHandlers
from lightning_swarm.server.audit.join_checks import AuditedJoinChecks
from lightning_swarm.server.audit.mean_checks import AuditedRoundLog, MeanChecks
from lightning_swarm.server.audit.work_log import AuditedWorkLog
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.oversight import Oversight
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.server.step_handlers import StepHandlers


def audited(context: ServerContext, steps: StepHandlers, model: Callable[[], PeerModel], role: Transport) -> Oversight:
    """Return the hooks of audited runs, and answer the calls of audits in a role."""
    borrowed = BorrowedStages(context, steps, model)
    work = AuditedWorkLog(context.membership, steps.sums, borrowed, max_bytes=context.limits.cache_bytes)
    AuditHandlers(context, steps, borrowed, work, role)
    MeanChecks(context, steps, role)
    return Oversight(work, AuditedRoundLog(context.membership), AuditedJoinChecks(context, steps))
