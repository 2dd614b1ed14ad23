"""The calls of one microbatch: what each peer of its route is told, linked by tickets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.replay_buffer import Microbatch
from lightning_swarm.client.pipeline.router import PeerCharge
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, PeerError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import (
    BackwardRequest,
    CallReport,
    CancelReply,
    CancelRequest,
    Direction,
    ForwardRequest,
    Ticket,
)
from lightning_swarm.protocol.messages.wire import decode
from lightning_swarm.protocol.methods import BACKWARD, CANCEL, FORWARD


class StageCallFailed(Exception):
    """A peer of the route did not do its part, or could not be asked.

    Args:
        stage: Whose peer.
        peer: Which.
        error: What it answered, or what became of asking it.
    """

    def __init__(self, stage: int, peer: PeerId, error: PeerError) -> None:
        super().__init__(f"stage {stage} on {peer}: {error}")
        self.stage = stage
        self.peer = peer
        self.error = error


@dataclass(frozen=True)
class _InputSource:
    """Where a peer was told to get its input, or its gradient, from."""

    peer: PeerId
    source: PeerId | None
    recompute: PeerId | None = None

    def agrees(self, now: _InputSource) -> bool:
        """Whether who was told this gets what `now` says, if it is done or under way."""
        return self.source == now.source and self.recompute in (None, now.recompute)


class StageCalls:
    """Sends the calls of one microbatch. What is sent twice to a peer is done once, there.

    Args:
        link: Network and routers.
        microbatch: What is computed.
        holders: Of a microbatch that is replayed: who adds its gradients, by stage; the others add nothing.

    Attributes:
        route: Who computes each stage.
        gradients: For each of the output's tensors its gradient or None, as they travel, when they are known.
    """

    def __init__(
        self, link: PipelineContext, microbatch: Microbatch, holders: Mapping[int, PeerId] | None = None
    ) -> None:
        self._link = link
        self._microbatch = microbatch
        self._holders = holders
        self._told: dict[tuple[int, Direction], _InputSource] = {}
        self.route: list[PeerCharge] = []
        self.gradients: serialization.Tree = []

    @property
    def step(self) -> int:
        """Of the run."""
        return self._microbatch.key.step

    @property
    def last_stage(self) -> int:
        """The last stage."""
        return len(self._microbatch.extras) - 1

    @property
    def gradient_end(self) -> int:
        """The last stage that gets a gradient; behind the last one, if none does."""
        if self._holders is not None:
            return min(self._holders)
        return 0 if self._microbatch.mode.input_grad else self._microbatch.first_trained

    def accumulates(self, stage: int) -> bool:
        """Whether the stage's peer shall add the gradient to its sum."""
        if self._holders is not None:
            return stage in self._holders
        return stage >= self._microbatch.first_trained

    def peer(self, stage: int) -> PeerId:
        """Who computes a stage."""
        return self.route[stage].peer

    def reroute(self, stage: int, avoid: frozenset[PeerId]) -> None:
        """Choose another peer for a stage. What the one before it was charged with it will not do."""
        router = self._link.routers[stage]
        router.release(self.route[stage])
        self.route[stage] = router.choose(self._microbatch.num_rows, now_s=now_s(), avoid=avoid)

    def release(self) -> None:
        """The microbatch is done, or given up: nobody is to do any more of it."""
        for router, charge in zip(self._link.routers, self.route, strict=False):
            router.release(charge)

    def untold(self, end: int) -> list[int]:
        """The stages before `gradient_end` whose peers, as the route has it now, were never told to go forward."""
        told = {stage: told.peer for (stage, direction), told in self._told.items() if direction == "forward"}
        return [stage for stage in range(end) if told.get(stage) != self.peer(stage)]

    # ------------------------------------------------------------------ telling

    async def send_forward(self, stage: int) -> bool:
        """Tell a peer to compute its stage. False: it is busy, and will not."""
        told = _InputSource(self.peer(stage), self.peer(stage - 1) if stage else None)
        await self._untell(stage, "forward", told)
        microbatch = self._microbatch
        structure, tensors = serialization.flatten(self._brought(stage))
        request = ForwardRequest(
            key=microbatch.key,
            stage_index=stage,
            mode=microbatch.mode,
            source=self._ticket(stage - 1, "forward") if stage else None,
            structure=structure,
            keep=stage >= self.gradient_end,
        )
        self._told[stage, "forward"] = told  # before it is sure: a call that breaks off may have come there
        with self._blaming(stage):
            try:
                await self._link.send(told.peer, FORWARD, request, tensors)
            except Busy:
                del self._told[stage, "forward"]
                return False
        return True

    async def send_backward(self, stage: int, *, recompute: bool = False) -> None:
        """Tell a peer to compute its stage's gradients.

        Args:
            stage: Which.
            recompute: Say how to do the forward again, for a peer that kept nothing of it.
        """
        source = self.peer(stage + 1) if stage < self.last_stage else None
        told = _InputSource(self.peer(stage), source, self.peer(stage - 1) if recompute and stage else None)
        await self._untell(stage, "backward", told)
        microbatch = self._microbatch
        again = self._brought(stage) if recompute else None
        structure, tensors = serialization.flatten((None if source else self.gradients, again))
        request = BackwardRequest(
            key=microbatch.key,
            stage_index=stage,
            mode=microbatch.mode,
            weight=microbatch.weight,
            accumulate=self.accumulates(stage),
            source=self._ticket(stage + 1, "backward") if source else None,
            structure=structure,
            inputs=self._ticket(stage - 1, "forward") if recompute and stage else None,
        )
        self._told[stage, "backward"] = told
        with self._blaming(stage):
            await self._link.send(told.peer, BACKWARD, request, tensors)

    def _brought(self, stage: int) -> serialization.Tree:
        """What a stage gets of the trainer itself."""
        return (None if stage else self._microbatch.inputs, self._microbatch.extras[stage])

    async def cancel(self, stage: int, direction: Direction) -> bool:
        """Tell a peer to leave a call undone. True: too late, the gradient is in its sum."""
        request = CancelRequest(key=self._microbatch.key, stage_index=stage, direction=direction)
        self._told.pop((stage, direction), None)
        with self._blaming(stage):
            return decode(await self._link.send(self.peer(stage), CANCEL, request, ()), CancelReply).added

    async def _untell(self, stage: int, direction: Direction, now: _InputSource) -> None:
        """Who waits at a peer that left the route would take a second call for a repetition of the first."""
        told = self._told.get((stage, direction))
        if told is not None and told.peer == now.peer and not told.agrees(now):
            await self.cancel(stage, direction)

    # ------------------------------------------------------------------ waiting

    async def wait(self, stage: int, direction: Direction, *, timeout: float | None = None) -> CallReport:
        """Wait for a call's end, `timeout` seconds at most, or as long as the stage's peer may take."""
        if timeout is None:
            only = self._holders is not None and stage in self._holders
            timeout = self._link.timeout if only else self._link.patience_s(stage, self.route[stage])
        with self._blaming(stage):
            return decode(await self._link.tickets.wait(self._ticket(stage, direction), timeout=timeout), CallReport)

    async def fetch(self, stage: int, direction: Direction) -> tuple[Message, CallReport]:
        """The tensors of a call, when they exist, and its report. All stages before it may take their time."""
        stages = range(stage + 1) if direction == "forward" else range(stage, stage + 1)
        timeout = min(sum(self._link.patience_s(one, self.route[one]) for one in stages), self._link.timeout)
        with self._blaming(stage):
            message, report = await self._link.tickets.fetch_reported(self._ticket(stage, direction), timeout=timeout)
            return message, decode(report, CallReport)

    def _ticket(self, stage: int, direction: Direction) -> Ticket:
        return Ticket(peer_id=self.peer(stage), name=self._microbatch.key.name(stage, direction))

    @contextmanager
    def _blaming(self, stage: int) -> Iterator[None]:
        peer = self.peer(stage)
        try:
            yield
        except PeerError as error:
            raise StageCallFailed(stage, peer, error) from error
