"""A trainer that keeps its inputs and repeats them on request, for tests of closings after a fault."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_swarm.core.errors import PeerError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryTransport
from lightning_swarm.protocol.messages.calls import CallKey, Receipt
from lightning_swarm.protocol.messages.step import Record, Replay, ReplayReply, ReplayRequest
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import BACKWARD, FORWARD, REPLAY
from tests.unit.swarm import Swarm, key, result_of, rows


class Replayer:
    """Trains in a swarm, and answers REPLAY.

    Args:
        swarm: The swarm.
        transport: The transport of the trainer that gets the calls; None: the lead's.
    """

    def __init__(self, swarm: Swarm, transport: MemoryTransport | None = None) -> None:
        self.swarm = swarm
        self.copies: dict[Receipt, tuple[CallKey, Tensor, Tensor, float]] = {}
        self.avoid: set[PeerId] = set()  # servers that get no microbatch
        self.replayed: list[Replay] = []
        (transport or swarm.trainer).handle_call(REPLAY.name, self._handle)

    def route(self, choice: int, avoid: Sequence[PeerId] = ()) -> list[PeerId]:
        """Return a route; successive choices go round the servers that are there."""
        rosters = [[member.peer_id for member in roster] for roster in self.swarm.steps.run.rosters]
        del rosters[len(self.swarm.rosters) :]  # the trainers' own stage
        there = [[peer for peer in roster if peer not in {*self.avoid, *avoid}] for roster in rosters]
        return [roster[choice % len(roster)] for roster in there]

    async def through(self, k: CallKey, x: Tensor, *, weight: float = 1.0, choice: int = 0) -> None:
        """Call `Swarm.through`, keeping copies of the inputs."""
        output = await self.swarm.through(k, x, route=self.route(choice), weight=weight)
        self.copies[k.receipt] = (k, x, output, weight)

    async def batch(self, *microbatches: Tensor) -> bool:
        """Call `Swarm.batch`, keeping copies of the inputs."""
        steps = self.swarm.steps
        grant = await steps.grant(sum(map(len, microbatches)))
        done = []
        for index, x in enumerate(microbatches):
            k = key(grant.first, index, step=grant.step)
            await self.through(k, x, weight=grant.weight, choice=index)
            done.append(k.receipt)
        return await steps.done(grant.lease, done)

    async def step(self, *microbatches: Tensor) -> Record:
        """Run a step of one batch."""
        if not await self.batch(*microbatches):
            await self.swarm.steps.close()
        record = await self.swarm.record(self.swarm.steps.version)
        self.copies.clear()
        return record

    async def _handle(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, ReplayRequest)
        lost: list[Receipt] = []
        unreached: set[PeerId] = set()
        for one in request.work:
            self.replayed.append(one)
            if one.receipt not in self.copies:
                lost.append(one.receipt)
                continue
            gone = set(request.avoid)
            while not gone & set(one.holders.values()):
                try:
                    await self._send_again(one, sorted(gone))
                    break
                except PeerError:
                    gone |= await self._gone()
            unreached |= gone & set(one.holders.values())
        return encode(ReplayReply(lost=lost, unreached=sorted(unreached)))

    async def _gone(self) -> set[PeerId]:
        async def ping(peer: PeerId) -> PeerId | None:
            try:
                await self.swarm.trainer.ping(peer)
            except PeerError:
                return peer
            return None

        return {peer for peer in await gather(ping(peer) for peer in self.swarm.steps.run.servers) if peer}

    async def _send_again(self, one: Replay, avoid: Sequence[PeerId]) -> None:
        swarm = self.swarm
        k, x, output, weight = self.copies[one.receipt]
        route = self.route(k.index, avoid)
        for stage, peer in one.holders.items():
            route[stage] = peer
        last = len(route) - 1
        for stage in range(last):
            await swarm.send(route[stage], FORWARD.name, swarm.forward_request(k, stage, route, x))
        for stage in range(last, min(one.holders) - 1, -1):
            source = result_of(route[stage - 1], k, stage - 1, "forward") if stage else None
            request = swarm.backward_request(
                k,
                stage,
                route,
                output,
                weight=weight,
                accumulate=stage in one.holders,
                again=(None if stage else (x,), {}),
                inputs=source,
            )
            await swarm.send(route[stage], BACKWARD.name, request)
        for stage, peer in one.holders.items():
            await swarm.tickets.wait(result_of(peer, k, stage, "backward"), timeout=30.0)


def batch_of(step: int, num_microbatches: int) -> list[Tensor]:
    return [rows(100 * step + i) for i in range(num_microbatches)]
