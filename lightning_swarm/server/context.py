"""The resources that all parts of one server share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import TypeVar

from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.executor import FIRST, Executor

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class ServerContext:
    """The network, the compute thread, the limits and the log that all parts of one server use."""

    transport: Transport
    tickets: TicketStore  # where results wait to be fetched
    executor: Executor
    boot_id: int  # tells this life of the process from others
    limits: Limits
    events: EventLog
    connect: Callable[[], Awaitable[None]]  # makes the run's other servers reachable
    announce: Callable[[PeerId], Awaitable[None]]  # tells later joiners which peer coordinates the run
    hosts: Collection[PeerId] = ()  # the peers named at the start; they may end this one while no run has it
    tasks: TaskOwner = field(default_factory=TaskOwner)

    @property
    def me(self) -> Member:
        """This server in this life of its process."""
        return Member(peer_id=self.transport.peer_id, boot_id=self.boot_id)

    async def compute(self, run: Callable[[], _T]) -> _T:
        """Run something on the compute thread, before all microbatches that wait there."""
        return (await self.executor.submit(FIRST, run))[0]
