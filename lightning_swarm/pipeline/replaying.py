"""A trainer's answer to the coordinator when gradients were lost: it sends their microbatches again."""

from __future__ import annotations

import asyncio

from lightning_swarm.errors import LeaseRevoked, ProtocolError, StepError
from lightning_swarm.network import PeerId
from lightning_swarm.pipeline.link import Link
from lightning_swarm.pipeline.passage import replay
from lightning_swarm.pipeline.recovery import HolderGone
from lightning_swarm.run_state import RunState
from lightning_swarm.steps import REPLAY
from lightning_swarm.tasks import gather_bounded
from lightning_swarm.types.calls import CallKey, Receipt
from lightning_swarm.types.steps import Replay, ReplayReply, ReplayRequest
from lightning_swarm.types.wire import decode, encode


class Replayer:
    """Answers `REPLAY` on the swarm's loop, whatever the main thread does.

    Args:
        link: Of this trainer's passages; its copies are what is sent.
        run: The run as this trainer knows it.
        max_in_flight: Microbatches under way at once.
    """

    def __init__(self, link: Link, run: RunState, *, max_in_flight: int) -> None:
        self._link = link
        self._run = run
        self._max_in_flight = max_in_flight
        self._one_by_one = asyncio.Lock()
        link.transport.handle_call(REPLAY, self._handle)

    async def _handle(self, caller: PeerId, body: bytes) -> bytes:
        if caller not in self._run.servers:
            raise ProtocolError(f"only servers of the run ask for replays, and {caller} is none")
        request = decode(body, ReplayRequest)
        self._run.check_generation(request.generation)
        for one in request.work:
            if not one.holders or max(one.holders) >= len(self._link.routers):
                raise ProtocolError(
                    f"a replay must name holders in some of the {len(self._link.routers)} stages, got {one.holders}"
                )
        # Over whole passages: a request that is repeated then finds all done, where two passages of one microbatch at
        # once would give up each other's calls. Each has its deadline, and nothing that it waits for asks for a replay.
        async with self._one_by_one:
            lost, unreached = set[Receipt](), set[PeerId]()
            works = [self._replay(request, one, lost, unreached) for one in request.work]
            await gather_bounded(works, self._max_in_flight)
        return encode(ReplayReply(lost=sorted(lost), unreached=sorted(unreached)))

    async def _replay(self, request: ReplayRequest, one: Replay, lost: set[Receipt], unreached: set[PeerId]) -> None:
        """Do one of them; note what cannot be done."""
        copy = await self._link.copies.find(CallKey.of(request, one.receipt))
        if copy is None:
            lost.add(one.receipt)
            return
        try:
            await replay(self._link, copy, one.holders, frozenset(request.avoid))
        except HolderGone as error:
            unreached.add(error.peer)
        except LeaseRevoked as error:  # the sums are frozen anew, or by another: it is asked for again, if it is missed
            self._link.events.note("retry", step=request.step, reason=str(error))
        except StepError as error:  # no way leads through the stages above: it will not be in this step
            self._link.events.note("retry", step=request.step, reason=str(error))
            lost.add(one.receipt)
