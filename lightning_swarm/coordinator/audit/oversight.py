"""The oversight of an audited run: makes the audits of each step, and remembers the findings of earlier steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from typing_extensions import override

from lightning_swarm.coordinator.audit.auditable import check_trains_from_the_start
from lightning_swarm.coordinator.audit.policy import AuditMemory
from lightning_swarm.coordinator.audit.step_audits import StepAudits
from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.server_calls import ServerCalls
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.coordinator.step.oversight import RunOversight
from lightning_swarm.core.clock import now_s
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import StageManifest, StepChange
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.queries import by_preference
from lightning_swarm.protocol.run_state import RunState


class RunAudits(RunOversight):
    """Audits the steps of a run."""

    def __init__(self, memory: AuditMemory | None = None) -> None:
        self.memory = memory or AuditMemory()
        self.convicted = self.memory.convicted

    @classmethod
    def after(cls, former: RunOversight) -> RunAudits:
        """Return the audits of a peer that begins to coordinate, with its findings as a former coordinator, if any."""
        return former.following() if isinstance(former, RunAudits) else cls()

    @override
    def following(self) -> RunAudits:
        return RunAudits(self.memory.following())

    @override
    def begin(self, run: RunState) -> None:
        # Only a former coordinator knows which work it audited, so all work counts as unaudited.
        if run.version > run.manifest.first_step:
            for peer in run.servers:
                self.memory.standing.note_counted(peer, run.version - 1, None)

    @override
    def of_step(
        self, context: CoordinatorContext, servers: ServerCalls, step: OpenStep, trained: Collection[str]
    ) -> StepAudits:
        return StepAudits(context, servers, step, trained, self.memory)

    @override
    def allow_change(self, change: StepChange, stages: Sequence[StageManifest]) -> None:
        if change.selection is not None:
            check_trains_from_the_start(change.selection, stages)

    @override
    def note_silence(self, peer: PeerId, step: int) -> None:
        # The server may not join for a while, or it could delay the run again and again.
        self.memory.silence_backoff.note(peer, step, now_s=now_s())

    @override
    def wait_s(self, peer: PeerId) -> float:
        return self.memory.silence_backoff.wait_s(peer, now_s=now_s())

    @override
    def goes_back(self, run: RunState, step: int, convicted: Collection[PeerId]) -> bool:
        settings, standing = run.manifest.settings, self.memory.standing
        if not settings.goes_back or not convicted:
            return False
        versions = {snapshot.version for snapshot in run.snapshots}
        # The version to which the run would roll back.
        version = next(iter(by_preference(versions, run.sound_version_after(step))), 0)
        all_convicted = {*run.electorate.convicted, *convicted}  # their audits prove nothing
        return any(standing.has_counted(peer, version, all_convicted) for peer in all_convicted)

    @override
    def note_committed(self, record: Record) -> None:
        for conviction in record.convicted or ():
            self.convicted.pop(conviction.peer, None)  # the record excludes the peer from now on
