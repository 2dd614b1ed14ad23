"""The state and the services that all parts of one coordinator share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from lightning_swarm.coordinator.consensus import Proposer
from lightning_swarm.coordinator.step.step_state import StepState
from lightning_swarm.core.errors import NotCoordinator
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.network import Transport
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.run_state import RunState


@dataclass(eq=False)
class CoordinatorContext:
    """The run, the network, the limits and the tasks of one coordinator."""

    transport: Transport
    run: RunState  # of the coordinator's own server, which applies the records
    proposer: Proposer
    step_state: StepState
    limits: Limits
    events: EventLog
    tasks: TaskOwner = field(default_factory=TaskOwner)  # those of one run generation

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work in a task that ends with this run generation, or with the role."""
        if not self.tasks.is_running:  # a call that waited for something while this role ended
            work.close()
            raise self.not_any_more()
        return self.tasks.spawn(work)

    def not_any_more(self) -> NotCoordinator:
        """The error for callers that wait here when the role ends."""
        return NotCoordinator(f"{self.transport.peer_id} does not coordinate any more")

    async def restart_tasks(self) -> None:
        """End the tasks of a run generation; those of the next one may begin before the old ones are over."""
        tasks, self.tasks = self.tasks, TaskOwner()
        await self.tasks.start()
        await tasks.close()
