"""Answers requests of a closing step: replays microbatches for servers, and avoids excluded servers."""

from __future__ import annotations

import asyncio

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.microbatch_run import replay
from lightning_swarm.client.pipeline.recovery import GradientHolderGone
from lightning_swarm.core.errors import LeaseRevoked, ProtocolError, SwarmError
from lightning_swarm.core.tasks import gather_bounded
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import CallKey, Receipt
from lightning_swarm.protocol.messages.step import AvoidRequest, Replay, ReplayReply, ReplayRequest
from lightning_swarm.protocol.rpc import AVOID, REPLAY
from lightning_swarm.protocol.run_state import RunState


def avoid_when_asked(context: PipelineContext, run: RunState) -> None:
    """Serve the coordinator's requests to avoid servers until the next record."""

    async def handle(caller: PeerId, request: AvoidRequest) -> None:
        run.check_generation(request.generation)
        context.avoid(request.peers, request.lost, step=request.step, reason=request.reason)

    AVOID.serve(context.transport, handle, admit=run.check_coordinator)


class Replayer:
    """Replays microbatches from this trainer's copies for servers, on the event loop, without the main thread."""

    def __init__(self, context: PipelineContext, run: RunState, *, max_in_flight: int) -> None:
        self._context = context
        self._run = run
        self._max_in_flight = max_in_flight
        self._lock = asyncio.Lock()
        REPLAY.serve(context.transport, self._handle)

    async def _handle(self, caller: PeerId, request: ReplayRequest) -> ReplayReply:
        if caller not in self._run.servers:
            raise ProtocolError(f"only servers of the run may request replays, and {caller} is none")
        self._run.check_generation(request.generation)
        last = len(self._context.routers) - 1
        for work in request.work:
            if not work.holders or max(work.holders) > last:
                raise ProtocolError(f"a replay must name holders in stages 0..{last}, got {sorted(work.holders)}")
        # The lock is held for whole replays: two replays of one microbatch at once would cancel each other's calls, and
        # a repeated request finds the gradients already added. The lock cannot deadlock, because each replay has a
        # deadline and waits for nothing that requests a replay itself.
        async with self._lock:
            lost, unreached = set[Receipt](), set[PeerId]()
            works = [self._replay(request, work, lost, unreached) for work in request.work]
            await gather_bounded(works, self._max_in_flight)
        return ReplayReply(lost=sorted(lost), unreached=sorted(unreached))

    async def _replay(self, request: ReplayRequest, work: Replay, lost: set[Receipt], unreached: set[PeerId]) -> None:
        """Replay one microbatch; if that fails, add it to `lost`, or its holder to `unreached`."""
        copy = await self._context.replay_buffer.find(CallKey.of(request.generation, request.step, work.receipt))
        if copy is None:
            lost.add(work.receipt)
            return
        try:
            await replay(self._context, copy, work.holders, frozenset(request.avoid))
        except GradientHolderGone as error:
            unreached.add(error.peer)
        except SwarmError as error:
            self._context.events.note("retry", step=request.step, reason=str(error))
            # A revoked lease means that a coordinator, perhaps another one, has frozen the sums once more. It will
            # request missing microbatches itself. Any other error means that no route leads through the other stages,
            # so the microbatch will not count in this step.
            if not isinstance(error, LeaseRevoked):
                lost.add(work.receipt)
