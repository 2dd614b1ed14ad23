"""Choice of servers for inference sessions: the interface, and its implementation for the servers of a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightning_swarm.client.inference.adapters import PackedAdapter
from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import PeerError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.messages.inference import SessionSteps, SessionStepsReply
from lightning_swarm.protocol.rpc import SESSION_STEPS


class SessionRoutes(Protocol):
    """Chooses the servers of a client's sessions, and sends them steps. A route names a server for each stage."""

    @property
    def transport(self) -> Transport:
        """The client's transport."""
        ...

    @property
    def timeout(self) -> float:
        """Maximum seconds for a call, and for a step in which no server is replaced."""
        ...

    def begin(self, rows: int, like: Sequence[PeerId] = ()) -> list[PeerId]:
        """Choose a server for each stage of a session with this many rows; the route `like` if its servers are fit."""
        ...

    def replace(self, stage: int, route: Sequence[PeerId], rows: int) -> PeerId:
        """Choose another server for a stage of a route; return the same server if there is no other."""
        ...

    def end(self, route: Sequence[PeerId]) -> None:
        """Release the route of a session that has ended."""
        ...

    def servers(self, stage: int) -> Collection[PeerId]:
        """Return a stage's servers."""
        ...

    def eject(self, stage: int, peer: PeerId, *, version: int, error: PeerError) -> None:
        """Eject a server for a while, because it failed in a step with weights of this version."""
        ...

    def is_ejected(self, stage: int, peer: PeerId) -> bool:
        """Return whether a server is ejected because of a recent failure."""
        ...

    async def send_adapter(self, peer: PeerId, adapter: PackedAdapter, *, again: bool) -> None:
        """Send a server an adapter unless it was sent before; with `again`, in any case."""
        ...

    async def send(self, peer: PeerId, request: SessionSteps, tensors: Sequence[Tensor]) -> SessionStepsReply:
        """Send steps; raise `Refusal` if the server answers with an error that no server should send."""
        ...


@dataclass(frozen=True)
class RunRoutes:
    """Routes through the servers of a run, chosen as for microbatches."""

    context: PipelineContext

    @property
    def transport(self) -> Transport:
        """This trainer's transport."""
        return self.context.transport

    @property
    def timeout(self) -> float:
        """Maximum seconds for a call."""
        return self.context.timeout

    def begin(self, rows: int, like: Sequence[PeerId] = ()) -> list[PeerId]:
        """Choose a server for each stage; ignores `like`, because servers of a run keep no prefixes."""
        return [self._choose(stage, rows) for stage in range(len(self.context.routers))]

    def replace(self, stage: int, route: Sequence[PeerId], rows: int) -> PeerId:
        """Choose another server for a stage, or the same if there is no other."""
        return self._choose(stage, rows, avoid=frozenset({route[stage]}))

    def _choose(self, stage: int, rows: int, avoid: frozenset[PeerId] = frozenset()) -> PeerId:
        """Choose a server as for a microbatch, but charge nothing, because a session's steps come much later."""
        router = self.context.routers[stage]
        charge = router.choose(rows, now_s=now_s(), avoid=avoid)
        router.release(charge)
        return charge.peer

    def end(self, route: Sequence[PeerId]) -> None:
        """Do nothing, because routers keep no account of sessions."""

    def servers(self, stage: int) -> Collection[PeerId]:
        """Return a stage's servers."""
        return self.context.routers[stage].peers.keys()

    def eject(self, stage: int, peer: PeerId, *, version: int, error: PeerError) -> None:
        """Eject a server from the routes of sessions and microbatches."""
        self.context.eject(stage, peer, version, error)

    def is_ejected(self, stage: int, peer: PeerId) -> bool:
        """Return whether the stage's router avoids a server."""
        return self.context.is_ejected(stage, peer)

    async def send_adapter(self, peer: PeerId, adapter: PackedAdapter, *, again: bool) -> None:
        """Raise, because sessions of a run have no adapters."""
        raise NotImplementedError

    async def send(self, peer: PeerId, request: SessionSteps, tensors: Sequence[Tensor]) -> SessionStepsReply:
        """Send steps; enlist this trainer again if the server does not know it."""
        return await self.context.send(peer, SESSION_STEPS, request, tensors)
